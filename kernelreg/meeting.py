"""Where ranks meet: a key-value store, and how they come to one end there whoever dies when.

A store needs no GPU and no backend, answers while a rank is missing, and can be given up at a time of one's own, which
no collective does with every backend. One key holds the outcome, and whoever is first writes it: either every rank's
message was there, or some rank gave up. So all ranks that still run come to the same end.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import msgspec

from kernelreg.agreement import Message, decode, encode, told_ranks
from kernelreg.announce import logger
from kernelreg.errors import ConfigurationError, KernelregError, RanksError, RanksTimeoutError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")

#: The longest pause between two looks at the store, in seconds.
_PAUSE = 0.05


class _Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """How an exchange ended: everyone's message was there, or some were not, or a rank withdrew."""

    missing: tuple[int, ...] = ()
    by: int = 0
    seconds: float = 0.0
    withdrew: int | None = None
    cause: str = ""


class Turns:
    """How many exchanges a rank has begun, in a store that may be older than the process group.

    The launcher's store outlives ``destroy_process_group``, and the next group starts where the last one ended: each
    rank notes its own number there.
    """

    def __init__(self) -> None:
        self._here = itertools.count()
        self._before: int | None = None

    def next(self) -> int:
        """The number of an exchange, among those of this group."""
        return next(self._here)

    def of_store(self, store: Store, place: int, here: int) -> int:
        """The number of that exchange among all in the store."""
        key = f"turns/{place}"
        if self._before is None:
            self._before = int(store.get(key)) if store.check([key]) else 0
        store.set(key, str(self._before + here + 1))
        return self._before + here


