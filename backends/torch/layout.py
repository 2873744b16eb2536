"""How the tokens of a batch fall into chunks, so that no step of the recurrence loops over sequences or tokens.

A layout's blocks are worked on one after the other. A block is some consecutive steps; a step is one chunk of every
sequence that still has one; its chunks are rows, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


class Block(NamedTuple):
    """Consecutive steps of a batch, and their tokens.

    Attributes:
        steps: how many sequences have a chunk at each step; never grows, and sums to R, the rows of the block.
        inputs: q and k ``[R, H, C, K]``, v ``[R, HV, C, V]``, g and beta ``[R, HV, C]``, of the dtype to compute in.
    """

    steps: tuple[int, ...]
    inputs: tuple[Tensor, ...]


def elements_at_once(device: torch.device) -> int:
    """Elements of v in a block: what a CPU's cache holds; elsewhere far past what fills a device, within its memory."""
    return 2**18 if device.type == "cpu" else 2**26


def _tokens_at_once(v: Tensor) -> int:
    return elements_at_once(v.device) // max(1, v.shape[2] * v.shape[3])


class EqualLayout:
    """The chunks of a dense batch: views of it, unless its length is no multiple of a chunk.

    Args:
        batch, length: B and T.
        chunk: C.
    """

    order: Tensor | None = None

    def __init__(self, batch: int, length: int, chunk: int) -> None:
        self._batch, self._length, self._chunk = batch, length, chunk

    def blocks(self, inputs: Sequence[Tensor], dtype: torch.dtype) -> Iterator[Block]:
        """The blocks of ``[B, T, heads, …]`` each."""
        if not inputs[2].numel():
            return
        places = -(-self._length // self._chunk)
        if missing := places * self._chunk - self._length:
            inputs = [pad(x, (0, 0) * (x.dim() - 2) + (0, missing)) for x in inputs]
        if places == 1:
            yield Block((self._batch,), tuple(_rows(x.transpose(1, 2), dtype) for x in inputs))
            return
        at_once = max(1, _tokens_at_once(inputs[2]) // (self._batch * self._chunk))
        parts = (torch.split(torch.unflatten(x, 1, (places, self._chunk)), at_once, 1) for x in inputs)
        for part in zip(*parts, strict=True):
            rows = (_rows(x.transpose(0, 1).transpose(2, 3), dtype).flatten(0, 1) for x in part)
            yield Block((self._batch,) * part[0].shape[1], tuple(rows))

    def join(self, outputs: Iterator[Tensor], like: Tensor) -> Tensor:
        """``[R, C, HV, V]`` of each block to the shape of ``like``, ``[B, T, HV, V]``."""
        places = -(-self._length // self._chunk)
        if places == 1:
            return next(outputs, like)[:, : self._length]
        parts = (torch.unflatten(x, 0, (-1, self._batch)).transpose(0, 1) for x in outputs)
        whole = _cat(parts, places, 1)
        return like if whole is None else whole.flatten(1, 2)[:, : self._length]


class PackedLayout:
    """The chunks of packed sequences as rows, by their place in the sequence and then by sequence, the longest first.

    Args:
        edges: as in ``cu_seqlens``, on the host.
        chunk: C.
        device: where the tensors of the batch are.

    Attributes:
        order: ``[N]``, the sequences from the longest to the shortest.
    """

    def __init__(self, edges: Sequence[int], chunk: int, device: torch.device) -> None:
        starts = torch.tensor(edges[:-1], dtype=torch.long)
        ends = torch.tensor(edges[1:], dtype=torch.long)
        chunks, order = ((ends - starts + chunk - 1) // chunk).sort(descending=True, stable=True)
        rank = torch.repeat_interleave(torch.arange(len(chunks)), chunks)
        place = torch.arange(len(rank)) - torch.repeat_interleave(chunks.cumsum(0) - chunks, chunks)
        place, by_place = place.sort(stable=True)
        sequence = order[rank[by_place]]
        index = (starts[sequence] + place * chunk)[:, None] + torch.arange(chunk)
        self._rows = _Index(
            index.to(device, non_blocking=True), (ends[sequence][:, None] - 1).to(device, non_blocking=True)
        )
        self._steps: list[int] = (torch.bincount(place) if len(place) else place).tolist()
        self.order: Tensor | None = order.to(device, non_blocking=True)

    def blocks(self, inputs: Sequence[Tensor], dtype: torch.dtype) -> Iterator[Block]:
        """The blocks of ``[1, T, heads, …]`` each."""
        if not inputs[2].numel():
            return
        steps = list(self._groups(_tokens_at_once(inputs[2])))
        parts = (torch.split(x, [sum(each) for each in steps]) for x in self._rows.gather(*inputs))
        for each, part in zip(steps, zip(*parts, strict=True), strict=True):
            yield Block(each, tuple(_rows(x.transpose(1, 2), dtype) for x in part))

    def join(self, outputs: Iterator[Tensor], like: Tensor) -> Tensor:
        """``[R, C, HV, V]`` of each block to the shape of ``like``, ``[1, T, HV, V]``."""
        return self._rows.scatter(outputs, like)

    def _groups(self, tokens: int) -> Iterator[tuple[int, ...]]:
        """The steps, in groups of about so many tokens."""
        steps: list[int] = []
        filled = 0
        for step in self._steps:
            steps.append(step)
            filled += step * self._rows.chunk
            if filled >= tokens:
                yield tuple(steps)
                steps, filled = [], 0
        if steps:
            yield tuple(steps)


class OrderedLayout:
    """Chunks as rows in the order of the tokens, made without a word from the host: for CUDA graphs.

    Args:
        cu_seqlens: ``[N+1]``; it is read on its device, and shapes depend on T and N alone.
        tokens: T.
        chunk: C.

    Attributes:
        sequence: ``[R]``, each row's sequence; N for rows that this batch does not need. R is the most rows that T
            tokens of N sequences can need.
        first: ``[R]``, whether the row is its sequence's first.
    """

    def __init__(self, cu_seqlens: Tensor, tokens: int, chunk: int) -> None:
        edges = cu_seqlens.long()
        chunks = (edges.diff() + chunk - 1) // chunk
        ends = chunks.cumsum(0)
        row = torch.arange(tokens // chunk + len(chunks), device=edges.device)
        self.sequence = torch.searchsorted(ends, row, right=True)
        # Rows that are not needed belong to one more sequence, which is empty.
        first_row = torch.cat([ends - chunks, chunks.sum().view(1)])
        start, end = edges, torch.cat([edges[1:], edges[-1:]])
        place = row - first_row[self.sequence]
        index = (start[self.sequence] + place * chunk)[:, None] + torch.arange(chunk, device=edges.device)
        self._rows = _Index(index, end[self.sequence][:, None] - 1)
        self.first = place == 0

    def rows(self, inputs: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
        """A block's inputs, of ``[1, T, heads, …]`` each."""
        return tuple(_rows(x.transpose(1, 2), dtype) for x in self._rows.gather(*inputs))

    def join(self, outputs: Iterator[Tensor], like: Tensor) -> Tensor:
        """``[R, C, HV, V]`` in parts to the shape of ``like``, ``[1, T, HV, V]``."""
        return self._rows.scatter(outputs, like)


class _Index:
    """Rows of tokens of a packed batch.

    A row that is longer than what is left of its sequence is filled with the sequence's last token, so that a NaN
    never leaves a sequence; with gates of zero it changes nothing there, and gets no gradient.
    """

    def __init__(self, index: Tensor, last: Tensor) -> None:
        self.chunk = index.shape[1]
        self._inside = index <= last
        self._index = torch.minimum(index, last).clamp_min(0)

    def gather(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Iterator[Tensor]:
        for x in (q, k, v):
            yield self._gather(x)
        for x in (g, beta):
            yield self._gather(x).masked_fill(~self._inside[..., None], 0)

    def scatter(self, outputs: Iterator[Tensor], like: Tensor) -> Tensor:
        rows = _cat(outputs, len(self._index), 0)
        if rows is None:
            return like
        tokens = like.shape[1]
        index = torch.where(self._inside, self._index, tokens)  # one spare token, which is cut off
        o = like.new_zeros(tokens + 1, *like.shape[2:])
        return o.index_copy(0, index.flatten(), rows.flatten(0, 1))[None, :tokens]

    def _gather(self, x: Tensor) -> Tensor:
        return torch.unflatten(x[0].index_select(0, self._index.flatten()), 0, self._index.shape)


def _rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The view as a contiguous tensor of the dtype, in one copy at most."""
    return x.contiguous() if x.dtype == dtype else x.to(dtype, memory_format=torch.contiguous_format)


def _cat(parts: Iterator[Tensor], size: int, dim: int) -> Tensor | None:
    """``torch.cat``, to this size; without gradients one part at a time, so that not all are there twice."""
    first = next(parts, None)
    if first is None or first.requires_grad:
        return None if first is None else torch.cat([first, *parts], dim)
    whole = first.new_empty([*first.shape[:dim], size, *first.shape[dim + 1 :]])
    end = 0
    for part in chain([first], parts):
        whole.narrow(dim, end, part.shape[dim]).copy_(part)
        end += part.shape[dim]
    return whole
