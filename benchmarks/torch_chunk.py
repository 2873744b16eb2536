"""The torch backend's chunked prefill beside transformers' own plain PyTorch one, on this machine's CPU or GPU.

    python benchmarks/torch_chunk.py

Both run in turn in one process on the same tensors; ratios of medians are printed, above 1 where kernelreg is faster.
"""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers.models.qwen3_next import modeling_qwen3_next

import kernelreg
from kernelreg.gdn import chunk_gated_delta_rule

ROUNDS = 5


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    theirs: Callable[..., Any] = inspect.unwrap(modeling_qwen3_next.torch_chunk_gated_delta_rule)
    H, HV, K, V = 4, 8, 128, 128
    for T in (64, 512, 2048):
        q, k, v = (torch.randn(1, T, heads, size, device=device) for heads, size in ((H, K), (H, K), (HV, V)))
        g = torch.nn.functional.logsigmoid(torch.randn(1, T, HV, device=device))
        beta = torch.rand(1, T, HV, device=device)
        call: dict[str, Any] = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "use_qk_l2norm_in_kernel": True}
        group = {name: call[name].repeat_interleave(HV // H, 2) for name in ("q", "k")}

        def ours(call: dict[str, Any] = call) -> object:
            with torch.no_grad(), kernelreg.use(backend="torch"):
                return chunk_gated_delta_rule(**call)

        def other(call: dict[str, Any] = call, group: dict[str, Any] = group) -> object:
            with torch.no_grad():
                q, k = group["q"], group["k"]
                return theirs(q, k, call["v"], call["g"], call["beta"], use_qk_l2norm_in_kernel=True)

        ours(), other()
        times = [(seconds(other), seconds(ours)) for _ in range(ROUNDS)]
        their_time, our_time = (statistics.median(each) for each in zip(*times, strict=True))
        print(f"{device}, T {T:5}: {our_time * 1e3:8.1f} ms, {their_time / our_time:.2f} times as fast")


if __name__ == "__main__":
    main()
