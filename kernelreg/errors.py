"""The errors kernelreg raises, and the one way it names the nearest right thing."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernelreg.reasons import Reason
    from kernelreg.resolution import Resolution


class KernelregError(Exception):
    """Base of every error that kernelreg raises on purpose."""


class ConfigurationError(KernelregError, ValueError):
    """An override (environment variable, ``use()``, argument) that names or says something unknown."""


class DescriptorError(KernelregError, ValueError):
    """A ``backend.toml`` that does not say what a descriptor must; names the file, the key and what is accepted."""


class FactsError(KernelregError, ValueError):
    """A facts file that cannot be read or written; names the file, the key and what is accepted."""


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


def encodable(text: str) -> str:
    """The text with a question mark for what UTF-8 has no word for: the stray bytes of a path or a variable."""
    return text.encode("utf-8", "replace").decode("utf-8")


def nearest(given: str, accepted: Iterable[str]) -> str | None:
    """The accepted name closest to what was given, or None when nothing is close."""
    folded = {name.lower().replace("-", "_"): name for name in accepted}
    found = difflib.get_close_matches(given.lower().replace("-", "_"), folded, n=1, cutoff=0.5)
    return folded[found[0]] if found else None


def unknown_name(kind: str, given: str, accepted: Iterable[str]) -> str:
    """``unknown feature 'varlne'; accepted: …; did you mean 'varlen'?``"""
    names = sorted(accepted)
    hint = nearest(given, names)
    text = f"unknown {kind} {given!r}; accepted: {', '.join(names) or 'none'}"
    return f"{text}; did you mean {hint!r}?" if hint else text
