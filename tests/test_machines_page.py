"""``docs/machines.md`` says of every case what the tests of that name find.

python -m tests.test_machines_page    # print the tables
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from kernelreg.machine import TorchBuild
from tests import test_drivers, test_surroundings, test_torch_builds

PAGE = Path(__file__).parent.parent / "docs" / "machines.md"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def code(texts: Iterable[str]) -> str:
    return "<br>".join(f"`{each}`" for each in texts)


def driver_rows() -> Iterable[Sequence[str]]:
    for case in test_drivers.CASES:
        yield case.name, str(len(case.devices.split())), code(case.said)


def torch_rows() -> Iterable[Sequence[str]]:
    for case in test_torch_builds.CASES:
        build: TorchBuild | None = case.build
        name = "none" if build is None else f"{build.version or 'version unknown'} ({build.build_name})"
        flash_qla, fla, torch = (code(sorted(each)) or "–" for each in case.reasons)
        yield case.name, name, code([case.said] if case.said else []), flash_qla, fla, torch


TABLES = {
    "drivers": table(("case", "devices", "problems"), driver_rows()),
    "torch": table(("torch", "facts", "problem", "FlashQLA", "FLA", "torch kernel"), torch_rows()),
    "imports": table(
        ("torch", "`import-error` with"), ((name, code([said])) for name, (_, said) in test_torch_builds.FAULTS.items())
    ),
    "surroundings": table(
        ("surrounding", "problem"),
        ((each.name, code([each.said] if each.said else [])) for each in test_surroundings.PLACES),
    ),
    "files": table(("file", "error"), ((name, code([said])) for name, (_, said) in test_surroundings.FILES.items())),
}


@pytest.mark.parametrize("name", TABLES)
def test_the_page_has_every_case(name: str) -> None:
    assert TABLES[name] in PAGE.read_text(encoding="utf-8")


if __name__ == "__main__":
    for name, text in TABLES.items():
        print(f"<!-- {name} -->\n{text}\n")  # noqa: T201
