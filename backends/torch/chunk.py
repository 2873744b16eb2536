"""The gated delta rule in chunks, in plain PyTorch: right first, any device, differentiable by autograd.

Within a chunk of C tokens, with decays ``d(i, j) = exp(g_{j+1} + … + g_i)`` and S the state before the chunk, the
corrections ``u_i = beta_i (v_i − (decayed state)ᵀ k_i)`` solve a unit lower triangular system

    (I + A) U = diag(beta) V − diag(beta · d(i, −1)) K S,      A_ij = beta_i d(i, j) k_i·k_j  for j < i,

and outputs and next state follow from U by matrix products (Yang et al., "Gated Delta Networks", 2024). Decays are
sums over exactly the tokens between, never differences of prefix sums: a strong decay early in a chunk costs later
tokens no precision, and a gate of minus infinity is a clean reset.

What does not need S is computed for a block of chunks at once; a step of the loop over chunks is six operations.
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
        values: ``[M, C, V]``.
        reads: ``[M, 2C, K]``: times the state before a chunk, what it holds for the keys and then for the queries.
        solved: ``[M, C, C]``: times what the state lacks of the values, the corrections.
        keys: ``[M, C, K]``, decayed to the chunk's end.
        decay: ``[M, 1, 1]``, of the state over the chunk.
        attention: ``[M, C, C]``, what the queries read of the corrections.
    """

    values: Tensor
    reads: Tensor
    solved: Tensor
    keys: Tensor
    decay: Tensor
    attention: Tensor

    def step(self, state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        held, read = torch.bmm(self.reads, state).chunk(2, 1)
        corrections = torch.bmm(self.solved, self.values - held)
        o = torch.baddbmm(read, self.attention, corrections, beta=scale, alpha=scale)
        return o, (self.decay * state).baddbmm_(self.keys.mT, corrections)


def in_chunks(inputs: Sequence[Tensor], unit_length: bool) -> Chunks:
    """A block's chunks, ready for the loop over them."""
    both, v, g, beta = inputs
    if unit_length:
        both = to_unit_length(both)
    heads, size = both.shape[1], v.shape[2]
    # [R, H, 1 or value heads of a group, C, …]: what a group shares is computed once and broadcast.
    v, g, beta = (torch.unflatten(x, 1, (heads, -1)) for x in (v, g, beta))
    start, between = _decays(g)
    both = torch.unflatten(both, 2, (1, 2, size))
    k = both[..., 0, :, :]
    products = torch.unflatten(both.flatten(-3, -2) @ k.mT, -2, (2, size)) * between.unsqueeze(-3)
    of_keys, of_queries = products.unbind(-3)
    # The solver reads what is below the diagonal and nothing else.
    unit = torch.eye(size, dtype=g.dtype, device=g.device)
    inverse = torch.linalg.solve_triangular(
        beta[..., None] * of_keys, unit, upper=False, left=False, unitriangular=True
    )
    return Chunks(
        values=v.flatten(0, 2),
        reads=(both * start[..., None, :, None]).flatten(0, 2).flatten(1, 2),
        solved=(inverse * beta[..., None, :]).flatten(0, 2),
        keys=(k * between[..., -1, :, None]).flatten(0, 2),
        decay=start[..., -1:, None].flatten(0, 2),
        attention=of_queries.tril().flatten(0, 2),
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
