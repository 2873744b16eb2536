"""Operations that hand a state from one to the other: the best kernels that agree on its layout and dtype.

Pure, like the resolver: each operation is decided once for every form that the state may have, and the forms compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import msgspec

from kernelreg.call import Call
from kernelreg.findings import Finding
from kernelreg.lock import Pins
from kernelreg.machine.model import Facts
from kernelreg.ops import operation_named
from kernelreg.policy import Policy
from kernelreg.profile import Evidence, Row
from kernelreg.reasons import Reason, ReasonCode
from kernelreg.registry import Registry
from kernelreg.resolution import Resolution
from kernelreg.resolver import Decision, Rank, decide, ranks

#: The forms a state may have, the better first where kernels rank alike: float32 is not given up for speed.
DTYPES = ("float32", "bfloat16")
LAYOUTS = ("k-first", "v-first")
_SHAPES = {"k-first": "[K, V]", "v-first": "[V, K]"}

_Form = tuple[str, str]


class Mismatch(msgspec.Struct, frozen=True, kw_only=True):
    """Kernels that could each run, but not on one state.

    Attributes:
        kernels: (operation, backend, kernel) of each.
        reason: code ``layout`` or ``dtype``; what one needs of the state, and the other.
    """

    kernels: tuple[tuple[str, str, str], ...]
    reason: Reason

    def __str__(self) -> str:
        names = " with ".join(f"{backend} {kernel} ({operation})" for operation, backend, kernel in self.kernels)
        return f"{names}: {self.reason}"


class JointResolution(Mapping[str, Resolution]):
    """Each operation's resolution, by name (or alias), and the form of the state that they share.

    A name that is not there raises :class:`~kernelreg.errors.UnknownOperationError`, a KeyError.

    Attributes:
        state_layout: ``k-first`` or ``v-first``.
        state_dtype: its dtype's name.
        mismatches: pairs of kernels that could each run, but not on one state.
    """

    def __init__(self, decision: JointDecision, resolutions: Iterable[Resolution]) -> None:
        self.state_layout = decision.state_layout
        self.state_dtype = decision.state_dtype
        self.mismatches = decision.mismatches
        self._resolutions = {each.operation: each for each in resolutions}

    @property
    def state_v_first(self) -> bool:
        """The contract's argument of that name."""
        return self.state_layout == "v-first"

    def __getitem__(self, operation: str) -> Resolution:
        return self._resolutions[operation_named(operation).name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._resolutions)

    def __len__(self) -> int:
        return len(self._resolutions)

    def explain(self) -> str:
        """The decisions as text for a person, and the pairs that no form of the state suits."""
        lines = [f"states: {self.state_dtype}, {_SHAPES[self.state_layout]} ({self.state_layout})"]
        lines += [each.explain() for each in self.values()]
        if self.mismatches:
            lines.append("not on one state:")
            lines += [f"  {each}" for each in self.mismatches]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The decisions as plain data."""
        return {
            "schema": 1,
            "state_layout": self.state_layout,
            "state_dtype": self.state_dtype,
            "resolutions": {name: each.to_dict() for name, each in self.items()},
            "mismatches": msgspec.to_builtins(self.mismatches),
        }

    def __repr__(self) -> str:
        chosen = ", ".join(f"{name}: {each.backend} {each.kernel}" for name, each in self.items())
        return f"<JointResolution {self.state_dtype} {self.state_layout}; {chosen}>"


class JointDecision(msgspec.Struct, frozen=True, kw_only=True):
    """The decision of each operation on the state's best form, and the pairs that no form suits.

    Attributes:
        state_layout: ``k-first`` or ``v-first``.
        state_dtype: its dtype's name.
        decisions: one for each operation, in the order in which they were given.
        mismatches: the better pairs first.
    """

    state_layout: str
    state_dtype: str
    decisions: tuple[Decision, ...]
    mismatches: tuple[Mismatch, ...]


def decide_together(
    registry: Registry,
    facts: Facts,
    calls: Sequence[Call],
    policy: Policy,
    ruled_out: Mapping[str, Reason] | None = None,
    findings: Sequence[Finding] = (),
    evidence: Evidence | None = None,
    pins: Pins | None = None,
) -> JointDecision:
    """Choose the layout and dtype of the state on which the operations' kernels are best, taken together.

    A form for which the lock file speaks comes before one for which it does not.

    Args:
        registry, facts, policy, ruled_out, findings, evidence, pins: as the resolver takes them.
        calls: one for each operation. Where one says the state's dtype or layout, that is not chosen any more.
    """
    forms = list(product(_dtypes(calls), _layouts(calls)))
    decided = {
        form: tuple(
            decide(registry, facts, _formed(call, form), policy, ruled_out, findings, evidence, pins) for call in calls
        )
        for form in forms
    }

    def badness(form: _Form) -> tuple[bool, int, int, int, bool, bool, float]:
        places = [_best(registry, facts, each, evidence) for each in decided[form]]
        known = [each for each in places if each is not None]
        slowness = 1.0
        for each in known:
            slowness /= max(-each.slowness, 1e-9)
        return (
            len(known) < len(places),
            sum(each.wish for each in known),
            sum(pins is not None and pins.pin(each.call, facts) is None for each in decided[form]),
            DTYPES.index(form[0]) if form[0] in DTYPES else 0,
            any(each.slow for each in known),
            any(each.unmeasured for each in known),
            slowness,
        )

    best = min(forms, key=badness)
    return JointDecision(
        state_dtype=best[0],
        state_layout=best[1],
        decisions=decided[best],
        mismatches=tuple(_mismatches(decided)),
    )


def _dtypes(calls: Iterable[Call]) -> tuple[str, ...]:
    said = next((call.state_dtype for call in calls if call.state_dtype is not None), None)
    if said is None and any(call.dtype == "float64" for call in calls):
        said = "float64"
    return DTYPES if said is None else (said,)


def _layouts(calls: Iterable[Call]) -> tuple[str, ...]:
    return ("v-first",) if any("state-v-first" in call.features for call in calls) else LAYOUTS


def _formed(call: Call, form: _Form) -> Call:
    dtype, layout = form
    features = call.features | ({"state-v-first"} if layout == "v-first" else set())
    return operation_named(call.operation).normalise(
        msgspec.structs.replace(call, state_dtype=dtype, features=features)
    )


def _best(registry: Registry, facts: Facts, decision: Decision, evidence: Evidence | None) -> Rank | None:
    places = ranks(registry, facts, decision.call, decision.policy, evidence)
    return places.get((decision.backend or "", decision.kernel or ""))


def _mismatches(decided: Mapping[_Form, tuple[Decision, ...]]) -> Iterable[Mismatch]:
    """Every pair of kernels of two operations of which each runs on some form, and both on none."""
    suits = {column[0].operation: _suits(column, list(decided)) for column in zip(*decided.values(), strict=True)}
    for first, second in combinations(suits, 2):
        for (row, forms), (other, others) in product(suits[first].items(), suits[second].items()):
            if forms.isdisjoint(others):
                names = ((first, *row), (second, *other))
                yield Mismatch(kernels=names, reason=_mismatch_reason(row, forms, other, others))


def _suits(decisions: Sequence[Decision], forms: Sequence[_Form]) -> dict[Row, set[_Form]]:
    """Each kernel that runs on some form, the better ones first, with the forms."""
    found: dict[Row, set[_Form]] = {}
    for form, decision in zip(forms, decisions, strict=True):
        for each in decision.candidates:
            if each.accepted:
                found.setdefault((each.backend, each.kernel), set()).add(form)
    return found


def _mismatch_reason(row: Row, forms: set[_Form], other: Row, others: set[_Form]) -> Reason:
    layouts = {layout for _, layout in forms}
    code = ReasonCode.LAYOUT if layouts.isdisjoint(layout for _, layout in others) else ReasonCode.DTYPE
    return Reason(
        code=code,
        subject="state",
        required=f"{_told(forms)} for {row[0]} {row[1]}",
        actual=f"{_told(others)} for {other[0]} {other[1]}",
    )


def _told(forms: set[_Form]) -> str:
    return " or ".join(sorted(f"{dtype} {layout}" for dtype, layout in forms))
