"""Devices as the CUDA driver numbers them, asked in a child process so that this one can still fork."""

from __future__ import annotations

import sys

import msgspec

from kernelreg.decoding import NOT_JSON
from kernelreg.machine.child import NoAnswerError, answer_of
from kernelreg.machine.library import with_hint
from kernelreg.machine.model import Device, Driver, Problem

#: Seconds that the driver may take to start; a machine with eight cards and no persistence daemon needs several.
DRIVER_SECONDS = 30.0

LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"


class _Answer(msgspec.Struct, frozen=True):
    cuda: int
    devices: tuple[Device, ...]
    problems: tuple[str, ...] = ()


def read_cuda_driver() -> tuple[Driver | None, tuple[Device, ...] | None, list[Problem]]:
    """The driver's CUDA version and the visible devices in CUDA's order; None where the driver does not answer."""
    try:
        data = answer_of("_cuda_driver_child.py", LIBRARY, seconds=DRIVER_SECONDS)
        answer = msgspec.json.decode(data, type=_Answer)
    except (NoAnswerError, *NOT_JSON) as error:
        return None, None, [Problem(source="cuda-driver", error=with_hint(str(error), LIBRARY))]
    problems = [Problem(source="cuda-driver", error=text) for text in answer.problems]
    return Driver(cuda=cuda_version(answer.cuda)), answer.devices, problems


def cuda_version(number: int) -> str:
    """CUDA's version number (13000, 12080) as text (13.0, 12.8)."""
    return f"{number // 1000}.{number % 1000 // 10}"
