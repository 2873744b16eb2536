"""What an operation is, and the operations there are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kernelreg.errors import UnknownOperationError, unknown_name
from kernelreg.ops.tolerances import GDN_TOLERANCES, Tolerance
from kernelreg.reasons import Reason, ReasonCode

if TYPE_CHECKING:
    from kernelreg.call import Call

_FEATURES = frozenset(
    {
        "varlen",
        "empty-sequences",
        "initial-state",
        "final-state",
        "grouped-value-heads",
        "qk-l2norm",
        "state-v-first",
        "backward",
        "deterministic",
        "capture",
        "capture-varlen",
        "raw-gates",
        "state-pool",
        "multi-token",
    }
)


class Operation(msgspec.Struct, frozen=True):
    """A contract's name and words. Every operation here is of the GDN family and shares its call.

    Attributes:
        name: canonical, such as ``gdn.chunk``.
        function: the name of its function in ``kernelreg.gdn``.
        summary: what it is for, in a few words.
        features: the names that a call or a descriptor may use.
        tolerances: by dtype of q, k and v, how far a kernel may be from the reference.
        aliases: other names a person may use for it.
    """

    name: str
    function: str
    summary: str
    features: frozenset[str]
    tolerances: dict[str, Tolerance]
    aliases: tuple[str, ...] = ()

    def normalise(self, call: Call) -> Call:
        """The same call with the features that follow from what it says."""
        features = set(call.features)
        if call.heads is not None and call.value_heads is not None and call.heads != call.value_heads:
            features.add("grouped-value-heads")
        if "empty-sequences" in features:
            features.add("varlen")
        if "capture-varlen" in features:
            features |= {"capture", "varlen"}
        if {"capture", "varlen"} <= features:
            features.add("capture-varlen")
        return msgspec.structs.replace(call, features=frozenset(features))

    def reasons(self, call: Call) -> list[Reason]:
        """Why no kernel at all may take the call: what the contract itself rules out."""
        if call.heads and call.value_heads and call.value_heads % call.heads:
            required = f"a multiple of heads ({call.heads})"
            return [
                Reason(
                    code=ReasonCode.HEADS,
                    subject="value_heads",
                    required=required,
                    actual=str(call.value_heads),
                )
            ]
        return []


_OPERATIONS = (
    Operation(
        name="gdn.chunk",
        function="chunk_gated_delta_rule",
        summary="Gated Delta Net, chunkwise: prefill and training",
        features=_FEATURES,
        tolerances=GDN_TOLERANCES,
        aliases=("gdn",),
    ),
    Operation(
        name="gdn.recurrent",
        function="fused_recurrent_gated_delta_rule",
        summary="Gated Delta Net, token by token: decode",
        features=_FEATURES,
        tolerances=GDN_TOLERANCES,
    ),
)
_BY_NAME = {name: each for each in _OPERATIONS for name in (each.name, *each.aliases)}


def operations() -> tuple[Operation, ...]:
    """Every operation, by name."""
    return _OPERATIONS


def operation_named(name: object) -> Operation:
    """The operation of that name or alias.

    Raises:
        UnknownOperationError: there is none; names the nearest.
    """
    found = _BY_NAME.get(name) if isinstance(name, str) else None
    if found is None:
        raise UnknownOperationError(unknown_name("operation", name, _BY_NAME))
    return found
