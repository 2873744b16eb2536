"""FlashQLA under the GDN contract, from 0.1.1 on. What is bridged, and at what cost: ``[bridges]`` in backend.toml."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import flash_qla
import torch
from torch import Tensor

from kernelreg.errors import KernelregError
from kernelreg.ops.gdn_arguments import activate_gates
from kernelreg.ops.gdn_plan import plan_of

from .._direct import batch_of, captured, no_gradient
from .._packed import run_clean
from .forward import MAKERS, run_forward

#: Tokens up to which FlashQLA's context parallelism, which cuts a long sequence in parts, is left out. It costs three
#: kernels more and the host's knowledge of the edges; on an H200 it gains nothing yet at 8,192 tokens, and 29% at
#: 32,768 (1.32 against 1.86 ms).
WITHOUT_PARTS = 8192


@lru_cache(maxsize=64)
def _capability(device: torch.device) -> tuple[int, int]:
    """The device's capability, after a check that FlashQLA compiles for it.

    Raises:
        KernelregError: FlashQLA chose its kernels at import, for device 0, and this device is of another kind.
    """
    capability = torch.cuda.get_device_capability(device)
    chosen_for = torch.cuda.get_device_capability(0)
    if capability != chosen_for:
        raise KernelregError(
            f"flash_qla compiles for one architecture a process, that of cuda:0 {chosen_for}, and {device} is "
            f"{capability}; show only that card (CUDA_VISIBLE_DEVICES={device.index}), or KERNELREG_DISABLE=flash_qla"
        )
    return capability


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
    major, _ = _capability(q.device)
    K, V = q.shape[-1], v.shape[-1]
    factor = K**-0.5 if scale is None else scale
    packed_in_graph = cu_seqlens is not None and captured(q)
    tensors = (q, k, v, g, beta, initial_state, *raw_gates.values())
    if MAKERS is not None and (K, V) == (128, 128) and no_gradient(*tensors):
        batch = batch_of(q, cu_seqlens, cu_seqlens_cpu)
        planned = cu_seqlens is not None and plan_of(cu_seqlens) is not None
        if packed_in_graph or planned or batch.longest <= WITHOUT_PARTS:
            if raw_gates:
                g, beta = activate_gates(g, beta, **raw_gates)
            o, final = run_forward(
                q,
                k,
                v,
                g,
                beta.float(),
                batch,
                scale=factor or 1.0,
                initial_state=initial_state,
                output_final_state=output_final_state,
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
                state_v_first=state_v_first,
            )
            return (o if factor else o.zero_()), final
    if packed_in_graph:
        raise KernelregError(
            "flash_qla's own entry point reads cu_seqlens on the host, which a CUDA graph cannot record; accepted: "
            "without gradients, on SM90, and a release whose kernels are those of 0.1.3"
        )

    def run(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, edges: Tensor | None, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        g, beta = activate_gates(g, beta, **raw_gates)
        o, final = flash_qla.chunk_gated_delta_rule(
            q=q,
            k=k,
            v=v,
            g=g,
            beta=beta.float(),
            scale=factor or 1.0,
            initial_state=state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            cu_seqlens=edges,
            state_v_first=state_v_first,
            # Its context parallelism lacks a fence on SM120 in 0.1.2 (its own comment in 0.1.3 tells of the race).
            auto_cp=major != 12,
        )
        return (o if factor else o * 0), final

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
