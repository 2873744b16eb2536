"""One kernel for all ranks of a job: the decision, from what each rank says of itself.

Pure, like the resolver: every rank has the same messages before it, and so decides the same. How the messages get from
rank to rank is :mod:`kernelreg.ranks`' business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from kernelreg._version import __version__
from kernelreg.call import OPTIONS, Call
from kernelreg.decoding import NOT_JSON, decode_json
from kernelreg.errors import KernelregError, RanksError
from kernelreg.machine.model import Facts
from kernelreg.policy import Policy
from kernelreg.profile import Row
from kernelreg.reasons import Reason, ReasonCode, told_in_order
from kernelreg.resolution import Resolution, explain
from kernelreg.resolver import Candidate, Decision, Judged, Rank, choose


class Asked(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one rank asks of one operation, and its verdict on every kernel that it knows."""

    call: Call
    policy: Policy
    judged: tuple[Judged, ...]


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a rank tells all others.

    Attributes:
        kernelreg: the release that speaks; the ranks of a job have one.
        rank: as ``torch.distributed.get_rank()`` gives it.
        sent: told by this message alone, so that a rank knows its own again.
        state: dtype and layout of the state that the operations share, where they share one.
        load: whether the agreed kernel's adapter is imported before anyone relies on it.
        trouble: settings that are wrong on this rank.
    """

    kernelreg: str = __version__
    rank: int
    host: str
    sent: str
    facts: Facts
    asked: tuple[Asked, ...]
    state: tuple[str, str] | None = None
    load: bool = False
    trouble: tuple[str, ...] = ()


class Verdict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one rank would have decided alone.

    Attributes:
        device: as torch names it on that rank.
        facts: the fingerprint of its machine.
        backend, kernel: None where nothing fits.
        candidates: its verdict on every kernel that it knows, best first.
    """

    rank: int
    host: str
    device: str
    facts: str
    backend: str | None
    kernel: str | None
    candidates: tuple[Candidate, ...]

    @property
    def chosen(self) -> str:
        """The kernel, or that there is none."""
        return f"{self.backend} {self.kernel}" if self.backend else "nothing"


