"""nvcc: the binary that kernels compiled at first use would run, and its version."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from kernelreg.children import run
from kernelreg.faults import fault_of
from kernelreg.machine.model import Problem, Tool

#: Seconds that ``nvcc --version`` may take: a cold network file system, not a hang.
NVCC_SECONDS = 10.0

#: Where CUDA's own installer puts it; it need not be there.
_DEFAULT = Path("/usr/local/cuda/bin/nvcc")
_RELEASE = re.compile(r"release (\d+\.\d+)")


def detect_tools(environ: Mapping[str, str]) -> tuple[dict[str, Tool], list[Problem]]:
    """The first nvcc in the order in which torch's extension builder and TileLang look for it."""
    problems: list[Problem] = []
    for path in _candidates(environ, problems):
        if not _is_file(path):
            if path is not _DEFAULT:
                problems.append(Problem(source="nvcc", error=f"{path} is named by the environment, but not there"))
            continue
        version, error = _version(path)
        if error:
            problems.append(Problem(source="nvcc", error=error))
        return {"nvcc": Tool(path=os.fspath(path), version=version)}, problems
    return {}, problems


def _candidates(environ: Mapping[str, str], problems: list[Problem]) -> Iterator[Path]:
    """Where nvcc may be, first match wins: CUDA_HOME or CUDA_PATH, PATH, the nvidia-cuda-nvcc wheel, the default."""
    home = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    if home:
        yield Path(home) / "bin" / "nvcc"
    on_path = shutil.which("nvcc", path=environ.get("PATH", os.defpath))
    if on_path:
        yield Path(on_path)
    try:
        files = importlib.metadata.files("nvidia-cuda-nvcc") or []
        inside = [Path(os.fspath(file.locate())) for file in files if file.name == "nvcc"]
    except importlib.metadata.PackageNotFoundError:
        inside = []
    except BaseException as error:  # other people's files and finders
        problems.append(Problem(source="nvcc", error=f"the files of nvidia-cuda-nvcc: {fault_of(error)}"))
        inside = []
    yield from inside
    yield _DEFAULT


def _is_file(path: Path) -> bool:
    """Whether there is such a file; one that may not be looked at, or whose name is too long, is none."""
    try:
        return path.is_file()
    except OSError:
        return False


def _version(path: Path) -> tuple[str | None, str | None]:
    """The release that the binary prints, or what kept it from printing one."""
    try:
        done = run([os.fspath(path), "--version"], NVCC_SECONDS)
    except (OSError, ValueError) as error:
        return None, f"{path} does not run: {getattr(error, 'strerror', None) or error}"
    if done.code is None:
        return None, f"{path} --version did not answer within {NVCC_SECONDS:.0f} s"
    found = _RELEASE.search(done.printed.decode("utf-8", "replace"))
    if found is None:
        return None, f"{path} --version printed no release (exit code {done.code})"
    return found[1], None
