"""The arguments of a GDN call: what the contract asks of every one of them, and gates still to be activated."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from math import inf, isfinite
from numbers import Real
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from kernelreg.call import DTYPES
from kernelreg.errors import CallError
from kernelreg.ops.gdn_plan import Plan
from kernelreg.ops.gdn_sequences import host_edges

_REQUIRED = ("q", "k", "v", "g", "beta")
_OF_RAW_GATES = ("A_log", "dt_bias")
#: The arguments that are real numbers (k and v are of q's dtype); the others are whole ones.
_REAL_ARGUMENTS = frozenset({"q", "g", "beta", "initial_state", *_OF_RAW_GATES})
_REAL_DTYPES = frozenset(getattr(torch, name) for name in DTYPES)
_WHOLE = (torch.int32, torch.int64)
_NONE: Mapping[str, Any] = MappingProxyType({})


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
    options: Mapping[str, Any] = _NONE,
    plan: Plan | None = None,
) -> None:
    """Refuse what no backend could mean, before any kernel reads beyond a tensor.

    Values are looked up where they are on the CPU; a device is not waited for.

    Args:
        options: the further keywords of the call, of :class:`kernelreg.gdn.Options`.
        plan: what ``cu_seqlens`` is from, if it is from one.

    Raises:
        CallError: names the argument, what it is and what the contract says.
    """
    named = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": initial_state, "cu_seqlens": cu_seqlens}
    if state_indices is not None or num_accepted_tokens is not None:
        named |= {"state_indices": state_indices, "num_accepted_tokens": num_accepted_tokens}
    if options:
        named |= {name: options.get(name) for name in _OF_RAW_GATES}
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
    sequences, edges = B, None
    if cu_seqlens is not None:
        if cu_seqlens.dim() != 1 or not cu_seqlens.numel() or cu_seqlens.dtype not in _WHOLE:
            raise CallError(
                f"cu_seqlens is {cu_seqlens.dtype} {list(cu_seqlens.shape)}; accepted: int32 or int64, [N+1]"
            )
        if B != 1:
            raise _shape("q", q, "[1, T, H, K] with cu_seqlens: the sequences are packed in one row")
        sequences = cu_seqlens.shape[0] - 1
        if plan is None:
            edges = host_edges(cu_seqlens, T, options.get("cu_seqlens_cpu"))
        else:
            _check_plan(plan, q)
    elif options.get("cu_seqlens_cpu") is not None:
        raise CallError("cu_seqlens_cpu without cu_seqlens, whose values it has; accepted: both, or neither")
    if not q.dtype == k.dtype == v.dtype:
        raise CallError(f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; accepted: one dtype for the three")
    device = q.device
    for name, tensor in named.items():
        if tensor is None:
            continue
        if tensor.device != device:
            raise CallError(f"{name} is on {tensor.device}; accepted: q's device, {device}")
        if name in _REAL_ARGUMENTS and tensor.dtype not in _REAL_DTYPES:
            raise CallError(f"{name} is {tensor.dtype}; accepted: {', '.join(DTYPES)}")
    if options:
        _check_gates(options, HV)
    state = (HV, V, K) if state_v_first else (HV, K, V)
    if state_indices is not None:
        longest = T if cu_seqlens is None else max((end - start for start, end in pairwise(edges or ())), default=0)
        _check_pool(initial_state, state_indices, num_accepted_tokens, sequences, state, max(longest, 1))
    elif num_accepted_tokens is not None:
        raise CallError("num_accepted_tokens without state_indices, whose slots it counts")
    elif initial_state is not None and initial_state.shape != (sequences, *state):
        order = "[N, HV, V, K]" if state_v_first else "[N, HV, K, V]"
        raise _shape("initial_state", initial_state, f"{order} = {[sequences, *state]}")


def real_scale(scale: object) -> float | None:
    """The scale as a plain number, or None.

    Raises:
        CallError: anything but a finite real number.
    """
    if scale is None:
        return None
    try:
        number = float(scale) if isinstance(scale, Real) else inf
    except OverflowError:
        number = inf
    if not isfinite(number):
        raise CallError(f"scale is {scale!r:.80}; accepted: None, or a finite real number")
    return number


def yes_or_no(name: str, value: object) -> bool:
    """A flag as a plain bool: numpy's, 0, 1 and None are ones, too.

    Raises:
        CallError: anything else; a text is true in Python, and a tensor in its place is an argument in another's.
    """
    if value is True or value is False:
        return value is True
    number = isinstance(value, int) and value in (0, 1)
    if value is None or number or type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    raise CallError(f"{name} is a {type(value).__name__}; accepted: True or False")


def _check_plan(plan: Plan, q: Tensor) -> None:
    if q.device != plan.device:
        raise CallError(f"q is on {q.device}; accepted: the plan's device, {plan.device}")
    if q.shape[1] != plan.max_tokens:
        raise _shape("q", q, f"[1, {plan.max_tokens}, H, K]: T is the plan's max_tokens")


def _check_gates(options: Mapping[str, Any], HV: int) -> None:
    """The rules of raw gates: each flag with what it needs, and nothing without its flag."""
    for name in _OF_RAW_GATES:
        if options.get(name) is not None and options[name].shape != (HV,):
            raise _shape(name, options[name], f"[HV] = [{HV}]")
    if not options.get("use_gate_in_kernel"):
        if any(options.get(name) is not None for name in _OF_RAW_GATES):
            raise CallError("A_log or dt_bias without use_gate_in_kernel=True, which alone gives them a meaning")
    elif options.get("A_log") is None:
        raise CallError("use_gate_in_kernel=True without A_log; accepted: A_log [HV], and dt_bias [HV] or None")
    if options.get("allow_neg_eigval") and not options.get("use_beta_sigmoid_in_kernel"):
        raise CallError("allow_neg_eigval=True without use_beta_sigmoid_in_kernel=True; double beta yourself")


def _check_pool(
    pool: Tensor | None,
    slots: Tensor,
    accepted: Tensor | None,
    sequences: int,
    state: tuple[int, ...],
    longest: int,
) -> None:
    """The rules of a state pool. ``longest`` is the least S that holds a slot for each token, as far as it is known."""
    if pool is None:
        raise CallError("state_indices without initial_state, the pool that they point into")
    if pool.dim() != 4 or pool.shape[1:] != state:
        raise _shape("initial_state", pool, f"with state_indices a pool [P, {', '.join(map(str, state))}]")
    if not pool.is_contiguous() and _may_overlap(pool):
        raise CallError(
            f"initial_state is {list(pool.shape)} with strides {list(pool.stride())}: entries may share memory; "
            "accepted: a pool that can be written in place, each entry in a place of its own"
        )
    if pool.is_inference() and not torch.is_inference_mode_enabled():
        raise CallError(
            "initial_state is a pool that was made under torch.inference_mode(), and it is updated in place; accepted: "
            "the call under torch.inference_mode() too, or a pool made outside it"
        )
    if slots.dtype not in _WHOLE or slots.dim() not in (1, 2) or slots.shape[0] != sequences:
        form = f"int32 or int64, [N] or [N, S] with N = {sequences}"
        raise CallError(f"state_indices is {slots.dtype} {list(slots.shape)}; accepted: {form}")
    if slots.dim() == 2 and slots.shape[1] < longest:
        raise _shape("state_indices", slots, f"[{sequences}, S], a slot for each of a sequence's {longest} tokens")
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


def _may_overlap(x: Tensor) -> bool:
    """Whether two entries may lie at one address: no for every slice, step and transpose of a tensor where none do."""
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride <= reach:
            return bool(x.numel())
        reach += (size - 1) * stride
    return False


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

    :func:`check_arguments` has seen the options.

    Args:
        g: ``[…, HV]``; with ``use_gate_in_kernel`` the raw input of ``-exp(A_log)·softplus(g + dt_bias)``.
        beta: ``[…, HV]``; with ``use_beta_sigmoid_in_kernel`` the raw input of the sigmoid.
        A_log, dt_bias: ``[HV]``.
        allow_neg_eigval: beta is twice the sigmoid.
    """
    if use_gate_in_kernel:
        assert A_log is not None
        wide = torch.float64 if g.dtype == torch.float64 else torch.float32
        raw = g.to(wide) if dt_bias is None else g.to(wide) + dt_bias.to(wide)
        g = -A_log.to(wide).exp() * softplus(raw)
    if use_beta_sigmoid_in_kernel:
        beta = beta.to(torch.float64 if beta.dtype == torch.float64 else torch.float32).sigmoid()
        beta = 2 * beta if allow_neg_eigval else beta
    return g, beta


def to_unit_length(x: Tensor) -> Tensor:
    """Unit length over the last dimension, in x's dtype, with the epsilon that FLA and FlashQLA use inside the root."""
    length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / torch.hypot(length, length.new_full((), 1e-3))


def _require_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise CallError(f"{name} is a {type(value).__name__}; accepted: a tensor")


def _shape(name: str, tensor: Tensor, wanted: str) -> CallError:
    return CallError(f"{name} is {list(tensor.shape)}; accepted: {wanted}")
