"""``kernelreg bench``: the kernels side by side on your shapes, as a table, a file or a plot."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import msgspec

from kernelreg.cli._layers import shapes_of, workloads_of
from kernelreg.cli._measuring import add_measuring_arguments, carry_out, check_output, job_of, left_out, no_time_for
from kernelreg.cli._shared import complain, console, write
from kernelreg.errors import ConfigurationError
from kernelreg.models import Shape
from kernelreg.profile import Point, Profile, Row, load_profile, told_time
from kernelreg.series import Series, series_of
from kernelreg.workloads import workload_of

if TYPE_CHECKING:
    from rich.console import Console

NAME = "bench"
HELP = "Time the kernels side by side on your shapes; print, save and plot the comparison."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to measure, and what to make of it."""
    add_measuring_arguments(parser)
    parser.add_argument("--output", metavar="FILE", help="also save the times, as a profile")
    parser.add_argument("--plot", metavar="FILE", help="also draw latency against tokens: .svg, .png, .pdf …")
    parser.add_argument(
        "--from", dest="source", metavar="FILE", help="measure nothing: of a saved profile show what is asked for"
    )


def run(given: argparse.Namespace) -> int:
    """0 when all was measured, 1 when it was cut short or nothing could be measured, 2 for wrong usage."""
    if given.plot is not None:
        from kernelreg.plot import check_plot

        check_plot(given.plot)
    cut: str | None = None
    if given.source is not None:
        if given.output:
            raise ConfigurationError("--from measures nothing that --output could save; give --plot or --json")
        profile = _selected(load_profile(given.source), given)
    else:
        job = job_of(given, NAME)
        if given.output is not None:
            check_output(given.output)
        result = carry_out(job, quiet=given.json, keep=lambda each: each.save(given.output) if given.output else None)
        profile, cut = result.profile, result.cut
        for text in [*left_out(result), *no_time_for(result)]:
            complain(f"{text}")
    if given.plot is not None and profile.points:
        from kernelreg.plot import draw

        draw(profile, given.plot)
    if given.json:
        write(profile.to_json())
    else:
        show(profile, console())
    if cut:
        complain(f"cut short: {cut}")
    return 0 if profile.points and not cut else 1


def _selected(profile: Profile, given: argparse.Namespace) -> Profile:
    """The points of the profile that were asked for; all where nothing was.

    Raises:
        ConfigurationError: an unknown name, or no point is left.
    """
    workloads = workloads_of(given, given.operation or ["gdn"])
    shapes = shapes_of(given) if given.model or given.heads else None
    points = tuple(
        point
        for point in profile.points
        if workload_of(point.operation, point.features) in workloads
        and (shapes is None or Shape(point.heads, point.value_heads, point.head_dim_k, point.head_dim_v) in shapes)
        and not (given.no_captured and "capture" in point.features)
        and (given.tokens is None or point.operation == "gdn.recurrent" or point.tokens in given.tokens)
        and (given.sequences is None or "varlen" not in point.features or point.sequences in given.sequences)
    )
    if not points:
        raise ConfigurationError(f"--from {given.source}: none of its {len(profile.points)} points is asked for")
    return msgspec.structs.replace(profile, points=points)


def show(profile: Profile, out: Console) -> None:
    """A table of each kind of call and head shape: a row a size, a column a kernel, the fastest with a star."""
    packages = ", ".join(f"{name} {version}" for name, version in profile.setup.packages.items() if version)
    setup = profile.setup
    out.print(f"{setup.description}; torch {setup.torch}{', ' + packages if packages else ''}; {profile.date}")
    for series in series_of(profile):
        _show_series(series, out)


def _show_series(series: Series, out: Console) -> None:
    from rich import box
    from rich.table import Table

    out.print()
    out.print(series.title, style="bold")
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("call")
    for row in series.rows:
        table.add_column(" ".join(row), justify="right", no_wrap=True)
    for point in series.points:
        table.add_row(point.size, *(_cell(point, row) for row in series.rows))
    out.print(table)


def _cell(point: Point, row: Row) -> str:
    times = {each.row: each for each in point.timings}
    if row not in times:
        return "failed" if any(each.row == row for each in point.failures) else "–"
    own = times[row]
    best = min(each.median_us for each in point.timings)
    star = " *" if own.median_us == best else ""
    return f"{told_time(own.median_us)} ± {own.spread_us / own.median_us / 2:.0%}{star}"
