"""A kernel that raises when it is called: whether another may run in its stead.

It may where nothing has happened yet: the device is well, no argument that is updated in place was written, and neither
the policy nor a CUDA graph that is being captured asks for this kernel and no other. Imports torch.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from kernelreg.call import Call
from kernelreg.errors import CallError, KernelFailedError
from kernelreg.faults import all_behind, fault_of, told
from kernelreg.findings import Finding, kind_of
from kernelreg.session import session

#: How torch, Triton, TileLang and the CUDA bindings word what a driver or runtime call answered.
_DEVICE_ERROR = re.compile(
    r"\b(CUDA|HIP|XPU)( driver| runtime)? error:|Triton Error \[|\b(CUDA|HIP)_ERROR|\b(cuda|hip)Error|"
    r"illegal memory access|device-side assert|out of memory",
    re.IGNORECASE,
)
_DEVICE_ERRORS = tuple(
    kind
    for kind in (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", None), torch.cuda.CudaError)
    if kind is not None
)


class Kept:
    """The states that a call may update in place, as they were before it."""

    def __init__(self, pool: Tensor, slots: Tensor) -> None:
        self._pool = pool
        self._rows = slots.flatten().clamp(0, max(len(pool) - 1, 0)).long() if len(pool) else slots.new_zeros(0).long()
        self._before = pool.detach().index_select(0, self._rows)

    def untouched(self) -> bool:
        """Whether every bit is as it was."""
        now = self._pool.detach().index_select(0, self._rows)
        return torch.equal(now.view(torch.uint8), self._before.view(torch.uint8))


def keep_away(call: Call, error: BaseException, kept: Kept | None, *, in_place: bool) -> None:
    """Quarantine the kernel that raised, so that the next kernel runs this call and those of its kind.

    Args:
        call: what failed.
        error: what the kernel raised.
        kept: the states as they were before the call, where they are known.
        in_place: whether the call updates states in place.

    Raises:
        CallError: the caller's own fault, as the kernel told it.
        KernelFailedError: the policy asks for this kernel, or it is too late for another. ``error`` is its cause.
        BaseException: ``error`` itself, where the device failed: its context may be gone.
    """
    if isinstance(error, CallError) or _of_device(error):
        raise error
    cause = fault_of(error)
    grounds = session.grounds(device=call.device)
    decision = grounds.decide(call)
    name = f"{decision.backend} {decision.kernel}"
    failed = f"{call.operation} on {call.device}: {name} failed: {cause}"
    forced = call.operation in grounds.policy.backend
    if forced or grounds.policy.strict:
        why = f"{decision.backend} is forced" if forced else "strict allows no other"
        raise KernelFailedError(f"{failed}; {why}, so no other kernel runs") from error
    session.keep_away(
        Finding(
            operation=call.operation,
            backend=decision.backend or "",
            kernel=decision.kernel or "",
            devices=frozenset({call.device}),
            kind=kind_of(call),
            cause=f"it failed when it was called: {cause}",
            fix=f"python -m kernelreg verify {call.operation} --backend {decision.backend}",
        )
    )
    late = _too_late(call, kept, in_place, error)
    if late:
        raise KernelFailedError(f"{failed}; {late}: another kernel runs the next such call, not this one") from error


def _of_device(error: BaseException) -> bool:
    return any(isinstance(each, _DEVICE_ERRORS) or _DEVICE_ERROR.search(told(each)) for each in all_behind(error))


def _too_late(call: Call, kept: Kept | None, in_place: bool, error: BaseException) -> str | None:
    """Why nothing may run in the failed kernel's stead; None where it may.

    Raises:
        RuntimeError: the device failed, which a launch that came before only tells now.
    """
    if "capture" in call.features:
        return "a CUDA graph is being captured"
    if call.device.startswith("cuda"):
        try:
            torch.cuda.synchronize(call.device)
        except RuntimeError as failed:
            raise failed from error
    if in_place and kept is None:
        return "the states may have been written"
    if kept is not None and not kept.untouched():
        return "the states have been written"
    return None
