"""Finding backends: installed distributions as pip leaves them, and ``kernelreg.register``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

import kernelreg
from kernelreg.descriptor import load_descriptor, make_descriptor
from kernelreg.registry import Registry, discover
from kernelreg.session import Session, session
from tests import machines
from tests.distributions import install

BUILT_IN = ("fla", "flash_qla", "flashinfer", "torch")


def toml(name: str, extra: str = "") -> str:
    """A small descriptor's text."""
    return f"""schema = 1
name = "{name}"
adapter = "{name}_adapter"
{extra}
[[kernel]]
operation = "gdn.chunk"
name = "only"
function = "run"
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed distributions, first on ``sys.path``."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    return folder


def third_parties(registry: Registry) -> list[str]:
    """The names of the backends that are not this project's."""
    return [each.name for each in registry.backends if not each.origin.startswith("kernelreg:")]


def test_the_backends_of_this_project_are_found_through_the_group() -> None:
    registry = discover()
    assert set(BUILT_IN) <= set(registry.names())
    assert not third_parties(registry)
    assert registry.problems == ()


@pytest.mark.parametrize(
    ("value", "file"),
    [
        ("acme_gdn", "acme_gdn/backend.toml"),
        ("acme_gdn.cuda", "acme_gdn/cuda/backend.toml"),
        ("acme_gdn.plugin", "acme_gdn/backend.toml"),
        ("acme_gdn:other.toml", "acme_gdn/other.toml"),
        ("acme_gdn.cuda:other.toml", "acme_gdn/cuda/other.toml"),
        ("acme_module", "backend.toml"),
    ],
)
def test_a_plugin_is_found_without_running_any_of_its_code(site: Path, value: str, file: str) -> None:
    code = f"from pathlib import Path\nPath({os.fspath(site / 'ran')!r}).touch()\nraise SystemExit(3)\n"
    modules = ("acme_gdn/__init__.py", "acme_gdn/plugin.py", "acme_gdn/cuda/__init__.py", "acme_module.py")
    files = {**dict.fromkeys(modules, code), file: toml("acme")}
    install(site, "acme-gdn", entry_points={"anything": value}, files=files)

    registry = discover()

    assert third_parties(registry) == ["acme"]
    assert registry.problems == ()
    assert not (site / "ran").exists()
    assert not [name for name in sys.modules if name.startswith("acme_")]


def test_a_backend_says_which_entry_point_it_came_from(site: Path) -> None:
    install(site, "acme-gdn", entry_points={"x": "acme_gdn"}, files={"acme_gdn/backend.toml": toml("acme")})
    found = next(each for each in discover().backends if each.name == "acme")
    assert found.origin == "acme-gdn: x = acme_gdn"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, ["'broken' leads to no descriptor", "backend.toml"]),
        ("schema = 1\nname = \n", ["backend.toml", "not TOML", "line 2"]),
        (toml("broken", "adaptr = 1"), ["backend.toml", "unknown key 'adaptr'", "did you mean 'adapter'"]),
        (toml("Not A Name"), ["backend.toml", "'Not A Name'", "lower-case"]),
    ],
    ids=["no file", "not TOML", "unknown key", "bad name"],
)
def test_a_broken_descriptor_costs_that_backend_alone(site: Path, text: str | None, words: list[str]) -> None:
    files = {"broken_gdn/__init__.py": ""} | ({"broken_gdn/backend.toml": text} if text is not None else {})
    install(site, "broken-gdn", entry_points={"broken": "broken_gdn"}, files=files)
    install(site, "sound-gdn", entry_points={"s": "sound_gdn"}, files={"sound_gdn/backend.toml": toml("sound")})

    registry = discover()

    assert registry.names() == tuple(sorted([*BUILT_IN, "sound"]))
    (problem,) = registry.problems
    assert problem.source == "broken-gdn: broken = broken_gdn"
    assert [word for word in words if word not in problem.error] == []


@pytest.mark.parametrize("value", ["no_such_package", "no_such_package.below", "not a module!", ""])
def test_an_entry_point_to_nothing_is_a_problem(site: Path, value: str) -> None:
    install(site, "empty-gdn", entry_points={"gone": value})
    registry = discover()
    assert registry.names() == BUILT_IN
    assert [problem.source for problem in registry.problems] == [f"empty-gdn: gone = {value}"]


