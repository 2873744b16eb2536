"""One kernel for all ranks of a process group: ``kernelreg.agree``."""

from __future__ import annotations

import logging
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, overload

from kernelreg.adapters import load_function
from kernelreg.agreement import Agreed, Agreement, Asked, Message, agree_on, told_ranks
from kernelreg.announce import say_once
from kernelreg.api import asked
from kernelreg.call import Call
from kernelreg.errors import AdapterError, ConfigurationError, KernelregError, NoBackendError, encodable
from kernelreg.meeting import group_table
from kernelreg.resolution import Resolution
from kernelreg.resolver import Decision
from kernelreg.session import Grounds, session
from kernelreg.together import JointDecision, JointResolution

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: Seconds that the ranks wait for each other: they start within seconds of each other, or one of them does not start.
SECONDS = 60.0


@overload
def agree(
    resolution_or_operation: JointResolution,
    group: ProcessGroup | None = None,
    *,
    timeout: float | timedelta = SECONDS,
    load: bool = False,
) -> JointResolution: ...
@overload
def agree(
    resolution_or_operation: Resolution | str = "gdn",
    group: ProcessGroup | None = None,
    *,
    timeout: float | timedelta = SECONDS,
    load: bool = False,
    **words: Any,
) -> Agreement: ...
def agree(
    resolution_or_operation: Resolution | JointResolution | str = "gdn",
    group: ProcessGroup | None = None,
    *,
    timeout: float | timedelta = SECONDS,
    load: bool = False,
    **words: Any,
) -> Agreement | JointResolution:
    """The best kernel that every rank of the group can run: the same on all, or an error on all, by the time limit.

    Every rank of the group calls it, as often and in the same order as the others. Each sends its verdict on every
    kernel, and why; each then makes the same choice from what all have sent. Nothing is exchanged on a GPU.

    Args:
        resolution_or_operation: what :func:`kernelreg.resolve` gave, or an operation with ``resolve``'s words; or what
            ``resolve_together`` gave, for the same form of the state on all ranks.
        group: a ``torch.distributed`` process group of any backend; the default one when not given.
        timeout: seconds (or a timedelta) until an error on every rank, where one has died, hangs or does not call.
        load: import the chosen kernel's adapter on every rank before agreeing on it; where that fails on one, all
            choose again without it. Without ``load``, :attr:`Agreement.function` raises on the rank where it fails.
        words: what :func:`kernelreg.resolve` takes beside an operation.

    Raises:
        NoBackendError: no kernel runs on every rank; the message has every rank's reasons.
        RanksTimeoutError: not every rank answered; names those.
        RanksError: no torch or no process group; ranks that ask for different operations, are forced to different
            choices, run different releases, or could not take part.
        ConfigurationError: an override or an argument names something unknown. The other ranks then get a RanksError.
    """
    limit = seconds_of("timeout", timeout)
    table = group_table(group)
    end = time.monotonic() + limit
    question: _Question | None = None
    while True:
        with table.taking_part(end):
            question = question.again() if question else _Question(resolution_or_operation, words)
            message = question.message(table.rank, load)
        agreed = agree_on(table.messages(message, end), table.rank)
        agreements = question.agreements(agreed)
        for each in agreements:
            if each.backend is None:
                raise NoBackendError(each.explain(), each)
        if not load:
            break
        with table.taking_part(end):
            loaded = _loads(agreements)
        if all(table.exchange(loaded, end, "whether the kernel loads")):
            break
    for decision, each in zip(agreed, agreements, strict=True):
        _announce(decision, first=table.place == 0)
        session.tell(each)
    return question.answer(agreements)


