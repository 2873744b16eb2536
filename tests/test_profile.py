"""A measured profile: what it says of a call, how it ranks, and what is refused."""

from __future__ import annotations

import json
import sys
import types
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kernelreg
from kernelreg import ConfigurationError, Facts
from kernelreg.agreement import Asked, Message, agree_on
from kernelreg.call import Call, make_call
from kernelreg.cli import main
from kernelreg.descriptor import Span, make_descriptor
from kernelreg.dispatch import Buckets
from kernelreg.policy import Policy
from kernelreg.profile import Evidence, load_profile, nearest_size, told_time
from kernelreg.registry import Backend, discover
from kernelreg.resolution import explain
from kernelreg.resolver import Candidate, decide, judge
from tests.machines import decided, descriptor, machine
from tests.profiles import SHAPE, point, profile

H200 = machine("h200")
BUILT_IN = discover(plugins=False)
#: The machines that run the tests may be busy with others.
RELAXED = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
QLA, FLA, TORCH = "flash_qla sm90", "fla triton", "torch chunk"


def evidence(*points: Any, facts: Facts = H200) -> Evidence:
    return Evidence(profile(facts, points), "h200.json")


def chosen(found: Evidence, facts: Facts = H200, device: str = "cuda:0", **words: Any) -> str:
    call = make_call("gdn.chunk", device, **{**SHAPE, **words})
    decision = decide(BUILT_IN, facts, call, Policy(), evidence=found)
    return f"{decision.backend} {decision.kernel}"


def row(facts: Facts, found: Evidence, name: str, **words: Any) -> Candidate:
    call = make_call("gdn.chunk", "cuda:0", **{**SHAPE, **words})
    decision = decide(BUILT_IN, facts, call, Policy(), evidence=found)
    return next(each for each in decision.candidates if f"{each.backend} {each.kernel}" == name)


# -- the nearest point -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "best"), [(1, FLA), (1024, FLA), (2896, FLA), (2897, QLA), (8192, QLA), (10**6, QLA), (None, QLA)]
)
def test_the_point_with_the_nearest_number_of_tokens_ranks(tokens: int | None, best: str) -> None:
    """1,024 and 8,192 are equally near to 2,896.3."""
    found = evidence(point({FLA: 41, QLA: 63}, tokens=1024), point({FLA: 400, QLA: 300}, tokens=8192))
    assert chosen(found, tokens=tokens) == best


def test_the_nearest_heads_come_before_the_nearest_tokens() -> None:
    found = evidence(
        point({FLA: 40, QLA: 60}, heads=2, value_heads=4, tokens=1024),
        point({FLA: 60, QLA: 40}, heads=16, value_heads=64, tokens=65536),
    )
    assert chosen(found, heads=4, value_heads=8, tokens=65536) == FLA
    assert chosen(found, heads=16, value_heads=32, tokens=64) == QLA


def test_a_point_speaks_for_calls_of_its_kind_alone() -> None:
    """The descriptors have flash_qla ahead on long calls; each of these points would turn that round."""
    for features, best in ((("varlen",), FLA), (("backward",), TORCH), (("capture",), FLA)):
        found = evidence(point({best: 1, QLA: 2}, features=features, tokens=65536))
        assert chosen(found, tokens=65536) == QLA
        assert chosen(found, tokens=65536, features=set(features)) == best
        assert chosen(found, tokens=65536, features={*features, "qk-l2norm", "initial-state"}) == best
    found = evidence(point({FLA: 1, QLA: 2}, tokens=65536))
    assert chosen(found, tokens=65536) == FLA
    assert chosen(found, tokens=65536, dtype="float16") == QLA
    assert chosen(found, tokens=65536, head_dim_k=None, head_dim_v=None, dtype=None) == FLA


def test_of_points_that_differ_in_a_pass_the_likest_speaks() -> None:
    found = evidence(
        point({FLA: 1, QLA: 2}, features=("initial-state", "final-state")),
        point({FLA: 2, QLA: 1}, features=("initial-state", "final-state", "state-v-first")),
    )
    assert chosen(found, features={"initial-state"}) == FLA
    assert chosen(found, features={"final-state", "state-v-first"}) == QLA


