"""Tensors of GDN calls, from a seed: the same on every device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

#: The arguments of one call, by name.
Arguments = dict[str, Any]

#: The arguments that can have a gradient.
DIFFERENTIABLE = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")


def gdn_call(
    B: int = 2,
    T: int = 300,
    H: int = 2,
    HV: int = 4,
    K: int = 32,
    V: int = 48,
    *,
    dtype: torch.dtype = torch.float32,
    edges: Sequence[int] | None = None,
    state: bool = True,
    normalised: bool = False,
    device: str = "cpu",
    seed: int = 0,
    zero_gates: bool = False,
) -> Arguments:
    """Arguments of one call that asks for the final state.

    Args:
        edges: the sequences are packed, with these as ``cu_seqlens`` (then B is 1).
        state: whether there is an initial state.
        normalised: the caller has scaled q and k to unit length; else the kernel is asked to.
        zero_gates: a quarter of the value heads never forgets.
    """
    generator = torch.Generator().manual_seed(seed)
    B = B if edges is None else 1
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    sequences = B if edges is None else len(edges) - 1

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k, v = random(B, T, H, K), random(B, T, H, K), random(B, T, HV, V)
    g = logsigmoid(random(B, T, HV))
    if zero_gates:
        g[..., : max(HV // 4, 1)] = 0
    call: Arguments = {
        "q": (normalize(q, dim=-1) if normalised else q).to(device, dtype),
        "k": (normalize(k, dim=-1) if normalised else k).to(device, dtype),
        "v": v.to(device, dtype),
        "g": g.to(device, wide),
        "beta": random(B, T, HV).sigmoid().to(device, wide),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": not normalised,
    }
    if state:
        call["initial_state"] = (0.3 * random(sequences, HV, K, V)).to(device, wide)
    if edges is not None:
        call["cu_seqlens"] = torch.tensor(edges, dtype=torch.int64, device=device)
    return call


def pool_call(
    lengths: Sequence[int],
    slots: Sequence[int] | Sequence[Sequence[int]],
    *,
    accepted: Sequence[int] | None = None,
    pool: int = 8,
    packed: bool = True,
    pool_dtype: torch.dtype = torch.float32,
    behind: int = 0,
    seed: int = 0,
    **options: Any,
) -> Arguments:
    """Arguments of a decode call on a pool of states.

    Args:
        lengths: the tokens of each sequence: all alike where they are not ``packed``.
        slots: ``state_indices``, ``[N]`` or ``[N, S]``.
        accepted: ``num_accepted_tokens``.
        pool: how many slots there are.
        behind: tokens behind the last sequence of a packed call.
        options: more of :func:`gdn_call`.
    """
    if packed:
        edges = [sum(lengths[:place]) for place in range(len(lengths) + 1)]
        call = gdn_call(T=edges[-1] + behind, edges=edges, seed=seed, **options)
    else:
        call = gdn_call(B=len(lengths), T=lengths[0], seed=seed, **options)
    device, (HV, V), K = call["q"].device, call["v"].shape[2:], call["q"].shape[-1]
    generator = torch.Generator().manual_seed(seed + 1)
    states = 0.3 * torch.randn(pool, HV, K, V, generator=generator, dtype=torch.float64)
    indices = torch.tensor(slots, dtype=torch.int64, device=device)
    call |= {"initial_state": states.to(device, pool_dtype), "state_indices": indices, "output_final_state": False}
    if accepted is not None:
        call["num_accepted_tokens"] = torch.tensor(accepted, dtype=torch.int64, device=device)
    return call


def leaves(call: Arguments, names: Sequence[str] = DIFFERENTIABLE) -> dict[str, Tensor]:
    """The call's differentiable tensors of these names, made to require gradients in place."""
    return {name: call[name].requires_grad_() for name in names if isinstance(call.get(name), Tensor)}
