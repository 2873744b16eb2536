"""``kernelreg.gdn`` inside ``torch.compile``: one graph, the eager call's numbers and gradients, any length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import kernelreg
from kernelreg.gdn import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from tests.compiling import anew, counted, whole
from tests.gdn_cases import EXACT, Call, expected, gdn_call, leaves, pool_call, relative

__all__ = ["anew"]


def raw(call: Call) -> Call:
    HV = call["v"].shape[2]
    call = call | {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}
    return call | {"A_log": torch.linspace(-1, 1, HV), "dt_bias": torch.linspace(-2, 0, HV)}


def v_first(call: Call) -> Call:
    return call | {"state_v_first": True, "initial_state": call["initial_state"].mT.contiguous()}


CALLS: dict[str, Callable[[], Call]] = {
    "dense": lambda: gdn_call(T=40),
    "varlen": lambda: gdn_call(T=40, edges=[0, 10, 10, 40]),
    "no states": lambda: gdn_call(T=40, state=False) | {"output_final_state": False},
    "raw gates": lambda: raw(gdn_call(T=40)),
    "state_v_first": lambda: v_first(gdn_call(T=40)),
    "scale, bfloat16": lambda: gdn_call(T=40, dtype=torch.bfloat16) | {"scale": 0.25},
    "FLA's aliases": lambda: gdn_call(T=40) | {"head_first": False, "cp_context": None},
}
EACH = [
    *((chunk_gated_delta_rule, name) for name in CALLS),
    *((fused_recurrent_gated_delta_rule, name) for name in ("varlen", "raw gates")),
]


@pytest.mark.parametrize(("function", "name"), EACH)
def test_a_graph_gives_what_the_call_gives(function: Callable[..., Any], name: str) -> None:
    call = CALLS[name]()
    for value, wanted in zip(whole(function)(**call), function(**call), strict=True):
        assert (value is None) == (wanted is None)
        assert value is None or torch.equal(value, wanted)


@pytest.mark.parametrize(("function", "name"), EACH)
def test_the_gradients_are_the_calls(function: Callable[..., Any], name: str) -> None:
    grads = []
    for run in (whole(function), function):
        call = CALLS[name]()
        inputs = leaves(call)
        results = [each for each in run(**call) if each is not None]
        grads.append(torch.autograd.grad([each.float().square().sum() for each in results], list(inputs.values())))
    for value, wanted in zip(*grads, strict=True):
        assert relative(value, wanted) <= 1e-6
        assert wanted.any()


def test_one_input_alone_may_have_a_gradient() -> None:
    call = gdn_call(T=20)
    call["v"].requires_grad_()
    (graph,), (eager,) = (
        torch.autograd.grad(run(**call)[0].sum(), [call["v"]])
        for run in (whole(chunk_gated_delta_rule), chunk_gated_delta_rule)
    )
    assert torch.equal(graph, eager)


@pytest.mark.parametrize("layout", ["[N]", "[N, S]"])
def test_a_pool_is_updated_in_place(layout: str) -> None:
    slots: Any = [3, -1, 4] if layout == "[N]" else [[3, 5], [-1, -1], [4, 6]]
    T = 1 if layout == "[N]" else 2
    call = pool_call([T] * 3, slots, packed=False) | {"output_final_state": True}
    wanted = expected(call)
    o, pool = whole(fused_recurrent_gated_delta_rule)(**call)
    assert pool is call["initial_state"]
    for value, exact in zip((o, pool), wanted, strict=True):
        assert relative(value, exact) <= EXACT[torch.float32]


def test_lengths_share_a_graph() -> None:
    run, graphs = counted(chunk_gated_delta_rule)
    for T in (20, 33, 47, 64, 65, 100):
        run(**gdn_call(T=T))
    assert len(graphs) <= 2  # one for the first length, one for all
    assert {node.op for node in graphs[-1].graph.nodes} >= {"call_function"}


def test_inductor_takes_it() -> None:
    def layer(**call: Any) -> Any:
        o, final = chunk_gated_delta_rule(**call)
        assert final is not None
        return torch.nn.functional.silu(o) * 2, final + 1

    call = gdn_call(T=40)
    for value, wanted in zip(whole(layer, "inductor")(**call), layer(**call), strict=True):
        assert relative(value, wanted) <= 1e-6


def test_the_kernel_is_chosen_when_the_graph_runs() -> None:
    run, call = whole(chunk_gated_delta_rule), gdn_call(T=20)
    run(**call)
    with kernelreg.use(disable="torch"), pytest.raises(kernelreg.NoBackendError, match="disables torch"):
        run(**call)
    run(**call)


def test_a_wrong_call_is_told_by_its_own_error() -> None:
    call = gdn_call(T=20)
    with pytest.raises(kernelreg.CallError, match="A_log or dt_bias without use_gate_in_kernel"):
        whole(chunk_gated_delta_rule)(**call, A_log=torch.zeros(call["v"].shape[2]))


@pytest.mark.parametrize("name", ["dense", "varlen", "no states", "raw gates"])
def test_the_operator_is_what_its_schema_says(name: str) -> None:
    from kernelreg.compiled import _arguments

    call = CALLS[name]()
    leaves(call)
    tensors = tuple(call.pop(each) for each in ("q", "k", "v", "g", "beta"))
    torch.library.opcheck(torch.ops.kernelreg.gdn_chunk.default, tuple(_arguments(tensors, call)))
