"""One question to a child process, within a limit: what runs there may crash, hang, exit or print, and costs nothing.

Standard input is the wire in both directions, so that whatever a library prints is no message; it stays open for as
long as the parent lives.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from kernelreg.children import KEPT, LONGEST, alike, death, end_with_parent, keep_first, keep_last, listen
from kernelreg.decoding import NOT_JSON
from kernelreg.errors import KernelregError
from kernelreg.faults import last_line, one_line

Question = TypeVar("Question", bound=msgspec.Struct)
Answer = TypeVar("Answer", bound=msgspec.Struct)


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
    wire, printed, words = bytearray(), bytearray(), bytearray()
    try:
        ours, theirs = socket.socketpair()
    except OSError as error:  # no file is left to open
        raise NoAnswerError(f"no process to ask in: {error}") from error
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
                takes = {
                    ours: keep_first(wire, LONGEST),
                    child.stdout: keep_first(printed, KEPT),
                    child.stderr: keep_last(words, KEPT),
                }
                listen(child, takes, deadline, lambda: b"\n" in wire)
                code = child.poll()
            finally:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(child.pid, signal.SIGKILL)  # compilers that it started, too
    said, answered, _ = wire.partition(b"\n")  # one that forks may answer twice
    if answered:
        with contextlib.suppress(*NOT_JSON):
            return msgspec.json.decode(said, type=answer), one_line(printed.decode(errors="replace"))
    last = last_line(words.decode(errors="replace"))
    cause = f"no answer within {limit:g} s" if code is None and not answered else death(code)
    raise NoAnswerError(f"{cause}; its last words: {last}" if last else cause)


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