class Table:
    """A store that ranks meet in.

    Attributes:
        ranks: as the whole job numbers them, in the order of the group.
        place: this rank's, in the group.
    """

    def __init__(self, store: Callable[[], Store], ranks: Sequence[int], place: int, turns: Turns) -> None:
        self._store = store
        self.ranks = tuple(ranks)
        self.place = place
        self._turns = turns

    @property
    def rank(self) -> int:
        """This rank's number in the whole job."""
        return self.ranks[self.place]

    def messages(self, message: Message, end: float) -> list[Message]:
        """Every rank's message, by rank.

        Raises:
            RanksError: a rank withdrew, or did not answer by ``end``; on every rank alike.
        """
        sent = encode(message)
        received = self.exchange(sent, end, "their messages")
        if sent not in received:
            raise RanksError(
                "the store of the process group holds what another job agreed on; accepted: a store of its own "
                "(a new file, another port) for every job"
            )
        return decode(received)

    def withdraw(self, cause: str, end: float) -> None:
        """Tell the other ranks that this one cannot take part; where even that fails, they find out by themselves."""
        here = self._turns.next()
        outcome = _Outcome(withdrew=self.rank, cause=cause.encode("utf-8", "replace").decode())

        def tell() -> None:
            store = self._store()
            self._settle(store, self._turns.of_store(store, self.place, here), outcome)

        try:
            _within(tell, end)
        except KernelregError as error:
            logger.debug("could not tell the other ranks: %s", error)

    def leave(self, end: float) -> None:
        """Come back once the first rank has come this far, and the first once all have: then all may end.

        One that ends sooner may take the store along, or have the launcher end the others.
        """
        here = self._turns.next()

        def wait() -> None:
            store = self._store()
            turn = self._turns.of_store(store, self.place, here)
            store.set(f"{turn}/left/{self.place}", "yes")
            awaited = range(len(self.ranks)) if self.place == 0 else range(1)
            for _ in _pauses(end, len(self.ranks)):
                if store.check([f"{turn}/left/{place}" for place in awaited]):
                    return

        try:
            _within(wait, end)
        except KernelregError as error:
            logger.debug("did not see the other ranks leave: %s", error)

    @contextmanager
    def taking_part(self, end: float) -> Iterator[None]:
        """A block without which this rank cannot go on: where it is left by an error, the other ranks are told so."""
        try:
            yield
        except Exception as error:
            self.withdraw(f"{type(error).__name__}: {error}", end)
            raise
        except BaseException as error:  # Ctrl-C is not held up for long
            self.withdraw(type(error).__name__, min(end, time.monotonic() + 1))
            raise

    def exchange(self, sent: bytes, end: float, what: str) -> list[bytes]:
        """What every rank sent, in the order of the group.

        Args:
            what: is sent, in a few words: the same on all ranks.

        Raises:
            RanksError: a rank sent something else, withdrew, or did not answer by ``end``; on every rank alike.
        """
        here = self._turns.next()
        started = time.monotonic()
        # The last tenth of the time is for saying that it is over.
        inner = end - min(1.0, max(end - started, 0.0) / 10)

        def work() -> tuple[_Outcome, list[bytes]]:
            store = self._store()
            turn = self._turns.of_store(store, self.place, here)
            store.set(f"{turn}/{self.place}", what.encode() + b"\0" + sent)  # type: ignore[arg-type]  # the store takes any bytes
            if self.place == 0:
                self._collect(store, turn, inner)
            outcome = self._outcome(store, turn, inner, started)
            if outcome != _Outcome():
                return outcome, []
            return outcome, msgspec.msgpack.decode(zlib.decompress(store.get(f"{turn}/all")), type=list[bytes])

        outcome, received = _within(work, end)
        if outcome.withdrew is not None:
            raise RanksError(f"rank {outcome.withdrew} could not take part: {outcome.cause}", [outcome.withdrew])
        if outcome.missing:
            raise RanksTimeoutError(
                f"{told_ranks(outcome.missing)} of {told_ranks(self.ranks)} did not answer: "
                f"rank {outcome.by} waited {outcome.seconds:.1f} s",
                outcome.missing,
            )
        parts = [each.partition(b"\0") for each in received]
        others = [rank for rank, (said, _, _) in zip(self.ranks, parts, strict=True) if said != what.encode()]
        if others:  # it was interrupted in the middle of the last call, and calls again
            raise RanksError(f"{told_ranks(others)} did not send {what}, but another part of agree()", others)
        return [each for _, _, each in parts]

    def _collect(self, store: Store, turn: int, end: float) -> None:
        """The first rank puts everyone's messages into one, so that the others read one thing each."""
        places = range(len(self.ranks))
        waiting = list(places)
        for _ in _pauses(end, len(self.ranks)):
            if store.check([f"{turn}/outcome"]):  # a rank has given up
                return
            while waiting and store.check([f"{turn}/{waiting[0]}"]):
                waiting.pop(0)
            if not waiting:
                received = [store.get(f"{turn}/{place}") for place in places]
                store.set(f"{turn}/all", zlib.compress(msgspec.msgpack.encode(received)))  # type: ignore[arg-type]
                self._settle(store, turn, _Outcome())
                return

    def _outcome(self, store: Store, turn: int, end: float, started: float) -> _Outcome:
        """How it ended; where nobody has said so by the end, this rank says who is missing."""
        key = f"{turn}/outcome"
        for _ in _pauses(end, len(self.ranks)):
            if store.check([key]):
                return msgspec.json.decode(store.get(key), type=_Outcome)
        missing = [rank for place, rank in enumerate(self.ranks) if not store.check([f"{turn}/{place}"])]
        return self._settle(
            store,
            turn,
            _Outcome(
                missing=tuple(missing or self.ranks[:1]),  # all are there, and the first did not put them together
                by=self.rank,
                seconds=time.monotonic() - started,
            ),
        )

    @staticmethod
    def _settle(store: Store, turn: int, outcome: _Outcome) -> _Outcome:
        """Write the outcome unless there is one; gives the one that holds."""
        text = msgspec.json.encode(outcome).decode()
        return msgspec.json.decode(store.compare_set(f"{turn}/outcome", "", text), type=_Outcome)


def _pauses(end: float, size: int) -> Iterator[None]:
    """Moments to look at the store, ever further apart, until the end. Many ranks look less often."""
    pause, longest = 0.001, max(_PAUSE, size * 1e-4)
    yield
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(pause, left))
        pause = min(pause * 1.5, longest)
        yield


