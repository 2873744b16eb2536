"""The pytest plugin: which cases run on which backends, and what they measured as an evidence file."""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import pytest

import kernelreg
from kernelreg.ops.tolerances import ONE_PART
from kernelreg.testing.ground import measured_on

if TYPE_CHECKING:
    from kernelreg.verify.cases import Case

#: Seconds between two writings of the evidence file.
_EVERY = 5.0


class Record(Protocol):
    """Keeps a row for the evidence file: the case, the backend, the result, and the error of its worst part."""

    def __call__(self, case: str, backend: str, result: str, worst_part: float = 0.0) -> None: ...


class Row(NamedTuple):
    """What a test recorded."""

    case: str
    backend: str
    result: str
    worst_part: float


def pytest_addoption(parser: pytest.Parser) -> None:
    """The plugin's options."""
    group = parser.getgroup("kernelreg")
    group.addoption("--backend", action="append", metavar="NAME", help="judge this backend; may be repeated")
    group.addoption("--sizes", help="the head shapes to use: real, ungrouped, small, tiny; by the device if not given")
    group.addoption("--draws", type=int, default=20, help="how many calls of each operation to draw at random")
    group.addoption("--seed", type=int, default=0, help="of the draws")
    group.addoption("--evidence", metavar="FILE", help="write what the tests recorded to this file, as a table")


