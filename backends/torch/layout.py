"""How the tokens of a batch fall into chunks, so that no step of the recurrence loops over sequences or tokens.

A layout's blocks are worked on one after the other. A block is some consecutive steps; a step is one chunk of every
sequence that still has one; its chunks are rows, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


class Block(NamedTuple):
    """Consecutive steps of a batch, and their tokens.

    Attributes:
        steps: how many sequences have a chunk at each step; never grows, and sums to R, the rows of the block.
        inputs: k and then q ``[R, H, 2C, K]``, v ``[R, HV, C, V]``, g and beta ``[R, HV, C]``, of the dtype to compute
            in.
    """

    steps: tuple[int, ...]
    inputs: tuple[Tensor, ...]


def elements_at_once(device: torch.device) -> int:
    """Elements of v in a block: what a CPU's cache holds; elsewhere far past what fills a device, within its memory."""
    return 2**18 if device.type == "cpu" else 2**26


def _tokens_at_once(v: Tensor) -> int:
    return elements_at_once(v.device) // max(1, v.shape[2] * v.shape[3])


class Parts:
    """``torch.cat`` of parts that come one by one, all of some dtype in the end.

    Without gradients each is written to its place as it comes, so that not all are there twice.

    Args:
        size, dim: of the whole.
    """

    def __init__(self, size: int, dim: int, dtype: torch.dtype) -> None:
        self._size, self._dim, self._dtype = size, dim, dtype
        self._parts: list[Tensor] = []
        self._whole: Tensor | None = None
        self._end = 0

    def add(self, part: Tensor) -> None:
        length = part.shape[self._dim]
        if part.requires_grad or length == self._size:
            self._parts.append(part.to(self._dtype))
            return
        if self._whole is None:
            shape = [*part.shape[: self._dim], self._size, *part.shape[self._dim + 1 :]]
            self._whole = part.new_empty(shape, dtype=self._dtype)
        self._whole.narrow(self._dim, self._end, length).copy_(part)
        self._end += length

    def whole(self) -> Tensor | None:
        """The parts together, None where there were none."""
        if len(self._parts) == 1:
            return self._parts[0]
        return torch.cat(self._parts, self._dim) if self._parts else self._whole


class EqualLayout:
    """The chunks of a dense batch: views of it, unless its length is no multiple of a chunk.

    Args:
        batch, length: B and T.
        chunk: C.
    """

    order: Tensor | None = None

    def __init__(self, batch: int, length: int, chunk: int) -> None:
        self._batch, self._length, self._chunk = batch, length, chunk
        self._places = -(-length // chunk)

    def blocks(self, inputs: Sequence[Tensor], dtype: torch.dtype) -> Iterator[Block]:
        """The blocks of ``[B, T, heads, …]`` each."""
        if not inputs[2].numel():
            return
        at_once = max(1, _tokens_at_once(inputs[2]) // (self._batch * self._chunk))
        padded = _padded(inputs, self._places * self._chunk)
        parts = (torch.split(torch.unflatten(x, 1, (self._places, self._chunk)), at_once, 1) for x in padded)
        for part in zip(*parts, strict=True):
            rows = _rows([x.transpose(0, 1).transpose(2, 3) for x in part], dtype)
            yield Block((self._batch,) * part[0].shape[1], tuple(x.flatten(0, 1) for x in rows))

    def outputs(self, v: Tensor) -> Parts:
        """For ``[B, C, HV, V]`` of each step."""
        return Parts(self._places * self._chunk, 1, v.dtype)

    def join(self, outputs: Parts, v: Tensor) -> Tensor:
        """The outputs as ``[B, T, HV, V]``."""
        whole = outputs.whole()
        return _zeros(v) if whole is None else whole[:, : self._length]


class SingleLayout:
    """A dense batch whose sequences are one chunk each, as in decode: one block of one step.

    Args:
        length: T.
        chunk: C, at least T.
    """

    def __init__(self, length: int, chunk: int) -> None:
        self._length, self._chunk = length, chunk

    def rows(self, inputs: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The block's inputs, of ``[B, T, heads, …]`` each."""
        return _rows([x.transpose(1, 2) for x in _padded(inputs, self._chunk)], dtype)

    def join(self, outputs: Tensor) -> Tensor:
        """``[B, C, HV, V]`` to ``[B, T, HV, V]``."""
        return outputs[:, : self._length]


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
            yield Block(each, _rows([x.transpose(1, 2) for x in part], dtype))

    def outputs(self, v: Tensor) -> Parts:
        """For ``[rows, C, HV, V]`` of each step."""
        return self._rows.outputs(v)

    def join(self, outputs: Parts, v: Tensor) -> Tensor:
        """The outputs as ``[1, T, HV, V]``."""
        return self._rows.scatter(outputs, v)

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
        return _rows([x.transpose(1, 2) for x in self._rows.gather(*inputs)], dtype)

    def outputs(self, v: Tensor) -> Parts:
        """For ``[1, C, HV, V]`` of each row."""
        return self._rows.outputs(v)

    def join(self, outputs: Parts, v: Tensor) -> Tensor:
        """The outputs as ``[1, T, HV, V]``."""
        return self._rows.scatter(outputs, v)


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

    def outputs(self, v: Tensor) -> Parts:
        return Parts(len(self._index), 0, v.dtype)

    def scatter(self, outputs: Parts, v: Tensor) -> Tensor:
        rows = outputs.whole()
        if rows is None:
            return _zeros(v)
        tokens = v.shape[1]
        index = torch.where(self._inside, self._index, tokens)  # one spare token, which is cut off
        o = v.new_zeros(tokens + 1, *v.shape[2:])
        return o.index_copy(0, index.flatten(), rows.flatten(0, 1))[None, :tokens]

    def _gather(self, x: Tensor) -> Tensor:
        return torch.unflatten(x[0].index_select(0, self._index.flatten()), 0, self._index.shape)


#: What the rule is computed on.
Layout = EqualLayout | SingleLayout | PackedLayout | OrderedLayout


def _zeros(v: Tensor) -> Tensor:
    """As many zeros, in v's graph: what comes of no chunk can be followed by autograd like any other output."""
    return v.masked_fill(torch.ones((), dtype=torch.bool, device=v.device), 0)


def _padded(inputs: Sequence[Tensor], length: int) -> Sequence[Tensor]:
    """``[B, T, …]`` each to that length, with zeros, which change no state."""
    missing = length - inputs[2].shape[1]
    return [pad(x, (0, 0) * (x.dim() - 2) + (0, missing)) for x in inputs] if missing else inputs


def _rows(inputs: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """:attr:`Block.inputs` from views ``[…, heads, C, …]`` of q, k, v, g and beta; contiguous, and of the dtype."""
    q, k, *others = inputs
    return tuple(
        x.contiguous() if x.dtype == dtype else x.to(dtype, memory_format=torch.contiguous_format)
        for x in (torch.cat([k, q], -2), *others)
    )
