"""What ``tune`` and ``bench`` share: what to measure, and measuring it with a bar. Torch is imported when it begins."""

from __future__ import annotations

import argparse
import datetime
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping

import msgspec

from kernelreg.cli._layers import add_layer_arguments, integers, shapes_of, words, workloads_of
from kernelreg.cli._shared import device_named, known_backend, on_this_machine, progress, seconds, set_aside
from kernelreg.errors import ConfigurationError, KernelregError
from kernelreg.machine import Device, Facts
from kernelreg.machine.setup import setup_of
from kernelreg.profile import Point, Profile, Row
from kernelreg.session import Grounds, session
from kernelreg.warming import tasks_of, warm
from kernelreg.workloads import Spot, most_telling_first, spots

#: Where nothing else is asked for. A CPU takes a thousand times as long.
_TOKENS = {"cpu": [64, 256, 1024], "": [256, 1024, 2048, 4096, 8192, 16384, 32768]}
_BATCHES = {"cpu": [1, 8], "": [1, 8, 32, 64, 128, 256]}
_SEQUENCES = [2, 8]
#: Seconds after which what has been measured is told again, to be kept.
_OFTEN = 20.0
#: Of the time that there is, what compiling ahead may take: a kernel that is compiled and not measured tells nothing.
_TO_COMPILE = 0.6


def add_measuring_arguments(parser: argparse.ArgumentParser) -> None:
    """Whose calls, how many tokens they have, and how much is measured of each."""
    parser.add_argument("operation", nargs="*", metavar="OP", help="gdn for all, gdn.chunk or gdn.recurrent")
    add_layer_arguments(parser)
    parser.add_argument("--tokens", type=integers, metavar="T,…", help="of prefill and training: 256 to 32768 on a GPU")
    parser.add_argument("--batch", type=integers, metavar="B,…", help="sequences of a decode step: 1 to 256 on a GPU")
    parser.add_argument("--sequences", type=integers, metavar="N,…", help="in a packed row (2,8)")
    parser.add_argument("--backend", type=words, metavar="B,…", help="these backends alone")
    parser.add_argument("--device", help="the device to measure; the current accelerator, else cpu, if not given")
    parser.add_argument("--no-captured", action="store_true", help="no replays of CUDA graphs")
    parser.add_argument("--repeats", type=integers, default=[7], metavar="N", help="rounds of each point (7)")
    parser.add_argument("--seconds", type=seconds, default=0.02, metavar="S", help="of a kernel's round (0.02)")
    parser.add_argument(
        "--within",
        type=seconds,
        metavar="S",
        help="begin no point after so many seconds; what tells most is first",
    )
    parser.add_argument(
        "--warm",
        type=integers,
        metavar="N",
        help="compile first, in so many processes at once",
    )


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure, on what.

    Attributes:
        within: seconds after which no more spots are begun; None for all of them.
        warm: processes that compile first, at once; 0 for none.
    """

    facts: Facts
    device: Device
    backends: tuple[str, ...]
    spots: tuple[Spot, ...]
    repeats: int
    seconds: float
    within: float | None = None
    warm: int = 0

    @property
    def operations(self) -> tuple[str, ...]:
        """Those that are measured."""
        return tuple(dict.fromkeys(each.workload.operation for each in self.spots))


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured.

    Attributes:
        profile: every point that has a time.
        refused: the kernels that took none of the calls, each with its first reason.
        cut: why not all was measured, where it was not.
        left: those that there was no time for.
    """

    profile: Profile
    refused: dict[Row, str]
    cut: str | None = None
    left: tuple[Spot, ...] = ()


def job_of(given: argparse.Namespace, command: str) -> Job:
    """What was asked for.

    Raises:
        ConfigurationError: an unknown name, a shape that cannot be, a device that is not there.
    """
    on_this_machine(given, command)
    set_aside("KERNELREG_PROFILE", "KERNELREG_LOCK")  # every kernel is measured, whichever is chosen
    workloads = workloads_of(given, given.operation or ["gdn"])
    shapes = shapes_of(given)
    for flag, numbers in (("--repeats", given.repeats), ("--warm", given.warm or [0])):
        if len(numbers) > 1:
            raise ConfigurationError(f"{flag} {','.join(map(str, numbers))}; accepted: one number")
    names = session.registry().names()
    for name in given.backend or ():
        known_backend(f"--backend {name}", name, names)
    session.policy()  # a variable that is wrong is said before anything runs
    facts = session.facts()
    device = device_named(given.device, facts)
    if facts.torch is None:
        raise ConfigurationError(f"{command} needs torch; fix: pip install torch")
    kind = "cpu" if device.type == "cpu" else ""
    planned = spots(
        workloads,
        shapes,
        dtype=given.dtype,
        tokens=given.tokens or _TOKENS[kind],
        batches=given.batch or _BATCHES[kind],
        sequences=given.sequences or _SEQUENCES,
        captured=device.torch_name.startswith("cuda") and not given.no_captured,
    )
    return Job(
        facts=facts,
        device=device,
        backends=tuple(given.backend or names),
        spots=tuple(planned),
        repeats=given.repeats[0],
        seconds=given.seconds,
        within=given.within,
        warm=given.warm[0] if given.warm else 0,
    )


