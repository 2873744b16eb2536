"""Every test starts from the machine as it is: no override, no memory of what other tests decided or logged."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import kernelreg
from kernelreg import announce


@pytest.fixture(autouse=True)
def clean_slate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("KERNELREG_")]:
        monkeypatch.delenv(name)
    kernelreg.refresh()
    announce.forget()
    yield
    kernelreg.refresh()


@pytest.fixture
def facts_folder() -> Path:
    """The sample machines."""
    return Path(__file__).with_name("facts")
