"""Machines with GPUs for tests: C stubs of the driver's libraries, told by a file what to say.

Detection then runs for real, through nvidia-ml-py and ctypes and in its child processes, in a process whose
``LD_LIBRARY_PATH`` names the stubs.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kernelreg import Facts

HERE = Path(__file__).parent
LIBRARIES = {"nvml": "libnvidia-ml.so.1", "cuda": "libcuda.so.1"}
DRIVER = "driver 580.95.05 13000"
H200: dict[str, Any] = {
    "name": "NVIDIA H200",
    "capability": "9.0",
    "memory": 150754820096,
    "cores": 16896,
    "sms": 132,
    "speed": 50,
}
RTX5090: dict[str, Any] = {
    "name": "RTX 5090",
    "capability": "12.0",
    "memory": 34190917632,
    "cores": 21760,
    "sms": 170,
    "speed": 90,
}


def uuid(key: str) -> str:
    """A UUID that begins with four hexadecimal digits: ``aa11`` of a card, ``MIG-aa11`` of an instance."""
    prefix, _, digits = key.rpartition("-")
    return f"{prefix or 'GPU'}-{digits}0000-0000-0000-0000-000000000000"


def card(key: str, bus: int, like: Mapping[str, Any] = H200, **changes: Any) -> str:
    """A card's line in the stubs' file, NVML's order being the lines'. ``mig`` is 1, 0, or -1 where it has no MIG."""
    of = {**like, "mig": -1, **changes}
    place = f"00000000:{bus:02X}:00.0"
    return (
        f"card {uuid(key)} {place} {of['capability']} {of['memory']} {of['cores']} {of['sms']} {of['speed']} "
        f"{of['mig']} {of['name']}"
    )


def instance(of: int, key: str) -> str:
    """A MIG instance's line: of which card, and its UUID."""
    return f"instance {of} {uuid(f'MIG-{key}')} 17179869184 16 NVIDIA H200 MIG 1g.18gb"


def rule(function: str, answer: str | int, of: int | str = "*") -> str:
    """What a function answers: a code, ``hang``, ``crash``, ``print``, ``babble`` (print without end), or ``helper``
    (leave a process behind); of every card, or one."""
    return f"rule {function} {of} {answer}"


@functools.cache
def stubs() -> dict[str, Path]:
    """A folder for each stub library, compiled. Skips the test where there is no C compiler."""
    compiler = next(filter(None, map(shutil.which, ("gcc", "cc", "clang"))), None)
    if compiler is None or sys.platform != "linux":
        pytest.skip("the stub libraries need Linux and a C compiler")
    root = Path(tempfile.mkdtemp(prefix="kernelreg-stubs-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    for name, file in LIBRARIES.items():
        (root / name).mkdir()
        source, library = HERE / "drivers" / f"{name}.c", root / name / file
        command = [compiler, "-shared", "-fPIC", "-o", os.fspath(library), os.fspath(source)]
        subprocess.run(command, check=True, capture_output=True)
    return {name: root / name for name in LIBRARIES}


def environment(libraries: Iterable[str] = LIBRARIES, **more: str) -> dict[str, str]:
    """This process's environment with these stub libraries on the loader's path."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("KERNELREG_", "CUDA_", "NVIDIA_")) and name != "LD_LIBRARY_PATH"
    }
    # A path that holds no library, where none is wanted: an empty one would mean the current folder.
    path = os.pathsep.join(os.fspath(stubs()[name]) for name in libraries) or "/nonexistent"
    python = os.pathsep.join(filter(None, (os.fspath(HERE.parent), os.environ.get("PYTHONPATH"))))
    return {**kept, "LD_LIBRARY_PATH": path, "PYTHONPATH": python, **more}


def detected(machines: Sequence[Mapping[str, Any]], libraries: Iterable[str], folder: Path) -> list[Facts]:
    """The facts of each machine, detected one after the other by one process, which outlives all of them.

    Args:
        machines: each with what ``tests/detect_many.py`` reads: ``machine`` (the stubs' file), ``environ``, ``path``
            (folders before the import path), ``hide`` (a package whose folders are not on it), ``limits`` (seconds
            by driver), ``interpreter``.
        libraries: the stub libraries that are there.
        folder: where the stubs' file goes.
    """
    done = subprocess.run(
        [sys.executable, HERE / "detect_many.py", folder / "machine"],
        input=json.dumps(list(machines)),
        env=environment(libraries),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return msgspec.json.decode(done.stdout, type=list[Facts])
