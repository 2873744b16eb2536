"""Lock files: what they pin, what is stronger, and what happens where a decision no longer holds."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kernelreg
from kernelreg import ConfigurationError, Facts, NoBackendError
from kernelreg.cli import main
from kernelreg.descriptor import Span, make_descriptor
from kernelreg.dispatch import Buckets
from kernelreg.findings import Finding
from kernelreg.lock import Binding, Lock, Pin, Pins, load_lock
from kernelreg.locking import make_lock
from kernelreg.machine.setup import setup_of
from kernelreg.models import Shape
from kernelreg.policy import Policy
from kernelreg.registry import Backend, Registry, discover
from kernelreg.resolution import Resolution
from kernelreg.resolver import decide
from kernelreg.session import Grounds, session
from kernelreg.workloads import WORKLOADS, call_of
from tests.machines import codes, decided, descriptor, machine
from tests.profiles import SHAPE, point, profile

H200 = machine("h200")
BUILT_IN = discover(plugins=False)
#: The machines that run the tests may be busy with others.
RELAXED = settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.too_slow])
STATES: dict[str, Any] = {"gate_dtype": "float32", "state_dtype": "float32"}
FEATURES = ("final-state", "grouped-value-heads", "initial-state", "qk-l2norm")
VERSIONS = {"torch": "2.11.0+cu130", "flash-linear-attention": "0.6.0"}


def pin(**changes: Any) -> Pin:
    """FLA for a Qwen3-Next layer's dense prefill, though flash_qla ranks higher on long calls."""
    told: dict[str, Any] = {"operation": "gdn.chunk", "features": FEATURES, "backend": "fla", "kernel": "triton"}
    return Pin(**{**told, **SHAPE, **STATES, **changes})


def lock(*pins: Pin, facts: Facts = H200, versions: Any = None, device: int = 0) -> Lock:
    told: dict[str, dict[str, str | None]] = {"fla": {**VERSIONS}} if versions is None else versions
    return Lock(setup=setup_of(facts, facts.devices[device]), versions=told, pins=pins or (pin(),))


