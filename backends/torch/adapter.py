"""The backend that is always there: the GDN contract in plain PyTorch.

It computes in float32 (float64 for float64 calls), with the precision of ``torch.set_float32_matmul_precision``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernelreg.ops.gdn_arguments import activate_gates
from kernelreg.ops.gdn_sequences import read_sequences

from .._pool import on_pool
from .chunk import chunk_size, in_chunks
from .layout import EqualLayout, Layout, OrderedLayout, PackedLayout, SingleLayout
from .recurrent import token_by_token
from .scan import Prepare, Rule


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """``gdn.chunk``: see :func:`kernelreg.gdn.chunk_gated_delta_rule`."""
    return _run(in_chunks, chunk_size(q.device), q, k, v, g, beta, **options)


def fused_recurrent_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """``gdn.recurrent``: see :func:`kernelreg.gdn.fused_recurrent_gated_delta_rule`."""
    if "state_indices" in options:
        return on_pool(fused_recurrent_gated_delta_rule, q, k, v, g, beta, **options)
    return _run(token_by_token, 1, q, k, v, g, beta, **options)


def _run(prepare: Prepare, chunk: int, q: Tensor, *arguments: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
    """The rule outside of autocast, which would take its float32 products to half precision."""
    if q.is_meta or not torch.is_autocast_enabled(q.device.type):
        return _run_exactly(prepare, chunk, q, *arguments, **options)
    with torch.autocast(q.device.type, enabled=False):
        return _run_exactly(prepare, chunk, q, *arguments, **options)


def _run_exactly(
    prepare: Prepare,
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
    sequences = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if initial_state is None:
        state = torch.zeros(sequences, HV, K, V, dtype=wide, device=q.device)
    else:
        state = (initial_state.mT if state_v_first else initial_state).to(wide)
    capturing = cu_seqlens is not None and q.is_cuda and torch.cuda.is_current_stream_capturing()
    layout: Layout
    if cu_seqlens is None:
        chunk = min(chunk, _chunk_for(T))
        layout = SingleLayout(T, chunk) if 0 < T <= chunk and v.numel() else EqualLayout(B, T, chunk)
    elif capturing:
        prepare, layout = in_chunks, OrderedLayout(cu_seqlens, T, chunk_size(q.device))
    else:
        packed = read_sequences(cu_seqlens, T, cu_seqlens_cpu)
        edges = packed.edges
        if edges[-1] < T:  # what lies behind them may be anything, NaN too, and gets neither weight nor gradient
            q, k, v, g, beta = (x[:, : edges[-1]] for x in (q, k, v, g, beta))
        rows = min(chunk, _chunk_for(packed.longest))
        layout = packed.keep(("torch", rows), lambda: PackedLayout(edges, rows, q.device))
    g, beta = activate_gates(g, beta, **raw_gates)
    rule = Rule(prepare, use_qk_l2norm_in_kernel, K**-0.5 if scale is None else scale)
    o, final = rule.scan((q, k, v, g, beta), state, layout)
    if o.shape[1] < T:
        o = pad(o, (0, 0, 0, 0, 0, T - o.shape[1]))
    final = final.mT if state_v_first else final
    return o.contiguous(), final.contiguous() if output_final_state else None


def _chunk_for(length: int) -> int:
    """The smallest power of two that holds a sequence: a short one is not padded to a long chunk."""
    return 1 << max(length - 1, 0).bit_length()
