"""docs/evidence/performance.md: each aim with its figure, met or not, from what the benchmarks wrote to docs/evidence.

    python benchmarks/performance.py [--check]

Of each benchmark the newest file counts, by its name. An aim that no file speaks of is "not measured"; ``--check``
writes nothing and exits 1 where the page is not what the files give.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

EVIDENCE = Path(__file__).parent.parent / "docs" / "evidence"
PAGE = "performance.md"
#: How a file's ground line names the machine that an aim is about.
H200, CPU = "NVIDIA H200", "CPU with"


class Report(NamedTuple):
    """A file that a benchmark wrote."""

    name: str
    text: str

    @property
    def command(self) -> str:
        """What made it."""
        found = re.search(r"^Made by `([^`]+)`", self.text, re.MULTILINE)
        return found[1] if found else "not told"

    @property
    def ground(self) -> str:
        """The card and the versions, as the file tells them."""
        lines = (line for line in self.text.splitlines() if "Python 3" in line and "torch 2" in line)
        return next(lines, "not told").rstrip(".")

    def rows(self, section: str = "") -> dict[str, dict[str, str]]:
        """A table's rows by their first cell, each by the names of its columns.

        Args:
            section: the heading below which it is; the first table of the file where none is given.
        """
        _, heading, after = self.text.partition(f"## {section}\n") if section else ("", "#", self.text)
        lines = [line for line in after.partition("\n## ")[0].splitlines() if line.startswith("|")] if heading else []
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        return {each[0]: dict(zip(cells[0], each, strict=False)) for each in cells[2:]}

    def numbers(self, pattern: str) -> list[float]:
        """Every number that the pattern's one group finds."""
        return [float(each) for each in re.findall(pattern, self.text, re.MULTILINE)]


#: What a file says of an aim: the figure in words, and whether it is met; None where it says nothing.
Finding = tuple[str, bool] | None


class Aim(NamedTuple):
    """One aim of the project.

    Attributes:
        told: the aim in words.
        title: how the heading of the benchmark's file begins.
        where: the machine that it is about.
        read: what such a file says of it.
        limit: what keeps it from being met, where it is not.
    """

    told: str
    title: str
    where: str
    read: Callable[[Report], Finding]
    limit: str


def at_most(row: str, column: str, most: float) -> Callable[[Report], Finding]:
    """A cell in microseconds that is not to exceed a bound."""

    def read(report: Report) -> Finding:
        cell = report.rows().get(row, {}).get(column)
        return None if cell is None else (f"{cell} µs", float(cell) <= most)

    return read


def all_at_least(pattern: str, least: float) -> Callable[[Report], Finding]:
    """Ratios, none of which is to be below a bound."""

    def read(report: Report) -> Finding:
        found = report.numbers(pattern)
        return (", ".join(f"× {each:g}" for each in found), min(found) >= least) if found else None

    return read


def by_shape(shapes: tuple[str, ...], rows: tuple[str, ...], column: str, least: float) -> Callable[[Report], Finding]:
    """A column's ratio in the section of each shape, of the last of these rows that is there."""

    def read(report: Report) -> Finding:
        found: dict[str, float] = {}
        for shape in shapes:
            table = report.rows(shape)
            for start in rows:
                cells = [cells[column] for name, cells in table.items() if re.match(start, name)]
                found |= {shape: float(cells[0])} if cells else {}
        missing = [f"{shape}: not measured" for shape in shapes if shape not in found]
        told = [f"{shape}: × {each:g}" for shape, each in found.items()]
        return ("; ".join([*told, *missing]), not missing and min(found.values()) >= least) if found else None

    return read


def within(report: Report) -> Finding:
    """The points at which the automatic choice is as good as the best kernel."""
    told = re.search(r"^Automatic call within 3%.*: (\d+) of (\d+) points, the worst ([\d.]+\d)", report.text, re.M)
    if told is None:
        return None
    chosen = re.search(r"^Chosen kernel within 3%.*: (\d+ of \d+) points", report.text, re.MULTILINE)
    figure = f"{told[1]} of {told[2]} points, the worst × {told[3]}"
    figure += f" (by the kernels' own times {chosen[1]})" if chosen else ""
    return figure + _left(report), told[1] == told[2] and not _left(report)


def own_entry_point(report: Report) -> Finding:
    """FLA's own entry point over the automatic choice."""
    told = re.search(r"geometric mean: × ([\d.]+) over (\d+) points, (?:the )?least ([\d.]+\d)", report.text)
    if told is None:
        return None
    return f"× {told[1]} over {told[2]} points, the least × {told[3]}" + _left(report), float(told[1]) >= 1.3


def _left(report: Report) -> str:
    found = re.search(r"^Not measured, for lack of time: (.+)\.$", report.text, re.MULTILINE)
    return f"; {found[1].count(';') + 1} points of the grid not measured" if found else ""


_HOT, _HOST = "# What a call costs before its kernel", "# What a prefill call costs with its host work"
_AUTO, _TORCH = "# The automatic choice beside every kernel", "# The torch backend beside transformers'"
_EAGER = (
    "1,024 tokens, dense",
    "4,096 tokens, dense",
    "1,024 tokens, varlen, 8 sequences",
    "4,096 tokens, varlen, 8 sequences",
)
_OVER = "over the kernel, µs"
_HOT_LIMIT = (
    "Reading the attributes of the tensors and asking whether the stream is being captured is nearly all of it."
)
_TORCH_LIMIT = (
    "The matrix products of a chunk are the same on both sides, and take most of the time of a prefill; what can be "
    "saved is the passes around them."
)

