"""Whether a driver's library is there, before a child process is started to ask it."""

from __future__ import annotations

import ctypes
from pathlib import Path

from kernelreg.machine.child import NoAnswerError

#: Where WSL puts the Windows driver's libraries. Its distributions tell the loader; a container or a sandbox may not.
_WSL = Path("/usr/lib/wsl/lib")


def check_loads(name: str) -> None:
    """Load a library, which initialises nothing; most machines without a GPU stop here.

    Raises:
        NoAnswerError: the loader does not find or cannot use it; then torch and every kernel fail to, too.
    """
    try:
        ctypes.CDLL(name)
    except OSError as error:
        hint = f"; {_WSL} has it: put that folder on LD_LIBRARY_PATH" if (_WSL / name).exists() else ""
        raise NoAnswerError(f"{error}{hint}") from error
