"""flash-linear-attention under the GDN contract, from 0.3.2 on. What is bridged, and at what cost: ``[bridges]`` in
backend.toml.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from kernelreg.errors import KernelregError
from kernelreg.ops.gdn_arguments import activate_gates

from .._direct import batch_of, captured, no_gradient
from .._packed import run_clean
from .._pool import on_pool
from .forward import run_forward
from .library import CHUNK_WORDS, RECURRENT_WORDS, chunk, chunk_with_tilelang, forward, recurrent


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """``gdn.chunk``: see :func:`kernelreg.gdn.chunk_gated_delta_rule`."""
    cu_seqlens = options.get("cu_seqlens")
    tensors = (q, k, v, g, beta, options.get("initial_state"), options.get("A_log"), options.get("dt_bias"))
    if forward is not None and no_gradient(*tensors):
        return _below_autograd(q, k, v, g, beta, **options)
    if cu_seqlens is not None and captured(q):
        raise KernelregError(
            "fla's own entry point reads cu_seqlens on the host, which a CUDA graph cannot record; accepted: without "
            "gradients, and a release whose chunk_gated_delta_rule_fwd takes chunk_indices (0.5.0 to 0.6.0 do)"
        )
    return _run(chunk, CHUNK_WORDS, q, k, v, g, beta, **options)


def _below_autograd(
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
    if raw_gates:
        g, beta = activate_gates(g, beta, **raw_gates)
    return run_forward(
        q,
        k,
        v,
        g,
        beta,
        batch_of(q, cu_seqlens, cu_seqlens_cpu),
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        state_v_first=state_v_first,
    )


def chunk_gated_delta_rule_tilelang(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """``gdn.chunk`` with FLA's TileLang kernel in the backward."""
    return _run(chunk_with_tilelang(), CHUNK_WORDS, q, k, v, g, beta, **options)


def fused_recurrent_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """``gdn.recurrent``: see :func:`kernelreg.gdn.fused_recurrent_gated_delta_rule`."""
    if "state_indices" in options:
        return on_pool(fused_recurrent_gated_delta_rule, q, k, v, g, beta, **options)
    return _run(recurrent, RECURRENT_WORDS, q, k, v, g, beta, **options)


def _run(
    function: Callable[..., Any],
    words: frozenset[str],
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
    said: dict[str, Any] = {
        "scale": q.shape[-1] ** -0.5 if scale is None else scale,
        "output_final_state": output_final_state,
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
    }
    layout = next((word for word in ("state_v_first", "transpose_state_layout") if word in words), None)
    turned = state_v_first and layout is None
    if layout is not None:
        said[layout] = state_v_first

    def run(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, edges: Tensor | None, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        g, beta = activate_gates(g, beta, **raw_gates)
        if turned and state is not None:
            state = state.mT.contiguous()
        o, final = function(q=q, k=k, v=v, g=g, beta=beta, initial_state=state, cu_seqlens=edges, **said)
        return o, final.mT.contiguous() if turned and final is not None else final

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