def test_the_number_of_sequences_decides_last() -> None:
    found = evidence(
        point({FLA: 1, QLA: 2}, features=("varlen",), sequences=2),
        point({FLA: 2, QLA: 1}, features=("varlen",), sequences=32),
    )
    assert chosen(found, features={"varlen"}, sequences=8) == FLA
    assert chosen(found, features={"varlen"}, sequences=9) == QLA


@given(st.integers(0, 200_000), st.sets(st.integers(1, 100_000), min_size=1, max_size=8))
@RELAXED
def test_near_is_a_small_ratio(wanted: int, sizes: set[int]) -> None:
    found = nearest_size(wanted, sizes)
    assert found in sizes
    if wanted:
        ratios = {size: max(Fraction(size, wanted), Fraction(wanted, size)) for size in sizes}
        assert ratios[found] == min(ratios.values())


SIZES = st.integers(1, 5000)


@given(
    st.lists(st.tuples(SIZES, SIZES, st.sampled_from([(), ("varlen",)])), min_size=1, max_size=6, unique=True),
    st.tuples(SIZES, SIZES),
    st.tuples(SIZES, SIZES),
    st.sampled_from([(), ("varlen",)]),
)
@RELAXED
def test_sizes_of_one_bucket_have_one_point(
    measured: list[tuple[int, int, tuple[str, ...]]],
    one: tuple[int, int],
    other: tuple[int, int],
    features: tuple[str, ...],
) -> None:
    """The hot path keys calls by bucket: two calls of one key must not be ranked by different points."""
    found = evidence(*(point({FLA: 1}, tokens=T, sequences=N, features=uses) for T, N, uses in measured))
    tokens, sequences = (Buckets([Span(min=edge) for edge in edges]) for edges in found.edges("gdn.chunk"))
    spoken = [
        found.point(make_call("gdn.chunk", "cuda:0", tokens=T, sequences=N, features=features, **SHAPE), H200)
        for T, N in (one, other)
    ]
    if tokens(one[0]) == tokens(other[0]) and sequences(one[1]) == sequences(other[1]):
        assert spoken[0] == spoken[1]


# -- ranking -----------------------------------------------------------------------------------------------------------


def test_times_rank_and_the_explanation_says_which() -> None:
    found = evidence(point({FLA: 41.2, QLA: 63, TORCH: 1234}))
    (reason,) = row(H200, found, QLA, tokens=900).reasons
    assert str(reason) == "outranked: by fla triton: 63 µs against 41.2 µs in h200.json at 1,024 tokens"
    assert reason.fix == "KERNELREG_PREFER=flash_qla"
    assert reason.url == "h200.json"
    (reason,) = row(H200, found, TORCH).reasons
    assert reason.actual == "1,234 µs against 41.2 µs in h200.json at 1,024 tokens"


def test_the_explanation_says_where_the_point_is_another_call() -> None:
    found = evidence(point({FLA: 41, QLA: 63}, tokens=4096, sequences=8, features=("varlen",)))
    told = row(H200, found, QLA, features={"varlen"}, value_heads=64).reasons[0].actual
    assert told == "63 µs against 41 µs in h200.json at 4,096 tokens in 8 sequences, 16 and 32 heads"


def test_a_kernel_that_was_not_measured_keeps_its_descriptors_figure() -> None:
    """FLA and torch were measured; flash_qla's figure, of many tokens, is above FLA's and stays there."""
    found = evidence(point({FLA: 1000, TORCH: 30_000}, tokens=65536))
    assert chosen(found, tokens=65536) == QLA
    told = row(H200, found, FLA, tokens=65536).reasons[0].actual
    assert told is not None
    assert told.startswith("1,000 µs against 70.6 × in h200.json at 65,536 tokens")
    assert "by its descriptor" in told
    # Measured ten times as fast as its own figure says, beside the torch kernel, FLA is the better guess.
    found = evidence(point({FLA: 100, TORCH: 30_000}, tokens=65536))
    assert chosen(found, tokens=65536) == FLA
    told = row(H200, found, QLA, tokens=65536).reasons[0].actual
    assert told is not None
    assert "× against 100 µs in h200.json" in told


def test_a_profile_of_one_kernel_does_not_put_it_first() -> None:
    assert chosen(evidence(point({TORCH: 900.0}))) == chosen(evidence())


