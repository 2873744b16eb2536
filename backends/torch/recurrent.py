"""The gated delta rule token by token, over all sequences at once: decode, where a chunk would be mostly padding."""

from __future__ import annotations

import torch
from torch import Tensor

from .scan import Prepared


def token_by_token(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Prepared:
    """A block's tokens, ready for the loop over them: :func:`in_chunks` for C = 1, where there is nothing to solve."""
    group = v.shape[1] // k.shape[1]
    if group > 1:
        q, k = (x.repeat_interleave(group, 1) for x in (q, k))
    beta, decay = beta[..., None], g.exp()[..., None]
    return Prepared(
        values=(beta * v).flatten(0, 1),
        reads=(torch.cat([beta * k, q], -2) * decay).flatten(0, 1),
        keys=k.flatten(0, 1),
        decay=decay.flatten(0, 1),
        attention=(q * k).sum(-1, keepdim=True).flatten(0, 1),
    )
