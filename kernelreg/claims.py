"""What an installed library says of itself, in the descriptor's words: the vocabulary of a backend's claims module.

A claims module has a function ``claims()`` that gives :class:`Claim` and :class:`Unasked` values. It runs in a child
process, so it may import the library, and change it as the question needs.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Any

import msgspec

from kernelreg.faults import fault_of


class Claim(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="claim"):
    """Whether the library would take such calls. Ask what a limit of the descriptor takes from the library.

    Attributes:
        asked: the function, list or import that was asked, as a person would look it up.
        takes: its answer.
        said: its words, where it refuses.
        kernels: the rows that the answer is about; all of the operation's where none is named.
        device: the type of device.
        compute_capability: of an NVIDIA card; None where the answer does not depend on it.
        dtype, head_dim_k, head_dim_v, features: of the call.
    """

    operation: str
    asked: str
    takes: bool
    said: str | None = None
    kernels: tuple[str, ...] = ()
    device: str = "cuda"
    compute_capability: str | None = None
    dtype: str | None = None
    head_dim_k: int | None = None
    head_dim_v: int | None = None
    features: tuple[str, ...] = ()

    @property
    def subject(self) -> str:
        """The call, and where it would run."""
        place = [f"compute capability {self.compute_capability}"] if self.compute_capability else []
        named = ("dtype", "head_dim_k", "head_dim_v")
        said = [f"{name}={getattr(self, name)}" for name in named if getattr(self, name) is not None]
        return f"{self.operation}, " + ", ".join([*place, *said, *self.features] or [self.device])


class Unasked(msgspec.Struct, frozen=True, kw_only=True, tag="unasked"):
    """What the library could not be asked on this machine, and why."""

    asked: str
    cause: str


def unasked(asked: str, error: BaseException) -> Unasked:
    """What could not be asked because of an error."""
    return Unasked(asked=asked, cause=fault_of(error))


#: What a library refuses with.
_REFUSALS = (AssertionError, NotImplementedError, RuntimeError, ValueError)


def refusal(function: Callable[..., Any], *arguments: Any, **named: Any) -> str | None:
    """The function's own refusal of these arguments; None where it did not refuse.

    What is raised further down is no refusal: with tensors that have shapes and no data (``device="meta"``), a call
    whose checks are passed ends in the launch.

    Raises:
        Exception: the function does not take such arguments at all, or fails over them without having refused.
    """
    try:
        function(*arguments, **named)
    except Exception as error:
        frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)][1:]
        if not frames or (frames[-1].co_name == function.__name__ and not isinstance(error, _REFUSALS)):
            raise
        return fault_of(error) if frames[-1].co_name == function.__name__ else None
    return None


def forget(package: str) -> None:
    """Take a package and all below it out of the imported ones, so that the next import is the first."""
    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        del sys.modules[name]