def test_a_kernel_that_failed_where_it_was_measured_ranks_last_there() -> None:
    found = evidence(point({FLA: 41, TORCH: 900}, {QLA: "RuntimeError: no memory"}, tokens=65536))
    assert chosen(found, tokens=65536) == FLA
    last = decide(BUILT_IN, H200, make_call("gdn.chunk", "cuda:0", **SHAPE), Policy(), evidence=found)
    able = [f"{each.backend} {each.kernel}" for each in last.candidates if each.accepted]
    assert (able[0], able[-1]) == (FLA, QLA)
    assert "no time (RuntimeError: no memory)" in explain(last)


def test_a_kernel_that_is_known_to_be_slow_ranks_by_its_time_where_it_has_one() -> None:
    fault = {"when": {}, "severity": "slow", "because": "a test", "url": "a test"}
    preference = [{"speedup": 90.0, "source": "a test"}]
    other = descriptor("other", kernel={"preference": preference}, known_bad=[fault])
    registry = BUILT_IN.adding(Backend(descriptor=make_descriptor(other), origin="a test"))
    call = make_call("gdn.chunk", "cuda:0", dtype="bfloat16", head_dim_k=128, head_dim_v=128)
    assert decide(registry, H200, call, Policy()).backend == "flash_qla"
    found = evidence(point({"other only": 1, QLA: 2}))
    assert decide(registry, H200, call, Policy(), evidence=found).backend == "other"


def test_of_what_a_call_does_not_say_the_largest_counts() -> None:
    found = evidence(
        point({QLA: 1, FLA: 2}, heads=2, value_heads=4),
        point({QLA: 1, FLA: 2}, heads=4, value_heads=16),
        point({QLA: 2, FLA: 1}, heads=8, value_heads=16),
    )
    assert chosen(found, heads=None, value_heads=None) == FLA
    assert chosen(found, heads=None, value_heads=4) == QLA


def test_a_wish_and_a_force_are_stronger_than_times() -> None:
    found = evidence(point({FLA: 41, QLA: 63, TORCH: 900}))
    call = make_call("gdn.chunk", "cuda:0", **SHAPE)
    for policy in (Policy(prefer=("torch",)), Policy(backend={"gdn.chunk": "torch"})):
        assert decide(BUILT_IN, H200, call, policy, evidence=found).backend == "torch"


def test_a_card_that_was_not_measured_is_ranked_by_the_descriptors() -> None:
    mixed = machine("mixed-h100-rtx5090")
    found = evidence(point({FLA: 41, TORCH: 1}, tokens=1), facts=mixed)
    assert chosen(found, mixed, "cuda:0", tokens=1) == TORCH
    for device in ("cuda:1", "cpu"):
        words = {**SHAPE, "tokens": 1}
        call = make_call("gdn.chunk", device, **words)
        assert decide(BUILT_IN, mixed, call, Policy(), evidence=found) == decide(BUILT_IN, mixed, call, Policy())


@given(st.permutations([FLA, QLA, TORCH]), st.lists(st.floats(1, 1e6), min_size=3, max_size=3, unique=True))
@RELAXED
def test_the_fastest_of_those_that_could_run_is_chosen(order: list[str], times: list[float]) -> None:
    found = evidence(point(dict(zip(order, times, strict=True))))
    decision = decide(BUILT_IN, H200, make_call("gdn.chunk", "cuda:0", **SHAPE), Policy(), evidence=found)
    able = [f"{each.backend} {each.kernel}" for each in decision.candidates if each.accepted]
    able.remove("fla tilelang-backward")  # accepted, and not measured
    assert able == sorted(order, key=dict(zip(order, times, strict=True)).__getitem__)


@pytest.mark.parametrize(("micros", "text"), [(0.5, "0.5 µs"), (41.23, "41.2 µs"), (1234.4, "1,234 µs")])
def test_times_are_told_to_three_digits(micros: float, text: str) -> None:
    assert told_time(micros) == text


# -- the file ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A profile of the H200 by which FLA is the better one for a long call, named by the environment."""
    file = tmp_path / "h200.json"
    profile(H200, [point({FLA: 41, QLA: 63, TORCH: 900}, tokens=65536)]).save(file)
    monkeypatch.setenv("KERNELREG_PROFILE", str(file))
    return file


