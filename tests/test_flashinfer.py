"""FlashInfer's adapter on the CPU, over a stand-in that has the library's signatures and its documented habits.

Packed tensors, exp(g) in float32, ``[V, K]`` states, contiguous inputs; the norm flag is ignored, 0.0 is the default
scale, the rows of empty sequences stay unwritten. On a GPU tests/gpu runs the library itself.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from itertools import pairwise
from types import ModuleType
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

import kernelreg
from kernelreg.descriptor import Requires
from kernelreg.ops.gdn_reference import reference_gated_delta_rule
from kernelreg.registry import discover
from kernelreg.verify.cases import Case, cases
from kernelreg.verify.judge import judge

CALLS: list[str] = []
TILE = 64


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_cp: Any = "auto",
) -> Any:
    CALLS.append("prefill")
    assert cu_seqlens is not None
    assert (use_cp, cu_seqlens.dtype) == (False, torch.int64)
    assert g.dtype == beta.dtype == torch.float32
    given = [each for each in (q, k, v, g, beta, initial_state) if each is not None]
    assert all(each.is_contiguous() for each in given)
    words = {"cu_seqlens": cu_seqlens, "scale": scale or None, "state_v_first": True, "initial_state": initial_state}
    packed = (each[None] for each in (q, k, v, g.log(), beta))
    o, final = reference_gated_delta_rule(*packed, **words)  # type: ignore[arg-type]
    final[cu_seqlens.diff() == 0] = float("nan")
    o = o[0].to(q.dtype)
    for start, end in pairwise(cu_seqlens.tolist()):  # the last tile's other rows are multiplied by zero, not left out
        tile = start + max(end - start - 1, 0) // TILE * TILE
        o[start:end] += 0 * v[tile : tile + TILE].sum()
    return (o, final.float()) if output_final_state else o


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: None,
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    b: Tensor,
    scale: float,
    output: Tensor,
    use_qk_l2norm: bool,
    initial_state: Tensor,
    initial_state_indices: Tensor,
) -> None:
    CALLS.append("decode")
    assert initial_state.is_contiguous() or sys.modules["flashinfer"].__version__ != "0.6.7"
    assert initial_state.stride(-1) == 1
    assert a.dtype == b.dtype == torch.bfloat16
    assert int(initial_state_indices.max()) < len(initial_state)
    g = -A_log.double().exp() * torch.nn.functional.softplus(a.double() + dt_bias.double())
    o, pool = reference_gated_delta_rule(
        q,
        k,
        v,
        g,
        b.double().sigmoid(),
        scale,
        initial_state,
        use_qk_l2norm,
        state_v_first=True,
        state_indices=initial_state_indices,
    )
    output.copy_(o)
    initial_state.copy_(pool)


@pytest.fixture(params=["0.6.7", "0.7.4"])
def backend(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[str]:
    """The adapter over a stand-in of this version, registered for any device."""
    modules: dict[str, dict[str, Any]] = {
        "flashinfer": {"__version__": request.param},
        "flashinfer.gdn_prefill": {"chunk_gated_delta_rule": prefill},
    }
    modules["flashinfer.gdn_decode"] = {"gated_delta_rule_decode_pretranspose": decode}
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    forget_adapter()
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    (descriptor,) = (each.descriptor for each in discover(plugins=False).backends if each.name == "flashinfer")
    rows = tuple(
        msgspec.structs.replace(each, requires=Requires()) for each in descriptor.kernel if each.name == "sm90"
    )
    anywhere = msgspec.structs.replace(descriptor, name="stand_in", requires=Requires(), kernel=rows, known_bad=())
    undo = kernelreg.register(anywhere)
    CALLS.clear()
    yield "stand_in"
    undo()
    forget_adapter()


def forget_adapter() -> None:
    for name in [name for name in sys.modules if name.startswith("kernelreg_backends.flashinfer.")]:
        del sys.modules[name]


def sized(case: Case) -> Case:
    return msgspec.structs.replace(case, head_dim_k=128, head_dim_v=128)


@pytest.mark.parametrize("operation", ["gdn.chunk", "gdn.recurrent"])
def test_the_adapter_keeps_the_contract(backend: str, operation: str) -> None:
    outcomes = [judge(sized(each), backend, "cpu") for each in cases(operation, "tiny", draws=10)]
    assert not [each for each in outcomes if each.status == "wrong"]
    assert len([each for each in outcomes if each.computed]) >= 25
    # Raw bfloat16 gates on a float32 [V, K] pool; one with other data between the states since 0.6.8.
    pools = 1 if sys.modules["flashinfer"].__version__ == "0.6.7" else 2
    assert CALLS.count("decode") == (pools if operation == "gdn.recurrent" else 0)
