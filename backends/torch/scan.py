"""The loop over chunks, or over single tokens: what the state before each does, in few and large operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .layout import EqualLayout, OrderedLayout, PackedLayout


class Prepared(Protocol):
    """What a block's chunks need of their own tokens alone. M is chunks × value heads."""

    def step(self, rows: slice, state: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Some rows' part of the outputs, and the states after them, from ``[rows, K, V]``, the states before."""

    def outputs(self, parts: Sequence[tuple[Tensor, ...]], scale: float) -> Tensor:
        """``[M, C, V]``, from the parts of all steps."""


#: Gets the inputs of a block, and whether to bring q and k to unit length.
Prepare = Callable[[Sequence[Tensor], bool], Prepared]


class Rule(NamedTuple):
    """How a call is computed: what is prepared, whether with q and k of unit length, and the factor of the output."""

    prepare: Prepare
    unit_length: bool
    scale: float

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
        start = running = (state if layout.order is None else state.index_select(0, layout.order)).flatten(0, 1)
        finished: list[Tensor] = []

        def outputs() -> Iterator[Tensor]:
            nonlocal running
            for block in layout.blocks(inputs, state.dtype):
                prepared = self.prepare(block.inputs, self.unit_length)
                parts = []
                row = 0
                for size in block.steps:
                    rows = slice(row, row := row + size * heads)
                    if size * heads < running.shape[0]:
                        finished.append(running[size * heads :])
                        running = running[: size * heads]
                    part, running = prepared.step(rows, running)
                    parts.append(part)
                yield _tokens_first(prepared.outputs(parts, self.scale), v)

        o = layout.join(outputs(), v)
        if finished or running is start:  # without a step, the states would be the caller's own
            running = torch.cat([running, *reversed(finished)])
        final = running.view(state.shape)
        if layout.order is not None:
            final = final.index_select(0, layout.order.argsort())
        return o, final

    def _scan_ordered(self, inputs: tuple[Tensor, ...], state: Tensor, layout: OrderedLayout) -> tuple[Tensor, Tensor]:
        """:meth:`scan` one row after the other, in launches that depend on shapes alone."""
        v = inputs[2]
        heads = state.shape[1]
        prepared = self.prepare(layout.rows(inputs, state.dtype), self.unit_length)
        starts = torch.cat([state, state.new_zeros(1, *state.shape[1:])])  # the last is unused rows'
        finals = starts.clone()
        running = starts[-1]
        parts = []
        for row, sequence in enumerate(torch.split(layout.sequence, 1)):
            running = torch.where(layout.first[row], starts.index_select(0, sequence)[0], running)
            part, running = prepared.step(slice(row * heads, (row + 1) * heads), running)
            finals.index_copy_(0, sequence, running[None])
            parts.append(part)
        outputs = (_tokens_first(prepared.outputs(each, self.scale), v) for each in [parts] if each)
        return layout.join(outputs, v), finals[:-1]


def _tokens_first(o: Tensor, v: Tensor) -> Tensor:
    """``[M, C, V]`` to ``[R, C, HV, V]`` of v's dtype."""
    M, C, V = o.shape
    HV = v.shape[2]
    return o.view(M // max(1, HV), HV, C, V).transpose(1, 2).to(v.dtype)
