"""What one call needs of a kernel. Hashable; what it does not say is not tested."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from kernelreg.errors import ConfigurationError, several, unknown_name
from kernelreg.ops import Operation, operation_named

#: The dtypes that a call may name, as torch names them.
DTYPES = ("bfloat16", "float16", "float32", "float64")

#: The types of device that torch has a name for, of those that anyone runs these kernels on.
DEVICE_TYPES = ("cpu", "cuda", "hpu", "meta", "mps", "mtia", "musa", "npu", "privateuseone", "xla", "xpu")
_DEVICE = re.compile(r"^[a-z]+(:\d{1,4})?$")
#: The features that say what a call does with states.
STATES = frozenset({"initial-state", "final-state", "state-pool"})
_SIZES = ("head_dim_k", "head_dim_v", "heads", "value_heads", "tokens", "sequences")


class Call(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One call of an operation. ``None`` is unknown: then it is not tested, and tokens unknown counts as many.

    Attributes:
        operation: canonical name, such as ``gdn.chunk``.
        device: as torch names it, such as ``cuda:0``.
        dtype, gate_dtype, state_dtype: of q/k/v, of g, of the recurrent state.
        head_dim_k, head_dim_v: K and V.
        heads, value_heads: H and HV.
        tokens: B × T, all tokens of the call.
        sequences: N, the sequences of the call.
        features: what the call uses, of the operation's features.
    """

    operation: str
    device: str
    dtype: str | None = None
    gate_dtype: str | None = None
    state_dtype: str | None = None
    head_dim_k: int | None = None
    head_dim_v: int | None = None
    heads: int | None = None
    value_heads: int | None = None
    tokens: int | None = None
    sequences: int | None = None
    features: frozenset[str] = frozenset()

    def __str__(self) -> str:
        said = [f"{name}={value}" for name, value in self._said()]
        return ", ".join([*said, *sorted(self.features)]) or "anything"

    @property
    def state_layout(self) -> str | None:
        """``v-first`` or ``k-first``, as the call's states lie; None where it has none."""
        if "state-v-first" in self.features:
            return "v-first"
        return "k-first" if self.features & STATES else None

    def _said(self) -> Iterable[tuple[str, object]]:
        for name in self.__struct_fields__[2:-1]:
            value = getattr(self, name)
            if value is not None:
                yield name, value


OPTIONS = tuple(name for name in Call.__struct_fields__ if name not in ("operation", "device"))


def make_call(operation: str, device: str, **options: Any) -> Call:
    """A call from what a person wrote, with every name checked.

    Raises:
        ConfigurationError: an unknown operation, option, dtype or feature, or a size that is no positive whole number.
    """
    known = operation_named(operation)
    if not _DEVICE.match(device) or device.partition(":")[0] not in DEVICE_TYPES:
        raise ConfigurationError(unknown_name("device", device, DEVICE_TYPES))
    said: dict[str, Any] = {}
    for name, value in options.items():
        if name not in OPTIONS:
            raise ConfigurationError(unknown_name("option", name, OPTIONS))
        if value is None:
            continue
        if name == "features":
            said[name] = read_features(f"{name}={value!r}", value, known)
        elif name in _SIZES:
            said[name] = _size(name, value)
        else:
            said[name] = _dtype(name, value)
    return known.normalise(Call(operation=known.name, device=device, **said))


def read_features(said: str, value: object, operation: Operation) -> frozenset[str]:
    """The features that a person wrote, every one checked.

    Args:
        said: what was written, as it was written.

    Raises:
        ConfigurationError: an unknown feature, or no set of them.
    """
    features = several(said, value, "a set of features, {'varlen', …}")
    for feature in sorted(features, key=str):
        if not isinstance(feature, str) or feature not in operation.features:
            raise ConfigurationError(unknown_name("feature", feature, operation.features))
    return frozenset(features)


def _size(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigurationError(f"{name}={value!r}; accepted: a whole number, 0 or more")
    return value


def _dtype(name: str, value: object) -> str:
    dtype = str(value).removeprefix("torch.")
    if dtype not in DTYPES:
        raise ConfigurationError(unknown_name(name, dtype, DTYPES))
    return dtype
