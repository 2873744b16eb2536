"""A packed batch's metadata, computed once on the host for all layers of a model, in device buffers that stay put.

A CUDA graph that was captured with a plan's buffers replays for whatever batch the plan holds at the time: an update
changes values, never addresses or shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from kernelreg.errors import CallError
from kernelreg.faults import last_line
from kernelreg.ops.gdn_chunks import ChunkTables, chunk_tables, most_chunks
from kernelreg.ops.gdn_sequences import Sequences, check_edges, hold, holder_of

#: Bytes that a buffer's address is a multiple of: Triton and TileLang compile for aligned addresses.
_ALIGNED = 256
_WHOLE = (torch.int32, torch.int64)


class Plan:
    """A packed batch within maxima; see :func:`plan`, which makes one.

    It must live as long as a CUDA graph that was captured with it. Attributes are to be read, not set.

    Attributes:
        max_tokens: T of every call with this plan.
        max_sequences: N of every call with this plan: the states that it takes and gives.
        device: where the calls' tensors are.
        cu_seqlens: ``[max_sequences + 1]`` int64 on the device, always the same tensor: the batch's edges, and its last
            edge again for each sequence that it does not have.
        cu_seqlens_cpu: the same values on the host; another tensor after each update.
        sequences: what the host knows of the batch; another object after each update.
        outside: ``[max_tokens]`` bool on the device: whether a token lies behind the last sequence.
        full: the chunk tables with a row for every chunk that a batch within the maxima can have, always the same
            tensors: for capture.
        form: what calls with this plan are told apart by, beside their tensors.
    """

    def __init__(self, edges: Tensor, max_tokens: int, max_sequences: int, device: torch.device) -> None:
        self.max_tokens, self.max_sequences, self.device = max_tokens, max_sequences, device
        rows = most_chunks(max_tokens, max_sequences)
        sizes = [8 * each for each in (max_sequences + 1, max_sequences + 1, 2 * rows, max_sequences + 1)]
        sizes += [8 * max_sequences, max_tokens]
        starts = [0]
        for size in sizes:
            starts.append(-(-(starts[-1] + size) // _ALIGNED) * _ALIGNED)
        self._places = [(start, start + size) for start, size in zip(starts, sizes, strict=False)]
        self._bytes = starts[-1]
        with torch.inference_mode(False):  # so that calls and updates in either mode can use the buffers
            self._buffer = torch.zeros(self._bytes, dtype=torch.uint8, device=device)
            *whole, self.outside = self._parts(self._buffer)
        self.cu_seqlens, offsets, indices, self._packed, self._filled = whole
        self.full = ChunkTables(indices.view(-1, 2), offsets)
        self._check(edges)
        self._write(edges)
        hold(self)

    def update(self, cu_seqlens_cpu: Tensor | Sequence[int]) -> None:
        """Hold another batch within the maxima: what is captured computes it from the next replay on.

        The copy to the device goes to the current stream and is not waited for: replay on that stream, or wait for it.

        Args:
            cu_seqlens_cpu: the new batch's edges, as in :func:`plan`.

        Raises:
            CallError: edges that are none or go beyond the maxima, or a CUDA graph is being captured. The plan then
                still holds the batch that it held.
        """
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise CallError(
                "plan.update() while a CUDA graph is captured would be part of it; accepted: before replays"
            )
        edges = _read(cu_seqlens_cpu)
        self._check(edges)
        self._write(edges)

    @property
    def edges(self) -> tuple[int, ...]:
        """The values of ``cu_seqlens``."""
        return self.sequences.edges

    @property
    def chunks(self) -> ChunkTables:
        """The batch's chunk tables without a row too many: for an eager call."""
        return self._exact

    def __repr__(self) -> str:
        lengths = [end - start for start, end in pairwise(self.edges)]
        of = f"{len(lengths)} sequences, {self.edges[-1]} tokens"
        return f"Plan({of}; max_tokens={self.max_tokens}, max_sequences={self.max_sequences}, device={self.device})"

    def _check(self, edges: Tensor) -> None:
        sequences, tokens = len(edges) - 1, int(edges[-1])
        if sequences > self.max_sequences:
            raise CallError(f"cu_seqlens_cpu has {sequences} sequences; accepted: max_sequences={self.max_sequences}")
        if tokens > self.max_tokens:
            raise CallError(f"cu_seqlens_cpu ends at {tokens}; accepted: up to max_tokens={self.max_tokens}")

    def _parts(self, buffer: Tensor) -> list[Tensor]:
        *whole, last = (buffer[start:end] for start, end in self._places)
        return [*(part.view(torch.int64) for part in whole), last.view(torch.bool)]

    def _write(self, edges: Tensor) -> None:
        """Compute a batch's metadata and send it to the device in one copy."""
        pinned = self.device.type == "cuda"
        with torch.inference_mode(False), torch.no_grad():
            # New memory each time: what is on its way to the device must not be written again. torch's allocator of
            # pinned memory knows when that is over.
            staging = torch.zeros(self._bytes, dtype=torch.uint8, pin_memory=pinned)
            cu_seqlens, offsets, indices, packed, filled, outside = self._parts(staging)
            held = len(edges)
            cu_seqlens[:held] = edges
            cu_seqlens[held:] = edges[-1]
            lengths = cu_seqlens.diff()
            tables = chunk_tables(cu_seqlens, self.max_tokens)
            offsets.copy_(tables.offsets)
            indices.view(-1, 2).copy_(tables.indices)
            places = lengths.nonzero()[:, 0]
            filled[: len(places)] = places
            packed[1 : 1 + len(places)] = cu_seqlens[1:][places]
            outside[int(edges[-1]) :] = True
            self._buffer.copy_(staging, non_blocking=True)
            self.cu_seqlens_cpu = cu_seqlens.clone()
            self._exact = ChunkTables(self.full.indices[: int(offsets[-1])], self.full.offsets)
            some_empty = len(places) < self.max_sequences
            self.sequences = Sequences(
                tuple(self.cu_seqlens_cpu.tolist()),
                self._filled[: len(places)] if some_empty else None,
                self._packed[: 1 + len(places)],
            )
        self.form = (self.max_tokens, some_empty)


