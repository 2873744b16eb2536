"""A decision and the means to call what was decided."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kernelreg.call import Call
from kernelreg.decoding import decode_json
from kernelreg.errors import ConfigurationError, KernelregError
from kernelreg.machine.model import Facts
from kernelreg.resolver import Candidate, Decision

#: Turns a decision into its callable, and gives the decision that holds afterwards.
Load = Callable[[Decision], tuple[Decision, Callable[..., Any]]]


class Resolution:
    """The chosen kernel and a verdict, with all reasons, for every other.

    Equal to another when both decided the same on the same grounds.
    """

    __slots__ = ("_facts", "_load", "_settled")

    def __init__(self, decision: Decision, load: Load | None = None, facts: Facts | None = None) -> None:
        #: The decision and its callable, put in place as one: no thread sees the one of another's load.
        self._settled: tuple[Decision, Callable[..., Any] | None] = (decision, None)
        self._load = load
        self._facts = facts

    @property
    def decision(self) -> Decision:
        """The decision as immutable data."""
        return self._settled[0]

    @property
    def operation(self) -> str:
        """The operation's canonical name."""
        return self.decision.operation

    @property
    def device(self) -> str:
        """The device as torch names it."""
        return self.decision.device

    @property
    def backend(self) -> str | None:
        """The chosen backend's name; None where nothing fits."""
        return self.decision.backend

    @property
    def kernel(self) -> str | None:
        """The chosen row's name; None where nothing fits."""
        return self.decision.kernel

    @property
    def call(self) -> Call:
        """What the call needs."""
        return self.decision.call

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Every kernel considered, best first."""
        return self.decision.candidates

    @property
    def function(self) -> Callable[..., Any]:
        """The chosen kernel with the operation's signature. Reading it imports the backend's adapter.

        Where that import fails, an automatic choice moves on to the next kernel that fits, says so once, and this
        resolution then tells of that one.

        Raises:
            NoBackendError: nothing fits, or the import failed and the policy allows no other.
        """
        decision, function = self._settled
        if function is None:
            if self._load is None:
                raise KernelregError("this resolution was read from data; call kernelreg.resolve to get a function")
            settled = self._load(decision)
            if self._settled[1] is None:
                self._settled = settled
            function = self._settled[1] or settled[1]
        return function

    def explain(self) -> str:
        """The decision as text for a person."""
        return explain(self.decision)

    def to_dict(self) -> dict[str, Any]:
        """The decision as plain data."""
        data: dict[str, Any] = msgspec.json.decode(self.to_json())
        return data

    def to_json(self) -> str:
        """The decision as JSON, which :meth:`from_json` reads back to an equal resolution."""
        return msgspec.json.encode(self.decision, order="deterministic").decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Resolution:
        """A resolution from :meth:`to_json`'s text.

        Raises:
            KernelregError: not such a text; names the key.
        """
        if not isinstance(text, (str, bytes)):
            raise ConfigurationError(f"from_json({text!r:.100}); accepted: the text that to_json gave")
        data = text.encode() if isinstance(text, str) else text
        return cls(decode_json(data, Decision, source="resolution", error=KernelregError))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Resolution) and self.decision == other.decision

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Callable[[str], Resolution], tuple[str]]:
        return Resolution.from_json, (self.to_json(),)  # the decision travels, a function of this process cannot

    def __repr__(self) -> str:
        chosen = f"{self.backend} {self.kernel}" if self.backend else "nothing fits"
        return f"<Resolution {self.operation} on {self.device}: {chosen}>"


def explain(decision: Decision) -> str:
    """A decision as text: what was asked, what was chosen, and each other kernel with all its reasons."""
    chosen = f"{decision.backend} {decision.kernel}" if decision.backend else "no kernel fits"
    lines = [f"{decision.operation} on {decision.device}: {chosen}", f"  call: {decision.call}"]
    for rows in _alike(decision.candidates):
        names = ", ".join(each.kernel for each in rows)
        lines.append(f"  {rows[0].status:8}  {rows[0].backend} {names}")
        for reason in rows[0].reasons:
            lines.append(f"            - {reason}")
            if reason.fix:
                lines.append(f"              fix: {reason.fix}")
    if not decision.candidates:
        lines.append("  no backend has a kernel for it")
    return "\n".join(lines)


def _alike(candidates: Sequence[Candidate]) -> list[list[Candidate]]:
    """Candidates in order, those of one backend with the same verdict together."""
    groups: dict[tuple[object, ...], list[Candidate]] = {}
    for candidate in candidates:
        groups.setdefault((candidate.backend, candidate.status, candidate.reasons), []).append(candidate)
    return list(groups.values())
