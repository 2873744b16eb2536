"""The hot path: what is known is not decided again, and what a descriptor can tell apart has forms of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernelreg
from kernelreg.forms import form_of
from kernelreg.gdn import call_like, chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from kernelreg.session import current_override
from tests.gdn_cases import Call, gdn_call, pool_call


@pytest.fixture
def decided() -> Iterator[list[kernelreg.Resolution]]:
    """Every decision that is made, as it is made."""
    kernelreg.refresh()
    seen: list[kernelreg.Resolution] = []
    undo = kernelreg.on_resolve(seen.append)
    yield seen
    undo()
    kernelreg.refresh()


def test_a_call_is_decided_once_for_all_sizes_that_no_descriptor_tells_apart(
    decided: list[kernelreg.Resolution],
) -> None:
    for T in (7, 7, 9, 50):
        chunk_gated_delta_rule(**gdn_call(T=T))
    assert len(decided) == 1
    chunk_gated_delta_rule(**gdn_call(T=7, K=16))
    assert len(decided) == 2


def test_a_change_of_the_policy_or_of_the_backends_counts_at_the_next_call(
    decided: list[kernelreg.Resolution],
) -> None:
    call = gdn_call(T=7)
    chunk_gated_delta_rule(**call)
    with kernelreg.use(disable="torch"), pytest.raises(kernelreg.NoBackendError):
        chunk_gated_delta_rule(**call)
    chunk_gated_delta_rule(**call)
    assert len(decided) == 2
    kernelreg.refresh()
    chunk_gated_delta_rule(**call)
    assert len(decided) == 3


BROKEN: dict[str, Any] = {
    "k": lambda call: call["k"][:, :-1],
    "v": lambda call: call["v"].double(),
    "g": lambda call: call["g"][..., :-1],
    "beta": lambda call: call["beta"].int(),
    "q": lambda call: call["q"].to("meta"),
    "initial_state": lambda call: call["initial_state"].mT[:, :, :-1],
    "cu_seqlens": lambda call: torch.tensor([0, 300]),
    "scale": lambda call: float("nan"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_call_that_is_wrong_is_refused_behind_one_that_was_right(name: str) -> None:
    call = gdn_call(T=20)
    chunk_gated_delta_rule(**call)
    with pytest.raises(kernelreg.CallError, match=name):
        chunk_gated_delta_rule(**call | {name: BROKEN[name](call)})


def test_slots_on_the_host_are_looked_up_each_time() -> None:
    call = pool_call([1, 1, 1], [3, -1, 4], packed=False)
    fused_recurrent_gated_delta_rule(**call)
    call["state_indices"][1] = 4
    with pytest.raises(kernelreg.CallError, match="a slot twice"):
        fused_recurrent_gated_delta_rule(**call)


# -- forms are complete ------------------------------------------------------------------------------------------------

TENSORS = ("q", "k", "v", "g", "beta", "initial_state")


@st.composite
def calls(draw: st.DrawFn) -> tuple[Call, bool]:
    """A call of ``gdn.chunk`` on no data, and whether gradients are on."""
    boolean = st.booleans()
    H = draw(st.sampled_from((1, 2)))
    HV = H * draw(st.sampled_from((1, 2)))
    K, V = draw(st.sampled_from((16, 32))), draw(st.sampled_from((16, 32)))
    B, T = draw(st.sampled_from(((1, 4), (1, 5), (2, 4))))
    dtype, gates, states = (draw(st.sampled_from((torch.float32, torch.bfloat16))) for _ in range(3))
    packed = B == 1 and draw(boolean)
    v_first = draw(boolean)

    def empty(*shape: int, dtype: torch.dtype, leaf: bool = False) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta").requires_grad_(leaf)

    call: Call = {
        "q": empty(B, T, H, K, dtype=dtype, leaf=draw(boolean)),
        "k": empty(B, T, H, K, dtype=dtype),
        "v": empty(B, T, HV, V, dtype=dtype),
        "g": empty(B, T, HV, dtype=gates),
        "beta": empty(B, T, HV, dtype=gates, leaf=draw(boolean)),
        "output_final_state": draw(boolean),
        "use_qk_l2norm_in_kernel": draw(boolean),
        "state_v_first": v_first,
    }
    if draw(boolean):
        state = (V, K) if v_first else (K, V)
        call["initial_state"] = empty(2 if packed else B, HV, *state, dtype=states)
    if packed:
        call["cu_seqlens"] = torch.empty(3, dtype=torch.int64, device="meta")
    if draw(boolean):
        call["use_beta_sigmoid_in_kernel"] = draw(boolean)
    if draw(boolean):
        call |= {"use_gate_in_kernel": True, "A_log": empty(HV, dtype=torch.float32, leaf=draw(boolean))}
    return call, draw(boolean)


def form(call: Call, gradients: bool) -> object:
    words = {
        name: call.get(name)
        for name in (
            "initial_state",
            "cu_seqlens",
            "output_final_state",
            "use_qk_l2norm_in_kernel",
            "state_v_first",
        )
    }
    options = {name: value for name, value in call.items() if name not in (*words, *TENSORS)}
    with torch.set_grad_enabled(gradients):
        q, k, v, g, beta = (call[name] for name in TENSORS[:5])
        return form_of(q, k, v, g, beta, words, options, current_override())


def told(call: Call, gradients: bool) -> object:
    with torch.set_grad_enabled(gradients):
        return call_like("gdn.chunk", call)


@settings(max_examples=300, deadline=None)
@given(one=calls(), other=calls())
def test_two_calls_that_a_descriptor_can_tell_apart_have_two_forms(
    one: tuple[Call, bool], other: tuple[Call, bool]
) -> None:
    if form(*one) == form(*other):
        assert told(*one) == told(*other)


@settings(max_examples=300, deadline=None)
@given(one=calls(), name=st.sampled_from(TENSORS), change=st.sampled_from(("dtype", "leaf", "shape")))
def test_each_argument_counts(one: tuple[Call, bool], name: str, change: str) -> None:
    call, gradients = one
    tensor = call.get(name)
    if tensor is None:
        return
    changed = {
        "dtype": lambda: tensor.detach().to(torch.float64).requires_grad_(tensor.requires_grad),
        "leaf": lambda: tensor.detach().clone().requires_grad_(not tensor.requires_grad),
        "shape": lambda: tensor.detach().new_empty(*tensor.shape[:-1], 7).requires_grad_(tensor.requires_grad),
    }[change]()
    assert form(call | {name: changed}, gradients) != form(call, gradients)


@settings(deadline=None)
@given(one=calls(), name=st.sampled_from(("output_final_state", "use_qk_l2norm_in_kernel", "state_v_first")))
def test_each_flag_counts(one: tuple[Call, bool], name: str) -> None:
    call, gradients = one
    assert form(call | {name: not call[name]}, gradients) != form(call, gradients)
