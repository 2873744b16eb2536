"""Jobs of several gloo processes on one CPU, for tests: forked from a process that has imported torch already."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch.distributed as dist

import kernelreg
from kernelreg import ranks
from kernelreg.meeting import Table
from tests.machines import FACTS

#: Seconds until a test gives a process up: far more than any limit that it is to keep.
PATIENCE = 120
stores: Any = dist  # its types leave out what its documentation has
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.gloo_ranks"])


class Answer(NamedTuple):
    """What a rank's work came to: its value, or the error's type, text and ranks."""

    value: Any = None
    error: str | None = None
    text: str = ""
    ranks: tuple[int, ...] = ()


#: What a rank runs: its number and the number of ranks, to something that pickles.
Work = Callable[[int, int], Any]


def run_job(size: int, work: Work, *, keeper: int | None = None, stops: bool = False) -> dict[int, Answer]:
    """What each rank answered; a rank that died has no answer. No rank is left running.

    Args:
        size: how many processes.
        work: what each runs once the process group is there; importable by name.
        keeper: the rank that keeps the store; this process when None.
        stops: a rank that stops itself is not waited for.
    """
    store = stores.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if keeper is None else None
    port = store.port if store is not None else _free_port()
    pipes: dict[int, Connection] = {}
    processes: list[Any] = []
    for rank in range(size):
        ours, theirs = _CONTEXT.Pipe(duplex=False)
        process = _CONTEXT.Process(target=_run, args=(rank, size, port, keeper, work, theirs), daemon=True)
        process.start()
        theirs.close()
        pipes[rank] = ours
        processes.append(process)
    try:
        answers = {}
        for rank, pipe in sorted(pipes.items(), key=lambda each: (stops and each[0] == keeper, each[0])):
            if stops and rank == keeper:
                continue
            try:
                assert pipe.poll(PATIENCE), f"rank {rank} neither answered nor died"
                answers[rank] = pipe.recv()
            except EOFError:  # it died
                continue
        return answers
    finally:
        for process in processes:
            process.kill()
            process.join()


def _free_port() -> int:
    with socket.socket() as each:
        each.bind(("127.0.0.1", 0))
        port: int = each.getsockname()[1]
        return port


def _run(rank: int, size: int, port: int, keeper: int | None, work: Work, pipe: Connection) -> None:
    for name in [name for name in os.environ if name.startswith("KERNELREG_")]:
        del os.environ[name]
    store = stores.TCPStore("127.0.0.1", port, is_master=rank == keeper, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    pipe.send(attempt(work, rank, size))
    store.set(f"answered/{rank}", "yes")
    if keeper is not None and rank == keeper:  # the others may still be reading from it
        time.sleep(PATIENCE)


def attempt(work: Work, rank: int, size: int) -> Answer:
    """The work's value or its error."""
    try:
        return Answer(value=work(rank, size))
    except kernelreg.KernelregError as error:
        return Answer(error=type(error).__name__, text=str(error), ranks=getattr(error, "ranks", ()))


# -- what ranks do -----------------------------------------------------------------------------------------------------


def _told(agreement: kernelreg.Agreement) -> dict[str, Any]:
    return {
        "chosen": (agreement.backend, agreement.kernel),
        "explanation": agreement.explain(),
        "data": agreement.to_dict(),
    }


class OnMachines:
    """Agree, each rank on its own sample machine, from a facts file that the environment names."""

    def __init__(self, default: str, others: Mapping[int, str] | None = None, limit: float = PATIENCE) -> None:
        self.machines = (default, dict(others or {}))
        self.limit = limit

    def __call__(self, rank: int, size: int) -> dict[str, Any]:
        default, others = self.machines
        name = others.get(rank, default)
        os.environ["KERNELREG_FACTS"] = name if os.path.isabs(name) else os.fspath(FACTS / f"{name}.json")  # noqa: PTH117
        return _told(kernelreg.agree("gdn.chunk", timeout=self.limit))


class Absent:
    """One rank is not there when the others agree.

    Attributes:
        how: ``killed`` or ``stopped`` before it has said anything, ``killed late`` after its message, or ``away`` until
            the others have given up.
    """

    def __init__(self, absent: int, how: str, limit: float = 2.0) -> None:
        self.absent, self.how, self.limit = absent, how, limit

    def __call__(self, rank: int, size: int) -> Any:
        if self.how == "away":
            return self._away(rank, size)
        if rank == self.absent:
            self._die_in_agree()
        return self._agree(rank, size)

    def _agree(self, rank: int, size: int) -> Answer:
        return attempt(lambda rank, size: _told(kernelreg.agree("gdn.chunk", timeout=self.limit)), rank, size)

    def _away(self, rank: int, size: int) -> Any:
        store = stores.distributed_c10d._get_default_store()
        if rank == self.absent:
            store.wait([f"gave-up/{other}" for other in range(size) if other != rank])
        first = self._agree(rank, size)
        store.set(f"gave-up/{rank}", "yes")
        return first, _told(kernelreg.agree("gdn.chunk", timeout=PATIENCE))

    def _die_in_agree(self) -> None:
        def die(*_: object) -> None:
            os.kill(os.getpid(), signal.SIGSTOP if self.how == "stopped" else signal.SIGKILL)

        late = "_outcome" if self.absent else "_collect"  # what follows a rank's message
        setattr(Table, late if self.how == "killed late" else "exchange", die)


