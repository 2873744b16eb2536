"""Decode from a pool of states: the torch backend, and the bridge that kernels without pools share."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernelreg
from kernelreg import CallError
from kernelreg.gdn import fused_recurrent_gated_delta_rule
from tests.gdn_cases import Call, expected, pool_call, relative


def check(call: Call) -> None:
    """Outputs and the whole pool against the reference; slots that no sequence writes keep every bit."""
    before = call["initial_state"].clone()
    wanted_o, wanted_pool = expected(call)
    o, final = fused_recurrent_gated_delta_rule(**call)
    pool = call["initial_state"]
    assert final is (pool if call["output_final_state"] else None)
    rounding = {torch.float32: 1e-5, torch.bfloat16: 2**-8}[pool.dtype]
    assert relative(o, wanted_o) <= rounding
    assert relative(pool, wanted_pool) <= rounding
    written = (wanted_pool != before.double()).flatten(1).any(1)
    assert torch.equal(pool[~written], before[~written])
    silent = ~wanted_o.flatten(2).any(-1)
    assert not o[silent].any()


def on_meta(call: Call) -> Call:
    """The call on a device whose values nobody can look up."""
    return {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in call.items()}


@st.composite
def pooled(draw: st.DrawFn) -> Call:
    count = draw(st.integers(0, 4))
    packed = draw(st.booleans())
    lengths = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    if not packed:
        lengths = [draw(st.integers(0, 3))] * max(count, 1)
    order = draw(st.permutations(range(24)))
    missing = st.sampled_from([False, False, True])
    several = draw(st.booleans())
    if several:
        slots: Any = [[-1 if draw(missing) else order[4 * n + s] for s in range(4)] for n in range(len(lengths))]
    else:
        slots = [-1 if draw(missing) else order[n] for n in range(len(lengths))]
    accepted = [draw(st.integers(1, 4)) for _ in lengths] if several and draw(st.booleans()) else None
    call = pool_call(
        lengths,
        slots,
        accepted=accepted,
        pool=24,
        packed=packed,
        pool_dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        K=8,
        V=6,
        seed=draw(st.integers(0, 99)),
        **({"behind": draw(st.integers(0, 2))} if packed else {}),
    )
    if several and not len(lengths):
        call["state_indices"] = call["state_indices"].view(0, 1).expand(0, 4)
    if draw(st.booleans()):
        call |= {"initial_state": call["initial_state"].mT.contiguous(), "state_v_first": True}
    if draw(st.booleans()):
        call["state_indices"] = call["state_indices"].int()
    return call


@settings(max_examples=150, deadline=None)
@given(call=pooled())
def test_any_pool(call: Call) -> None:
    check(call)


@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_thousand_steps_on_64_slots(pool_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    pool = torch.zeros(64, 4, 8, 6, dtype=pool_dtype)
    exact = pool.double()
    for step in range(1000):
        slots = torch.randperm(64, generator=generator)[:8]
        slots[torch.rand(8, generator=generator) < 0.2] = -1
        call = pool_call([1] * 8, slots.tolist(), packed=False, K=8, V=6, seed=step)
        wanted_o, after = expected({**call, "initial_state": exact})
        before = pool.clone()
        o, _ = fused_recurrent_gated_delta_rule(**{**call, "initial_state": pool})
        others = torch.ones(64, dtype=torch.bool)
        others[slots[slots >= 0]] = False
        assert torch.equal(pool[others], before[others])
        assert not o[slots < 0].any()
        assert relative(o, wanted_o) <= (1e-5 if pool_dtype == torch.float32 else 1e-2)
        # The recurrence forgets, so roundings of the pool do not add up.
        assert relative(pool, after) <= (1e-5 if pool_dtype == torch.float32 else 1e-2)
        exact = after


def test_a_verification_can_be_cut_short() -> None:
    """Three draft tokens, of which the next call accepts two: it goes on from the state after the second."""
    first = pool_call([3, 3], [[0, 1, 2], [3, 4, 5]], packed=False)
    fused_recurrent_gated_delta_rule(**first)
    pool = first["initial_state"]
    after_two = pool[[1, 4]].clone()
    second = pool_call([3, 3], [[0, 1, 2], [3, 4, 5]], packed=False, accepted=[2, 2], seed=5)
    plain = {**second, "initial_state": after_two}
    for name in ("state_indices", "num_accepted_tokens"):
        del plain[name]
    o, _ = fused_recurrent_gated_delta_rule(**{**second, "initial_state": pool})
    assert relative(o, expected(plain)[0]) <= 1e-5


def test_a_pool_may_be_a_strided_view() -> None:
    whole = torch.zeros(8, 2, 4, 32, 48)
    call = pool_call([1, 1], [6, -1], packed=False)
    call["initial_state"] = whole[:, 1].copy_(call["initial_state"])
    check(call)
    assert not whole[:, 0].any()


@pytest.mark.parametrize(
    "view",
    [
        lambda pool: pool.mT.contiguous().mT,
        lambda pool: torch.cat([pool, pool + 1])[::2].copy_(pool),
        lambda pool: pool.repeat(1, 2, 1, 1)[:, :4].copy_(pool),
        lambda pool: pool.transpose(0, 1).contiguous().transpose(0, 1),
        lambda pool: pool.repeat(1, 1, 1, 3)[..., 1::3].copy_(pool),
    ],
    ids=["turned", "every other", "of more heads", "heads first", "stepped"],
)
@pytest.mark.parametrize("slots", [[6, -1], [[6, 1], [-1, 2]]], ids=["[N]", "[N, S]"])
def test_pools_of_any_strides(view: Any, slots: Any) -> None:
    call = pool_call([1, 1], slots, packed=False)
    call["initial_state"] = view(call["initial_state"])
    assert not call["initial_state"].is_contiguous()
    check(call)


@pytest.mark.parametrize(
    "view",
    [
        lambda pool: pool[:1].expand(8, -1, -1, -1),
        lambda pool: pool[:, :1].expand(-1, 4, -1, -1),
        lambda pool: pool[..., :1].expand(-1, -1, -1, 48),
        lambda pool: pool.flatten()[: 4 * 32 * 48 + 70].as_strided((8, 4, 32, 48), (10, 32 * 48, 48, 1)),
        lambda pool: pool.flatten().as_strided((8, 4, 32, 48), (4 * 32 * 48 - 1, 32 * 48, 48, 1)),
    ],
    ids=["one state", "one head", "one column", "overlapping windows", "an entry short"],
)
def test_a_pool_whose_entries_share_memory_cannot_be_written(view: Any) -> None:
    call = pool_call([1, 1], [3, 4], packed=False)
    whole = call["initial_state"]
    before = whole.clone()
    with pytest.raises(CallError, match=r"initial_state is \[8, 4, 32, 48\] with strides .* may share memory"):
        fused_recurrent_gated_delta_rule(**{**call, "initial_state": view(whole)})
    assert torch.equal(whole, before)


@pytest.mark.parametrize("host", [{}, {"cu_seqlens_cpu": True}], ids=["on the CPU", "cu_seqlens_cpu"])
@pytest.mark.parametrize("slots", [[3, 4], [[3, 4, 5], [6, 7, 0]]], ids=["[N]", "[N, S]"])
@pytest.mark.parametrize("edges", [[1, 3, 5], [0, 4, 3], [0, 3, 6], [0, -1, 5]], ids=str)
def test_edges_that_are_none_leave_the_pool_alone(edges: list[int], slots: Any, host: dict[str, Any]) -> None:
    call = pool_call([3, 2], slots)
    if host:
        call["cu_seqlens_cpu"] = torch.tensor(edges)
    else:
        call["cu_seqlens"] = torch.tensor(edges)
    before = call["initial_state"].clone()
    with pytest.raises(CallError, match=r"cu_seqlens is .*; accepted: from 0, never back, and not beyond T = 5"):
        fused_recurrent_gated_delta_rule(**call)
    assert torch.equal(call["initial_state"], before)


@pytest.mark.parametrize("host", [False, True], ids=["on the CPU", "cu_seqlens_cpu"])
def test_a_packed_sequence_needs_a_slot_for_each_of_its_tokens(host: bool) -> None:
    call = pool_call([1, 3, 2], [[0, 1], [2, 3], [4, 5]])
    if host:
        call = {**on_meta(call), "cu_seqlens_cpu": call["cu_seqlens"]}
    with pytest.raises(CallError, match=r"state_indices is \[3, 2\].*a slot for each of a sequence's 3 tokens"):
        fused_recurrent_gated_delta_rule(**call)


@pytest.mark.parametrize("edges", [[0, 1, 5], [0, 3, 99], [-7, 2, 5], [0, 4, 2], [9, 9, 12]], ids=str)
def test_edges_that_are_not_looked_up_reach_no_further_than_slots_and_tokens(edges: list[int]) -> None:
    """As on a GPU without ``cu_seqlens_cpu``: here the bridge alone, on the CPU, where a wrong index is an error."""
    call = pool_call([5], [[0, 1]]) | {"cu_seqlens": torch.tensor(edges)}
    call["state_indices"] = torch.tensor([[0, 1], [2, 3]])
    before, wanted_o = call["initial_state"].clone(), torch.zeros(5, 4, 48, dtype=torch.float64)
    wanted_pool = before.clone()
    for slots, start, end in zip([[0, 1], [2, 3]], edges[:-1], edges[1:], strict=True):
        places = [place for place in (start, start + 1) if 0 <= place < min(end, 5)]
        if not places:
            continue
        cut = {name: call[name][:, places] for name in ("q", "k", "v", "g", "beta")}
        used = torch.tensor([[*slots[places[0] - start :][: len(places)]]])
        part = {**call, **cut, "cu_seqlens": None, "state_indices": used, "initial_state": before}
        o, pool = expected(part)
        wanted_o[places] = o[0]
        wanted_pool[used[0]] = pool[used[0]].float()
    run = import_module("kernelreg_backends.torch.adapter").fused_recurrent_gated_delta_rule
    o, _ = run(**call)
    assert relative(o[0], wanted_o) <= 1e-5
    assert relative(call["initial_state"], wanted_pool) <= 1e-5
    assert torch.equal(o[0].any(-1), wanted_o.any(-1))


def test_more_slots_than_tokens_are_left_alone() -> None:
    """The state after token t goes to slot ``[n, t]``; what was accepted may be of a longer call before."""
    check(pool_call([2, 2], [[0, 1, 2, 3], [4, 5, 6, 7]], packed=False, accepted=[4, 3]))
    check(pool_call([2, 1, 0], [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]], pool=12, accepted=[4, 3, 2]))


def test_a_pool_on_the_meta_device_gives_shapes() -> None:
    machine = kernelreg.facts()
    for call in (pool_call([1, 1], [3, 4], packed=False), pool_call([2, 1], [[3, 4], [5, 6]])):
        o, _ = fused_recurrent_gated_delta_rule(**on_meta(call))
        assert (o.is_meta, o.shape) == (True, call["v"].shape)
    assert kernelreg.facts() == machine  # no accelerator of this machine has been found


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"initial_state": None}, "state_indices without initial_state"),
        ({"initial_state": torch.zeros(8, 4, 48, 32)}, r"a pool \[P, 4, 32, 48\]"),
        ({"state_indices": torch.tensor([0])}, r"\[N\] or \[N, S\] with N = 2"),
        ({"state_indices": torch.tensor([0.0, 1.0])}, "int32 or int64"),
        ({"state_indices": [3, 4]}, "state_indices is a list"),
        ({"state_indices": torch.tensor([0, 8])}, "has 8; accepted: -1 for none, and 0 to 7"),
        ({"state_indices": torch.tensor([0, -2])}, "has -2"),
        ({"state_indices": torch.tensor([3, 3])}, "a slot twice"),
        ({"state_indices": torch.tensor([3, 4], device="meta")}, "state_indices is on meta"),
        ({"state_indices": torch.tensor([[3], [4]])}, "a slot for each of a sequence's 2 tokens"),
        ({"num_accepted_tokens": torch.tensor([1, 1])}, r"with state_indices \[2, S\]"),
        (
            {"state_indices": torch.tensor([[0, 1], [2, 3]]), "num_accepted_tokens": torch.tensor([0, 1])},
            r"is \[0, 1\]; accepted: 1 to 2",
        ),
        ({"state_indices": None, "num_accepted_tokens": torch.tensor([1, 1])}, "without state_indices"),
    ],
)
def test_wrong_pools_are_named(change: dict[str, Any], told: str) -> None:
    call = pool_call([2, 2], [3, 4], packed=False)
    with pytest.raises(CallError, match=told):
        fused_recurrent_gated_delta_rule(**{**call, **change})


@pytest.mark.parametrize("name", ["q", "initial_state"])
def test_a_pool_has_no_gradient(name: str) -> None:
    call = pool_call([1, 1], [3, 4], packed=False)
    call[name].requires_grad_()
    with pytest.raises(CallError, match="no gradient"):
        fused_recurrent_gated_delta_rule(**call)
    with torch.no_grad():
        check(call)


def test_a_pool_of_inference_mode_is_updated_there_alone() -> None:
    with torch.inference_mode():
        call = pool_call([1, 1], [3, 4], packed=False)
        check(call)
    before = call["initial_state"].tolist()
    with pytest.raises(CallError, match=r"made under torch\.inference_mode\(\)"):
        fused_recurrent_gated_delta_rule(**call)
    assert call["initial_state"].tolist() == before
    assert not len(kernelreg.quarantine())  # no kernel is to blame
    q = pool_call([1, 1], [3, 4], packed=False)
    fused_recurrent_gated_delta_rule(**{**call, "initial_state": q["initial_state"]})  # the pool alone is written


def test_the_features_that_a_pool_shows() -> None:
    plain = pool_call([1, 1], [3, 4], packed=False)
    several = pool_call([2, 2], [[3, 4], [5, 6]], packed=False)
    shown = [kernelreg.resolve("gdn.recurrent", like=each).call.features for each in (plain, several)]
    assert [{"state-pool", "multi-token"} & each for each in shown] == [{"state-pool"}, {"state-pool", "multi-token"}]