@pytest.mark.parametrize("junk", [b"[kernelreg.backends]\nno equals sign\n", b"\xff\xfe\x00"], ids=["syntax", "binary"])
def test_a_distribution_whose_entry_points_cannot_be_read_does_not_hide_the_others(site: Path, junk: bytes) -> None:
    (install(site, "broken-gdn") / "entry_points.txt").write_bytes(junk)
    install(site, "sound-gdn", entry_points={"s": "sound_gdn"}, files={"sound_gdn/backend.toml": toml("sound")})
    registry = discover()
    assert registry.names() == tuple(sorted([*BUILT_IN, "sound"]))
    assert [problem.source for problem in registry.problems] == ["entry points of broken-gdn"]


def test_a_distribution_whose_metadata_is_no_text_keeps_its_backend(site: Path) -> None:
    info = install(site, "odd-gdn", entry_points={"o": "odd_gdn"}, files={"odd_gdn/backend.toml": toml("odd")})
    (info / "METADATA").write_bytes(b"\xff\xfe\x00\x80")
    found = next(each for each in discover().backends if each.name == "odd")
    assert found.origin == "unknown distribution: o = odd_gdn"


@pytest.mark.parametrize("distribution", ["aaa-first", "zzz-last"])
@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_backend_keeps_its_name(site: Path, distribution: str, name: str) -> None:
    files = {"imposter/backend.toml": toml(name)}
    install(site, distribution, entry_points={name: "imposter"}, files=files)
    registry = discover()
    holder = next(each for each in registry.backends if each.name == name)
    assert holder.origin.startswith("kernelreg: ")
    assert registry.names() == BUILT_IN
    (problem,) = registry.problems
    assert problem.source == f"{distribution}: {name} = imposter"
    assert f"a backend named {name!r} is there already, from kernelreg: " in problem.error


def test_of_two_third_parties_the_first_by_distribution_keeps_the_name(site: Path) -> None:
    for distribution in ("gdn-b", "gdn-a"):
        package = distribution.replace("-", "_")
        install(site, distribution, entry_points={"x": package}, files={f"{package}/backend.toml": toml("acme")})
    registry = discover()
    assert [each.origin for each in registry.backends if each.name == "acme"] == ["gdn-a: x = gdn_a"]
    assert [problem.source for problem in registry.problems] == ["gdn-b: x = gdn_b"]


def test_the_order_does_not_depend_on_the_order_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sites = []
    for name in ("one", "two", "three"):
        files = {f"{name}_gdn/backend.toml": toml(name), f"{name}_gdn/twin.toml": toml("twin")}
        points = {name: f"{name}_gdn", "twin": f"{name}_gdn:twin.toml"}
        install(tmp_path / name, f"gdn-{name}", entry_points=points, files=files)
        sites.append(os.fspath(tmp_path / name))
    path = list(sys.path)
    monkeypatch.setattr(sys, "path", [*sites, *path])
    forwards = discover()
    monkeypatch.setattr(sys, "path", [*reversed(sites), *path])
    backwards = discover()
    assert forwards == backwards
    assert forwards.names() == tuple(sorted([*BUILT_IN, "one", "two", "three", "twin"]))
    assert len(forwards.problems) == 2


def test_a_distribution_that_lies_on_the_path_twice_is_no_clash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("first", "second"):
        files = {"acme_gdn/backend.toml": toml("acme")}
        install(tmp_path / folder, "acme-gdn", entry_points={"x": "acme_gdn"}, files=files)
        monkeypatch.syspath_prepend(tmp_path / folder)
    registry = discover()
    assert third_parties(registry) == ["acme"]
    assert registry.problems == ()


def test_without_plugins_only_built_in_backends_are_there(site: Path) -> None:
    install(site, "acme-gdn", entry_points={"x": "acme_gdn"}, files={"acme_gdn/backend.toml": toml("acme")})
    install(site, "broken-gdn", entry_points={"b": "broken_gdn"})
    (install(site, "unreadable-gdn") / "entry_points.txt").write_bytes(b"\xff")
    assert discover(plugins=False) == Registry(discover(plugins=False).backends)
    assert discover(plugins=False).names() == BUILT_IN


