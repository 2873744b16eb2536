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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import kernelreg
from kernelreg.gdn import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

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
        stream = torch.cuda.Stream()
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


def rows() -> list[tuple[str, Callable[..., Any], Callable[..., Any], dict[str, Any]]]:
    """Name, operation, how it is called, tensors."""
    chunk, recurrent = chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
    table: list[tuple[str, Any, Any, dict[str, Any]]] = []
    table += [(f"prefill, dense, {T} tokens", chunk, eager, tensors(1, T)) for T in TOKENS]
    table += [(f"prefill, 8 sequences, {T} tokens", chunk, eager, tensors(1, T, sequences=8)) for T in TOKENS]
    table += [(f"prefill, dense, {T} tokens, CUDA graph", chunk, captured, tensors(1, T)) for T in (1024, 8192)]
    table += [(f"forward and backward, {T} tokens", chunk, trained, tensors(1, T)) for T in (2048, 8192)]
    table += [(f"decode, {B} sequences", recurrent, eager, tensors(B, 1)) for B in (1, 64)]
    table += [("decode, 64 sequences, CUDA graph", recurrent, captured, tensors(64, 1))]
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="also write the table to this file")
    arguments = parser.parse_args()
    facts = kernelreg.facts()
    if facts.device("cuda:0") is None or not torch.cuda.is_available():
        print("no CUDA device that this torch can use", file=sys.stderr)
        return 1
    device = facts.devices[0]
    names = [each for each in ("torch", "fla", "flash_qla")]
    versions = ", ".join(f"{name} {version}" for name, version in sorted(facts.packages.items()))
    lines = [
        f"# GDN kernels timed side by side, {datetime.date.today().isoformat()}",
        "",
        "Made by `python benchmarks/gdn_kernels.py`: H 16, HV 32, K = V = 128, bfloat16. Times are medians of "
        f"{REPEATS} repeats of back-to-back calls; ± is the spread; × is the torch kernel's time over this one's.",
        "",
        f"{device.name}, compute capability {device.compute_capability}, driver {facts.driver and facts.driver.version}; "
        f"Python {sys.version.split()[0]}, torch {torch.__version__}, {versions}.",
        "",
        "| call | " + " | ".join(names) + " |",
        "|---" * (len(names) + 1) + "|",
    ]
    for line in lines:
        print(line)
    for name, function, way, call in rows():
        cells, base = [], float("nan")
        for backend in names:
            try:
                with kernelreg.use(backend=backend):
                    middle, spread = measure(way(function, call))
            except kernelreg.NoBackendError as error:
                row = next(each for each in error.resolution.candidates if each.backend == backend)
                cells.append(f"refused: {row.reasons[0].code}" if row.reasons else "refused")
                continue
            base = middle if backend == "torch" else base
            cells.append(f"{middle:.3f} ms ± {spread:.0%}, × {base / middle:.2f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
    if arguments.output:
        arguments.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