def pytest_configure(config: pytest.Config) -> None:
    """The marker that pytest-xdist reads, and the writer of evidence."""
    config.addinivalue_line("markers", "xdist_group: which tests share a process, where pytest-xdist spreads them")
    path = config.getoption("--evidence")
    if path and not hasattr(config, "workerinput"):  # one of pytest-xdist's workers sees a part of the tests
        config.pluginmanager.register(_Evidence(Path(path), config))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every case of every operation, for every backend that is asked for, or that there is."""
    if "contract_backend" not in metafunc.fixturenames:
        return
    from kernelreg.errors import unknown_name
    from kernelreg.ops import operations
    from kernelreg.session import session
    from kernelreg.verify.cases import SIZES, cases

    option = metafunc.config.getoption
    device = getattr(metafunc.module, "DEVICE", None) or session.default_device(kernelreg.facts())
    fitting = "small" if device == "cpu" else "real"
    sizes = option("--sizes") or getattr(metafunc.module, "SIZES", fitting)
    registry = session.registry()
    for name in option("--backend") or ():
        if name not in registry.names():
            raise pytest.UsageError(f"--backend {name}: {unknown_name('backend', name, registry.names())}")
    if sizes not in SIZES:
        raise pytest.UsageError(f"--sizes {sizes}: {unknown_name('sizes', sizes, SIZES)}")
    backends = option("--backend") or getattr(metafunc.module, "BACKENDS", registry.names())
    owned = [
        (operation.name, backend)
        for backend in backends
        for operation in operations()
        if any(owner.name == backend for owner, _ in registry.kernels(operation.name))
    ]
    if "contract_case" not in metafunc.fixturenames:
        names = ("contract_operation", "contract_backend", "contract_device", "contract_sizes")
        metafunc.parametrize(names, [(*each, device, sizes) for each in owned])
        return
    rows = [
        pytest.param(
            case,
            backend,
            device,
            marks=pytest.mark.xdist_group(compiled_together(case, backend)),
            id=_id(case, backend),
        )
        for operation, backend in owned
        for case in cases(operation, sizes, draws=option("--draws"), seed=option("--seed"))
    ]
    metafunc.parametrize(("contract_case", "contract_backend", "contract_device"), rows)


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Record:
    """Keeps rows for the evidence file."""
    properties = request.node.user_properties

    def keep(case: str, backend: str, result: str, worst_part: float = 0.0) -> None:
        properties.append(("evidence", (case, backend, result, worst_part)))

    return keep


class _Evidence:
    """Writes what the tests recorded, as it comes: a run that is cut short keeps what it has found."""

    def __init__(self, path: Path, config: pytest.Config) -> None:
        self._path = path
        self._command = f"python -m {' '.join(['pytest', *config.invocation_params.args])}"
        self._rows: list[Row] = []
        self._done = self._failed = 0
        self._written = 0.0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" or report.skipped:
            return
        self._done += 1
        self._failed += report.failed
        told: list[tuple[str, Any]] = report.user_properties
        self._rows += [Row(*row) for name, row in told if name == "evidence"]
        if time.monotonic() - self._written > _EVERY:
            self._write()

    def pytest_sessionfinish(self) -> None:
        if self._rows:
            self._write()

    def _write(self) -> None:
        lines = evidence(self._command, self._rows, self._done, self._failed)
        self._path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        self._written = time.monotonic()


def evidence(command: str, rows: list[Row], tests: int, failed: int) -> list[str]:
    """The evidence file's lines: what was run, where, and each case's result for each backend."""
    backends = sorted({each.backend for each in rows}, key=lambda name: (name == "all", name != "torch", name))
    results = {(each.case, each.backend): each.result for each in rows}
    refused, wrong = (sum(each.result.startswith(word) for each in rows) for word in ("refused", "wrong"))
    worst = max(rows, key=lambda each: each.worst_part)
    lines = [
        f"# GDN kernels under the contract, {datetime.date.today().isoformat()}",
        "",
        f"Made by `{command}`.",
        "",
        measured_on(kernelreg.facts()),
        "",
        f"{tests} tests, {failed} failed; {len(rows) - refused - wrong} right or as it should be, {refused} refused "
        f"with a reason, {wrong} wrong. Errors are ‖out − ref‖ / ‖ref‖ against the float64 recurrence: output / states "
        "/ gradients of q, k, v, g, beta, the initial state, A_log and dt_bias.",
    ]
    if worst.worst_part:
        lines[-1] += (
            " The farthest that one token's vector, one head's state or one head's gates were off is "
            f"{worst.worst_part:.2f} times the bound on their tensor ({worst.backend}, {worst.case}); "
            f"{ONE_PART:g} times is allowed."
        )
    sections: dict[str, dict[str, str]] = {}
    for case in _in_order(each.case for each in rows):
        title, _, name = case.partition(": ")
        sections.setdefault(title, {})[case] = name
    for title, mine in sections.items():
        there = [each for each in backends if any((case, each) in results for case in mine)]
        lines += ["", f"## {title}", "", f"| case | {' | '.join(there)} |", "|---" * (len(there) + 1) + "|"]
        for case, name in mine.items():
            cells = (_cell(results.get((case, each), "–")) for each in there)
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _cell(result: str) -> str:
    """A result as a table can hold it: on one line, without the table's own sign."""
    return " ⏎ ".join(line.strip() for line in result.replace("|", "/").splitlines())


def _in_order(names: Iterable[str]) -> list[str]:
    """Cases as the suite lists them, then the others by name: tests in several processes report in any order."""
    from kernelreg.ops import operations
    from kernelreg.verify.cases import cases

    known = [f"{each.name}: {case.name}" for each in operations() for case in cases(each.name, "real")]
    place = {name: number for number, name in enumerate(known)}
    return sorted(dict.fromkeys(names), key=lambda name: (place.get(name, len(known)), _natural(name)))


def _natural(text: str) -> list[tuple[int, str]]:
    """A sorting key under which numbers come in their own order."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", text)]


def _id(case: Case, backend: str) -> str:
    return f"{case.operation}-{case.name}-{backend}"


def compiled_together(case: Case, backend: str) -> str:
    """A name that the cases share which need the same compiled kernels; a library compiles once in each process."""
    kind = (case.dtype, case.head_dim_k, case.head_dim_v, case.heads, case.value_heads, case.backward, case.capture)
    return f"{backend} {case.operation} {kind} {case.packed} {case.state_v_first}"
