"""docs/evidence/performance.md is what benchmarks/performance.py makes of the files beside it, and reads them right."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
GROUND = "NVIDIA H200, compute capability 9.0, driver 1; Python 3.12.3, torch 2.11.0, nvcc 13.0, triton 3.6.0."


@pytest.fixture(scope="module")
def performance() -> ModuleType:
    spec = importlib.util.spec_from_file_location("performance", ROOT / "benchmarks" / "performance.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_is_made_of_the_files_beside_it(performance: ModuleType) -> None:
    made = performance.page(performance.reports_in(ROOT / "docs" / "evidence"))
    assert (ROOT / "docs" / "evidence" / "performance.md").read_text(encoding="utf-8") == made


def verdicts(performance: ModuleType, **files: str) -> dict[str, tuple[str, str]]:
    """Figure and verdict by the aim's first words, of the files with these texts."""
    text = performance.page([performance.Report(f"{name}.md", text) for name, text in files.items()])
    rows = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == len(performance.AIMS)
    return {cells[0].strip(): (cells[1], cells[2]) for cells in rows}


def test_without_files_nothing_is_measured(performance: ModuleType) -> None:
    assert set(verdicts(performance).values()) == {("not measured", "–")}


HOT = """# What a call costs before its kernel, 2026-12-03

Made by `python benchmarks/hot_path.py`: tensors on cuda

{ground}

| what | µs a call | over the kernel, µs | spread |
|---|---|---|---|
| the kernel, called | 0.20 | 0.00 | 2% |
| a held `Resolution.function` | 0.31 | 0.11 | 2% |
| `kernelreg.gdn`, prefill | 2.70 | {over} | 2% |

FLA's dispatcher, FlashQLA off, over kernelreg's: × 4.9

FLA's dispatcher, FlashQLA on, over kernelreg's: × 7.1
"""


def test_the_hot_path_is_read_cell_by_cell(performance: ModuleType) -> None:
    found = verdicts(performance, a=HOT.format(over="2.10", ground=GROUND))
    assert found["hot path: at most 2 µs a call over the adapter, on CUDA tensors"] == ("2.10 µs", "**no**")
    assert found["a held `Resolution.function` adds at most 0.2 µs"] == ("0.11 µs", "yes")
    assert found["hot path: at least 5 times cheaper than FLA's dispatcher (FlashQLA off, on)"] == (
        "× 4.9, × 7.1",
        "**no**",
    )


def test_the_newest_file_of_such_a_machine_counts(performance: ModuleType) -> None:
    aim = "hot path: at most 2 µs a call over the adapter, on CUDA tensors"
    files = {"d1": HOT.format(over="2.50", ground=GROUND), "d2": HOT.format(over="1.90", ground=GROUND)}
    files["d3"] = HOT.format(over="9.00", ground="x86_64, 2 cores, no GPU; Python 3.12.3, torch 2.11.0")
    assert verdicts(performance, **files)[aim] == ("1.90 µs", "yes")


HOST = """# What a prefill call costs with its host work, 2026-12-03

Made by `python benchmarks/prefill_host.py`: H 16

{ground}

## 1,024 tokens, dense

| side | ms a call | ± | × over the faster library | × over the best eager call | error of o, state |
|---|---|---|---|---|---|
| FLA's own | 0.9 | 1% | 1.00 | 0.50 | 4e-3 |
| kernelreg (fla) | 0.45 | 1% | 2.00 | 1.00 | 4e-3 |
| kernelreg, captured | 0.1 | 1% | 9.00 | 4.50 | 4e-3 |
| kernelreg, captured, fla | 0.3 | 1% | 3.00 | 1.50 | 4e-3 |

## 1,024 tokens, varlen, 8 sequences

| side | ms a call | ± | × over the faster library | × over the best eager call | error of o, state |
|---|---|---|---|---|---|
| kernelreg (fla) | 0.8 | 1% | 1.20 | 0.60 | 4e-3 |
| kernelreg, plan (fla) | 0.6 | 1% | 1.60 | 0.80 | 4e-3 |
| kernelreg, plan, fla | 0.1 | 1% | 9.00 | 9.00 | 4e-3 |
| kernelreg, captured | 0.1 | 1% | 9.00 | 4.10 | 4e-3 |
"""


def test_host_cost_is_read_by_shape_and_of_the_automatic_choice(performance: ModuleType) -> None:
    found = verdicts(performance, a=HOST.format(ground=GROUND))
    eager, met = found["eager calls at least 1.5 times faster than the faster library's own entry point"]
    assert eager.startswith("1,024 tokens, dense: × 2; 1,024 tokens, varlen, 8 sequences: × 1.6; 4,096 tokens, dense:")
    assert met == "**no**"  # two shapes are missing
    assert found["captured: at least 4 times faster than the best eager call at 1,024 tokens"] == (
        "1,024 tokens, dense: × 4.5; 1,024 tokens, varlen, 8 sequences: × 4.1",
        "yes",
    )


def test_the_automatic_choices_figures_are_those_that_its_benchmark_prints(performance: ModuleType) -> None:
    pytest.importorskip("torch")
    spec = importlib.util.spec_from_file_location("auto_choice", ROOT / "benchmarks" / "auto_choice.py")
    assert spec is not None
    assert spec.loader is not None
    auto = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(auto)
    spots = auto.plan(auto.argparse.Namespace(heads=None, models=list(auto.MODELS), tp=[1, 2, 4, 8], tokens=[4096]))
    assert len({(each.shape, each.tokens, each.sequences) for each in spots}) == len(spots) == 12 * 2

    def row(automatic: float, own: float) -> dict[str, object]:
        times = {auto.AUTO: [automatic] * 3, auto.OWN: [own] * 3, ("fla", "triton"): [1e-4] * 3}
        made: dict[str, object] = auto.row(spots[0], times, "fla triton", {})
        return made

    rows = [row(1.02e-4, 2e-4), row(1.05e-4, 1.8e-4)]
    head = ["# The automatic choice beside every kernel", "", GROUND, ""]
    text = "\n".join([*head, *auto.lines_of(rows)])
    found = verdicts(performance, a=text)
    within = "the automatic choice is within 3% of the best kernel at every point of the grid"
    own = "the automatic choice, geometric mean: at least 1.3 times faster than FLA's own entry point with FlashQLA"
    assert found[within] == ("1 of 2 points, the worst × 1.050 (by the kernels' own times 2 of 2)", "**no**")
    assert found[own] == ("× 1.83 over 2 points, the least × 1.71", "yes")
    cut = text + "\n\nNot measured, for lack of time: a; b.\n"
    assert verdicts(performance, a=cut)[own][0].endswith("; 2 points of the grid not measured")
    whole = "\n".join([*head, *auto.lines_of(rows[:1])])
    assert verdicts(performance, a=whole)[within][1] == "yes"
    assert verdicts(performance, a=whole + "\n\nNot measured, for lack of time: a.\n")[within][1] == "**no**"