def wrong_setting(rank: int, size: int) -> Any:
    """Rank 1 has a name in its environment that no backend has."""
    if rank == 1:
        os.environ["KERNELREG_BACKEND"] = "flaa"
    return _told(kernelreg.agree("gdn.chunk", timeout=PATIENCE))


def forced_differently(rank: int, size: int) -> Any:
    """Rank 2 is forced."""
    if rank == 2:
        os.environ["KERNELREG_BACKEND"] = "torch"
    return _told(kernelreg.agree("gdn.chunk", timeout=PATIENCE))


def nothing_in_common(rank: int, size: int) -> Any:
    """Each rank disables what the other can run."""
    os.environ["KERNELREG_DISABLE"] = "torch" if rank else "fla,flash_qla,flashinfer"
    return _told(kernelreg.agree("gdn.chunk", facts=FACTS / "h200.json", timeout=PATIENCE))


def in_groups(rank: int, size: int) -> Any:
    """Ranks 1 and 3 agree in a group of theirs; the others ask for it and are refused; then all agree."""
    group: Any = dist.new_group([1, 3])
    machine = "a100-ngc" if rank == 3 else "h200"
    own = attempt(
        lambda rank, size: _told(kernelreg.agree("gdn", group, facts=FACTS / f"{machine}.json", timeout=PATIENCE)),
        rank,
        size,
    )
    return own, _told(kernelreg.agree(kernelreg.resolve("gdn", facts=FACTS / "h200.json"), timeout=PATIENCE))


def pair(rank: int, size: int) -> Any:
    """Prefill and decode together; rank 0 then asks for another form of the state."""
    facts = FACTS / f"{'a100-ngc' if rank else 'h200'}.json"
    both = kernelreg.agree(kernelreg.resolve_together(facts=facts, dtype="bfloat16"), timeout=PATIENCE)
    chosen = {name: (each.backend, each.kernel, len(each.to_dict()["ranks"])) for name, each in both.items()}
    form: dict[str, Any] = {} if rank else {"state_dtype": "bfloat16"}
    other = kernelreg.resolve_together(facts=facts, dtype="bfloat16", **form)
    return (
        (chosen, both.state_dtype, both.state_layout, both.explain()),
        attempt(lambda rank, size: kernelreg.agree(other, timeout=PATIENCE), rank, size),
    )


class Loading:
    """A backend that is best everywhere, and whose adapter does not import on rank 1."""

    def __init__(self, site: str) -> None:
        self.site = site

    def __call__(self, rank: int, size: int) -> Any:
        import sys

        sys.path.insert(0, self.site)
        os.environ["SOME_RANK"] = str(rank)
        kernel = {
            "operation": "gdn.chunk",
            "name": "only",
            "function": "run",
            "preference": [{"speedup": 900, "source": "made up for a test"}],
        }
        kernelreg.register({"schema": 1, "name": "frail", "adapter": "frail_adapter", "kernel": [kernel]})
        facts = FACTS / "cpu-only.json"
        late = kernelreg.agree("gdn", facts=facts, timeout=PATIENCE)
        loaded = attempt(lambda rank, size: late.function.__module__, rank, size)
        dist.barrier()
        kernelreg.refresh()  # which adapters failed is forgotten
        early = kernelreg.agree("gdn", facts=facts, timeout=PATIENCE, load=True)
        return late.backend, loaded, early.backend, early.function.__module__, early.explain()


class Interrupted:
    """Rank 1 gets a Ctrl-C in the middle of a call, goes on, and calls again.

    Attributes:
        where: what it is about to do: ``_loads``, or to read the others' messages (``messages``).
    """

    def __init__(self, where: str) -> None:
        self.where = where

    def __call__(self, rank: int, size: int) -> Any:
        facts = FACTS / "cpu-only.json"
        place: Any = ranks if self.where == "_loads" else Table
        whole = getattr(place, self.where)

        def interrupted(*arguments: Any) -> None:
            if self.where == "messages":
                whole(*arguments)
            raise KeyboardInterrupt

        if rank == 1:
            setattr(place, self.where, interrupted)
        try:
            first = attempt(lambda *_: kernelreg.agree("gdn", facts=facts, timeout=PATIENCE, load=True), rank, size)
        except KeyboardInterrupt:
            first = Answer(error="KeyboardInterrupt")
        setattr(place, self.where, whole)
        again = [
            attempt(lambda *_: kernelreg.agree("gdn", facts=facts, timeout=PATIENCE, load=True).backend, rank, size)
            for _ in range(2 if rank == 1 and self.where == "messages" else 1)
        ]
        return first.error, first.text, again
