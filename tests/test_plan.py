"""A plan: its tables against a count by hand, its calls against the float64 recurrence, and what it refuses."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import kernelreg
from kernelreg import gdn
from kernelreg.gdn import chunk_gated_delta_rule, plan
from kernelreg.ops import operation_named
from kernelreg.ops.gdn_chunks import chunk_tables
from kernelreg.ops.gdn_plan import plan_of
from tests.gdn_cases import EXACT, Call, expected, gdn_call, relative
from tests.machines import machine

LENGTHS = st.lists(st.integers(0, 200), max_size=6)


def edges_of(lengths: list[int]) -> list[int]:
    return [sum(lengths[:place]) for place in range(len(lengths) + 1)]


def counted(edges: tuple[int, ...]) -> tuple[list[list[int]], list[int]]:
    """Chunk by chunk: each one's sequence and number, and the chunks before each sequence."""
    rows, before = [], [0]
    for sequence, (start, end) in enumerate(pairwise(edges)):
        number = 0
        while start + 64 * number < end:
            rows.append([sequence, number])
            number += 1
        before.append(len(rows))
    return rows, before


@contextmanager
def forced(function: Callable[..., Any]) -> Iterator[None]:
    """A backend of one kernel, and no other."""
    module = ModuleType("kernelreg_test_plan")
    module.run = function  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    accepts = {"features": sorted(operation_named("gdn").features)}
    row = {"operation": "gdn.chunk", "name": "any", "function": "run", "accepts": accepts}
    undo = kernelreg.register({"schema": 1, "name": "any", "adapter": module.__name__, "kernel": [row]})
    try:
        with kernelreg.use(backend="any"):
            yield
    finally:
        undo()
        del sys.modules[module.__name__]


