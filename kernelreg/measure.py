"""Timing kernels side by side in one process: what ``tune`` and ``bench`` do. Imports torch.

A kernel's time is that of back-to-back calls of its adapter, queued without waiting, until the device is done with all
of them: what a layer waits for, whether that is the host or the device. The kernels take turns, and every second round
goes the other way, so that a clock that drifts or a card that warms up is nobody's advantage.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from kernelreg.adapters import load_function
from kernelreg.call import Call
from kernelreg.errors import AdapterError, KernelregError
from kernelreg.faults import fault_of
from kernelreg.gdn import call_like
from kernelreg.ops import operation_named
from kernelreg.profile import Failure, Point, Row, Timing
from kernelreg.session import Grounds
from kernelreg.workloads import Spot

Arguments = dict[str, Any]
Run = Callable[[], object]

#: Calls of a round at most: more of them say nothing new of a fast kernel.
_MOST = 200
#: Slots of a decode pool for each sequence of the batch: an engine keeps more states than it decodes at once.
_SLOTS = 2


class Effort(msgspec.Struct, frozen=True):
    """How much is measured of each kernel at each point.

    Attributes:
        repeats: rounds.
        seconds: of a round; one call where it takes longer.
    """

    repeats: int = 7
    seconds: float = 0.02


class Measured(msgspec.Struct, frozen=True):
    """What came of one spot.

    Attributes:
        point: the times; None where no kernel takes the call.
        refused: the kernels that do not take it, each with its first reason.
    """

    point: Point | None
    refused: dict[Row, str]


def measure(spot: Spot, grounds: Grounds, device: str, backends: Collection[str], effort: Effort) -> Measured:
    """Time every kernel that can run the spot's call.

    Args:
        grounds: by which it is told which can; nothing that ranks or pins is asked.
        backends: those to measure.

    Raises:
        KernelregError: the device failed, so that nothing more can be measured in this process.
    """
    wait = _waiting(device)
    with torch.set_grad_enabled(spot.workload.trains), _current(device):
        try:
            call = arguments(spot, device)
        except torch.OutOfMemoryError as error:
            return Measured(None, {("all", "kernels"): fault_of(error)})
        needs = _needs(spot, call)
        runs, failures, refused = _runs(spot, call, needs, grounds, backends)
        times, failed = side_by_side(runs, effort, wait)
        failures |= failed
    point = Point(
        operation=needs.operation,
        dtype=spot.dtype,  # type: ignore[arg-type]
        heads=spot.shape.heads,
        value_heads=spot.shape.value_heads,
        head_dim_k=spot.shape.head_dim_k,
        head_dim_v=spot.shape.head_dim_v,
        features=tuple(sorted(needs.features)),
        tokens=spot.tokens,
        sequences=spot.sequences,
        timings=tuple(_timing(row, each) for row, each in sorted(times.items())),
        failures=tuple(
            Failure(backend=backend, kernel=kernel, reason=reason[:1000])
            for (backend, kernel), reason in sorted(failures.items())
        ),
    )
    return Measured(point if times or failures else None, refused)


def side_by_side(
    runs: Mapping[Row, Run], effort: Effort, wait: Run, now: Callable[[], float] = time.perf_counter
) -> tuple[dict[Row, list[float]], dict[Row, str]]:
    """The seconds that a call of each takes, one figure a round; and of those that failed, why.

    Args:
        wait: returns when the device is done.
        now: the clock, in seconds.

    Raises:
        KernelregError: the device failed.
    """
    calls: dict[Row, int] = {}
    times: dict[Row, list[float]] = {}
    failed: dict[Row, str] = {}

    def timed(run: Run, count: int) -> float:
        start = now()
        for _ in range(count):
            run()
        wait()
        return (now() - start) / count

    for row, run in runs.items():
        with _kept(failed, row, wait):
            timed(run, 1)  # compiles, and tries what it can choose from
            timed(run, 1)
            calls[row] = max(1, min(_MOST, int(effort.seconds / max(timed(run, 1), 1e-9))))
            times[row] = []
    for turn in range(effort.repeats):
        for row in list(calls) if turn % 2 == 0 else list(reversed(calls)):
            if row not in failed:
                with _kept(failed, row, wait):
                    times[row].append(timed(runs[row], calls[row]))
    return {row: each for row, each in times.items() if row not in failed}, failed


@contextmanager
def _kept(failed: dict[Row, str], row: Row, wait: Run) -> Iterator[None]:
    """Keep why a kernel failed, as long as the device is well."""
    try:
        yield
    except (Exception, SystemExit) as error:
        failed[row] = fault_of(error)
        try:
            wait()
        except RuntimeError as lost:
            raise KernelregError(f"the device failed while {' '.join(row)} was measured: {fault_of(error)}") from lost


def _timing(row: Row, seconds: Sequence[float]) -> Timing:
    micros = [max(each * 1e6, 1e-3) for each in seconds]
    return Timing(
        backend=row[0],
        kernel=row[1],
        median_us=round(statistics.median(micros), 3),
        spread_us=round(max(micros) - min(micros), 3),
        repeats=len(micros),
    )


def _current(device: str) -> AbstractContextManager[object]:
    """The device as the current one: libraries launch there."""
    return torch.cuda.device(device) if device.startswith("cuda") else nullcontext()


def _waiting(device: str) -> Run:
    kind = device.partition(":")[0]
    if kind == "cpu":
        return lambda: None
    module = getattr(torch, kind)
    return lambda: module.synchronize(device)


# -- the calls ---------------------------------------------------------------------------------------------------------


def arguments(spot: Spot, device: str, seed: int = 0) -> Arguments:
    """The contract's arguments of the spot's call, on the device."""
    workload, shape = spot.workload, spot.shape
    dtype = getattr(torch, spot.dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    B, T = (spot.sequences, 1) if workload.decodes else (1, spot.tokens)
    H, HV, K, V = shape.heads, shape.value_heads, shape.head_dim_k, shape.head_dim_v
    generator = torch.Generator(device).manual_seed(seed)

    def random(*size: int, dtype: torch.dtype = wide) -> Tensor:
        return torch.randn(*size, generator=generator, device=device, dtype=wide).to(dtype)

    call: Arguments = {
        "q": normalize(random(B, T, H, K), dim=-1).to(dtype),
        "k": normalize(random(B, T, H, K), dim=-1).to(dtype),
        "v": random(B, T, HV, V, dtype=dtype),
        "g": logsigmoid(random(B, T, HV)),
        "beta": random(B, T, HV).sigmoid(),
        "use_qk_l2norm_in_kernel": "qk-l2norm" in workload.features,
        "output_final_state": "final-state" in workload.features,
    }
    if "raw-gates" in workload.features:
        raw = dtype if dtype in (torch.bfloat16, torch.float16) else wide
        call |= {
            "use_gate_in_kernel": True,
            "A_log": random(HV),
            "dt_bias": random(HV),
            "g": random(B, T, HV, dtype=raw),
        }
        call |= {"use_beta_sigmoid_in_kernel": True, "beta": random(B, T, HV, dtype=raw)}
    states = B if not workload.packed else spot.sequences
    if "state-pool" in workload.features:
        call["state_indices"] = torch.randperm(_SLOTS * states, generator=generator, device=device)[:states]
        states = _SLOTS * states
    if "initial-state" in workload.features:
        turned = "state-v-first" in workload.features
        call["initial_state"] = 0.1 * random(states, HV, *((V, K) if turned else (K, V)))
        if turned:
            call["state_v_first"] = True
    if workload.packed:
        edges = [number * T // spot.sequences for number in range(spot.sequences + 1)]
        call["cu_seqlens"] = torch.tensor(edges, device=device)
    if workload.trains:
        for name in ("q", "k", "v", "g", "beta"):
            call[name].requires_grad_()
    return call


def _needs(spot: Spot, call: Arguments) -> Call:
    """What the call needs, as the hot path reads it from the tensors."""
    needs = call_like(spot.workload.operation, call)
    if not spot.captured:
        return needs
    captured = msgspec.structs.replace(needs, features=needs.features | {"capture"})
    return operation_named(needs.operation).normalise(captured)


def _runs(
    spot: Spot, call: Arguments, needs: Call, grounds: Grounds, backends: Collection[str]
) -> tuple[dict[Row, Run], dict[Row, str], dict[Row, str]]:
    """What to time, what failed before it could be, and what does not take the call."""
    bare = msgspec.structs.replace(grounds.policy, backend={}, prefer=(), strict=False)
    decision = grounds._replace(policy=bare, evidence=None, pins=None).decide(needs)
    runs: dict[Row, Run] = {}
    failed: dict[Row, str] = {}
    refused: dict[Row, str] = {}
    wait = _waiting(needs.device)
    for candidate in decision.candidates:
        row = (candidate.backend, candidate.kernel)
        found = grounds.registry.find(candidate.backend, needs.operation, candidate.kernel)
        if candidate.backend not in backends or found is None:
            continue
        if not candidate.accepted:
            refused[row] = str(candidate.reasons[0])
            continue
        try:
            function = load_function(*found)
        except AdapterError as error:
            failed[row] = str(error.reason)
            continue
        with _kept(failed, row, wait):
            runs[row] = _run(spot, function, call)
    return runs, failed, refused


def _run(spot: Spot, function: Callable[..., Any], call: Arguments) -> Run:
    """One call of the kernel as a function of nothing."""
    words = {"scale": None, "state_v_first": False, "initial_state": None, "cu_seqlens": None, **call}
    tensors = [words.pop(name) for name in ("q", "k", "v", "g", "beta")]
    if spot.workload.trains:
        return _trained(function, tensors, words)
    if spot.captured:
        return _captured(lambda: function(*tensors, **words))
    return lambda: function(*tensors, **words)


def _trained(function: Callable[..., Any], leaves: list[Tensor], words: Arguments) -> Run:
    """A call and the gradients of its inputs."""
    towards = torch.ones_like(leaves[2])

    def run() -> object:
        o, _ = function(*leaves, **words)
        return torch.autograd.grad(o, leaves, towards, allow_unused=True)

    return run


def _captured(run: Run) -> Run:
    """The replay of a CUDA graph of the call, warmed up on a side stream as torch asks it."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay
