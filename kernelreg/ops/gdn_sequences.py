"""Where the sequences of a packed batch lie, as the host sees it."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from itertools import pairwise

import torch
from torch import Tensor

from kernelreg.errors import CallError

#: Layouts remembered; a model's layers share one cu_seqlens tensor per batch.
_CAPACITY = 16


class Sequences:
    """The host's copy of a ``cu_seqlens``, and what libraries may be given in its stead.

    Attributes:
        edges: its values: where each sequence starts, and where the last one ends.
        filled: the numbers of the sequences that have tokens, or None when all have.
        packed: int64 edges of the filled sequences, on the same device. A fresh object for fresh values: libraries
            that cache by a tensor's identity cannot mistake it for what the caller's tensor held before.
    """

    __slots__ = ("edges", "filled", "packed")

    def __init__(self, edges: tuple[int, ...], cu_seqlens: Tensor) -> None:
        lengths = [end - start for start, end in pairwise(edges)]
        filled = [place for place, length in enumerate(lengths) if length]
        self.edges = edges
        self.filled: Tensor | None = None
        self.packed = cu_seqlens.to(torch.int64, copy=True)
        if len(filled) < len(lengths):
            self.filled = torch.tensor(filled, dtype=torch.int64, device=cu_seqlens.device)
            ends = [0, *(edges[place + 1] for place in filled)]
            self.packed = torch.tensor(ends, dtype=torch.int64, device=cu_seqlens.device)


class _Memory:
    """What was read, by the tensor's identity and its version: an in-place change is another version."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, tuple[weakref.ref[Tensor], int, Sequences]] = OrderedDict()

    def get(self, tensor: Tensor, version: int) -> Sequences | None:
        kept = self._kept.get(id(tensor))
        if kept is None or kept[0]() is not tensor or kept[1] != version:
            return None
        return kept[2]

    def put(self, tensor: Tensor, version: int, sequences: Sequences) -> None:
        self._kept[id(tensor)] = (weakref.ref(tensor), version, sequences)
        while len(self._kept) > _CAPACITY:
            self._kept.popitem(last=False)


_memory = _Memory()


def host_edges(cu_seqlens: Tensor, tokens: int, cu_seqlens_cpu: Tensor | None = None) -> tuple[int, ...] | None:
    """The edges as far as the host has them: None where they lie on a device alone, which is not waited for.

    Arguments and errors are :func:`read_sequences`'s.
    """
    if cu_seqlens_cpu is not None:
        _check_host(cu_seqlens_cpu, cu_seqlens)
        return _checked(cu_seqlens_cpu, tokens)
    return _checked(cu_seqlens, tokens) if cu_seqlens.device.type == "cpu" else None


def read_sequences(cu_seqlens: Tensor, tokens: int, cu_seqlens_cpu: Tensor | None = None) -> Sequences:
    """The host's copy, read once per tensor and version: a device sync unless ``cu_seqlens_cpu`` spares it.

    Args:
        cu_seqlens: ``[N+1]``, int32 or int64.
        tokens: T of the packed batch.
        cu_seqlens_cpu: the same values on the CPU, if the caller has them.

    Raises:
        CallError: it does not start at 0, goes back, or ends behind the last token.
    """
    version = None if torch.is_inference(cu_seqlens) else cu_seqlens._version
    known = None if version is None else _memory.get(cu_seqlens, version)
    edges = host_edges(cu_seqlens, tokens, cu_seqlens_cpu)  # values on the host cost nothing to read again
    if known is not None and (known.edges[-1] <= tokens if edges is None else known.edges == edges):
        return known
    sequences = Sequences(_checked(cu_seqlens, tokens) if edges is None else edges, cu_seqlens)
    if version is not None and cu_seqlens_cpu is None:
        _memory.put(cu_seqlens, version, sequences)
    return sequences


def _checked(values: Tensor, tokens: int) -> tuple[int, ...]:
    edges = values.tolist()
    if edges[0] != 0 or edges[-1] > tokens or edges != sorted(edges):
        raise CallError(f"cu_seqlens is {_short(edges)}; accepted: from 0, never back, and not beyond T = {tokens}")
    return tuple(edges)


def _check_host(cu_seqlens_cpu: object, cu_seqlens: Tensor) -> None:
    whole = (torch.int32, torch.int64)
    if (
        not isinstance(cu_seqlens_cpu, Tensor)
        or cu_seqlens_cpu.device.type != "cpu"
        or cu_seqlens_cpu.dtype not in whole
    ):
        raise CallError(f"cu_seqlens_cpu is {cu_seqlens_cpu!r:.80}; accepted: an int32 or int64 tensor on the CPU")
    if cu_seqlens_cpu.shape != cu_seqlens.shape:
        wanted = f"cu_seqlens's {list(cu_seqlens.shape)}"
        raise CallError(f"cu_seqlens_cpu is {list(cu_seqlens_cpu.shape)}; accepted: {wanted}")


def _short(edges: list[int]) -> str:
    if len(edges) <= 8:
        return str(edges)
    return f"[{', '.join(map(str, edges[:4]))}, …, {', '.join(map(str, edges[-2:]))}]"
