"""What every decision keeps, whatever the machine, the call and the backends."""

from __future__ import annotations

import pickle
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kernelreg
from kernelreg.call import Call, make_call
from kernelreg.descriptor import make_descriptor
from kernelreg.machine import Facts
from kernelreg.ops import operation_named
from kernelreg.policy import Policy
from kernelreg.registry import Backend, Registry, discover
from kernelreg.resolution import Resolution
from kernelreg.resolver import Decision, decide
from tests.machines import codes, decided, descriptor, machine

MACHINES = [machine(name) for name in ("h200", "cpu-only", "a100-ngc", "mixed-h100-rtx5090")]
FEATURES = sorted(operation_named("gdn").features)
DTYPES = ["bfloat16", "float16", "float32", "float64"]
BUILT_IN = discover(plugins=False)

machines = st.sampled_from(MACHINES)
sizes = st.none() | st.sampled_from([0, 1, 16, 64, 128, 256, 1024, 40_000])
calls = st.builds(
    make_call,
    st.sampled_from(["gdn.chunk", "gdn.recurrent"]),
    st.sampled_from(["cpu", "cuda:0", "cuda:1", "cuda:7"]),
    dtype=st.none() | st.sampled_from(DTYPES),
    gate_dtype=st.none() | st.sampled_from(DTYPES),
    head_dim_k=sizes,
    head_dim_v=sizes,
    heads=sizes,
    value_heads=sizes,
    tokens=sizes,
    features=st.none() | st.sets(st.sampled_from(FEATURES), max_size=4),
)
names = st.lists(st.sampled_from(BUILT_IN.names()), unique=True, max_size=2).map(tuple)
policies = st.builds(
    lambda prefer, disable, strict: Policy(
        prefer=prefer,
        disable=disable,
        strict=strict,
        origin=dict.fromkeys(("prefer", "disable", "strict"), "a test"),
    ),
    names,
    names,
    st.booleans(),
)
rules = st.sampled_from(["==9.0", "==12.*", ">=8.0", "==8.0 || ==9.0"])
others = st.builds(
    lambda rule, dtypes, features, speedup: Backend(
        descriptor=make_descriptor(
            descriptor(
                "other",
                kernel={
                    "requires": {"compute_capability": rule},
                    "accepts": {"dtype": dtypes, "features": features},
                    "preference": [{"speedup": speedup, "source": "a test"}],
                },
            )
        ),
        origin="a test",
    ),
    rules,
    st.lists(st.sampled_from(DTYPES), unique=True),
    st.lists(st.sampled_from(FEATURES), unique=True),
    st.floats(0.1, 1000),
)


@given(machines, calls, policies)
def test_the_chosen_has_no_reason_and_every_other_has_one(facts: Facts, call: Call, policy: Policy) -> None:
    decision = decide(BUILT_IN, facts, call, policy)
    assert len(decision.candidates) == len(list(BUILT_IN.kernels(call.operation)))
    for place, candidate in enumerate(decision.candidates):
        assert (candidate.status == "chosen") == (not candidate.reasons)
        assert candidate.status != "chosen" or place == 0
        assert candidate.status != "eligible" or [each.code for each in candidate.reasons] == ["outranked"]
        assert candidate.accepted == (candidate.status in ("chosen", "eligible"))
    chosen = [(each.backend, each.kernel) for each in decision.candidates if each.status == "chosen"]
    assert chosen == ([(decision.backend, decision.kernel)] if decision.backend else [])


@given(machines, calls, policies, st.randoms(use_true_random=False))
def test_the_order_of_backends_and_rows_does_not_matter(
    facts: Facts, call: Call, policy: Policy, chance: random.Random
) -> None:
    shuffled = list(BUILT_IN.backends)
    chance.shuffle(shuffled)
    assert decide(Registry(tuple(shuffled)), facts, call, policy) == decide(BUILT_IN, facts, call, policy)


@given(machines, calls, others)
def test_one_more_backend_never_turns_success_into_failure(facts: Facts, call: Call, other: Backend) -> None:
    before = decide(BUILT_IN, facts, call, Policy())
    after = decide(BUILT_IN.adding(other), facts, call, Policy())
    assert (before.backend is None) or (after.backend is not None)
    if after.backend != "other":
        assert (after.backend, after.kernel) == (before.backend, before.kernel)


@given(machines, calls, policies)
def test_json_reads_back_to_the_same_resolution(facts: Facts, call: Call, policy: Policy) -> None:
    resolution = Resolution(decide(BUILT_IN, facts, call, policy))
    assert Resolution.from_json(resolution.to_json()) == resolution


