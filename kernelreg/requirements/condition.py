"""Conditions on machine and call: where a known fault applies, and where a measurement does."""

from __future__ import annotations

from collections.abc import Iterable

from kernelreg.call import Call
from kernelreg.capability import matches_capability
from kernelreg.descriptor import KnownBad, When, full
from kernelreg.machine.model import Facts
from kernelreg.reasons import Reason, ReasonCode
from kernelreg.versions import satisfies


def holds(when: When, kernel: str, facts: Facts, call: Call, *, unknown: bool = False) -> bool:
    """Whether every part that the condition names holds for this kernel, machine and call.

    Args:
        unknown: the answer where an NVIDIA card's capability cannot be told.
    """
    device = facts.device(call.device)
    if when.kernels and kernel not in when.kernels:
        return False
    if not call.features.issuperset(when.features):
        return False
    if when.dtype is not None and call.dtype not in when.dtype:
        return False
    if when.tokens is not None and not when.tokens.holds(call.tokens):
        return False
    # Tokens that nobody counts are many; of other sizes nothing is assumed.
    sizes = ((when.sequences, call.sequences), (when.value_heads, call.value_heads))
    if any(span is not None and (size is None or not span.holds(size)) for span, size in sizes):
        return False
    if when.device != "any" and (device is None or device.type != when.device):
        return False
    if when.compute_capability is not None:
        if device is None or device.type != "cuda":
            return False
        fits = matches_capability(device.compute_capability or "", when.compute_capability)
        if not (unknown if fits is None else fits):
            return False
    return all(
        version is not None and satisfies(version, wanted, by_release=by_release) is True
        for version, wanted, by_release in _versions(when, facts)
    )


def known_bad_reasons(entries: Iterable[KnownBad], kernel: str, facts: Facts, call: Call) -> list[Reason]:
    """A reason for each known fault that applies, or may; a slow kernel is not a wrong one and gives none."""
    return [
        Reason(
            code=ReasonCode.KNOWN_BAD,
            subject=entry.severity,
            actual=entry.because,
            fix=entry.fix,
            url=entry.url,
        )
        for entry in entries
        if entry.severity != "slow" and holds(entry.when, kernel, facts, call, unknown=True)
    ]


def _versions(when: When, facts: Facts) -> Iterable[tuple[str | None, str, bool]]:
    """Each version that the condition names: what is there, the range, how to compare."""
    torch = facts.torch
    if when.torch is not None:
        yield torch.version if torch else None, when.torch, True
    if when.cuda is not None:
        yield torch.cuda if torch else None, when.cuda, True
    if when.driver is not None:
        yield facts.driver.version if facts.driver else None, when.driver, True
    for name, rule in full(when.packages).items():
        found = next((facts.packages[each] for each in (name, *rule.also) if each in facts.packages), None)
        yield found, rule.version, rule.by == "release"
