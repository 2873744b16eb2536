"""The child process of ``kernelreg verify``: judges one backend, and tells its parent of each case as it goes.

Reads a task as one line of JSON from standard input, which its parent holds open for as long as it lives. Standard
output carries one JSON line a message; whatever the libraries print there goes to standard error instead.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import msgspec

from kernelreg.children import end_with_parent
from kernelreg.verify.outcome import Outcome


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What to judge. ``skip`` cases are done already, by a child before this one."""

    operation: str
    backend: str
    device: str
    sizes: str
    draws: int
    skip: int


class Started(msgspec.Struct, frozen=True, kw_only=True, tag="started"):
    """A case begins; if nothing follows, it took the process with it."""

    case: str
    kernel: str | None
    features: tuple[str, ...]
    dtype: str


class Judged(msgspec.Struct, frozen=True, kw_only=True, tag="judged"):
    """A case is over."""

    outcome: Outcome


Message = Started | Judged


def main() -> int:
    """Judge until the cases, or the device, are used up."""
    task = msgspec.json.decode(sys.stdin.buffer.readline(), type=Task)
    end_with_parent()
    wire = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)

    def tell(message: Message) -> None:
        wire.write(msgspec.json.encode(message) + b"\n")

    from kernelreg.session import session
    from kernelreg.verify.cases import cases
    from kernelreg.verify.judge import foresee, judge

    session.trust_all()
    for case in cases(task.operation, task.sizes, draws=task.draws, quick=True)[task.skip :]:
        tell(Started(case=case.name, dtype=case.dtype, **foresee(case, task.backend, task.device)))
        tell(Judged(outcome=judge(case, task.backend, task.device)))
        if not _alive(task.device):
            return 1  # a CUDA error outlives the call that made it: the next case needs a new process
    return 0


def _alive(device: str) -> bool:
    if not device.startswith("cuda"):
        return True
    torch: Any = sys.modules["torch"]
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True
