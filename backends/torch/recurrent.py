"""The gated delta rule token by token, over all sequences at once: decode, where a chunk would be mostly padding."""

from __future__ import annotations

import torch
from torch import Tensor

from .layout import Layout, gather


def recurrent_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, layout: Layout
) -> tuple[Tensor, Tensor]:
    """Outputs and final states; arguments as :func:`chunk_rule`'s, with a layout of one token a chunk."""
    tokens, HV, V = v.shape
    group = HV // q.shape[1] if HV else 1
    index = layout.tokens.flatten()
    q, k, v, g, beta = (gather(x, index) for x in (q, k, v, g, beta))
    if group > 1:
        q, k = (x.repeat_interleave(group, 1) for x in (q, k))
    decay = g.exp()[..., None, None]
    running = state if layout.order is None else state.index_select(0, layout.order)
    finished: list[Tensor] = []
    outputs: list[Tensor] = []
    row = 0
    for size in layout.steps:
        if size < running.shape[0]:
            finished.append(running[size:])
            running = running[:size]
        now = slice(row, row + size)
        key = k[now, :, :, None]
        running = decay[now] * running
        correction = beta[now, :, None, None] * (v[now, :, None, :] - key.mT @ running)
        running = running + key @ correction
        outputs.append((q[now, :, None, :] @ running).squeeze(-2))
        row += size
    final = torch.cat([running, *reversed(finished)])
    if layout.order is not None:
        final = final.index_select(0, layout.order.argsort())
    if not outputs:
        return v, final  # no token, and no row of v either
    o = v.new_zeros(tokens + 1, HV, V).index_copy(0, index, torch.cat(outputs))
    return o[:tokens], final
