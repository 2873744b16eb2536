"""The gated delta rule in chunks, in plain PyTorch: right first, any device, differentiable by autograd.

Within a chunk of C tokens, with decays ``d(i, j) = exp(g_{j+1} + … + g_i)`` and S the state before the chunk, the
corrections ``u_i = beta_i (v_i − (decayed state)ᵀ k_i)`` solve a unit lower triangular system

    (I + A) U = diag(beta) V − diag(beta · d(i, −1)) K S,      A_ij = beta_i d(i, j) k_i·k_j  for j < i,

and outputs and next state follow from U by matrix products (Yang et al., "Gated Delta Networks", 2024). Decays are
sums over exactly the tokens between, never differences of prefix sums: a strong decay early in a chunk costs later
tokens no precision, and a gate of minus infinity is a clean reset.

What does not need S is computed for a block of chunks at once; a step of the loop over chunks is four operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernelreg.ops.gdn_arguments import to_unit_length

#: A gate whose exponential is zero in every dtype, and which is finite: zero times it is zero.
_RESET = -1e4


def chunk_size(device: torch.device) -> int:
    """C: a CPU saves arithmetic with short chunks, other devices launches with long ones."""
    return 32 if device.type == "cpu" else 64


class Chunks(NamedTuple):
    """What chunks need of their own tokens alone, as :class:`Prepared` has it.

    Attributes:
        values: ``[M, C, V]``, the corrections if the state before a chunk were zero.
        reads: ``[M, 2C, K]``: times the state, what that takes from the corrections, then what the queries read.
        keys: ``[M, C, K]``, decayed to the chunk's end.
        decay: ``[M, 1, 1]``, of the state over the chunk.
        attention: ``[M, C, C]``, what the queries read of the corrections.
    """

    values: Tensor
    reads: Tensor
    keys: Tensor
    decay: Tensor
    attention: Tensor

    def step(self, rows: slice, state: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        taken, read = torch.bmm(self.reads[rows], state).chunk(2, 1)
        corrections = self.values[rows] - taken
        return (read, corrections), (self.decay[rows] * state).baddbmm_(self.keys[rows].mT, corrections)

    def outputs(self, parts: Sequence[tuple[Tensor, ...]], scale: float) -> Tensor:
        read, corrections = (torch.cat(each) for each in zip(*parts, strict=True))
        return read.baddbmm_(self.attention, corrections, beta=scale, alpha=scale)


def in_chunks(inputs: Sequence[Tensor], unit_length: bool) -> Chunks:
    """A block's chunks, ready for the loop over them."""
    q, k, v, g, beta = inputs
    if unit_length:
        q, k = to_unit_length(q), to_unit_length(k)
    heads, size = q.shape[1:3]
    # [R, H, 1 or value heads of a group, C, D]: what a group shares is computed once and broadcast.
    q, k = q.unsqueeze(2), k.unsqueeze(2)
    v, g, beta = (torch.unflatten(x, 1, (heads, -1)) for x in (v, g, beta))
    start, between = _decays(g)
    # The solver reads what is below the diagonal and nothing else.
    system = beta[..., None] * (k @ k.mT) * between
    unit = torch.eye(size, dtype=g.dtype, device=g.device)
    inverse = torch.linalg.solve_triangular(system, unit, upper=False, left=False, unitriangular=True)
    by_value = inverse * beta[..., None, :]
    by_key = by_value * start[..., None, :]
    return Chunks(
        values=(by_value @ v).flatten(0, 2),
        reads=torch.cat([by_key @ k, q * start[..., None]], -2).flatten(0, 2),
        keys=(k * between[..., -1, :, None]).flatten(0, 2),
        decay=start[..., -1:, None].flatten(0, 2),
        attention=((q @ k.mT) * between).tril_().flatten(0, 2),
    )


def _decays(g: Tensor) -> tuple[Tensor, Tensor]:
    """From ``[…, C]``: the decays ``d(i, −1)`` from the chunk's start, and ``[…, C, C]`` of ``d(i, j)`` for j ≤ i.

    The sums are one matrix product with ones and zeros, which is deterministic on every device; ``cumsum`` is not.
    """
    size = g.shape[-1]
    ones = torch.ones(size, size, dtype=g.dtype, device=g.device)
    g = g.clamp_min(_RESET)
    sums = (g[..., None, :] * ones.tril()) @ ones.tril(-1)  # over l ≤ i and l > j
    return (g[..., :1] + sums[..., 0]).exp(), sums.exp()