def call_of(tokens: int, sequences: int, seed: int = 0) -> Call:
    call = gdn_call(B=1, T=tokens, H=2, HV=4, K=16, V=24, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    return call | {"initial_state": torch.randn(sequences, 4, 16, 24, generator=generator)}


@settings(max_examples=100, deadline=None)
@given(batches=st.lists(LENGTHS, min_size=1, max_size=3), more_tokens=st.integers(0, 150), more=st.integers(0, 3))
def test_the_tables_are_those_that_one_counts(batches: list[list[int]], more_tokens: int, more: int) -> None:
    tokens = max(map(sum, batches)) + more_tokens
    sequences = max(map(len, batches)) + more
    held = plan(edges_of(batches[0]), max_tokens=tokens, max_sequences=sequences, device="cpu")
    buffers = [held.cu_seqlens, held.outside, *held.full]
    places = [each.data_ptr() for each in buffers]
    for lengths in batches:
        held.update(edges_of(lengths))
        padded = edges_of(lengths + [0] * (sequences - len(lengths)))
        assert held.cu_seqlens.tolist() == held.cu_seqlens_cpu.tolist() == list(held.edges) == padded
        rows, before = counted(held.edges)
        assert held.chunks.indices.tolist() == rows
        assert held.full.offsets.tolist() == held.chunks.offsets.tolist() == before
        used = held.full.indices.tolist()
        assert used[: len(rows)] == rows
        # What is too much lies behind sequence 0, however long it becomes.
        assert all(sequence == 0 and 64 * number >= tokens for sequence, number in used[len(rows) :])
        assert held.outside.tolist() == [token >= padded[-1] for token in range(tokens)]
        filled = [place for place, (start, end) in enumerate(pairwise(padded)) if end > start]
        assert held.sequences.packed.tolist() == [0, *(padded[place + 1] for place in filled)]
        if len(filled) < sequences:
            assert held.sequences.filled is not None
            assert held.sequences.filled.tolist() == filled
        assert [each.data_ptr() for each in (held.cu_seqlens, held.outside, *held.full)] == places


@settings(max_examples=100, deadline=None)
@given(lengths=LENGTHS, behind=st.integers(0, 150))
def test_tables_made_without_the_host_are_the_plans(lengths: list[int], behind: int) -> None:
    edges, tokens = edges_of(lengths), sum(lengths) + behind
    held = plan(edges, max_tokens=tokens, device="cpu")
    for made, wanted in zip(chunk_tables(torch.tensor(edges), tokens), held.full, strict=True):
        assert torch.equal(made, wanted)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_call_is_right_for_every_batch_that_its_plan_comes_to_hold(mode: Callable[[], Any]) -> None:
    held = plan([0, 3, 3, 130], max_tokens=200, max_sequences=5, device="cpu")
    with mode():
        for seed, edges in enumerate(([0, 3, 3, 130], [0, 200], [0, 40, 80, 120, 160, 199], [0], [0, 0, 65])):
            call = call_of(200, 5, seed)
            clean = {name: value.clone() if isinstance(value, Tensor) else value for name, value in call.items()}
            for name in ("q", "k", "v", "g", "beta"):
                call[name][:, edges[-1] :] = float("nan")
                clean[name][:, edges[-1] :] = 0
            held.update(torch.tensor(edges, dtype=torch.int32))
            o, final = chunk_gated_delta_rule(**call, plan=held)
            wanted_o, wanted_final = expected({**clean, "cu_seqlens": held.cu_seqlens_cpu})
            assert final is not None
            assert relative(o, wanted_o) <= EXACT[torch.float32]
            assert relative(final, wanted_final) <= EXACT[torch.float32]
            assert not o[:, edges[-1] :].any()
            empty = held.cu_seqlens_cpu.diff() == 0
            assert torch.equal(final[empty], call["initial_state"][empty])


def test_gradients_go_through_a_plan() -> None:
    held = plan([0, 30, 30, 90], max_tokens=100, device="cpu")
    call = call_of(100, 3)
    leaf, exact = (call["v"].detach().to(dtype, copy=True).requires_grad_() for dtype in (torch.float32, torch.float64))
    o, _ = chunk_gated_delta_rule(**{**call, "v": leaf}, plan=held)
    wanted, _ = expected({**call, "v": exact, "cu_seqlens": held.cu_seqlens_cpu})
    (found,) = torch.autograd.grad(o.square().sum(), [leaf])
    (right,) = torch.autograd.grad(wanted.square().sum(), [exact])
    assert relative(found, right) <= 1e-4


def test_every_backend_that_takes_cu_seqlens_takes_a_plan() -> None:
    """A kernel that knows no plan gets its edges on both sides."""
    seen: list[dict[str, Any]] = []

    def kernel(*tensors: Tensor, **words: Any) -> tuple[Tensor, None]:
        seen.append(words)
        return tensors[2], None

    held = plan([0, 10, 20], max_tokens=20, device="cpu")
    with forced(kernel):
        chunk_gated_delta_rule(**call_of(20, 2), plan=held)
    (words,) = seen
    assert "plan" not in words
    assert words["cu_seqlens"] is held.cu_seqlens
    assert plan_of(words["cu_seqlens"]) is held
    assert words["cu_seqlens_cpu"].tolist() == [0, 10, 20]


def test_a_plans_call_is_decided_once_and_again_where_sequences_become_empty() -> None:
    decided: list[frozenset[str]] = []
    undo = kernelreg.on_resolve(lambda resolution: decided.append(resolution.call.features))
    held = plan([0, 10, 20], max_tokens=20, device="cpu")
    call = call_of(20, 2)
    try:
        kernelreg.refresh()
        for edges in ([0, 10, 20], [0, 5, 20], [0, 20], [0, 1, 2]):
            held.update(edges)
            chunk_gated_delta_rule(**call, plan=held)
    finally:
        undo()
    assert ["empty-sequences" in features for features in decided] == [False, True]
    assert all("varlen" in features for features in decided)


def test_like_sees_what_a_plan_needs() -> None:
    held = plan([0, 10], max_tokens=20, max_sequences=3, device="cpu")
    like = {**call_of(20, 3), "plan": held}
    resolution = kernelreg.resolve("gdn", like=like)
    assert {"varlen", "empty-sequences"} <= resolution.call.features
    assert (resolution.call.tokens, resolution.call.sequences) == (20, 3)


def test_inside_torch_compile_a_plan_is_its_edges() -> None:
    held = plan([0, 10, 50], max_tokens=64, max_sequences=3, device="cpu")
    call = call_of(64, 3)

    def layer(batch: gdn.Plan, **words: Any) -> Tensor:
        return 2 * chunk_gated_delta_rule(**words, plan=batch)[0]

    graph = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for edges in ([0, 10, 50], [0, 64], [0, 1, 1, 33]):
            held.update(edges)
            wanted, _ = expected({**call, "cu_seqlens": held.cu_seqlens_cpu})
            assert relative(graph(held, **call), 2 * wanted) <= EXACT[torch.float32]


BROKEN: dict[str, tuple[Callable[[], object], str]] = {
    "behind max_tokens": (lambda: plan([0, 5], max_tokens=4, device="cpu"), "ends at 5; accepted: up to max_tokens=4"),
    "more than max_sequences": (
        lambda: plan([0, 1, 2], max_sequences=1, device="cpu"),
        "has 2 sequences; accepted: max_sequences=1",
    ),
    "not from 0": (lambda: plan([1, 2], device="cpu"), r"\[1, 2\]; accepted: from 0"),
    "going back": (lambda: plan([0, 3, 2], device="cpu"), "never back"),
    "no edges": (lambda: plan([], device="cpu"), "accepted: a tensor on the CPU or whole numbers"),
    "real numbers": (lambda: plan(torch.tensor([0.0, 1.0]), device="cpu"), "float32.*accepted: int32 or int64"),
    "a text": (lambda: plan("0 1", device="cpu"), "accepted: a tensor on the CPU"),  # type: ignore[arg-type]
    "on a device": (lambda: plan(torch.zeros(2, dtype=torch.int64, device="meta"), device="cpu"), "on meta; accepted"),
    "a negative maximum": (
        lambda: plan([0], max_tokens=-1, device="cpu"),
        "max_tokens is -1; accepted: a whole number",
    ),
    "a maximum that is none": (lambda: plan([0], max_sequences=True, device="cpu"), "max_sequences is True"),
    "no device": (lambda: plan([0], device="gpu"), "device is 'gpu'"),
    "another T": (
        lambda: chunk_gated_delta_rule(**call_of(9, 1), plan=plan([0, 8], device="cpu")),
        r"q is \[1, 9, 2, 16\]; accepted: \[1, 8, H, K\]",
    ),
    "another N": (
        lambda: chunk_gated_delta_rule(**call_of(8, 2), plan=plan([0, 8], device="cpu")),
        "initial_state is .*accepted",
    ),
    "two rows": (
        lambda: chunk_gated_delta_rule(**gdn_call(B=2, T=8), plan=plan([0, 8], device="cpu")),
        "packed in one row",
    ),
    "another device": (
        lambda: chunk_gated_delta_rule(**call_of(8, 1), plan=plan([0, 8], device="meta")),
        "q is on cpu; accepted: the plan's device, meta",
    ),
    "with cu_seqlens": (
        lambda: chunk_gated_delta_rule(
            **call_of(8, 1), plan=plan([0, 8], device="cpu"), cu_seqlens=torch.tensor([0, 8])
        ),
        "plan and cu_seqlens, whose place it takes",
    ),
    "no plan": (lambda: chunk_gated_delta_rule(**call_of(8, 1), plan=[0, 8]), "plan is a list; accepted"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_wrong_is_said(name: str) -> None:
    run, words = BROKEN[name]
    with pytest.raises(kernelreg.CallError, match=words):
        run()


def test_an_update_that_is_refused_changes_nothing() -> None:
    held = plan([0, 4, 9], max_tokens=10, device="cpu")
    before = held.cu_seqlens.clone(), held.edges, held.form
    for edges in ([0, 11], [0, 1, 2, 3], [0, 5, 4]):
        with pytest.raises(kernelreg.CallError):
            held.update(edges)
    assert torch.equal(held.cu_seqlens, before[0])
    assert (held.edges, held.form) == before[1:]


@pytest.mark.parametrize(
    ("features", "chosen", "refused"),
    [
        ({"capture-varlen"}, "flash_qla", {"flashinfer"}),
        ({"capture-varlen", "backward"}, "torch", {"flash_qla", "fla", "flashinfer"}),
        ({"capture"}, "flash_qla", set()),
    ],
)
def test_the_resolver_picks_what_can_be_captured_and_says_why_not_the_others(
    features: set[str], chosen: str, refused: set[str]
) -> None:
    resolution = kernelreg.resolve(
        "gdn",
        facts=machine("h200"),
        dtype="bfloat16",
        gate_dtype="float32",
        head_dim_k=128,
        head_dim_v=128,
        tokens=2048,
        features=features,
    )
    assert resolution.backend == chosen
    for candidate in resolution.candidates:
        if candidate.backend in refused:
            assert candidate.status == "rejected"
            assert candidate.reasons
