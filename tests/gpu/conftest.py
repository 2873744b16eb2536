"""GPU tests: skipped with a reason where there is no GPU; what they measured can be written to a file.

``python -m pytest tests/gpu -m gpu --evidence docs/evidence/NAME.md`` writes every measurement with date, versions
and card.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import kernelreg

Record = Callable[[str, str, str], None]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    torch = pytest.importorskip("torch")
    missing = None if torch.cuda.is_available() else "no CUDA device that this torch can use"
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        item.add_marker(pytest.mark.gpu)
        item.add_marker(pytest.mark.xdist_group(_group(item)))
        if missing:
            item.add_marker(pytest.mark.skip(reason=missing))


def _group(item: pytest.Item) -> str:
    """Which tests share a process under pytest-xdist's ``--dist loadgroup``: those that compile the same kernels."""
    kinds = ("float32", "head_dim", "gradients", "captured", "packed", "strided", "scale")
    backend = next((each for each in ("[torch]", "[fla]", "[flash_qla]") if item.name.endswith(each)), "")
    return backend + next((kind for kind in kinds if kind in item.name), "")


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Record:
    """``record(case, backend, result)`` keeps a row for the evidence file."""
    properties = request.node.user_properties
    return lambda case, backend, result: properties.append(("evidence", (case, backend, result)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    path = config.getoption("--evidence")
    reports = {name: terminalreporter.getreports(name) for name in ("passed", "failed")}
    done = [report for name in ("passed", "failed") for report in reports[name] if report.when == "call"]
    rows = [value for report in done for name, value in report.user_properties if name == "evidence"]
    if not path or not rows:
        return
    facts = kernelreg.facts()
    device = facts.devices[0]
    versions = ", ".join(f"{name} {version}" for name, version in sorted(facts.packages.items()))
    known = ("torch", "fla", "flash_qla", "all")
    backends = sorted({backend for _, backend, _ in rows}, key=known.index)
    results = {(case, backend): result for case, backend, result in rows}
    lines = [
        f"# GDN kernels under the contract, {datetime.date.today().isoformat()}",
        "",
        f"Made by `python -m {' '.join(['pytest', *config.invocation_params.args])}`.",
        "",
        f"{device.name}, compute capability {device.compute_capability}, "
        f"driver {facts.driver and facts.driver.version}; "
        f"Python {sys.version.split()[0]}, torch {facts.torch and facts.torch.version}, "
        f"nvcc {facts.tools['nvcc'].version if 'nvcc' in facts.tools else 'none'}, {versions}.",
        f"{len(done)} tests, {len(reports['failed'])} failed. Errors are ‖out − ref‖ / ‖ref‖ against the "
        "float64 recurrence.",
        "",
        "| case | " + " | ".join(backends) + " |",
        "|---" * (len(backends) + 1) + "|",
    ]
    for case in sorted({case for case, _, _ in rows}):
        lines.append(f"| {case} | " + " | ".join(results.get((case, each), "–") for each in backends) + " |")
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")
