"""``kernelreg lock``: the decisions for a model's calls as a file that a fleet can pin, and CI can hold to."""

from __future__ import annotations

import argparse
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from kernelreg.cli._layers import add_layer_arguments, shapes_of, words, workloads_of
from kernelreg.cli._shared import complain, console, device_named, facts_of, set_aside, working, write
from kernelreg.errors import ConfigurationError
from kernelreg.lock import Lock, load_lock
from kernelreg.locking import Broken, Check, check_lock, make_lock
from kernelreg.session import session

if TYPE_CHECKING:
    from rich.console import Console

NAME = "lock"
HELP = "Write the decisions for a model's calls as a lock file (KERNELREG_LOCK pins them), or check one."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Whose calls, and where the file goes."""
    parser.add_argument("operation", nargs="*", metavar="OP", help="gdn.chunk, gdn.recurrent; both if not given")
    add_layer_arguments(parser)
    parser.add_argument("--state-dtype", default="float32", help="of the states (float32)")
    parser.add_argument(
        "--features",
        type=words,
        default=[],
        metavar="F,…",
        help="what the calls may use beside what each workload does, such as state-v-first,raw-gates",
    )
    parser.add_argument("--device", help="the device to decide for; the current accelerator, else cpu, if not given")
    parser.add_argument("--output", metavar="FILE", help="where to write it; standard output if not given")
    parser.add_argument(
        "--check", metavar="FILE", help="write nothing; exit 1 where a decision of this file is no more"
    )


def run(given: argparse.Namespace) -> int:
    """0 when written, or when every decision holds; 1 where one does not, or nothing could be pinned."""
    set_aside("KERNELREG_LOCK")
    facts = facts_of(given)
    grounds = session.grounds(facts)
    if given.check is not None:
        if given.model or given.heads or given.output:
            raise ConfigurationError("--check reads all of it from the file; give it alone")
        with working("holding the decisions against this machine"):
            check = check_lock(load_lock(given.check), grounds)
        if given.json:
            write(msgspec.json.format(msgspec.json.encode(check, order="deterministic"), indent=2).decode())
        else:
            _show_check(given.check, check, console())
        return 0 if check.ok else 1
    workloads = workloads_of(given, given.operation)
    shapes = shapes_of(given)
    device = device_named(given.device, facts)
    with working("deciding"):
        lock, unpinned = make_lock(
            grounds,
            device,
            workloads,
            shapes,
            dtype=given.dtype,
            state_dtype=given.state_dtype,
            more=given.features,
            models=given.model or (),
            tp=given.tp,
        )
    if given.output is None or given.json:
        write(lock.to_json())
    if given.output is not None:
        lock.save(given.output)
        if not given.json:
            _show(given.output, lock, console())
    for each in unpinned:
        complain(f"nothing to pin for {each.calls}: {'; '.join(each.reasons)}")
    return 0 if lock.pins else 1


def _show(path: str, lock: Lock, out: Console) -> None:
    """What is pinned, counted by kernel."""
    out.print(f"{path}: {len(lock.pins)} decisions for {lock.setup.description}", style="bold")
    counts = Counter((each.operation, each.backend, each.kernel) for each in lock.pins)
    for (operation, backend, kernel), count in sorted(counts.items()):
        out.print(f"  {operation}: {backend} {kernel} ({count})")
    out.print(f"pin them: KERNELREG_LOCK={path}    hold CI to them: python -m kernelreg lock --check {path}")


def _show_check(path: str, check: Check, out: Console) -> None:
    """The pins that do not hold as a diff, then what else is no longer as it was."""
    for text in check.machine:
        out.print(f"  {text}", style="yellow")
    if check.broken:
        out.print(f"--- {path}\n+++ this machine")
    alike: dict[tuple[object, ...], list[Broken]] = {}
    for each in check.broken:
        alike.setdefault((each.backend, each.kernel, each.now, each.reasons), []).append(each)
    for those in alike.values():
        for each in those:
            out.print(f" {each.calls}")
        first = those[0]
        pinned = f"{first.backend} {first.kernel}"
        now = "the same kernel, of other versions" if first.now == pinned else first.now or "nothing fits"
        out.print(f"-{pinned}", style="red")
        out.print(f"+{now}", style="green")
        for reason in first.reasons:
            out.print(f"#  {reason}")
    for other in check.outranked:
        out.print(f"holds, though {other.now} would be chosen without it: {other.calls} ({other.backend})", style="dim")
    total = "every decision holds" if check.ok else f"{len(check.broken) or 'all'} decisions do not hold"
    out.print(f"{path}: {total}", style="bold")
