"""FlashInfer under the GDN contract, from 0.6.0 on. What is bridged, and at what cost: ``[bridges]`` in backend.toml.

Decode has two ways: FlashInfer's decode kernel, which activates raw bfloat16 gates itself and updates a float32
``[V, K]`` pool in place, one token a sequence; and for every other call the prefill kernel.

One call at a time on a device: FlashInfer keeps its scratch memory per device, so calls that run side by side on two
streams of one device would share it (0.7.4, gdn_kernels/delta_rule_dsl/delta_rule_sm90.py).
"""

from __future__ import annotations

from typing import Any

import torch
from flashinfer.gdn_prefill import chunk_gated_delta_rule as _public_prefill
from torch import Tensor

from kernelreg.ops.gdn_arguments import activate_gates, to_unit_length

from .._keywords import keywords_of
from .._packed import run_clean
from .._pool import on_pool
from .decode import decode_in_place, decodes_in_place

#: Context parallelism keeps one workspace a device, which graphs and streams would share; cuDNN is another library.
_FIXED = {"use_cp": False, "backend": "flashinfer"}
_CHOSEN = {name: value for name, value in _FIXED.items() if name in keywords_of(_public_prefill)}


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = False,
    cu_seqlens_cpu: Tensor | None = None,
    **raw_gates: Any,
) -> tuple[Tensor, Tensor | None]:
    """``gdn.chunk``: see :func:`kernelreg.gdn.chunk_gated_delta_rule`."""
    factor = q.shape[-1] ** -0.5 if scale is None else scale

    def run(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, edges: Tensor | None, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        g, beta = activate_gates(g, beta, **raw_gates)
        if use_qk_l2norm_in_kernel:
            q, k = (to_unit_length(x.float()).to(x.dtype) for x in (q, k))
        B, T, HV, V = v.shape
        if edges is None:
            edges = torch.arange(0, B * T + 1, T, device=q.device)
        if state is not None:
            state = _turned(state, state_v_first).float().contiguous()
        given = _prefill(
            q=_packed(q),
            k=_packed(k),
            v=_packed(v),
            g=_packed(g.float().exp()),
            beta=_packed(beta.float()),
            scale=factor or 1.0,
            initial_state=state,
            output_final_state=output_final_state,
            cu_seqlens=edges,
        )
        o, final = given if output_final_state else (given, None)
        o = o.view(B, T, HV, V)
        return (o if factor else torch.zeros_like(o)), None if final is None else _turned(final, state_v_first)

    return run_clean(
        run,
        q,
        k,
        v,
        g,
        beta,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_v_first=state_v_first,
    )


def fused_recurrent_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """``gdn.recurrent``: see :func:`kernelreg.gdn.fused_recurrent_gated_delta_rule`."""
    if decodes_in_place(q, g, beta, options):
        return decode_in_place(q, k, v, g, beta, options)
    if "state_indices" in options:
        return on_pool(chunk_gated_delta_rule, q, k, v, g, beta, mixes_rows=True, **options)
    return chunk_gated_delta_rule(q, k, v, g, beta, **options)


def _prefill(**arguments: Any) -> Any:
    """The library's call, on the stream of the tensors' device: 0.6 takes the current device's."""
    with torch.cuda.device(arguments["q"].device):
        return _public_prefill(**arguments, **_CHOSEN)


def _packed(x: Tensor) -> Tensor:
    """``[B, T, …]`` as ``[B × T, …]``, contiguous."""
    return x.flatten(0, 1).contiguous()


def _turned(state: Tensor, v_first: bool) -> Tensor:
    """Between the caller's layout and FlashInfer's ``[V, K]``."""
    return state if v_first else state.mT.contiguous()
