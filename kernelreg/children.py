"""Child processes of this Python: the commands that start them, how they end with their parent, and how they ended."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

_START = Path(__file__).with_name("_child_start.py")
#: Flags of the interpreter that decide which site folders, and whose start-up files, a process has.
_FLAGS = {"isolated": "-I", "ignore_environment": "-E", "no_user_site": "-s", "no_site": "-S"}


def alone(script: Path, *arguments: str) -> list[str]:
    """The command that runs a file which imports the standard library and nothing else.

    Raises:
        OSError: this process knows no interpreter; a program that embeds Python may not.
    """
    return [_python(), "-I", "-S", os.fspath(script), *arguments]


def alike(module: str) -> list[str]:
    """The command that runs a module's ``main`` with exactly the import path that this process has now.

    Not ``python -m``, which looks in the current folder first: a ``json.py`` there would be taken for the real one.

    Raises:
        OSError: this process knows no interpreter.
    """
    flags = [flag for name, flag in _FLAGS.items() if getattr(sys.flags, name)]
    path: list[object] = [*sys.path]
    texts = [entry for entry in path if isinstance(entry, str)]  # imports skip all else, too
    return [_python(), *flags, os.fspath(_START), module, *texts]


def end_with_parent() -> None:
    """See that nothing of this process group is left when standard input closes: the parent is gone, however it went.

    A process watches, not a thread: a library that hangs may hold the interpreter's lock. Standard input is empty here
    from then on: libraries are not to read, or to keep, what is watched.
    """
    if os.fork() == 0:
        try:
            os.closerange(1, 3)  # whoever reads there waits for the child's end, not for this process
            while os.read(0, 1):
                pass
        finally:
            os.killpg(0, signal.SIGKILL)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def death(code: int | None) -> str:
    """How a process ended: the signal's name, or the exit code."""
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"the process died of {signal.Signals(-code).name}"
    return f"the process ended with exit code {code}"


def _python() -> str:
    if not sys.executable:
        raise OSError("sys.executable names no Python to start a child process with")
    return sys.executable
