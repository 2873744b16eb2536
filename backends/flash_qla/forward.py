"""FlashQLA's three SM90 kernels called directly: cumulated gates, the chunks' triangular systems, and the recurrence.

Its entry point wraps them in autograd, contiguity passes, a choice of context parallelism that reads the edges on the
host, and chunk tables that it remembers by the identity of the edges. The kernels themselves read edges and tables on
the device, mask what lies behind a sequence, and pass the states of empty sequences through (0.1.3,
ops/utils/cumsum.py, ops/gated_delta_rule/chunk/hopper/kkt_solve.py and fused_fwd.py). So they can be captured.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

import torch
from flash_qla.utils import l2norm_fwd
from torch import Tensor

from kernelreg.ops.gdn_chunks import CHUNK

from .._direct import Batch, on_its_device, without_tokens

_CHUNK_PLACE = "flash_qla.ops.gated_delta_rule.chunk"
#: Where the makers of the kernels are, and what each takes: any other release is called through its entry point.
_MAKERS = {
    ("flash_qla.ops.utils.cumsum", "tilelang_chunk_local_cumsum"): (
        "H chunk_size accum_dtype g_dtype seqlen_dtype is_varlen reverse zero_last_chunk"
    ),
    (f"{_CHUNK_PLACE}.hopper.kkt_solve", "tilelang_kkt_solve"): (
        "H Hg DK chunk_size accum_dtype qkva_dtype b_dtype seqlen_dtype is_varlen"
    ),
    (f"{_CHUNK_PLACE}.hopper.fused_fwd", "tilelang_fused_chunk_gdr_fwd"): (
        "H Hg DK DV chunk_size scale accum_dtype qkva_dtype g_dtype b_dtype h0_dtype ht_dtype h_dtype o_dtype "
        "seqlen_dtype use_initial_state store_final_state store_h store_o is_varlen is_cp state_v_first block_DV"
    ),
}
#: Kernels kept; a process that goes past it asks TileLang for them again.
_CAPACITY = 256

Maker = Callable[..., Callable[..., None]]


class _Makers(NamedTuple):
    """What makes the kernels, and the thread blocks from which on one kernel's are wide."""

    cumulate: Maker
    solve: Maker
    scan: Maker
    blocks: int


class _Kernels(NamedTuple):
    cumulate: Callable[..., None]
    solve: Callable[..., None]
    scan: Callable[..., None]


def _found() -> _Makers | None:
    """The makers, where this release has them as they are called here and has chosen the SM90 kernels."""
    try:
        chosen = import_module(_CHUNK_PLACE).fused_gdr_fwd.__module__
        scan = import_module(f"{_CHUNK_PLACE}.hopper.fused_fwd")
        if chosen != scan.__name__:
            return None
        makers = []
        for (place, name), parameters in _MAKERS.items():
            maker = getattr(import_module(place), name)
            if list(maker.signature.parameters) != parameters.split():
                return None
            makers.append(maker)
        cumulate, solve, fused = makers
        return _Makers(cumulate, solve, fused, scan.TARGET_NUM_CTAS)
    except (ImportError, AttributeError):
        return None


MAKERS = _found()
_kernels: dict[tuple[object, ...], _Kernels] = {}


def run_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    batch: Batch,
    *,
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    state_v_first: bool,
) -> tuple[Tensor, Tensor | None]:
    """The contract's answer, with activated gates in float32 and without gradients or context parallelism."""
    B, T, Hg, K = q.shape
    H, V = v.shape[2:]
    if batch.nothing(v):
        return without_tokens(v, K, batch, initial_state, state_v_first, output_final_state)
    with on_its_device(q):
        q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
        if use_qk_l2norm_in_kernel:
            q, k = l2norm_fwd(q)[0], l2norm_fwd(k)[0]
        state = None if initial_state is None else initial_state.contiguous()
        kernels = _kernels_for(
            H, Hg, q.dtype, None if state is None else state.dtype, scale, output_final_state, state_v_first, batch
        )
        cumulated, systems, o = torch.empty_like(g), q.new_empty(B, T, H, CHUNK), torch.empty_like(v)
        sizes = (V, K) if state_v_first else (K, V)
        final = g.new_empty(batch.sequences, H, *sizes)
        if batch.edges is None:
            chunks = B * -(-T // CHUNK)
            kernels.cumulate(g, cumulated, chunks)
            kernels.solve(k, beta, systems, chunks)
            edges = offsets = torch.empty(B + 1, dtype=torch.int32, device=q.device)  # read by packed batches alone
        else:
            assert batch.tables is not None
            edges, offsets, indices = batch.edges, batch.tables.offsets, batch.tables.indices
            kernels.cumulate(g, edges, indices, cumulated)
            kernels.solve(k, beta, edges, indices, systems)
        # Parts of context parallelism and states of every chunk: neither is read or written here.
        parts, states = edges[:-1], q.new_empty(B, 0, H, *sizes)
        start = final if state is None else state
        kernels.scan(q, k, v, systems, cumulated, beta, start, edges, offsets, parts, edges, o, states, final)
        return batch.zeros_behind(o), final if output_final_state else None


def _kernels_for(
    H: int,
    Hg: int,
    dtype: torch.dtype,
    state_dtype: torch.dtype | None,
    scale: float,
    final: bool,
    v_first: bool,
    batch: Batch,
) -> _Kernels:
    """The compiled kernels for a call; K and V are 128."""
    assert MAKERS is not None
    blocks = batch.sequences * H
    width = 128 if blocks >= MAKERS.blocks else 64 if blocks * 2 >= MAKERS.blocks else 32
    packed = batch.edges is not None
    key = (H, Hg, dtype, state_dtype, scale, final, v_first, packed, width)
    known = _kernels.get(key)
    if known is not None:
        return known
    float32, whole = torch.float32, torch.int64 if packed else "int32"
    made = _Kernels(
        MAKERS.cumulate(
            H,
            CHUNK,
            g_dtype=float32,
            seqlen_dtype=whole,
            accum_dtype="float32",
            is_varlen=packed,
            reverse=False,
            zero_last_chunk=False,
        ),
        MAKERS.solve(
            H,
            Hg,
            128,
            CHUNK,
            qkva_dtype=dtype,
            b_dtype=float32,
            seqlen_dtype=whole,
            accum_dtype="float32",
            is_varlen=packed,
        ),
        MAKERS.scan(
            H,
            Hg,
            128,
            128,
            CHUNK,
            scale,
            qkva_dtype=dtype,
            g_dtype=float32,
            b_dtype=float32,
            h0_dtype=state_dtype or float32,
            ht_dtype=float32,
            h_dtype=dtype,
            o_dtype=dtype,
            seqlen_dtype=torch.int64 if packed else torch.int32,
            accum_dtype="float32",
            use_initial_state=state_dtype is not None,
            store_final_state=final,
            store_h=False,
            store_o=True,
            is_varlen=packed,
            is_cp=False,
            state_v_first=v_first,
            block_DV=width,
        ),
    )
    if len(_kernels) >= _CAPACITY:
        _kernels.clear()
    _kernels[key] = made
    return made
