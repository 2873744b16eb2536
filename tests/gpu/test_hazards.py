"""What the kernels get wrong or refuse when they are called bare, with kernelreg in front of them.

The rows are those that a probe of the bare libraries found: wrong results without a word, errors of the libraries' own.
Each must be right here, or refused with a reason.
"""

from __future__ import annotations

import pytest
import torch

from kernelreg.ops import operation_named
from kernelreg.testing.plugin import Record, compiled_together
from kernelreg.verify.cases import cases
from kernelreg.verify.judge import expected, judge, relative
from tests.gdn_cases import gdn_call

BACKENDS = ("torch", "fla", "flash_qla", "flashinfer")
_CHUNK = {each.name: each for each in cases("gdn.chunk", "real")}


#: The hazard, and the call that meets it.
HAZARDS = {
    "dense, grouped value heads": _CHUNK["dense"],
    "varlen": _CHUNK["varlen"],
    "noncontiguous q, k, v": _CHUNK["q, k, v sliced from one projection"],
    "state_v_first": _CHUNK["state_v_first"],
    "explicit scale": _CHUNK["scale = 0.25"],
    "scale = 0.0": _CHUNK["scale = 0.0"],
    "initial state in bfloat16": _CHUNK["initial state in bfloat16"],
    "g and beta in bfloat16": _CHUNK["g and beta in bfloat16"],
    "float16": _CHUNK["float16"],
    "float32 q, k, v": _CHUNK["float32"],
    "K = V = 64": _CHUNK["K = 64, V = 64"],
    "K = V = 256": _CHUNK["K = 256, V = 256"],
    "K = 128, V = 64": _CHUNK["K = 128, V = 64"],
    "HV not a multiple of H": _CHUNK["HV not a multiple of H"],
    "an empty sequence inside cu_seqlens": _CHUNK["empty sequences"],
    "T = 0": _CHUNK["T = 0"],
    "tokens after cu_seqlens[-1]": _CHUNK["tokens behind the last sequence"],
    "cu_seqlens on the CPU": _CHUNK["cu_seqlens on another device"],
    "int32 cu_seqlens": _CHUNK["varlen, int32"],
    "cu_seqlens changed in place between calls": _CHUNK["cu_seqlens changed in place"],
    "CUDA graph, dense": _CHUNK["CUDA graph, dense, replayed on other data"],
    "CUDA graph, varlen, cu_seqlens changed before the replay": _CHUNK["CUDA graph, varlen, other edges"],
    "gradients of q, k, v, g, beta, initial state": _CHUNK["gradients"],
}


@pytest.mark.parametrize(
    ("hazard", "backend"),
    [
        pytest.param(hazard, backend, marks=pytest.mark.xdist_group(compiled_together(case, backend)))
        for hazard, case in HAZARDS.items()
        for backend in BACKENDS
    ],
)
def test_hazard(hazard: str, backend: str, record: Record) -> None:
    outcome = judge(HAZARDS[hazard], backend, "cuda:0")
    record(f"hazard: {hazard}", backend, str(outcome))
    assert outcome.status in ("right", "refused"), outcome.reason


def test_a_graph_warmed_up_with_another_cu_seqlens_is_refused_before_anything_is_recorded(record: Record) -> None:
    """The libraries sync or miss their caches in the middle of such a capture, which poisons the stream."""
    import kernelreg

    call = gdn_call(H=4, HV=8, K=128, V=128, dtype=torch.bfloat16, edges=[0, 100, 300], device="cuda")
    with (
        kernelreg.use(backend="flashinfer"),
        pytest.raises(kernelreg.NoBackendError, match="capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        kernelreg.gdn.chunk_gated_delta_rule(**call)
    assert float(torch.ones(3, device="cuda").sum()) == 3.0  # the stream works
    record("hazard: CUDA graph, varlen, warmed up with another cu_seqlens", "flashinfer", "refused: capture-varlen")


def test_why_flash_qla_refuses_bfloat16_gates(record: Record) -> None:
    flash_qla = pytest.importorskip("flash_qla")
    call = gdn_call(H=4, HV=8, K=128, V=128, dtype=torch.bfloat16, device="cuda")
    call["g"] = call["g"].bfloat16()
    with torch.no_grad():
        o, _ = flash_qla.chunk_gated_delta_rule(**call, scale=128**-0.5)
    error = relative(o, expected(call)[0])
    record("hazard: (g in bfloat16, given to the bare library)", "flash_qla", f"{error:.1e}")
    assert error > operation_named("gdn").tolerances["bfloat16"].forward
