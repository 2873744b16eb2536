"""What the commands share: the machine they speak of, and a console for people."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
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
        complain(f"warning: {each}")


def set_aside(*variables: str) -> None:
    """Take variables out of this process and its children: of no matter to the command, or what it makes anew."""
    named = [name for name in variables if os.environ.pop(name, None)]
    if named:
        session.refresh()


def on_this_machine(words: argparse.Namespace, command: str) -> None:
    """See that the machine to speak of is the one at hand.

    Raises:
        ConfigurationError: a facts file is named in its place.
    """
    if words.facts is not None:
        raise ConfigurationError(f"{command} runs kernels on this machine; --facts is for the other commands")
    if os.environ.get("KERNELREG_FACTS", "").strip():
        raise ConfigurationError(f"{command} runs kernels on this machine; fix: unset KERNELREG_FACTS")


def devices_of(facts: Facts) -> tuple[Device, ...]:
    """Every visible device, or the CPU where there is none."""
    return facts.devices or (CPU,)


def device_named(name: str | None, facts: Facts) -> Device:
    """The device that ``--device`` names; the current accelerator, else the CPU, where it is not given.

    Raises:
        ConfigurationError: the machine has none of that name.
    """
    where = session.default_device(facts) if name is None else session.named_device(name, facts)
    device = facts.device(where)
    if device is None or device.type == "meta":
        there = ", ".join(dict.fromkeys(each.torch_name for each in (*facts.devices, CPU)))
        raise ConfigurationError(f"--device {name}: not there; accepted: {there}")
    return device


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


@contextmanager
def progress(total: int, *, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """A bar on standard error, where a person sees it; gives what to call, with a description, as each part is done."""
    if quiet or not on_terminal(sys.stderr):
        yield lambda description: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("the first calls compile", total=total)
        yield lambda description: bar.update(task, advance=1, description=description)


def write(text: str) -> None:
    """A text, and the end of its line, to standard output."""
    print(text)


def complain(text: str) -> None:
    """One line to standard error. Where that is closed, nowhere: ``print`` would take standard output in its place."""
    if sys.stderr is not None:
        print(f"kernelreg: {text}", file=sys.stderr)
