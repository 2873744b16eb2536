"""Devices as the CUDA driver numbers them, asked in a child process so that this one can still fork."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import msgspec

from kernelreg.children import alone
from kernelreg.machine.model import Device, Driver, Problem
from kernelreg.machine.nvml import cuda_version

#: Seconds that the driver may take to start; a machine with eight cards and no persistence daemon needs several.
DRIVER_SECONDS = 30.0

_LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
_CHILD = Path(__file__).with_name("_cuda_driver_child.py")


class _Answer(msgspec.Struct, frozen=True):
    cuda: int
    devices: tuple[Device, ...]


def read_cuda_driver() -> tuple[Driver | None, tuple[Device, ...] | None, list[Problem]]:
    """The driver's CUDA version and the visible devices in CUDA's order; None where the driver does not answer."""
    try:
        ctypes.CDLL(_LIBRARY)  # loading alone initialises nothing, and most machines without a GPU stop here
        done = subprocess.run(
            alone(_CHILD, _LIBRARY, f"{DRIVER_SECONDS + 1}"),  # its own limit, should this process be gone by then
            capture_output=True,
            timeout=DRIVER_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        if done.returncode:
            last = done.stderr.decode("utf-8", "replace").strip().splitlines()
            text = last[-1] if last else f"exit code {done.returncode}"
            return None, None, [Problem(source="cuda-driver", error=text)]
        answer = msgspec.json.decode(done.stdout, type=_Answer)
    except subprocess.TimeoutExpired:
        text = f"no answer within {DRIVER_SECONDS:.0f} s"
        return None, None, [Problem(source="cuda-driver", error=text)]
    except (OSError, msgspec.DecodeError) as error:
        return None, None, [Problem(source="cuda-driver", error=str(error))]
    return Driver(cuda=cuda_version(answer.cuda)), answer.devices, []
