"""Every visible device in CUDA's order, from the first source that answers: NVML, the CUDA driver, torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kernelreg.machine.cuda_driver import read_cuda_driver
from kernelreg.machine.model import Device, Driver, Problem
from kernelreg.machine.nvml import read_nvml
from kernelreg.machine.torch_devices import read_torch_devices
from kernelreg.machine.visible import Card, select_visible


def detect_devices(environ: Mapping[str, str]) -> tuple[Driver | None, tuple[Device, ...], list[Problem]]:
    """The GPU driver and the visible devices.

    NVML numbers cards by PCI bus. CUDA does so under ``CUDA_DEVICE_ORDER=PCI_BUS_ID`` or when all cards are alike;
    else only the CUDA driver knows which it calls the fastest, so it is asked.
    """
    nvml = read_nvml()
    problems = list(nvml.problems)
    if nvml.cards is not None and (environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or _alike(nvml.cards)):
        devices, more = select_visible(nvml.cards, environ.get("CUDA_VISIBLE_DEVICES"))
        return nvml.driver, devices, problems + more
    driver, numbered, more = read_cuda_driver()
    problems += more
    if numbered is not None:
        return nvml.driver or driver, _completed(numbered, nvml.cards or ()), problems
    if nvml.cards:
        problems.append(
            Problem(
                source="cuda-order",
                error="different cards, and the CUDA driver does not say its order: listed by PCI bus id; "
                "set CUDA_DEVICE_ORDER=PCI_BUS_ID to make it so",
            )
        )
        devices, more = select_visible(nvml.cards, environ.get("CUDA_VISIBLE_DEVICES"))
        return nvml.driver, devices, problems + more
    return nvml.driver, read_torch_devices(), problems


def _alike(cards: Sequence[Card]) -> bool:
    """Whether no order but the bus's is possible: one kind of card, MIG on all or none."""
    kinds = {(card.device.name, card.device.compute_capability, card.device.memory_bytes) for card in cards}
    return len(kinds) <= 1 and len({card.mig_enabled for card in cards}) <= 1


def _completed(numbered: Sequence[Device], cards: Sequence[Card]) -> tuple[Device, ...]:
    """The driver's order with NVML's fuller description of each device, matched by UUID."""
    by_uuid = {
        device.uuid.partition("-")[2]: device
        for card in cards
        for device in (card.device, *card.instances)
        if device.uuid
    }
    completed = []
    for device in numbered:
        known = by_uuid.get((device.uuid or "").partition("-")[2])
        if known is None:
            completed.append(device)
            continue
        described = {field: getattr(known, field) for field in ("uuid", "memory_bytes", "mig") if getattr(known, field)}
        completed.append(Device(**{**_fields(device), **described}))
    return tuple(completed)


def _fields(device: Device) -> dict[str, object]:
    return {name: getattr(device, name) for name in device.__struct_fields__}
