"""One question to a child process, within a limit: what runs there may crash, hang, exit or print, and costs nothing.

Standard input is the wire in both directions, so that whatever a library prints is no message; it stays open for as
long as the parent lives.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import msgspec

from kernelreg.children import alike, death, end_with_parent
from kernelreg.errors import KernelregError
from kernelreg.faults import last_line, one_line

if TYPE_CHECKING:
    import socket

Question = TypeVar("Question", bound=msgspec.Struct)
Answer = TypeVar("Answer", bound=msgspec.Struct)

#: Bytes that are kept of what a child prints, and of an answer; a child in a loop may print without end.
_KEPT = 1 << 14
_LONGEST = 1 << 22
_CHUNK = 1 << 16


class NoAnswerError(KernelregError):
    """A child process that did not answer; says how it ended and its last words, or the limit."""


def ask(module: str, question: msgspec.Struct, answer: type[Answer], limit: float) -> tuple[Answer, str]:
    """What a module's ``main``, which calls :func:`reply`, says to the question; and the first line that it printed.

    The child, and whatever it started, is gone when this returns.

    Raises:
        NoAnswerError: it did not answer within ``limit`` seconds.
    """
    import socket  # not above: Python 3.13.0 cannot import it in a folder that is gone, and the commands import this

    deadline = time.monotonic() + limit
    ours, theirs = socket.socketpair()
    with ours:
        try:
            with theirs:
                child = subprocess.Popen(
                    alike(module),
                    bufsize=0,
                    stdin=theirs.fileno(),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
        except OSError as error:
            raise NoAnswerError(f"no process to ask in: {error}") from error
        with child:
            try:
                with contextlib.suppress(OSError):  # it has died already: how is told below
                    ours.sendall(msgspec.json.encode(question) + b"\n")
                heard = _listen(child, ours, deadline)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    if not heard.answered:
                        child.wait(max(0.0, deadline - time.monotonic()))
                code = child.poll()
            finally:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(child.pid, signal.SIGKILL)  # compilers that it started, too
    if heard.answered:
        with contextlib.suppress(msgspec.DecodeError):
            return msgspec.json.decode(heard.wire, type=answer), one_line(heard.printed.decode(errors="replace"))
    words = last_line(heard.words.decode(errors="replace"))
    cause = f"no answer within {limit:g} s" if code is None and not heard.answered else death(code)
    raise NoAnswerError(f"{cause}; its last words: {words}" if words else cause)


def reply(kind: type[Question], respond: Callable[[Question], msgspec.Struct]) -> int:
    """The child's side: read the question, send the answer. What ``respond`` raises ends the process."""
    question = msgspec.json.decode(sys.stdin.buffer.readline(), type=kind)
    wire = os.dup(0)
    end_with_parent()
    answer = msgspec.json.encode(respond(question)) + b"\n"
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # they may be anything by now
            stream.flush()
    while answer:
        answer = answer[os.write(wire, answer) :]
    return 0


class _Heard:
    """What came from a child: its answer, the beginning of what it printed, and the end of its errors."""

    def __init__(self) -> None:
        self.wire, self.printed, self.words = bytearray(), bytearray(), bytearray()

    @property
    def answered(self) -> bool:
        return self.wire.endswith(b"\n")

    def take_wire(self, data: bytes) -> None:
        if len(self.wire) < _LONGEST:
            self.wire += data

    def take_printed(self, data: bytes) -> None:
        self.printed += data[: _KEPT - len(self.printed)]

    def take_words(self, data: bytes) -> None:
        self.words += data
        del self.words[:-_KEPT]


def _listen(child: subprocess.Popen[bytes], wire: socket.socket, deadline: float) -> _Heard:
    """Until the answer is complete, the child has ended or the time is up; what was said before that is still heard.

    Neither end is waited for: a process that the child left behind may hold it open.
    """
    heard = _Heard()
    with selectors.DefaultSelector() as selector:
        selector.register(wire, selectors.EVENT_READ, heard.take_wire)
        for pipe, take in ((child.stdout, heard.take_printed), (child.stderr, heard.take_words)):
            if pipe is not None:
                selector.register(pipe, selectors.EVENT_READ, take)
        while not heard.answered and child.poll() is None and (left := deadline - time.monotonic()) > 0:
            closed = len(selector.get_map()) == 1  # it is ending, or has closed what is not its own
            _take(selector, min(left, 0.02 if closed else 0.5))
        for _ in range(_LONGEST // _CHUNK):
            if not _take(selector, 0):
                break
    return heard


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
