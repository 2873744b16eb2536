"""FLA's own chunk kernels on the CPU, for tests/test_real_packages.py: run with TRITON_INTERPRET=1.

Writes, as JSON, the errors of output and final state for each way in which the adapter hands a batch to them, and
whether what must be untouched is. Triton's interpreter needs two things here: a kernel's first configuration in place
of a tuned one, and numbers of its own kind from ``range``, since one kernel calls a method on them.
"""

from __future__ import annotations

import builtins
import importlib
import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.autotuner import Autotuner

from kernelreg.gdn import plan
from tests.gdn_cases import Call, expected, gdn_call, relative

TOKENS, SEQUENCES = 200, 5
LAYOUTS = ([0, 3, 3, 70, 135], [0, 200], [0, 0, 1])


def prepared() -> tuple[Any, Any]:
    """The adapter and what tells it whether a graph is captured, with the interpreter made ready."""
    made: Any = Autotuner.__init__

    def first_alone(self: Any, *arguments: Any, **words: Any) -> None:
        made(self, *arguments, **words)
        self.configs = self.configs[:1]

    Autotuner.__init__ = first_alone
    adapter = importlib.import_module("kernelreg_backends.fla.adapter")

    def scalars(end: Any) -> Iterator[Any]:
        for number in builtins.range(int(end)):
            yield tl.full([], number, tl.int32)

    importlib.import_module("fla.ops.common.chunk_delta_h").range = scalars  # type: ignore[attr-defined]
    return adapter, importlib.import_module("kernelreg_backends._direct")


def batch(seed: int, end: int) -> tuple[Call, Call]:
    """A call with NaN behind its last sequence, and what of it the reference may see."""
    call = gdn_call(B=1, T=TOKENS, H=1, HV=2, K=16, V=16, seed=seed)
    call["initial_state"] = torch.randn(SEQUENCES, 2, 16, 16, generator=torch.Generator().manual_seed(seed))
    seen = {name: value.clone() if isinstance(value, Tensor) else value for name, value in call.items()}
    for name in ("q", "k", "v", "g", "beta"):
        call[name][:, end:] = float("nan")
        seen[name][:, end:] = 0
    return call, seen


def main() -> None:
    adapter, direct = prepared()
    held = plan([0], max_tokens=TOKENS, max_sequences=SEQUENCES, device="cpu")
    found: dict[str, list[float]] = {}
    for seed, edges in enumerate(LAYOUTS):
        held.update(edges)
        call, seen = batch(seed, edges[-1])
        wanted = expected({**seen, "cu_seqlens": held.cu_seqlens})
        empty = held.cu_seqlens.diff() == 0
        ways: dict[str, tuple[bool, Call]] = {
            "plan": (False, {"cu_seqlens": held.cu_seqlens, "cu_seqlens_cpu": held.cu_seqlens_cpu}),
            "edges": (False, {"cu_seqlens": held.cu_seqlens.clone()}),
            "plan, captured": (True, {"cu_seqlens": held.cu_seqlens}),
            "edges, captured": (True, {"cu_seqlens": held.cu_seqlens.int()}),
        }
        for name, (captured, words) in ways.items():
            direct.captured = lambda x, captured=captured: captured
            with torch.no_grad():
                o, final = adapter.chunk_gated_delta_rule(**call, **words)
            assert not o[:, edges[-1] :].any(), name
            assert torch.equal(final[empty], call["initial_state"][empty]), name
            found[f"{name}, {edges}"] = [relative(o, wanted[0]), relative(final, wanted[1])]
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