def test_a_profile_reads_back_as_it_was_written(path: Path) -> None:
    assert load_profile(path) == profile(H200, [point({FLA: 41, QLA: 63, TORCH: 900}, tokens=65536)])


def test_the_environment_names_a_profile(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = decided(H200, tokens=65536, **SHAPE)
    assert found.backend == "fla"
    assert f"63 µs against 41 µs in {path} at 65,536 tokens" in found.explain()
    assert found.to_dict()["policy"]["profile"] == str(path)
    monkeypatch.setenv("KERNELREG_PROFILE", "off")
    assert decided(H200, tokens=65536, **SHAPE).backend == "flash_qla"


def test_a_policy_argument_names_a_profile_of_its_own(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KERNELREG_PROFILE")
    for profile_, best in ((path, "fla"), ("off", "flash_qla"), (None, "flash_qla")):
        policy = kernelreg.make_policy(profile=profile_)
        assert kernelreg.resolve("gdn", facts=H200, policy=policy, tokens=65536, **SHAPE).backend == best
    with pytest.raises(ConfigurationError, match=r"=5; accepted: the path of a file"):
        kernelreg.make_policy(profile=5)  # type: ignore[arg-type]


def test_a_profile_that_changed_is_read_after_refresh(path: Path) -> None:
    assert decided(H200, tokens=65536, **SHAPE).backend == "fla"
    profile(H200, [point({FLA: 63, QLA: 41}, tokens=65536)]).save(path)
    assert decided(H200, tokens=65536, **SHAPE).backend == "fla"
    kernelreg.refresh()
    assert decided(H200, tokens=65536, **SHAPE).backend == "flash_qla"


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        (machine("h200", device={"name": "NVIDIA H100 80GB HBM3"}), "the card was NVIDIA H200, compute capability 9.0"),
        (machine("cpu-only"), "compute capability 9.0, here cpu"),
        (machine("h200", driver=None), "driver was 580.159.04, here none"),
        (machine("h200", torch="2.12.0+cu130"), "torch was 2.11.0+cu130, here 2.12.0+cu130"),
        (machine("h200", packages={"flash-qla": "0.1.4"}), "flash-qla was 0.1.3, here 0.1.4"),
        (machine("h200", packages={"flash-qla": None}), "flash-qla was 0.1.3, here none"),
    ],
)
def test_another_machine_driver_or_package_is_refused_by_what_differs(facts: Facts, told: str, path: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        kernelreg.resolve("gdn", facts=facts)
    assert f"KERNELREG_PROFILE: {path}: measured elsewhere: " in str(caught.value)
    assert told in str(caught.value)
    assert "fix: unset KERNELREG_PROFILE, or python -m kernelreg tune" in str(caught.value)


def test_what_no_measured_kernel_comes_from_may_differ(path: Path) -> None:
    uuid = msgspec.structs.replace(H200.devices[0], uuid="GPU-2", pci_bus_id="00000000:00:07.0", index=0)
    other = machine("h200", packages={"tilelang": "0.2.0"}, devices=(uuid,), tools={})
    assert decided(other, tokens=65536, **SHAPE).backend == "fla"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("{", "not JSON"),
        ({"schema": 2}, "schema: unknown value '2'; accepted: 1"),
        ({"madeby": "me"}, "unknown key 'madeby'"),
        ({"points": [{"operation": "gdn.chunk"}]}, "points[0]: Object missing required field `dtype`"),
        ({"tokens": 0}, "points[0].tokens: Expected `int` >= 1"),
        ({"operation": "gdn"}, "points[0]: operation 'gdn'; accepted: its full name, gdn.chunk"),
        ({"operation": "gdn.chnk"}, "did you mean 'gdn.chunk'?"),
        ({"features": ["varlne"]}, "did you mean 'varlen'?"),
        ({"dtype": "bf16"}, "points[0].dtype: unknown value 'bf16'; accepted: bfloat16, float16, float32, float64"),
        ({"timings": [{"backend": "fla", "kernel": "triton"}]}, "missing required field `median_us`"),
        ({"median_us": 0}, "points[0].timings[0].median_us: Expected `float` > 0"),
        (
            {"backend": "flaa"},
            "unknown backend 'flaa'; accepted: fla, flash_qla, flashinfer, torch; did you mean 'fla'?",
        ),
        ({"kernel": "tritn"}, "unknown kernel of fla for gdn.chunk 'tritn'"),
        ({"twice": True}, "are there twice"),
    ],
)
def test_a_file_that_is_no_profile_is_refused_by_path_and_key(change: Any, told: str, path: Path) -> None:
    data = json.loads(path.read_text())
    (first,) = data["points"]
    if isinstance(change, str):
        path.write_text(change)
    else:
        if "twice" in change:
            data["points"].append(first)
        for part in (data, first, first["timings"][0]):
            part.update({name: value for name, value in change.items() if name in part or part is data})
        if not change.keys() & {"madeby", "schema", "points"}:
            data = {name: value for name, value in data.items() if name not in change or name == "points"}
        path.write_text(json.dumps(data))
    with pytest.raises(ConfigurationError) as caught:
        kernelreg.resolve("gdn", facts=H200)
    assert str(path) in str(caught.value)
    assert told in str(caught.value)