@given(machines, calls, policies)
@settings(max_examples=50)
def test_a_saved_facts_file_replays_the_decision(facts: Facts, call: Call, policy: Policy) -> None:
    from kernelreg.decoding import decode_json

    again = decode_json(facts.to_json().encode(), Facts, source="a test", error=kernelreg.FactsError)
    assert decide(BUILT_IN, again, call, policy) == decide(BUILT_IN, facts, call, policy)


@given(machines, calls)
def test_the_explanation_tells_every_reason(facts: Facts, call: Call) -> None:
    decision: Decision = decide(BUILT_IN, facts, call, Policy())
    text = Resolution(decision).explain()
    for candidate in decision.candidates:
        assert candidate.kernel in text
        for reason in candidate.reasons:
            assert str(reason) in text
            assert reason.fix is None or reason.fix in text


def test_a_long_bfloat16_call_on_an_h200_is_flash_qlas() -> None:
    resolution = decided(machine("h200"), dtype="bfloat16", head_dim_k=128, head_dim_v=128, tokens=32_768)
    assert (resolution.backend, resolution.kernel) == ("flash_qla", "sm90")


def test_an_a100_gets_fla_and_flash_qla_misses_nothing_but_the_card() -> None:
    resolution = decided(machine("a100-ngc"))
    assert resolution.backend == "fla"
    rows = [each for each in resolution.candidates if each.backend == "flash_qla"]
    assert rows
    assert {str(reason.code) for row in rows for reason in row.reasons} == {"compute-capability"}


def test_rows_without_a_backward_refuse_training() -> None:
    facts = machine("mixed-h100-rtx5090", packages={"flash-qla": "0.1.2"})
    forward = decided(facts, device="cuda:0")
    assert "feature" not in codes(forward, "flash_qla", "sm120-forward")
    assert forward.candidates[0].backend in ("flash_qla", "fla")
    training = decided(facts, device="cuda:0", features={"backward"})
    assert "feature" in codes(training, "flash_qla", "sm120-forward")
    assert training.backend == "fla"


@pytest.mark.parametrize(
    ("release", "capability", "usable"),
    [
        ("0.1.1", "9.0", True),
        ("0.1.1", "10.0", True),
        ("0.1.1", "10.3", False),
        ("0.1.1", "12.0", False),
        ("0.1.2", "12.0", True),
        ("0.1.2", "12.1", False),
        ("0.1.3", "10.3", True),
        ("0.1.3", "12.0", False),  # ImportError in every call
        ("0.1.3", "12.1", False),  # ValueError at import
        ("0.1.3", "8.9", False),
        ("0.1.4", "12.1", True),
    ],
)
def test_flash_qlas_cards_by_release(release: str, capability: str, usable: bool) -> None:
    facts = machine("h200", packages={"flash-qla": release}, device={"compute_capability": capability})
    rows = [each for each in decided(facts).candidates if each.backend == "flash_qla"]
    assert any(each.accepted for each in rows) is usable


def test_grouped_value_heads_need_fla_0_5() -> None:
    old = machine("a100-ngc", packages={"flash-linear-attention": "0.4.2", "fla-core": "0.4.2"})
    assert decided(old, heads=16, value_heads=32).backend == "torch"
    assert decided(machine("a100-ngc"), heads=16, value_heads=32).backend == "fla"
    assert decided(old, heads=16, value_heads=16).backend == "fla"


def test_value_heads_that_are_no_multiple_fit_no_kernel() -> None:
    resolution = decided(machine("h200"), heads=4, value_heads=6)
    assert resolution.backend is None
    assert all("heads" in codes(resolution, row.backend, row.kernel) for row in resolution.candidates)


def test_a_device_that_is_not_there_is_told_with_those_that_are() -> None:
    resolution = decided(machine("h200"), device="cuda:3")
    assert resolution.backend is None
    assert "not visible here (cuda:0)" in resolution.explain()


def test_without_torch_every_kernel_says_so_and_how_to_get_it() -> None:
    resolution = decided(machine("cpu-only", torch=None))
    assert resolution.backend is None
    for row in resolution.candidates:
        reason = next(each for each in row.reasons if each.code == "torch-missing")
        assert (reason.fix or "").startswith("pip install") is (row.backend == "torch")


def test_no_fix_is_offered_where_the_device_itself_does_not_fit() -> None:
    for facts in (machine("a100-ngc"), machine("cpu-only")):
        for row in decided(facts).candidates:
            unfit = {"compute-capability", "device-type"} & {str(each.code) for each in row.reasons}
            assert not unfit or not [each.fix for each in row.reasons if each.fix], row


