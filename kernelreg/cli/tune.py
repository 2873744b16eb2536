"""``kernelreg tune``: verify, then measure every kernel that can run here, and write the profile that ranks them."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kernelreg.cli import verify
from kernelreg.cli._measuring import (
    Job,
    Result,
    add_measuring_arguments,
    carry_out,
    check_output,
    job_of,
    left_out,
    no_time_for,
)
from kernelreg.cli._shared import complain, console, seconds, write
from kernelreg.errors import ConfigurationError
from kernelreg.machine.setup import setup_of
from kernelreg.profile import Profile, load_profile
from kernelreg.session import session

if TYPE_CHECKING:
    from rich.console import Console

NAME = "tune"
HELP = "Verify, then measure every kernel that can run here, and write the profile that ranks them (KERNELREG_PROFILE)."

_OUTPUT = "kernelreg-profile.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to measure, and where the profile goes."""
    add_measuring_arguments(parser)
    parser.add_argument("--output", default=_OUTPUT, metavar="FILE", help=f"where to write the profile ({_OUTPUT})")
    parser.add_argument("--add", action="store_true", help="keep what the file has of other calls on the same setup")
    parser.add_argument("--no-verify", action="store_true", help="measure at once, by what verify has found before")
    parser.add_argument("--limit", type=seconds, default=900.0, metavar="S", help="seconds to verify a backend (900)")


def run(given: argparse.Namespace) -> int:
    """0 when all was measured that there was time for, 1 when it was cut short or nothing was, 2 for wrong usage."""
    job = job_of(given, NAME)
    check_output(given.output)
    before = _before(given, job) if given.add else None
    if not given.no_verify:
        _verify(job, given.limit, quiet=given.json)

    def keep(profile: Profile) -> None:
        _merged(before, profile).save(given.output)

    result = carry_out(job, quiet=given.json, keep=keep)
    if not result.profile.points:
        for text in [*left_out(result), *no_time_for(result), *([result.cut] if result.cut else [])]:
            complain(f"{text}")
        complain("no kernel could be measured")
        return 1
    if given.json:
        write(_merged(before, result.profile).to_json())
    else:
        _show(given.output, result, console())
    for text in [*no_time_for(result), *([f"cut short: {result.cut}"] if result.cut else [])]:
        complain(text)
    return 1 if result.cut else 0


def _before(given: argparse.Namespace, job: Job) -> Profile | None:
    """What the file has, if it is there.

    Raises:
        ConfigurationError: that is no profile, or one of another setup.
    """
    if not Path(given.output).exists():
        return None
    before = load_profile(given.output)
    changes = [str(each) for each in before.setup.changes(job.facts)]
    if not changes and not before.setup.is_of(job.device):
        changes = [f"the card was {before.setup.description}, here {setup_of(job.facts, job.device).description}"]
    if changes:
        raise ConfigurationError(f"--add: {given.output} was measured elsewhere: {'; '.join(changes)}")
    return before


def _merged(before: Profile | None, profile: Profile) -> Profile:
    """The new points, and what there was of other calls."""
    if before is None:
        return profile
    packages = dict(sorted({**before.setup.packages, **profile.setup.packages}.items()))
    setup = msgspec.structs.replace(profile.setup, packages=packages)
    return msgspec.structs.replace(profile, setup=setup, points=before.points).adding(profile.points)


def _verify(job: Job, limit: float, *, quiet: bool) -> None:
    """Judge the backends first: what is wrong here is not measured, and said."""
    report = verify.examine(job.facts, job.operations, job.backends, job.device.torch_name, limit, quiet=quiet)
    wrong = Counter((each.operation, each.backend) for each in report.outcomes if each.status == "wrong")
    for (operation, backend), count in wrong.items():
        complain(
            f"{operation} {backend}: {count} cases wrong here; not measured on calls like them (see: "
            f"python -m kernelreg verify {operation} --backend {backend})"
        )
    session.refresh()  # what was found is read anew


def _show(path: str, result: Result, out: Console) -> None:
    """How often each kernel was the fastest, what was left out, and how the profile is used."""
    profile = result.profile
    out.print(f"{path}: {len(profile.points)} points on {profile.setup.description}", style="bold")
    tried = Counter((point.operation, each.row) for point in profile.points for each in point.timings)
    first = Counter(
        (point.operation, min(point.timings, key=lambda each: each.median_us).row)
        for point in profile.points
        if point.timings
    )
    for (operation, row), count in sorted(tried.items()):
        out.print(f"  {operation}: {' '.join(row)} is the fastest at {first[operation, row]} of {count} points")
    failed = {
        f"{point.operation} {' '.join(each.row)}, {point.kind}, {point.size}: {each.reason}"
        for point in profile.points
        for each in point.failures
    }
    for text in sorted(failed):
        out.print(f"  failed: {text}", style="red")
    for text in left_out(result):
        out.print(f"  {text}", style="dim")
    out.print(f"rank by it: KERNELREG_PROFILE={path}")
