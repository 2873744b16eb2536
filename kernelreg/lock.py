"""A lock file: the decisions for a model's calls, pinned. What it does to a decision, and reading it strictly.

A pin speaks for calls of its kind, dtypes and head shape that use no more features than it names, within its spans of
tokens and sequences. What a call does not say is not tested. Of two pins that speak for a call, the first one holds.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from kernelreg._version import __version__
from kernelreg.call import Call
from kernelreg.decoding import ONE_LINE, read_json
from kernelreg.descriptor import Dtype, Span
from kernelreg.errors import ConfigurationError, unknown_name
from kernelreg.kinds import kind_features, told_kind
from kernelreg.machine.model import Facts
from kernelreg.machine.setup import Change, Setup
from kernelreg.ops import operation_named
from kernelreg.policy import Policy
from kernelreg.reasons import Reason, ReasonCode
from kernelreg.writing import write_whole

#: Some thousands of pins.
MAX_BYTES = 2 << 20
Count = Annotated[int, msgspec.Meta(ge=1, le=2**53)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=100, pattern=ONE_LINE)]
#: What a call has to have in common with a pin, where it says it.
EXACT = ("dtype", "gate_dtype", "state_dtype", "heads", "value_heads", "head_dim_k", "head_dim_v")
#: torch's place among a backend's versions: every adapter calls it.
TORCH = "torch"


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Pin(_Record, frozen=True, kw_only=True):
    """One decision.

    Attributes:
        features: all that a call may use for the pin to speak for it.
        tokens, sequences: the spans in which the decision is the same.
        backend, kernel: what was decided.
    """

    operation: Name
    dtype: Dtype
    gate_dtype: Dtype
    state_dtype: Dtype
    heads: Count
    value_heads: Count
    head_dim_k: Count
    head_dim_v: Count
    features: tuple[Name, ...]
    tokens: Span = Span()
    sequences: Span = Span()
    backend: Name
    kernel: Name

    def __post_init__(self) -> None:
        try:
            operation = operation_named(self.operation)
        except ConfigurationError as error:
            raise ValueError(str(error)) from None
        if self.operation != operation.name:
            raise ValueError(f"operation {self.operation!r}; accepted: its full name, {operation.name}")
        for feature in self.features:
            if feature not in operation.features:
                raise ValueError(unknown_name("feature", feature, operation.features))

    def speaks_for(self, call: Call) -> bool:
        """Whether it pins this call's kernel."""
        return (
            call.operation == self.operation
            and kind_features(call.features) == kind_features(self.features)
            and call.features.issubset(self.features)
            and all(getattr(call, name) in (None, getattr(self, name)) for name in EXACT)
            and self.tokens.holds(call.tokens)
            and (call.sequences is None or self.sequences.holds(call.sequences))
        )

    @property
    def calls(self) -> str:
        """For which calls, in a line."""
        shape = f"heads {self.heads} and {self.value_heads} of {self.head_dim_k}"
        shape += f" and {self.head_dim_v}" if self.head_dim_v != self.head_dim_k else ""
        sizes = [
            f"{span} {name}"
            for name, span in (("tokens", self.tokens), ("sequences", self.sequences))
            if span != Span()
        ]
        return ", ".join([self.operation, told_kind(self.features), self.dtype, shape, *sizes])


class Lock(_Record, frozen=True, kw_only=True):
    """A lock file.

    Attributes:
        kernelreg: the release that decided.
        models: whose calls they are, where they have names; ``tp`` over how many devices their heads are split.
        setup: what it was decided for. Another card's decisions it does not pin.
        versions: of each pinned backend, torch and the packages that it names; None where one was not installed.
    """

    schema: Literal[1] = 1
    kernelreg: Name = __version__
    models: tuple[Name, ...] = ()
    tp: tuple[Count, ...] = (1,)
    setup: Setup
    versions: dict[Name, dict[Name, str | None]] = {}
    pins: tuple[Pin, ...] = ()

    def to_json(self) -> str:
        """The text of a lock file: the same for the same decisions, a line a value, so that a diff tells."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the lock file, whole or not at all.

        Raises:
            ConfigurationError: it cannot be written; names it and the cause.
        """
        write_whole(path, self.to_json() + "\n", ConfigurationError)

    def changes(self, backend: str, facts: Facts) -> tuple[Change, ...]:
        """The backend's versions that are not what they were."""
        found = []
        for name, then in self.versions.get(backend, {}).items():
            now = (facts.torch.version if facts.torch else None) if name == TORCH else facts.packages.get(name)
            if then != now:
                found.append(Change(name, then, now))
        return tuple(found)


