"""What kernelreg says in the log of its decisions: once per distinct decision, and nothing at import."""

from __future__ import annotations

import logging
import sys

import msgspec

from kernelreg.lock import Binding, Pins
from kernelreg.machine.model import Facts
from kernelreg.profile import Evidence
from kernelreg.reasons import ReasonCode
from kernelreg.registry import Registry
from kernelreg.resolver import Candidate, Decision, ranks

logger = logging.getLogger("kernelreg")
#: Beyond this many distinct messages a process has a stranger problem than a repeated line.
_MEMORY = 10_000
_said: dict[str, object] = {}

#: Reasons that a repair of what is installed takes away. With any other the kernel would not run all the same.
_REPAIRABLE = frozenset(
    {
        ReasonCode.TORCH_VERSION,
        ReasonCode.CUDA_BUILD,
        ReasonCode.CUDA_VERSION,
        ReasonCode.DRIVER_VERSION,
        ReasonCode.PYTHON_VERSION,
        ReasonCode.PACKAGE_VERSION,
        ReasonCode.VERSION_UNKNOWN,
        ReasonCode.TOOL_MISSING,
        ReasonCode.TOOL_VERSION,
        ReasonCode.IMPORT_ERROR,
        ReasonCode.PROBE_ERROR,
        ReasonCode.KNOWN_BAD,
        ReasonCode.QUARANTINED,
    }
)


def set_level(level: str | None) -> None:
    """Apply ``KERNELREG_LOG``; where the program has set up no logging, the lines go to standard error."""
    if level is None:
        return
    logger.setLevel(level)
    if not logger.hasHandlers():
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)


def say_once(level: int, message: str) -> None:
    """Log a message unless this process has logged it already."""
    mine = object()
    # One step for two threads that say the same at once: the first one's mark stays.
    if len(_said) >= _MEMORY or _said.setdefault(message, mine) is not mine:
        return
    logger.log(level, "%s", message)


def forget() -> None:
    """Say everything anew."""
    _said.clear()


def announce(decision: Decision, registry: Registry, facts: Facts, evidence: Evidence | None = None) -> None:
    """Log a decision: INFO once, a WARNING for each better kernel that only its installation keeps away."""
    if logger.isEnabledFor(logging.INFO):
        say_once(logging.INFO, _summary(decision))
    if decision.backend is None:
        return
    # A backend's best row speaks for it: its others may be for releases that nobody should go back to. Of the chosen
    # backend, only those speak that failed.
    best = {each.backend: each for each in reversed(decision.candidates) if each.backend != decision.backend}
    failed = [each for each in decision.candidates if each.backend == decision.backend and _failed(each)]
    unusable = [
        each for each in (*best.values(), *failed) if each.status == "rejected" and _installed_but_unusable(each)
    ]
    places = ranks(registry, facts, decision.call, decision.policy, evidence) if unusable else {}
    chosen = places.get((decision.backend, decision.kernel or ""))
    for candidate in unusable:  # a backend may have been taken out since, and has no place then
        place = places.get((candidate.backend, candidate.kernel))
        if chosen is not None and place is not None and place < chosen:
            say_once(logging.WARNING, _warning(candidate, decision))
    logger.debug("%s", decision)


def _summary(decision: Decision) -> str:
    chosen = f"{decision.backend} {decision.kernel}" if decision.backend else "no kernel fits"
    others = [
        f"{each.backend} {each.kernel}: {each.reasons[0]}" for each in decision.candidates if each.status != "chosen"
    ]
    return f"{decision.operation} on {decision.device}: {chosen} (" + "; ".join(others or ["no other"]) + ")"


def _installed_but_unusable(candidate: Candidate) -> bool:
    return all(reason.code in _REPAIRABLE for reason in candidate.reasons)


def _failed(candidate: Candidate) -> bool:
    return any(reason.code == ReasonCode.QUARANTINED for reason in candidate.reasons)


def _warning(candidate: Candidate, decision: Decision) -> str:
    told = "; ".join(f"{each}" + (f" (fix: {each.fix})" if each.fix else "") for each in candidate.reasons)
    return (
        f"{decision.operation} on {decision.device} runs {decision.backend} {decision.kernel}: "
        f"{candidate.backend} {candidate.kernel} is installed and ranks higher, but cannot run: {told}"
    )


def announce_unused(decision: Decision, facts: Facts, evidence: Evidence | None, pins: Pins | None) -> None:
    """Log once that a profile or a lock file that was asked for says nothing of such calls."""
    call, policy = decision.call, decision.policy
    device = facts.device(call.device)
    if evidence is not None and policy.profile is not None and not evidence.speaks_of(device):
        card = device.description if device else "a device that is not there"
        where = f"{policy.origin.get('profile', 'profile')}={evidence.name}"
        measured = evidence.profile.setup.description
        say_once(logging.INFO, f"{where} was measured on {measured}: it does not rank on {call.device}, {card}")
    if pins is not None and decision.backend is not None and Binding(pins, call, facts, policy, ()).silent:
        where = f"{policy.origin.get('lock', 'lock')}={pins.name}"
        kind = msgspec.structs.replace(call, tokens=None, sequences=None)
        fix = f"python -m kernelreg lock --output {pins.name}, for a model of that shape"
        say_once(
            logging.WARNING,
            f"{where} pins nothing for {call.operation} calls like ({kind}) on {call.device}, so they are decided as "
            f"without it (fix: {fix})",
        )
