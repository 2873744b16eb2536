"""The gated delta rule token by token, over all sequences at once: decode, where a chunk would be mostly padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernelreg.ops.gdn_arguments import to_unit_length


class Tokens(NamedTuple):
    """What tokens need of themselves alone, as :class:`Prepared` has it: chunks of one, without their small products.

    Attributes:
        values: ``[M, 1, V]``, times beta.
        reads: ``[M, 2, K]``: times the state before a token, what the decayed one holds for the key and for the query.
        keys: ``[M, 1, K]``.
        decay, beta, attention: ``[M, 1, 1]``; the last is what the query reads of the corrections.
    """

    values: Tensor
    reads: Tensor
    keys: Tensor
    decay: Tensor
    beta: Tensor
    attention: Tensor

    def step(self, state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        held, read = torch.split(torch.bmm(self.reads, state), 1, 1)
        corrections = torch.addcmul(self.values, self.beta, held, value=-1)
        o = torch.addcmul(read, self.attention, corrections) * scale
        return o, (self.decay * state).addcmul_(self.keys.mT, corrections)


def token_by_token(inputs: Sequence[Tensor], unit_length: bool) -> Tokens:
    """A block's tokens, ready for the loop over them."""
    both, v, g, beta = inputs
    if unit_length:
        both = to_unit_length(both)
    group = v.shape[1] // both.shape[1]
    if group > 1:
        both = both.repeat_interleave(group, 1)
    both, decay, beta = both.flatten(0, 1), g.exp().view(-1, 1, 1), beta.view(-1, 1, 1)
    keys, queries = torch.split(both, 1, 1)
    attention = (keys * queries).sum(-1, keepdim=True)
    return Tokens(beta * v.flatten(0, 1), decay * both, keys, decay, beta, attention)