AIMS = (
    Aim(
        "hot path: at most 2 µs a call over the adapter, on CUDA tensors",
        _HOT,
        H200,
        at_most("`kernelreg.gdn`, prefill", _OVER, 2.0),
        _HOT_LIMIT,
    ),
    Aim(
        "hot path: at least 5 times cheaper than FLA's dispatcher (FlashQLA off, on)",
        _HOT,
        H200,
        all_at_least(r"^FLA's dispatcher.*: × ([\d.]+)$", 5.0),
        _HOT_LIMIT,
    ),
    Aim(
        "a held `Resolution.function` adds at most 0.2 µs",
        _HOT,
        H200,
        at_most("a held `Resolution.function`", _OVER, 0.2),
        "It is the adapter's own function; what differs is noise of the clock.",
    ),
    Aim(
        "eager calls at least 1.5 times faster than the faster library's own entry point",
        _HOST,
        H200,
        by_shape(_EAGER, (r"kernelreg \(", r"kernelreg, plan \("), "× over the faster library", 1.5),
        "What is left is the launches of the library's own kernels, which cost their host time whoever calls them.",
    ),
    Aim(
        "captured: at least 4 times faster than the best eager call at 1,024 tokens",
        _HOST,
        H200,
        by_shape((_EAGER[0], _EAGER[2]), (r"kernelreg, captured$",), "× over the best eager call", 4.0),
        "A replay takes the GPU's time alone; the faster eager calls are, the less of their time a graph can save.",
    ),
    Aim(
        "the automatic choice is within 3% of the best kernel at every point of the grid",
        _AUTO,
        H200,
        within,
        "Between measured sizes the nearest one speaks, and where two kernels are within the spread of their rounds "
        "either may be ahead; calls that the host bounds differ by more than 3% from round to round.",
    ),
    Aim(
        "the automatic choice, geometric mean: at least 1.3 times faster than FLA's own entry point with FlashQLA",
        _AUTO,
        H200,
        own_entry_point,
        "With FlashQLA behind its dispatcher FLA's entry point runs the same kernel on long calls; only what the host "
        "does around it can be saved there.",
    ),
    Aim(
        "torch backend on two CPU cores: prefill at least twice as fast as transformers' chunk kernel (geometric mean)",
        _TORCH,
        CPU,
        all_at_least(r"^Geometric mean, prefill: × ([\d.]+\d)\.$", 2.0),
        _TORCH_LIMIT,
    ),
    Aim(
        "torch backend on two CPU cores: decode at least 1.5 times as fast as transformers' recurrent kernel",
        _TORCH,
        CPU,
        all_at_least(r"^Geometric mean, decode: × ([\d.]+\d)\.$", 1.5),
        "A step of one sequence is a dozen small operations, whose dispatch by torch costs more than their arithmetic.",
    ),
    Aim(
        "torch backend on the H200: at least as fast as transformers' (prefill, decode; geometric means)",
        _TORCH,
        H200,
        all_at_least(r"^Geometric mean, (?:prefill|decode): × ([\d.]+\d)\.$", 1.0),
        "Both sides are bound by the launches of torch's operations there.",
    ),
)


def newest(aim: Aim, reports: list[Report]) -> tuple[Report, tuple[str, bool]] | None:
    """The newest file that speaks of the aim, and what it says."""
    for report in sorted(reports, reverse=True):
        if report.text.startswith(aim.title) and aim.where in report.ground:
            found = aim.read(report)
            if found is not None:
                return report, found
    return None


def page(reports: list[Report]) -> str:
    """The whole page."""
    lines = ["# Performance", ""]
    lines += [
        "Each aim with what was measured. Made by `python benchmarks/performance.py` from the files that it names;"
    ]
    lines += ["ratios compare sides that took turns in one process.", "", "| aim | figure | met | evidence |"]
    lines += ["|---|---|---|---|"]
    used: dict[str, Report] = {}
    missed: list[Aim] = []
    for aim in AIMS:
        found = newest(aim, reports)
        if found is None:
            lines.append(f"| {aim.told} | not measured | – | – |")
            continue
        report, (figure, met) = found
        used[report.name] = report
        missed += [] if met else [aim]
        lines.append(f"| {aim.told} | {figure} | {'yes' if met else '**no**'} | [{report.name}]({report.name}) |")
    if missed:
        lines += ["", "## What the limit is where an aim is not met", ""]
        lines += [f"- {aim.told}: {aim.limit}" for aim in missed]
    if used:
        lines += ["", "## How it was measured", ""]
        lines += [f"- [{name}]({name}): `{used[name].command}`; {used[name].ground}." for name in sorted(used)]
    return "\n".join(lines) + "\n"


def reports_in(folder: Path) -> list[Report]:
    """Every page of the folder but the one that is made here."""
    return [Report(path.name, path.read_text(encoding="utf-8")) for path in folder.glob("*.md") if path.name != PAGE]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where the page is another")
    given = parser.parse_args()
    made, path = page(reports_in(EVIDENCE)), EVIDENCE / PAGE
    if given.check:
        same = path.exists() and path.read_text(encoding="utf-8") == made
        print(f"{path}: {'as the files give it' if same else 'not what the files give'}")
        return 0 if same else 1
    path.write_text(made, encoding="utf-8")
    print(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
