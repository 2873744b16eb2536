"""What a measurement or a pinned decision was made on: a card and what runs on it, without what tells it from its like.

Two machines of one setup are as good as one, so that a file made on the first serves the second.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from kernelreg._version import __version__
from kernelreg.machine.model import CPU, Device, Facts

#: What a change of the card is called.
CARD = "the card"
_VERSIONS = ("kernelreg", "platform", "driver", "torch")
#: Of these versions only so many numbers count where a profile is near enough: a driver's branch, torch's release line.
_NEAR = {"kernelreg": 0, "driver": 1, "torch": 2}


class Change(NamedTuple):
    """One thing that is not as it was; None is that there was, or is, none."""

    field: str
    then: str | None
    now: str | None

    def __str__(self) -> str:
        return f"{self.field} was {self.then or 'none'}, here {self.now or 'none'}"


class Setup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A card and what runs on it.

    Attributes:
        kernelreg: the release whose adapters ran.
        platform: system and machine, such as ``Linux x86_64``.
        type: of the device: ``cuda``, ``rocm``, ``cpu`` …
        card: its name. Facts name no processor, so that CPUs of one platform pass for each other.
        compute_capability: as the facts have it.
        mig: it is a MIG instance.
        driver, torch: their versions.
        packages: versions of the distributions that its kernels come from; None where one is not installed.
    """

    kernelreg: str = __version__
    platform: str
    type: str
    card: str | None = None
    compute_capability: str | None = None
    mig: bool = False
    driver: str | None = None
    torch: str | None = None
    packages: dict[str, str | None] = {}

    @property
    def description(self) -> str:
        """The card in one line."""
        capability = f", compute capability {self.compute_capability}" if self.compute_capability else ""
        return f"{self.card or self.type}{capability}{', MIG instance' if self.mig else ''}"

    @property
    def _card(self) -> tuple[object, ...]:
        return self.type, self.card, self.compute_capability, self.mig

    def is_of(self, device: Device | None) -> bool:
        """Whether the device is such a card."""
        return device is not None and self._card == (device.type, device.name, device.compute_capability, device.mig)

    def changes(self, facts: Facts, *, nearly: bool = False) -> tuple[Change, ...]:
        """How the machine differs from this setup: nothing where it has such a card and all else is the same.

        Args:
            nearly: another kernelreg, driver of the same branch or torch of the same release line is no change.
        """
        return tuple(self._changes(facts, _NEAR if nearly else {}))

    def _changes(self, facts: Facts, near: Mapping[str, int]) -> Iterator[Change]:
        device = next(filter(self.is_of, (*facts.devices, CPU)), None)
        if device is None:
            there = dict.fromkeys(setup_of(facts, each).description for each in facts.devices or (CPU,))
            yield Change(CARD, self.description, "; ".join(there))
            device = (*facts.devices, CPU)[0]
        here = setup_of(facts, device, self.packages)
        told = [(field, getattr(self, field), getattr(here, field)) for field in _VERSIONS]
        for field, then, now in [*told, *((name, self.packages[name], here.packages[name]) for name in self.packages)]:
            if then != now and _first(then, near.get(field)) != _first(now, near.get(field)):
                yield Change(field, then, now)


def _first(version: str | None, numbers: int | None) -> object:
    """So many of a version's numbers, all of it for None."""
    return version if version is None or numbers is None else version.split(".")[:numbers]


def setup_of(facts: Facts, device: Device, packages: Iterable[str] = ()) -> Setup:
    """The setup of a device of the machine, with the versions of these packages."""
    return Setup(
        platform=f"{facts.platform.system} {facts.platform.machine}",
        type=device.type,
        card=device.name,
        compute_capability=device.compute_capability,
        mig=device.mig,
        driver=facts.driver.version if facts.driver and device.type != CPU.type else None,
        torch=facts.torch.version if facts.torch else None,
        packages={name: facts.packages.get(name) for name in sorted(packages)},
    )
