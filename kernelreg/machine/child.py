"""Asking a driver's library in a child process: it may hang, crash or print, and this process goes on without it."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from kernelreg.children import alone, run
from kernelreg.faults import last_line

_FOLDER = Path(__file__).parent


class NoAnswerError(Exception):
    """The child gave no answer, or no whole one; the message says why, ``printed`` is what it had said by then."""

    def __init__(self, message: str, printed: bytes = b"") -> None:
        super().__init__(message)
        self.printed = printed


def answer_of(script: str, *arguments: str, seconds: float) -> bytes:
    """What one of this folder's scripts writes to its standard output.

    The script runs apart from the user's packages and start-up files, in this process's environment, so that it sees
    the devices that this process would see.

    Raises:
        NoAnswerError: it could not be started, failed, was killed, or said nothing within ``seconds``.
    """
    if getattr(sys, "frozen", False) or not sys.executable:  # sys.executable would start the user's program again
        raise NoAnswerError("not asked: this interpreter cannot start another (sys.executable names none)")
    try:
        command = alone(_FOLDER / script, *arguments, f"{seconds + 1}")  # its own limit, should this process be gone
        ended = run(command, seconds)
    except (OSError, ValueError) as error:
        raise NoAnswerError(f"no child process: {error}") from error
    if ended.code is None:
        raise NoAnswerError(f"no answer within {seconds:g} s", ended.printed)
    if ended.code:
        last = last_line(ended.words.decode("utf-8", "replace"))
        raise NoAnswerError(last if last and ended.code > 0 else _ending(ended.code), ended.printed)
    return ended.printed


def _ending(code: int) -> str:
    """An exit code in words."""
    try:
        return f"the library ended its process: {signal.Signals(-code).name}"
    except ValueError:
        return f"exit code {code}"
