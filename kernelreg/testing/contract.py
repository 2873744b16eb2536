"""The conformance suite: ``from kernelreg.testing.contract import test_contract`` in a test module runs it there.

The module may say where and for whom: ``DEVICE = "cuda:0"``, ``BACKENDS = ("acme",)``, ``SIZES = "small"``.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kernelreg.verify.cases import Case
from kernelreg.verify.judge import judge

__all__ = ["test_contract"]


def test_contract(
    contract_case: Case, contract_backend: str, contract_device: str, record: Callable[[str, str, str], None]
) -> None:
    """The right numbers within the operation's tolerances, or a refusal with a reason."""
    outcome = judge(contract_case, contract_backend, contract_device)
    if outcome.status == "not here":
        pytest.skip(str(outcome.reason))
    record(f"{contract_case.operation}: {contract_case.name}", contract_backend, str(outcome))
    assert outcome.status != "wrong", outcome.reason
