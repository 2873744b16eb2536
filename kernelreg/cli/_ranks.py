"""``kernelreg doctor --ranks``: one report of all ranks of a job that torchrun started."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from kernelreg._version import __version__
from kernelreg.agreement import Agreed, Difference, Message, agree_on, grouped, machine_differences, told_ranks
from kernelreg.call import make_call
from kernelreg.cli._shared import complain, console, write
from kernelreg.cli.doctor import _LOOKS, _facts_and_trouble, _show_device, _show_list, _unmet
from kernelreg.errors import RanksError
from kernelreg.machine import CPU, Facts
from kernelreg.meeting import Table, launched_table
from kernelreg.ranks import SECONDS, message_of
from kernelreg.registry import Registry
from kernelreg.session import Grounds, session

if TYPE_CHECKING:
    from rich.console import Console


class Rank(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's machine in short."""

    rank: int
    host: str
    device: str
    description: str
    fingerprint: str
    trouble: tuple[str, ...]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks are, how they differ and what they agree on. ``unmet`` is why the exit code is not 0."""

    schema: int = 1
    kernelreg: str = __version__
    ok: bool
    unmet: tuple[str, ...]
    ranks: tuple[Rank, ...]
    differences: tuple[Difference, ...]
    decisions: tuple[Agreed, ...]


def run(words: argparse.Namespace, registry: Registry, required: list[tuple[str, str]]) -> int:
    """0 when all ranks agree on a usable backend for every operation and every requirement is met, else 1."""
    limit = SECONDS if words.limit is None else words.limit
    try:
        table = launched_table(limit)
    except RanksError as error:  # no torch here
        complain(str(error))
        return 1
    end = time.monotonic() + limit
    with table.taking_part(end):
        message = _message(words, table, registry)
    try:
        report = examine(table.messages(message, end), table.rank, registry, required)
    except RanksError as error:
        heard = [rank for rank in table.ranks if rank not in error.ranks]
        if not error.ranks or table.rank == min(heard, default=table.rank):  # one rank says it for all
            complain(str(error))
        return 1
    if table.rank == 0:
        if words.json:
            write(msgspec.json.format(msgspec.json.encode(report, order="deterministic"), indent=2).decode())
        else:
            show(report, console())
        if sys.stdout is not None:
            sys.stdout.flush()
    table.leave(end)
    return 0 if report.ok else 1


def _message(words: argparse.Namespace, table: Table, registry: Registry) -> Message:
    facts, trouble = _facts_and_trouble(words)
    policy, errors, _ = session.environment_policy()
    evidence, pins, refused = session.files(policy, facts)
    grounds = Grounds(registry, facts, policy, {}, session.findings(facts), evidence, pins)
    calls = [make_call(operation, _device(facts), features=features) for operation, features in _LOOKS]
    told = [*(each.error for each in trouble), *map(str, (*errors, *refused))]
    return message_of(table.rank, [(grounds, call) for call in calls], trouble=told)


def _device(facts: Facts) -> str:
    """The device of this rank: its own number on the host, or the only one that it sees."""
    if len(facts.devices) < 2:
        return (facts.devices or (CPU,))[0].torch_name
    kind = facts.devices[0].torch_name.partition(":")[0]
    return f"{kind}:{os.environ.get('LOCAL_RANK', '0')}"


def examine(messages: Sequence[Message], rank: int, registry: Registry, required: list[tuple[str, str]]) -> Report:
    """What the ranks agree on, and what is wrong."""
    ranks = [_rank(each) for each in messages]
    unmet = [
        f"{told_ranks(those)}: {text}"
        for text, those in grouped((text, each.rank) for each in ranks for text in each.trouble).items()
    ]
    decisions: tuple[Agreed, ...] = ()
    try:
        decisions = agree_on(messages, rank)
    except RanksError as error:
        unmet.append(str(error))
    for decision in decisions:
        unmet += _unmet(decision, decision.policy, registry, required)
    return Report(
        ok=not unmet,
        unmet=tuple(dict.fromkeys(unmet)),
        ranks=tuple(ranks),
        differences=machine_differences(messages),
        decisions=decisions,
    )


def _rank(message: Message) -> Rank:
    name = message.asked[0].call.device
    device = message.facts.device(name)
    return Rank(
        rank=message.rank,
        host=message.host,
        device=name,
        description=device.description if device else "which is not there",
        fingerprint=message.facts.fingerprint,
        trouble=message.trouble,
    )


def show(report: Report, out: Console) -> None:
    """The report as text: who the ranks are, how they differ, what they agree on, then the verdict."""
    hosts = len({each.host for each in report.ranks})
    out.print(
        f"kernelreg {report.kernelreg}, {told_ranks(each.rank for each in report.ranks)} on {hosts} "
        f"host{'s' if hosts > 1 else ''}",
        style="bold",
    )
    for (host, description), those in grouped(((each.host, each.description), each) for each in report.ranks).items():
        devices = ", ".join(dict.fromkeys(each.device for each in those))
        out.print(f"  {told_ranks(each.rank for each in those)}  {host}: {description} ({devices})")
    if report.differences:
        _show_list(out, "The ranks differ", [str(each) for each in report.differences], "yellow")
    else:
        out.print("  all ranks have the same machine and settings")
    out.print()
    if report.decisions:
        _show_device(list(report.decisions), out)
        out.print()
    if report.ok:
        out.print("All ranks agree on a usable backend for every operation. Adapters were not imported.", style="green")
    else:
        _show_list(out, "Not met", list(report.unmet), "red", gap=False)
