"""Detection of packages by their metadata and of nvcc by where it is looked for."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kernelreg.machine import Problem, Tool, tools
from kernelreg.machine.packages import detect_packages
from kernelreg.machine.tools import detect_tools
from tests.distributions import install


def test_packages_are_those_whose_metadata_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "acme-kernels", version="1.2rc1+local")
    (tmp_path / "acme_shadow").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    names = ["acme-kernels", "acme_shadow", "acme-absent", "msgspec", "msgspec"]
    wanted = {"acme-kernels": "1.2rc1+local", "msgspec": importlib.metadata.version("msgspec")}
    assert detect_packages(names) == (wanted, [])


@pytest.mark.parametrize("metadata", [b"Name: acme\n", b"", None, b"\xff\xfe\x00\x80"])
def test_a_package_without_a_readable_version_is_there_with_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metadata: bytes | None
) -> None:
    file = install(tmp_path, "acme", version=None) / "METADATA"
    file.write_bytes(metadata) if metadata is not None else file.unlink()
    monkeypatch.syspath_prepend(tmp_path)
    versions, problems = detect_packages(["acme"])
    assert versions == {"acme": ""}
    assert [problem.source for problem in problems] == ["package acme"]


RELEASE = "echo 'Cuda compilation tools, release 12.8, V12.8.93'"


@pytest.fixture
def nvcc(tmp_path: Path) -> Callable[..., Path]:
    """Writes a shell script named nvcc in a new folder's ``bin`` and gives its path."""

    def write(home: str, script: str = RELEASE, mode: int = 0o755) -> Path:
        path = tmp_path / home / "bin" / "nvcc"
        path.parent.mkdir(parents=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(mode)
        return path

    return write


def test_the_first_nvcc_of_cuda_home_path_and_default_is_the_one(nvcc: Callable[..., Path]) -> None:
    home, other, path = nvcc("home"), nvcc("other", RELEASE.replace("12.8", "12.4")), nvcc("path", "echo release 11.8")
    environ = {"CUDA_HOME": str(home.parents[1]), "CUDA_PATH": str(other.parents[1]), "PATH": str(path.parent)}
    found = []
    for name in ("", "CUDA_HOME", "CUDA_PATH"):
        environ.pop(name, None)
        found.append(detect_tools(environ))
    assert found == [
        ({"nvcc": Tool(path=str(home), version="12.8")}, []),
        ({"nvcc": Tool(path=str(other), version="12.4")}, []),
        ({"nvcc": Tool(path=str(path), version="11.8")}, []),
    ]


def test_where_nothing_names_an_nvcc_the_usual_place_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, nvcc: Callable[..., Path]
) -> None:
    usual = nvcc("usual")
    monkeypatch.setattr(tools, "_DEFAULT", usual)
    assert detect_tools({"PATH": ""}) == ({"nvcc": Tool(path=str(usual), version="12.8")}, [])


def test_a_wheel_of_nvcc_whose_files_cannot_be_listed_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nvcc: Callable[..., Path]
) -> None:
    (install(tmp_path, "nvidia-cuda-nvcc") / "RECORD").write_bytes(b"\xff\xfe,\n")
    monkeypatch.syspath_prepend(tmp_path)
    usual = nvcc("usual")
    monkeypatch.setattr(tools, "_DEFAULT", usual)
    found, (problem,) = detect_tools({"PATH": ""})
    assert found == {"nvcc": Tool(path=str(usual), version="12.8")}
    assert problem.error.startswith("the files of nvidia-cuda-nvcc: UnicodeDecodeError: ")


@pytest.mark.parametrize("home", ["missing", "x" * 5000], ids=["missing", "too long"])
def test_a_cuda_home_without_nvcc_is_a_problem_and_the_next_place_is_looked_at(
    tmp_path: Path, nvcc: Callable[..., Path], home: str
) -> None:
    path = nvcc("path")
    found, problems = detect_tools({"CUDA_HOME": str(tmp_path / home), "PATH": str(path.parent)})
    assert found == {"nvcc": Tool(path=str(path), version="12.8")}
    expected = f"{tmp_path / home / 'bin' / 'nvcc'} is named by the environment, but not there"
    assert problems == [Problem(source="nvcc", error=expected)]


@pytest.mark.parametrize(
    ("script", "mode", "said"),
    [
        ("echo junk", 0o755, "printed no release (exit code 0)"),
        (r"printf '\377\000\200'", 0o755, "printed no release (exit code 0)"),
        ("exit 1", 0o755, "printed no release (exit code 1)"),
        (RELEASE, 0o644, "does not run: Permission denied"),
        ("exec sleep 60", 0o755, "did not answer within 0 s"),
        ("sleep 60; true", 0o755, "did not answer within 0 s"),
        ("yes; sleep 60", 0o755, "did not answer within 0 s"),
        ("yes >&2; sleep 60", 0o755, "did not answer within 0 s"),
    ],
)
def test_an_nvcc_that_gives_no_version_is_there_with_a_problem(
    monkeypatch: pytest.MonkeyPatch, nvcc: Callable[..., Path], script: str, mode: int, said: str
) -> None:
    monkeypatch.setattr(tools, "NVCC_SECONDS", 0.3 if "sleep" in script else 30.0)
    path = nvcc("home", script, mode)
    found, problems = detect_tools({"CUDA_HOME": os.fspath(path.parents[1]), "PATH": ""})
    assert found == {"nvcc": Tool(path=str(path), version=None)}
    assert [problem.source for problem in problems] == ["nvcc"]
    assert str(path) in problems[0].error
    assert said in problems[0].error


def test_an_nvcc_that_leaves_a_process_behind_is_heard_and_leaves_none(
    monkeypatch: pytest.MonkeyPatch, nvcc: Callable[..., Path], tmp_path: Path
) -> None:
    """It starts a helper, as wrappers of compilers do, which keeps its output open."""
    monkeypatch.setattr(tools, "NVCC_SECONDS", 1e9)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    path = nvcc("home", f"{{ echo up; sleep 600; }} >'{pipe}' & {{ sleep 600; }} & {RELEASE}")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        found, problems = detect_tools({"CUDA_HOME": os.fspath(path.parents[1])})
        assert (found, problems) == ({"nvcc": Tool(path=str(path), version="12.8")}, [])
        os.set_blocking(reader, True)
        while os.read(reader, 1 << 10):  # until the helper is gone
            pass
    finally:
        os.close(reader)


def test_what_prints_without_end_fills_no_memory() -> None:
    script = """
import resource, sys
from kernelreg.children import run
resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))
for where in ("1", "2"):
    ended = run(["sh", "-c", f"yes >&{where}"], 1.0)
    assert ended.code is None
    assert len(ended.printed) <= 1 << 22
    assert len(ended.words) <= 1 << 14
"""
    subprocess.run([sys.executable, "-c", script], check=True)
