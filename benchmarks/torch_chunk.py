"""The torch backend beside transformers' own plain PyTorch kernels, on this machine's CPU or GPU: time, error, memory.

    python benchmarks/torch_chunk.py [--output FILE.md]

Both sides run in turn in one process on the same tensors, each once untimed before it is timed. A ratio is the median
of transformers' times over the median of kernelreg's, above 1 where kernelreg is faster; ± is the range of the middle
half of the rounds over the median.
"""

from __future__ import annotations

import argparse
import datetime
import inspect
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch.profiler import ProfilerActivity, profile
from transformers.models.qwen3_next import modeling_qwen3_next

import kernelreg
from kernelreg.gdn import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from kernelreg.verify.judge import expected, relative

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, SIZE = 8, 128
#: Sequences and tokens of each; one token is decode.
SHAPES = ((1, 1024), (1, 4096), (4, 512), (1, 1), (8, 1), (32, 1))

Run = Callable[[], Any]


class Measured(NamedTuple):
    """One side of a row: seconds of each round, bytes at the peak, errors against the float64 recurrence."""

    seconds: list[float]
    peak: int
    output_error: float
    state_error: float

    def time(self) -> str:
        low, _, high = statistics.quantiles(self.seconds, n=4)
        middle = statistics.median(self.seconds)
        return f"{middle * 1e3:.3g} ms ± {(high - low) / middle:.0%}"


def tensors(B: int, T: int, dtype: torch.dtype) -> dict[str, Any]:
    """A layer's call; a decode step starts from states, a prefill from none."""
    q, k, v = (torch.randn(B, T, HEADS, SIZE, device=DEVICE).to(dtype) for _ in range(3))
    return {
        "q": q,
        "k": k,
        "v": v,
        "g": torch.nn.functional.logsigmoid(torch.randn(B, T, HEADS, device=DEVICE)),
        "beta": torch.rand(B, T, HEADS, device=DEVICE),
        "initial_state": 0.1 * torch.randn(B, HEADS, SIZE, SIZE, device=DEVICE) if T == 1 else None,
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
    }


def sides(call: dict[str, Any]) -> tuple[Run, Run]:
    """transformers' call and kernelreg's."""
    ours: Callable[..., Any]
    if call["q"].shape[1] == 1:
        theirs, ours = modeling_qwen3_next.torch_recurrent_gated_delta_rule, fused_recurrent_gated_delta_rule
    else:
        theirs, ours = modeling_qwen3_next.torch_chunk_gated_delta_rule, chunk_gated_delta_rule
    theirs = inspect.unwrap(theirs)  # without transformers' own look-up of a faster kernel
    q, k, v, *_ = call.values()
    words = {name: value for name, value in call.items() if name not in ("q", "k", "v")}
    return lambda: theirs(q, k, v, **words), lambda: ours(**call)


def seconds(run: Run, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        run()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls


def peak(run: Run) -> int:
    """The most bytes of tensors alive at once in a call, its results with them."""
    if DEVICE == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        kept = run()
    del kept
    assert profiled.profiler is not None
    assert profiled.profiler.kineto_results is not None
    alive = most = 0
    for event in sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            alive += event.nbytes()
            most = max(most, alive)
    return most


def measure(call: dict[str, Any], rounds: int) -> tuple[Measured, Measured]:
    """transformers' side and kernelreg's."""
    runs = sides(call)
    wanted = expected(call)
    errors = [[relative(*pair) for pair in zip(run(), wanted, strict=True)] for run in runs]
    peaks = [peak(run) for run in runs]
    calls = max(2, min(50, int(0.05 / min(seconds(run, 1) for run in runs))))
    times: tuple[list[float], list[float]] = ([], [])
    for each in range(rounds):
        for side in (0, 1) if each % 2 else (1, 0):
            runs[side]()  # what the other side has left in the caches and in the allocator is not this side's
            times[side].append(seconds(runs[side], calls))
    theirs, ours = (Measured(times[side], peaks[side], *errors[side]) for side in (0, 1))
    return theirs, ours


def row(name: str, theirs: Measured, ours: Measured) -> tuple[str, float]:
    """A row of the table, and its ratio."""
    ratio = statistics.median(theirs.seconds) / statistics.median(ours.seconds)
    cells = [
        name,
        theirs.time(),
        ours.time(),
        f"{ratio:.2f}",
        f"{theirs.output_error:.2e}, {ours.output_error:.2e}",
        f"{theirs.state_error:.2e}, {ours.state_error:.2e}",
        f"{theirs.peak / 2**20:.3g}, {ours.peak / 2**20:.3g}",
    ]
    return "| " + " | ".join(cells) + " |", ratio


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21, help="times that each side is measured (default: 21)")
    parser.add_argument("--threads", type=int, default=2, help="of torch on a CPU (default: 2)")
    parser.add_argument("--output", type=Path, help="also write the table to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    if DEVICE == "cuda":
        where = torch.cuda.get_device_name()
    else:
        where = f"CPU with {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    lines = [
        f"# The torch backend beside transformers' PyTorch kernels, {datetime.date.today().isoformat()}",
        "",
        f"Made by `python {' '.join(sys.argv)}`: H = HV = {HEADS}, K = V = {SIZE}, no gradients. Both sides in turn "
        f"in one process, {arguments.rounds} rounds, each once untimed before it is timed. Times are medians, ± the "
        "middle half of the rounds over the median; × is transformers' median over kernelreg's. Errors are "
        "‖x − ref‖ / ‖ref‖ against the float64 recurrence; memory is the most MiB of tensors alive at once in a call, "
        "its results with them. Pairs are transformers', kernelreg's.",
        "",
        f"{where}; load average at the start {os.getloadavg()[0]:.1f}; Python {sys.version.split()[0]}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}.",
        "",
        "| call | transformers | kernelreg | × | error of o | error of the state | memory |",
        "|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    ratios: dict[str, list[float]] = {"prefill": [], "decode": []}
    with torch.no_grad(), kernelreg.use(backend="torch"):
        for B, T in SHAPES:
            kind = "decode" if T == 1 else "prefill"
            for dtype in (torch.float32, torch.bfloat16):
                name = f"{kind}, {B} × {T}, {str(dtype).removeprefix('torch.')}"
                line, ratio = row(name, *measure(tensors(B, T, dtype), arguments.rounds))
                ratios[kind].append(ratio)
                lines.append(line)
                print(line, flush=True)
    lines.append("")
    lines += [f"Geometric mean, {kind}: × {statistics.geometric_mean(each):.2f}." for kind, each in ratios.items()]
    print("\n".join(lines[-3:]))
    if arguments.output:
        arguments.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
