"""``kernelreg verify``: run each backend here on calls with known answers, and remember which kernels were wrong."""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from kernelreg.call import make_call
from kernelreg.cli._shared import complain, console, known_backend, on_this_machine, progress, seconds, write
from kernelreg.errors import ConfigurationError, KernelregError, encodable
from kernelreg.machine import Facts
from kernelreg.ops import operation_named, operations
from kernelreg.policy import Policy
from kernelreg.resolver import closest_row, decide
from kernelreg.session import session
from kernelreg.verify.cases import cases
from kernelreg.verify.child import Task
from kernelreg.verify.outcome import Outcome
from kernelreg.verify.records import Record, forget_record, load_record, save_record
from kernelreg.verify.runner import run_backend

if TYPE_CHECKING:
    from rich.console import Console

NAME = "verify"
HELP = "Run the backends here on calls with known answers; a kernel that is wrong is not chosen for such calls again."

#: Calls drawn at random beside the contract's rows.
_DRAWS = 8

#: Why a backend that a program has registered is not judged by a command that it calls.
_NOT_INSTALLED = (
    "it was given to kernelreg.register(), and the child processes that judge know installed backends alone; "
    "fix: install it with an entry point, or judge it with kernelreg.testing"
)


class Left(msgspec.Struct, frozen=True, kw_only=True):
    """A backend that could not be judged, with the reasons against its closest row."""

    operation: str
    backend: str
    reasons: tuple[str, ...]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All that was found. ``ok`` is whether nothing was wrong, and each backend was right on something."""

    schema: int = 1
    ok: bool
    device: str
    fingerprint: str
    outcomes: tuple[Outcome, ...]
    left_out: tuple[Left, ...]
    kept: str | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to judge, and for how long."""
    parser.add_argument("operation", nargs="?", metavar="OP", help="an operation; all of them if not given")
    parser.add_argument("--backend", action="append", metavar="B", help="this backend alone; may be repeated")
    parser.add_argument("--device", help="the device to run on; the current accelerator, else cpu, if not given")
    parser.add_argument("--limit", type=seconds, default=900.0, metavar="S", help="seconds for a backend (900)")
    parser.add_argument("--forget", action="store_true", help="forget what was found on this machine, and run nothing")


def run(words: argparse.Namespace) -> int:
    """0 when nothing was wrong, 1 when something was or a backend that was asked for cannot run, 2 for wrong usage."""
    on_this_machine(words, NAME)
    facts = session.grounds().facts  # a variable or a file that is wrong is said before anything runs
    if words.forget:
        known = forget_record(facts.fingerprint)
        text = "forgotten" if known else "nothing was known of this machine"
        write(json.dumps({"schema": 1, "fingerprint": facts.fingerprint, "forgotten": known}) if words.json else text)
        return 0
    wanted = [operation_named(words.operation).name] if words.operation else [each.name for each in operations()]
    names = session.registry().names()
    for name in words.backend or ():
        known_backend(f"--backend {name}", name, names)
    device = words.device or session.default_device(facts)
    if device.partition(":")[0] == "meta":
        raise ConfigurationError(
            f"--device {device}: its tensors have no data to judge; accepted: a device that computes"
        )
    report = examine(
        facts, wanted, words.backend or names, device, words.limit, all_of_them=bool(words.backend), quiet=words.json
    )
    if words.json:
        write(msgspec.json.format(msgspec.json.encode(report, order="deterministic"), indent=2).decode())
    else:
        _show(report, console())
    return 0 if report.ok else 1


def examine(
    facts: Facts,
    operations: Sequence[str],
    backends: Sequence[str],
    device: str,
    limit: float,
    *,
    all_of_them: bool = False,
    quiet: bool = False,
) -> Report:
    """Judge the backends, keep what was found, and report it.

    Args:
        limit: seconds for each backend.
        all_of_them: one that cannot run here is not ok.
        quiet: without a bar.
    """
    runnable, left = _usable(facts, operations, backends, device, session.policy())
    outcomes, kept = _judge(runnable, device, limit, facts.fingerprint, quiet=quiet)
    return Report(
        ok=not any(each.status == "wrong" for each in outcomes)
        and bool(outcomes)
        and not _idle(outcomes)
        and not (all_of_them and left),
        device=device,
        fingerprint=facts.fingerprint,
        outcomes=outcomes,
        left_out=left,
        kept=kept,
    )


def _idle(outcomes: tuple[Outcome, ...]) -> list[str]:
    """What was asked to compute and never did: every case was refused, which says nothing of the kernel."""
    asked = dict.fromkeys((each.operation, each.backend) for each in outcomes)
    ran = {(each.operation, each.backend) for each in outcomes if each.computed or each.status == "wrong"}
    return [f"{backend} ({operation})" for operation, backend in asked if (operation, backend) not in ran]


