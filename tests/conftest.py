"""Every test starts from the machine as it is: no override, no memory of what other tests decided, logged or found."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

import kernelreg
from kernelreg import announce, session

# No property is timed: a loaded machine is no fault of the code.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

# The tensors of the tests are small: torch's threads would only wait for each other. Children inherit this.
os.environ["OMP_NUM_THREADS"] = "1"

# A shell's background jobs and nohup ignore these, and so would every child whose end by them is tested.
for _number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)


@pytest.fixture(autouse=True)
def clean_slate(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("KERNELREG_")]:
        monkeypatch.delenv(name)
    # What a test says of the descriptors holds whatever is measured next; tests/test_shipped.py brings them back.
    monkeypatch.setattr(session, "shipped_profiles", lambda *, plugins: ([], []))
    monkeypatch.setenv("XDG_STATE_HOME", os.fspath(tmp_path_factory.getbasetemp() / "state"))
    kernelreg.refresh()
    announce.forget()
    yield
    kernelreg.refresh()


@pytest.fixture
def facts_folder() -> Path:
    """The sample machines."""
    return Path(__file__).with_name("facts")
