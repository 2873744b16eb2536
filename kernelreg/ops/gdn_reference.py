"""The GDN contract as its definition reads: one token after the other, in float64. Slow, and the judge of the rest."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

_EPSILON = 1e-6


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
    state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence ``S ← exp(g)·S; S ← S + k (beta (v − Sᵀk))ᵀ; o = scale·Sᵀq`` of every sequence and head.

    Args:
        q, k: ``[B, T, H, K]``.
        v: ``[B, T, HV, V]``, HV a multiple of H.
        g, beta: ``[B, T, HV]``; natural-log decay, and beta after the sigmoid.
        scale: K^-0.5 when None.
        initial_state: ``[N, HV, K, V]`` (``[N, HV, V, K]`` with ``state_v_first``); zeros when None. With
            ``state_indices`` the pool ``[P, HV, K, V]``, which is left as it is.
        cu_seqlens: ``[N+1]``; then B = 1.
        state_indices: ``[N]`` or ``[N, S]``, each sequence's slot of the pool, or its tokens' slots.
        num_accepted_tokens: ``[N]``, with ``[N, S]``: a sequence starts from the slot of that token, counted from 1.

    Returns:
        ``o [B, T, HV, V]`` and the final state, or the pool afterwards, both float64. Tokens after the last sequence
        and tokens of sequences without a slot (index −1) give zeros.
    """
    q, k, v, g, beta = (each.double() for each in (q, k, v, g, beta))
    if use_qk_l2norm_in_kernel:
        q = q / (q.square().sum(-1, keepdim=True) + _EPSILON).sqrt()
        k = k / (k.square().sum(-1, keepdim=True) + _EPSILON).sqrt()
    batch, length, heads, K = q.shape
    HV, V = v.shape[2:]
    q = q.repeat_interleave(HV // heads, 2) * (K**-0.5 if scale is None else scale)
    k = k.repeat_interleave(HV // heads, 2)
    if cu_seqlens is None:
        spans = [(row, 0, length) for row in range(batch)]
    else:
        spans = [(0, start, end) for start, end in pairwise(cu_seqlens.tolist())]
    if initial_state is None:
        states = q.new_zeros(len(spans), HV, K, V)
    else:
        states = initial_state.double()
        states = states.transpose(-1, -2) if state_v_first else states
    own = torch.arange(len(spans))  # without a pool, each sequence has a state of its own
    slots, starts = _slots(own if state_indices is None else state_indices, num_accepted_tokens, length)
    kept = list(states.unbind(0))
    rows: list[list[Tensor]] = [[v.new_zeros(HV, V)] * length for _ in range(batch)]
    for (row, first, end), start, places in zip(spans, starts, slots, strict=True):
        if start < 0:
            continue
        state = states[start]
        for t in range(first, end):
            state = g[row, t].exp()[:, None, None] * state
            delta = beta[row, t][:, None] * (v[row, t] - torch.einsum("hkv,hk->hv", state, k[row, t]))
            state = state + torch.einsum("hk,hv->hkv", k[row, t], delta)
            rows[row][t] = torch.einsum("hkv,hk->hv", state, q[row, t])
            if places[t - first] >= 0:
                kept[places[t - first]] = state
    o = torch.stack([each for row in rows for each in row]) if batch * length else v.new_zeros(0)
    final = torch.stack(kept) if kept else states
    return o.view(batch, length, HV, V), final.transpose(-1, -2) if state_v_first else final


def _slots(state_indices: Tensor, num_accepted_tokens: Tensor | None, length: int) -> tuple[list[list[int]], list[int]]:
    """Of each sequence the slot after each of its tokens, and the slot that it starts from."""
    if state_indices.dim() == 1:
        starts = state_indices.tolist()
        return [[slot] * length for slot in starts], starts
    slots = state_indices.tolist()
    accepted = [1] * len(slots) if num_accepted_tokens is None else num_accepted_tokens.tolist()
    return slots, [row[count - 1] for row, count in zip(slots, accepted, strict=True)]
