"""The errors kernelreg raises, and the one way it names the nearest right thing."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernelreg.reasons import Reason
    from kernelreg.resolution import Resolution


#: Characters of what was given that an error repeats.
_SHOWN = 100


class KernelregError(Exception):
    """Base of every error that kernelreg raises on purpose."""


class ConfigurationError(KernelregError, ValueError):
    """An override (environment variable, ``use()``, argument) that names or says something unknown."""


class UnknownOperationError(ConfigurationError, KeyError):
    """A name that no operation has; a KeyError, too, so that what is looked up by operation is a proper mapping."""

    def __str__(self) -> str:
        return Exception.__str__(self)  # a KeyError would quote it


class DescriptorError(KernelregError, ValueError):
    """A ``backend.toml`` that does not say what a descriptor must; names the file, the key and what is accepted."""


class FactsError(KernelregError, ValueError):
    """A facts file that cannot be read or written; names the file, the key and what is accepted."""


class KernelFailedError(KernelregError, RuntimeError):
    """A kernel that raised when it was called, where no other may run in its stead; the cause is its ``__cause__``."""


class CallError(KernelregError, ValueError):
    """Arguments that break the operation's contract, whatever the backend; names the argument and its shape."""


class AdapterError(KernelregError, ImportError):
    """A backend's adapter could not be imported. ``reason`` is the ``import-error`` that it becomes."""

    def __init__(self, message: str, reason: Reason) -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[type[AdapterError], tuple[str, Reason]]:
        return type(self), (str(self), self.reason)  # errors travel between an engine's processes


class NoBackendError(KernelregError, RuntimeError):
    """No kernel fits. The message and ``resolution`` hold every reason for every kernel."""

    def __init__(self, message: str, resolution: Resolution) -> None:
        super().__init__(message)
        self.resolution = resolution

    def __reduce__(self) -> tuple[type[NoBackendError], tuple[str, Resolution]]:
        return type(self), (str(self), self.resolution)


class RanksError(KernelregError, RuntimeError):
    """The ranks of a process group could not agree. ``ranks`` are those that differ, failed or did not answer."""

    def __init__(self, message: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)

    def __reduce__(self) -> tuple[type[RanksError], tuple[str, tuple[int, ...]]]:
        return type(self), (str(self), self.ranks)


class RanksTimeoutError(RanksError, TimeoutError):
    """Not every rank of a process group answered by the time limit; ``ranks`` are those that did not."""


def encodable(text: str) -> str:
    """The text with a question mark for what UTF-8 has no word for: the stray bytes of a path or a variable."""
    return text.encode("utf-8", "replace").decode("utf-8")


def several(said: str, value: object, accepted: str) -> list[Any]:
    """What is in a list, set or the like that a person gave. A string is one thing, and not its letters.

    Args:
        said: what was written, as it was written.
        accepted: what should have been given.

    Raises:
        ConfigurationError: it is not several things.
    """
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ConfigurationError(f"{said}; accepted: {accepted}")
    return list(value)


def path_of(said: str, value: Any) -> Path:
    """The path that a person gave.

    Args:
        said: what was asked, such as ``Facts.load``.

    Raises:
        ConfigurationError: it is no path, or one of bytes.
    """
    try:
        return Path(value)
    except TypeError:
        raise ConfigurationError(f"{said}({value!r:.{_SHOWN}}); accepted: a path") from None


def nearest(given: object, accepted: Iterable[str]) -> str | None:
    """The accepted name closest to what was given, or None when nothing is close."""
    if not isinstance(given, str):
        return None
    folded = {name.lower().replace("-", "_"): name for name in accepted}
    found = difflib.get_close_matches(given.lower().replace("-", "_"), folded, n=1, cutoff=0.5)
    return folded[found[0]] if found else None


def unknown_name(kind: str, given: object, accepted: Iterable[str]) -> str:
    """``unknown feature 'varlne'; accepted: …; did you mean 'varlen'?``"""
    names = sorted(accepted)
    hint = nearest(given, names)
    if isinstance(given, str) and len(given) > _SHOWN:
        said = f"{given[:_SHOWN]!r} … ({len(given)} characters)"
    else:
        said = f"{given!r:.{_SHOWN + 2}}"
    text = f"unknown {kind} {said}; accepted: {', '.join(names) or 'none'}"
    return f"{text}; did you mean {hint!r}?" if hint else text
