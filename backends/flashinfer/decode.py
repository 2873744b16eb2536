"""FlashInfer's decode kernel, for the calls whose bits it keeps: raw bfloat16 gates on a float32 ``[V, K]`` pool.

It takes bfloat16 pools too, but reads and writes slot 0 for every −1 there, and multi-token calls, but keeps the states
of draft tokens in a buffer of its own; those calls go another way.
"""

from __future__ import annotations

from typing import Any

import flashinfer
import torch
from torch import Tensor

from kernelreg.versions import satisfies

from .._keywords import keywords_of

try:
    from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose as _public_decode
except ImportError:  # before 0.6.2 there is none
    _public_decode = None

#: Pools of float32 states came with 0.6.7, and such with other data between the states with 0.6.8.
_WORDS = frozenset() if _public_decode is None else keywords_of(_public_decode)
_KNOWS_POOLS = {"initial_state", "initial_state_indices"} <= _WORDS
_KNOWS_PAGES = bool(satisfies(flashinfer.__version__, ">=0.6.8", by_release=True))
_CHOSEN = {"backend": "flashinfer"} if "backend" in _WORDS else {}


def decodes_in_place(q: Tensor, g: Tensor, beta: Tensor, options: dict[str, Any]) -> bool:
    """Whether the decode kernel takes the call as it is."""
    slots, pool = options.get("state_indices"), options.get("initial_state")
    if slots is None or pool is None or not _KNOWS_POOLS:
        return False
    return (
        options.get("cu_seqlens") is None
        and slots.dim() == 1
        and q.shape[1] == 1
        and q.shape[0] > 0
        and len(pool) > 0
        and bool(options.get("state_v_first"))
        and pool.dtype == torch.float32
        and (pool.is_contiguous() or (_KNOWS_PAGES and pool[0].is_contiguous()))
        and q.dtype == g.dtype == beta.dtype == torch.bfloat16
        and bool(options.get("use_gate_in_kernel"))
        and bool(options.get("use_beta_sigmoid_in_kernel"))
        and not options.get("allow_neg_eigval")
        and options.get("dt_bias") is not None
    )


def decode_in_place(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """One token a sequence, the pool updated where it lies."""
    pool, slots = options["initial_state"], options["state_indices"]
    scale = options.get("scale")
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    real = (slots >= 0) & (slots < len(pool))
    o = torch.zeros(v.shape, dtype=v.dtype, device=v.device)
    with torch.cuda.device(q.device):
        _public_decode(
            q=q.contiguous(),
            k=k.contiguous(),
            v=v.contiguous(),
            state=None,
            A_log=options["A_log"].float().contiguous(),
            a=g.contiguous(),
            dt_bias=options["dt_bias"].float().contiguous(),
            b=beta.contiguous(),
            scale=factor or 1.0,
            output=o,
            use_qk_l2norm=bool(options.get("use_qk_l2norm_in_kernel")),
            initial_state=pool,
            initial_state_indices=torch.where(real, slots, -1).int(),
            **_CHOSEN,
        )
    return (o if factor else o.zero_()), pool if options.get("output_final_state") else None
