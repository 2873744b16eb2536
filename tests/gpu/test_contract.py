"""The conformance suite for every backend on a real GPU."""

from __future__ import annotations

from kernelreg.testing.contract import test_contract, test_some_case_runs

__all__ = ["test_contract", "test_some_case_runs"]

DEVICE = "cuda:0"
