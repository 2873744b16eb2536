"""The GDN contract as its definition reads: one token after the other, in float64. Slow, and the judge of the rest."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def reference_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = False,
) -> tuple[Tensor, Tensor]:
    """The recurrence ``S ← exp(g)·S; S ← S + k (beta (v − Sᵀk))ᵀ; o = scale·Sᵀq`` of every sequence and head.

    Args:
        q, k: ``[B, T, H, K]``.
        v: ``[B, T, HV, V]``, HV a multiple of H.
        g, beta: ``[B, T, HV]``; natural-log decay, and beta after the sigmoid.
        scale: K^-0.5 when None.
        initial_state: ``[N, HV, K, V]`` (``[N, HV, V, K]`` with ``state_v_first``); zeros when None.
        cu_seqlens: ``[N+1]``; then B = 1.

    Returns:
        ``o [B, T, HV, V]`` and the final state, both float64. Tokens after the last sequence give zeros.
    """
    eps = 1e-6
    q, k, v, g, beta = (each.double() for each in (q, k, v, g, beta))
    if use_qk_l2norm_in_kernel:
        q = q / (q.square().sum(-1, keepdim=True) + eps).sqrt()
        k = k / (k.square().sum(-1, keepdim=True) + eps).sqrt()
    batch, length, heads, K = q.shape
    HV, V = v.shape[2:]
    q = q.repeat_interleave(HV // heads, 2) * (K**-0.5 if scale is None else scale)
    k = k.repeat_interleave(HV // heads, 2)
    if cu_seqlens is None:
        spans = [(row, 0, length) for row in range(batch)]
    else:
        edges = cu_seqlens.tolist()
        spans = [(0, start, end) for start, end in pairwise(edges)]
    if initial_state is not None:
        states = initial_state.double()
        states = states.transpose(-1, -2) if state_v_first else states
    else:
        states = q.new_zeros(len(spans), HV, K, V)
    rows: list[list[Tensor]] = [[v.new_zeros(HV, V)] * length for _ in range(batch)]
    finals = []
    for state, (row, start, end) in zip(states, spans, strict=True):
        for t in range(start, end):
            state = g[row, t].exp()[:, None, None] * state
            delta = beta[row, t][:, None] * (v[row, t] - torch.einsum("hkv,hk->hv", state, k[row, t]))
            state = state + torch.einsum("hk,hv->hkv", k[row, t], delta)
            rows[row][t] = torch.einsum("hkv,hk->hv", state, q[row, t])
        finals.append(state)
    o = torch.stack([each for row in rows for each in row]) if batch * length else v.new_zeros(0)
    final = torch.stack(finals) if finals else states
    return o.view(batch, length, HV, V), final.transpose(-1, -2) if state_v_first else final
