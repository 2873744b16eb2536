"""Processes in places that nobody chose for them: what facts, resolve and doctor say there, and that they end."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

import kernelreg
from kernelreg import Facts, FactsError
from kernelreg.errors import KernelregError
from tests.machines import machine

COMMANDS = (["facts"], ["resolve", "gdn", "--json"], ["doctor", "--json"])


def command(
    arguments: list[str], environ: Mapping[bytes, bytes], before: str = ""
) -> subprocess.CompletedProcess[bytes]:
    """A finished ``python -m kernelreg``, with what its process does before."""
    code = f"{before}\nimport sys\nfrom kernelreg.cli import main\nsys.exit(main(sys.argv[1:]))"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environ,
        stdin=subprocess.PIPE,
        capture_output=True,
        check=False,
        timeout=120,
    )


def environment(changes: Mapping[str, str | bytes | None]) -> dict[bytes, bytes]:
    """This process's environment, without kernelreg's and with some changes; None takes a variable out."""
    kept: dict[str, str | bytes | None] = {
        name: value for name, value in os.environ.items() if not name.startswith("KERNELREG_")
    }
    path = os.pathsep.join(each for each in sys.path if each)
    changed = {**kept, **changes, "PYTHONPATH": path}
    return {os.fsencode(name): os.fsencode(value) for name, value in changed.items() if value is not None}


@dataclasses.dataclass(frozen=True)
class Place:
    """A surrounding.

    Attributes:
        environ: what is set, or with None is not set.
        before: what the process does first.
        said: in the doctor's problems.
    """

    name: str
    environ: Mapping[str, str | bytes | None] = dataclasses.field(default_factory=dict)
    before: str = ""
    said: str | None = None


#: Every variable that kernelreg or a library of its looks at while it detects, with bytes that are no UTF-8.
STRAY = dict.fromkeys(("CUDA_HOME", "CUDA_DEVICE_ORDER", "HOME", "PATH", "XDG_STATE_HOME"), b"/stray/\xff\xfe")
PLACES = [
    Place("a container without GPUs", {"NVIDIA_VISIBLE_DEVICES": "void", "CUDA_VISIBLE_DEVICES": "-1"}),
    Place("a home that cannot be written", {"HOME": "/proc/self", "XDG_STATE_HOME": None}),
    Place("a state folder below a file", {"XDG_STATE_HOME": "/proc/version/state"}),
    Place("no HOME", {"HOME": None, "XDG_STATE_HOME": None}),
    Place(
        "no HOME, and a user that no file knows",
        {"HOME": None, "XDG_STATE_HOME": None},
        "import os; os.getuid = lambda: 4_000_000_000",
    ),
    Place("no PATH", {"PATH": None}),
    Place("no environment at all", dict.fromkeys(os.environ, None)),
    Place(
        "bytes that are no UTF-8 in the environment",
        {**STRAY, "CUDA_VISIBLE_DEVICES": b"\xff"},
        said="nvcc: /stray/??/bin/nvcc is named by the environment, but not there",
    ),
    Place(
        "KERNELREG_FACTS that is no UTF-8",
        {"KERNELREG_FACTS": b"/stray/\xff"},
        said="KERNELREG_FACTS: /stray/?: No such file or directory",
    ),
    Place("a locale that knows ASCII alone", {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
    Place(
        "a current folder that is gone",
        before="import os, tempfile; f = tempfile.mkdtemp(); os.chdir(f); os.rmdir(f)",
    ),
    Place("a closed standard input", before="import os; os.close(0)"),
    Place("children that are reaped for the process", before="import signal; signal.signal(17, signal.SIG_IGN)"),
]


@pytest.mark.skipif(sys.platform != "linux", reason="folders and signals of Linux")
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.name)
def test_facts_resolve_and_doctor_work_in_any_surrounding(place: Place) -> None:
    environ = environment(place.environ)
    facts, resolved, doctor = (command(each, environ, place.before) for each in COMMANDS)
    for each in (facts, resolved, doctor):
        assert b"Traceback" not in each.stderr
        assert b"unexpected" not in each.stderr
    report = json.loads(doctor.stdout)
    problems = [f"{each['source']}: {each['error']}" for each in report["problems"]]
    if place.said is not None:
        assert place.said in problems
    if "KERNELREG_FACTS" in place.environ:
        assert (facts.returncode, resolved.returncode, doctor.returncode) == (2, 2, 1)
        return
    nothing_runs = importlib.util.find_spec("torch") is None
    assert (facts.returncode, resolved.returncode) == (0, int(nothing_runs)), facts.stderr + resolved.stderr
    assert report["facts"] == json.loads(facts.stdout)
    assert report["fingerprint"] == json.loads(resolved.stdout)["facts"]
    assert {each["operation"] for each in report["decisions"]} == {"gdn.chunk", "gdn.recurrent"}


@pytest.mark.skipif(sys.platform != "linux", reason="needs a folder that nobody can write")
def test_facts_are_not_written_where_nothing_can_be() -> None:
    with pytest.raises(FactsError, match=r"/proc/self/facts\.json"):
        machine("h200").save("/proc/self/facts.json")


# -- files that are none ---------------------------------------------------------------------------------------


def fifo(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


def bound(folder: Path) -> Path:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.fspath(folder / "socket"))
    return folder / "socket"


def sparse(folder: Path) -> Path:
    with (folder / "large").open("wb") as file:
        file.truncate(1 << 40)
    return folder / "large"


FILES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "a named pipe": (fifo, "a named pipe, not a regular file"),
    "a directory": (lambda folder: folder, "a directory, not a regular file"),
    "/dev/zero": (lambda _: Path("/dev/zero"), "a device, not a regular file"),
    "/dev/stdin": (lambda _: Path("/dev/stdin"), "not a regular file"),
    "a socket": (bound, "a socket, not a regular file"),
    "a terabyte of nothing": (sparse, "larger than 1 MiB, which no such file is"),
    "a process's memory": (lambda _: Path("/proc/self/mem"), "Input/output error"),
}


@pytest.fixture
def short(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder, by a name that is short enough for a socket's."""
    folder = tmp_path_factory.mktemp("f")
    monkeypatch.chdir(folder)
    return Path()


