"""Where the sequences of a packed batch lie, as the host sees it."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from itertools import pairwise
from typing import Any, Protocol, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from kernelreg.errors import CallError

#: Layouts remembered; a model's layers share one cu_seqlens tensor per batch.
_CAPACITY = 16

Kept = TypeVar("Kept")


class Sequences:
    """The host's copy of a ``cu_seqlens``, and what libraries may be given in its stead.

    Attributes:
        edges: its values: where each sequence starts, and where the last one ends.
        filled: the numbers of the sequences that have tokens, or None when all have.
        packed: int64 edges of the filled sequences, on the same device. A fresh object for fresh values: libraries
            that cache by a tensor's identity cannot mistake it for what the caller's tensor held before.
    """

    __slots__ = ("_kept", "edges", "filled", "packed")

    def __init__(self, edges: tuple[int, ...], filled: Tensor | None, packed: Tensor) -> None:
        self.edges, self.filled, self.packed = edges, filled, packed
        self._kept: dict[Hashable, Any] = {}

    @classmethod
    def of(cls, edges: tuple[int, ...], cu_seqlens: Tensor) -> Sequences:
        """Those of a tensor that has these values."""
        lengths = [end - start for start, end in pairwise(edges)]
        filled = [place for place, length in enumerate(lengths) if length]
        if len(filled) == len(lengths):
            return cls(edges, None, cu_seqlens.to(torch.int64, copy=True))
        ends = [0, *(edges[place + 1] for place in filled)]
        device = cu_seqlens.device
        numbers, packed = (torch.tensor(each, dtype=torch.int64, device=device) for each in (filled, ends))
        return cls(edges, numbers, packed)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max((end - start for start, end in pairwise(self.edges)), default=0)

    def keep(self, name: Hashable, make: Callable[[], Kept]) -> Kept:
        """What an adapter derives from these sequences: made once for all layers."""
        if name not in self._kept:
            self._kept[name] = make()
        kept: Kept = self._kept[name]
        return kept


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


class Holder(Protocol):
    """What keeps a ``cu_seqlens`` and the host's copy of it together, and changes them together."""

    cu_seqlens: Tensor
    sequences: Sequences


#: By the identity of their ``cu_seqlens``, which lives at least as long as its holder.
_holders: WeakValueDictionary[int, Holder] = WeakValueDictionary()


def hold(holder: Holder) -> None:
    """Let :func:`read_sequences` give what the holder has for its ``cu_seqlens``."""
    _holders[id(holder.cu_seqlens)] = holder


def holder_of(cu_seqlens: Tensor) -> Holder | None:
    """What holds this very tensor, if anything does."""
    found = _holders.get(id(cu_seqlens))
    return found if found is not None and found.cu_seqlens is cu_seqlens else None


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
    holder = holder_of(cu_seqlens)
    if holder is not None:
        return holder.sequences
    version = None if torch.is_inference(cu_seqlens) else cu_seqlens._version
    known = None if version is None else _memory.get(cu_seqlens, version)
    edges = host_edges(cu_seqlens, tokens, cu_seqlens_cpu)  # values on the host cost nothing to read again
    if known is not None and (known.edges[-1] <= tokens if edges is None else known.edges == edges):
        return known
    sequences = Sequences.of(_checked(cu_seqlens, tokens) if edges is None else edges, cu_seqlens)
    if version is not None and cu_seqlens_cpu is None:
        _memory.put(cu_seqlens, version, sequences)
    return sequences


def _checked(values: Tensor, tokens: int) -> tuple[int, ...]:
    return tuple(check_edges("cu_seqlens", values.tolist(), tokens))


def check_edges(name: str, edges: list[int], tokens: int | None = None) -> list[int]:
    """The edges, if they are some.

    Args:
        name: the argument's.
        tokens: T, where it is known.

    Raises:
        CallError: they do not start at 0, go back, or end behind the last token.
    """
    last = edges[-1] if tokens is None else tokens
    if edges[0] != 0 or edges[-1] > last or edges != sorted(edges):
        limit = "and never back" if tokens is None else f"never back, and not beyond T = {tokens}"
        raise CallError(f"{name} is {_short(edges)}; accepted: from 0, {limit}")
    return edges


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
