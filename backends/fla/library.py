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
from types import ModuleType
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
