"""How the tokens of a batch fall into chunks, so that no step of the recurrence loops over sequences or tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

#: Rows × chunk size worked on at once: bounds memory on long prompts, and is far past what fills a device.
TOKENS_AT_ONCE = 16_384


class Block(NamedTuple):
    """Consecutive steps, and the rows that they cover."""

    first: int
    last: int
    steps: tuple[int, ...]


class Layout(NamedTuple):
    """Chunks as rows, ordered by their place in the sequence and then by sequence, the longest first.

    Attributes:
        tokens: ``[R, C]``, each row's tokens in the flattened batch; one past the last token is padding.
        steps: how many sequences still have a chunk at each place; never grows, and sums to R.
        order: ``[N]``, the sequences from the longest to the shortest; None when they are equal.
    """

    tokens: Tensor
    steps: tuple[int, ...]
    order: Tensor | None

    def blocks(self) -> Iterator[Block]:
        """The steps, in groups of about ``TOKENS_AT_ONCE``."""
        first = row = 0
        steps: list[int] = []
        for step in self.steps:
            steps.append(step)
            row += step
            if (row - first) * self.tokens.shape[1] >= TOKENS_AT_ONCE:
                yield Block(first, row, tuple(steps))
                first, steps = row, []
        if steps:
            yield Block(first, row, tuple(steps))


def equal_layout(batch: int, length: int, chunk: int, device: torch.device) -> Layout:
    """The chunks of ``batch`` sequences of ``length`` tokens each."""
    places = -(-length // chunk)
    inside = torch.arange(places * chunk, device=device).view(places, 1, chunk)
    start = torch.arange(batch, device=device).view(1, batch, 1) * length
    index = torch.where(inside < length, start + inside, batch * length)
    return Layout(index.reshape(places * batch, chunk), (batch,) * places if batch else (), None)


def packed_layout(edges: Sequence[int], tokens: int, chunk: int, device: torch.device) -> Layout:
    """The chunks of packed sequences: ``edges`` as in ``cu_seqlens``, on the host; ``tokens`` is T."""
    starts = torch.tensor(edges[:-1], dtype=torch.long)
    ends = torch.tensor(edges[1:], dtype=torch.long)
    chunks, order = ((ends - starts + chunk - 1) // chunk).sort(descending=True, stable=True)
    rank = torch.repeat_interleave(torch.arange(len(chunks)), chunks)
    place = torch.arange(len(rank)) - torch.repeat_interleave(chunks.cumsum(0) - chunks, chunks)
    place, by_place = place.sort(stable=True)
    sequence = order[rank[by_place]]
    index = (starts[sequence] + place * chunk)[:, None] + torch.arange(chunk)
    index = torch.where(index < ends[sequence][:, None], index, tokens)
    steps = torch.bincount(place) if len(place) else place
    return Layout(index.to(device, non_blocking=True), tuple(steps.tolist()), order.to(device, non_blocking=True))


class OrderedLayout(NamedTuple):
    """Chunks as rows in the order of the tokens, made without a word from the host: for CUDA graphs.

    Attributes:
        tokens: ``[R, C]`` as in :class:`Layout`; R is the most rows that T tokens of N sequences can need.
        sequence: ``[R]``, each row's sequence; N for rows that this batch does not need.
        first: ``[R]``, whether the row is its sequence's first.
    """

    tokens: Tensor
    sequence: Tensor
    first: Tensor


def ordered_layout(cu_seqlens: Tensor, tokens: int, chunk: int) -> OrderedLayout:
    """The chunks of packed sequences, computed on the device of ``cu_seqlens``; shapes depend on T and N alone."""
    edges = cu_seqlens.long()
    chunks = (edges.diff() + chunk - 1) // chunk
    ends = chunks.cumsum(0)
    row = torch.arange(tokens // chunk + len(chunks), device=edges.device)
    sequence = torch.searchsorted(ends, row, right=True)
    # Rows that are not needed belong to one more sequence, which is empty.
    first_row = torch.cat([ends - chunks, chunks.sum().view(1)])
    start, end = edges, torch.cat([edges[1:], edges[-1:]])
    place = row - first_row[sequence]
    index = (start[sequence] + place * chunk)[:, None] + torch.arange(chunk, device=edges.device)
    return OrderedLayout(torch.where(index < end[sequence][:, None], index, tokens), sequence, place == 0)


def gather(x: Tensor, index: Tensor) -> Tensor:
    """``[T, …]`` to ``[R, C, …]``; padding gives zeros, whatever lies behind the last sequence."""
    padding = index == x.shape[0]
    rows = x.index_select(0, index.clamp_max(x.shape[0] - 1).flatten()).view(*index.shape, *x.shape[1:])
    return rows.masked_fill(padding.view(*index.shape, *(1,) * (x.dim() - 1)), 0)
