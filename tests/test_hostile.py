"""Hostile plugins: each costs its own backend, with a reason, and never the process that looked at it."""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kernelreg
from kernelreg.adapters import import_function
from kernelreg.asking import NoAnswerError
from kernelreg.cli import main
from kernelreg.descriptor import load_descriptor
from kernelreg.faults import fault_of
from kernelreg.imports import Adapter, Imported, import_adapter
from kernelreg.machine import detect
from kernelreg.registry import discover
from kernelreg.session import session
from tests import machines
from tests.hostile import DISCOVERY, IMPORTS, LOOPS, PATCHES, Hostile, descriptor, install_hostile, package

ROOT = Path(__file__).parent.parent
BUILT_IN = ("fla", "flash_qla", "flashinfer", "torch")
#: A machine on which the plugins could run, also where there is no torch.
CPU = {"KERNELREG_FACTS": str(machines.FACTS / "cpu-only.json")}
HARMLESS = {case: hostile for case, hostile in IMPORTS.items() if not hostile.deadly}

needs_groups = pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups came with Python 3.11")
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed distributions, first on ``sys.path``; what was imported from it is forgotten."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("hostile_"):
            del sys.modules[name]


def doctor(site: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """``kernelreg doctor`` beside the plugins of a folder."""
    path = os.pathsep.join([str(site), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-m", "kernelreg", "doctor", *words],
        cwd=site,
        env={**os.environ, "PYTHONPATH": path, **CPU, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def reasons(report: dict[str, Any], backend: str) -> list[dict[str, Any]]:
    """What the doctor's JSON has against a backend's row for ``gdn.chunk``."""
    rows = report["decisions"][0]["candidates"]
    found: list[dict[str, Any]] = next(each["reasons"] for each in rows if each["backend"] == backend)
    return found


# -- the import of an adapter ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of ``doctor --deep`` on a machine with every hostile plugin but those that never end."""
    folder = tmp_path_factory.mktemp("site")
    for case, hostile in {**IMPORTS, **PATCHES}.items():
        install_hostile(folder, case, hostile)
    done = doctor(folder, "--deep", "--json", KERNELREG_PLUGINS="on")
    assert "Traceback" not in done.stderr
    report: dict[str, Any] = json.loads(done.stdout)  # whatever the plugins print, this is JSON alone
    return report


@pytest.mark.parametrize("case", [*IMPORTS, *(pytest.param(case, marks=needs_torch) for case in PATCHES)])
def test_the_deep_doctor_survives_each_and_says_why(case: str, deep: dict[str, Any]) -> None:
    hostile = {**IMPORTS, **PATCHES}[case]
    name = package(case)
    (result,) = [each for each in deep["adapters"] if each["backend"] == name]
    if hostile.reason is None:
        assert "reason" not in result
        assert any(hostile.said in each for each in result["changed"])
        assert [
            each for each in deep["problems"] if each["source"] == f"import of {name}" and hostile.said in each["error"]
        ]
        assert "secret" not in json.dumps(deep)
        return
    said = [each for each in reasons(deep, name) if each["code"] == hostile.reason]
    assert len(said) == 1
    assert said[0] == result["reason"]
    assert said[0]["subject"] == f"{name}.adapter"
    assert hostile.said in said[0]["actual"]
    assert "\n" not in said[0]["actual"]
    assert "\x1b" not in said[0]["actual"]
    assert len(said[0]["actual"]) < 1000


@needs_torch
def test_ours_are_imported_too_and_change_nothing_that_decides(deep: dict[str, Any]) -> None:
    (ours,) = [each for each in deep["adapters"] if each["backend"] == "torch"]
    assert ours == {"backend": "torch"}
    assert deep["ok"] is True


@needs_torch
def test_what_torch_replaces_itself_is_no_patch(site: Path) -> None:
    code = "import torch\nbefore = torch.manual_seed\nimport torch._dynamo\nprint(torch.manual_seed is before)"
    name = install_hostile(site, "compiler", Hostile(code, None, ""))
    found = import_adapter(name, Adapter(module=f"{name}.adapter", functions=("run",)))
    assert found.reason is None
    assert not [each for each in found.changed if "replaced" in each]


@pytest.mark.parametrize("case", HARMLESS)
def test_an_automatic_choice_moves_on_and_the_process_lives(
    case: str, site: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hostile = HARMLESS[case]
    for name in ("KERNELREG_BACKEND", "CUDA_VISIBLE_DEVICES", "ACME_TOKEN"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    name = install_hostile(site, case, hostile)
    install_hostile(site, "sound", Hostile("", None, ""))
    kernelreg.refresh()
    resolution = kernelreg.resolve("gdn", facts=machines.machine("cpu-only"), policy=kernelreg.make_policy(prefer=name))
    assert resolution.backend == name
    assert not [each for each in sys.modules if each.startswith("hostile_")]  # a decision runs nobody's code
    with caplog.at_level("WARNING", logger="kernelreg"):
        assert callable(resolution.function)
    if hostile.reason is None:
        assert resolution.backend == name
        decides = hostile.said.startswith(("KERNELREG_", "CUDA_"))
        assert [hostile.said in each.message for each in caplog.records] == ([True] if decides else [])
        return
    assert resolution.backend == package("sound")
    row = next(each for each in resolution.candidates if each.backend == name)
    (reason,) = row.reasons
    assert (reason.code, reason.subject) == ("import-error", f"{name}.adapter")
    assert hostile.said in (reason.actual or "")
    (line,) = [each.message for each in caplog.records]
    assert f"{name} only is installed and ranks higher, but cannot run: import-error" in line


@pytest.mark.parametrize("case", LOOPS)
def test_an_import_that_never_ends_is_ended(case: str, site: Path) -> None:
    hostile = LOOPS[case]
    name = install_hostile(site, case, hostile)
    found = import_adapter(name, Adapter(module=f"{name}.adapter", functions=("run",)), limit=2)
    assert found.reason is not None
    assert found.reason.code == hostile.reason
    assert f"importing it: {hostile.said} 2 s" in (found.reason.actual or "")
    assert found.reason.fix == f"KERNELREG_DISABLE={name}"


def test_with_nothing_else_to_run_the_deep_doctor_is_not_ok(site: Path) -> None:
    name = install_hostile(site, "abort in C", IMPORTS["abort in C"])
    done = doctor(site, "--deep", KERNELREG_DISABLE=",".join(BUILT_IN))
    assert done.returncode == 1
    assert f"{name}: probe-error: {name}.adapter: importing it: the process died of SIGABRT" in " ".join(
        done.stdout.split()
    )
    assert "gdn.chunk on cpu: no usable backend" in done.stdout
    shallow = doctor(site, "--json", KERNELREG_DISABLE=",".join(BUILT_IN))
    assert not any("gdn.chunk" in each for each in json.loads(shallow.stdout)["unmet"])


def test_strict_lets_nothing_stand_in_for_an_adapter_that_takes_the_process_along(site: Path) -> None:
    name = install_hostile(site, "abort in C", IMPORTS["abort in C"])
    install_hostile(site, "sound", Hostile("", None, ""))
    variables = {"KERNELREG_DISABLE": ",".join(BUILT_IN), "KERNELREG_STRICT": "1"}
    report = json.loads(doctor(site, "--deep", "--json", **variables).stdout)
    decision = report["decisions"][0]
    assert decision["backend"] is None
    other = reasons(report, package("sound"))
    assert [each["code"] for each in other] == ["not-selected"]
    assert f"{name} only ranks higher and cannot be imported; strict allows no fallback" in other[0]["actual"]


@needs_torch
def test_the_doctor_says_whether_adapters_were_imported(site: Path) -> None:
    assert "Adapters were not imported." in doctor(site).stdout
    assert "Adapters were imported." in doctor(site, "--deep").stdout


def test_deep_speaks_of_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--deep", "--facts", str(machines.FACTS / "h200.json")]) == 2
    assert "--deep imports adapters on this machine" in capsys.readouterr().err


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_when_the_doctor_is_stopped(site: Path, stop: signal.Signals) -> None:
    """The adapter tells its process through a pipe, and then hangs; the pipe ends when all that hold it are gone."""
    pipe = site / "pipe"
    os.mkfifo(pipe)
    code = f"import os\nfile = os.open({str(pipe)!r}, os.O_WRONLY)\nos.write(file, b'here')\nwhile True: pass"
    install_hostile(site, "hang", Hostile(code, None, ""))
    path = os.pathsep.join([str(site), str(ROOT)])
    variables = {**os.environ, **CPU, "PYTHONPATH": path, "KERNELREG_DISABLE": ",".join(BUILT_IN)}
    command = [sys.executable, "-m", "kernelreg", "doctor", "--deep"]
    with subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        with pipe.open("rb") as file:  # waits until the adapter is there
            assert file.read(4) == b"here"
            process.send_signal(stop)
            assert file.read() == b""  # waits until it is gone
        assert process.wait(60) == (130 if stop == signal.SIGINT else -stop)
        assert process.stderr is not None
        assert b"Traceback" not in process.stderr.read()


# -- Ctrl-C ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    [
        "raise KeyboardInterrupt",
        "try: raise KeyboardInterrupt\nexcept BaseException as error: raise ImportError('no') from error",
        "try: raise KeyboardInterrupt\nexcept BaseException: raise SystemExit(1)",
        "try: raise KeyboardInterrupt\nexcept BaseException: raise ImportError('no') from None",
        "try: raise KeyboardInterrupt\nexcept BaseException: raise ImportError('no') from OSError('other')",
        pytest.param("raise BaseExceptionGroup('some', [OSError(), KeyboardInterrupt()])", marks=needs_groups),
    ],
    ids=["plain", "chained", "swallowed by an exit", "from None", "from another", "in a group"],
)
def test_an_interrupt_during_an_import_ends_the_import_and_rules_nothing_out(code: str, site: Path) -> None:
    name = install_hostile(site, "interrupt", Hostile(code, None, ""))
    kernelreg.refresh()
    policy = kernelreg.make_policy(prefer=name)
    resolution = kernelreg.resolve("gdn", facts=machines.machine("cpu-only"), policy=policy)
    with pytest.raises(KeyboardInterrupt):
        _ = resolution.function
    assert resolution.backend == name
    assert name not in session.ruled_out


def test_what_the_caller_is_handling_is_none_of_the_adapters_causes(site: Path) -> None:
    name = install_hostile(site, "ImportError", IMPORTS["ImportError"])
    kernelreg.refresh()
    resolution = kernelreg.resolve(
        "gdn", facts=machines.machine("cpu-only"), policy=kernelreg.make_policy(backend=name)
    )
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:  # a server that is told to end, and decides once more on its way
        with pytest.raises(kernelreg.NoBackendError, match="ImportError: no such kernel") as caught:
            _ = resolution.function
    assert "KeyboardInterrupt" not in str(caught.value)


class _Finder:
    """A finder of other people's, which fails when it is asked."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name.startswith("broken"):
            raise self.error
        return None

    def find_distributions(self, context: object = None) -> Iterator[importlib.metadata.Distribution]:
        raise self.error


@pytest.mark.parametrize("asked", ["find_spec", "find_distributions"])
def test_an_interrupt_during_discovery_ends_it(asked: str, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    DISCOVERY["entry point to nothing"][0](site)
    (site / "broken-1.0.dist-info" / "entry_points.txt").write_text("[kernelreg.backends]\nx = broken\n")
    hidden = RuntimeError("no")
    hidden.__cause__ = KeyboardInterrupt()
    for error in (KeyboardInterrupt(), hidden):
        finder = _Finder(error)
        if asked == "find_spec":
            monkeypatch.setattr(finder, "find_distributions", lambda context=None: iter(()))
        with monkeypatch.context() as patch:
            patch.setattr(sys, "meta_path", [finder, *sys.meta_path])
            with pytest.raises(KeyboardInterrupt):
                discover()


@pytest.mark.parametrize("error", [RuntimeError("lost"), SystemExit(4)], ids=["RuntimeError", "SystemExit"])
def test_a_finder_that_fails_hides_nothing_of_the_others(
    error: BaseException, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_hostile(site, "sound", Hostile("", None, ""))
    monkeypatch.setattr(sys, "meta_path", [_Finder(error), *sys.meta_path])
    registry = discover()
    assert registry.names() == tuple(sorted([*BUILT_IN, package("sound")]))
    (problem,) = registry.problems
    assert problem.source == "distributions of _Finder"
    assert problem.error == fault_of(error)


@pytest.mark.parametrize("name", ["torch", "pynvml", "fla-core", "nvidia-cuda-nvcc"])
@pytest.mark.parametrize("error", [RuntimeError("lost"), SystemExit(4)], ids=["RuntimeError", "SystemExit"])
def test_a_finder_that_fails_costs_the_facts_what_it_was_asked_for(
    name: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Finder:
        """Fails for one name alone."""

        def find_spec(self, asked: str, path: object = None, target: object = None) -> None:
            if asked == name:
                raise error

        def find_distributions(self, context: Any = None) -> Iterator[importlib.metadata.Distribution]:
            if getattr(context, "name", None) == name:
                raise error
            return iter(())

    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    for module in ("torch", "pynvml"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    environ = {"PATH": "/nonexistent"}
    told = [each for each in detect(["fla-core", "msgspec"], environ).problems if fault_of(error) in each.error]
    sources = {"torch": "torch", "pynvml": "nvml", "fla-core": "package fla-core", "nvidia-cuda-nvcc": "nvcc"}
    assert [each.source for each in told] == [sources[name]]


# -- discovery ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", DISCOVERY)
def test_what_is_broken_before_any_code_is_run_costs_that_plugin_alone(case: str, site: Path) -> None:
    make, said = DISCOVERY[case]
    make(site)
    sound = install_hostile(site, "sound", Hostile("raise SystemExit", None, ""))
    registry = discover()
    assert registry.names() == tuple(sorted([*BUILT_IN, sound]))
    (problem,) = registry.problems
    assert said in problem.error
    assert len(problem.error) < 1000
    assert f"{sound}.adapter" not in sys.modules


def test_the_doctor_and_backends_tell_all_of_it_without_a_traceback(site: Path) -> None:
    for number, text in enumerate((b"schema = 2", b"\xff", b"a." * 99_999 + b"a = 1")):
        install_hostile(site, f"broken {number}", Hostile("", None, ""))
        (site / package(f"broken {number}") / "backend.toml").write_bytes(text)
    done = doctor(site, "--json", KERNELREG_PLUGINS="on")
    assert "Traceback" not in done.stderr
    told = [each["source"] for each in json.loads(done.stdout)["problems"] if each["source"].startswith("hostile")]
    assert len(told) == 3


@pytest.mark.parametrize("kind", ["pipe", "directory", "device"])
def test_a_path_that_is_no_file_is_refused_at_once(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "backend.toml"
    if kind == "pipe":
        os.mkfifo(path)
    if kind == "directory":
        path.mkdir()
    if kind == "device":
        path = Path("/dev/zero")
    with pytest.raises(kernelreg.DescriptorError, match="directory" if kind == "directory" else "not a regular file"):
        load_descriptor(path)


def test_of_two_hostile_plugins_of_one_name_the_first_is_read_and_the_other_told(site: Path) -> None:
    for distribution in ("zzz", "aaa"):
        install_hostile(site, distribution, Hostile("", None, ""))
        (site / package(distribution) / "backend.toml").write_text(descriptor("twin", "nothing"))
    registry = discover()
    assert [each.origin for each in registry.backends if each.name == "twin"] == [
        "hostile_aaa: hostile_aaa = hostile_aaa"
    ]
    assert "the first keeps the name" in registry.problems[0].error


# -- the chain of causes -----------------------------------------------------------------------------------------------


def test_a_chain_is_told_link_by_link() -> None:
    first, second = OSError("libfoo.so: cannot open"), RuntimeError("b\nmore")
    second.__context__ = first
    third = ImportError("a")
    third.__cause__ = second
    assert fault_of(third) == "ImportError: a ← RuntimeError: b ← OSError: libfoo.so: cannot open"
    first.__context__ = third  # a ring ends where it began
    assert fault_of(third).count("←") == 2
    third.__cause__ = None  # `from None`
    third.__suppress_context__ = True
    assert fault_of(third) == "ImportError: a"


@needs_groups
def test_of_a_group_each_error_is_told() -> None:
    group: Any = vars(builtins)["ExceptionGroup"]
    error = group("some", [OSError("libfoo.so"), group("more", [ValueError("b")])])
    error.__cause__ = KeyError("c")
    said = ["ExceptionGroup: some (2 sub-exceptions)", "OSError: libfoo.so", "ExceptionGroup: more (1 sub-exception)"]
    assert fault_of(error) == " ← ".join([*said, "ValueError: b", "KeyError: 'c'"])


def test_a_refusal_is_chained_to_the_adapters_error_however_often_it_is_given(site: Path) -> None:
    name = install_hostile(site, "missing library", IMPORTS["missing library"])
    kernelreg.refresh()
    facts, forced = machines.machine("cpu-only"), kernelreg.make_policy(backend=name)
    strict = kernelreg.make_policy(prefer=name, strict=True)
    with pytest.raises(kernelreg.NoBackendError) as caught:
        _ = kernelreg.resolve("gdn", facts=facts, policy=forced).function
    errors: list[BaseException] = [caught.value]
    for policy in (forced, strict, forced):
        with pytest.raises(kernelreg.NoBackendError) as caught:
            kernelreg.resolve("gdn", facts=facts, policy=policy)
        errors.append(caught.value)
    for error in errors:
        cause = error.__cause__
        assert isinstance(cause, kernelreg.AdapterError)
        assert isinstance(cause.__cause__, ImportError)
        assert isinstance(cause.__cause__.__cause__, OSError)
        assert "OSError: libfoo.so: cannot open" in "".join(traceback.format_exception(error))
        assert "ImportError: a ← OSError: libfoo.so: cannot open" in str(error)
    kernelreg.refresh()
    assert kernelreg.resolve("gdn", facts=facts, policy=forced).backend == name  # looked at anew


def test_an_adapter_that_imported_once_is_not_watched_again(site: Path, caplog: pytest.LogCaptureFixture) -> None:
    name = install_hostile(site, "sound", Hostile("", None, ""))
    assert callable(import_function(f"{name}.adapter", "run"))
    with pytest.raises(kernelreg.AdapterError, match="has no attribute 'walk'"):
        import_function(f"{name}.adapter", "walk")
    assert caplog.records == []


# -- asking a child ----------------------------------------------------------------------------------------------------


def test_a_child_that_cannot_start_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "")
    found = import_adapter("acme", Adapter(module="acme", functions=()))
    assert found.reason is not None
    assert "names no Python to start a child process with" in (found.reason.actual or "")
    assert issubclass(NoAnswerError, kernelreg.KernelregError)


@pytest.mark.parametrize(
    "code",
    [
        "import os; os.close(0); os.close(1); os.close(2)",
        "import os; os.closerange(0, 100)",
        "import sys; sys.stdout = sys.stderr = sys.stdin = None",
        "import os, signal; os.killpg(0, signal.SIGTERM)",
        "import os\nif os.fork() == 0:\n    os.setsid()\n    while True: pass",
        "import sys; sys.stdout.write('x' * 10_000_000)",
        "import os; os.write(1, b'{\"reason\": null}\\n')",
        "import atexit, time; atexit.register(lambda: time.sleep(1e6))",
        "import sys; sys.modules['kernelreg.adapters'] = sys.modules['msgspec'] = None",
        "import signal\nfor each in set(signal.Signals) - {9, 19}: signal.signal(each, signal.SIG_IGN)",
        "import sys; sys.modules[__name__] = None",
        "import os\nwrite = os.write\nos.write = lambda file, data: write(file, b'\"\\xff\"\\n') and len(data)",
    ],
    ids=[
        *(
            "its streams",
            "all files",
            "no streams",
            "its group",
            "a child left",
            "output",
            "an answer",
            "at exit",
            "us",
        ),
        *("signals", "itself", "no UTF-8"),
    ],
)
def test_an_adapter_that_attacks_the_child_gives_an_answer_or_a_reason(code: str, site: Path, tmp_path: Path) -> None:
    if "setsid" in code:  # one that leaves the group cannot be ended with it: it ends itself
        code = code.replace("while True: pass", "os._exit(0)")
    name = install_hostile(site, "attack", Hostile(code, None, ""))
    found = import_adapter(name, Adapter(module=f"{name}.adapter", functions=("run",)), limit=60)
    assert found.reason is None or found.reason.code in ("probe-error", "import-error")


def test_an_adapter_that_doubles_the_child_is_heard_once(site: Path) -> None:
    """As after a fork both answer; here both answers come at once."""
    code = "import os\nwrite = os.write\nos.write = lambda file, data: write(file, data + data) // 2"
    name = install_hostile(site, "double", Hostile(code, None, ""))
    found = import_adapter(name, Adapter(module=f"{name}.adapter", functions=("run",)))
    assert found == Imported(backend=name)


# -- the docs ----------------------------------------------------------------------------------------------------------


def test_the_docs_have_a_row_for_each_case_and_no_other() -> None:
    text = (ROOT / "docs" / "failures.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+?) \| ([^|]*) \| ([^|]*) \|$", text, re.MULTILINE)
    told = {case: (reason, said) for case, reason, said in rows if case not in ("case", "---")}
    cases = {**IMPORTS, **PATCHES, **LOOPS}
    assert set(told) == {*cases, *DISCOVERY}
    for case, hostile in cases.items():
        reason, said = told[case]
        assert reason == (f"`{hostile.reason}`" if hostile.reason else "noticed"), case
        assert hostile.said in said.replace("`", ""), case
    for case, (_, said) in DISCOVERY.items():
        assert told[case][0] == "left out"
        assert said.strip() in told[case][1].replace("`", ""), case


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("#include <tl.h>\n#error no\nint x;\nCompilation error:\nnvcc fatal : no gcc\n", "nvcc fatal : no gcc"),
        ("#include <tl.h>\nint x;\nk.cu(2): error: identifier y\n", "k.cu(2): error: identifier y"),
        ("#include <tl.h>\nint x;\n", "#include <tl.h>"),
        ("no such file\nerror: later", "no such file"),
    ],
)
def test_of_an_error_that_shows_its_source_the_complaint_is_told(text: str, told: str) -> None:
    assert fault_of(RuntimeError(text)) == f"RuntimeError: {told}"
