"""Descriptors against what the installed libraries say of themselves: limits that are too wide or too narrow by now.

The same module is the parent's side (:func:`check`) and the child's (:func:`main`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from kernelreg.asking import NoAnswerError, ask, reply
from kernelreg.call import make_call
from kernelreg.claims import Claim, Unasked, unasked
from kernelreg.descriptor import full
from kernelreg.errors import AdapterError, KernelregError
from kernelreg.machine.model import Device, Facts
from kernelreg.policy import Policy
from kernelreg.reasons import CALL_CODES, Reason, ReasonCode
from kernelreg.registry import Backend, Registry
from kernelreg.resolver import Candidate, closest_row, decide

#: Seconds for one library: flash_qla is imported once for each target.
CLAIMS_SECONDS = 180.0

#: What a claim can contradict. The build of torch, the driver and the tools are this machine's, not the library's.
_COMPARED = CALL_CODES | {
    ReasonCode.DEVICE_TYPE,
    ReasonCode.COMPUTE_CAPABILITY,
    ReasonCode.PACKAGE_VERSION,
    ReasonCode.VERSION_UNKNOWN,
}


class Stale(msgspec.Struct, frozen=True, kw_only=True):
    """A limit that the library contradicts.

    Attributes:
        limit: ``too wide``: a row takes what the library refuses. ``too narrow``: no row takes what the library does.
        kernels: the rows that take it, or the row that comes closest.
        reasons: what that row has against it.
    """

    limit: Literal["too wide", "too narrow"]
    claim: Claim
    kernels: tuple[str, ...]
    reasons: tuple[Reason, ...] = ()


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """A backend's descriptor and its library.

    Attributes:
        packages: the versions that were asked.
        agreed: how many answers agree with the descriptor.
        unasked: what could not be asked, and why.
    """

    backend: str
    packages: dict[str, str] = {}
    agreed: int = 0
    stale: tuple[Stale, ...] = ()
    unasked: tuple[Unasked, ...] = ()


class _Question(msgspec.Struct, frozen=True, kw_only=True):
    module: str


class _Answer(msgspec.Struct, frozen=True, kw_only=True):
    said: tuple[Claim | Unasked, ...]


def check(backend: Backend, facts: Facts, limit: float = CLAIMS_SECONDS) -> Checked | None:
    """Ask the backend's library in a child process and compare; None where the backend has nothing to ask."""
    if backend.descriptor.claims is None:
        return None
    missing = _missing(backend, facts)
    if missing:
        said: tuple[Claim | Unasked, ...] = (Unasked(asked=backend.name, cause=f"not installed: {', '.join(missing)}"),)
    else:
        said = listen(backend.descriptor.claims, limit)
    return compare(backend, facts, said)


def listen(module: str, limit: float = CLAIMS_SECONDS) -> tuple[Claim | Unasked, ...]:
    """What a claims module says, in a child process."""
    try:
        answer, _ = ask(__name__, _Question(module=module), _Answer, limit)
    except NoAnswerError as error:
        return (Unasked(asked=module, cause=str(error)),)
    return answer.said


def compare(backend: Backend, facts: Facts, said: Iterable[Claim | Unasked]) -> Checked:
    """The descriptor's word on each claim against the library's, with what is installed."""
    packages = {name: facts.packages[name] for name in sorted(backend.descriptor.packages) if name in facts.packages}
    agreed, stale, lost = 0, [], []
    for each in said:
        if isinstance(each, Unasked):
            lost.append(each)
            continue
        try:
            found = _contradiction(backend, facts, each)
        except KernelregError as error:  # a claim that speaks of an operation, dtype or feature that there is not
            lost.append(Unasked(asked=each.asked, cause=str(error)))
            continue
        agreed += found is None
        stale += [found] if found is not None else []
    return Checked(
        backend=backend.name, packages=packages, agreed=agreed, stale=tuple(stale), unasked=tuple(dict.fromkeys(lost))
    )


def _contradiction(backend: Backend, facts: Facts, claim: Claim) -> Stale | None:
    rows = _judged(backend, facts, claim)
    taking = tuple(row.kernel for row in rows if not row.reasons)
    if taking and not claim.takes:
        return Stale(limit="too wide", claim=claim, kernels=taking)
    # A fault that its descriptor knows of is one that the library need not: it takes the call, and is wrong.
    faulty = any({each.code for each in row.reasons} == {ReasonCode.KNOWN_BAD} for row in rows)
    closest = closest_row(rows, backend.name)
    if claim.takes and not taking and not faulty:
        reasons = closest.reasons if closest is not None else ()
        return Stale(limit="too narrow", claim=claim, kernels=(closest.kernel,) if closest else (), reasons=reasons)
    return None


def _judged(backend: Backend, facts: Facts, claim: Claim) -> list[Candidate]:
    """The rows, with those of the reasons against such a call on such a device that the claim speaks of."""
    device = Device(index=0, type=claim.device, compute_capability=claim.compute_capability)
    options = {name: getattr(claim, name) for name in ("dtype", "head_dim_k", "head_dim_v", "features")}
    call = make_call(claim.operation, device.torch_name, **options)
    there = msgspec.structs.replace(facts, devices=(device,))
    compared = _COMPARED
    if claim.compute_capability is None:  # of no card in particular: neither what cards a row needs, nor their faults
        compared = compared - {ReasonCode.COMPUTE_CAPABILITY, ReasonCode.KNOWN_BAD}
    return [
        msgspec.structs.replace(row, reasons=tuple(each for each in row.reasons if each.code in compared))
        for row in decide(Registry((backend,)), there, call, Policy()).candidates
        if not claim.kernels or row.kernel in claim.kernels
    ]


def _missing(backend: Backend, facts: Facts) -> list[str]:
    """The packages of the backend's own table that are not installed, under any of their names."""
    rules = full(backend.descriptor.requires.packages).items()
    return [name for name, rule in rules if not any(each in facts.packages for each in (name, *rule.also))]


def main() -> int:
    """The child's side."""
    return reply(_Question, _asked)


def _asked(question: _Question) -> _Answer:
    from kernelreg.adapters import import_function

    found: list[Claim | Unasked] = []
    try:
        for each in import_function(question.module, "claims")():
            if not isinstance(each, (Claim, Unasked)):
                raise TypeError(f"claims() gave a {type(each).__name__}, neither Claim nor Unasked")
            found.append(each)
    except AdapterError as error:
        found.append(Unasked(asked=question.module, cause=error.reason.actual or str(error)))
    except BaseException as error:  # what was said before it still holds
        found.append(unasked(question.module, error))
    return _Answer(said=tuple(found))
