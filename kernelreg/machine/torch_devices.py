"""Accelerators as a torch that is initialised already sees them; a torch that is not is left alone."""

from __future__ import annotations

import sys
from typing import Any

from kernelreg.machine.model import Device, Problem

_VENDORS = {"cuda": "nvidia", "rocm": "amd", "xpu": "intel", "mps": "apple", "npu": "huawei", "musa": "moore-threads"}
#: Accelerators that torch, or an extension of it, numbers and initialises as it does CUDA's.
_NUMBERED = ("cuda", "xpu", "npu", "musa")


def initialised_accelerator() -> str | None:
    """The device type that this process's torch has initialised (``cuda`` also for HIP), or None."""
    torch = sys.modules.get("torch")
    for kind in _NUMBERED:
        module = getattr(torch, kind, None)
        try:
            # A stand-in for torch, as tests and documentation builds have, answers with anything.
            started = module is not None and getattr(module, "is_initialized", bool)() is True
        except Exception:  # an extension's own module, of whatever release
            continue
        if started and (kind != "cuda" or _has_cuda_or_hip(torch)):
            return kind
    return None


def _has_cuda_or_hip(torch: Any) -> bool:
    """Extensions put their own device in the place of ``torch.cuda``; a torch built for neither has no CUDA device."""
    version = getattr(torch, "version", None)
    return bool(getattr(version, "cuda", None) or getattr(version, "hip", None))


def current_index(kind: str) -> int:
    """The current device's index, as initialised torch says; 0 where it is not initialised or cannot say."""
    if initialised_accelerator() != kind:
        return 0
    try:
        return int(getattr(sys.modules["torch"], kind).current_device())
    except Exception:  # a device that is lost
        return 0


def read_torch_devices() -> tuple[tuple[Device, ...], list[Problem]]:
    """Every device of the accelerator that torch has initialised, as its properties say."""
    kind = initialised_accelerator()
    if kind is None:
        return (), []
    module = getattr(sys.modules["torch"], kind)
    try:
        count = module.device_count()
        return tuple(_device(kind, index, module.get_device_properties(index)) for index in range(count)), []
    except Exception as error:  # a device that is lost, an extension without such a function
        return (), [Problem(source="torch", error=f"{kind} devices: {type(error).__name__}: {error}")]


def _device(kind: str, index: int, properties: Any) -> Device:
    hip = kind == "cuda" and sys.modules["torch"].version.hip is not None
    facts_type = "rocm" if hip else kind
    major, minor = getattr(properties, "major", None), getattr(properties, "minor", None)
    uuid = getattr(properties, "uuid", None)
    return Device(
        index=index,
        type=facts_type,
        vendor=_VENDORS.get(facts_type),
        name=getattr(properties, "name", None),
        uuid=None if uuid is None else f"GPU-{uuid}",
        compute_capability=None if major is None else f"{major}.{minor}",
        memory_bytes=getattr(properties, "total_memory", None),
        multiprocessors=getattr(properties, "multi_processor_count", None),
    )


def observed_device(name: str) -> Device:
    """The least that a tensor's device tells of itself, for types that no other source knows."""
    kind, _, index = name.partition(":")
    return Device(index=int(index or 0), type=kind, vendor=_VENDORS.get(kind))
