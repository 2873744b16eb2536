"""Chunk tables: which chunks the sequences of a packed batch have, as chunkwise kernels read them on the device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

#: Tokens of a chunk: what FLA's (0.3.2 to 0.6.0) and FlashQLA's SM90 kernels (0.1.3) take.
CHUNK = 64


class ChunkTables(NamedTuple):
    """The chunks of :data:`CHUNK` tokens of a packed batch, int64.

    Attributes:
        indices: ``[R, 2]``: each chunk's sequence, and its number within it. A row that the batch does not need names
            a chunk of sequence 0 behind every possible end of it: all its tokens are masked out, and it writes nothing.
        offsets: ``[N+1]``: how many chunks come before each sequence, and how many there are.
    """

    indices: Tensor
    offsets: Tensor


def most_chunks(tokens: int, sequences: int) -> int:
    """The most chunks that so many tokens in so many sequences can have."""
    filled = min(tokens, sequences)
    return filled + (tokens - filled) // CHUNK


def chunk_tables(edges: Tensor, tokens: int | None = None) -> ChunkTables:
    """The tables of a packed batch.

    Args:
        edges: ``[N+1]`` int64.
        tokens: T: then there is a row for every chunk that T tokens of N sequences can have, and no value is read on
            the host. Without it there are as many rows as chunks.
    """
    counts = (edges.diff() + CHUNK - 1) // CHUNK
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    rows = int(offsets[-1]) if tokens is None else most_chunks(tokens, len(counts))
    row = torch.arange(rows, device=edges.device)
    sequence = torch.searchsorted(offsets[1:], row, right=True)
    if tokens is None:
        return ChunkTables(torch.stack([sequence, row - offsets[sequence]], 1), offsets)
    used = sequence < len(counts)
    sequence = torch.where(used, sequence, 0)
    behind = -(-tokens // CHUNK)
    return ChunkTables(torch.stack([sequence, torch.where(used, row - offsets[sequence], behind)], 1), offsets)
