"""The grid of head shapes and batches that engines serve, within one percent of the float64 recurrence.

The grid is that of LightLLM's FlashQLA patch, which compared with FLA and asked for two percent:
https://github.com/ModelTC/LightLLM/pull/1408.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch

import kernelreg
from kernelreg.gdn import chunk_gated_delta_rule
from kernelreg.testing.plugin import Record
from tests.gdn_cases import expected, gdn_call, relative

HEADS = [(2, 8), (4, 16), (16, 32)]
BATCHES = [(1024,), (2048, 1024, 512), (4096, 4096)]
BACKENDS = ("fla", "flash_qla", "flashinfer")


def _call(heads: tuple[int, int], batch: tuple[int, ...], state: bool) -> dict[str, Any]:
    edges = [sum(batch[:place]) for place in range(len(batch) + 1)]
    H, HV = heads
    return gdn_call(
        T=edges[-1],
        H=H,
        HV=HV,
        K=128,
        V=128,
        dtype=torch.bfloat16,
        edges=edges,
        state=state,
        zero_gates=True,
        device="cuda",
    )


@lru_cache(maxsize=1)
def _expected(heads: tuple[int, int], batch: tuple[int, ...], state: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return expected(_call(heads, batch, state))


@pytest.mark.parametrize(
    ("heads", "backend"),
    [
        pytest.param(heads, backend, marks=pytest.mark.xdist_group(f"parity {backend} {heads}"))
        for heads in HEADS
        for backend in BACKENDS
    ],
)
@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("state", [False, True], ids=["no state", "state"])
def test_parity(heads: tuple[int, int], batch: tuple[int, ...], state: bool, backend: str, record: Record) -> None:
    call = _call(heads, batch, state)
    with kernelreg.use(backend=backend), torch.no_grad():
        o, final = chunk_gated_delta_rule(**call)
    assert final is not None
    errors = [relative(each, wanted) for each, wanted in zip((o, final), _expected(heads, batch, state), strict=True)]
    name = f"parity: H, HV = {heads}; sequences {list(batch)}; {'a' if state else 'no'} state"
    record(name, backend, " / ".join(f"{error:.1e}" for error in errors))
    assert max(errors) <= 0.01
