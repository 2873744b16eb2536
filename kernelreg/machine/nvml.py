"""Cards as NVML sees them: no CUDA context, safe before fork, and every query may fail on its own."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from kernelreg.machine.model import Device, Driver, Problem
from kernelreg.machine.visible import Card

T = TypeVar("T")

#: CUDA cores of one multiprocessor (CUDA programming guide, "Compute Capabilities"); NVML counts cores only.
_CORES_PER_MULTIPROCESSOR = {
    "7.0": 64, "7.2": 64, "7.5": 64, "8.0": 64, "8.6": 128, "8.7": 128, "8.9": 128,
    "9.0": 128, "10.0": 128, "10.3": 128, "11.0": 128, "12.0": 128, "12.1": 128,
}  # fmt: skip


class Reading(msgspec.Struct, frozen=True):
    """What one source says of driver and cards; ``cards`` is None where the source is not there."""

    driver: Driver | None
    cards: tuple[Card, ...] | None
    problems: tuple[Problem, ...]


def read_nvml(nvml: Any = None) -> Reading:
    """Ask NVML for the driver and every card, in PCI bus order.

    Args:
        nvml: the ``pynvml`` module of the distribution nvidia-ml-py; imported when not given.
    """
    try:
        nvml = importlib.import_module("pynvml") if nvml is None else nvml
        nvml.nvmlInit()
    except Exception as error:  # a missing library, a driver that does not answer, a foreign module of that name
        return Reading(None, None, (Problem(source="nvml", error=_text(error)),))
    try:
        return _Reader(nvml).read()
    except Exception as error:  # an older or foreign module of that name, which lacks a function
        return Reading(None, None, (Problem(source="nvml", error=_text(error)),))
    finally:
        with suppress(Exception):  # nothing depends on it
            nvml.nvmlShutdown()


class _Reader:
    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._problems: list[Problem] = []

    def read(self) -> Reading:
        nvml = self._nvml
        cuda = self._ask("CUDA version", nvml.nvmlSystemGetCudaDriverVersion_v2)
        driver = Driver(
            version=self._ask("driver version", nvml.nvmlSystemGetDriverVersion),
            cuda=None if cuda is None else cuda_version(cuda),
        )
        count = self._ask("device count", nvml.nvmlDeviceGetCount)
        cards = [self._card(index) for index in range(count or 0)]
        known = [card for card in cards if card is not None]
        known.sort(key=lambda card: card.device.pci_bus_id or "")
        return Reading(driver, None if count is None else tuple(known), tuple(self._problems))

    def _ask(self, what: str, query: Callable[..., T], *arguments: object) -> T | None:
        """The answer as nvidia-ml-py gives it, or None and a problem."""
        try:
            answer = query(*arguments)
        except self._nvml.NVMLError as error:
            self._problems.append(Problem(source="nvml", error=f"{what}: {_text(error)}"))
            return None
        return answer.decode("utf-8", "replace") if isinstance(answer, bytes) else answer  # type: ignore[return-value]

    def _card(self, index: int) -> Card | None:
        nvml = self._nvml
        handle = self._ask(f"device {index}", nvml.nvmlDeviceGetHandleByIndex, index)
        if handle is None:
            return None
        pair = self._ask(f"device {index} capability", nvml.nvmlDeviceGetCudaComputeCapability, handle)
        capability = None if pair is None else f"{pair[0]}.{pair[1]}"
        pci: Any = self._ask(f"device {index} PCI", nvml.nvmlDeviceGetPciInfo, handle)
        bus_id = None if pci is None else _decoded(pci.busId)
        device = self._device(f"device {index}", handle, capability, bus_id)
        if not self._mig_enabled(handle):
            cores = self._ask(f"device {index} cores", nvml.nvmlDeviceGetNumGpuCores, handle)
            per = _CORES_PER_MULTIPROCESSOR.get(capability or "")
            count = cores // per if cores and per else None
            return Card(msgspec.structs.replace(device, multiprocessors=count))
        return Card(device, tuple(self._instances(index, handle, capability, bus_id)), mig_enabled=True)

    def _device(self, what: str, handle: object, capability: str | None, bus_id: str | None) -> Device:
        nvml = self._nvml
        memory: Any = self._ask(f"{what} memory", nvml.nvmlDeviceGetMemoryInfo, handle)
        return Device(
            index=0,
            type="cuda",
            vendor="nvidia",
            name=self._ask(f"{what} name", nvml.nvmlDeviceGetName, handle),
            uuid=self._ask(f"{what} UUID", nvml.nvmlDeviceGetUUID, handle),
            pci_bus_id=bus_id,
            compute_capability=capability,
            memory_bytes=None if memory is None else memory.total,
        )

    def _mig_enabled(self, handle: object) -> bool:
        try:
            current, _pending = self._nvml.nvmlDeviceGetMigMode(handle)
        except self._nvml.NVMLError:  # every card without MIG answers NOT_SUPPORTED
            return False
        return bool(current == self._nvml.NVML_DEVICE_MIG_ENABLE)

    def _instances(self, index: int, parent: object, capability: str | None, bus_id: str | None) -> list[Device]:
        nvml = self._nvml
        found = []
        limit = self._ask(f"device {index} MIG count", nvml.nvmlDeviceGetMaxMigDeviceCount, parent)
        for place in range(limit or 0):
            try:
                handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(parent, place)
            except nvml.NVMLError:  # places without an instance answer NOT_FOUND
                continue
            what = f"device {index} MIG {place}"
            attributes: Any = self._ask(f"{what} attributes", nvml.nvmlDeviceGetAttributes, handle)
            found.append(
                msgspec.structs.replace(
                    self._device(what, handle, capability, bus_id),
                    mig=True,
                    multiprocessors=None if attributes is None else attributes.multiprocessorCount,
                )
            )
        return found


def cuda_version(number: int) -> str:
    """CUDA's version number (13000, 12080) as text (13.0, 12.8)."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _decoded(text: Any) -> str:
    return text.decode("ascii", "replace") if isinstance(text, bytes) else str(text)


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__