@pytest.fixture
def locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes a lock file and has the environment name it."""

    def write(*pins: Pin, **words: Any) -> Path:
        path = tmp_path / "h200.lock"
        lock(*pins, **words).save(path)
        monkeypatch.setenv("KERNELREG_LOCK", str(path))
        kernelreg.refresh()
        return path

    return write


def prefill(facts: Facts = H200, **changes: Any) -> Resolution:
    return decided(facts, **{**SHAPE, **STATES, "tokens": 65536, "features": set(FEATURES), **changes})


# -- what is pinned ----------------------------------------------------------------------------------------------------


def test_a_pinned_kernel_runs_whatever_ranks(locked: Callable[..., Path]) -> None:
    assert prefill().backend == "flash_qla"
    path = locked()
    found = prefill()
    assert (found.backend, found.kernel) == ("fla", "triton")
    told = f"locked: KERNELREG_LOCK: {path} pins fla triton"
    assert told in found.explain()
    assert codes(found, "flash_qla", "sm90") == {"locked"}
    assert found.to_dict()["policy"]["lock"] == str(path)


@pytest.mark.parametrize(
    ("change", "covered"),
    [
        ({"features": {"initial-state"}}, True),
        ({"tokens": None, "heads": None, "value_heads": None, "dtype": None, "features": set()}, True),
        ({"state_dtype": None, "gate_dtype": None}, True),
        ({"features": {*FEATURES, "state-v-first"}}, False),
        ({"features": {*FEATURES, "varlen"}}, False),
        ({"features": {*FEATURES, "capture"}}, False),
        ({"heads": 8, "value_heads": 16}, False),
        ({"dtype": "float16"}, False),
        ({"state_dtype": "bfloat16"}, False),
        ({"tokens": 4095}, False),
        ({"sequences": 9}, False),
        ({"sequences": 8}, True),
    ],
)
def test_a_pin_speaks_for_calls_of_its_kind_that_use_no_more_than_it_names(
    change: dict[str, Any], covered: bool, locked: Callable[..., Path]
) -> None:
    locked(pin(tokens=Span(min=4096), sequences=Span(min=0, max=8)))
    found = prefill(**change)
    assert ("locked" in codes(found, "flash_qla", "sm90")) == covered
    assert found.backend == ("fla" if covered else "flash_qla")


def test_what_is_not_pinned_is_said_once(locked: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    path = locked()
    with caplog.at_level(logging.WARNING, logger="kernelreg"):
        for tokens in (1, 2, 65536):
            prefill(heads=8, value_heads=16, tokens=tokens)
            prefill()
    (line,) = [each.message for each in caplog.records if "pins nothing" in each.message]
    assert line.startswith(f"KERNELREG_LOCK={path} pins nothing for gdn.chunk calls like (")
    assert "heads=8" in line
    assert "python -m kernelreg lock" in line


def test_under_strict_what_is_not_pinned_is_an_error(
    locked: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    locked()
    monkeypatch.setenv("KERNELREG_STRICT", "1")
    assert prefill().backend == "fla"
    with pytest.raises(NoBackendError, match="pins nothing for such calls, and strict allows no other"):
        kernelreg.resolve("gdn", facts=H200, **{**SHAPE, "heads": 8, "value_heads": 16})


spans = st.tuples(st.integers(0, 9), st.integers(0, 9)).map(lambda ends: Span(min=min(ends), max=max(ends)))
sizes = st.tuples(st.integers(0, 11), st.integers(0, 11))


@given(st.lists(st.tuples(spans, spans), min_size=1, max_size=4), sizes, sizes)
@RELAXED
def test_sizes_of_one_bucket_have_one_pin(told: list[tuple[Span, Span]], one: Any, other: Any) -> None:
    """The hot path keys calls by bucket: two calls of one key must not be pinned differently."""
    pins = Pins(lock(*(pin(tokens=tokens, sequences=several) for tokens, several in told)), "a test")
    buckets = [Buckets([Span(min=edge) for edge in edges]) for edges in pins.edges("gdn.chunk")]
    found = []
    for tokens, sequences in (one, other):
        call = call_of(WORKLOADS[0], Shape(16, 32), "cuda:0", dtype="bfloat16", tokens=tokens, sequences=sequences)
        found.append((buckets[0](tokens), buckets[1](sequences), pins.pin(call, H200)))
    if found[0][:2] == found[1][:2]:
        assert found[0] == found[1]


# -- what is stronger, and what is weaker ------------------------------------------------------------------------------


def test_use_and_the_environment_are_stronger(locked: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    locked()
    with kernelreg.use(backend="torch"):
        assert prefill().backend == "torch"
    with kernelreg.use(prefer=["torch"]):
        found = prefill()
        assert found.backend == "torch"
        assert codes(found, "flash_qla", "sm90") == {"locked"}
    with kernelreg.use(prefer=["flashinfer"]):  # which cannot run here
        assert prefill().backend == "fla"
    with kernelreg.use(disable=["fla"]):
        assert prefill().backend == "flash_qla"
    monkeypatch.setenv("KERNELREG_BACKEND", "gdn.recurrent=torch")
    assert prefill().backend == "fla"
    monkeypatch.setenv("KERNELREG_BACKEND", "gdn.chunk=flash_qla")
    assert prefill().backend == "flash_qla"


def test_a_lock_is_stronger_than_a_profile(
    locked: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = profile(H200, [point({"torch chunk": 1, "fla triton": 2, "flash_qla sm90": 3}, tokens=65536)])
    measured.save(tmp_path / "h200.json")
    monkeypatch.setenv("KERNELREG_PROFILE", str(tmp_path / "h200.json"))
    assert prefill().backend == "torch"
    locked()
    assert prefill().backend == "fla"


def test_a_policy_argument_names_its_own_lock(locked: Callable[..., Path]) -> None:
    path = locked()
    words = {**SHAPE, **STATES, "tokens": 65536, "features": set(FEATURES)}
    assert kernelreg.resolve("gdn", facts=H200, policy=kernelreg.make_policy(), **words).backend == "flash_qla"
    assert kernelreg.resolve("gdn", facts=H200, policy=kernelreg.make_policy(lock=path), **words).backend == "fla"


def test_operations_that_share_a_state_are_pinned_too(locked: Callable[..., Path]) -> None:
    locked(pin(backend="torch", kernel="chunk"), versions={})
    joint = kernelreg.resolve_together(facts=H200, **SHAPE, gate_dtype="float32", state_dtype="float32")
    assert joint["gdn"].backend == "torch"
    assert joint["gdn.recurrent"].backend == "fla"


# -- what no longer holds ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        (
            machine("h200", packages={"flash-linear-attention": "0.6.1"}),
            "locked: needs flash-linear-attention 0.6.0 (pinned in {path}), here 0.6.1",
        ),
        (
            machine("h200", packages={"flash-linear-attention": None}),
            "locked: needs flash-linear-attention 0.6.0 (pinned in {path}), here not installed",
        ),
        (
            machine("h200", torch="2.12.0+cu130"),
            "locked: needs torch 2.11.0+cu130 (pinned in {path}), here 2.12.0+cu130",
        ),
    ],
)
def test_another_version_is_an_error_that_names_it(facts: Facts, told: str, locked: Callable[..., Path]) -> None:
    path = locked()
    found = prefill(facts)
    assert found.backend is None
    assert told.format(path=path) in found.explain()
    assert f"locked: KERNELREG_LOCK: {path} pins fla triton" in found.explain()


def test_a_kernel_that_is_gone_is_an_error_that_says_so(locked: Callable[..., Path]) -> None:
    path = locked(pin(kernel="triton-9"))
    found = prefill()
    assert found.backend is None
    assert f"{path} pins fla triton-9, and there is no such kernel any more" in found.explain()
    locked(pin(backend="gone", kernel="only"))
    assert prefill().backend is None


def test_a_quarantined_kernel_is_not_replaced(locked: Callable[..., Path]) -> None:
    locked()
    told = Finding(
        operation="gdn.chunk",
        backend="fla",
        kernel="triton",
        devices=frozenset({"cuda:0"}),
        cause="it failed",
        fix="python -m kernelreg verify",
    )
    session.keep_away(told)
    found = prefill()
    assert found.backend is None
    assert codes(found, "fla", "triton") == {"quarantined"}
    assert codes(found, "torch", "chunk") == {"locked"}


def test_a_driver_may_be_another(locked: Callable[..., Path]) -> None:
    assert H200.driver is not None
    locked()
    driver = msgspec.structs.replace(H200.driver, version="590.1")
    assert prefill(machine("h200", driver=driver)).backend == "fla"


def test_a_lock_of_another_card_is_refused(locked: Callable[..., Path]) -> None:
    path = locked()
    with pytest.raises(ConfigurationError) as caught:
        kernelreg.resolve("gdn", facts=machine("a100-ngc"))
    assert f"KERNELREG_LOCK: {path}: locked for another machine: the card was NVIDIA H200" in str(caught.value)
    assert "fix: unset KERNELREG_LOCK" in str(caught.value)


def test_a_lock_pins_nothing_on_the_other_card_of_the_machine(locked: Callable[..., Path]) -> None:
    mixed = machine("mixed-h100-rtx5090")
    locked(pin(backend="torch", kernel="chunk"), facts=mixed, versions={})
    assert prefill(mixed, device="cuda:0").backend == "torch"
    assert prefill(mixed, device="cuda:1").backend == "flash_qla"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("[]", "Expected `object`"),
        ("{", "not JSON"),
        ({"schema": 2}, "schema: unknown value '2'; accepted: 1"),
        ({"oeprations": []}, "unknown key 'oeprations'"),
        ({"pins": [{}]}, "pins[0]: Object missing required field `operation`"),
        ({"operation": "gdn"}, "pins[0]: operation 'gdn'; accepted: its full name, gdn.chunk"),
        ({"features": ["varlne"]}, "did you mean 'varlen'?"),
        ({"tokens": {"min": 5, "max": 4}}, "pins[0].tokens: no number is 5 to 4"),
        ({"heads": 0}, "pins[0].heads: Expected `int` >= 1"),
    ],
)
def test_a_file_that_is_no_lock_is_refused_by_path_and_key(change: Any, told: str, locked: Callable[..., Path]) -> None:
    path = locked()
    data = json.loads(path.read_text())
    if isinstance(change, str):
        path.write_text(change)
    else:
        (data["pins"][0] if change.keys() <= data["pins"][0].keys() else data).update(change)
        path.write_text(json.dumps(data))
    kernelreg.refresh()
    with pytest.raises(ConfigurationError) as caught:
        kernelreg.resolve("gdn", facts=H200)
    assert f"KERNELREG_LOCK: {path}: " in str(caught.value)
    assert told in str(caught.value)


# -- making one --------------------------------------------------------------------------------------------------------


others = st.lists(
    st.builds(
        lambda least, most, speedup, several, form: {
            "accepts": {"tokens": {"min": least, "max": most}, "features": sorted(WORKLOADS[0].features)}
            | ({"sequences": several} if form else {}),
            "preference": [{"speedup": speedup, "source": "a test", "when": {"tokens": {"min": least // 2}}}],
        },
        st.integers(0, 50),
        st.integers(51, 100),
        st.floats(0.5, 90),
        st.one_of(
            st.lists(st.integers(0, 5), min_size=1, unique=True),
            st.sampled_from([{"min": 1, "multiple_of": 4}, {"min": 4, "multiple_of": 4}]),
        ),
        st.booleans(),
    ),
    max_size=3,
)


@given(others, st.lists(st.tuples(st.integers(0, 110), st.integers(0, 9)), min_size=1, max_size=8))
@RELAXED
def test_a_lock_pins_what_would_be_decided_at_every_size(kernels: list[Any], sizes: list[tuple[int, int]]) -> None:
    registry = Registry()
    for name, kernel in zip("abc", kernels, strict=False):
        told = descriptor(name, kernel={**kernel, "function": "run"})
        registry = registry.adding(Backend(descriptor=make_descriptor(told), origin="a test"))
    facts = machine("cpu-only")
    grounds = Grounds(registry, facts, Policy(), {}, ())
    shape = Shape(4, 4)
    device = facts.device("cpu")
    assert device is not None
    made, _ = make_lock(grounds, device, WORKLOADS[:1], [shape], dtype="bfloat16", state_dtype="float32")
    pins = Pins(made, "a test")
    rounded = any(isinstance(each["accepts"].get("sequences"), dict) for each in kernels)
    for tokens, sequences in sizes:
        call = call_of(WORKLOADS[0], shape, "cpu", dtype="bfloat16", tokens=tokens, sequences=sequences)
        free = decide(registry, facts, call, Policy())
        held = decide(registry, facts, call, Policy(), pins=pins)
        found = pins.pin(call, facts)
        if found is not None:  # what is pinned runs: nobody is refused for the lock alone
            assert held.backend is not None
        if not rounded:  # a kernel for round numbers alone is not pinned for a band of others
            assert (held.backend, held.kernel) == (free.backend, free.kernel)
            assert (found is None) == (free.backend is None)


def test_making_a_lock_gives_the_same_file_again_and_one_that_holds(
    tmp_path: Path, facts_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = str(facts_folder / "h200.json")
    files = [tmp_path / "one.lock", tmp_path / "two.lock"]
    words = ["lock", "--model", "qwen3.5-27b", "--tp", "2,8", "--facts", facts]
    for file in files:
        assert main([*words, "--output", str(file)]) == 0
    assert files[0].read_bytes() == files[1].read_bytes()
    assert "KERNELREG_LOCK=" in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    assert capsys.readouterr().out == files[0].read_text()
    made = load_lock(files[0])
    assert made.models == ("qwen3.5-27b",)
    assert {(each.heads, each.value_heads) for each in made.pins} == {(8, 24), (2, 6)}
    kinds = {(each.operation, *sorted(each.features)) for each in made.pins}
    assert len(kinds) == 10  # six workloads, and four of them captured
    assert made.versions["flash_qla"] | {"torch": "2.11.0+cu130", "flash-qla": "0.1.3"} == made.versions["flash_qla"]
    monkeypatch.setenv("KERNELREG_LOCK", str(files[0]))
    for each in made.pins:
        words_of = {name: getattr(each, name) for name in ("dtype", "heads", "value_heads", "head_dim_k", "head_dim_v")}
        found = kernelreg.resolve(
            each.operation, facts=facts, features=each.features, tokens=each.tokens.min, **words_of
        )
        assert (found.backend, found.kernel) == (each.backend, each.kernel)
    assert main(["lock", "--check", str(files[0]), "--facts", facts]) == 0


def test_checking_tells_what_does_not_hold_as_a_diff(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, facts = tmp_path / "h200.lock", tmp_path / "facts.json"
    qla = pin(backend="flash_qla", kernel="sm90", features=(*FEATURES, "varlen"))
    lock(pin(), qla, versions={"fla": VERSIONS, "flash_qla": {"flash-qla": "0.1.3"}}).save(file)
    H200.save(facts)
    assert main(["lock", "--check", str(file), "--facts", str(facts)]) == 0
    out = capsys.readouterr().out
    assert "every decision holds" in out
    assert "holds, though flash_qla sm90 would be chosen without it" in out
    machine("h200", packages={"flash-qla": "0.1.2"}).save(facts)
    assert main(["lock", "--check", str(file), "--facts", str(facts)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "-flash_qla sm90" in lines
    assert "+the same kernel, of other versions" in lines
    assert any("locked: needs flash-qla 0.1.3" in line and "here 0.1.2" in line for line in lines)
    assert not any(line.startswith("-fla ") for line in lines)
    assert main(["lock", "--check", str(file), "--facts", str(facts), "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert not data["ok"]
    assert [each["backend"] for each in data["broken"]] == ["flash_qla"]
    machine("a100-ngc").save(facts)
    assert main(["lock", "--check", str(file), "--facts", str(facts)]) == 1
    assert "the card was NVIDIA H200" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "give one of --model and --heads"),
        (["--model", "qwen3.5-72b"], "unknown model 'qwen3.5-72b'; accepted: qwen3-next-80b-a3b"),
        (["--model", "qwen3.5-27b", "--tp", "3"], "--tp 3: 16 and 48 heads of 128 cannot be shared evenly"),
        (["--heads", "16,24"], "HV is no multiple of H"),
        (["--heads", "1,2,3"], "accepted: one number, or two"),
        (["--heads", "16,32", "--dtype", "bf16"], "--dtype: unknown dtype 'bf16'"),
        (["--heads", "16,32", "--workload", "prefil"], "did you mean 'prefill'?"),
        (["--heads", "16,32", "--features", "varlne"], "did you mean 'varlen'?"),
        (["--heads", "16,32", "--device", "cuda:7"], "--device cuda:7: not there"),
        (["gdn.chnk", "--heads", "16,32"], "did you mean 'gdn.chunk'?"),
        (["--check", "x.lock", "--heads", "16"], "--check reads all of it from the file"),
        (["--check", "no-such.lock"], "no-such.lock: No such file"),
        (["--heads", "16,32", "--output", "/no-such-folder/x.lock"], "/no-such-folder/x.lock: No such file"),
    ],
)
def test_wrong_words_are_told_with_what_is_accepted(
    words: list[str], told: str, facts_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lock", *words, "--facts", str(facts_folder / "h200.json")]) == 2
    err = capsys.readouterr().err
    assert told in err
    assert len(err.splitlines()) == 1


def test_binding_says_nothing_without_a_lock() -> None:
    call = call_of(WORKLOADS[0], Shape(16, 32), "cuda:0", dtype="bfloat16")
    binding = Binding(None, call, H200, Policy(strict=True), [])
    assert not binding.reasons("fla", "triton")
    assert not binding.silent
