"""The torch backend against the float64 recurrence: outputs, states and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernelreg
from kernelreg.gdn import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from tests.gdn_cases import EXACT, Call, expected, gdn_call, leaves, relative

FUNCTIONS = [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule]
both = pytest.mark.parametrize("function", FUNCTIONS)


def check(function: Any, call: Call) -> None:
    bound = EXACT[call["q"].dtype]
    o, final = function(**call)
    wanted_o, wanted_final = expected(call)
    assert o.dtype == call["q"].dtype
    assert o.shape == call["v"].shape
    assert relative(o, wanted_o) <= bound
    assert final.dtype == (torch.float64 if call["q"].dtype == torch.float64 else torch.float32)
    assert final.shape == wanted_final.shape
    assert relative(final, wanted_final) <= min(bound, 1e-5)


@both
@pytest.mark.parametrize("dtype", list(EXACT))
@pytest.mark.parametrize("edges", [None, [0, 64, 64, 130, 131, 300]], ids=["dense", "packed"])
def test_outputs_and_states(function: Any, dtype: torch.dtype, edges: list[int] | None) -> None:
    check(function, gdn_call(dtype=dtype, edges=edges))


@both
@pytest.mark.parametrize(
    "options",
    [
        {"T": 0},
        {"T": 1},
        {"T": 64, "H": 3, "HV": 3},
        {"T": 65, "H": 1, "HV": 8},
        {"T": 129, "K": 1, "V": 1},
        {"T": 70, "K": 128, "V": 24, "state": False},
        {"T": 90, "normalised": True},
        {"T": 130, "zero_gates": True},
        {"B": 0, "T": 10},
        {"T": 40, "HV": 0},
        {"T": 40, "HV": 0, "edges": [0, 17, 40]},
        {"T": 50, "edges": [0]},
        {"T": 50, "edges": [0, 0, 0]},
        {"T": 50, "edges": [0, 17]},
        {"T": 0, "edges": [0, 0]},
        {"T": 300, "edges": list(range(0, 301, 3))},
    ],
    ids=str,
)
def test_shapes(function: Any, options: dict[str, Any]) -> None:
    check(function, gdn_call(**options))


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(0, 150), max_size=6),
    behind=st.integers(0, 5),
    heads=st.sampled_from([(1, 1), (2, 2), (1, 3), (2, 4)]),
    seed=st.integers(0, 1000),
    int32=st.booleans(),
    function=st.sampled_from(FUNCTIONS),
)
def test_any_packing(
    lengths: list[int], behind: int, heads: tuple[int, int], seed: int, int32: bool, function: Any
) -> None:
    edges = [0]
    for length in lengths:
        edges.append(edges[-1] + length)
    call = gdn_call(T=edges[-1] + behind, H=heads[0], HV=heads[1], K=8, V=6, edges=edges, seed=seed)
    if int32:
        call["cu_seqlens"] = call["cu_seqlens"].int()
    o, final = function(**call)
    wanted_o, wanted_final = expected(call)
    assert relative(o, wanted_o) <= 1e-5
    assert relative(final, wanted_final) <= 1e-5
    assert not o[:, edges[-1] :].any()


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("edges", [None, [0, 64, 64, 130, 290]], ids=["dense", "packed"])
def test_all_gradients(function: Any, dtype: torch.dtype, edges: list[int] | None) -> None:
    call = gdn_call(dtype=dtype, edges=edges)
    tensors = leaves(call)
    o, final = function(**call)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in (o, final)]
    grads = torch.autograd.grad(
        (o.double() * weights[0]).sum() + (final.double() * weights[1]).sum(), [*tensors.values()]
    )
    exact = {**call, **{name: x.detach().double().requires_grad_() for name, x in tensors.items()}}
    wanted_o, wanted_final = expected(exact)
    loss = (wanted_o * weights[0]).sum() + (wanted_final * weights[1]).sum()
    wanted = torch.autograd.grad(loss, [exact[name] for name in tensors])
    for name, grad, reference in zip(tensors, grads, wanted, strict=True):
        assert relative(grad, reference) <= EXACT[dtype], name


def test_gradcheck() -> None:
    call = gdn_call(B=1, T=5, H=1, HV=2, K=3, V=2, dtype=torch.float64)
    tensors = leaves(call)

    def run(*inputs: torch.Tensor) -> Any:
        return chunk_gated_delta_rule(**{**call, **dict(zip(tensors, inputs, strict=True))})

    assert torch.autograd.gradcheck(run, tuple(tensors.values()))


@both
def test_strong_decays_cost_the_tokens_behind_them_nothing(function: Any) -> None:
    call = gdn_call(T=128)
    call["g"][:, 5] = -600.0
    call["g"][:, 70] = float("-inf")
    call["g"][:, 90:] *= 1e-3
    check(function, call)


@both
def test_nan_behind_the_last_sequence_stays_there(function: Any) -> None:
    call = gdn_call(T=100, edges=[0, 30, 80])
    for name in ("q", "k", "v", "g", "beta"):
        call[name][:, 80:] = float("nan")
        call[name].requires_grad_()
    o, final = function(**call)
    assert not o[:, 80:].any()
    assert torch.isfinite(o).all()
    grads = torch.autograd.grad(o.sum() + final.sum(), [call[name] for name in ("q", "k", "v", "g", "beta")])
    assert all(torch.isfinite(grad).all() and not grad[:, 80:].any() for grad in grads)


@both
@pytest.mark.parametrize("T", [1, 20, 100])
def test_nan_stays_in_its_sequence(function: Any, T: int) -> None:
    call = gdn_call(B=3, T=T, normalised=True)
    clean, clean_final = function(**call)
    for name in ("q", "k", "v", "g", "beta", "initial_state"):
        call[name][1] = float("nan")
    o, final = function(**call)
    assert o[1].isnan().all()
    assert torch.equal(o[::2], clean[::2])
    assert torch.equal(final[::2], clean_final[::2])


@both
def test_states_may_be_v_first_strided_and_in_half_precision(function: Any) -> None:
    call = gdn_call()
    wanted_o, wanted_final = expected({**call, "initial_state": call["initial_state"].bfloat16()})
    call["initial_state"] = call["initial_state"].mT.bfloat16()
    o, final = function(**call, state_v_first=True)
    assert relative(o, wanted_o) <= 1e-5
    assert relative(final.mT, wanted_final) <= 1e-5


@both
def test_strided_inputs_equal_contiguous_ones(function: Any) -> None:
    call = gdn_call()
    strided = {
        name: x.transpose(0, 1).contiguous().transpose(0, 1) if isinstance(x, torch.Tensor) else x
        for name, x in call.items()
    }
    for one, other in zip(function(**call), function(**strided), strict=True):
        assert torch.equal(one, other)


@both
@pytest.mark.parametrize("scale", [0.0, 0.5, None])
def test_scale_is_what_was_said(function: Any, scale: float | None) -> None:
    call = {**gdn_call(), "scale": scale}
    check(function, call)
    assert bool(function(**call)[0].any()) is (scale != 0.0)


@both
def test_no_final_state_unless_asked(function: Any) -> None:
    call = gdn_call()
    assert function(**{**call, "output_final_state": False})[1] is None


@both
def test_inputs_are_left_as_they_were(function: Any) -> None:
    call = gdn_call(edges=[0, 30, 300])
    before = {name: x.clone() for name, x in call.items() if isinstance(x, torch.Tensor)}
    function(**call)
    assert all(torch.equal(call[name], x) for name, x in before.items())


@both
def test_edges_changed_in_place_are_read_anew(function: Any) -> None:
    call = gdn_call(edges=[0, 64, 130, 300])
    function(**call)
    call["cu_seqlens"].copy_(torch.tensor([0, 101, 260, 300]))
    check(function, call)
    with torch.inference_mode():
        edges = call["cu_seqlens"].clone()
        function(**{**call, "cu_seqlens": edges})
        edges.copy_(torch.tensor([0, 1, 2, 300]))
        assert (
            relative(function(**{**call, "cu_seqlens": edges})[0], expected({**call, "cu_seqlens": edges})[0]) <= 1e-5
        )


def test_the_layout_for_cuda_graphs_gives_the_same() -> None:
    from importlib import import_module

    chunk, layout, scan = (import_module(f"kernelreg_backends.torch.{name}") for name in ("chunk", "layout", "scan"))
    for edges in ([0, 64, 64, 130, 131, 290], [0, 0, 300], [0, 300, 300], [0, 0], [0]):
        call = gdn_call(edges=edges, normalised=True, dtype=torch.float64)
        inputs = tuple(call[name] for name in ("q", "k", "v", "g", "beta"))
        ordered = layout.OrderedLayout(call["cu_seqlens"], 300, 16)
        o, final = scan.Rule(chunk.in_chunks, False, 32**-0.5).scan(inputs, call["initial_state"], ordered)
        wanted_o, wanted_final = expected(call)
        assert relative(o, wanted_o) <= 1e-10
        assert relative(final, wanted_final) <= 1e-10


def test_the_layout_for_cuda_graphs_gives_zeros_where_there_is_no_row() -> None:
    from importlib import import_module

    chunk, layout, scan = (import_module(f"kernelreg_backends.torch.{name}") for name in ("chunk", "layout", "scan"))
    call = gdn_call(T=10, edges=[0])
    inputs = tuple(call[name] for name in ("q", "k", "v", "g", "beta"))
    ordered = layout.OrderedLayout(call["cu_seqlens"], 10, 16)
    o, _ = scan.Rule(chunk.in_chunks, False, 1.0).scan(inputs, call["initial_state"], ordered)
    assert o.shape == call["v"].shape
    assert not o.any()


def test_long_batches_are_worked_on_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import import_module

    layout = import_module("kernelreg_backends.torch.layout")
    monkeypatch.setattr(layout, "elements_at_once", lambda device: 128 * 4 * 48)
    check(chunk_gated_delta_rule, gdn_call(edges=[0, 64, 70, 300]))
    check(chunk_gated_delta_rule, gdn_call())


def test_no_gates_mean_no_decay_and_full_steps() -> None:
    call = gdn_call()
    o, _ = fused_recurrent_gated_delta_rule(**{**call, "g": None, "beta": None})
    plain = {**call, "g": torch.zeros_like(call["g"]), "beta": torch.ones_like(call["beta"])}
    assert relative(o, expected(plain)[0]) <= 1e-5


@both
def test_it_is_deterministic_where_torch_is_told_to_be(function: Any) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        call = gdn_call(edges=[0, 100, 300])
        leaves(call)
        with kernelreg.use(strict=True):
            first, second = (torch.autograd.grad(function(**call)[0].sum(), call["k"])[0] for _ in range(2))
        assert torch.equal(first, second)
    finally:
        torch.use_deterministic_algorithms(False)


@both
def test_autocast_does_not_lower_it(function: Any) -> None:
    call = gdn_call()
    with torch.autocast("cpu", torch.bfloat16):
        check(function, call)
