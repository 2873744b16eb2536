"""Judging a backend in child processes with a time limit, so that a crash or a hang costs one case."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from tempfile import TemporaryFile

import msgspec

from kernelreg.children import KEPT, alike, death
from kernelreg.decoding import NOT_JSON
from kernelreg.verify.child import Judged, Message, Started, Task
from kernelreg.verify.outcome import Outcome

_MESSAGE = msgspec.json.Decoder(Message)


def run_backend(task: Task, limit: float, total: int, told: Callable[[Outcome], None]) -> list[Outcome]:
    """The outcomes of every case on one backend.

    Args:
        task: what to judge.
        limit: seconds for the whole backend; the case that is under way then is wrong, those after it are not run.
        total: how many cases there are.
        told: called with each outcome as it comes.
    """
    outcomes: list[Outcome] = []
    deadline = time.monotonic() + limit
    while len(outcomes) < total:
        before = len(outcomes)
        started: Started | None = None
        with _child(msgspec.structs.replace(task, skip=before)) as (child, errors):
            for message in _messages(child, deadline):
                if isinstance(message, Started):
                    started = message
                    continue
                outcomes.append(message.outcome)
                told(message.outcome)
                started = None
                if len(outcomes) == total:
                    return outcomes
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, deadline - time.monotonic()))
            late = time.monotonic() >= deadline
        unheard = started is None and len(outcomes) == before
        if late or started is not None or unheard:
            cause = f"not done after {limit:g} s" if late else " ".join([death(child.returncode), *errors])
            outcomes.append(_lost(task, started, cause))
            told(outcomes[-1])
        if late or unheard:  # what dies before its first case, as where torch cannot be imported, dies each time
            break
    return outcomes


@contextlib.contextmanager
def _child(task: Task) -> Iterator[tuple[subprocess.Popen[bytes], list[str]]]:
    """A running child, ended on the way out, and its last words (once it has ended).

    Its standard input stays open until then: where it closes earlier, this process has died, and the child ends itself.
    """
    words: list[str] = []
    with (
        TemporaryFile() as stderr,
        subprocess.Popen(
            alike("kernelreg.verify.child"),
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
        ) as child,
    ):
        try:
            if child.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    child.stdin.write(msgspec.json.encode(task) + b"\n")
            yield child, words
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)  # compilers that it started, too
            child.wait()
            stderr.seek(max(0, stderr.seek(0, os.SEEK_END) - KEPT))
            words += stderr.read().decode(errors="replace").strip().splitlines()[-1:]


def _messages(child: subprocess.Popen[bytes], deadline: float) -> Iterator[Started | Judged]:
    """What the child says, until it ends or the time is up. A process that it left behind may hold its pipe open."""
    if child.stdout is None:
        return
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        while (left := deadline - time.monotonic()) > 0:
            if not selector.select(min(left, 0.5)):
                if child.poll() is not None:
                    return
                continue
            data = os.read(child.stdout.fileno(), 1 << 16)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                with contextlib.suppress(*NOT_JSON):  # what others print before the child takes the pipe
                    yield _MESSAGE.decode(line)


def _lost(task: Task, started: Started | None, cause: str) -> Outcome:
    return Outcome(
        case=started.case if started else "start",
        operation=task.operation,
        backend=task.backend,
        device=task.device,
        kernel=started.kernel if started else None,
        status="wrong",
        reason=cause[:400],
        features=started.features if started else (),
        dtype=started.dtype if started else None,
    )
