"""A pool of states for kernels that know none: gathered before, scattered after, without a word from the host.

The cost: a copy of the batch's states each way, and with a slot for every token one launch per token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., tuple[Tensor, Tensor | None]]
#: A kernel on states of its own: q, k, v, g, beta, the edges (or None) and the states; gives outputs and final states.
Run = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor], tuple[Tensor, Tensor]]


def on_pool(
    function: Function,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor,
    state_indices: Tensor,
    num_accepted_tokens: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    mixes_rows: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """The contract's answer for a pool of states, from an adapter's function that takes one state a sequence.

    The pool is updated in place; slots that no sequence names keep every bit. What is no slot of it is padding.

    Args:
        mixes_rows: the kernel multiplies other sequences' tokens by zero, so that a NaN in padding would reach them:
            padding is zero before it sees it.

    Returns:
        The output, and the pool where a final state is asked for.
    """

    def run(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, edges: Tensor | None, states: Tensor
    ) -> tuple[Tensor, Tensor]:
        words = {"initial_state": states, "output_final_state": True, **options}
        if edges is not None:
            words |= {"cu_seqlens": edges, "cu_seqlens_cpu": cu_seqlens_cpu}
        o, final = function(q, k, v, g, beta, **words)
        return o, states if final is None else final

    pool, slots = initial_state, state_indices.long()
    if not len(pool):
        return torch.zeros_like(v), pool if output_final_state else None
    if mixes_rows:
        starts = slots if slots.dim() == 1 else _start(slots, num_accepted_tokens)
        padding = ~_covered(_real(pool, starts), v, cu_seqlens)
        q, k, v, g, beta = (
            x.masked_fill(padding.view(*x.shape[:2], *(1,) * (x.dim() - 2)), 0) for x in (q, k, v, g, beta)
        )
    if slots.dim() == 2:
        o = _token_by_token(run, q, k, v, g, beta, pool, slots, num_accepted_tokens, cu_seqlens)
    else:
        o = _once(run, q, k, v, g, beta, pool, slots, cu_seqlens)
    return o, pool if output_final_state else None


def _once(
    run: Run,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    pool: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor | None,
) -> Tensor:
    o, final = run(q, k, v, g, beta, cu_seqlens, _gather(pool, slots))
    _scatter(pool, slots, final)
    covered = _covered(_real(pool, slots), o, cu_seqlens)
    return o.masked_fill(~covered[:, :, None, None], 0)


def _token_by_token(
    run: Run,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    pool: Tensor,
    slots: Tensor,
    num_accepted_tokens: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Tensor:
    B, T = q.shape[:2]
    tokens = B * T
    q, k, v, g, beta = (x.flatten(0, 1) for x in (q, k, v, g, beta))
    if cu_seqlens is None:
        starts = torch.arange(B, device=q.device) * T
        ends, steps = starts + T, T
    else:
        # Edges on a device alone are not looked up: what they say beyond T or S is no token.
        starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long().clamp_max(tokens)
        steps = min(slots.shape[1], T)
    start = _start(slots, num_accepted_tokens)
    real = _real(pool, start)
    states = _gather(pool, start)
    o = v.new_zeros(tokens + 1, *v.shape[1:])  # one more for what is no token
    for place in range(steps):
        token = starts + place
        now = real & (token >= 0) & (token < ends)
        rows = torch.where(now, token, 0)
        now_q, now_k, now_v, now_g, now_beta = (x.index_select(0, rows)[:, None] for x in (q, k, v, g, beta))
        out, after = run(now_q, now_k, now_v, now_g, now_beta, None, states)
        states = torch.where(now[:, None, None, None], after, states)
        o = o.index_copy(0, torch.where(now, token, tokens), out[:, 0])
        _scatter(pool, torch.where(now, slots[:, place], -1), after)
    return o[:tokens].view(B, T, *v.shape[1:])


def _start(slots: Tensor, num_accepted_tokens: Tensor | None) -> Tensor:
    """The slot that each sequence's state is read from."""
    if num_accepted_tokens is None:
        return slots[:, 0]
    first = num_accepted_tokens.long() - 1
    return slots.gather(1, first.clamp(0, slots.shape[1] - 1)[:, None])[:, 0]


def _covered(real: Tensor, tokens: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Which of ``[B, T]`` tokens belong to a sequence that has a slot."""
    B, T = tokens.shape[:2]
    if cu_seqlens is None:
        return real[:, None].expand(B, T)
    sequence = torch.searchsorted(cu_seqlens[1:].long(), torch.arange(T, device=tokens.device), right=True)
    return torch.cat([real, real.new_zeros(1)])[sequence][None]  # no slot behind the last sequence


def _real(pool: Tensor, slots: Tensor) -> Tensor:
    return (slots >= 0) & (slots < len(pool))


def _gather(pool: Tensor, slots: Tensor) -> Tensor:
    """The states of the slots; padding gets zeros."""
    real = _real(pool, slots)
    return pool.index_select(0, torch.where(real, slots, 0)).masked_fill_(~real[:, None, None, None], 0)


def _scatter(pool: Tensor, slots: Tensor, states: Tensor) -> None:
    """Write the states to their slots. Padding writes what the first real one writes, to the same place.

    Where nothing is real, slot 0 is written as it is.
    """
    if not len(slots):
        return
    real = _real(pool, slots)
    any_real = real.any()
    row = torch.where(real, torch.arange(len(slots), device=slots.device), real.int().argmax())
    target = torch.where(any_real, slots[row], 0)
    values = torch.where(any_real, states[row].to(pool.dtype), pool.index_select(0, target))
    pool.index_copy_(0, target, values)
