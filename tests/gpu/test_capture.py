"""Prefill and decode in a CUDA graph: right after every change that a plan, or its edges, may make. No call waits.

One head shape and dtype, so that a kernel compiles once: Qwen3-Next's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import kernelreg
from kernelreg.gdn import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule, plan
from kernelreg.ops import operation_named
from kernelreg.testing.plugin import Record
from tests.gdn_cases import Call, expected, gdn_call, pool_call, relative

HEADS: dict[str, Any] = {"H": 16, "HV": 32, "K": 128, "V": 128, "dtype": torch.bfloat16, "device": "cuda"}
BOUND = operation_named("gdn").tolerances["bfloat16"].forward
TOKENS, SEQUENCES = 512, 6
LAYOUTS = {
    "six, all tokens": [0, 64, 128, 200, 300, 500, 512],
    "one": [0, 512],
    "one short, NaN behind": [0, 33],
    "empty first, between and last": [0, 0, 130, 130, 131, 257, 257],
    "six of one token": [0, 1, 2, 3, 4, 5, 6],
    "none": [0],
    "six again": [0, 3, 66, 131, 260, 389, 450],
}
BACKENDS = [
    pytest.param(name, marks=pytest.mark.xdist_group(f"capture {name}")) for name in ("flash_qla", "fla", "torch")
]

Results = tuple[Tensor, Tensor | None]


def _call(seed: int) -> Call:
    """A call of one row of tokens, with states for every sequence that a plan may have."""
    call = gdn_call(B=1, T=TOKENS, seed=seed, **HEADS)
    states = torch.randn(SEQUENCES, 32, 128, 128, generator=torch.Generator().manual_seed(seed))
    return call | {"initial_state": 0.1 * states.to(call["q"].device)}


def _fill(call: Call, seed: int, end: int) -> Call:
    """Other data in the same tensors, NaN behind ``end``; gives what the reference may see."""
    seen = dict(call)
    for name, value in _call(seed).items():
        if isinstance(value, Tensor):
            seen[name] = value.clone()
            if name != "initial_state":
                value[:, end:] = float("nan")
                seen[name][:, end:] = 0
            call[name].copy_(value)
    return seen


def _captured(run: Callable[[], Results]) -> tuple[torch.cuda.CUDAGraph, Results]:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    return graph, results


def _worst(results: Results, seen: Call, edges: Tensor | None) -> float:
    """The larger error of outputs and states; outputs behind the last edge must be zero."""
    o, final = results
    assert final is not None
    wanted = expected(seen if edges is None else {**seen, "cu_seqlens": edges})
    if edges is not None:
        assert not o[:, int(edges[-1]) :].any()
        empty = edges.diff() == 0
        assert torch.equal(final[empty], seen["initial_state"][empty])
    return max(relative(o, wanted[0]), relative(final, wanted[1]))


@contextmanager
def _no_waiting() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_plans_graph_replays_for_every_layout(backend: str, record: Record) -> None:
    call, held = _call(0), plan([0, 100, 400], max_tokens=TOKENS, max_sequences=SEQUENCES, device="cuda")
    with torch.no_grad(), kernelreg.use(backend=backend):
        graph, results = _captured(lambda: chunk_gated_delta_rule(**call, plan=held))
        for seed, (name, edges) in enumerate(LAYOUTS.items()):
            seen = _fill(call, seed, edges[-1])
            with _no_waiting():
                held.update(edges)
                graph.replay()
            error = _worst(results, seen, held.cu_seqlens)
            record(f"CUDA graph: plan, {name}", backend, f"{error:.1e}")
            assert error <= BOUND, name


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_eager_call_with_a_plan_does_not_wait(backend: str, record: Record) -> None:
    call, held = _call(1), plan([0, 64, 500], max_tokens=TOKENS, max_sequences=SEQUENCES, device="cuda")
    with torch.no_grad(), kernelreg.use(backend=backend):
        chunk_gated_delta_rule(**call, plan=held)  # compiles
        for seed, (name, edges) in enumerate(LAYOUTS.items()):
            seen = _fill(call, seed, edges[-1])
            with _no_waiting():
                held.update(edges)
                results = chunk_gated_delta_rule(**call, plan=held)
            error = _worst(results, seen, held.cu_seqlens)
            record(f"plan without a graph: {name}", backend, f"{error:.1e}")
            assert error <= BOUND, name


@pytest.mark.parametrize("backend", BACKENDS)
def test_edges_without_a_plan_may_change_in_place(backend: str, record: Record) -> None:
    call, edges = _call(2), torch.tensor([0, 64, 64, 200, 300, 500, 512], device="cuda")
    with torch.no_grad(), kernelreg.use(backend=backend):
        graph, results = _captured(lambda: chunk_gated_delta_rule(**call, cu_seqlens=edges))
        for seed, other in enumerate(([0, 1, 129, 129, 256, 400, 401], [0, 512, 512, 512, 512, 512, 512])):
            seen = _fill(call, seed, other[-1])
            edges.copy_(torch.tensor(other))
            graph.replay()
            error = _worst(results, seen, edges)
            record(f"CUDA graph: edges changed in place to {other}", backend, f"{error:.1e}")
            assert error <= BOUND


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_dense_graph_replays_with_other_data(backend: str, record: Record) -> None:
    call = _call(3)
    call["initial_state"] = call["initial_state"][:1].clone()
    with torch.no_grad(), kernelreg.use(backend=backend):
        graph, results = _captured(lambda: chunk_gated_delta_rule(**call))
        for name, value in _call(4).items():
            if isinstance(value, Tensor):
                call[name].copy_(value[:1])
        graph.replay()
        error = _worst(results, call, None)
    record("CUDA graph: dense, other data", backend, f"{error:.1e}")
    assert error <= BOUND


def test_decode_is_captured(record: Record) -> None:
    """Eight steps of one graph on one pool, the slots changed between them."""

    def step(seed: int, slots: list[int]) -> Call:
        return pool_call([1] * 4, slots, pool=8, packed=False, seed=seed, **HEADS)

    call = step(0, [0, 1, 2, 3])
    call["state_v_first"] = False
    pool = call["initial_state"]
    with torch.no_grad():
        backend = kernelreg.resolve("gdn.recurrent", like=call).backend
        graph, (o, _) = _captured(lambda: fused_recurrent_gated_delta_rule(**call))
        worst = 0.0
        for seed in range(8):
            slots = [(seed + each) % 8 for each in range(3)] + [-1]
            for name, value in step(seed, slots).items():
                if isinstance(value, Tensor) and name != "initial_state":
                    call[name].copy_(value)
            wanted = expected({**call, "initial_state": pool.clone()})
            graph.replay()
            worst = max(worst, relative(o, wanted[0]), relative(pool, wanted[1]))
    record("CUDA graph: decode, 8 steps", str(backend), f"{worst:.1e}")
    assert worst <= BOUND


def test_what_cannot_be_captured_is_refused_before_anything_is_recorded() -> None:
    call, held = _call(5), plan([0, 100], max_tokens=TOKENS, max_sequences=SEQUENCES, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with (
        torch.no_grad(),
        kernelreg.use(backend="flashinfer"),
        pytest.raises(kernelreg.NoBackendError, match="capture-varlen"),
        torch.cuda.graph(graph),
    ):
        chunk_gated_delta_rule(**call, plan=held)
    assert float(torch.ones(3, device="cuda").sum()) == 3.0  # the stream works


def test_an_update_is_no_part_of_a_graph() -> None:
    held = plan([0, 100], max_tokens=TOKENS, max_sequences=SEQUENCES, device="cuda")
    with pytest.raises(kernelreg.CallError, match="captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        held.update([0, 200])
    assert held.edges[1] == 100
