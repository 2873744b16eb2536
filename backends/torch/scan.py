"""The loop over chunks, or over single tokens: what the state before each does, in few and large operations."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from kernelreg.ops.gdn_arguments import to_unit_length

from .layout import EqualLayout, OrderedLayout, PackedLayout


class Prepared(NamedTuple):
    """What chunks need of their own tokens alone. M is chunks × value heads.

    Attributes:
        values: ``[M, C, V]``, the corrections if the state before a chunk were zero.
        reads: ``[M, 2C, K]``: times the state, what that takes from the corrections, then what the queries read.
        keys: ``[M, C, K]``, decayed to the chunk's end.
        decay: ``[M, 1, 1]``, of the state over the chunk.
        attention: ``[M, C, C]``, what the queries read of the corrections.
    """

    values: Tensor
    reads: Tensor
    keys: Tensor
    decay: Tensor
    attention: Tensor

    def step(self, rows: slice, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the queries of some rows read of their states, the corrections, and the states after them."""
        taken, read = torch.bmm(self.reads[rows], state).chunk(2, 1)
        corrections = self.values[rows] - taken
        return read, corrections, (self.decay[rows] * state).baddbmm_(self.keys[rows].mT, corrections)

    def outputs(self, read: list[Tensor], corrections: list[Tensor], scale: float) -> Tensor:
        """``[M, C, V]``, from what the steps gave."""
        return torch.cat(read).baddbmm_(self.attention, torch.cat(corrections), beta=scale, alpha=scale)


#: q and k ``[R, H, C, K]``, v ``[R, HV, C, V]``, g and beta ``[R, HV, C]``, of R chunks.
Prepare = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Prepared]


class Rule(NamedTuple):
    """How a call is computed: what is prepared, q's factor, and whether q and k are brought to unit length."""

    prepare: Prepare
    scale: float
    unit_length: bool

    def prepared(self, inputs: Iterable[Tensor], dtype: torch.dtype) -> Prepared:
        """From ``[…, …, C, heads, …]`` each of q, k, v, g and beta."""
        q, k, *others = (_heads_first(x, dtype) for x in inputs)
        if self.unit_length:
            q, k = to_unit_length(q), to_unit_length(k)
        return self.prepare(q, k, *others)

    def scan(
        self, inputs: tuple[Tensor, ...], state: Tensor, layout: EqualLayout | PackedLayout | OrderedLayout
    ) -> tuple[Tensor, Tensor]:
        """Outputs and final states.

        Args:
            inputs: q and k ``[B, T, H, K]``, v ``[B, T, HV, V]``, g and beta ``[B, T, HV]``.
            state: ``[N, HV, K, V]``, of the dtype to compute in.
            layout: the batch's chunks.

        Returns:
            ``[B, T, HV, V]`` of v's dtype, zero where no sequence covers a token, and ``[N, HV, K, V]``.
        """
        if isinstance(layout, OrderedLayout):
            return self._scan_ordered(inputs, state, layout)
        v = inputs[2]
        heads = state.shape[1]
        running = (state if layout.order is None else state.index_select(0, layout.order)).flatten(0, 1)
        finished: list[Tensor] = []
        outputs: list[Tensor] = []
        for block in layout.blocks(*inputs):
            prepared = self.prepared(block.inputs, state.dtype)
            read, corrections = [], []
            row = 0
            for size in block.steps:
                rows = slice(row, row := row + size * heads)
                if size * heads < len(running):
                    finished.append(running[size * heads :])
                    running = running[: size * heads]
                each_read, each_correction, running = prepared.step(rows, running)
                read.append(each_read)
                corrections.append(each_correction)
            outputs.append(_tokens_first(prepared.outputs(read, corrections, self.scale), v))
        if finished or not outputs:  # without a step, the states would be the caller's own
            running = torch.cat([running, *reversed(finished)])
        final = running.view(state.shape)
        if layout.order is not None:
            final = final.index_select(0, layout.order.argsort())
        return layout.join(outputs, v), final

    def _scan_ordered(self, inputs: tuple[Tensor, ...], state: Tensor, layout: OrderedLayout) -> tuple[Tensor, Tensor]:
        """:meth:`scan` one row after the other, in launches that depend on shapes alone."""
        v = inputs[2]
        heads = state.shape[1]
        prepared = self.prepared(layout.gather(*inputs), state.dtype)
        starts = torch.cat([state, state.new_zeros(1, *state.shape[1:])])  # the last is unused rows'
        finals = starts.clone()
        running = starts[-1]
        read, corrections = [], []
        for row, sequence in enumerate(layout.sequence.split(1)):
            running = torch.where(layout.first[row], starts.index_select(0, sequence)[0], running)
            each_read, each_correction, running = prepared.step(slice(row * heads, (row + 1) * heads), running)
            finals.index_copy_(0, sequence, running[None])
            read.append(each_read)
            corrections.append(each_correction)
        outputs = [_tokens_first(prepared.outputs(read, corrections, self.scale), v)] if read else []
        return layout.join(outputs, v), finals[:-1]


def _heads_first(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``[…, …, C, heads, …]`` to ``[R, heads, C, …]`` of the dtype, in one copy."""
    x = x.transpose(2, 3)
    x = x.contiguous() if x.dtype == dtype else x.to(dtype, memory_format=torch.contiguous_format)
    return x.flatten(0, 1)


def _tokens_first(o: Tensor, v: Tensor) -> Tensor:
    """``[M, C, V]`` to ``[R, C, HV, V]`` of v's dtype."""
    return o.unflatten(0, (-1, v.shape[2])).transpose(1, 2).to(v.dtype)