def _within(work: Callable[[], T], end: float) -> T:
    """What the work gives, by the end.

    It runs in a thread that is left behind where the process that keeps the store hangs: the store's own calls would
    wait for it for minutes, and Ctrl-C would not reach them.

    Raises:
        RanksError: the store failed, or did not answer by the end.
    """
    done = threading.Event()
    result: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            result.append(work())
        except BaseException as error:  # told where it is waited for
            failed.append(error)
        done.set()

    threading.Thread(target=run, name="kernelreg-ranks", daemon=True).start()
    done.wait(max(end - time.monotonic(), 0.0))
    if result:
        return result[0]
    keeper = "the process that keeps it, most often rank 0's or the launcher,"
    if failed:
        if isinstance(failed[0], KernelregError):
            raise failed[0]
        text = (str(failed[0]).strip().splitlines() or [type(failed[0]).__name__])[0]
        raise RanksError(f"the ranks' store failed: {text}; {keeper} may have ended") from failed[0]
    raise RanksTimeoutError(f"the ranks' store does not answer: {keeper} hangs or cannot be reached")


_turns: WeakKeyDictionary[Any, Turns] = WeakKeyDictionary()


def group_table(group: object) -> Table:
    """Where the ranks of a process group meet.

    Raises:
        RanksError: no torch, no process group, or not one that this rank is in.
    """
    dist = _torch_distributed()
    if not dist.is_initialized():
        raise RanksError("there is no process group yet; fix: torch.distributed.init_process_group() before agree()")
    chosen = dist.group.WORLD if group is None else group
    if chosen is dist.GroupMember.NON_GROUP_MEMBER:
        raise RanksError("this rank is not in the group; accepted: calls on the group's own ranks alone")
    if not isinstance(chosen, dist.ProcessGroup):
        hint = "; fix: its get_group()" if hasattr(chosen, "get_group") else ""
        raise RanksError(f"group={chosen!r}; accepted: a torch.distributed process group, or None{hint}")
    try:
        ranks, place = dist.get_process_group_ranks(chosen), dist.get_rank(chosen)
        # torch's public name for it is younger than the oldest torch that this project takes.
        older = dist.distributed_c10d._get_process_group_store
        store = chosen.get_group_store() if hasattr(chosen, "get_group_store") else older(chosen)
    except Exception as error:  # a group that was destroyed, or of a backend without a store
        raise RanksError(f"the group cannot be used: {type(error).__name__}: {error}") from error
    prefixed = dist.PrefixStore("kernelreg", store)
    return Table(lambda: prefixed, ranks, place, _turns.setdefault(chosen, Turns()))


def _torch_distributed() -> Any:
    """The module; untyped, since stores are public in its documentation and not in its types."""
    try:
        import torch.distributed as dist
    except Exception as error:  # a torch that is broken says so in many ways
        cause = f"{type(error).__name__}: {error}"
        raise RanksError(f"ranks meet through torch, which cannot be imported: {cause}") from error
    if not dist.is_available():
        raise RanksError("ranks meet through torch.distributed, which this torch was built without")
    return dist


def launched_table(seconds: float) -> Table:
    """Where the ranks of a job meet that torchrun started, without a process group.

    Raises:
        ConfigurationError: torchrun did not start this process.
        RanksError: no torch.
    """
    said = {name: os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    try:
        rank, size = int(said["RANK"]), int(said["WORLD_SIZE"])
    except ValueError:
        rank, size = -1, 0
    if not 0 <= rank < size or not all(said.values()):
        raise ConfigurationError(
            "no torchrun started this process; fix: torchrun --nproc-per-node=8 -m kernelreg doctor --ranks"
        )
    dist = _torch_distributed()
    met: list[Store] = []

    def meet() -> Store:
        if not met:
            store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=seconds)))
            met.append(dist.PrefixStore("kernelreg", store))
        return met[0]

    return Table(meet, range(size), rank, Turns())