def load_lock(path: str | os.PathLike[str]) -> Lock:
    """Read a lock file.

    Raises:
        ConfigurationError: unreadable, not JSON, an unknown or missing key, a value out of range; names file and key.
    """
    return read_json(Path(path), Lock, ConfigurationError, limit=MAX_BYTES)


class Pins:
    """A lock file as the resolver asks it.

    Args:
        lock: what is pinned.
        name: what explanations call it, such as its path.
    """

    def __init__(self, lock: Lock, name: str) -> None:
        self.lock = lock
        self.name = name
        self._pins: dict[tuple[str, frozenset[str]], list[Pin]] = {}
        for pin in lock.pins:
            self._pins.setdefault((pin.operation, kind_features(pin.features)), []).append(pin)

    def pin(self, call: Call, facts: Facts) -> Pin | None:
        """The pin that speaks for the call, or None."""
        if not self.lock.setup.is_of(facts.device(call.device)):
            return None
        pins = self._pins.get((call.operation, kind_features(call.features)), [])
        return next((each for each in pins if each.speaks_for(call)), None)

    def edges(self, operation: str) -> tuple[set[int], set[int]]:
        """The numbers of tokens, and of sequences, at which another pin may begin to speak."""
        pins = [each for (name, _), those in self._pins.items() if name == operation for each in those]
        return _edges(each.tokens for each in pins), _edges(each.sequences for each in pins)


def _edges(spans: Iterable[Span]) -> set[int]:
    found: set[int] = set()
    for span in spans:
        found.add(span.min)
        found.update(() if span.max is None else (span.max + 1,))
    return found


class Binding:
    """What a lock file says of one call, under a policy: of each kernel, whether it may run.

    Stronger words leave it nothing to say: a backend that the policy forces, or a pinned one that it disables.
    A backend that the policy wishes for may run beside the pinned kernel, and ranks before it.

    Args:
        rows: the kernels there are for the operation.

    Attributes:
        pin: what is pinned for the call, or None.
    """

    def __init__(
        self, pins: Pins | None, call: Call, facts: Facts, policy: Policy, rows: Collection[tuple[str, str]]
    ) -> None:
        self.pin: Pin | None = None
        self._pins = pins
        self._facts = facts
        self._rows = rows
        self._wished = policy.prefer
        self._strict = policy.strict
        overruled = pins is None or call.operation in policy.backend
        if pins is not None and not overruled:
            pin = pins.pin(call, facts)
            overruled = pin is not None and pin.backend in policy.disable
            self.pin = None if overruled else pin
        self._speaks = not overruled
        self._origin = policy.origin.get("lock", "lock")

    @property
    def silent(self) -> bool:
        """Whether there is a lock file that could speak for the call, and pins nothing for it."""
        return self._speaks and self.pin is None

    def pinned(self, backend: str, kernel: str) -> bool:
        """Whether it is this kernel that is pinned."""
        return self.pin is not None and (self.pin.backend, self.pin.kernel) == (backend, kernel)

    def reasons(self, backend: str, kernel: str) -> list[Reason]:
        """Why the kernel may not run."""
        if self._pins is None or not self._speaks:
            return []
        if self.pin is None:
            if not self._strict or backend in self._wished:
                return []
            told = f"{self._pins.name} pins nothing for such calls, and strict allows no other"
            return [self._reason(told, f"python -m kernelreg lock --output {self._pins.name}")]
        if not self.pinned(backend, kernel):
            if backend in self._wished:
                return []
            there = (self.pin.backend, self.pin.kernel) in self._rows
            missing = "" if there else ", and there is no such kernel any more"
            return [self._reason(f"{self._pins.name} pins {self.pin.backend} {self.pin.kernel}{missing}", None)]
        return [
            Reason(
                code=ReasonCode.LOCKED,
                subject=change.field,
                required=f"{change.then or 'not installed'} (pinned in {self._pins.name})",
                actual=change.now or "not installed",
                fix=self._repair(change),
            )
            for change in self._pins.lock.changes(backend, self._facts)
        ]

    def _reason(self, actual: str, fix: str | None) -> Reason:
        return Reason(code=ReasonCode.LOCKED, subject=self._origin, actual=actual, fix=fix)

    def _repair(self, change: Change) -> str:
        if change.then is None:
            return f"pip uninstall {change.field}"
        return f'pip install "{change.field}=={change.then}"'
