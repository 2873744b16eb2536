"""Other people's errors: told in one line, whatever they hold, and never in the way of the user's Ctrl-C."""

from __future__ import annotations

import re

#: Links of a chain that are told; what lies behind them rarely says more.
_LINKS = 5
#: Characters of each link, and of a program's last words.
_LENGTH = 300
#: What would move the cursor, hide text or end the line: a message is data and not the terminal's commands.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def fault_of(error: BaseException) -> str:
    """The error and what caused it, outermost first: ``ImportError: a ← OSError: libfoo.so: cannot open``.

    Raises:
        KeyboardInterrupt: it is one, or was raised while one was handled: a library that catches everything has
            caught the user's Ctrl-C, too.
    """
    links = links_of(error)
    if any(isinstance(link, KeyboardInterrupt) for link in links):
        raise KeyboardInterrupt from error
    return " ← ".join(told(link) for link in links[:_LINKS])


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
    """The error and what caused it, outermost first."""
    links: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and not any(link is each for each in links):
        links.append(link)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return links


def told(error: BaseException) -> str:
    """One error by itself, in one line."""
    try:
        text = one_line(str(error))
    except KeyboardInterrupt:
        raise
    except BaseException:  # its own __str__ fails
        text = "an error that cannot be told"
    name = printable(type(error).__name__)
    return f"{name}: {text}" if text else name
