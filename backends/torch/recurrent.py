"""The gated delta rule token by token, over all sequences at once: decode, where a chunk would be mostly padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernelreg.ops.gdn_arguments import to_unit_length


class Tokens(NamedTuple):
    """What tokens need of themselves alone, as :class:`Prepared` has it.

    Attributes:
        values: ``[M, 1, V]``, times beta.
        reads: ``[M, 1, K]``: times the state before a token, what that takes from the values.
        keys, queries: ``[M, 1, K]``.
        decay: ``[M, 1, 1]``.
    """

    values: Tensor
    reads: Tensor
    keys: Tensor
    queries: Tensor
    decay: Tensor

    def step(self, rows: slice, state: Tensor) -> tuple[tuple[Tensor], Tensor]:
        corrections = self.values[rows] - torch.bmm(self.reads[rows], state)
        state = (self.decay[rows] * state).addcmul_(self.keys[rows].mT, corrections)
        return (torch.bmm(self.queries[rows], state),), state

    def outputs(self, parts: Sequence[tuple[Tensor, ...]], scale: float) -> Tensor:
        return torch.cat([part for (part,) in parts]) * scale


def token_by_token(inputs: Sequence[Tensor], unit_length: bool) -> Tokens:
    """A block's tokens, ready for the loop over them."""
    q, k, v, g, beta = inputs
    both = torch.cat([k, q], 2)
    if unit_length:
        both = to_unit_length(both)
    group = v.shape[1] // k.shape[1]
    if group > 1:
        both = both.repeat_interleave(group, 1)
    keys, queries = both.flatten(0, 1).chunk(2, 1)
    beta, decay = beta.reshape(-1, 1, 1), g.exp().reshape(-1, 1, 1)
    return Tokens(beta * v.flatten(0, 1), (beta * decay) * keys, keys, queries, decay)