def _usable(
    facts: Facts, wanted: Sequence[str], backends: Sequence[str], device: str, policy: Policy
) -> tuple[list[tuple[str, str]], tuple[Left, ...]]:
    """The (operation, backend) pairs that can run on the device, and why the others cannot.

    What is disabled is not run here either. The rest of the policy chooses among backends: each is judged all the same.
    """
    disabled = msgspec.structs.replace(policy, backend={}, prefer=(), strict=False)
    runnable, left = [], []
    installed = session.installed().names()
    for operation in wanted:
        decision = decide(session.registry(), facts, make_call(operation, device), disabled, session.ruled_out)
        for backend in backends:
            rows = [each for each in decision.candidates if each.backend == backend]
            if rows and backend not in installed:
                left.append(Left(operation=operation, backend=backend, reasons=(_NOT_INSTALLED,)))
            elif any(each.accepted for each in rows):
                runnable.append((operation, backend))
            elif (closest := closest_row(rows, backend)) is not None:
                reasons = tuple(str(reason) for reason in closest.reasons)
                left.append(Left(operation=operation, backend=backend, reasons=reasons))
    return runnable, tuple(left)


def _judge(
    pairs: list[tuple[str, str]], device: str, limit: float, fingerprint: str, *, quiet: bool
) -> tuple[tuple[Outcome, ...], str | None]:
    """What was found, and where it is kept: each backend's as soon as it is done, for the next may not end.

    None in place of the path where nothing ran or not all can be kept.
    """
    sizes = "small" if device == "cpu" else "real"
    counts = {operation: len(cases(operation, sizes, draws=_DRAWS, quick=True)) for operation, _ in pairs}
    outcomes: list[Outcome] = []
    kept: str | None = None
    unkept: dict[str, None] = {}
    with progress(sum(counts[operation] for operation, _ in pairs), quiet=quiet) as advance:
        for operation, backend in pairs:
            task = Task(operation=operation, backend=backend, device=device, sizes=sizes, draws=_DRAWS, skip=0)
            found = run_backend(task, limit, counts[operation], lambda done: advance(_told(done)))
            outcomes += found
            try:
                kept = _keep(fingerprint, tuple(found))
            except KernelregError as error:
                unkept[str(error)] = None
    for text in unkept:
        complain(f"the results are not kept: {text}")
    return tuple(outcomes), None if unkept else kept


def _told(outcome: Outcome) -> str:
    return f"{outcome.operation} {outcome.backend}: {outcome.case}"


def _keep(fingerprint: str, outcomes: tuple[Outcome, ...]) -> str:
    """Merge outcomes into the record of this machine; gives its path.

    Raises:
        KernelregError: it cannot be written.
    """
    date = datetime.date.today().isoformat()
    try:
        known = load_record(fingerprint)
    except KernelregError:
        known = None  # a broken record is replaced
    record = known or Record(date=date, fingerprint=fingerprint)
    return encodable(str(save_record(record.with_run(outcomes, date))))


def _show(report: Report, out: Console) -> None:
    for operation in dict.fromkeys(each.operation for each in report.outcomes):
        _show_operation([each for each in report.outcomes if each.operation == operation], report.device, out)
    for left in report.left_out:
        out.print(f"{left.operation} {left.backend} cannot run here: {'; '.join(left.reasons)}", style="dim")
    wrong = [each for each in report.outcomes if each.status == "wrong"]
    for each in wrong:
        out.print(f"{each.operation} {each.backend} {each.kernel or ''}, {each.case}: {each.reason}", style="bold red")
    if report.kept:
        out.print(f"kept for this machine (facts {report.fingerprint}) in {report.kept}", style="dim")
    idle = _idle(report.outcomes)
    for name in idle:
        out.print(f"no case computed anything on {name}: all were refused, so nothing is known of it", style="bold red")
    verdict = f"not ok: {len(wrong)} wrong, {len(idle)} not tried" if report.outcomes else "not ok: nothing could run"
    out.print("ok" if report.ok else verdict, style="bold green" if report.ok else "bold red")


def _show_operation(outcomes: list[Outcome], device: str, out: Console) -> None:
    """A table of errors: a row for each case, a column for each backend."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    backends = list(dict.fromkeys(each.backend for each in outcomes))
    cells = {(each.case, each.backend): each for each in outcomes}
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column(f"{outcomes[0].operation} on {device}", overflow="fold")
    for backend in backends:
        mine = [each.status for each in outcomes if each.backend == backend]
        counts = "\n".join(f"{mine.count(status)} {status}" for status in ("right", "refused", "wrong"))
        table.add_column(f"{backend}\n{counts}", no_wrap=True)
    for case in dict.fromkeys(each.case for each in outcomes):
        row = [cells.get((case, backend)) for backend in backends]
        if any(each is not None and each.status != "not here" for each in row):
            table.add_row(case, *(Text(_cell(each), style=_STYLES[each.status] if each else "") for each in row))
    out.print(table)


_STYLES = {"right": "", "refused": "dim", "wrong": "bold red", "not here": "dim"}


def _cell(outcome: Outcome | None) -> str:
    """The largest error, or the refusal's code."""
    if outcome is None:
        return "not run"
    if outcome.status == "right":
        return f"{max(outcome.errors.values()):.1e}" if outcome.errors else "CallError"
    if outcome.status == "refused":
        return f"refused: {(outcome.reason or '').split(': ')[0]}"
    return outcome.status
