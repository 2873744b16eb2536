"""Run as a script in a child process: print, as JSON, what NVML says of driver and cards, or why it says nothing.

A second line is what keeps the CUDA driver's library from being loaded, or null: NVML can be there without it, and then
CUDA sees no card. It comes last, since a broken library may end or hold up the process that loads it.

NVML creates no CUDA context and is safe before ``fork``, but it can hang or crash with the kernel's driver, so no
process of a user calls it for us. This file imports nothing of kernelreg. Every query may fail on its own, and costs
its own field alone.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
from typing import Any

#: CUDA cores of one multiprocessor (CUDA programming guide, "Compute Capabilities"); NVML counts cores only.
_CORES_PER_MULTIPROCESSOR = {
    "7.0": 64, "7.2": 64, "7.5": 64, "8.0": 64, "8.6": 128, "8.7": 128, "8.9": 128,
    "9.0": 128, "10.0": 128, "10.3": 128, "11.0": 128, "12.0": 128, "12.1": 128,
}  # fmt: skip


def main(library: str, folder: str) -> dict[str, Any]:
    """What NVML says, in the shape of ``kernelreg.machine.nvml``.

    Args:
        library: NVML's on Linux, whose loader says more than nvidia-ml-py does of a library that is not there.
        folder: where the module ``pynvml`` of nvidia-ml-py lies.
    """
    if sys.platform != "win32":
        ctypes.CDLL(library)
    sys.path.append(folder)
    nvml = importlib.import_module("pynvml")
    nvml.nvmlInit()
    return _Reader(nvml).read()


def _loads(library: str) -> str | None:
    """What keeps a library from being loaded, or None; loading it initialises nothing."""
    try:
        ctypes.CDLL(library)
    except OSError as error:
        return str(error)
    return None


class _Reader:
    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._problems: list[str] = []

    def read(self) -> dict[str, Any]:
        driver = {
            "version": self._ask("driver version", "nvmlSystemGetDriverVersion"),
            "cuda": self._ask("CUDA version", "nvmlSystemGetCudaDriverVersion_v2"),
        }
        count = self._ask("device count", "nvmlDeviceGetCount")
        cards = None if count is None else [self._card(index) for index in range(count)]
        return {"driver": driver, "cards": cards, "problems": self._problems}

    def _ask(self, what: str, function: str, *arguments: object) -> Any:
        """The answer, text as ``str``; or None and a problem, also where nvidia-ml-py has no such function."""
        try:
            answer = getattr(self._nvml, function)(*arguments)
        except Exception as error:  # NVMLError, but also what a foreign or older module makes of it
            self._problems.append(f"{what}: {_text(error)}")
            return None
        return answer.decode("utf-8", "replace") if isinstance(answer, bytes) else answer

    def _card(self, index: int) -> dict[str, Any] | None:
        what = f"device {index}"
        handle = self._ask(what, "nvmlDeviceGetHandleByIndex", index)
        if handle is None:
            return None
        pair = self._ask(f"{what} capability", "nvmlDeviceGetCudaComputeCapability", handle)
        capability = None if pair is None else f"{pair[0]}.{pair[1]}"
        pci = self._ask(f"{what} PCI", "nvmlDeviceGetPciInfo", handle)
        bus_id = None if pci is None else pci.busId
        bus_id = bus_id.decode("ascii", "replace") if isinstance(bus_id, bytes) else bus_id
        device = self._device(what, handle, capability, bus_id)
        if not self._mig_enabled(handle):
            cores = self._ask(f"{what} cores", "nvmlDeviceGetNumGpuCores", handle)
            per = _CORES_PER_MULTIPROCESSOR.get(capability or "")
            return {"device": {**device, "multiprocessors": cores // per if cores and per else None}}
        instances = self._instances(what, handle, capability, bus_id)
        return {"device": device, "instances": instances, "mig_enabled": True}

    def _device(self, what: str, handle: object, capability: str | None, bus_id: str | None) -> dict[str, Any]:
        memory = self._ask(f"{what} memory", "nvmlDeviceGetMemoryInfo", handle)
        return {
            "index": 0,
            "type": "cuda",
            "vendor": "nvidia",
            "name": self._ask(f"{what} name", "nvmlDeviceGetName", handle),
            "uuid": self._ask(f"{what} UUID", "nvmlDeviceGetUUID", handle),
            "pci_bus_id": bus_id,
            "compute_capability": capability,
            "memory_bytes": None if memory is None else memory.total,
        }

    def _mig_enabled(self, handle: object) -> bool:
        try:
            current, _pending = self._nvml.nvmlDeviceGetMigMode(handle)
        except Exception:  # every card without MIG answers NOT_SUPPORTED
            return False
        return bool(current == self._nvml.NVML_DEVICE_MIG_ENABLE)

    def _instances(self, what: str, parent: object, capability: str | None, bus_id: str | None) -> list[dict[str, Any]]:
        found = []
        for place in range(self._ask(f"{what} MIG count", "nvmlDeviceGetMaxMigDeviceCount", parent) or 0):
            try:
                handle = self._nvml.nvmlDeviceGetMigDeviceHandleByIndex(parent, place)
            except Exception:  # places without an instance answer NOT_FOUND
                continue
            instance = f"{what} MIG {place}"
            attributes = self._ask(f"{instance} attributes", "nvmlDeviceGetAttributes", handle)
            found.append(
                {
                    **self._device(instance, handle, capability, bus_id),
                    "mig": True,
                    "multiprocessors": None if attributes is None else attributes.multiprocessorCount,
                }
            )
        return found


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__


if __name__ == "__main__":
    wire = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever the libraries print is not the answer
    if hasattr(signal, "setitimer"):  # a driver that hangs holds this process no longer, whoever still waits for it
        signal.setitimer(signal.ITIMER_REAL, float(sys.argv.pop()))
    cuda_library = sys.argv.pop()
    try:
        told = main(*sys.argv[1:])
    except Exception as error:  # a driver that does not start, a foreign module of that name
        told = {"driver": None, "cards": None, "problems": [_text(error)]}
    print(json.dumps(told), file=wire, flush=True)
    print(json.dumps(_loads(cuda_library)), file=wire, flush=True)
