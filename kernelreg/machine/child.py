"""Asking a driver's library in a child process: it may hang, crash or print, and this process goes on without it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from kernelreg.children import alone

_FOLDER = Path(__file__).parent
#: Seconds that a killed child is waited for; one that hangs inside the kernel dies later or never, and is left.
_REAP_SECONDS = 1.0


class NoAnswerError(Exception):
    """The child gave no answer; the message says why."""


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
        process = subprocess.Popen(
            alone(_FOLDER / script, *arguments, f"{seconds + 1}"),  # its own limit, should this process be gone by then
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        raise NoAnswerError(f"no child process: {error}") from error
    try:
        stdout, stderr = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        raise NoAnswerError(f"no answer within {seconds:g} s") from None
    finally:
        _end(process)
    if process.returncode:
        lines = stderr.decode("utf-8", "replace").strip().splitlines()
        raise NoAnswerError(lines[-1] if lines and process.returncode > 0 else _ending(process.returncode))
    return stdout


def _end(process: subprocess.Popen[bytes]) -> None:
    """See to it that nothing of the child holds this process up, whatever became of it."""
    if process.poll() is None:
        with suppress(OSError):
            if hasattr(os, "killpg"):
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_REAP_SECONDS)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def _ending(code: int) -> str:
    """An exit code in words."""
    try:
        return f"the library ended its process: {signal.Signals(-code).name}"
    except ValueError:
        return f"exit code {code}"