def plan_of(cu_seqlens: Tensor) -> Plan | None:
    """The plan whose own tensor this is, for adapters: they get a plan's call as its ``cu_seqlens``."""
    found = holder_of(cu_seqlens)
    return found if isinstance(found, Plan) else None


def plan(
    cu_seqlens_cpu: Tensor | Sequence[int],
    *,
    max_tokens: int | None = None,
    max_sequences: int | None = None,
    device: torch.device | str | int | None = None,
) -> Plan:
    """A packed batch's metadata for all layers of a model, computed on the host: no call with it waits for a device.

    ``chunk_gated_delta_rule(q, …, plan=plan)`` stands in the place of ``cu_seqlens``. Its T is ``max_tokens`` and its
    states are ``[max_sequences, …]``: tokens behind the last edge give zeros, and the states of sequences that the
    batch does not have pass through. :meth:`Plan.update` puts another batch in its place.

    Args:
        cu_seqlens_cpu: ``[N+1]``, where each sequence starts and where the last one ends: an int32 or int64 tensor on
            the CPU, or whole numbers.
        max_tokens: T of the calls; the last edge when None.
        max_sequences: the most sequences that an update may bring; N when None.
        device: where the tensors of the calls are; the current accelerator, or the CPU, when None.

    Raises:
        CallError: edges that are none or go beyond the maxima, or another argument that is not as above.
    """
    edges = _read(cu_seqlens_cpu)
    return Plan(
        edges,
        _most("max_tokens", max_tokens, int(edges[-1])),
        _most("max_sequences", max_sequences, len(edges) - 1),
        _place(device),
    )


def _read(given: object) -> Tensor:
    """The edges as an int64 tensor on the CPU."""
    if isinstance(given, Tensor):
        if given.device.type != "cpu" or given.dtype not in _WHOLE or given.dim() != 1 or not given.numel():
            raise CallError(
                f"cu_seqlens_cpu is {given.dtype} {list(given.shape)} on {given.device}; accepted: int32 or int64, "
                "[N+1], on the CPU"
            )
        values = given.tolist()
    elif isinstance(given, list | tuple) and given and all(type(each) is int for each in given):
        values = list(given)
    else:
        raise CallError(f"cu_seqlens_cpu is {given!r:.80}; accepted: a tensor on the CPU or whole numbers, [N+1]")
    return torch.tensor(check_edges("cu_seqlens_cpu", values), dtype=torch.int64)


def _most(name: str, given: object, least: int) -> int:
    """A maximum; when it is not said, what the first batch needs."""
    if given is None:
        return least
    if type(given) is not int or given < 0:
        raise CallError(f"{name} is {given!r:.80}; accepted: a whole number, {least} or more")
    return given


def _place(device: torch.device | str | int | None) -> torch.device:
    """The device with its number, as tensors tell theirs."""
    try:
        if device is None:
            found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
            device = "cpu" if found is None else found.type
        place = torch.empty(0, device=device).device
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        raise CallError(f"device is {device!r:.80}: {last_line(str(error))}; accepted: one of torch's") from None
    return place
