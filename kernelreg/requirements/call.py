"""Which calls a kernel takes, against what one call says."""

from __future__ import annotations

from kernelreg.call import Call
from kernelreg.descriptor import Accepts, Span
from kernelreg.reasons import Reason, ReasonCode

_DTYPES = ("dtype", "gate_dtype", "state_dtype")
_SIZES = {
    "head_dim_k": ReasonCode.HEAD_DIM,
    "head_dim_v": ReasonCode.HEAD_DIM,
    "heads": ReasonCode.HEADS,
    "value_heads": ReasonCode.HEADS,
    "tokens": ReasonCode.SHAPE,
    "sequences": ReasonCode.SHAPE,
}


def call_reasons(accepts: Accepts, call: Call) -> list[Reason]:
    """Every reason of the call against what a kernel accepts; what the call does not say is not tested."""
    reasons = []
    for name in _DTYPES:
        accepted, said = getattr(accepts, name), getattr(call, name)
        if accepted is not None and said is not None and said not in accepted:
            reasons.append(_reason(ReasonCode.DTYPE, name, " or ".join(accepted), said, accepts))
    for name, code in _SIZES.items():
        sizes, size = getattr(accepts, name), getattr(call, name)
        if sizes is None or size is None:
            continue
        if isinstance(sizes, Span) and not sizes.holds(size):
            reasons.append(_reason(code, name, str(sizes), str(size), accepts))
        if isinstance(sizes, tuple) and size not in sizes:
            reasons.append(_reason(code, name, " or ".join(map(str, sizes)), str(size), accepts))
    layout = call.state_layout
    if accepts.state_layout is not None and layout is not None and layout not in accepts.state_layout:
        required = " or ".join(accepts.state_layout)
        reasons.append(_reason(ReasonCode.LAYOUT, "state_layout", required, layout, accepts))
    url = accepts.source.get("features")
    for feature in sorted(call.features.difference(accepts.features or ())):
        reasons.append(Reason(code=ReasonCode.FEATURE, subject=feature, actual="not supported", url=url))
    return reasons


def _reason(code: ReasonCode, subject: str, required: str, actual: str, accepts: Accepts) -> Reason:
    return Reason(code=code, subject=subject, required=required, actual=actual, url=accepts.source.get(subject))
