"""Kernels that were found wrong on this machine: for which calls, and by what."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kernelreg.call import Call
from kernelreg.reasons import Reason, ReasonCode


class Finding(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kernel's fault. It keeps the kernel from every call that uses what is to blame.

    Attributes:
        devices: where it was found, and the devices that are the same card.
        features, dtype: what is to blame: calls that use all of these features, in that dtype (None: in any).
        cause: the failing case, and how it failed.
        fix: how to test the kernel again.
    """

    operation: str
    backend: str
    kernel: str
    devices: frozenset[str]
    features: frozenset[str]
    dtype: str | None
    cause: str
    fix: str

    def holds(self, kernel: str, backend: str, call: Call) -> bool:
        """Whether the fault keeps this kernel from the call; what a call does not say is not held against it."""
        return (
            (self.operation, self.backend, self.kernel) == (call.operation, backend, kernel)
            and call.device in self.devices
            and self.features <= call.features
            and (call.dtype is None or self.dtype in (None, call.dtype))
        )


def quarantine_reasons(findings: Iterable[Finding], backend: str, kernel: str, call: Call) -> list[Reason]:
    """One reason, with the first of the findings that keep the kernel from the call and how many there are."""
    held = [each for each in findings if each.holds(kernel, backend, call)]
    if not held:
        return []
    more = f" (and {len(held) - 1} more)" if len(held) > 1 else ""
    first = held[0]
    return [Reason(code=ReasonCode.QUARANTINED, subject=kernel, actual=first.cause + more, fix=first.fix)]
