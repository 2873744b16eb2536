"""Every GDN kernel that this machine can run, timed in one process: how many times faster than the torch kernel.

    python benchmarks/gdn_kernels.py [--output FILE.md]

Each figure is the median time of back-to-back calls, queued without waiting, over the torch kernel's on the same
tensors; the spread is (maximum − minimum) / median of the repeats. Captured calls are replays of a CUDA graph.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import kernelreg
from kernelreg.gdn import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from kernelreg.resolver import closest_row
from kernelreg.testing.ground import measured_on

REPEATS = 5
TOKENS = (256, 1024, 4096, 8192, 16384, 32768)


def tensors(B: int, T: int, *, sequences: int | None = None) -> dict[str, Any]:
    """A Qwen3-Next layer's call: H 16, HV 32, K = V = 128, bfloat16, with states."""
    H, HV, K, V = 16, 32, 128, 128
    N = sequences or B
    call: dict[str, Any] = {
        "q": torch.randn(B, T, H, K, device="cuda", dtype=torch.bfloat16),
        "k": torch.randn(B, T, H, K, device="cuda", dtype=torch.bfloat16),
        "v": torch.randn(B, T, HV, V, device="cuda", dtype=torch.bfloat16),
        "g": torch.nn.functional.logsigmoid(torch.randn(B, T, HV, device="cuda")),
        "beta": torch.rand(B, T, HV, device="cuda"),
        "initial_state": 0.1 * torch.randn(N, HV, K, V, device="cuda"),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
    }
    if sequences:
        call["cu_seqlens"] = torch.arange(sequences + 1, device="cuda") * (T // sequences)
    return call


def pooled(B: int) -> dict[str, Any]:
    """A decode step of such a layer as engines make it: raw gates, a float32 ``[V, K]`` pool of 512 slots."""
    call = tensors(B, 1)
    HV = call["v"].shape[2]
    del call["output_final_state"]
    return call | {
        "g": torch.randn(B, 1, HV, device="cuda", dtype=torch.bfloat16),
        "beta": torch.randn(B, 1, HV, device="cuda", dtype=torch.bfloat16),
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "A_log": torch.rand(HV, device="cuda"),
        "dt_bias": torch.rand(HV, device="cuda"),
        "initial_state": 0.1 * torch.randn(512, HV, 128, 128, device="cuda"),
        "state_v_first": True,
        "state_indices": torch.randperm(512, device="cuda")[:B],
    }


def measure(run: Callable[[], object]) -> tuple[float, float]:
    """Median milliseconds a call, and the spread."""
    run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    calls = max(3, min(50, int(0.1 / max(time.perf_counter() - start, 1e-6))))
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / calls * 1e3)
    middle = statistics.median(times)
    return middle, (max(times) - min(times)) / middle


def eager(function: Callable[..., Any], call: dict[str, Any]) -> Callable[[], object]:
    def run() -> object:
        with torch.no_grad():
            return function(**call)

    return run


def captured(function: Callable[..., Any], call: dict[str, Any]) -> Callable[[], object]:
    with torch.no_grad():
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function(**call)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            function(**call)
    return graph.replay


def trained(function: Callable[..., Any], call: dict[str, Any]) -> Callable[[], object]:
    leaves = [call[name].requires_grad_() for name in ("q", "k", "v", "g", "beta")]

    def run() -> object:
        o, _ = function(**call)
        return torch.autograd.grad(o.float().sum(), leaves)

    return run


def rows(only: str) -> Iterator[tuple[str, Callable[..., Any], Callable[..., Any], dict[str, Any]]]:
    """Name, operation, how it is called, tensors."""
    chunk, recurrent = chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
    plan: list[tuple[str, Any, Any, int, int, int | None]] = []
    plan += [(f"prefill, dense, {T} tokens", chunk, eager, 1, T, None) for T in TOKENS]
    plan += [(f"prefill, 8 sequences, {T} tokens", chunk, eager, 1, T, 8) for T in TOKENS]
    plan += [(f"prefill, dense, {T} tokens, CUDA graph", chunk, captured, 1, T, None) for T in (1024, 8192)]
    plan += [(f"forward and backward, {T} tokens", chunk, trained, 1, T, None) for T in (2048, 8192)]
    plan += [(f"decode, {B} sequences", recurrent, eager, B, 1, None) for B in (1, 64)]
    plan += [("decode, 64 sequences, CUDA graph", recurrent, captured, 64, 1, None)]
    for name, function, way, B, T, sequences in plan:
        if only in name:
            yield name, function, way, tensors(B, T, sequences=sequences)
    for way, graph in ((eager, ""), (captured, ", CUDA graph")):
        for B in (1, 64, 256):
            if only in (name := f"decode from a pool, {B} sequences{graph}"):
                yield name, recurrent, way, pooled(B)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="TEXT", default="", help="only the rows whose name has this text")
    parser.add_argument("--output", type=Path, help="also write the table to this file")
    arguments = parser.parse_args()
    facts = kernelreg.facts()
    if facts.device("cuda:0") is None or not torch.cuda.is_available():
        print("no CUDA device that this torch can use", file=sys.stderr)
        return 1
    names = ("torch", "fla", "flash_qla", "flashinfer")
    lines = [
        f"# GDN kernels timed side by side, {datetime.date.today().isoformat()}",
        "",
        f"Made by `python {' '.join(sys.argv)}`: H 16, HV 32, K = V = 128, bfloat16. Times are medians of "
        f"{REPEATS} repeats of back-to-back calls; ± is the spread; × is the torch kernel's time over this one's.",
        "",
        measured_on(facts),
        "",
        "| call | " + " | ".join(names) + " |",
        "|---" * (len(names) + 1) + "|",
    ]
    for line in lines:
        print(line)
    for name, function, way, call in rows(arguments.only):
        cells, base = [], float("nan")
        for backend in names:
            try:
                with kernelreg.use(backend=backend):
                    middle, spread = measure(way(function, call))
            except kernelreg.NoBackendError as error:
                closest = closest_row(error.resolution.candidates, backend)
                cells.append("no such kernel" if closest is None else f"refused: {closest.reasons[0].code}")
                continue
            base = middle if backend == "torch" else base
            cells.append(f"{middle:.3f} ms ± {spread:.0%}, × {base / middle:.2f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
        if arguments.output:  # row by row: a run that is cut short keeps what it has measured
            arguments.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
