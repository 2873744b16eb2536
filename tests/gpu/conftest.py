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

ROWS = pytest.StashKey[list[tuple[str, str, str]]]()
Record = Callable[[str, str, str], None]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    torch = pytest.importorskip("torch")
    here = Path(__file__).parent
    missing = None if torch.cuda.is_available() else "no CUDA device that this torch can use"
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if missing:
                item.add_marker(pytest.mark.skip(reason=missing))


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Record:
    """``record(case, backend, result)`` keeps a row for the evidence file."""
    rows = request.config.stash.setdefault(ROWS, [])
    return lambda case, backend, result: rows.append((case, backend, result))


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--evidence")
    rows = session.config.stash.get(ROWS, [])
    if not path or not rows:
        return
    facts = kernelreg.facts()
    device = facts.devices[0]
    versions = ", ".join(f"{name} {version}" for name, version in sorted(facts.packages.items()))
    backends = list(dict.fromkeys(backend for _, backend, _ in rows))
    results = {(case, backend): result for case, backend, result in rows}
    lines = [
        f"# GDN kernels under the contract, {datetime.date.today().isoformat()}",
        "",
        f"Made by `python -m {' '.join(['pytest', *session.config.invocation_params.args])}`.",
        "",
        f"{device.name}, compute capability {device.compute_capability}, driver {facts.driver and facts.driver.version}; "
        f"Python {sys.version.split()[0]}, torch {facts.torch and facts.torch.version}, "
        f"nvcc {facts.tools['nvcc'].version if 'nvcc' in facts.tools else 'none'}, {versions}.",
        f"{session.testscollected} tests, {session.testsfailed} failed. Errors are ‖out − ref‖ / ‖ref‖ against the "
        "float64 recurrence.",
        "",
        "| case | " + " | ".join(backends) + " |",
        "|---" * (len(backends) + 1) + "|",
    ]
    for case in dict.fromkeys(case for case, _, _ in rows):
        lines.append(f"| {case} | " + " | ".join(results.get((case, each), "–") for each in backends) + " |")
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")
