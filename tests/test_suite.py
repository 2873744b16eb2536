"""The conformance suite as an author of a backend runs it: a pytest plugin, by name, with its evidence file."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributions import install
from tests.test_verify import ADAPTER, DESCRIPTOR

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def suite(tmp_path: Path) -> Run:
    """Runs the suite in a project of its own, on a machine with the backend ``acme`` installed."""
    files = {"acme_gdn/__init__.py": "", "acme_gdn/backend.toml": DESCRIPTOR, "acme_adapter.py": ADAPTER}
    install(tmp_path / "site", "acme", entry_points={"acme": "acme_gdn"}, files=files)
    module = tmp_path / "project" / "test_acme.py"
    module.parent.mkdir()
    module.write_text(
        "from kernelreg.testing.contract import test_contract, test_some_case_runs\nDEVICE = 'cpu'\nSIZES = 'tiny'\n"
    )

    def run(*words: str, fault: str = "") -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "FAULT": fault}
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "kernelreg.testing.plugin", "--draws", "3", *words],
            cwd=module.parent,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )

    return run


def test_a_backend_of_ones_own_is_judged_by_name(suite: Run) -> None:
    done = suite("--backend", "acme", "--evidence", "found.md")
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout
    assert "failed" not in done.stdout


def test_a_wrong_kernel_fails_the_cases_where_it_is_wrong_and_no_other(suite: Run, tmp_path: Path) -> None:
    done = suite("--backend", "acme", "--evidence", "found.md", fault="wrong@varlen")
    assert done.returncode == 1
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    assert any("gdn.chunk-varlen-acme" in line for line in failed)
    assert not any("gdn.chunk-dense-acme" in line for line in failed)
    evidence = (tmp_path / "project" / "found.md").read_text(encoding="utf-8")
    assert "| varlen | wrong: o is 5.0e-02 off" in evidence
    assert f"{len(failed)} failed" in evidence


def test_a_backend_that_refuses_everything_does_not_pass(suite: Run, tmp_path: Path) -> None:
    descriptor = tmp_path / "site" / "acme_gdn" / "backend.toml"
    descriptor.write_text(DESCRIPTOR.replace("accepts = {", "accepts = { head_dim_k = [7],", 1))
    done = suite("--backend", "acme")
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    assert len(failed) == 2
    assert all("test_some_case_runs" in line for line in failed)
    assert "every case is refused; the first one: head-dim: needs head_dim_k 7" in done.stdout


def test_what_was_found_is_kept_when_a_run_is_cut_short(suite: Run, tmp_path: Path) -> None:
    done = suite("--backend", "acme", "--evidence", "found.md", fault="abort@torch.int32")
    assert done.returncode not in (0, 1)
    evidence = (tmp_path / "project" / "found.md").read_text(encoding="utf-8")
    assert "| dense | 1." in evidence


@pytest.mark.parametrize(
    ("words", "told"),
    [(("--backend", "acm"), "did you mean 'acme'"), (("--sizes", "reel"), "did you mean 'real'")],
)
def test_an_unknown_name_is_not_an_empty_run(suite: Run, words: tuple[str, ...], told: str) -> None:
    done = suite(*words)
    assert done.returncode == 2
    assert told in done.stdout
    assert "Traceback" not in done.stdout
