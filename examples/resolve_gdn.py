"""A Gated Delta Net layer shaped like Qwen3-Next's, on whatever machine this is.

    python examples/resolve_gdn.py

Runs a packed prefill and one decode step, explains which kernels ran and why not the others, and compares both with
the float64 recurrence.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import logsigmoid

import kernelreg
from kernelreg.gdn import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from kernelreg.ops.gdn_reference import reference_gated_delta_rule

H, HV, K, V = 16, 32, 128, 128  # linear key heads, value heads, head sizes of Qwen3-Next-80B-A3B
LENGTHS = (100, 28, 60)
#: A few roundings of bfloat16 (2^-9 each) through the chunks' matrix products.
BOUND = 1e-2


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


def run(
    name: str, operation: str, function: Callable[..., Any], call: dict[str, Any]
) -> tuple[torch.Tensor, dict[str, float]]:
    """Explain a call and make it; gives its final state, and the errors of output and state."""
    print(kernelreg.resolve(operation, like=call).explain())
    o, state = function(**call)
    words = {word: value for word, value in call.items() if word != "output_final_state"}
    expected, expected_state = reference_gated_delta_rule(**words)
    return state, {f"{name} output": error(o, expected), f"{name} state": error(state, expected_state)}


def main() -> int:
    # Asked before any tensor exists: this machine, its current accelerator, a call that says nothing more.
    device = kernelreg.resolve("gdn").device
    torch.manual_seed(0)

    def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float32).to(device, dtype)

    T = sum(LENGTHS)
    prefill: dict[str, Any] = {
        "q": random(1, T, H, K),
        "k": random(1, T, H, K),
        "v": random(1, T, HV, V),
        "g": logsigmoid(random(1, T, HV, dtype=torch.float32)),
        "beta": random(1, T, HV, dtype=torch.float32).sigmoid(),
        "cu_seqlens": torch.tensor([0, *LENGTHS]).cumsum(0).to(device),
        "use_qk_l2norm_in_kernel": True,
        "output_final_state": True,
    }
    state, errors = run("prefill", "gdn", chunk_gated_delta_rule, prefill)

    N = len(LENGTHS)
    decode: dict[str, Any] = {
        "q": random(N, 1, H, K),
        "k": random(N, 1, H, K),
        "v": random(N, 1, HV, V),
        "g": logsigmoid(random(N, 1, HV, dtype=torch.float32)),
        "beta": random(N, 1, HV, dtype=torch.float32).sigmoid(),
        "initial_state": state,
        "use_qk_l2norm_in_kernel": True,
        "output_final_state": True,
    }
    errors |= run("decode", "gdn.recurrent", fused_recurrent_gated_delta_rule, decode)[1]

    print("error against the float64 recurrence:")
    for name, value in errors.items():
        print(f"  {name:15} {value:.1e}")
    return 0 if all(value <= BOUND for value in errors.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
