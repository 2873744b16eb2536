"""Overrides: environment variables, ``use()``, and what happens when they say something wrong."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import kernelreg
from kernelreg import ConfigurationError, NoBackendError
from tests.machines import codes, decided, machine

H200 = machine("h200")


def test_the_environment_forces_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELREG_BACKEND", "fla")
    resolution = decided(H200)
    assert resolution.backend == "fla"
    row = next(each for each in resolution.candidates if each.kernel == "sm90")
    assert row.reasons[0].code == "not-selected"
    assert row.reasons[0].fix == "unset KERNELREG_BACKEND"


def test_a_force_may_name_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELREG_BACKEND", "gdn=torch, gdn.recurrent=fla")
    assert decided(H200).backend == "torch"
    assert decided(H200, "gdn.recurrent").backend == "fla"


def test_a_forced_backend_that_cannot_run_is_an_error_with_its_reasons(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KERNELREG_BACKEND", "flash_qla")
    with pytest.raises(NoBackendError, match="compute-capability") as caught:
        kernelreg.resolve("gdn", facts=machine("a100-ngc"))
    assert "KERNELREG_BACKEND" in str(caught.value)
    assert caught.value.resolution.backend is None


def test_a_forced_backends_own_reasons_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELREG_BACKEND", "torch")
    assert decided(machine("h200", torch="2.1.0")).candidates[0].backend == "torch"


def test_a_wish_is_granted_where_it_can_be_and_the_rest_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELREG_PREFER", "torch,fla")
    assert decided(H200).backend == "torch"
    monkeypatch.setenv("KERNELREG_PREFER", "flash_qla")
    assert decided(machine("a100-ngc")).backend == "fla"


def test_under_strict_an_unmet_wish_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELREG_PREFER", "flash_qla")
    monkeypatch.setenv("KERNELREG_STRICT", "yes")
    assert decided(H200).backend == "flash_qla"
    with pytest.raises(NoBackendError, match="strict allows no other"):
        kernelreg.resolve("gdn", facts=machine("a100-ngc"))


def test_a_disabled_backend_is_never_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELREG_DISABLE", "flash_qla , fla")
    resolution = decided(H200)
    assert resolution.backend == "torch"
    assert codes(resolution, "flash_qla", "sm90") == {"disabled"}


def test_use_is_stronger_than_the_environment_and_nests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELREG_BACKEND", "flash_qla")
    with kernelreg.use(backend={"gdn.chunk": "fla"}):
        assert decided(H200).backend == "fla"
        with kernelreg.use(backend="torch"):
            assert decided(H200).backend == "torch"
        with kernelreg.use(disable=["torch"]):
            assert decided(H200).backend == "fla"  # what the inner block leaves out stays
            assert codes(decided(H200), "torch", "chunk") >= {"disabled"}
        assert decided(H200).backend == "fla"
    assert decided(H200).backend == "flash_qla"


def test_use_is_seen_by_its_own_thread_alone() -> None:
    inside, seen = threading.Event(), []
    done = threading.Event()

    def other() -> None:
        inside.wait(10)
        seen.append(decided(H200).backend)
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with kernelreg.use(backend="torch"):
        inside.set()
        assert done.wait(10)
    thread.join()
    assert seen == ["flash_qla"]


def test_use_is_seen_by_its_own_task_alone() -> None:
    async def forced(name: str) -> str | None:
        with kernelreg.use(backend=name):
            await asyncio.sleep(0)
            return decided(H200).backend

    async def free() -> str | None:
        await asyncio.sleep(0)
        return decided(H200).backend

    async def together() -> list[str | None]:
        return list(await asyncio.gather(forced("torch"), free(), forced("fla")))

    assert asyncio.run(together()) == ["torch", "flash_qla", "fla"]


def test_a_policy_argument_is_the_whole_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELREG_DISABLE", "fla,flash_qla")
    policy = kernelreg.make_policy(prefer=["fla"])
    assert kernelreg.resolve("gdn", facts=H200, policy=policy).backend == "fla"


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("KERNELREG_BACKEND", "flashqla", "did you mean 'flash_qla'?"),
        ("KERNELREG_BACKEND", "gdn.chnk=fla", "did you mean 'gdn.chunk'?"),
        ("KERNELREG_BACKEND", "gdn.chunk=", "is no pair"),
        ("KERNELREG_BACKEND", "gdn=fla,gdn.chunk=torch", "two backends"),
        ("KERNELREG_PREFER", "fla,troch", "did you mean 'torch'?"),
        ("KERNELREG_DISABLE", "falsh_qla", "did you mean 'flash_qla'?"),
        ("KERNELREG_STRICT", "maybe", "accepted: 1/0, true/false, on/off, yes/no"),
        ("KERNELREG_PLUGINS", "none", "accepted: 1/0, true/false, on/off, yes/no"),
        ("KERNELREG_LOG", "DEBG", "did you mean 'DEBUG'?"),
        ("KERNELREG_LOCK", "kernels.lock", "kernels.lock: No such file"),
        ("KERNELREG_PROFILE", "h200.json", "h200.json: No such file"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_accepted(
    variable: str, value: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigurationError) as caught:
        kernelreg.resolve("gdn", facts=H200)
    assert variable in str(caught.value)
    assert value.split("=")[0].split(",")[-1].upper() in str(caught.value).upper()
    assert told in str(caught.value)


def test_profile_off_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELREG_PROFILE", "off")
    assert decided(H200).backend == "flash_qla"


def test_an_unknown_variable_is_a_warning_with_the_nearest_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KERNELREG_BACKND", "fla")
    with caplog.at_level(logging.WARNING, logger="kernelreg"):
        decided(H200)
        decided(H200)
    (line,) = [record.message for record in caplog.records]
    assert "KERNELREG_BACKND" in line
    assert "did you mean 'KERNELREG_BACKEND'?" in line


@pytest.mark.parametrize(
    "words",
    [
        {"backend": "flashinfr"},
        {"prefer": ["x"]},
        {"disable": "x"},
        {"backend": {"gdn": "x"}},
        {"strict": "1"},
        {"prefer": 5},
        {"disable": [["fla"]]},
        {"backend": 5},
        {"backend": {5: "fla"}},
        {"backend": {"gdn": ["fla"]}},
    ],
)
def test_use_refuses_wrong_words_at_once(words: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"use\(\w+=.*\).*; accepted: "):
        kernelreg.use(**words)


def test_a_path_of_a_facts_file_is_as_good_as_facts(facts_folder: Any) -> None:
    assert kernelreg.resolve("gdn", facts=facts_folder / "h200.json") == decided(H200)


def test_a_facts_file_may_stand_for_this_machine(monkeypatch: pytest.MonkeyPatch, facts_folder: Any) -> None:
    monkeypatch.setenv("KERNELREG_FACTS", str(facts_folder / "h200.json"))
    assert kernelreg.facts() == H200
    assert kernelreg.resolve("gdn").device == "cuda:0"
    monkeypatch.setenv("KERNELREG_FACTS", str(facts_folder / "no-such.json"))
    with pytest.raises(kernelreg.FactsError, match=r"no-such.json: No such file"):
        kernelreg.facts()


def test_decisions_are_logged_once_with_the_first_reason_of_each_other_kernel(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="kernelreg"):
        for _ in range(3):
            decided(machine("a100-ngc"))
    (line,) = [record.message for record in caplog.records if record.levelno == logging.INFO]
    assert line.startswith("gdn.chunk on cuda:0: fla triton (")
    assert "flash_qla sm90: compute-capability" in line


def test_observers_hear_each_decision_until_they_are_taken_off() -> None:
    heard: list[str | None] = []
    undo = kernelreg.on_resolve(lambda resolution: heard.append(resolution.backend))
    decided(H200)
    decided(machine("a100-ngc"))
    undo()
    decided(H200)
    assert heard == ["flash_qla", "fla"]


def test_a_generator_that_is_closed_in_another_thread_is_no_error() -> None:
    def streaming() -> Iterator[None]:
        with kernelreg.use(backend="torch"):
            yield

    generator: Any = streaming()
    errors: list[BaseException] = []

    def close() -> None:
        try:
            generator.close()
        except BaseException as error:
            errors.append(error)

    context = contextvars.copy_context()  # what the generator leaves behind stays in here
    context.run(next, generator)
    thread = threading.Thread(target=close)
    thread.start()
    thread.join()
    assert errors == []
    assert not kernelreg.resolve("gdn", facts=machine("cpu-only")).decision.policy.backend
