"""Which kernel, and why not the others: a pure function of descriptors, facts, call and policy.

It reads no environment, no clock and no GPU, so a decision can be replayed anywhere from a facts file.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from kernelreg.call import Call
from kernelreg.descriptor import Kernel
from kernelreg.findings import Finding, quarantine_reasons
from kernelreg.lock import Binding, Pins
from kernelreg.machine.model import Facts
from kernelreg.ops import operation_named
from kernelreg.policy import Policy
from kernelreg.profile import Evidence, Row, Timing, timings_of, told_time
from kernelreg.reasons import CALL_CODES, Reason, ReasonCode, told_in_order
from kernelreg.registry import Backend, Registry
from kernelreg.requirements import call_reasons, holds, known_bad_reasons, machine_reasons

Status = Literal["chosen", "eligible", "rejected"]

#: Said once by the backend's table, these need not be said again by the row's.
_SAID_ONCE = frozenset(
    {
        ReasonCode.NO_DEVICE,
        ReasonCode.TORCH_MISSING,
        ReasonCode.CUDA_BUILD,
        ReasonCode.PACKAGE_MISSING,
        ReasonCode.TOOL_MISSING,
    }
)


#: What is found out only when an adapter is imported, here or in a child process.
_NOT_IMPORTED = frozenset({ReasonCode.IMPORT_ERROR, ReasonCode.PROBE_ERROR})


class Candidate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kernel's verdict.

    Attributes:
        status: ``chosen`` (no reasons), ``eligible`` (it could run; its one reason is ``outranked``) or ``rejected``.
        reasons: all reasons against it, the most telling first.
    """

    backend: str
    kernel: str
    status: Status
    reasons: tuple[Reason, ...] = ()

    @property
    def accepted(self) -> bool:
        """Whether it could run."""
        return self.status != "rejected"


def closest_row(candidates: Iterable[Candidate], backend: str) -> Candidate | None:
    """The row to explain a refusal of the backend by: one that runs here before others, then the fewest reasons."""
    own = (each for each in candidates if each.backend == backend)
    return min(
        own,
        key=lambda each: (any(reason.code not in CALL_CODES for reason in each.reasons), len(each.reasons)),
        default=None,
    )


