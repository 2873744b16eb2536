"""The arguments of a GDN call: what the contract asks of every one of them, and gates still to be activated."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

from kernelreg.errors import CallError

_REQUIRED = ("q", "k", "v", "g", "beta")
_WHOLE = (torch.int32, torch.int64)


def check_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    state_v_first: bool,
    state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
) -> None:
    """Refuse what no backend could mean, before any kernel reads beyond a tensor.

    Raises:
        CallError: names the argument, what it is and what the contract says.
    """
    named = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": initial_state, "cu_seqlens": cu_seqlens}
    named |= {"state_indices": state_indices, "num_accepted_tokens": num_accepted_tokens}
    for name, value in named.items():
        if value is not None or name in _REQUIRED:
            _require_tensor(name, value)
    if q.dim() != 4:
        raise _shape("q", q, "[B, T, H, K]")
    if k.shape != q.shape:
        raise _shape("k", k, f"q's {list(q.shape)}")
    B, T, H, K = q.shape
    if v.dim() != 4 or v.shape[:2] != (B, T):
        raise _shape("v", v, f"[{B}, {T}, HV, V]")
    HV, V = v.shape[2:]
    if HV % H if H else HV:
        raise _shape("v", v, f"HV (here {HV}) a multiple of H ({H})")
    for name, gate in (("g", g), ("beta", beta)):
        if gate.shape != (B, T, HV):
            raise _shape(name, gate, f"[{B}, {T}, {HV}]")
    sequences = B
    if cu_seqlens is not None:
        if cu_seqlens.dim() != 1 or not cu_seqlens.numel() or cu_seqlens.dtype not in _WHOLE:
            raise CallError(
                f"cu_seqlens is {cu_seqlens.dtype} {list(cu_seqlens.shape)}; accepted: int32 or int64, [N+1]"
            )
        if B != 1:
            raise _shape("q", q, "[1, T, H, K] with cu_seqlens: the sequences are packed in one row")
        sequences = cu_seqlens.shape[0] - 1
    if not q.dtype == k.dtype == v.dtype:
        raise CallError(f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; accepted: one dtype for the three")
    for name, tensor in named.items():
        if tensor is not None and tensor.device != q.device:
            raise CallError(f"{name} is on {tensor.device}; accepted: q's device, {q.device}")
    state = (HV, V, K) if state_v_first else (HV, K, V)
    if state_indices is not None:
        length = T if cu_seqlens is None else 0
        _check_pool(initial_state, state_indices, num_accepted_tokens, sequences, state, length)
    elif num_accepted_tokens is not None:
        raise CallError("num_accepted_tokens without state_indices, whose slots it counts")
    elif initial_state is not None and initial_state.shape != (sequences, *state):
        order = "[N, HV, V, K]" if state_v_first else "[N, HV, K, V]"
        raise _shape("initial_state", initial_state, f"{order} = {[sequences, *state]}")


def _check_pool(
    pool: Tensor | None,
    slots: Tensor,
    accepted: Tensor | None,
    sequences: int,
    state: tuple[int, ...],
    length: int,
) -> None:
    """The rules of a state pool. What lies on the CPU is looked up too; a device is not waited for."""
    if pool is None:
        raise CallError("state_indices without initial_state, the pool that they point into")
    if pool.dim() != 4 or pool.shape[1:] != state:
        raise _shape("initial_state", pool, f"with state_indices a pool [P, {', '.join(map(str, state))}]")
    if slots.dtype not in _WHOLE or slots.dim() not in (1, 2) or slots.shape[0] != sequences:
        form = f"int32 or int64, [N] or [N, S] with N = {sequences}"
        raise CallError(f"state_indices is {slots.dtype} {list(slots.shape)}; accepted: {form}")
    if slots.dim() == 2 and slots.shape[1] < max(length, 1):
        raise _shape(
            "state_indices", slots, f"[{sequences}, S], a slot for each of a sequence's {max(length, 1)} tokens"
        )
    if accepted is not None and (slots.dim() != 2 or accepted.dtype not in _WHOLE or accepted.shape != (sequences,)):
        form = f"int32 or int64 [{sequences}], with state_indices [{sequences}, S]"
        raise CallError(f"num_accepted_tokens is {accepted.dtype} {list(accepted.shape)}; accepted: {form}")
    if slots.device.type != "cpu":
        return
    strange = slots[(slots < -1) | (slots >= len(pool))]
    if strange.numel():
        raise CallError(f"state_indices has {int(strange[0])}; accepted: -1 for none, and 0 to {len(pool) - 1}")
    used = slots[slots >= 0].tolist()
    if len(set(used)) < len(used):
        raise CallError("state_indices has a slot twice; accepted: one writer for each slot")
    if accepted is not None and len(accepted) and not 1 <= int(accepted.min()) <= int(accepted.max()) <= slots.shape[1]:
        raise CallError(f"num_accepted_tokens is {accepted.tolist()}; accepted: 1 to {slots.shape[1]}")


def activate_gates(
    g: Tensor,
    beta: Tensor,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
) -> tuple[Tensor, Tensor]:
    """The contract's g and beta from raw ones, in float32 (float64 for float64) and with their gradients.

    Args:
        g: ``[…, HV]``; with ``use_gate_in_kernel`` the raw input of ``-exp(A_log)·softplus(g + dt_bias)``.
        beta: ``[…, HV]``; with ``use_beta_sigmoid_in_kernel`` the raw input of the sigmoid.
        A_log, dt_bias: ``[HV]``.
        allow_neg_eigval: beta is twice the sigmoid.

    Raises:
        CallError: a flag without what it needs.
    """
    if use_gate_in_kernel:
        if A_log is None:
            raise CallError("use_gate_in_kernel=True without A_log; accepted: A_log [HV], and dt_bias [HV] or None")
        wide = torch.float64 if g.dtype == torch.float64 else torch.float32
        raw = g.to(wide) if dt_bias is None else g.to(wide) + dt_bias.to(wide)
        g = -A_log.to(wide).exp() * softplus(raw)
    elif A_log is not None or dt_bias is not None:
        raise CallError("A_log or dt_bias without use_gate_in_kernel=True, which alone gives them a meaning")
    if use_beta_sigmoid_in_kernel:
        beta = beta.to(torch.float64 if beta.dtype == torch.float64 else torch.float32).sigmoid()
        beta = 2 * beta if allow_neg_eigval else beta
    elif allow_neg_eigval:
        raise CallError("allow_neg_eigval=True without use_beta_sigmoid_in_kernel=True; double beta yourself")
    return g, beta


def to_unit_length(x: Tensor) -> Tensor:
    """Unit length over the last dimension, in x's dtype, with the epsilon that FLA and FlashQLA use inside the root."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def _require_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise CallError(f"{name} is a {type(value).__name__}; accepted: a tensor")


def _shape(name: str, tensor: Tensor, wanted: str) -> CallError:
    return CallError(f"{name} is {list(tensor.shape)}; accepted: {wanted}")
