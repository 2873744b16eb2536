"""FLA's chunk kernels without autograd: what it does around them is done here once, or not at all.

No contiguity pass, dispatch and device switch for each kernel, no tables that FLA derives itself and remembers by the
identity of a tensor, no copies of the states of a batch with empty sequences: the kernels pass those through.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._direct import Batch, on_its_device, without_tokens
from .library import FORWARD_WORDS, forward, unit_length


def run_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    batch: Batch,
    *,
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    state_v_first: bool,
) -> tuple[Tensor, Tensor | None]:
    """The contract's answer, with activated gates and without gradients."""
    assert forward is not None
    if batch.nothing(v):
        return without_tokens(v, q.shape[-1], batch, initial_state, state_v_first, output_final_state)
    said: dict[str, Any] = {}
    for word in ("state_v_first", "transpose_state_layout"):
        if word in FORWARD_WORDS:
            said[word] = state_v_first
            break
    if batch.tables is not None:
        said |= {"cu_seqlens": batch.edges, "chunk_indices": batch.tables.indices}
        batch.edges.chunk_offsets = batch.tables.offsets  # type: ignore[union-attr]
    with on_its_device(q):
        q, k = q.contiguous(), k.contiguous()
        if use_qk_l2norm_in_kernel:
            q, k = unit_length(q)[0], unit_length(k)[0]
        _, o, _, final, *_ = forward(
            q=q,
            k=k,
            v=v.contiguous(),
            g=g.contiguous(),
            beta=beta.contiguous(),
            scale=scale,
            initial_state=None if initial_state is None else initial_state.contiguous(),
            output_final_state=output_final_state,
            **said,
        )
        return batch.zeros_behind(o), final