def test_the_doctor_tells_of_a_profile_that_is_refused(
    path: Path, facts_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--facts", str(facts_folder / "a100-ngc.json")]) == 1
    assert "measured elsewhere" in " ".join(capsys.readouterr().out.split())
    assert main(["doctor", "--facts", str(facts_folder / "h200.json")]) == 0
    assert "KERNELREG_PROFILE: ranked by" in " ".join(capsys.readouterr().out.split())


def test_ranks_of_a_job_agree_on_what_is_measured_faster() -> None:
    call = Call(operation="gdn.chunk", device="cuda:0", tokens=65536)
    found = evidence(point({FLA: 41, QLA: 63}, tokens=65536))
    asked = Asked(call=call, policy=Policy(), judged=tuple(judge(BUILT_IN, H200, call, Policy(), evidence=found)))
    messages = [Message(rank=rank, host="node", sent=str(rank), facts=H200, asked=(asked,)) for rank in range(2)]
    (agreed,) = agree_on(messages, 0)
    assert agreed.backend == "fla"
    assert agreed.candidates == decide(BUILT_IN, H200, call, Policy(), evidence=found).candidates


# -- the hot path ------------------------------------------------------------------------------------------------------


def test_a_call_runs_the_kernel_that_was_faster_at_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from kernelreg.gdn import chunk_gated_delta_rule
    from kernelreg.verify.inputs import gdn_call

    ran: list[str] = []
    for name in ("short", "long"):
        module = types.ModuleType(f"{name}_adapter")

        def run(q: Any, k: Any, v: Any, g: Any, beta: Any, *, mine: str = name, **words: Any) -> Any:
            ran.append(mine)
            return torch.zeros_like(v), None

        module.run = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, f"{name}_adapter", module)
    features = ["initial-state", "final-state", "qk-l2norm", "grouped-value-heads"]
    kernel = {"accepts": {"features": features}, "preference": [{"speedup": 2.0, "source": "made up for a test"}]}
    undo = [kernelreg.register(descriptor(name, kernel=dict(kernel))) for name in ("short", "long")]
    facts = kernelreg.facts()
    shape: dict[str, Any] = {"dtype": "float32", "heads": 1, "value_heads": 1, "head_dim_k": 8, "head_dim_v": 8}
    points = [
        point({"short only": 1, "long only": 2, "torch chunk": 9}, tokens=4, **shape),
        point({"short only": 2, "long only": 1, "torch chunk": 9}, tokens=64, **shape),
    ]
    profile(facts, points, device="cpu").save(tmp_path / "cpu.json")
    try:
        monkeypatch.setenv("KERNELREG_PROFILE", str(tmp_path / "cpu.json"))
        kernelreg.refresh()
        for tokens in (16, 17, 1, 100, 4):
            chunk_gated_delta_rule(**gdn_call(B=1, T=tokens, H=1, HV=1, K=8, V=8, dtype=torch.float32))
        assert ran == ["short", "long", "short", "long", "short"]
        monkeypatch.delenv("KERNELREG_PROFILE")
        kernelreg.refresh()
        chunk_gated_delta_rule(**gdn_call(B=1, T=4, H=1, HV=1, K=8, V=8, dtype=torch.float32))
        assert ran[-1] == "long"
    finally:
        for each in undo:
            each()
