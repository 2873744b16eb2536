"""A kernel that raises when it is called: the next one runs, or it is too late and the error says so."""

from __future__ import annotations

import builtins
import json
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import kernelreg
from kernelreg import KernelFailedError
from kernelreg.cli import main
from kernelreg.gdn import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from kernelreg.ops import operation_named
from tests.gdn_cases import EXACT, Call, expected, gdn_call, leaves, pool_call, relative
from tests.machines import descriptor

FEATURES = sorted(operation_named("gdn").features)


class Broken:
    """The backend ``broken``, which ranks first; ``calls`` counts how often it was tried, ``run`` is what it does."""

    def __init__(self) -> None:
        self.calls = 0
        self.error: BaseException = ValueError("no kernel for this shape")
        self.run: Callable[..., Any] = self.fail

    def __call__(self, *tensors: Any, **words: Any) -> Any:
        self.calls += 1
        return self.run(*tensors, **words)

    def fail(self, *tensors: Any, **words: Any) -> Any:
        raise self.error


@pytest.fixture
def broken() -> Iterator[Broken]:
    backend, module = Broken(), ModuleType("broken_adapter")
    module.run = backend  # type: ignore[attr-defined]
    sys.modules["broken_adapter"] = module
    rows = [
        {
            "operation": name,
            "name": "row",
            "function": "run",
            "accepts": {"features": FEATURES},
            "preference": [{"speedup": 500, "source": "made up for a test"}],
        }
        for name in ("gdn.chunk", "gdn.recurrent")
    ]
    undo = kernelreg.register({**descriptor("broken"), "kernel": rows})
    yield backend
    undo()
    sys.modules.pop("broken_adapter")
    kernelreg.refresh()


def check(call: Call) -> None:
    for value, wanted in zip(chunk_gated_delta_rule(**call), expected(call), strict=True):
        assert value is not None
        assert relative(value, wanted) <= EXACT[torch.float32]


def test_the_next_kernel_runs_and_it_is_said_once(broken: Broken, caplog: pytest.LogCaptureFixture) -> None:
    broken.error = RuntimeError("cannot compile")
    broken.error.__cause__ = OSError("no space left on device")
    with caplog.at_level(logging.WARNING, "kernelreg"):
        check(gdn_call(seed=1))
        check(gdn_call(seed=2, T=77))  # of another size, but of the same kind
    assert broken.calls == 1
    (line,) = caplog.messages
    assert "gdn.chunk on cpu runs torch chunk: broken row is installed and ranks higher, but cannot run" in line
    assert "RuntimeError: cannot compile ← OSError: no space left on device" in line
    assert "fix: python -m kernelreg verify gdn.chunk --backend broken" in line
    like = kernelreg.resolve("gdn", like=gdn_call())
    assert [str(each.reasons[0].code) for each in like.candidates if each.backend == "broken"] == ["quarantined"]


def test_another_kind_of_call_is_tried_for_itself(broken: Broken) -> None:
    check(gdn_call())
    assert kernelreg.resolve("gdn").backend == "broken"
    check(gdn_call(edges=[0, 100, 300]))
    check(gdn_call(K=16))
    assert broken.calls == 3
    assert len(kernelreg.quarantine()) == 3


