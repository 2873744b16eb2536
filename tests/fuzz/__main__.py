"""Fuzz every target, one process each, and report.

    python -m tests.fuzz [--target NAME] [--executions N] [--seed S] [--jobs N] [--report FILE] [--keep]

Needs atheris (``pip install atheris``), which has wheels for Linux on x86_64.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import platform
import random
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import msgspec

from tests.fuzz.corpus import FAILED, SEEDS, cover, keep, kept, place
from tests.fuzz.limits import MEMORY_BYTES, MEMORY_FACTOR, SECONDS, name_of
from tests.fuzz.targets import ROOT, TARGETS, Target


class Row(msgspec.Struct):
    """One target's line of the report; a failure is its kind, how it failed, its input and how often."""

    target: str
    executions: int = 0
    accepted: int = 0
    inflated: int = 0
    measured: int = 0
    seconds: float = 0.0
    inputs: int = 0
    coverage: str = "?"
    failures: list[tuple[str, str, bytes, int]] = []

    def __str__(self) -> str:
        rate = self.executions / self.seconds if self.seconds else 0.0
        kinds = len(self.failures)
        return (
            f"{self.target:12}{self.executions:12,}{self.accepted:12,}{self.inflated:10,}{self.measured:10,}"
            f"{self.seconds:10.0f}{rate:10,.0f}{self.coverage:>8}{self.inputs:8,}{kinds:10}"
        )


HEADER = (
    f"{'target':12}{'executions':>12}{'accepted':>12}{'inflated':>10}{'measured':>10}"
    f"{'seconds':>10}{'a second':>10}{'cov':>8}{'inputs':>8}{'failures':>10}"
)


def shares(targets: list[Target], executions: int) -> dict[str, int]:
    """How many executions each target gets: by its share, all together no fewer than asked for."""
    total = sum(each.share for each in targets)
    return {each.name: -(-executions * each.share // total) for each in targets}


def fuzz(target: Target, executions: int, seed: int, folder: Path, keep_seeds: bool) -> Row:
    """Fuzz one target in a process of its own, which may die."""
    corpus = folder / "corpus"
    corpus.mkdir(parents=True)
    for data in (*kept(SEEDS, target.name), *kept(FAILED, target.name)):
        (corpus / name_of(data)).write_bytes(data)
    command = [sys.executable, "-m", "tests.fuzz.engine", target.name, str(executions), str(seed), str(folder)]
    with (folder / "log").open("wb") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, check=False).returncode
    row = Row(target=target.name)
    lines = (folder / "log").read_text(encoding="utf-8", errors="replace").splitlines()
    if (folder / "result.json").exists():
        result = msgspec.json.decode((folder / "result.json").read_bytes())
        row = msgspec.convert({**result, "target": target.name, "failures": []}, Row, strict=False)
        for where, (data, text, count) in msgspec.convert(
            result["failures"], dict[str, tuple[bytes, str, int]], strict=False
        ).items():
            row.failures.append((where, text, data, count))
    for line in lines:
        if " cov: " in line:
            row.coverage = line.partition(" cov: ")[2].split()[0]
    for artifact in [path for kind in ("crash", "timeout", "oom") for path in folder.glob(f"{kind}-*")]:
        row.failures.append((artifact.name.partition("-")[0], "\n".join(lines[-30:]), artifact.read_bytes(), 1))
    if code and not row.failures:
        row.failures.append((f"exit code {code}", "\n".join(lines[-30:]), b"", 1))
    inputs = [path.read_bytes() for path in corpus.iterdir()]
    row.inputs = len(inputs)
    keep(FAILED, target.name, (data for _, _, data, _ in row.failures if data))
    if keep_seeds:
        keep(SEEDS, target.name, cover(target.run, inputs))
    return row


def _commit() -> str:
    """What the working tree is, with ``-dirty`` for one that was changed since."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def head(command: list[str], seed: int, jobs: int) -> str:
    """What ran: date, command, machine, versions, limits."""
    packages = ", ".join(
        f"{name} {version(name)}" for name in ("kernelreg", "atheris", "msgspec", "packaging", "hypothesis")
    )
    return "\n".join(
        (
            f"{datetime.date.today().isoformat()}, {shlex.join(['python', '-m', 'tests.fuzz', *command])}",
            f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {jobs} at a time, "
            f"Python {platform.python_version()}",
            f"{packages}; commit {_commit()}; seed {seed}",
            "An execution fails with anything but a result or a KernelregError, or beyond "
            f"{SECONDS:g} s of processor time or 2 GiB of memory.",
            "accepted: gave a result; all others gave a KernelregError. "
            "inflated: of inputs made as long as the target is ever given (up to 1 MiB); measured: memory counted, "
            f"at most {MEMORY_BYTES >> 20} MiB and {MEMORY_FACTOR} × the input.",
        )
    )


def main(words: list[str]) -> int:
    """0 when nothing failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.partition("\n")[0])
    parser.add_argument("--target", choices=sorted(TARGETS), action="append", help="only this one; may be repeated")
    parser.add_argument("--executions", type=int, default=100_000, help="over all targets together")
    parser.add_argument("--seed", type=int, help="a random one if not given; the report names it")
    parser.add_argument("--jobs", type=int, default=1, help="targets at a time")
    parser.add_argument("--report", type=Path, help="a file to write the report to as well")
    parser.add_argument("--keep", action="store_true", help="add inputs that reach new lines to tests/fuzz/seeds")
    asked = parser.parse_args(words)
    targets = [each for name, each in TARGETS.items() if not asked.target or name in asked.target]
    seed = random.SystemRandom().randrange(1, 1 << 31) if asked.seed is None else asked.seed
    report = [head(words, seed, asked.jobs), "", HEADER]
    print("\n".join(report), flush=True)
    rows = []
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kernelreg-fuzz-"))
        work = [
            (TARGETS[name], executions, seed, Path(folder) / name, asked.keep)
            for name, executions in shares(targets, asked.executions).items()
        ]
        pool = stack.enter_context(ThreadPoolExecutor(asked.jobs))
        for row in pool.map(lambda each: fuzz(*each), work):
            rows.append(row)
            report.append(str(row))
            print(report[-1], flush=True)
    failures = [(row.target, *each) for row in rows for each in row.failures]
    everything = Row(target="all")
    for field in ("executions", "accepted", "inflated", "measured", "seconds", "inputs"):
        setattr(everything, field, sum(getattr(row, field) for row in rows))
    everything.coverage = ""
    everything.failures = [each for row in rows for each in row.failures]
    printed = len(report)
    report += [str(everything), ""]
    replayed = {folder: sum(1 for path in folder.rglob("*") if path.is_file()) for folder in (FAILED, SEEDS)}
    report.append(
        f"In the repository: {replayed[FAILED]} inputs that once failed (tests/fuzz/corpus), "
        f"{replayed[SEEDS]} seeds (tests/fuzz/seeds)."
    )
    for target, where, text, data, count in failures:
        kept_at = place(FAILED, target, data).relative_to(ROOT) if data else "its input is not known"
        report += ["", f"{target}: {where}, {count} times; {kept_at}", text]
    print("\n".join(report[printed:]), flush=True)
    if asked.report:
        asked.report.write_text("\n".join(report) + "\n", encoding="utf-8")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
