"""Other people's errors: told in one line, whatever they hold, and never in the way of the user's Ctrl-C."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from types import FrameType

#: Links of a chain that are told; what lies behind them rarely says more.
_LINKS = 5
#: Characters of each link, and of a program's last words.
_LENGTH = 300
#: What would move the cursor, hide text or end the line: a message is data and not the terminal's commands.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

#: How a program in C begins, with which TileLang's errors begin as well, and how nvcc and others complain of one.
_SOURCE = re.compile(r"#|//|/\*|extern ")
_COMPLAINT = re.compile(r"\b(?:fatal|error)\s*: *\S")


def fault_of(error: BaseException) -> str:
    """The error and what caused it, outermost first: ``ImportError: a ← OSError: libfoo.so: cannot open``.

    Raises:
        KeyboardInterrupt: it is one, or was raised while one was handled, whatever was said to be the cause: a library
            that catches everything has caught the user's Ctrl-C, too.
    """
    if any(isinstance(each, KeyboardInterrupt) for each in all_behind(error)):
        raise KeyboardInterrupt from error
    return " ← ".join(told(link) for link in links_of(error)[:_LINKS])


def printable(text: str) -> str:
    """The text with a question mark for each character that is a command."""
    return _CONTROL.sub("?", text)


def one_line(text: str) -> str:
    """The first line that says something, cut short and printable."""
    first = next((line for line in text.splitlines() if line.strip()), "")
    return printable(first.strip()[:_LENGTH])


def last_line(text: str) -> str:
    """As :func:`one_line`, of the last line: where a program that ends says why."""
    return one_line("\n".join(reversed(text.splitlines())))


def links_of(error: BaseException) -> list[BaseException]:
    """The error and what it says caused it, outermost first; of a group, its members and what caused those."""
    return _walk(error, lambda each: [each.__cause__ or (None if each.__suppress_context__ else each.__context__)])


def all_behind(error: BaseException) -> list[BaseException]:
    """The error and all that was being handled when it came about, also what ``from`` keeps out of its chain."""
    return _walk(error, lambda each: [each.__cause__, each.__context__])


def _walk(
    error: BaseException, causes: Callable[[BaseException], Sequence[BaseException | None]]
) -> list[BaseException]:
    """The error and those behind it. What a caller of ours is handling meanwhile is behind nothing of it."""
    calling = _calling()
    found: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop(0)
        if each is None or any(each is other for other in found):
            continue
        caught = each.__traceback__
        if each is not error and caught is not None and any(caught.tb_frame is frame for frame in calling):
            continue
        found.append(each)
        waiting[:0] = [*_members(each), *causes(each)]
    return found


def _calling() -> list[FrameType]:
    """The frames that wait for this one."""
    frames = []
    frame = inspect.currentframe()
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _members(error: BaseException) -> Sequence[BaseException]:
    """What an ``ExceptionGroup`` (of Python 3.11 and newer, or a backport's) holds."""
    try:
        members = getattr(error, "exceptions", ())
    except Exception:  # an attribute of its own, which fails
        return ()
    return members if isinstance(members, tuple) and all(isinstance(each, BaseException) for each in members) else ()


def told(error: BaseException) -> str:
    """One error by itself, in one line: its first, and the compiler's complaint where that is a program in C."""
    try:
        text = str(error)
        if _SOURCE.match(text.lstrip()):
            text = next(filter(_COMPLAINT.search, text.splitlines()), text)
        text = one_line(text)
    except KeyboardInterrupt:
        raise
    except BaseException:  # its own __str__ fails
        text = "an error that cannot be told"
    name = printable(type(error).__name__)
    return f"{name}: {text}" if text else name
