"""The loop over chunks, or over single tokens: what the state before each does, in few and large operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .layout import Layout, OrderedLayout, SingleLayout


class Prepared(Protocol):
    """What a block's chunks need of their own tokens alone: a named tuple of ``[M, …]``, M = chunks × value heads."""

    def step(self, state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Outputs ``[M, C, V]``, and the states after the chunks from ``[M, K, V]``, the states before them."""


#: Gets the inputs of a block, and whether to bring q and k to unit length.
Prepare = Callable[[Sequence[Tensor], bool], Prepared]


class Rule(NamedTuple):
    """How a call is computed: what is prepared, whether with q and k of unit length, and the factor of the output."""

    prepare: Prepare
    unit_length: bool
    scale: float

    def scan(self, inputs: tuple[Tensor, ...], state: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
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
        heads = state.shape[1]
        if isinstance(layout, SingleLayout):
            prepared = self.prepare(layout.rows(inputs, state.dtype), self.unit_length)
            o, final = prepared.step(state.flatten(0, 1), self.scale)
            return layout.join(_tokens_first(o, heads).to(inputs[2].dtype)), final.view(state.shape)
        start = running = (state if layout.order is None else state.index_select(0, layout.order)).flatten(0, 1)
        outputs = layout.outputs(inputs[2])
        finished: list[Tensor] = []
        for block in layout.blocks(inputs, state.dtype):
            sizes = [step * heads for step in block.steps]
            for size, prepared in zip(sizes, _split(self.prepare(block.inputs, self.unit_length), sizes), strict=True):
                if size < running.shape[0]:
                    finished.append(running[size:])
                    running = running[:size]
                o, running = prepared.step(running, self.scale)
                outputs.add(_tokens_first(o, heads))
        if finished or running is start:  # without a step, the states would be the caller's own
            running = torch.cat([running, *reversed(finished)])
        final = running.view(state.shape)
        if layout.order is not None:
            final = final.index_select(0, layout.order.argsort())
        return layout.join(outputs, inputs[2]), final

    def _scan_ordered(self, inputs: tuple[Tensor, ...], state: Tensor, layout: OrderedLayout) -> tuple[Tensor, Tensor]:
        """:meth:`scan` one row after the other, in launches that depend on shapes alone."""
        heads = state.shape[1]
        outputs = layout.outputs(inputs[2])
        prepared = self.prepare(layout.rows(inputs, state.dtype), self.unit_length)
        starts = torch.cat([state, state.new_zeros(1, *state.shape[1:])])  # the last is unused rows'
        finals = starts.clone()
        running = starts[-1]
        sequences = layout.sequence[:, None].unbind()
        chunks = _split(prepared, [heads] * len(sequences))
        for row, (sequence, chunk) in enumerate(zip(sequences, chunks, strict=True)):
            running = torch.where(layout.first[row], starts.index_select(0, sequence)[0], running)
            o, running = chunk.step(running, self.scale)
            finals.index_copy_(0, sequence, running[None])
            outputs.add(_tokens_first(o, heads))
        return layout.join(outputs, inputs[2]), finals[:-1]


def _split(prepared: Any, sizes: list[int]) -> Iterator[Prepared]:
    """The rows of each step, of a :class:`Prepared`."""
    if len(sizes) == 1:
        return iter([prepared])
    return map(prepared._make, zip(*(torch.split(x, sizes) for x in prepared), strict=True))


def _tokens_first(o: Tensor, heads: int) -> Tensor:
    """``[M, C, V]`` to ``[R, C, HV, V]``."""
    return o.view(len(o) // max(1, heads), heads, *o.shape[1:]).transpose(1, 2)
