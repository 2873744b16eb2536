"""Child processes of this Python: the commands that start them, whatever folder the user happens to be in."""

from __future__ import annotations

import os
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


def _python() -> str:
    if not sys.executable:
        raise OSError("sys.executable names no Python to start a child process with")
    return sys.executable
