"""Claims that this project's descriptors make of its own runs, against what lies in docs/evidence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kernelreg.descriptor import Descriptor, Kernel
from kernelreg.registry import discover

ROOT = Path(__file__).parent.parent
ROWS = [
    pytest.param(backend.descriptor, kernel, id=f"{backend.name}-{kernel.operation}-{kernel.name}")
    for backend in discover(plugins=False).backends
    for kernel in backend.descriptor.kernel
]


@pytest.mark.parametrize(("descriptor", "kernel"), ROWS)
def test_a_measured_rank_stands_in_the_file_that_it_cites(descriptor: Descriptor, kernel: Kernel) -> None:
    for preference in kernel.preference:
        if not preference.source.startswith("docs/evidence/"):
            continue
        text = (ROOT / preference.source).read_text(encoding="utf-8")
        told = {round(float(each), 1) for each in re.findall(r"× (\d+\.\d+)", text)}
        assert preference.speedup in told, preference


@pytest.mark.parametrize(("descriptor", "kernel"), ROWS)
def test_a_validated_capability_has_a_run_of_the_suite(descriptor: Descriptor, kernel: Kernel) -> None:
    """Some file holds a table of the operation with this backend's numbers, on such a card, by a release that fits."""
    for capability in kernel.validated_on:
        if capability != "cpu":
            assert any(_shows(path, descriptor, kernel, capability) for path in (ROOT / "docs/evidence").glob("*.md"))


def _shows(path: Path, descriptor: Descriptor, kernel: Kernel, capability: str) -> bool:
    """Whether a file of the suite has a number of this backend for the operation: by section, or by the row's name."""
    text = path.read_text(encoding="utf-8")
    if "contract" not in text.splitlines()[0] or f"compute capability {capability}" not in text:
        return False
    section, columns = "", [""]
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if line.startswith("## "):
            section = line.removeprefix("## ")
        elif line.startswith("| case"):
            columns = cells
        elif line.startswith("| ") and kernel.operation in (section, cells[1].partition(":")[0]):
            result = dict(zip(columns, cells, strict=False)).get(descriptor.name, "")
            if re.match(r"\d\.\de", result):
                return True
    return False
