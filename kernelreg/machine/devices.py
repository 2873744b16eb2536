"""Every visible device in CUDA's order, from the first source that answers: NVML, the CUDA driver, torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from kernelreg.machine.cuda_driver import read_cuda_driver
from kernelreg.machine.model import Device, Driver, Problem
from kernelreg.machine.nvml import Reading, read_nvml
from kernelreg.machine.torch_devices import read_torch_devices
from kernelreg.machine.visible import Card, is_plain, select_visible


def detect_devices(environ: Mapping[str, str]) -> tuple[Driver | None, tuple[Device, ...], list[Problem]]:
    """The GPU driver and the visible devices.

    Where torch has initialised its accelerator in this process, its numbers are what every call means.
    """
    driver, devices, problems, cards = _detect_nvidia(environ)
    seen, more = read_torch_devices()
    problems += more
    if not seen or _same(seen, devices):
        return driver, devices, problems
    if devices:
        text = f"torch has initialised its devices and numbers them otherwise: {', '.join(map(_called, seen))}"
        problems.append(Problem(source="torch", error=text))
    return driver, _completed(seen, cards), problems


def _detect_nvidia(
    environ: Mapping[str, str],
) -> tuple[Driver | None, tuple[Device, ...], list[Problem], tuple[Card, ...]]:
    """What NVML and the CUDA driver say, and the cards that NVML lists.

    NVML numbers cards by PCI bus. CUDA does so under ``CUDA_DEVICE_ORDER=PCI_BUS_ID`` or when all cards are alike;
    else only the CUDA driver knows which it calls the fastest. It alone knows too what it makes of MIG (releases
    differ in how many instances a process sees), of a card that NVML does not tell all about, and of a value of
    ``CUDA_VISIBLE_DEVICES`` that is not plain. Then it is asked.
    """
    nvml = read_nvml()
    problems = list(nvml.problems)
    value = environ.get("CUDA_VISIBLE_DEVICES")
    cards = nvml.cards or ()
    if nvml.cuda_library is not None:
        problems.append(Problem(source="cuda-driver", error=_without_cuda(nvml)))
        return nvml.driver, (), problems, cards
    read, unread = select_visible(cards, value) if cards else ((), [])
    if nvml.cards is not None and _order_is_known(nvml, environ) and is_plain(cards, value):
        return nvml.driver, read, problems + unread, cards
    driver, numbered, more = read_cuda_driver()
    problems += more
    if numbered is not None:
        devices = _completed(numbered, cards)
        problems += _differing(unread, read, devices, value, cards)
        return nvml.driver or driver, devices, problems, cards
    if cards and not _order_is_known(nvml, environ):
        text = "the CUDA driver does not say how it numbers these cards: listed by PCI bus id"
        if nvml.whole and not any(card.mig_enabled for card in cards):
            text += "; set CUDA_DEVICE_ORDER=PCI_BUS_ID to make it so"
        problems.append(Problem(source="cuda-order", error=text))
    return nvml.driver, read, problems + unread, cards


def _order_is_known(nvml: Reading, environ: Mapping[str, str]) -> bool:
    """Whether CUDA can only number these cards by their bus, and each as one device."""
    cards = nvml.cards or ()
    if not nvml.whole or any(card.mig_enabled for card in cards):
        return False
    kinds = {(card.device.name, card.device.compute_capability, card.device.memory_bytes) for card in cards}
    return environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len(kinds) <= 1


def _without_cuda(nvml: Reading) -> str:
    """Why CUDA sees no card: as in a container that was given the driver's utilities alone."""
    text = nvml.cuda_library or ""
    if nvml.cards is None:
        return text
    text += f"; CUDA sees none of NVML's {len(nvml.cards)} card{'' if len(nvml.cards) == 1 else 's'}"
    if "cannot open shared object file" not in text:
        return text
    return f"{text}; in a container, NVIDIA_DRIVER_CAPABILITIES must have compute in it"


def _differing(
    unread: list[Problem], read: Sequence[Device], shown: Sequence[Device], value: str | None, cards: Sequence[Card]
) -> list[Problem]:
    """What is wrong with ``CUDA_VISIBLE_DEVICES``, or with the cards, now that the driver has said what it shows."""
    if {each.uuid for each in read} == {each.uuid for each in shown}:
        return unread
    if value is not None and unread:
        text = f"{value!r} names what is no card here, or a card twice; CUDA shows {len(shown)} devices"
        return [Problem(source="CUDA_VISIBLE_DEVICES", error=text)]
    if cards and not shown:
        return [Problem(source="cuda-driver", error=f"shows none of NVML's {len(cards)} cards")]
    return []


def _same(seen: Sequence[Device], devices: Sequence[Device]) -> bool:
    """Whether torch's devices are these; older torches tell no UUID, and a MIG instance's is its card's in some."""

    def may_be(theirs: Device, ours: Device, field: str) -> bool:
        return None in (getattr(theirs, field), getattr(ours, field)) or getattr(theirs, field) == getattr(ours, field)

    return len(seen) == len(devices) and all(
        theirs.type == ours.type
        and may_be(theirs, ours, "compute_capability")
        and (ours.mig or may_be(theirs, ours, "uuid"))
        for theirs, ours in zip(seen, devices, strict=True)
    )


def _completed(numbered: Sequence[Device], cards: Sequence[Card]) -> tuple[Device, ...]:
    """An order of devices with NVML's fuller description of each, matched by UUID, else by PCI bus id."""
    known: dict[str, Device] = {}
    for card in cards:
        if card.device.pci_bus_id and not card.mig_enabled:
            known[card.device.pci_bus_id.lower()] = card.device
        for device in (card.device, *card.instances):
            if device.uuid:
                known[_digits(device.uuid)] = device
    completed = []
    for device in numbered:
        told = known.get(_digits(device.uuid or "")) or known.get((device.pci_bus_id or "").lower())
        if told is None:
            completed.append(device)
            continue
        ours = {field: value for field in device.__struct_fields__ if (value := getattr(device, field))}
        theirs = {field: getattr(told, field) for field in ("uuid", "memory_bytes", "mig") if getattr(told, field)}
        completed.append(msgspec.structs.replace(told, **{**ours, "index": device.index, **theirs}))
    return tuple(completed)


def _digits(uuid: str) -> str:
    """A UUID without its prefix: the driver gives none."""
    return (uuid.partition("-")[2] or uuid).lower()


def _called(device: Device) -> str:
    return f"{device.torch_name} is {device.name or device.type}"