def test_evidence_may_depend_on_the_tokens() -> None:
    preference = [
        {"speedup": 500.0, "source": "a test", "when": {"tokens": {"min": 1000}}},
        {"speedup": 1.5, "source": "a test"},
    ]
    undo = kernelreg.register(
        descriptor("steep", kernel={"preference": preference, "accepts": {"features": ["varlen"]}})
    )
    try:
        assert decided(machine("h200"), tokens=999).backend == "flash_qla"
        assert decided(machine("h200"), tokens=1000).backend == "steep"
        assert decided(machine("h200")).backend == "steep"  # tokens unknown counts as many
    finally:
        undo()


def test_a_slow_kernel_is_ranked_last_and_not_ruled_out() -> None:
    slow = [{"when": {}, "severity": "slow", "because": "a test", "url": "a test"}]
    undo = kernelreg.register(
        descriptor("slow", kernel={"preference": [{"speedup": 999.0, "source": "a test"}]}, known_bad=slow)
    )
    try:
        resolution = decided(machine("h200"))
        accepted = [row.backend for row in resolution.candidates if row.accepted]
        assert accepted[0] == "flash_qla"
        assert accepted[-1] == "slow"
    finally:
        undo()


def test_resolutions_and_errors_travel_between_processes() -> None:
    resolution = decided(machine("a100-ngc"))
    assert pickle.loads(pickle.dumps(resolution)) == resolution
    with pytest.raises(kernelreg.NoBackendError) as caught:
        kernelreg.resolve("gdn", facts=machine("h200"), device="cuda:9")
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert again.resolution == caught.value.resolution


@pytest.mark.parametrize("capability", [None, "sm_90", "9", "９.０", "9.0\n"])
def test_a_known_fault_is_not_passed_over_where_the_card_cannot_be_told(capability: str | None) -> None:
    packages = {"flash-linear-attention": "0.4.1", "fla-core": "0.4.1", "triton": "3.5.0"}
    facts = machine("h200", packages=packages, device={"compute_capability": capability})
    assert "known-bad" in codes(decided(facts, features={"backward"}), "fla", "triton-0.4")


def test_capture_of_packed_sequences_is_a_feature_of_its_own() -> None:
    assert "capture-varlen" in make_call("gdn", "cuda:0", features={"capture", "varlen"}).features
    packed = decided(machine("h200"), features={"capture", "varlen"})
    assert packed.backend == "flash_qla"
    assert "feature" in codes(packed, "flashinfer", "sm90")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"operation": 5}, "unknown operation 5; accepted: gdn, gdn.chunk, gdn.recurrent"),
        ({"operation": ["gdn"]}, r"unknown operation \['gdn'\]"),
        ({"operation": None}, "unknown operation None"),
        ({"features": "varlen"}, "features='varlen'; accepted: a set of features"),
        ({"features": 5}, "features=5; accepted: a set of features"),
        ({"features": [["varlen"]]}, r"unknown feature \['varlen'\]; accepted: backward, "),
        ({"features": {"gdn": {"varlen"}}}, "unknown feature 'gdn'; accepted: backward, "),
        ({"policy": 5}, "policy=5; accepted: None, or what kernelreg.make_policy gives"),
        ({"facts": 5}, "facts=5; accepted: kernelreg.Facts, or the path of a facts file"),
        ({"facts": b"here.json"}, "facts=b'here.json'; accepted"),
        ({"dtype": 5}, "unknown dtype '5'; accepted: bfloat16, "),
        ({"device": 5}, "unknown device '5'; accepted: cpu, "),
        ({"head_dim_k": "x"}, "head_dim_k='x'; accepted: a whole number"),
        ({"like": 5}, "like=5; accepted: a call's arguments by name"),
    ],
)
def test_arguments_of_a_wrong_kind_are_named(options: dict[str, object], told: str) -> None:
    with pytest.raises(kernelreg.ConfigurationError, match=told):
        kernelreg.resolve(**options)  # type: ignore[arg-type]


def test_no_features_are_none() -> None:
    assert kernelreg.resolve("gdn", facts=MACHINES[0], features=None).call.features == frozenset()


def test_an_absurd_range_is_refused_when_it_is_read() -> None:
    with pytest.raises(kernelreg.DescriptorError, match="length <= 200"):
        make_descriptor(descriptor("absurd", requires={"torch": ">=" + "9" * 5000}))
