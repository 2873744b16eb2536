"""What kernels need of a batch that read edges and chunk tables on the device, empty sequences and all.

Nothing here waits for the device where the host has the edges, and nothing at all while a CUDA graph is captured.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernelreg.ops.gdn_chunks import ChunkTables, chunk_tables
from kernelreg.ops.gdn_plan import plan_of
from kernelreg.ops.gdn_sequences import read_sequences

from ._packed import carried


class Batch(NamedTuple):
    """Which tokens belong to which sequence.

    Attributes:
        sequences: N.
        end: where the last sequence ends; T where only the device knows.
        edges: ``[N+1]`` int64 of a packed batch, None of a dense one.
        tables: its chunks.
        outside: ``[T]``: whether a token lies behind the last sequence, where only the device knows.
        longest: tokens of the longest sequence; T where only the device knows.
    """

    sequences: int
    end: int
    edges: Tensor | None = None
    tables: ChunkTables | None = None
    outside: Tensor | None = None
    longest: int = 0

    def nothing(self, v: Tensor) -> bool:
        """Whether there is nothing to launch."""
        return not self.sequences or not self.end or not v.numel()

    def zeros_behind(self, o: Tensor) -> Tensor:
        """The output with zeros behind the last sequence, in place."""
        if self.outside is not None:
            o.masked_fill_(self.outside[None, :, None, None], 0)
        elif self.end < o.shape[1]:
            o[:, self.end :] = 0
        return o


def no_gradient(*arguments: object) -> bool:
    """Whether nothing of a call needs gradients, so that it can go past autograd."""
    return not torch.is_grad_enabled() or not any(isinstance(x, Tensor) and x.requires_grad for x in arguments)


def batch_of(q: Tensor, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None) -> Batch:
    """The batch of a call with these q and edges."""
    B, T = q.shape[:2]
    if cu_seqlens is None:
        return Batch(B, T, longest=T)
    count = len(cu_seqlens) - 1
    plan = plan_of(cu_seqlens)
    if captured(q):
        if plan is not None:
            return Batch(count, T, plan.cu_seqlens, plan.full, plan.outside, T)
        edges = cu_seqlens.to(torch.int64, copy=True)  # not the caller's own: adapters hang tables on it
        outside = torch.arange(T, device=q.device) >= edges[-1]
        return Batch(count, T, edges, chunk_tables(edges, T), outside, T)
    sequences = read_sequences(cu_seqlens, T, cu_seqlens_cpu)

    def make() -> Batch:
        end, longest = sequences.edges[-1], sequences.longest
        if plan is not None:
            return Batch(count, end, plan.cu_seqlens, plan.chunks, longest=longest)
        tables = chunk_tables(torch.tensor(sequences.edges))
        indices, offsets = (x.to(q.device, non_blocking=True) for x in tables)
        return Batch(count, end, cu_seqlens.to(torch.int64, copy=True), ChunkTables(indices, offsets), longest=longest)

    return sequences.keep("batch", make)


def captured(x: Tensor) -> bool:
    """Whether a CUDA graph is being captured."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def without_tokens(
    v: Tensor, K: int, batch: Batch, initial_state: Tensor | None, v_first: bool, final: bool
) -> tuple[Tensor, Tensor | None]:
    """The answer where there is nothing to launch."""
    state = carried(initial_state, batch.sequences, v.shape[2], K, v.shape[3], v, v_first, final)
    return torch.zeros_like(v, memory_format=torch.contiguous_format), state


_HERE: AbstractContextManager[None] = nullcontext()


def on_its_device(x: Tensor) -> AbstractContextManager[Any]:
    """A block in which the tensor's device is the current one, which is the one that libraries launch on."""
    if x.device.type == "cpu":
        return _HERE
    module: Any = torch.cuda if x.is_cuda else torch.get_device_module(x.device)
    return _HERE if module.current_device() == x.device.index else module.device(x.device)
