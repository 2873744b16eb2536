"""The gated delta rule in chunks, in plain PyTorch: right first, any device, differentiable by autograd.

Within a chunk of C tokens, with decays ``d(i, j) = exp(g_{j+1} + … + g_i)`` and S the state before the chunk, the
corrections ``u_i = beta_i (v_i − (decayed state)ᵀ k_i)`` solve a unit lower triangular system

    (I + A) U = diag(beta) V − diag(beta · d(i, −1)) K S,      A_ij = beta_i d(i, j) k_i·k_j  for j < i,

and outputs and next state follow from U by matrix products (Yang et al., "Gated Delta Networks", 2024). Decays are
sums over exactly the tokens between, never differences of prefix sums: a strong decay early in a chunk costs later
tokens no precision, and a gate of minus infinity is a clean reset.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from .layout import Layout, OrderedLayout, gather

CHUNK = 64


def chunk_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, layout: Layout
) -> tuple[Tensor, Tensor]:
    """Outputs and final states.

    Args:
        q, k: ``[T, H, K]``, flattened over the batch; q is scaled already.
        v: ``[T, HV, V]``.
        g, beta: ``[T, HV]``.
        state: ``[N, HV, K, V]``.
        layout: the batch's chunks.

    Returns:
        ``[T, HV, V]``, zero where no sequence covers a token, and ``[N, HV, K, V]``.
    """
    running = state if layout.order is None else state.index_select(0, layout.order)
    finished: list[Tensor] = []
    outputs: list[Tensor] = []
    for block in layout.blocks():
        rows = layout.tokens[block.first : block.last]
        chunks = _Chunks(*(gather(x, rows) for x in (q, k, v, g, beta)))
        row = 0
        for size in block.steps:
            if size < running.shape[0]:
                finished.append(running[size:])
                running = running[:size]
            o, running = chunks.step(slice(row, row + size), running)
            outputs.append(o)
            row += size
    final = torch.cat([running, *reversed(finished)])
    if layout.order is not None:
        final = final.index_select(0, layout.order.argsort())
    return _scattered(outputs, layout.tokens, v), final


def ordered_chunk_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, layout: OrderedLayout
) -> tuple[Tensor, Tensor]:
    """:func:`chunk_rule` one row after the other, in launches that depend on shapes alone."""
    chunks = _Chunks(*(gather(x, layout.tokens) for x in (q, k, v, g, beta)))
    running = state.new_zeros(1, *state.shape[1:])
    finals = starts = torch.cat([state, running])  # the last is the empty sequence of unused rows
    outputs: list[Tensor] = []
    for row in range(len(layout.tokens)):
        sequence = layout.sequence[row : row + 1]
        running = torch.where(layout.first[row], starts.index_select(0, sequence), running)
        o, running = chunks.step(slice(row, row + 1), running)
        finals = finals.index_copy(0, sequence, running)
        outputs.append(o)
    return _scattered(outputs, layout.tokens, v), finals[:-1]


def _scattered(outputs: list[Tensor], index: Tensor, v: Tensor) -> Tensor:
    """Rows back to tokens; every padded place writes to one spare token, which is cut off."""
    tokens, HV, V = v.shape
    if not outputs:  # no token, and no row of v either
        return v
    rows = torch.cat(outputs).transpose(1, 2).reshape(-1, HV, V)
    return v.new_zeros(tokens + 1, HV, V).index_copy(0, index.flatten(), rows)[:tokens]


class _Chunks:
    """What a block of chunks needs of its own tokens alone, all rows at once."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> None:
        heads, size = q.shape[2], g.shape[1]
        # [R, H, 1 or value heads of a group, C, D]: what a group shares is computed once and broadcast.
        q, k = (x.transpose(1, 2).unsqueeze(2) for x in (q, k))
        v = torch.unflatten(v, 2, (heads, -1)).permute(0, 2, 3, 1, 4)
        g, beta = (torch.unflatten(x, 2, (heads, -1)).permute(0, 2, 3, 1) for x in (g, beta))
        keys, queries = k @ k.mT, q @ k.mT
        sums = _segment_sums(g)
        start = sums[..., :1].exp()  # d(i, -1): decay from the chunk's start
        between = sums[..., 1:].exp().tril()  # d(i, j), j ≤ i
        system = (beta[..., None] * between * keys).tril(-1).flatten(1, 2)
        right = torch.cat([beta[..., None] * v, (beta[..., None] * start) * k], -1).flatten(1, 2)
        solved = torch.linalg.solve_triangular(
            system + torch.eye(size, dtype=g.dtype, device=g.device), right, upper=False, unitriangular=True
        )
        self.from_values, self.from_state = solved.split([v.shape[-1], k.shape[-1]], -1)  # each [R, HV, C, D]
        self.attention = (queries * between).flatten(1, 2)
        self.queries = (q * start).flatten(1, 2)
        self.keys = (k * between[..., -1, :, None]).flatten(1, 2).mT  # decayed to the chunk's end
        self.end = start[..., -1:, :].flatten(1, 2)

    def step(self, rows: slice, state: Tensor) -> tuple[Tensor, Tensor]:
        """One chunk of each running sequence: ``[n, HV, C, V]`` and the states after it."""
        corrections = self.from_values[rows] - self.from_state[rows] @ state
        o = self.queries[rows] @ state + self.attention[rows] @ corrections
        return o, self.end[rows] * state + self.keys[rows] @ corrections


def _segment_sums(g: Tensor) -> Tensor:
    """``[…, C]`` to ``[…, C, C+1]``: row i, column j+1 is ``g_{j+1} + … + g_i``; column 0 sums from the start.

    A doubling scan of adds: each entry sums its own tokens only, and it is deterministic on every device, which
    ``cumsum`` is not on CUDA.
    """
    size = g.shape[-1]
    ones = torch.ones(size, size + 1, dtype=torch.bool, device=g.device)
    sums = g[..., None].expand(*g.shape, size + 1).masked_fill(~ones.tril(), 0)
    shift = 1
    while shift < size:
        sums = sums + pad(sums[..., :-shift, :], (0, 0, shift, 0))
        shift *= 2
    return sums
