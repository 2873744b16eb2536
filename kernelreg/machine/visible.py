"""Which cards a process sees, and under which index: ``CUDA_VISIBLE_DEVICES`` as CUDA reads it.

Rules from the CUDA programming guide (environment variables) and torch's own reader of the variable: indices, UUIDs
and their unambiguous prefixes, MIG UUIDs; the first invalid entry ends the list; a repeated one, like an empty
value, hides every card. They are what torch's own reader does, which was compared with driver 525.60.13
(https://github.com/pytorch/pytorch/pull/92315). Where they may differ from a driver's, the driver is asked instead.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from kernelreg.machine.model import Device, Problem

#: What C takes for space, and for a number: Python knows more of both.
_SPACE = " \t\n\v\f\r"
_LEADING_NUMBER = re.compile(r"[+-]?[0-9]+")


class Card(msgspec.Struct, frozen=True):
    """A physical card and, where MIG is on, its instances; their ``index`` fields mean nothing yet."""

    device: Device
    instances: tuple[Device, ...] = ()
    mig_enabled: bool = False

    @property
    def default(self) -> Device | None:
        """What CUDA uses of this card when only the card is named: under MIG, its first instance."""
        if not self.mig_enabled:
            return self.device
        return self.instances[0] if self.instances else None


def select_visible(cards: Sequence[Card], value: str | None) -> tuple[tuple[Device, ...], list[Problem]]:
    """The visible devices, numbered from 0, of ``cards`` in CUDA's order.

    Args:
        cards: every card of the machine, in the order that ``CUDA_DEVICE_ORDER`` gives them.
        value: the value of ``CUDA_VISIBLE_DEVICES``, None when it is not set.
    """
    if value is None:
        return _numbered([card.default for card in cards]), []
    chosen: list[Device | None] = []
    entries = value.split(",") if value.strip() else []
    for entry in entries:
        device = _find(cards, entry) if _form(entry) == _form(entries[0]) else None
        if device is None:
            return _numbered(chosen), [
                Problem(
                    source="CUDA_VISIBLE_DEVICES",
                    error=f"{entry.strip(_SPACE)!r} in {value!r} names no card here; CUDA ignores it and all behind it",
                )
            ]
        if any(device is each for each in chosen):  # two cards that tell nothing of themselves are equal
            return (), [
                Problem(
                    source="CUDA_VISIBLE_DEVICES",
                    error=f"{value!r} names a card twice, and CUDA then shows none",
                )
            ]
        chosen.append(device)
    return _numbered(chosen), []


def is_plain(cards: Sequence[Card], value: str | None) -> bool:
    """Whether a value of ``CUDA_VISIBLE_DEVICES`` has one meaning to all: none, nothing, or distinct cards."""
    return value is None or value.strip() == "-1" or not select_visible(cards, value)[1]


def _form(entry: str) -> str:
    """How an entry names a device. A list keeps to the form of its first entry; another one ends it."""
    return next((prefix for prefix in ("GPU-", "MIG-") if entry.startswith(prefix)), "index")


def _find(cards: Sequence[Card], entry: str) -> Device | None:
    if entry in ("GPU-", "MIG-"):  # a prefix of every UUID names none (driver 580.159.04)
        return None
    if _form(entry) != "index":
        named = [card.default for card in cards if (card.device.uuid or "").startswith(entry)]
        named += [each for card in cards for each in card.instances if (each.uuid or "").startswith(entry)]
        return named[0] if len(named) == 1 else None
    number = _LEADING_NUMBER.match(entry.strip(_SPACE))
    if number is None:
        return None
    index = int(number[0]) if len(number[0]) < 10 else -1
    return cards[index].default if 0 <= index < len(cards) else None


def _numbered(devices: Sequence[Device | None]) -> tuple[Device, ...]:
    present = [device for device in devices if device is not None]
    return tuple(msgspec.structs.replace(device, index=index) for index, device in enumerate(present))
