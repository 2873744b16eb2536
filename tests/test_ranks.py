"""What ranks agree on, from what they say of themselves: no process, no torch."""

from __future__ import annotations

import pickle
import random
import socket
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kernelreg
from kernelreg import Agreement, Facts, RanksError
from kernelreg.agreement import Agreed, Asked, Message, agree_on, decode, encode, machine_differences, told_ranks
from kernelreg.api import asked
from kernelreg.call import Call
from kernelreg.decoding import NOT_JSON
from kernelreg.policy import Policy
from kernelreg.ranks import message_of
from kernelreg.registry import Registry
from kernelreg.resolver import Candidate, decide, judge
from tests.machines import machine
from tests.test_resolver import BUILT_IN, calls, machines, policies

H200 = machine("h200")
CHUNK = Call(operation="gdn.chunk", device="cuda:0")
WITHOUT_QLA = machine("h200", packages={"flash-qla": None})


def message(
    rank: int,
    facts: Facts,
    call: Call = CHUNK,
    policy: Policy | None = None,
    registry: Registry = BUILT_IN,
    **more: Any,
) -> Message:
    """What a rank on that machine says."""
    policy = policy or Policy()
    asked = Asked(call=call, policy=policy, judged=tuple(judge(registry, facts, call, policy)))
    return Message(rank=rank, host=f"node-{rank // 4}", sent=str(rank), facts=facts, asked=(asked,), **more)


def row(decision: Agreed, backend: str, kernel: str) -> Candidate:
    """One kernel's verdict."""
    return next(each for each in decision.candidates if (each.backend, each.kernel) == (backend, kernel))


#: Machines, calls and policies of ranks; a forced backend is another test's.
jobs = st.tuples(
    st.lists(st.tuples(machines, policies), min_size=1, max_size=4),
    calls,
).map(
    lambda job: [
        (facts, job[1], msgspec.structs.replace(policy, strict=job[0][0][1].strict and len(job[0]) == 1))
        for facts, policy in job[0]
    ]
)


@given(jobs, st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=50)
def test_every_rank_chooses_the_same_and_it_runs_on_all(job: list[Any], chance: random.Random) -> None:
    messages = [message(rank, *each) for rank, each in enumerate(job)]
    shuffled = list(messages)
    chance.shuffle(shuffled)
    agreed = [agree_on(shuffled, rank)[0] for rank in range(len(job))]
    assert len({(each.backend, each.kernel) for each in agreed}) == 1
    assert len({each.candidates for each in agreed}) == 1
    alone = [decide(BUILT_IN, facts, call, policy) for facts, call, policy in job]
    able = [{(each.backend, each.kernel) for each in decision.candidates if each.accepted} for decision in alone]
    common = set.intersection(*able)
    if agreed[0].backend is None:
        assert not common
    else:
        assert (agreed[0].backend, agreed[0].kernel) in common
        accepted = {(each.backend, each.kernel) for each in agreed[0].candidates if each.accepted}
        assert accepted == common


@given(jobs, st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=50)
def test_which_rank_is_on_which_machine_does_not_matter(job: list[Any], chance: random.Random) -> None:
    moved = list(job)
    chance.shuffle(moved)
    one, other = (agree_on([message(rank, *each) for rank, each in enumerate(those)], 0)[0] for those in (job, moved))
    assert (one.backend, one.kernel) == (other.backend, other.kernel)
    assert [(each.backend, each.kernel, each.status) for each in one.candidates] == [
        (each.backend, each.kernel, each.status) for each in other.candidates
    ]


@given(machines, calls, policies, st.integers(1, 3))
@settings(deadline=None, max_examples=50)
def test_a_single_rank_and_equal_ranks_decide_as_resolve_does(
    facts: Facts, call: Call, policy: Policy, size: int
) -> None:
    alone = decide(BUILT_IN, facts, call, policy)
    for agreed in (
        agree_on([message(rank, facts, call, policy) for rank in range(size)], rank)[0] for rank in range(size)
    ):
        assert not agreed.differences
        for field in alone.__struct_fields__:
            assert getattr(agreed, field) == getattr(alone, field)
        assert all(each.candidates == alone.candidates for each in agreed.ranks)


@given(jobs)
@settings(deadline=None, max_examples=30)
def test_messages_and_agreements_travel(job: list[Any]) -> None:
    messages = [message(rank, *each) for rank, each in enumerate(job)]
    assert decode(encode(each) for each in reversed(messages)) == messages
    (agreed,) = agree_on(messages, 0)
    agreement = Agreement(agreed)
    assert Agreement.from_json(agreement.to_json()) == agreement == pickle.loads(pickle.dumps(agreement))
    assert [each["rank"] for each in agreement.to_dict()["ranks"]] == list(range(len(job)))


