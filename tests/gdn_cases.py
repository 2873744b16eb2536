"""GDN calls for tests: inputs from a seed, and what the float64 recurrence gives for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from kernelreg.ops.gdn_reference import reference_gated_delta_rule

# The tensors are small: several threads only wait for each other, for minutes where the machine is busy.
torch.set_num_threads(1)

Call = dict[str, Any]

#: Bounds on ‖out − ref‖ / ‖ref‖ by dtype. Half precision: a few roundings of 2^-9 (bfloat16) and 2^-11 (float16)
#: through the chunk's matrix products. float32: what plain PyTorch must keep, and 10 times
#: what TF32 products give for kernels that use them. float64: the same with its epsilon.
BOUNDS = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5, torch.float64: 1e-10}


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
) -> Call:
    """Arguments of one call. With ``edges`` the sequences are packed (then B is 1).

    Keys are of unit length, by the caller or, with ``normalised`` False, by the kernel.
    """
    generator = torch.Generator().manual_seed(seed)
    B = B if edges is None else 1
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    sequences = B if edges is None else len(edges) - 1

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k, v = random(B, T, H, K), random(B, T, H, K), random(B, T, HV, V)
    g = logsigmoid(random(B, T, HV))
    if zero_gates:  # a quarter of the heads never forgets
        g[..., : max(HV // 4, 1)] = 0
    call: Call = {
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
    **options: Any,
) -> Call:
    """A decode call on a pool. ``lengths`` are the sequences' tokens: all alike where they are not ``packed``."""
    if packed:
        edges = [0]
        for length in lengths:
            edges.append(edges[-1] + length)
        call = gdn_call(T=edges[-1] + options.pop("behind", 0), edges=edges, **options)
    else:
        call = gdn_call(B=len(lengths), T=lengths[0], **options)
    device, (HV, V), K = call["q"].device, call["v"].shape[2:], call["q"].shape[-1]
    generator = torch.Generator().manual_seed(options.get("seed", 0) + 1)
    states = 0.3 * torch.randn(pool, HV, K, V, generator=generator, dtype=torch.float64)
    call |= {
        "initial_state": states.to(device, pool_dtype),
        "state_indices": torch.tensor(slots, dtype=torch.int64, device=device),
    }
    call["state_indices"] = call["state_indices"].view(len(lengths), *call["state_indices"].shape[1:])
    if accepted is not None:
        call["num_accepted_tokens"] = torch.tensor(accepted, dtype=torch.int64, device=device)
    return call | {"output_final_state": False}


def expected(call: Call) -> tuple[Tensor, Tensor]:
    """Output and final state of the float64 recurrence."""
    return reference_gated_delta_rule(**{name: value for name, value in call.items() if name != "output_final_state"})


def relative(actual: Tensor, reference: Tensor) -> float:
    """‖actual − reference‖ / ‖reference‖; 0 where both are empty, NaN where ``actual`` has one."""
    difference = (actual.detach().double() - reference.detach().double()).norm()
    return float(difference / reference.detach().double().norm().clamp_min(1e-300))


def leaves(call: Call) -> dict[str, Tensor]:
    """The call's differentiable tensors, made to require gradients in place."""
    names = ("q", "k", "v", "g", "beta", "initial_state")
    return {name: call[name].requires_grad_() for name in names if name in call}