class _Question:
    """What this rank asks: calls, with what each is decided on; and the form of the answer."""

    def __init__(self, what: Resolution | JointResolution | str, words: dict[str, Any]) -> None:
        self._joint = what if isinstance(what, JointResolution) else None
        if isinstance(what, str):
            self._asked = [asked(what, **words)]
            return
        if words:
            raise ConfigurationError(f"{', '.join(words)}: a resolution says all of the call; give either it or these")
        if isinstance(what, JointResolution):
            self._asked = [_asked_of(each) for each in what.values()]
        elif isinstance(what, Resolution):
            self._asked = [_asked_of(what)]
        else:
            raise ConfigurationError(
                f"agree({what!r}); accepted: an operation's name, or what resolve() or resolve_together() gave"
            )

    def again(self) -> _Question:
        """The same, with what this process has found out since."""
        self._asked = [(session.grounds(grounds.facts, grounds.policy), call) for grounds, call in self._asked]
        return self

    def message(self, rank: int, load: bool) -> Message:
        """What the other ranks are to know."""
        state = (self._joint.state_dtype, self._joint.state_layout) if self._joint is not None else None
        return message_of(rank, self._asked, state=state, load=load)

    def agreements(self, agreed: Sequence[Agreed]) -> list[Agreement]:
        """The decisions with the means to load them."""
        return [Agreement(each, _load, grounds.facts) for each, (grounds, _) in zip(agreed, self._asked, strict=True)]

    def answer(self, agreements: list[Agreement]) -> Agreement | JointResolution:
        """The agreements in the form in which they were asked for."""
        if self._joint is None:
            return agreements[0]
        decision = JointDecision(
            state_layout=self._joint.state_layout,
            state_dtype=self._joint.state_dtype,
            decisions=tuple(each.decision for each in agreements),
            mismatches=self._joint.mismatches,
        )
        return JointResolution(decision, agreements)


def _asked_of(resolution: Resolution) -> tuple[Grounds, Call]:
    if resolution._facts is None:
        raise ConfigurationError("this resolution was read from data; give the operation and resolve()'s words instead")
    return session.grounds(resolution._facts, resolution.decision.policy), resolution.call


def message_of(
    rank: int,
    asked: Sequence[tuple[Grounds, Call]],
    *,
    state: tuple[str, str] | None = None,
    load: bool = False,
    trouble: Sequence[str] = (),
) -> Message:
    """What a rank tells the others of its machine and of these calls."""
    return Message(
        rank=rank,
        host=encodable(socket.gethostname()),
        sent=uuid.uuid4().hex,
        facts=asked[0][0].facts,
        asked=tuple(
            Asked(
                call=call,
                policy=each.policy,
                judged=tuple(each.judge(call)),
            )
            for each, call in asked
        ),
        state=state,
        load=load,
        trouble=tuple(map(encodable, trouble)),
    )


def _load(decision: Decision) -> tuple[Decision, Callable[..., Any]]:
    """The agreed kernel's callable, and no other: one that runs on this rank alone would leave the ranks apart.

    Raises:
        AdapterError: its adapter does not import.
    """
    row = session.registry().find(decision.backend or "", decision.operation, decision.kernel or "")
    if row is None:
        raise KernelregError(f"the backend {decision.backend} was taken out since the ranks agreed on it")
    try:
        return decision, load_function(*row)
    except AdapterError as error:
        session.rule_out(row[0].name, error)
        raise AdapterError(
            f"{error}; the ranks agreed on this kernel, so no other takes its place on this rank alone: "
            "agree again on all ranks, with load=True to try before",
            error.reason,
        ) from error


def _loads(agreements: Sequence[Agreement]) -> bytes:
    """Whether the agreed kernels' adapters import here: no byte where one does not."""
    try:
        for each in agreements:
            _ = each.function
    except KernelregError:
        return b""
    return b"yes"


def _announce(decision: Agreed, *, first: bool) -> None:
    """Log what was agreed, once; that ranks would choose apart is a warning, on the group's first rank."""
    chosen = f"{decision.backend} {decision.kernel}"
    everyone = told_ranks(each.rank for each in decision.ranks)
    apart = [each for each in decision.ranks if each.chosen != chosen]
    if not apart:
        say_once(logging.INFO, f"{decision.operation}: {everyone} agree on {chosen}")
        return
    alone = sorted({each.chosen for each in apart})
    why = [
        f"{each.backend} {each.kernel}: {'; '.join(map(str, each.reasons))}"
        for each in decision.candidates
        if f"{each.backend} {each.kernel}" in alone
    ]
    say_once(
        logging.WARNING if first else logging.INFO,
        f"{decision.operation}: {everyone} agree on {chosen}; {told_ranks(each.rank for each in apart)} would run "
        f"{' or '.join(alone)} alone ({' | '.join(why)})",
    )


def seconds_of(name: str, value: object) -> float:
    """A time limit as a person gives it.

    Raises:
        ConfigurationError: not a number of seconds or a timedelta above 0.
    """
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds <= threading.TIMEOUT_MAX:
        raise ConfigurationError(f"{name}={value!r}; accepted: seconds, more than 0")
    return float(seconds)
