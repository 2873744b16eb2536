"""What the commands share: the machine they speak of, and a console for people."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from kernelreg.errors import ConfigurationError, unknown_name
from kernelreg.machine import CPU, Device, Facts
from kernelreg.session import session

if TYPE_CHECKING:
    from rich.console import Console

#: Columns where standard output is no terminal.
PLAIN_WIDTH = 110


def facts_of(words: argparse.Namespace) -> Facts:
    """The facts file that ``--facts`` names, else this machine's."""
    return session.facts() if words.facts is None else Facts.load(words.facts)


def warn_of_environment() -> None:
    """Say on standard error which variables are wrong or unknown: for the commands that no policy changes."""
    _, errors, warnings = session.environment_policy()
    for each in (*errors, *warnings):
        print(f"kernelreg: warning: {each}", file=sys.stderr)


def devices_of(facts: Facts) -> tuple[Device, ...]:
    """Every visible device, or the CPU where there is none."""
    return facts.devices or (CPU,)


def console() -> Console:
    """Standard output for a person: colour on a terminal alone."""
    from rich.console import Console

    class Output(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich's own way is to exit at once

    return Output(
        markup=False,
        highlight=False,
        emoji=False,
        width=None if on_terminal(sys.stdout) else PLAIN_WIDTH,
        soft_wrap=False,
    )


def on_terminal(stream: TextIO | None) -> bool:
    """Whether a person reads the stream; there is none where the program was started with it closed."""
    return stream is not None and stream.isatty()


def known_backend(said: str, name: str, names: tuple[str, ...]) -> str:
    """A backend that a person named.

    Args:
        said: what was written, as it was written.

    Raises:
        ConfigurationError: there is none of that name; names the nearest.
    """
    if name not in names:
        raise ConfigurationError(
            f"{said}: {unknown_name('backend', name, names)} (the command line sees the backends that are installed, "
            "not those that a program gives to kernelreg.register())"
        )
    return name


def describe(device: Device) -> str:
    """A device in one line."""
    return device.description


def seconds(text: str) -> float:
    """A limit as a person writes it, for argparse.

    Raises:
        ArgumentTypeError: it is none.
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text}; accepted: seconds, more than 0 and less than a million")
    return value


@contextmanager
def working(on: str) -> Iterator[None]:
    """Say what takes its time on standard error, where a person sees it."""
    if not on_terminal(sys.stderr):
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(on):
        yield


def write(text: str) -> None:
    """A text, and the end of its line, to standard output."""
    print(text)