def test_what_one_rank_lacks_is_told_by_all_with_its_number() -> None:
    messages = [message(rank, WITHOUT_QLA if rank == 3 else H200) for rank in range(8)]
    told = {Agreement(agree_on(messages, rank)[0]).explain() for rank in range(8)}
    assert len(told) == 1
    (text,) = told
    assert "gdn.chunk on cuda:0: fla triton" in text
    assert "- package-missing: rank 3: needs flash-qla >=0.1.1, there is none" in text
    assert "fix: pip install flash-qla  # on rank 3" in text
    assert "alone     ranks 0-2, 4-7: flash_qla sm90" in text
    assert "rank 3: fla triton" in text
    assert "packages.flash-qla: 0.1.3 on ranks 0-2, 4-7; none on rank 3" in text


def test_a_reason_of_all_ranks_names_none() -> None:
    (agreed,) = agree_on([message(0, H200), message(1, WITHOUT_QLA)], 0)
    reasons = row(agreed, "flash_qla", "sm100").reasons
    assert [str(each.code) for each in reasons] == ["compute-capability", "package-missing"]
    assert reasons[0].subject == "compute capability"
    assert reasons[1].subject == "rank 1"


def test_the_slowest_rank_decides_which_kernel_is_faster() -> None:
    """Ranks wait for each other: 3 × on one and 100 × on the other is worse than 5 × on both."""

    def registry(steady: float, uneven: float) -> Registry:
        from kernelreg.descriptor import make_descriptor
        from kernelreg.registry import Backend
        from tests.machines import descriptor

        found = Registry()
        for name, speedup in (("steady", steady), ("uneven", uneven)):
            kernel = {"preference": [{"speedup": speedup, "source": "made up for a test"}]}
            found = found.adding(Backend(descriptor=make_descriptor(descriptor(name, kernel=kernel)), origin="a test"))
        return found

    facts = machine("cpu-only")
    call = Call(operation="gdn.chunk", device="cpu")
    messages = [message(0, facts, call, registry=registry(5, 100)), message(1, facts, call, registry=registry(5, 3))]
    assert [each.backend for each in agree_on(messages, 0)] == ["steady"]
    assert "3 × against 5 ×" in Agreement(agree_on(messages, 0)[0]).explain()


def test_a_backend_that_one_rank_does_not_know_is_not_chosen() -> None:
    without = Registry(tuple(each for each in BUILT_IN.backends if each.name != "flash_qla"))
    (agreed,) = agree_on([message(0, H200), message(1, H200, registry=without)], 0)
    assert agreed.backend == "fla"
    (reason,) = row(agreed, "flash_qla", "sm90").reasons
    assert str(reason) == "package-missing: rank 1: needs backend flash_qla with the kernel sm90, there is none"


def test_what_is_disabled_on_one_rank_runs_on_none() -> None:
    disabled = Policy(disable=("flash_qla",), origin={"disable": "KERNELREG_DISABLE"})
    (agreed,) = agree_on([message(0, H200), message(1, H200, policy=disabled)], 0)
    assert agreed.backend == "fla"
    (reason,) = row(agreed, "flash_qla", "sm90").reasons
    assert str(reason) == "disabled: rank 1: KERNELREG_DISABLE: disables flash_qla"
    assert [str(each) for each in agreed.differences] == [
        "policy.disable: none on rank 0; flash_qla (KERNELREG_DISABLE) on rank 1"
    ]


FORCED = Policy(backend={"gdn.chunk": "fla"}, origin={"backend.gdn.chunk": "KERNELREG_BACKEND"})
STRICT = Policy(prefer=("fla",), strict=True, origin={"prefer": "use()", "strict": "KERNELREG_STRICT"})


@pytest.mark.parametrize(
    ("policy", "told"),
    [
        (FORCED, "ranks 0, 2: nothing is forced; rank 1: KERNELREG_BACKEND forces fla"),
        (STRICT, "ranks 0, 2: nothing is forced; rank 1: use() and KERNELREG_STRICT allow fla alone"),
    ],
)
def test_a_choice_that_is_forced_on_some_ranks_alone_is_an_error(policy: Policy, told: str) -> None:
    messages = [message(0, H200), message(1, H200, policy=policy), message(2, H200)]
    for rank in range(3):
        with pytest.raises(RanksError, match="forced differently") as caught:
            agree_on(messages, rank)
        assert told in str(caught.value)
        assert caught.value.ranks == (1,)
    same = [message(rank, H200, policy=policy) for rank in range(3)]
    assert agree_on(same, 0)[0].backend == "fla"


