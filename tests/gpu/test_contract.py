"""The conformance suite for every backend on a real GPU."""

from __future__ import annotations

from kernelreg.testing.contract import test_contract

__all__ = ["test_contract"]

DEVICE = "cuda:0"
