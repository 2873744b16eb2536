"""The backend that is always there: the GDN contract in plain PyTorch.

It computes in float32 (float64 for float64 calls), with the precision of ``torch.set_float32_matmul_precision``.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernelreg.ops.gdn_arguments import activate_gates, to_unit_length
from kernelreg.ops.gdn_sequences import read_sequences

from .._pool import on_pool
from .chunk import CHUNK, chunk_rule, ordered_chunk_rule
from .layout import Layout, equal_layout, ordered_layout, packed_layout
from .recurrent import recurrent_rule

Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Layout], tuple[Tensor, Tensor]]


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """``gdn.chunk``: see :func:`kernelreg.gdn.chunk_gated_delta_rule`."""
    return _run(chunk_rule, CHUNK, q, k, v, g, beta, **options)


def fused_recurrent_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """``gdn.recurrent``: see :func:`kernelreg.gdn.fused_recurrent_gated_delta_rule`."""
    if "state_indices" in options:
        return on_pool(fused_recurrent_gated_delta_rule, q, k, v, g, beta, **options)
    return _run(recurrent_rule, 1, q, k, v, g, beta, **options)


def _run(rule: Rule, chunk: int, q: Tensor, *arguments: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
    """The rule outside of autocast, which would take its float32 products to half precision."""
    if q.is_meta or not torch.is_autocast_enabled(q.device.type):
        return _run_exactly(rule, chunk, q, *arguments, **options)
    with torch.autocast(q.device.type, enabled=False):
        return _run_exactly(rule, chunk, q, *arguments, **options)


def _run_exactly(
    rule: Rule,
    chunk: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = False,
    cu_seqlens_cpu: Tensor | None = None,
    **raw_gates: Any,
) -> tuple[Tensor, Tensor | None]:
    B, T, _, K = q.shape
    HV, V = v.shape[2:]
    # Half precision has too few digits for the triangular system; float64 asks for float64 throughout.
    wide = torch.float64 if torch.float64 in (q.dtype, g.dtype, beta.dtype) else torch.float32
    sequences = B if cu_seqlens is None else len(cu_seqlens) - 1
    if initial_state is None:
        state = torch.zeros(sequences, HV, K, V, dtype=wide, device=q.device)
    else:
        state = (initial_state.mT if state_v_first else initial_state).to(wide)
    capturing = cu_seqlens is not None and q.is_cuda and torch.cuda.is_current_stream_capturing()
    tokens = B * T
    if cu_seqlens is not None and not capturing:
        edges = read_sequences(cu_seqlens, T, cu_seqlens_cpu).edges
        tokens = edges[-1]  # what lies behind them may be anything, NaN too, and gets neither weight nor gradient
    flat_q, flat_k, flat_v = (x.flatten(0, 1)[:tokens].to(wide) for x in (q, k, v))
    gates = activate_gates(g.flatten(0, 1)[:tokens], beta.flatten(0, 1)[:tokens], **raw_gates)
    flat_g, flat_beta = (x.to(wide) for x in gates)
    if use_qk_l2norm_in_kernel:
        flat_q, flat_k = to_unit_length(flat_q), to_unit_length(flat_k)
    inputs = (flat_q * (K**-0.5 if scale is None else scale), flat_k, flat_v, flat_g, flat_beta, state)
    if cu_seqlens is None:
        o, final = rule(*inputs, equal_layout(B, T, min(chunk, _chunk_for(T)), q.device))
    elif capturing:
        o, final = ordered_chunk_rule(*inputs, ordered_layout(cu_seqlens, T, CHUNK))
    else:
        longest = max((end - start for start, end in pairwise(edges)), default=0)
        o, final = rule(*inputs, packed_layout(edges, tokens, min(chunk, _chunk_for(longest)), q.device))
    o = pad(o, (0, 0, 0, 0, 0, B * T - tokens))
    if not output_final_state:
        return o.view(B, T, HV, V).to(q.dtype), None
    return o.view(B, T, HV, V).to(q.dtype), (final.mT if state_v_first else final).contiguous()


def _chunk_for(length: int) -> int:
    """The smallest power of two that holds a sequence: a short one is not padded to a long chunk."""
    return 1 << max(length - 1, 0).bit_length()