class Difference(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fact or a setting that is not the same on all ranks.

    Attributes:
        field: such as ``packages.flash-qla`` or ``driver.version``.
        values: each value with its ranks; None where there is none.
    """

    field: str
    values: tuple[tuple[str | None, tuple[int, ...]], ...]

    def __str__(self) -> str:
        told = "; ".join(
            f"{'none' if value is None else value or 'unknown'} on {told_ranks(ranks)}" for value, ranks in self.values
        )
        return f"{self.field}: {told}"


class Agreed(Decision, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decision that holds on every rank: a kernel is rejected for what any rank holds against it.

    Device, call, policy and facts are this rank's own.
    """

    ranks: tuple[Verdict, ...]
    differences: tuple[Difference, ...] = ()


class Agreement(Resolution):
    """The kernel that all ranks run, with every rank's reasons. Its :attr:`function` never stands in another kernel."""

    __slots__ = ()

    def __init__(
        self,
        decision: Agreed,
        load: Callable[[Decision], tuple[Decision, Callable[..., Any]]] | None = None,
        facts: Facts | None = None,
    ) -> None:
        super().__init__(decision, load, facts)

    @property
    def agreed(self) -> Agreed:
        """The decision as immutable data."""
        decision = self.decision
        assert isinstance(decision, Agreed)
        return decision

    @property
    def ranks(self) -> tuple[Verdict, ...]:
        """What each rank would have decided alone, by rank."""
        return self.agreed.ranks

    @property
    def differences(self) -> tuple[Difference, ...]:
        """What is not the same on all ranks: facts, settings, the call."""
        return self.agreed.differences

    def explain(self) -> str:
        """The decision as text for a person: the same on all ranks but for the device and the call."""
        return explain_agreed(self.agreed)

    @classmethod
    def from_json(cls, text: str | bytes) -> Agreement:
        """An agreement from :meth:`to_json`'s text.

        Raises:
            KernelregError: not such a text; names the key.
        """
        data = text.encode() if isinstance(text, str) else text
        return cls(decode_json(data, Agreed, source="agreement", error=KernelregError))

    def __reduce__(self) -> tuple[Callable[[str], Resolution], tuple[str]]:
        return Agreement.from_json, (self.to_json(),)

    def __repr__(self) -> str:
        chosen = f"{self.backend} {self.kernel}" if self.backend else "nothing fits"
        return f"<Agreement {self.operation} on {told_ranks(each.rank for each in self.ranks)}: {chosen}>"


def encode(message: Message) -> bytes:
    """A message as it travels."""
    return msgspec.json.encode(message)


class _Header(msgspec.Struct, frozen=True):
    """What every release can read of any other's message."""

    kernelreg: str
    rank: int


def decode(sent: Iterable[bytes]) -> list[Message]:
    """The messages of all ranks, by rank.

    Raises:
        RanksError: the ranks run several releases of kernelreg, whose kernels of one name need not be the same, or a
            message is none.
    """
    sent = list(sent)
    try:
        headers = [msgspec.json.decode(each, type=_Header) for each in sent]
        releases = grouped((each.kernelreg, each.rank) for each in headers)
        if len(releases) > 1:
            told = "; ".join(f"{release} on {told_ranks(ranks)}" for release, ranks in releases.items())
            others = [rank for ranks in list(releases.values())[1:] for rank in ranks]
            raise RanksError(f"the ranks run different releases of kernelreg: {told}; accepted: one", others)
        return sorted((msgspec.json.decode(each, type=Message) for each in sent), key=lambda each: each.rank)
    except NOT_JSON as error:  # two states of a repository call themselves by one number
        raise RanksError(
            f"a rank's message cannot be read: {error}; do all ranks run the same code of kernelreg {__version__}?"
        ) from error


def agree_on(messages: Sequence[Message], rank: int) -> tuple[Agreed, ...]:
    """The decision of each operation, as ``rank`` tells it. All ranks choose the same kernels.

    The kernel is the best of those that nothing is held against on any rank: first what the ranks wish for, then the
    speed that is sure on all, which is that of the rank where the kernel gains least.

    Raises:
        RanksError: the ranks do not ask for the same, or are forced to different choices; names ranks and settings.
    """
    messages = sorted(messages, key=lambda each: each.rank)
    _same(messages, "ask for different operations", lambda each: ", ".join(_operations(each)) or "none")
    _same(messages, "differ on the state that their operations share", lambda each: " ".join(each.state or ("none",)))
    _same(messages, "differ on load=", lambda each: f"load={each.load}")
    machines = machine_differences(messages)
    return tuple(_agreed(messages, place, rank, machines) for place in range(len(messages[0].asked)))


def _agreed(messages: Sequence[Message], place: int, rank: int, machines: tuple[Difference, ...]) -> Agreed:
    """The decision of the operation that is asked at this place."""
    asked = {each.rank: each.asked[place] for each in messages}
    own = asked[rank]
    _same_force(own.call.operation, asked)
    verdicts = [_verdict(each, asked[each.rank]) for each in messages]
    facts = next(each.facts for each in verdicts if each.rank == rank)
    decision = choose(_combined(asked), facts, own.call, own.policy)
    return Agreed(
        **{field: getattr(decision, field) for field in Decision.__struct_fields__},
        ranks=tuple(verdicts),
        differences=(*machines, *_differences({each: _told_call(said.call) for each, said in asked.items()})),
    )


def _verdict(message: Message, asked: Asked) -> Verdict:
    """What the rank would have decided alone."""
    alone = choose(asked.judged, message.facts.fingerprint, asked.call, asked.policy)
    return Verdict(
        rank=message.rank,
        host=message.host,
        device=alone.device,
        facts=alone.facts,
        backend=alone.backend,
        kernel=alone.kernel,
        candidates=alone.candidates,
    )


def _operations(message: Message) -> list[str]:
    return [each.call.operation for each in message.asked]


# -- the choice --------------------------------------------------------------------------------------------------------


def _combined(asked: Mapping[int, Asked]) -> list[Judged]:
    """Every kernel that any rank knows, with its place and its reasons on all ranks together."""
    known = {
        rank: {(place.backend, place.kernel): (place, reasons) for place, reasons in each.judged}
        for rank, each in asked.items()
    }
    rows = sorted({row for each in known.values() for row in each})
    return [
        (
            _worst([each[row][0] for each in known.values() if row in each]),
            _told_reasons({rank: each[row][1] if row in each else (_unknown(row),) for rank, each in known.items()}),
        )
        for row in rows
    ]


def _worst(places: Sequence[Rank]) -> Rank:
    """Where a kernel stands for ranks that wait for each other: the one where it gains least sets the pace."""
    slowest = max(places, key=lambda each: (each.unmeasured, each.slowness, each.source or ""))
    return Rank(
        wish=sum(each.wish for each in places),
        slow=any(each.slow for each in places),
        unmeasured=slowest.unmeasured,
        slowness=slowest.slowness,
        backend=slowest.backend,
        kernel=slowest.kernel,
        source=slowest.source,
        micros=slowest.micros,
        point=slowest.point,
        failed=slowest.failed,
    )


def _unknown(row: Row) -> Reason:
    backend, kernel = row
    return Reason(code=ReasonCode.PACKAGE_MISSING, subject=f"backend {backend}", required=f"with the kernel {kernel}")


def _told_reasons(reasons: Mapping[int, tuple[Reason, ...]]) -> tuple[Reason, ...]:
    """The reasons of all ranks; one that does not hold on all of them names those on which it does."""
    holding = grouped((reason, rank) for rank, each in sorted(reasons.items()) for reason in each)
    told = []
    for reason, ranks in holding.items():
        if len(ranks) == len(reasons):
            told.append(reason)
            continue
        where = told_ranks(ranks)
        told.append(
            Reason(
                code=reason.code,
                subject=where,
                actual=reason.sentence,
                fix=f"{reason.fix}  # on {where}" if reason.fix else None,
                url=reason.url,
            )
        )
    return told_in_order(told)


def _same_force(operation: str, asked: Mapping[int, Asked]) -> None:
    """Raise where one rank is forced to what another is not: no choice would be what both were told."""
    forced = {rank: _force(operation, each.policy) for rank, each in asked.items()}
    if len({choice for choice, _ in forced.values()}) > 1:
        told = grouped((text, rank) for rank, (_, text) in sorted(forced.items()))
        text = "; ".join(f"{told_ranks(ranks)}: {setting}" for setting, ranks in told.items())
        raise RanksError(
            f"{operation} is forced differently among the ranks: {text}; accepted: the same on all, or on none",
            [rank for rank, (choice, _) in forced.items() if choice is not None],
        )


def _force(operation: str, policy: Policy) -> tuple[str | None, str]:
    """What a policy leaves no choice about, and how to say so."""
    forced = policy.backend.get(operation)
    if forced is not None:
        return forced, f"{policy.origin.get(f'backend.{operation}', 'policy')} forces {forced}"
    if policy.strict and policy.prefer:
        wishes = ", ".join(policy.prefer)
        origins = " and ".join(dict.fromkeys(policy.origin.get(field, "policy") for field in ("prefer", "strict")))
        return wishes, f"{origins} allow {wishes} alone"
    return None, "nothing is forced"


def _same(messages: Sequence[Message], how: str, tell: Callable[[Message], str]) -> None:
    told = grouped((tell(each), each.rank) for each in messages)
    if len(told) > 1:
        text = "; ".join(f"{told_ranks(ranks)}: {said}" for said, ranks in told.items())
        others = [rank for ranks in list(told.values())[1:] for rank in ranks]
        raise RanksError(f"the ranks {how}: {text}; accepted: the same on all", others)


# -- how ranks differ --------------------------------------------------------------------------------------------------


def machine_differences(messages: Sequence[Message]) -> tuple[Difference, ...]:
    """How the ranks' machines and settings differ, field by field."""
    return _differences({each.rank: _told_machine(each) for each in sorted(messages, key=lambda each: each.rank)})


def _differences(told: Mapping[int, Mapping[str, str]]) -> tuple[Difference, ...]:
    """Each field that two ranks tell differently."""
    found = []
    for field in sorted({field for each in told.values() for field in each}):
        values = grouped((each.get(field), rank) for rank, each in told.items())
        if len(values) > 1:
            found.append(
                Difference(field=field, values=tuple((value, tuple(ranks)) for value, ranks in values.items()))
            )
    return tuple(found)


def _told_machine(message: Message) -> dict[str, str]:
    """A rank's machine and settings, field by field, without what tells one card from its like."""
    facts = message.facts
    told: dict[str, str] = {}
    for room, value in (("platform", facts.platform), ("torch", facts.torch), ("driver", facts.driver)):
        if value is not None:
            told |= {f"{room}.{name}": str(each) for name, each in msgspec.structs.asdict(value).items() if each}
    models = grouped((each.description, each.index) for each in facts.devices)
    told["devices"] = "; ".join(f"{len(those)} × {model}" for model, those in models.items()) or "no accelerator"
    for name, tool in facts.tools.items():
        told[f"tools.{name}"] = f"{tool.version or 'version unknown'} ({tool.path})"
    told |= {f"packages.{name}": version for name, version in facts.packages.items()}
    # kernelreg's own variables are told as the policy that they make.
    told |= {
        f"environment.{name}": f"{value!r}"
        for name, value in facts.environment.items()
        if not name.startswith("KERNELREG_")
    }
    problems = grouped((f"problems.{each.source}", each.error) for each in facts.problems)
    told |= {field: "; ".join(errors) for field, errors in problems.items()}
    if message.asked:
        told |= _told_policy(message.asked[0].policy)
        device = facts.device(message.asked[0].call.device)
        told["device"] = device.description if device else f"{message.asked[0].call.device}, which is not there"
    return told


def _told_policy(policy: Policy) -> dict[str, str]:
    told = {f"policy.backend.{operation}": name for operation, name in policy.backend.items()}
    told |= {f"policy.{field}": ", ".join(getattr(policy, field)) for field in ("prefer", "disable")}
    told["policy.strict"] = "yes" if policy.strict else ""
    told |= {f"policy.{field}": getattr(policy, field) or "" for field in ("profile", "lock")}
    return {
        field: f"{value} ({policy.origin.get(field.partition('.')[2], 'policy')})"
        for field, value in told.items()
        if value
    }


def _told_call(call: Call) -> dict[str, str]:
    said = {name: getattr(call, name) for name in OPTIONS}
    said["features"] = ", ".join(sorted(call.features))
    return {f"call.{name}": str(value) for name, value in said.items() if value not in (None, "")}


# -- for a person ------------------------------------------------------------------------------------------------------


def explain_agreed(decision: Agreed) -> str:
    """The decision as text, then what each rank would have run alone, and how the ranks differ."""
    lines = [explain(decision)]
    label = "alone"
    for chosen, ranks in grouped((each.chosen, each.rank) for each in decision.ranks).items():
        lines.append(f"  {label:8}  {told_ranks(ranks)}: {chosen}")
        label = ""
    label = "differ"
    for difference in decision.differences:
        lines.append(f"  {label:8}  {difference}")
        label = ""
    return "\n".join(lines)


def told_ranks(ranks: Iterable[int]) -> str:
    """``rank 3``, or ``ranks 0-2, 5``."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    several = len(spans) > 1 or any(first != last for first, last in spans)
    told = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"rank{'s' if several else ''} {told}"


def grouped(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, list[Any]]:
    """Each first with its seconds, in the order in which they come."""
    groups: dict[Any, list[Any]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups
