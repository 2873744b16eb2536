"""What the commands share: the machine they speak of, and a console for people."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from kernelreg.machine import CPU, Device, Facts
from kernelreg.session import session

if TYPE_CHECKING:
    from rich.console import Console

#: Columns where standard output is no terminal.
PLAIN_WIDTH = 110


def facts_of(words: argparse.Namespace) -> Facts:
    """The facts file that ``--facts`` names, else this machine's."""
    return session.facts() if words.facts is None else Facts.load(words.facts)


def devices_of(facts: Facts) -> tuple[Device, ...]:
    """Every visible device, or the CPU where there is none."""
    return facts.devices or (CPU,)


def console() -> Console:
    """Standard output for a person: colour on a terminal alone."""
    from rich.console import Console

    return Console(
        markup=False,
        highlight=False,
        emoji=False,
        width=None if sys.stdout.isatty() else PLAIN_WIDTH,
        soft_wrap=False,
    )


def describe(device: Device) -> str:
    """A device in one line."""
    return device.description


def write(text: str) -> None:
    """A text, and the end of its line, to standard output."""
    sys.stdout.write(text + "\n")
