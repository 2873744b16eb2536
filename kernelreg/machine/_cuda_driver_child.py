"""Run as a script in a child process: print, as JSON, what the CUDA driver says of the devices it shows.

``cuInit`` breaks CUDA in every later ``fork`` of the process that called it, so no process of a user calls it for
us. This file imports nothing of kernelreg. No context is created.
"""

from __future__ import annotations

import ctypes
import json
import signal
import sys
from typing import Any

_MULTIPROCESSORS, _PCI_BUS, _PCI_DEVICE, _PCI_DOMAIN, _MAJOR, _MINOR = 16, 33, 34, 50, 75, 76


def main(library: str) -> dict[str, Any]:
    cuda = ctypes.CDLL(library)
    version = ctypes.c_int()
    _check(cuda, cuda.cuDriverGetVersion(ctypes.byref(version)))
    _check(cuda, cuda.cuInit(0))
    count = ctypes.c_int()
    _check(cuda, cuda.cuDeviceGetCount(ctypes.byref(count)))
    return {"cuda": version.value, "devices": [_device(cuda, index) for index in range(count.value)]}


def _device(cuda: Any, index: int) -> dict[str, Any]:
    device = ctypes.c_int()
    _check(cuda, cuda.cuDeviceGet(ctypes.byref(device), index))

    def attribute(number: int) -> int:
        value = ctypes.c_int()
        _check(cuda, cuda.cuDeviceGetAttribute(ctypes.byref(value), number, device))
        return value.value

    name = ctypes.create_string_buffer(256)
    _check(cuda, cuda.cuDeviceGetName(name, len(name), device))
    memory = ctypes.c_size_t()
    _check(cuda, cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device))
    raw = (ctypes.c_ubyte * 16)()
    _check(cuda, getattr(cuda, "cuDeviceGetUuid_v2", cuda.cuDeviceGetUuid)(ctypes.byref(raw), device))
    digits = bytes(raw).hex()
    uuid = "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
    bus_id = f"{attribute(_PCI_DOMAIN):08X}:{attribute(_PCI_BUS):02X}:{attribute(_PCI_DEVICE):02X}.0"
    return {
        "index": index,
        "type": "cuda",
        "vendor": "nvidia",
        "name": name.value.decode("utf-8", "replace"),
        "uuid": f"GPU-{uuid}",
        "pci_bus_id": bus_id,
        "compute_capability": f"{attribute(_MAJOR)}.{attribute(_MINOR)}",
        "memory_bytes": memory.value,
        "multiprocessors": attribute(_MULTIPROCESSORS),
    }


def _check(cuda: Any, status: int) -> None:
    if status:
        text = ctypes.c_char_p()
        cuda.cuGetErrorString(status, ctypes.byref(text))
        raise OSError(f"CUDA driver error {status}: {(text.value or b'unknown').decode()}")


if __name__ == "__main__":
    try:
        if hasattr(signal, "setitimer"):  # a driver that hangs holds this process no longer, whoever still waits for it
            signal.setitimer(signal.ITIMER_REAL, float(sys.argv[2]))
        print(json.dumps(main(sys.argv[1])))  # noqa: T201
    except (OSError, AttributeError) as error:
        sys.exit(str(error))
