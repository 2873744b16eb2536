"""The conformance suite for the backend that runs everywhere."""

from __future__ import annotations

import pytest

from kernelreg.testing.contract import test_contract, test_some_case_runs

pytest.importorskip("torch")
__all__ = ["test_contract", "test_some_case_runs"]

DEVICE = "cpu"
BACKENDS = ("torch",)
