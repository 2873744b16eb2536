"""Profiles that come with an installed distribution: where they rank, and how quietly they do not."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

import kernelreg
from kernelreg import Facts, registry, session
from kernelreg.cli import main
from kernelreg.machine.setup import CARD
from kernelreg.profile import Evidence, check_names, load_profile
from tests.distributions import install
from tests.machines import decided, machine
from tests.profiles import SHAPE, point, profile

#: A card that no profile of this project is of.
CARD_NAME = {"name": "NVIDIA Test 1"}
HERE = machine("h200", device=CARD_NAME)
CALL: dict[str, Any] = {"tokens": 65536, **SHAPE}
BUILT_IN = Path(__file__).parent.parent / "backends" / "profiles"


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed profile of the card, by which FLA is the better one for a long call: no descriptor says so."""
    monkeypatch.setattr(session, "shipped_profiles", registry.shipped_profiles)
    code = f"from pathlib import Path\nPath({os.fspath(tmp_path / 'ran')!r}).touch()\n"
    files = {"acme_gdn/__init__.py": code, "acme_gdn/measured/__init__.py": code}
    install(tmp_path, "acme-gdn", group="kernelreg.profiles", entry_points={"x": "acme_gdn.measured"}, files=files)
    path = tmp_path / "acme_gdn" / "measured" / "test1.json"
    profile(HERE, [point({"fla triton": 41, "flash_qla sm90": 63}, tokens=65536)]).save(path)
    monkeypatch.syspath_prepend(str(tmp_path))
    kernelreg.refresh()
    return path


def test_it_ranks_on_such_a_card_without_being_asked_for(shipped: Path) -> None:
    found = decided(HERE, **CALL)
    assert found.backend == "fla"
    assert "63 µs against 41 µs in acme-gdn's test1.json at 65,536 tokens" in found.explain()
    assert "profile" not in found.to_dict()["policy"]
    assert not (shipped.parents[1] / "ran").exists()
    assert "acme_gdn" not in sys.modules


@pytest.mark.parametrize(
    ("word", "best"), [("off", "flash_qla"), ("own.json", "flash_qla"), (None, "fla")], ids=["off", "own", "unsaid"]
)
def test_what_is_asked_for_is_stronger(
    word: str | None, best: str, shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own.json"
    profile(HERE, [point({"fla triton": 63, "flash_qla sm90": 41}, tokens=65536)]).save(own)
    if word is not None:
        monkeypatch.setenv("KERNELREG_PROFILE", "off" if word == "off" else str(own))
    assert decided(HERE, **CALL).backend == best


def other(**changes: Any) -> Facts:
    return machine("h200", **{"device": CARD_NAME, **changes})


@pytest.mark.parametrize(
    "facts",
    [
        other(driver=msgspec.structs.replace(HERE.driver, version="580.200.1")) if HERE.driver else HERE,
        other(torch="2.11.1+cu128"),
        other(packages={"tilelang": "9.0"}),  # no measured kernel comes from it
    ],
    ids=["driver of the branch", "torch of the release line", "another package"],
)
def test_what_is_near_enough_still_ranks(facts: Facts, shipped: Path) -> None:
    assert decided(facts, **CALL).backend == "fla"


def test_another_release_of_kernelreg_still_ranks_by_it(shipped: Path) -> None:
    made = load_profile(shipped)
    msgspec.structs.replace(made, setup=msgspec.structs.replace(made.setup, kernelreg="0.0.1")).save(shipped)
    assert decided(HERE, **CALL).backend == "fla"


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        (
            other(driver=msgspec.structs.replace(HERE.driver, version="590.1")) if HERE.driver else HERE,
            "driver was 580",
        ),
        (other(driver=None), "driver was 580.159.04, here none"),
        (other(torch="2.12.0+cu130"), "torch was 2.11.0+cu130, here 2.12.0+cu130"),
        (other(packages={"flash-qla": "0.1.4"}), "flash-qla was 0.1.3, here 0.1.4"),
        (machine("h200", device={"name": "NVIDIA Test 2"}), None),
        (machine("cpu-only"), None),
    ],
)
def test_where_it_does_not_fit_the_descriptors_rank_and_the_doctor_alone_says_so(
    facts: Facts,
    told: str | None,
    shipped: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with caplog.at_level(logging.WARNING, "kernelreg"):
        found = decided(facts, **CALL)
    assert not [each.message for each in caplog.records if "test1" in each.message]
    monkeypatch.setenv("KERNELREG_PROFILE", "off")
    assert decided(facts, **CALL).candidates == found.candidates
    monkeypatch.delenv("KERNELREG_PROFILE")
    facts.save(tmp_path / "facts.json")
    main(["doctor", "--facts", str(tmp_path / "facts.json")])
    text = " ".join(capsys.readouterr().out.split())
    if told is None:  # of another card: there is nothing to do about it
        assert "test1" not in text
    else:
        assert f"profile: acme-gdn's test1.json does not rank here: {told}" in text


def test_the_doctor_says_that_it_ranks(shipped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    HERE.save(tmp_path / "facts.json")
    assert main(["doctor", "--facts", str(tmp_path / "facts.json")]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "profile acme-gdn's test1.json (NVIDIA Test 1, compute capability 9.0, 2026-12-04)" in text


@pytest.mark.parametrize("broken", ["{", "another kernel"])
def test_one_that_cannot_be_used_is_said_once_and_costs_nothing_else(
    broken: str, shipped: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if broken == "{":
        shipped.write_text(broken)
    else:
        profile(HERE, [point({"fla tritn": 41}, tokens=65536)]).save(shipped)
    profile(HERE, [point({"fla triton": 41, "flash_qla sm90": 63}, tokens=65536)]).save(shipped.with_name("z.json"))
    with caplog.at_level(logging.WARNING, "kernelreg"):
        assert [decided(HERE, **CALL).backend for _ in range(2)] == ["fla", "fla"]
    (said,) = [each.message for each in caplog.records if "shipped profile left out" in each.message]
    assert "acme-gdn's test1.json" in said


def test_without_plugins_only_this_projects_own_are_left(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELREG_PLUGINS", "off")
    assert decided(HERE, **CALL).backend == "flash_qla"
    assert all(name.startswith("kernelreg's ") for name, _ in registry.shipped_profiles(plugins=False)[0])


def test_this_projects_own_are_found_and_are_of_cards_and_kernels_that_there_are() -> None:
    found = {path for _, path in registry.shipped_profiles(plugins=False)[0]}
    assert {path.name for path in found} == {path.name for path in BUILT_IN.glob("*.json")}
    for path in found:
        made = load_profile(path)
        check_names(Evidence(made, path.name), registry.discover(plugins=False))
        assert made.setup.card
        assert made.points
        assert not [each for each in made.setup.changes(machine("h200")) if each.field == CARD]


def test_a_folder_that_is_not_there_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(session, "shipped_profiles", registry.shipped_profiles)
    install(tmp_path, "acme-gdn", group="kernelreg.profiles", entry_points={"x": "no_such_package_at_all"})
    monkeypatch.syspath_prepend(str(tmp_path))
    kernelreg.refresh()
    with caplog.at_level(logging.WARNING, "kernelreg"):
        assert decided(HERE, **CALL).backend == "flash_qla"
    assert "acme-gdn: x = no_such_package_at_all: there is no such folder" in caplog.text
