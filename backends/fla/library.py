"""flash-linear-attention's Triton kernels, and nothing that its own dispatch would put in their place.

From 0.4.2 on FLA may hand a call to FlashQLA, to a TileLang backward or to a context-parallel forward, by what is
installed and by environment variables. Here ``fla`` means Triton: the dispatching names are replaced by the functions
that they wrap, in a private copy of the one module that uses them. FLA itself is left as it is for everyone else.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from functools import lru_cache
from types import FunctionType, ModuleType
from typing import Any

import torch
from fla.ops.gated_delta_rule import chunk as _public_chunk_module
from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule as _public_recurrent

from .._keywords import keywords_of

#: The names in FLA's chunk module behind which another backend may stand on NVIDIA, AMD and Intel devices.
DISPATCHED = ("chunk_gated_delta_rule_fwd_h", "chunk_bwd_dqkwg")


def _private_copy(module: ModuleType, **instead: Callable[..., Any]) -> ModuleType:
    """The module with undispatched functions, and others ``instead`` of some of those."""
    spec = importlib.util.spec_from_file_location("kernelreg_backends.fla._chunk", module.__file__)
    if spec is None or spec.loader is None:
        raise ImportError(f"{module.__name__} has no source file to load a private copy from")
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    for name in DISPATCHED:
        if not hasattr(copy, name):
            raise ImportError(f"{module.__name__} of this release has no {name}: its dispatch cannot be bypassed")
        setattr(copy, name, instead.get(name) or inspect.unwrap(getattr(copy, name)))
    return copy


def _rebound(function: Callable[..., Any], **instead: Callable[..., Any]) -> Callable[..., Any]:
    """The function under its wrappers, with others ``instead`` of the functions of its module that it calls."""
    plain = inspect.unwrap(function)
    if not isinstance(plain, FunctionType) or not instead.keys() <= plain.__globals__.keys():
        raise ImportError(f"{function!r} does not call {', '.join(instead)} of its module")
    copy = FunctionType(plain.__code__, {**plain.__globals__, **instead}, plain.__name__, plain.__defaults__)
    copy.__kwdefaults__ = plain.__kwdefaults__
    return copy


def _offsets_of(cu_seqlens: Any, chunk_size: int) -> Any:
    """``prepare_chunk_offsets`` for :func:`forward`, whose caller has laid them beside the edges.

    FLA's own remembers what it has computed by the identity of the edges, whose values may have changed.
    """
    return cu_seqlens.chunk_offsets


#: What :func:`chunk_gated_delta_rule_fwd` calls, each with FLA's dispatch, contiguity pass and device switch around it.
_PARTS = ("chunk_local_cumsum", "chunk_gated_delta_rule_fwd_intra", "chunk_fwd_o", "chunk_gated_delta_rule_fwd_h")


def _forward() -> Callable[..., Any] | None:
    """FLA's forward below autograd, from 0.5.0 on: all that it calls is bare. None where it is put together otherwise.

    It takes contiguous tensors on the current device, ``chunk_indices``, and edges with their chunk offsets as an
    attribute; it gives the output second and the final state fourth.
    """
    try:
        module = _public_chunk_module
        inspect.unwrap(module.l2norm_fwd)
        parts = {name: inspect.unwrap(getattr(module, name)) for name in _PARTS}
        parts["chunk_gated_delta_rule_fwd_h"] = _rebound(
            parts["chunk_gated_delta_rule_fwd_h"], prepare_chunk_offsets=_offsets_of
        )
        intra = parts["chunk_gated_delta_rule_fwd_intra"]
        bare = {
            name: inspect.unwrap(each)
            for name, each in intra.__globals__.items()
            if name == "recompute_w_u_fwd" and callable(each)
        }
        parts["chunk_gated_delta_rule_fwd_intra"] = _rebound(intra, **bare)
        found = _rebound(module.chunk_gated_delta_rule_fwd, **parts)
    except (ImportError, AttributeError):
        return None
    needed = {"q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state", "cu_seqlens", "chunk_indices"}
    return found if needed <= keywords_of(found) else None


_raw_chunk = inspect.unwrap(_private_copy(_public_chunk_module).chunk_gated_delta_rule)
_raw_recurrent = inspect.unwrap(_public_recurrent)

#: The undispatched functions; FLA too keeps them out of torch.compile's traces.
chunk: Callable[..., Any] = torch.compiler.disable(_raw_chunk)  # type: ignore[no-untyped-call]
recurrent: Callable[..., Any] = torch.compiler.disable(_raw_recurrent)  # type: ignore[no-untyped-call]


@lru_cache(maxsize=1)
def chunk_with_tilelang() -> Callable[..., Any]:
    """FLA's chunk kernels with its TileLang kernel for the one part of the backward that Triton miscompiles on Hopper.

    Imports TileLang.
    """
    from fla.ops.common.backends.tilelang.chunk_bwd import chunk_bwd_dqkwg_tilelang

    copy = _private_copy(_public_chunk_module, chunk_bwd_dqkwg=chunk_bwd_dqkwg_tilelang)
    run: Callable[..., Any] = torch.compiler.disable(inspect.unwrap(copy.chunk_gated_delta_rule))  # type: ignore[no-untyped-call]
    return run


CHUNK_WORDS = keywords_of(_raw_chunk)
RECURRENT_WORDS = keywords_of(_raw_recurrent)
forward = _forward()
FORWARD_WORDS = frozenset() if forward is None else keywords_of(forward)
#: q and k of unit length, and their lengths: below FLA's dispatch.
unit_length: Any = None if forward is None else inspect.unwrap(_public_chunk_module.l2norm_fwd)