def test_the_quarantine_is_listed_saved_shown_and_cleared(
    broken: Broken, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not kernelreg.quarantine()
    check(gdn_call())
    (finding,) = kernelreg.quarantine()
    assert (finding.backend, finding.kernel, *finding.devices) == ("broken", "row", "cpu")
    assert str(finding) in str(kernelreg.quarantine())
    kernelreg.quarantine().save(tmp_path / "quarantine.json")
    (saved,) = json.loads((tmp_path / "quarantine.json").read_text())["findings"]
    assert "no kernel for this shape" in saved["cause"]
    assert main(["doctor"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "quarantine: broken row is kept from gdn.chunk calls like" in told
    with pytest.raises(kernelreg.ConfigurationError, match="did you mean 'broken'"):
        kernelreg.quarantine().clear("brokn")
    kernelreg.quarantine().clear("torch")
    check(gdn_call())
    assert broken.calls == 1
    kernelreg.quarantine().clear("broken")
    assert not kernelreg.quarantine()
    check(gdn_call())
    assert broken.calls == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [({"backend": "broken"}, "broken is forced"), ({"strict": True}, "strict allows no other")],
)
def test_where_no_other_is_allowed_it_raises(broken: Broken, words: dict[str, Any], told: str) -> None:
    with kernelreg.use(**words), pytest.raises(KernelFailedError, match=f"no kernel for this shape; {told}") as caught:
        chunk_gated_delta_rule(**gdn_call())
    assert caught.value.__cause__ is broken.error
    assert not kernelreg.quarantine()


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA driver error: unspecified launch failure"),
        RuntimeError("Triton Error [CUDA]: invalid argument"),
        RuntimeError("<CUresult.CUDA_ERROR_LAUNCH_FAILED: 719>"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB"),
        kernelreg.CallError("cu_seqlens is wrong"),
        KeyboardInterrupt(),
    ],
    ids=repr,
)
def test_what_no_other_kernel_can_mend_is_raised_as_it_is(broken: Broken, error: BaseException) -> None:
    broken.error = error
    with pytest.raises(type(error)) as caught:
        chunk_gated_delta_rule(**gdn_call())
    assert caught.value is error
    assert not kernelreg.quarantine()


@pytest.mark.parametrize("how", ["from None", "in a group"])
def test_an_error_of_the_device_is_seen_behind_another(broken: Broken, how: str) -> None:
    lost = RuntimeError("CUDA error: an illegal memory access was encountered")
    group = vars(builtins).get("ExceptionGroup")
    if how == "in a group" and group is None:
        pytest.skip("exception groups came with Python 3.11")

    def fail(*tensors: Any, **words: Any) -> Any:
        if group is not None and how == "in a group":
            raise group("several", [ValueError("first"), lost])
        try:
            raise lost
        except RuntimeError:
            raise ValueError("no kernel") from None

    broken.run = fail
    with pytest.raises((ValueError, group or ValueError)):
        chunk_gated_delta_rule(**gdn_call())
    assert not kernelreg.quarantine()


@pytest.mark.parametrize("handled", [torch.OutOfMemoryError("CUDA out of memory"), KeyboardInterrupt()], ids=repr)
def test_what_the_caller_is_handling_meanwhile_is_not_the_kernels(broken: Broken, handled: BaseException) -> None:
    try:
        raise handled
    except BaseException:  # a server that tries again, with less
        check(gdn_call())
    (finding,) = kernelreg.quarantine()
    assert finding.cause == "it failed when it was called: ValueError: no kernel for this shape"


@pytest.mark.parametrize(
    "error", [SystemExit(3), MemoryError(), AssertionError(), RecursionError("too deep")], ids=repr
)
def test_a_library_may_raise_what_it_likes(broken: Broken, error: BaseException) -> None:
    broken.error = error
    check(gdn_call())
    assert type(error).__name__ in kernelreg.quarantine()[0].cause


def test_gradients_come_from_the_kernel_that_ran(broken: Broken) -> None:
    call, same = gdn_call(T=70), gdn_call(T=70)
    inputs, others = leaves(call), leaves(same)
    torch.autograd.backward(chunk_gated_delta_rule(**call)[0].sum())
    torch.autograd.backward(expected(same)[0].sum())
    for name, x in inputs.items():
        mine, wanted = x.grad, others[name].grad
        assert mine is not None
        assert wanted is not None
        assert relative(mine, wanted) <= 1e-4


@pytest.mark.parametrize("inference", [False, True])
def test_states_that_were_not_written_are_updated_once(broken: Broken, inference: bool) -> None:
    with torch.inference_mode(inference):
        call = pool_call([1, 1, 1], [3, -1, 4], packed=False)
        wanted = expected(call)
        o, _ = fused_recurrent_gated_delta_rule(**call)
    assert broken.calls == 1
    for value, exact in zip((o, call["initial_state"]), wanted, strict=True):
        assert relative(value, exact) <= EXACT[torch.float32]


def test_states_that_were_written_are_not_updated_again(broken: Broken) -> None:
    def write_and_fail(*tensors: Any, initial_state: torch.Tensor, **words: Any) -> Any:
        initial_state[4] += 1
        broken.fail()

    broken.run = write_and_fail
    call = pool_call([1, 1, 1], [3, -1, 4], packed=False)
    with pytest.raises(KernelFailedError, match="the states have been written"):
        fused_recurrent_gated_delta_rule(**call)
    fused_recurrent_gated_delta_rule(**call)  # the next such call has another kernel
    assert broken.calls == 1


def test_once_a_kernel_has_run_states_are_not_copied_and_a_failure_is_too_late(broken: Broken) -> None:
    with kernelreg.use(backend="torch"):
        broken.run = kernelreg.resolve("gdn.recurrent").function
    call = pool_call([1, 1], [3, 4], packed=False)
    fused_recurrent_gated_delta_rule(**call)
    broken.run = broken.fail
    with pytest.raises(KernelFailedError, match="the states may have been written"):
        fused_recurrent_gated_delta_rule(**call)
    fused_recurrent_gated_delta_rule(**call)
    assert broken.calls == 2


@pytest.fixture
def second(broken: Broken) -> Iterator[None]:
    """Another backend that ranks next and does what ``broken`` does."""
    kernel = {"accepts": {"features": FEATURES}, "preference": [{"speedup": 400, "source": "made up for a test"}]}
    undo = kernelreg.register(descriptor("second", adapter="broken_adapter", kernel=kernel))
    yield
    undo()


@pytest.mark.usefixtures("second")
def test_each_kernel_that_fails_is_said_and_the_next_one_tried(
    broken: Broken, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "kernelreg"):
        check(gdn_call(seed=1))
        check(gdn_call(seed=2))
    assert broken.calls == 2
    told = [line.partition(" is installed")[0].removeprefix("gdn.chunk on cpu runs ") for line in caplog.messages]
    assert told == ["second only: broken row", "torch chunk: second only", "torch chunk: broken row"]


def test_another_row_of_the_same_backend_may_run_and_it_is_said(
    broken: Broken, caplog: pytest.LogCaptureFixture
) -> None:
    with kernelreg.use(backend="torch"):
        sys.modules["broken_adapter"].well = kernelreg.resolve("gdn").function  # type: ignore[attr-defined]
    rows = [
        {
            "operation": "gdn.chunk",
            "name": name,
            "function": name,
            "accepts": {"features": FEATURES},
            "preference": [{"speedup": speedup, "source": "made up for a test"}],
        }
        for name, speedup in (("run", 900), ("well", 800))
    ]
    undo = kernelreg.register({**descriptor("third", adapter="broken_adapter"), "kernel": rows})
    try:
        with caplog.at_level(logging.WARNING, "kernelreg"):
            check(gdn_call())
    finally:
        undo()
    (line,) = caplog.messages
    assert line.startswith("gdn.chunk on cpu runs third well: third run is installed and ranks higher, but cannot run")


@pytest.mark.usefixtures("second")
def test_where_all_have_failed_the_last_error_is_the_cause(broken: Broken) -> None:
    with kernelreg.use(disable="torch"), pytest.raises(kernelreg.NoBackendError) as caught:
        chunk_gated_delta_rule(**gdn_call())
    assert caught.value.__cause__ is broken.error
    assert str(caught.value).count("ValueError: no kernel for this shape") == 2
    assert broken.calls == 2