def test_a_force_on_another_operation_is_none_of_this_ones() -> None:
    other = Policy(backend={"gdn.recurrent": "torch"}, origin={"backend.gdn.recurrent": "use()"})
    assert agree_on([message(0, H200), message(1, H200, policy=other)], 0)[0].backend == "flash_qla"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"call": Call(operation="gdn.recurrent", device="cuda:0")}, "rank 0: gdn.chunk; rank 1: gdn.recurrent"),
        ({"state": ("float32", "k-first")}, "rank 0: none; rank 1: float32 k-first"),
        ({"load": True}, "rank 0: load=False; rank 1: load=True"),
        ({"kernelreg": "9.9"}, "9.9 on rank 1"),
    ],
)
def test_ranks_that_do_not_ask_the_same_are_told_apart(change: dict[str, Any], told: str) -> None:
    messages = [message(0, H200), message(1, H200, **change)]
    with pytest.raises(RanksError) as caught:
        agree_on(decode(map(encode, messages)), 0)
    assert told in str(caught.value)
    assert caught.value.ranks == (1,)
    assert pickle.loads(pickle.dumps(caught.value)).ranks == (1,)


def test_a_message_of_a_release_that_is_not_known_yet_is_told_as_such() -> None:
    future = msgspec.json.encode({"kernelreg": "9.9", "rank": 1, "something": "new"})
    with pytest.raises(RanksError, match=r"different releases of kernelreg: .* on rank 0; 9\.9 on rank 1"):
        decode([encode(message(0, H200)), future])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda sent: sent.replace(b'"load":', b'"loud":true,"load":'), "unknown field `loud`"),
        (lambda sent: sent[:-9], "truncated"),
        (lambda sent: b"", "truncated"),
        (lambda sent: sent.replace(b'"host":"', b'"host":"\xff'), "Invalid UTF-8"),
        (lambda sent: sent.replace(b'"host":', b'"host":' + b"[" * 100_000), "recursion"),
    ],
    ids=["another field", "cut short", "empty", "not UTF-8", "without end"],
)
def test_a_message_of_other_code_under_the_same_number_is_told_as_such(
    change: Callable[[bytes], bytes], told: str
) -> None:
    sent = encode(message(0, H200))
    with pytest.raises(RanksError, match=rf"cannot be read: .*{told}.*; do all ranks run the same code") as caught:
        decode([sent, change(sent)])
    assert isinstance(caught.value.__cause__, NOT_JSON)


def test_a_host_or_a_trouble_that_is_no_utf_8_is_told_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node\udcff")
    (found,) = decode([encode(message_of(0, [asked("gdn", facts=H200)], trouble=["/stray/\udcff"]))])
    assert (found.host, found.trouble) == ("node?", ("/stray/?",))


def test_the_machines_are_compared_field_by_field() -> None:
    uuid = msgspec.structs.replace(H200.devices[0], uuid="GPU-2", pci_bus_id="00000000:00:07.0")
    alike = message(1, machine("h200", devices=(uuid,)))
    assert not machine_differences([message(0, H200), alike])  # another card of the same kind
    other = machine(
        "h200",
        torch="2.12.0+cu130",
        device={"memory_bytes": 80 << 30},
        packages={"triton": "3.7.1"},
        tools={},
        driver=None,
        environment={"TRITON_INTERPRET": "1"},
    )
    told = {each.field: str(each) for each in machine_differences([message(0, H200), message(1, other)])}
    assert set(told) == {
        "device",
        "devices",
        "driver.cuda",
        "driver.version",
        "environment.TRITON_INTERPRET",
        "packages.triton",
        "tools.nvcc",
        "torch.version",
    }
    assert told["packages.triton"] == "packages.triton: 3.6.0 on rank 0; 3.7.1 on rank 1"
    assert told["driver.version"] == "driver.version: 580.159.04 on rank 0; none on rank 1"


def test_calls_may_differ_and_the_explanation_says_so() -> None:
    short = msgspec.structs.replace(CHUNK, tokens=16)
    (agreed,) = agree_on([message(0, H200), message(1, H200, short)], 1)
    assert agreed.call == short
    assert [str(each) for each in agreed.differences] == ["call.tokens: none on rank 0; 16 on rank 1"]


@pytest.mark.parametrize(
    ("ranks", "told"),
    [([3], "rank 3"), ([0, 1], "ranks 0-1"), ([5, 0, 2, 1], "ranks 0-2, 5"), ([1, 3], "ranks 1, 3")],
)
def test_ranks_are_told_in_spans(ranks: list[int], told: str) -> None:
    assert told_ranks(ranks) == told


def test_an_agreement_read_from_data_has_no_function() -> None:
    (agreed,) = agree_on([message(0, H200)], 0)
    assert isinstance(agreed, Agreed)
    with pytest.raises(kernelreg.KernelregError, match="read from data"):
        _ = Agreement.from_json(Agreement(agreed).to_json()).function
    with pytest.raises(kernelreg.KernelregError, match="ranks"):
        Agreement.from_json(kernelreg.resolve("gdn", facts=H200).to_json())
