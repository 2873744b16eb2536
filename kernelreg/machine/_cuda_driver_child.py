"""Run as a script in a child process: print, as JSON, what the CUDA driver says of the devices it shows.

``cuInit`` breaks CUDA in every later ``fork`` of the process that called it, so no process of a user calls it for
us. This file imports nothing of kernelreg. No context is created. A device's query may fail, and costs its own field
alone: the device still has its number.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

_MULTIPROCESSORS, _PCI_BUS, _PCI_DEVICE, _PCI_DOMAIN, _MAJOR, _MINOR = 16, 33, 34, 50, 75, 76
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE: what cuInit answers where no card is visible


def main(library: str) -> dict[str, Any]:
    """The driver's CUDA version number, every visible device, and what it would not tell of one."""
    cuda = ctypes.CDLL(library)
    version = ctypes.c_int()
    _check(cuda, cuda.cuDriverGetVersion(ctypes.byref(version)))
    started = cuda.cuInit(0)
    if started == _NO_DEVICE:
        return {"cuda": version.value, "devices": []}
    _check(cuda, started)
    count = ctypes.c_int()
    _check(cuda, cuda.cuDeviceGetCount(ctypes.byref(count)))
    problems: list[str] = []
    devices = [_device(cuda, index, problems) for index in range(count.value)]
    return {"cuda": version.value, "devices": devices, "problems": problems}


def _device(cuda: Any, index: int, problems: list[str]) -> dict[str, Any]:
    device = ctypes.c_int()
    _check(cuda, cuda.cuDeviceGet(ctypes.byref(device), index))

    def told(what: str, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except (OSError, AttributeError) as error:
            problems.append(f"device {index} {what}: {error}")
            return None

    def attribute(number: int) -> int:
        value = ctypes.c_int()
        _check(cuda, cuda.cuDeviceGetAttribute(ctypes.byref(value), number, device))
        return value.value

    def name() -> str:
        text = ctypes.create_string_buffer(256)
        _check(cuda, cuda.cuDeviceGetName(text, len(text), device))
        return text.value.decode("utf-8", "replace")

    def memory() -> int:
        size = ctypes.c_size_t()
        _check(cuda, cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device))
        return size.value

    def uuid() -> str:
        raw = (ctypes.c_ubyte * 16)()
        # The second version tells a MIG instance's own UUID, the first its card's.
        query = getattr(cuda, "cuDeviceGetUuid_v2", None) or cuda.cuDeviceGetUuid
        _check(cuda, query(ctypes.byref(raw), device))
        digits = bytes(raw).hex()
        return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))

    called = told("name", name)
    mig = " MIG " in (called or "")  # "NVIDIA A100-SXM4-40GB MIG 1g.5gb"
    number = told("UUID", uuid)
    return {
        "index": index,
        "type": "cuda",
        "vendor": "nvidia",
        "name": called,
        "uuid": None if number is None else f"{'MIG' if mig else 'GPU'}-{number}",
        "pci_bus_id": told(
            "PCI", lambda: f"{attribute(_PCI_DOMAIN):08X}:{attribute(_PCI_BUS):02X}:{attribute(_PCI_DEVICE):02X}.0"
        ),
        "compute_capability": told("capability", lambda: f"{attribute(_MAJOR)}.{attribute(_MINOR)}"),
        "memory_bytes": told("memory", memory),
        "multiprocessors": told("multiprocessors", lambda: attribute(_MULTIPROCESSORS)),
        "mig": mig,
    }


def _check(cuda: Any, status: int) -> None:
    if status:
        text = ctypes.c_char_p()
        cuda.cuGetErrorString(status, ctypes.byref(text))
        raise OSError(f"CUDA driver error {status}: {(text.value or b'unknown').decode('utf-8', 'replace')}")


if __name__ == "__main__":
    wire = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever the library prints is not the answer
    try:
        if hasattr(signal, "setitimer"):  # a driver that hangs holds this process no longer, whoever still waits for it
            signal.setitimer(signal.ITIMER_REAL, float(sys.argv.pop()))
        json.dump(main(*sys.argv[1:]), wire)
        wire.close()
    except (OSError, AttributeError) as error:
        sys.exit(str(error))