class Decision(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was decided, as data: enough to explain it, and with the facts file to replay it."""

    schema: Literal[1] = 1
    operation: str
    device: str
    backend: str | None
    kernel: str | None
    call: Call
    policy: Policy
    facts: str
    candidates: tuple[Candidate, ...]


class Rank(msgspec.Struct, frozen=True, order=True):
    """Where a kernel stands among those that could run: policy, then evidence, then name. Smaller is better.

    Attributes:
        slowness: less the times that it is as fast as the built-in torch kernel.
        source: where the evidence is.
        micros: its time at the measured point that speaks for the call.
        point: that point, in words; also where the kernel was not measured there, or failed.
        failed: why it has no time there.
    """

    wish: int
    slow: bool
    unmeasured: bool
    slowness: float
    backend: str
    kernel: str
    source: str | None
    micros: float | None = None
    point: str | None = None
    failed: str | None = None

    @property
    def evidence(self) -> str:
        """Its time, where it was measured, else how many times as fast as the built-in torch kernel it is."""
        if self.failed is not None:
            return f"no time ({self.failed})"
        if self.micros is not None:
            return told_time(self.micros)
        return "not measured" if self.unmeasured else f"{-self.slowness:.3g} ×"


Judged = tuple[Rank, tuple[Reason, ...]]


def decide(
    registry: Registry,
    facts: Facts,
    call: Call,
    policy: Policy,
    ruled_out: Mapping[str, Reason] | None = None,
    findings: Sequence[Finding] = (),
    evidence: Evidence | None = None,
    pins: Pins | None = None,
) -> Decision:
    """Judge every kernel of the call's operation and choose the best of those that fit.

    Args:
        registry: the backends.
        facts: the machine.
        call: what the call needs.
        policy: what the user asked for.
        ruled_out: backends that this process found unusable (their adapter did not import), with the reason.
        findings: kernels that were found wrong on this machine, and for which calls.
        evidence: a measured profile, which ranks before what the descriptors say.
        pins: a lock file, which is stronger than any rank.
    """
    judged = judge(registry, facts, call, policy, ruled_out, findings, evidence, pins)
    return choose(judged, facts.fingerprint, call, policy)


def judge(
    registry: Registry,
    facts: Facts,
    call: Call,
    policy: Policy,
    ruled_out: Mapping[str, Reason] | None = None,
    findings: Sequence[Finding] = (),
    evidence: Evidence | None = None,
    pins: Pins | None = None,
) -> list[Judged]:
    """Where every kernel of the call's operation stands, and all reasons against it."""
    places = ranks(registry, facts, call, policy, evidence)
    binding = Binding(pins, call, facts, policy, places.keys())
    judged = [
        (
            places[backend.name, kernel.name],
            _reasons(backend, kernel, facts, call, policy, ruled_out or {}, findings, binding),
        )
        for backend, kernel in registry.kernels(call.operation)
    ]
    return _without_fallback(judged, policy) if policy.strict else judged


def choose(judged: Iterable[Judged], fingerprint: str, call: Call, policy: Policy) -> Decision:
    """The best of the kernels that nothing was held against.

    Args:
        judged: each kernel, in any order.
        fingerprint: of the facts that they were judged by.
        call, policy: what they were judged for.
    """
    judged = sorted(judged, key=lambda pair: (bool(pair[1]), pair[0]))
    best = judged[0][0] if judged and not judged[0][1] else None
    return Decision(
        operation=call.operation,
        device=call.device,
        backend=best.backend if best else None,
        kernel=best.kernel if best else None,
        call=call,
        policy=policy,
        facts=fingerprint,
        candidates=tuple(_candidate(place, reasons, best, _leads(place, judged)) for place, reasons in judged),
    )


def ranks(
    registry: Registry, facts: Facts, call: Call, policy: Policy, evidence: Evidence | None = None
) -> dict[Row, Rank]:
    """Where each kernel of the call's operation would stand if it could run.

    Kernels that the profile has a time of, at the point that speaks for the call, stand by their times, and those that
    failed there last. One that was not measured there keeps its descriptor's figure.
    """
    places = {
        (backend.name, kernel.name): _described(backend, kernel, facts, call, policy)
        for backend, kernel in registry.kernels(call.operation)
    }
    point = evidence.point(call, facts) if evidence is not None else None
    if evidence is None or point is None:
        return places
    timings = timings_of(point)
    failures = {each.row: each.reason for each in point.failures}
    yardstick = _yardstick(places, timings)
    told = evidence.told(point, call)
    return {
        row: _measured(
            msgspec.structs.replace(place, point=told), timings.get(row), failures.get(row), yardstick, evidence.name
        )
        for row, place in places.items()
    }


def _described(backend: Backend, kernel: Kernel, facts: Facts, call: Call, policy: Policy) -> Rank:
    """A kernel's place by policy and by its descriptor."""
    forced = policy.backend.get(call.operation) == backend.name
    wishes = policy.prefer
    evidence = next((each for each in kernel.preference if holds(each.when, kernel.name, facts, call)), None)
    return Rank(
        wish=-1 if forced else wishes.index(backend.name) if backend.name in wishes else len(wishes),
        slow=any(
            entry.severity == "slow" and holds(entry.when, kernel.name, facts, call)
            for entry in backend.descriptor.known_bad
        ),
        unmeasured=evidence is None,
        slowness=-evidence.speedup if evidence else 0.0,
        backend=backend.name,
        kernel=kernel.name,
        source=evidence.source if evidence else None,
    )


def _yardstick(places: Mapping[Row, Rank], timings: Mapping[Row, Timing]) -> float:
    """The torch kernel's time in microseconds, by which a time and a descriptor's figure can be compared.

    Each measured kernel's time and figure give an estimate of it; their geometric mean is taken. Where none has a
    figure there is nothing to compare, and the slowest of them stands for it.
    """
    estimates = [
        math.log(timings[row].median_us * -place.slowness)
        for row, place in places.items()
        if row in timings and not place.unmeasured
    ]
    if not estimates:
        return max(each.median_us for each in timings.values())
    return math.exp(math.fsum(estimates) / len(estimates))


def _measured(place: Rank, timing: Timing | None, failed: str | None, yardstick: float, source: str) -> Rank:
    """A kernel's place by what was measured of it, if anything was."""
    if timing is not None:
        return msgspec.structs.replace(
            place,
            slow=False,
            unmeasured=False,
            slowness=-yardstick / timing.median_us,
            source=source,
            micros=timing.median_us,
        )
    return place if failed is None else msgspec.structs.replace(place, slow=True, failed=failed)


def _against(place: Rank, best: Rank) -> str:
    """One kernel's evidence against the best one's, and where it is."""
    told = f"{place.evidence} against {best.evidence}"
    if place.point is None:
        return f"{told} the torch kernel's speed"
    unlike = " (× the torch kernel's speed, by its descriptor)" if "×" in told else ""
    return f"{told} in {place.point}{unlike}"


def _leads(place: Rank, judged: list[Judged]) -> bool:
    """Whether it is the first row of its backend that could run: the one that preferring the backend would choose."""
    return place == next((each for each, reasons in judged if each.backend == place.backend and not reasons), None)


def _candidate(place: Rank, reasons: tuple[Reason, ...], best: Rank | None, leads: bool) -> Candidate:
    status: Status = "rejected"
    if best is not None and not reasons:
        status = "chosen" if place == best else "eligible"
    if status == "eligible" and best is not None:
        actual = f"{best.backend} is preferred" if best.wish < place.wish else _against(place, best)
        reasons = (
            Reason(
                code=ReasonCode.OUTRANKED,
                subject=f"by {best.backend} {best.kernel}",
                actual=actual,
                fix=f"KERNELREG_PREFER={place.backend}" if leads and place.backend != best.backend else None,
                url=best.source,
            ),
        )
    return Candidate(backend=place.backend, kernel=place.kernel, status=status, reasons=reasons)


def _reasons(
    backend: Backend,
    kernel: Kernel,
    facts: Facts,
    call: Call,
    policy: Policy,
    ruled_out: Mapping[str, Reason],
    findings: Sequence[Finding],
    binding: Binding,
) -> tuple[Reason, ...]:
    descriptor = backend.descriptor
    reasons = _policy_reasons(backend.name, call.operation, policy)
    reasons += binding.reasons(backend.name, kernel.name)
    reasons += operation_named(call.operation).reasons(call)
    reasons += machine_reasons(descriptor.requires, facts, call.device, install=descriptor.install)
    said = {(reason.code, reason.subject) for reason in reasons if reason.code in _SAID_ONCE}
    more = machine_reasons(kernel.requires, facts, call.device)
    reasons += [reason for reason in more if (reason.code, reason.subject) not in said]
    reasons += known_bad_reasons(descriptor.known_bad, kernel.name, facts, call)
    reasons += call_reasons(kernel.accepts, call)
    reasons += quarantine_reasons(findings, backend.name, kernel.name, call)
    if backend.name in ruled_out:
        reasons.append(ruled_out[backend.name])
    return told_in_order(reasons)


def _without_fallback(judged: list[Judged], policy: Policy) -> list[Judged]:
    """Under strict, a kernel that only its failed import keeps away is not stood in for by one that ranks lower."""
    failed = [place for place, reasons in judged if reasons and {each.code for each in reasons} <= _NOT_IMPORTED]
    if not failed:
        return judged
    first = min(failed)
    origin = policy.origin.get("strict", "policy")
    reason = Reason(
        code=ReasonCode.NOT_SELECTED,
        subject=origin,
        actual=f"{first.backend} {first.kernel} ranks higher and cannot be imported; strict allows no fallback",
        fix=_unset(origin),
    )
    return [(place, reasons if reasons or place < first else (reason,)) for place, reasons in judged]


def _policy_reasons(backend: str, operation: str, policy: Policy) -> list[Reason]:
    reasons = []
    forced = policy.backend.get(operation)
    if forced is not None and forced != backend:
        origin = policy.origin.get(f"backend.{operation}", "policy")
        reasons.append(
            Reason(
                code=ReasonCode.NOT_SELECTED,
                subject=origin,
                actual=f"forces {forced} for {operation}",
                fix=_unset(origin),
            )
        )
    if backend in policy.disable:
        origin = policy.origin.get("disable", "policy")
        reasons.append(
            Reason(code=ReasonCode.DISABLED, subject=origin, actual=f"disables {backend}", fix=_unset(origin))
        )
    if policy.strict and policy.prefer and forced is None and backend not in policy.prefer:
        origin = policy.origin.get("prefer", "policy")
        reasons.append(
            Reason(
                code=ReasonCode.NOT_SELECTED,
                subject=origin,
                actual=f"wishes for {', '.join(policy.prefer)}, and strict allows no other",
                fix=_unset(policy.origin.get("strict", "policy")),
            )
        )
    return reasons


def _unset(origin: str) -> str | None:
    """The command that takes a word back, where it is an environment variable's."""
    return f"unset {origin}" if origin.startswith("KERNELREG_") else None
