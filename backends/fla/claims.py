"""What the installed flash-linear-attention says of itself, for ``kernelreg backends --stale``.

Its functions are asked with tensors that have shapes and no data: a check of theirs raises, a launch is never reached.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kernelreg.claims import Claim, Unasked, refusal, unasked

_TRITON = ("triton", "triton-0.4", "triton-0.3")
#: FLA's flag for Hopper, by its names in 0.3 to 0.6.
_HOPPER = ("IS_NVIDIA_HOPPER", "is_nvidia_hopper")


def claims() -> Iterator[Claim | Unasked]:
    """K, dtypes and gradients of the chunk kernels, gradients of the recurrent one."""
    for ask in (_head_dims, _dtypes, _hopper_backward, _tilelang_backward, _recurrent_backward):
        try:
            yield from ask()
        except Exception as error:
            yield unasked(f"fla: {ask.__name__.strip('_').replace('_', ' ')}", error)


def _head_dims() -> Iterator[Claim]:
    module = import_module("fla.ops.common.chunk_delta_h")
    function = inspect.unwrap(module.chunk_gated_delta_rule_fwd_h)
    for size in (1, 64, 128, 256, 257, 320, 512):
        k, u = _empty(2, size), _empty(2, 128)
        said = refusal(function, k=k, w=k, u=u, g=_gates())
        yield Claim(
            operation="gdn.chunk",
            asked=_name(function),
            takes=said is None,
            said=said,
            kernels=_TRITON,
            head_dim_k=size,
        )


def _dtypes() -> Iterator[Claim]:
    function = inspect.unwrap(import_module("fla.ops.gated_delta_rule.chunk").chunk_gated_delta_rule)
    for dtype in ("bfloat16", "float16", "float32"):
        q = _empty(2, 64, getattr(torch, dtype))
        said = refusal(function, q=q, k=q, v=q, g=_gates(), beta=_gates(), scale=1.0)
        yield Claim(
            operation="gdn.chunk", asked=_name(function), takes=said is None, said=said, kernels=_TRITON, dtype=dtype
        )


def _hopper_backward() -> Iterator[Claim]:
    module = import_module("fla.ops.common.chunk_o")
    function = inspect.unwrap(module.chunk_bwd_dqkwg)
    flags = [name for name in _HOPPER if hasattr(module, name)]
    if not flags:
        raise LookupError(f"{module.__name__} has no {' or '.join(_HOPPER)}")
    for capability in ("8.0", "9.0", "10.0"):
        for name in flags:
            setattr(module, name, capability == "9.0")
        said = refusal(function, **_backward(torch.bfloat16))
        yield Claim(
            operation="gdn.chunk",
            asked=f"{_name(function)} with {flags[0]}={capability == '9.0'}",
            takes=said is None,
            said=said,
            kernels=_TRITON,
            compute_capability=capability,
            features=("backward",),
        )


def _tilelang_backward() -> Iterator[Claim]:
    module = import_module("fla.ops.common.backends.tilelang")
    backend = _owner(module, "chunk_bwd_dqkwg_verifier")
    for dtype in ("bfloat16", "float16"):
        takes, said = backend().chunk_bwd_dqkwg_verifier(**_backward(getattr(torch, dtype)))
        yield Claim(
            operation="gdn.chunk",
            asked=f"{module.__name__}.{backend.__name__}.chunk_bwd_dqkwg_verifier",
            takes=bool(takes),
            said=said,
            kernels=("tilelang-backward",),
            compute_capability="9.0",
            dtype=dtype,
            features=("backward",),
        )


def _recurrent_backward() -> Iterator[Claim]:
    module = import_module("fla.ops.gated_delta_rule.fused_recurrent")
    function = inspect.unwrap(module.FusedRecurrentFunction.backward)
    try:
        said = refusal(function, None, None, None)
    except (AttributeError, TypeError):
        said = None  # there is one now, and it reads what it is given
    yield Claim(operation="gdn.recurrent", asked=_name(function), takes=said is None, said=said, features=("backward",))


def _owner(module: ModuleType, method: str) -> Any:
    for value in vars(module).values():
        if isinstance(value, type) and method in vars(value):
            return value
    raise LookupError(f"{module.__name__} has no class with {method}")


def _name(function: Any) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def _empty(heads: int, size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(1, 64, heads, size, dtype=dtype, device="meta")


def _gates() -> Tensor:
    return torch.empty(1, 64, 2, device="meta")


def _backward(dtype: torch.dtype) -> dict[str, Tensor]:
    """The arguments of ``chunk_bwd_dqkwg`` that every release has."""
    x, h = _empty(2, 64, dtype), torch.empty(1, 1, 2, 64, 64, dtype=dtype, device="meta")
    return {"q": x, "k": x, "v": x, "do": x, "h": h, "dh": h, "w": x, "dv": x, "g": _gates()}
