"""GPU tests: skipped with a reason where there is no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    torch = pytest.importorskip("torch")
    missing = None if torch.cuda.is_available() else "no CUDA device that this torch can use"
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        item.add_marker(pytest.mark.gpu)
        if missing:
            item.add_marker(pytest.mark.skip(reason=missing))
