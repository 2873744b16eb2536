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
        values: ``[M, 1, V]``.
        keys, queries: ``[M, 1, K]``.
        decay, beta: ``[M, 1, 1]``.
    """

    values: Tensor
    keys: Tensor
    queries: Tensor
    decay: Tensor
    beta: Tensor

    def step(self, state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        held = torch.bmm(self.keys, state)
        corrections = torch.addcmul(self.values, self.decay, held, value=-1) * self.beta
        state = (self.decay * state).addcmul_(self.keys.mT, corrections)
        return torch.bmm(self.queries, state) * scale, state


def token_by_token(inputs: Sequence[Tensor], unit_length: bool) -> Tokens:
    """A block's tokens, ready for the loop over them."""
    both, v, g, beta = inputs
    if unit_length:
        both = to_unit_length(both)
    group = v.shape[1] // both.shape[1]
    if group > 1:
        both = both.repeat_interleave(group, 1)
    keys, queries = both.flatten(0, 1).chunk(2, 1)
    return Tokens(v.flatten(0, 1), keys, queries, g.exp().view(-1, 1, 1), beta.view(-1, 1, 1))
