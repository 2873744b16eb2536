"""Kernels that were found wrong, or that failed, on this machine: for which calls, and by what."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, overload

import msgspec

from kernelreg.call import Call
from kernelreg.errors import KernelregError, path_of
from kernelreg.reasons import Reason, ReasonCode


class Finding(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kernel's fault. It keeps the kernel from every call that uses what is to blame.

    Attributes:
        devices: where it was found, and the devices that are the same card.
        features, dtype: what is to blame: calls that use all of these features, in that dtype (None: in any).
        kind: where a call failed, that call: those that differ from it in more than their size are not kept away.
        cause: the failing case or call, and how it failed.
        fix: how to test the kernel again.
    """

    operation: str
    backend: str
    kernel: str
    devices: frozenset[str]
    features: frozenset[str] = frozenset()
    dtype: str | None = None
    kind: Call | None = None
    cause: str
    fix: str

    def holds(self, kernel: str, backend: str, call: Call) -> bool:
        """Whether the fault keeps this kernel from the call; what a call does not say is not held against it."""
        return (
            (self.operation, self.backend, self.kernel) == (call.operation, backend, kernel)
            and call.device in self.devices
            and self.features <= call.features
            and (call.dtype is None or self.dtype in (None, call.dtype))
            and self.kind in (None, kind_of(call))
        )

    @property
    def scope(self) -> str:
        """From which calls the kernel is kept, and where."""
        uses = " and ".join([*sorted(self.features), *([self.dtype] if self.dtype else [])])
        which = f"{self.operation} calls with {uses}" if uses else f"all {self.operation} calls"
        which = which if self.kind is None else f"{self.operation} calls like ({self.kind})"
        where = ", ".join(sorted(self.devices))
        return f"{self.backend} {self.kernel} is kept from {which} on {where}"

    def __str__(self) -> str:
        return f"{self.scope}: {self.cause}; fix: {self.fix}"


def kind_of(call: Call) -> Call:
    """The call without its device and its size, which alone do not make it another kind of call."""
    return msgspec.structs.replace(call, device="", tokens=None, sequences=None)


def quarantine_reasons(findings: Iterable[Finding], backend: str, kernel: str, call: Call) -> list[Reason]:
    """One reason, with the first of the findings that keep the kernel from the call and how many there are."""
    held = [each for each in findings if each.holds(kernel, backend, call)]
    if not held:
        return []
    more = f" (and {len(held) - 1} more)" if len(held) > 1 else ""
    first = held[0]
    return [Reason(code=ReasonCode.QUARANTINED, subject=kernel, actual=first.cause + more, fix=first.fix)]


class Quarantine(Sequence[Finding]):
    """What keeps kernels from calls now: what failed in this process, and what ``kernelreg verify`` found wrong."""

    def __init__(self, findings: Iterable[Finding], clear: Callable[[str | None], None]) -> None:
        self._findings = tuple(findings)
        self._clear = clear

    @overload
    def __getitem__(self, place: int) -> Finding: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Finding]: ...
    def __getitem__(self, place: int | slice) -> Finding | Sequence[Finding]:
        return self._findings[place]

    def __len__(self) -> int:
        return len(self._findings)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self._findings)

    def clear(self, backend: str | None = None) -> None:
        """Trust the kernels again: all of them, or one backend's. What ``verify`` has kept of them is forgotten, too.

        Raises:
            ConfigurationError: a name that no backend has.
            KernelregError: what ``verify`` has kept cannot be changed.
        """
        self._clear(backend)

    def to_dict(self) -> dict[str, Any]:
        """The findings as plain data."""
        found: dict[str, Any] = {"schema": 1, "findings": msgspec.to_builtins(self._findings)}
        return found

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the findings to a JSON file.

        Raises:
            KernelregError: it cannot be written, or ``path`` is no path.
        """
        target = path_of("quarantine().save", path)
        data = msgspec.json.format(msgspec.json.encode(self.to_dict(), order="deterministic"), indent=2)
        try:
            target.write_bytes(data + b"\n")
        except (OSError, ValueError) as error:  # no file's name has a NUL
            raise KernelregError(f"{target}: {getattr(error, 'strerror', None) or error}") from error

    def __str__(self) -> str:
        return "\n".join(map(str, self._findings)) or "nothing"