def carry_out(job: Job, *, quiet: bool, keep: Callable[[Profile], object] = lambda profile: None) -> Result:
    """Measure all of it, or as much as there is time for.

    Args:
        quiet: without a bar.
        keep: called with what there is every now and then, and at the end, also where that comes early.
    """
    from kernelreg.measure import Effort, measure

    grounds = session.grounds(job.facts)
    effort = Effort(job.repeats, job.seconds)
    points: dict[Spot, Point] = {}
    refused: dict[Row, str] = {}
    cut: str | None = None
    kept = time.monotonic()
    within = math.inf if job.within is None else job.within
    until = kept + within
    if job.warm:
        tasks = tasks_of(most_telling_first(job.spots), job.backends, job.device.torch_name)
        with progress(len(tasks), quiet=quiet) as advance:
            warm(tasks, job.warm, kept + _TO_COMPILE * within, advance)
    left = most_telling_first(job.spots)
    with progress(len(left), quiet=quiet) as advance:
        try:
            while left and time.monotonic() < until:
                spot = left.pop(0)
                found = measure(spot, grounds, job.device.torch_name, job.backends, effort)
                points |= {spot: found.point} if found.point is not None else {}
                refused |= {row: reason for row, reason in found.refused.items() if row not in refused}
                advance(str(spot))
                if time.monotonic() - kept > _OFTEN:
                    kept = time.monotonic()
                    keep(_profile(job, grounds, points))
        except KernelregError as error:
            cut = str(error)
        finally:
            if points:
                keep(_profile(job, grounds, points))
    seen = {each.row for point in points.values() for each in point.all}
    return Result(
        profile=_profile(job, grounds, points),
        refused={row: reason for row, reason in refused.items() if row not in seen},
        cut=cut,
        left=() if cut else tuple(left),
    )


def _profile(job: Job, grounds: Grounds, measured: Mapping[Spot, Point]) -> Profile:
    """The points as a profile, in the order of the plan, with the packages of every backend that was measured."""
    points = [measured[spot] for spot in job.spots if spot in measured]
    return Profile(
        date=datetime.date.today().isoformat(),
        fingerprint=job.facts.fingerprint,
        setup=setup_of(
            job.facts, job.device, _packages(grounds, {each.backend for point in points for each in point.all})
        ),
        points=tuple(points),
    )


def _packages(grounds: Grounds, backends: Collection[str]) -> set[str]:
    return {name for each in grounds.registry.backends if each.name in backends for name in each.descriptor.packages}


def left_out(result: Result) -> list[str]:
    """The kernels that took none of the calls, those of one backend with one reason together."""
    kernels: dict[tuple[str, str], list[str]] = {}
    for (backend, kernel), reason in sorted(result.refused.items()):
        kernels.setdefault((backend, reason), []).append(kernel)
    return [f"not measured: {backend} {', '.join(each)}: {reason}" for (backend, reason), each in kernels.items()]


def no_time_for(result: Result) -> list[str]:
    """What ``--within`` left out: how many points of each kind of call and head shape."""
    counts = Counter(
        f"{each.workload.name}{', captured' if each.captured else ''}, {each.shape}" for each in result.left
    )
    return [f"no time for {count} points of {kind}" for kind, count in counts.items()]


def check_output(path: str) -> None:
    """See that a file can be put there, before anything long begins.

    Raises:
        ConfigurationError: its folder is not there, or may not be written.
    """
    folder = os.path.dirname(path) or "."  # noqa: PTH120
    if not os.access(folder, os.W_OK) or os.path.isdir(path):  # noqa: PTH112
        raise ConfigurationError(
            f"--output {path}: cannot be written there; accepted: a file in a folder that is there"
        )
