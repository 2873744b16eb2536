"""Why a kernel is not used: stable codes, and one small value that carries one reason."""

from __future__ import annotations

from enum import Enum

import msgspec


class ReasonCode(str, Enum):
    """Stable codes; each compares equal to its string. Their order here is the order in which reasons are told."""

    # The policy's word comes first: where a person decided, nothing else needs reading.
    NOT_SELECTED = "not-selected"
    DISABLED = "disabled"
    LOCKED = "locked"
    # The machine.
    NO_DEVICE = "no-device"
    DEVICE_TYPE = "device-type"
    COMPUTE_CAPABILITY = "compute-capability"
    PLATFORM = "platform"
    PYTHON_VERSION = "python-version"
    TORCH_MISSING = "torch-missing"
    TORCH_VERSION = "torch-version"
    CUDA_BUILD = "cuda-build"
    CUDA_VERSION = "cuda-version"
    DRIVER_VERSION = "driver-version"
    PACKAGE_MISSING = "package-missing"
    PACKAGE_VERSION = "package-version"
    VERSION_UNKNOWN = "version-unknown"
    TOOL_MISSING = "tool-missing"
    TOOL_VERSION = "tool-version"
    IMPORT_ERROR = "import-error"
    PROBE_ERROR = "probe-error"
    KNOWN_BAD = "known-bad"
    # The call.
    DTYPE = "dtype"
    HEAD_DIM = "head-dim"
    HEADS = "heads"
    FEATURE = "feature"
    LAYOUT = "layout"
    SHAPE = "shape"
    # The ranking.
    QUARANTINED = "quarantined"
    OUTRANKED = "outranked"

    def __str__(self) -> str:
        return self.value


_ORDER = {code: place for place, code in enumerate(ReasonCode)}

#: Reasons that no package, build or setting on this machine can change.
HARDWARE_CODES = frozenset(
    {
        ReasonCode.NO_DEVICE,
        ReasonCode.DEVICE_TYPE,
        ReasonCode.COMPUTE_CAPABILITY,
        ReasonCode.PLATFORM,
    }
)

#: Reasons that speak of the call, or may (a known fault): another call could be taken on this very machine.
CALL_CODES = frozenset(
    {
        ReasonCode.DTYPE,
        ReasonCode.HEAD_DIM,
        ReasonCode.HEADS,
        ReasonCode.FEATURE,
        ReasonCode.LAYOUT,
        ReasonCode.SHAPE,
        ReasonCode.KNOWN_BAD,
    }
)


class Reason(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One reason why one kernel is not used.

    Attributes:
        code: what kind of reason; compares equal to its string.
        subject: what was looked at: ``torch``, ``flash-qla``, ``head_dim_k``, a feature's name.
        required: what the kernel needs of it, or None.
        actual: what is there, or None when nothing is.
        fix: a command or setting that a person can paste, or None.
        url: where the rule comes from: a page, a release, a run of this project.
    """

    code: ReasonCode
    subject: str
    required: str | None = None
    actual: str | None = None
    fix: str | None = None
    url: str | None = None

    def __str__(self) -> str:
        return f"{self.code}: {self.sentence}"

    @property
    def sentence(self) -> str:
        """The reason without its code, as a person would say it."""
        match self.required, self.actual:
            case None, None:
                return self.subject
            case None, actual:
                return f"{self.subject}: {actual}"
            case required, None:
                return f"needs {self.subject} {required}, there is none"
            case required, actual:
                return f"needs {self.subject} {required}, here {actual}"


def told_in_order(reasons: list[Reason]) -> tuple[Reason, ...]:
    """Reasons without repeats, the most telling first. Where the device itself does not fit, nothing else is a fix."""
    if any(reason.code in HARDWARE_CODES for reason in reasons):
        reasons = [
            reason if reason.code in HARDWARE_CODES else msgspec.structs.replace(reason, fix=None) for reason in reasons
        ]
    return tuple(sorted(dict.fromkeys(reasons), key=lambda reason: _ORDER[reason.code]))
