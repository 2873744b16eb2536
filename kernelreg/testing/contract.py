"""The conformance suite: ``from kernelreg.testing.contract import *`` in a test module runs it there.

The module may say where and for whom: ``DEVICE = "cuda:0"``, ``BACKENDS = ("acme",)``, ``SIZES = "small"``.
"""

from __future__ import annotations

import pytest

import kernelreg
from kernelreg.ops import operation_named
from kernelreg.testing.plugin import Record
from kernelreg.verify.cases import Case, cases
from kernelreg.verify.judge import foresee, judge

__all__ = ["test_contract", "test_some_case_runs"]


def test_contract(contract_case: Case, contract_backend: str, contract_device: str, record: Record) -> None:
    """The right numbers within the operation's tolerances, or a refusal with a reason."""
    outcome = judge(contract_case, contract_backend, contract_device)
    if outcome.status == "not here":
        pytest.skip(str(outcome.reason))
    record(f"{contract_case.operation}: {contract_case.name}", contract_backend, str(outcome), outcome.worst_part)
    assert outcome.status != "wrong", outcome.reason


def test_some_case_runs(
    contract_operation: str, contract_backend: str, contract_device: str, contract_sizes: str
) -> None:
    """A backend that refuses every case was not judged at all, and must not look as if it had been."""
    try:
        with kernelreg.use(backend=contract_backend):
            kernelreg.resolve(contract_operation, device=contract_device)
    except kernelreg.NoBackendError as error:
        pytest.skip(f"{contract_backend} cannot run here: {error}")
    name = operation_named(contract_operation).name
    offered = [case for case in cases(name, contract_sizes) if not case.broken]
    if not any(foresee(case, contract_backend, contract_device)["kernel"] for case in offered):
        plainest = judge(offered[0], contract_backend, contract_device)
        pytest.fail(f"every case is refused; the first one: {plainest.reason}")
