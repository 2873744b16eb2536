"""Accelerators as a torch that is initialised already sees them; a torch that is not is left alone."""

from __future__ import annotations

import sys
from typing import Any

from kernelreg.machine.model import Device

_VENDORS = {"cuda": "nvidia", "rocm": "amd", "xpu": "intel", "mps": "apple"}


def initialised_accelerator() -> str | None:
    """The device type that this process's torch has initialised (``cuda`` also for HIP), or None."""
    torch = sys.modules.get("torch")
    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind, None)
        if module is not None and getattr(module, "is_initialized", bool)():
            return kind
    return None


def current_index(kind: str) -> int:
    """The current device's index, as initialised torch says; 0 where it is not initialised."""
    if initialised_accelerator() != kind:
        return 0
    index: int = getattr(sys.modules["torch"], kind).current_device()
    return index


def read_torch_devices() -> tuple[Device, ...]:
    """Every device of the accelerator that torch has initialised, as its properties say."""
    kind = initialised_accelerator()
    if kind is None:
        return ()
    module = getattr(sys.modules["torch"], kind)
    return tuple(_device(kind, index, module.get_device_properties(index)) for index in range(module.device_count()))


def _device(kind: str, index: int, properties: Any) -> Device:
    hip = kind == "cuda" and sys.modules["torch"].version.hip is not None
    facts_type = "rocm" if hip else kind
    major, minor = getattr(properties, "major", None), getattr(properties, "minor", None)
    uuid = getattr(properties, "uuid", None)
    return Device(
        index=index,
        type=facts_type,
        vendor=_VENDORS.get(facts_type),
        name=properties.name,
        uuid=None if uuid is None else f"GPU-{uuid}",
        compute_capability=None if major is None else f"{major}.{minor}",
        memory_bytes=properties.total_memory,
        multiprocessors=getattr(properties, "multi_processor_count", None),
    )


def observed_device(name: str) -> Device:
    """The least that a tensor's device tells of itself, for types that no other source knows."""
    kind, _, index = name.partition(":")
    return Device(index=int(index or 0), type=kind, vendor=_VENDORS.get(kind))
