"""Child processes: the commands that start this Python, what is heard of them, how they end, and how they ended."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_START = Path(__file__).with_name("_child_start.py")
#: Flags of the interpreter that decide which site folders, and whose start-up files, a process has.
_FLAGS = {"isolated": "-I", "ignore_environment": "-E", "no_user_site": "-s", "no_site": "-S"}
#: Bytes that are kept of an answer, and of the last words; a child in a loop may print without end.
LONGEST = 1 << 22
KEPT = 1 << 14
_CHUNK = 1 << 16
#: Seconds that a killed child is waited for; one that hangs inside the kernel dies later or never, and is left.
_REAP_SECONDS = 1.0


class Ended(NamedTuple):
    """What is known of a program: its exit code (None: it had not ended by its limit), what it printed, its errors."""

    code: int | None
    printed: bytes
    words: bytes


def run(command: Sequence[str], seconds: float) -> Ended:
    """Run a program to its end, or for so many seconds. It, and what it started, is gone then, as far as it can be.

    Raises:
        OSError, ValueError: it cannot be started.
    """
    process = subprocess.Popen(
        command,
        bufsize=0,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    printed, words = bytearray(), bytearray()
    try:
        if sys.platform == "win32":  # nothing there waits for several pipes at once
            with contextlib.suppress(subprocess.TimeoutExpired):
                printed[:], words[:] = process.communicate(timeout=seconds)
        else:
            takes = {process.stdout: keep_first(printed, LONGEST), process.stderr: keep_last(words, KEPT)}
            listen(process, takes, time.monotonic() + seconds)
        return Ended(process.poll(), bytes(printed), bytes(words))
    finally:
        _end(process)


def listen(
    child: subprocess.Popen[bytes],
    takes: Mapping[Any, Callable[[bytes], None]],
    deadline: float,
    enough: Callable[[], bool] = lambda: False,
) -> None:
    """Hand on what comes from a child, until it has ended, the time is up, or that is enough.

    What was said before that is still heard. The end of what a file gives is not waited for: a process that the child
    left behind may hold it open.

    Args:
        takes: files that can be waited for, and who takes what comes from each.
    """
    with selectors.DefaultSelector() as selector:
        for file, take in takes.items():
            selector.register(file, selectors.EVENT_READ, take)
        while not enough() and child.poll() is None and (left := deadline - time.monotonic()) > 0:
            if not selector.get_map():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(left)
                continue
            closed = len(selector.get_map()) < len(takes)  # it is ending, or has closed what is not its own
            _take(selector, min(left, 0.02 if closed else 0.5))
        for _ in range(LONGEST // _CHUNK):
            if not _take(selector, 0):
                break


def _take(selector: selectors.BaseSelector, seconds: float) -> bool:
    """Take what has come, or comes within this time; whether anything has."""
    ready = selector.select(seconds)
    for key, _ in ready:
        try:
            data = os.read(key.fd, _CHUNK)
        except OSError:  # a connection that was reset is one that has ended
            data = b""
        key.data(data)
        if not data:
            selector.unregister(key.fileobj)
    return bool(ready)


def keep_first(kept: bytearray, most: int) -> Callable[[bytes], None]:
    """Who takes data and keeps so many bytes of its beginning."""

    def take(data: bytes) -> None:
        kept.extend(data[: most - len(kept)])

    return take


def keep_last(kept: bytearray, most: int) -> Callable[[bytes], None]:
    """Who takes data and keeps so many bytes of its end."""

    def take(data: bytes) -> None:
        kept.extend(data)
        del kept[:-most]

    return take


def _end(process: subprocess.Popen[bytes]) -> None:
    """See to it that nothing of the child holds this process up, whatever became of it."""
    with contextlib.suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)  # what it started, too
        else:
            process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_REAP_SECONDS)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


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
