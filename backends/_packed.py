"""Bridges that several libraries need: calls without tokens, empty sequences, tokens behind the last sequence."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernelreg.ops.gdn_sequences import Sequences, read_sequences

#: A library's call on clean input: tokens in every sequence, and every token in a sequence.
Run = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None], tuple[Tensor, Tensor | None]]


def run_clean(
    run: Run,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    state_v_first: bool,
) -> tuple[Tensor, Tensor | None]:
    """The contract's answer for any sequences, from a library that is right for clean ones.

    Args:
        run: called with q, k, v, g, beta, the int64 edges (or None) and the initial state (or None); gives the
            output and, when one was asked for, the final state.

    The cost: one read of ``cu_seqlens`` by the host per tensor and version; where there are gaps, a copy of the states.
    """
    B, T, _, K = q.shape
    HV, V = v.shape[2:]
    sequences: Sequences | None = None
    if cu_seqlens is not None:
        sequences = read_sequences(cu_seqlens, T, cu_seqlens_cpu)
    count = B if sequences is None else len(sequences.edges) - 1
    end = T if sequences is None else sequences.edges[-1]
    if not end or not B:  # no token at all: nothing to launch
        o = pad(v[:, :0], (0, 0, 0, 0, 0, T))  # zeros that autograd can follow
        return o, carried(initial_state, count, HV, K, V, v, state_v_first, output_final_state)
    if sequences is None:
        return run(q, k, v, g, beta, None, initial_state)
    filled = sequences.filled
    state = initial_state if initial_state is None or filled is None else initial_state.index_select(0, filled)
    if end < T:
        q, k, v, g, beta = (x[:, :end] for x in (q, k, v, g, beta))
    o, final = run(q, k, v, g, beta, sequences.packed, state)
    if end < T:
        o = torch.cat([o, o.new_zeros(1, T - end, HV, V)], 1)
    if final is not None and filled is not None:
        whole = carried(initial_state, count, HV, K, V, v, state_v_first, True)
        final = None if whole is None else whole.index_copy(0, filled, final)
    return o, final


def carried(
    initial_state: Tensor | None,
    count: int,
    HV: int,
    K: int,
    V: int,
    like: Tensor,
    v_first: bool,
    wanted: bool,
) -> Tensor | None:
    """The final state of sequences without tokens: what they started with, in float32."""
    if not wanted:
        return None
    if initial_state is not None:
        return initial_state.to(torch.float32, copy=True)
    shape = (count, HV, V, K) if v_first else (count, HV, K, V)
    return torch.zeros(shape, dtype=torch.float32, device=like.device)