def test_the_environment_switches_plugins_off_and_on(site: Path) -> None:
    install(site, "acme-gdn", entry_points={"x": "acme_gdn"}, files={"acme_gdn/backend.toml": toml("acme")})
    environ = {"KERNELREG_PLUGINS": "off"}
    own = Session(environ)
    assert own.registry().names() == BUILT_IN
    environ["KERNELREG_PLUGINS"] = "on"
    own.policy()
    assert own.registry().names() == tuple(sorted([*BUILT_IN, "acme"]))


def test_rows_come_by_backend_and_then_as_the_descriptor_has_them() -> None:
    registry = discover()
    rows = [(backend.name, kernel.name) for backend, kernel in registry.kernels("gdn")]
    assert [backend for backend, _ in rows] == sorted(backend for backend, _ in rows)
    fla = next(each.descriptor for each in registry.backends if each.name == "fla")
    assert [row for backend, row in rows if backend == "fla"] == [
        kernel.name for kernel in fla.kernel if kernel.operation == "gdn.chunk"
    ]


@pytest.mark.parametrize("form", ["path", "text", "mapping", "descriptor"])
def test_register_takes_a_path_data_or_a_descriptor_and_gives_its_undo(tmp_path: Path, form: str) -> None:
    path = tmp_path / "acme.toml"
    path.write_text(toml("acme"), encoding="utf-8")
    given: Any = {
        "path": path,
        "text": os.fspath(path),
        "mapping": machines.descriptor("acme"),
        "descriptor": load_descriptor(path),
    }[form]
    undo = kernelreg.register(given)
    try:
        found = next(each for each in session.registry().backends if each.name == "acme")
        assert found.descriptor == load_descriptor(path)
        assert found.origin == (os.fspath(path) if form in ("path", "text") else "register()")
        candidates = machines.decided(machines.machine("cpu-only")).candidates
        assert ("acme", "only") in {(each.backend, each.kernel) for each in candidates}
    finally:
        undo()
    assert "acme" not in session.registry().names()
    assert "acme" not in {each.backend for each in machines.decided(machines.machine("cpu-only")).candidates}
    undo()
    assert session.registry().names() == BUILT_IN


def test_an_undo_takes_out_its_own_backend_alone() -> None:
    undo = kernelreg.register(machines.descriptor("acme"))
    undo()
    again = kernelreg.register(machines.descriptor("acme"))
    try:
        undo()
        assert "acme" in session.registry().names()
    finally:
        again()


@pytest.mark.parametrize("name", [*BUILT_IN, "acme"])
def test_register_refuses_a_name_that_is_taken(name: str) -> None:
    undo = kernelreg.register(machines.descriptor("acme"))
    try:
        before = session.registry()
        with pytest.raises(kernelreg.ConfigurationError, match=f"'{name}' is there already, from ") as caught:
            kernelreg.register(machines.descriptor(name))
        assert str(caught.value).startswith("register(): ")
        assert session.registry() == before
    finally:
        undo()


@pytest.mark.parametrize("given", [{}, {1: 2}, {"schema": 1, "name": "x"}, machines.descriptor("acme", homepge="x")])
def test_register_refuses_data_that_is_no_descriptor(given: dict[Any, Any]) -> None:
    with pytest.raises(kernelreg.DescriptorError):
        kernelreg.register(given)
    assert session.registry().names() == BUILT_IN


def test_register_does_not_change_what_it_was_given() -> None:
    given = machines.descriptor("acme", requires={"packages": {"triton": ">=3"}})
    kernelreg.register(given)()
    assert given == machines.descriptor("acme", requires={"packages": {"triton": ">=3"}})
    assert make_descriptor(given).requires.packages != given["requires"]["packages"]


def test_a_backend_that_is_left_out_is_said_once_and_where_its_name_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = {"acme/__init__.py": "", "acme/backend.toml": "schema = 2\n"}
    install(tmp_path, "acme-gdn", entry_points={"acme": "acme"}, files=files)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("KERNELREG_PLUGINS", "on")  # another value: what was found before is looked for anew
    with caplog.at_level("WARNING", logger="kernelreg"):
        machines.decided(machines.machine("h200"))
        machines.decided(machines.machine("h200"))
    (line,) = [record.message for record in caplog.records]
    assert line.startswith("backend left out: acme-gdn: acme = acme")
    with pytest.raises(kernelreg.ConfigurationError, match=r"left out: acme-gdn: acme = acme"):
        kernelreg.use(backend="acme")
