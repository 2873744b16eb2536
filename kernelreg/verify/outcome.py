"""What a backend made of a case, as data."""

from __future__ import annotations

from typing import Literal

import msgspec

Status = Literal["right", "refused", "wrong", "not here"]


class Outcome(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One case on one backend.

    Attributes:
        device: where it ran, as torch names it.
        kernel: the row that ran; None where none did.
        status: ``right``, ``refused`` (``reason`` says why), ``wrong``, or ``not here``: the case needs a CUDA device.
        errors: ``‖out − ref‖ / ‖ref‖`` of the output ``o``, the states ``state`` and gradients ``dq`` …
        bounds: what each may be.
        worst_part: the largest error of one token's vector or one head's state, as a multiple of its tensor's bound.
        reason: why it was refused, or what is wrong.
        features, dtype: what the call used.
    """

    case: str
    operation: str
    backend: str
    device: str
    kernel: str | None = None
    status: Status
    errors: dict[str, float] = {}
    bounds: dict[str, float] = {}
    worst_part: float = 0.0
    reason: str | None = None
    features: tuple[str, ...] = ()
    dtype: str | None = None

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Which case on which backend and device."""
        return self.device, self.operation, self.backend, self.case

    @property
    def computed(self) -> bool:
        """Whether numbers of the kernel were right; refusals, argument errors and zeros show nothing."""
        return self.status == "right" and bool(self.errors) and all(error > 0 for error in self.errors.values())

    def __str__(self) -> str:
        told = " / ".join(f"{error:.1e}" for error in self.errors.values())
        if self.status == "right":
            return told or self.reason or "right"
        return f"{self.status}: {self.reason}"