@pytest.mark.skipif(sys.platform != "linux", reason="files of Linux")
@pytest.mark.parametrize("kind", FILES)
def test_what_is_no_file_is_an_error_and_neither_hangs_nor_fills_memory(short: Path, kind: str) -> None:
    make, said = FILES[kind]
    path = os.fspath(make(short))
    for arguments, environ in ((["resolve", "gdn"], {"KERNELREG_FACTS": path}), (["facts", "--facts", path], {})):
        # A limit on memory makes a read without end an error of its own.
        limit = "import resource; resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))"
        done = command(arguments, environment(environ), limit)
        assert done.returncode == 2
        assert done.stderr.decode().startswith(f"kernelreg: {path}: ")
        assert said in done.stderr.decode()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_descriptor_or_record_that_is_no_file_is_an_error_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kernelreg.verify.records import load_record

    os.mkfifo(tmp_path / "backend.toml")
    with pytest.raises(kernelreg.DescriptorError, match="a named pipe, not a regular file"):
        kernelreg.register(tmp_path / "backend.toml")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder = tmp_path / "kernelreg" / "verified"
    folder.mkdir(parents=True)
    os.mkfifo(folder / "feed.json")
    assert load_record("feed") is None  # it is no file, so there is no record


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_what_takes_a_files_place_after_the_look_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_text("{}")
    regular = (tmp_path / "file").stat()
    monkeypatch.setattr(Path, "stat", lambda *_, **__: regular)
    with pytest.raises(KernelregError, match="a named pipe, not a regular file"):
        Facts.load(tmp_path / "pipe")
