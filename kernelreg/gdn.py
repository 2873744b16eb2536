"""Gated Delta Net, resolved per call from the tensors: change one import and keep the call.

Names and defaults follow flash-linear-attention's. Which kernel runs, and why not the others:
``kernelreg.resolve("gdn", like=dict(q=q, …)).explain()``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor
from torch.compiler import is_compiling

from kernelreg.call import Call
from kernelreg.compiled import compiled, compiled_on_pool
from kernelreg.dispatch import Dispatcher
from kernelreg.errors import CallError, ConfigurationError, NoBackendError, unknown_name
from kernelreg.fallback import Kept, keep_away
from kernelreg.forms import form_of
from kernelreg.ops import operation_named
from kernelreg.ops.gdn_arguments import check_arguments, real_scale, yes_or_no
from kernelreg.ops.gdn_plan import Plan, plan
from kernelreg.session import current_override

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Options", "Plan", "call_like", "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "plan"]


class Options(TypedDict, total=False):
    """FLA's further keywords.

    Attributes:
        use_gate_in_kernel: g is raw, and the decay is ``-exp(A_log)·softplus(g + dt_bias)``.
        A_log, dt_bias: ``[HV]``, for ``use_gate_in_kernel``.
        use_beta_sigmoid_in_kernel: beta is raw, before its sigmoid.
        allow_neg_eigval: with ``use_beta_sigmoid_in_kernel``, twice the sigmoid.
        cu_seqlens_cpu: the values of ``cu_seqlens`` on the CPU; spares a device sync.
        transpose_state_layout: FLA's older name of ``state_v_first``.
        chunk_indices: a hint that every backend computes itself; accepted and not used.
        cp_context, head_first: accepted at their defaults alone, None and False.
    """

    use_gate_in_kernel: bool
    A_log: Tensor | None
    dt_bias: Tensor | None
    use_beta_sigmoid_in_kernel: bool
    allow_neg_eigval: bool
    cu_seqlens_cpu: Tensor | None
    transpose_state_layout: bool
    chunk_indices: Tensor | None
    cp_context: None
    head_first: bool


#: Those of the options that say yes or no.
_FLAGS = frozenset(
    {
        "use_gate_in_kernel",
        "use_beta_sigmoid_in_kernel",
        "allow_neg_eigval",
        "transpose_state_layout",
        "head_first",
    }
)
#: The keywords that every kernel gets.
Words = dict[str, Any]

_CHUNK = Dispatcher("gdn.chunk")
_RECURRENT = Dispatcher("gdn.recurrent")
#: The features that tensors and flags show, in the order in which a key holds them.
_SHOWN = (
    "varlen",
    "empty-sequences",
    "initial-state",
    "final-state",
    "qk-l2norm",
    "state-v-first",
    "raw-gates",
    "state-pool",
    "multi-token",
    "backward",
    "deterministic",
    "capture",
)


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = False,
    *,
    plan: Plan | None = None,
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule in chunks, for prefill and training, by the best kernel for this very call.

    For each head: S ← exp(g_t)·S; S ← S + k_t (beta_t (v_t − Sᵀk_t))ᵀ; o_t = scale · Sᵀ q_t.

    Args:
        q, k: ``[B, T, H, K]``, like all but edges and slots in bfloat16, float16, float32 or float64.
        v: ``[B, T, HV, V]``, HV a multiple of H; q, k and v of one dtype.
        g: ``[B, T, HV]``, natural-log decay.
        beta: ``[B, T, HV]``, after the sigmoid.
        scale: a finite number, K^-0.5 when None; 0.0 is 0.0.
        initial_state: ``[N, HV, K, V]``, or ``[N, HV, V, K]`` with ``state_v_first``; zeros when None.
        output_final_state: also give the state after each sequence's last token.
        use_qk_l2norm_in_kernel: scale each q and k vector to unit length first (epsilon 1e-6 inside the root).
        cu_seqlens: ``[N+1]`` int32 or int64: the edges of sequences packed in one row (then B = 1).
        state_v_first: states are ``[V, K]``.
        plan: of :func:`plan`, in place of ``cu_seqlens``: no wait for the device, and a CUDA graph that replays for
            whatever the plan holds. T is its ``max_tokens``, N its ``max_sequences``.
        options: FLA's further keywords, see :class:`Options`.

    Returns:
        ``o [B, T, HV, V]`` in q's dtype, and the final state ``[N, HV, K, V]`` in float32 (float64 for float64
        calls) or None. Tokens behind the last sequence give zeros; an empty sequence's state passes through.

    Raises:
        CallError: arguments that break this contract.
        NoBackendError: no kernel fits; the message says why for each.
    """
    words: Words = {
        "scale": scale if scale is None else real_scale(scale),
        "output_final_state": output_final_state,
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
        "initial_state": initial_state,
        "cu_seqlens": cu_seqlens,
        "state_v_first": state_v_first,
    }
    if plan is not None:
        words |= _planned(plan, cu_seqlens, options)
    if is_compiling():
        words["state_v_first"] = _settle(options, state_v_first)
        return _CHUNK_IN_GRAPH(q, k, v, g, beta, **words, **options)
    return _run(_CHUNK, q, k, v, g, beta, words, options, plan)


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = False,
    *,
    state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule token by token, for decode, by the best kernel for this very call.

    Arguments, results and errors are :func:`chunk_gated_delta_rule`'s, except that g may be None (no decay) and
    beta may be None (ones), and that the states may lie in a pool that is updated in place:

    Args:
        initial_state: with ``state_indices`` the pool ``[P, HV, K, V]`` (``[P, HV, V, K]`` with ``state_v_first``)
            of any of the dtypes. It may be a view with strides of its own, but no two entries in one place. One that
            was made under ``torch.inference_mode`` is for calls under it.
        state_indices: ``[N]`` int32 or int64: the slot that each sequence starts from and leaves its state in. −1 is
            padding: no slot changes, the output is zero. Or ``[N, S]``, S at least the tokens of a sequence: the
            state after token t goes to slot ``[n, t]`` (−1 keeps none), so that a verification of draft tokens can
            be cut short afterwards. No two entries but −1 may name one slot. On a GPU, whose values are not waited
            for, any other number that is no slot is padding too; and where ``cu_seqlens`` is there alone, without
            ``cu_seqlens_cpu``, a sequence with ``[N, S]`` ends after S tokens, and at T: those behind give zeros.
        num_accepted_tokens: ``[N]``, with ``[N, S]``: how many of the tokens of the call before were accepted, so
            that a sequence starts from slot ``[n, num_accepted_tokens[n] − 1]``; 1 for each when None.

    Returns:
        ``o [B, T, HV, V]``, and with a pool the pool itself where ``output_final_state`` asks for it, else None.
    """
    if g is None or beta is None:
        g, beta = _gates(v, g, beta)
    words: Words = {
        "scale": scale if scale is None else real_scale(scale),
        "output_final_state": output_final_state,
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
        "initial_state": initial_state,
        "cu_seqlens": cu_seqlens,
        "state_v_first": state_v_first,
    }
    if state_indices is not None or num_accepted_tokens is not None:
        words |= {"state_indices": state_indices, "num_accepted_tokens": num_accepted_tokens}
    if is_compiling():
        words["state_v_first"] = _settle(options, state_v_first)
        run = _RECURRENT_IN_GRAPH if state_indices is None else _POOL_IN_GRAPH
        return run(q, k, v, g, beta, **words, **options)
    return _run(_RECURRENT, q, k, v, g, beta, words, options)


_CHUNK_IN_GRAPH = compiled("gdn_chunk", chunk_gated_delta_rule)
_RECURRENT_IN_GRAPH = compiled("gdn_recurrent", fused_recurrent_gated_delta_rule)
_POOL_IN_GRAPH = compiled_on_pool("gdn_recurrent_pool", fused_recurrent_gated_delta_rule)


def _run(
    dispatch: Dispatcher,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    words: Words,
    options: Options,
    plan: Plan | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run the kernel that is known for such a call, or else find it."""
    try:
        form = form_of(q, k, v, g, beta, words, options, current_override())
        if plan is not None:
            form = (form, plan.form)
        function = dispatch.forms.get(form)
    except (AttributeError, TypeError):  # no tensors, or what cannot be a key: the way below says what is wrong
        form = function = None
    if function is None:
        return _run_new(dispatch, form, q, k, v, g, beta, words, options, plan)
    try:
        return function(q, k, v, g, beta, **words, **options)  # type: ignore[no-any-return]
    except (Exception, SystemExit) as error:
        return _run_new(dispatch, form, q, k, v, g, beta, words, options, plan, error)


def _run_new(
    dispatch: Dispatcher,
    form: Hashable,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    words: Words,
    options: Options,
    plan: Plan | None,
    failed: BaseException | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Check a call, decide it where its kind is new, and run it.

    Args:
        form: what the call is remembered under, where it can be.
        failed: what the kernel that was known for such calls has just raised on this one.
    """
    given = frozenset(options)
    for name in ("output_final_state", "use_qk_l2norm_in_kernel", "state_v_first"):
        words[name] = yes_or_no(name, words[name])
    words["state_v_first"] = _settle(options, words["state_v_first"])
    initial_state, cu_seqlens = words["initial_state"], words["cu_seqlens"]
    state_indices = words.get("state_indices")
    check_arguments(
        q,
        k,
        v,
        g,
        beta,
        initial_state,
        cu_seqlens,
        words["state_v_first"],
        state_indices,
        words.get("num_accepted_tokens"),
        options,
        plan,
    )
    shown = _shown(dispatch.operation, q, k, v, g, beta, words, options, plan)
    gate = _gate_dtype(g, options)
    key = _key(dispatch, q, v, gate, initial_state, cu_seqlens, shown)
    function = dispatch.known.get(key)
    kept = None
    if function is None:
        call = _call(dispatch.operation, q, v, gate, initial_state, cu_seqlens, shown)
        function = dispatch.decide(key, call)
        in_time = failed is None and "capture" not in call.features
        if in_time and initial_state is not None and state_indices is not None:
            kept = Kept(initial_state, state_indices)
    known_values = plan is not None or not _reads_values(words, options)
    if form is not None and given == options.keys() and known_values:
        dispatch.remember(form, key, function)
    while True:  # until a kernel runs: each that fails is kept away, so none is tried twice
        try:
            if failed is not None:
                raise failed
            return function(q, k, v, g, beta, **words, **options)  # type: ignore[no-any-return]
        except (Exception, SystemExit) as error:  # a library's: an automatic choice goes on to the next kernel
            failed = None
            call = _call(dispatch.operation, q, v, gate, initial_state, cu_seqlens, shown)
            keep_away(call, error, kept, in_place=state_indices is not None)
            key = _key(dispatch, q, v, gate, initial_state, cu_seqlens, shown)  # what has changed tells other sizes
            try:
                function = dispatch.decide(key, call)
            except NoBackendError as none:
                raise none from error


def call_like(operation: str, arguments: Mapping[str, Any]) -> Call:
    """What a call with these arguments needs: the very call that the functions above resolve.

    Raises:
        ConfigurationError: an argument that the function does not have, or one that is missing.
        CallError: arguments that break the contract.
    """
    name = operation_named(operation).name
    functions: dict[str, Callable[..., Any]] = {
        "gdn.chunk": chunk_gated_delta_rule,
        "gdn.recurrent": fused_recurrent_gated_delta_rule,
    }
    function = functions[name]
    try:
        bound = inspect.signature(function).bind(**arguments)
        bound.apply_defaults()
        given = bound.arguments
        options: Options = given["options"]
        state_v_first = _settle(options, yes_or_no("state_v_first", given["state_v_first"]))
    except TypeError as error:
        raise ConfigurationError(
            f"like= {error}; accepted: the arguments of kernelreg.gdn.{function.__name__}"
        ) from None
    plan = given.get("plan")
    if plan is not None:
        given |= _planned(plan, given["cu_seqlens"], options)
    q, k, v, initial_state, cu_seqlens = (given[name] for name in ("q", "k", "v", "initial_state", "cu_seqlens"))
    state_indices, accepted = given.get("state_indices"), given.get("num_accepted_tokens")
    g, beta = given["g"], given["beta"]
    if name == _RECURRENT.operation:
        g, beta = _gates(v, g, beta)
    check_arguments(q, k, v, g, beta, initial_state, cu_seqlens, state_v_first, state_indices, accepted, options, plan)
    real_scale(given["scale"])
    final, normalise = (yes_or_no(word, given[word]) for word in ("output_final_state", "use_qk_l2norm_in_kernel"))
    words = {**given, "output_final_state": final, "use_qk_l2norm_in_kernel": normalise, "state_v_first": state_v_first}
    shown = _shown(name, q, k, v, g, beta, words, options, plan)
    return _call(name, q, v, _gate_dtype(g, options), initial_state, cu_seqlens, shown)


def _gate_dtype(g: Tensor, options: Options) -> torch.dtype:
    """The dtype of the gate that a kernel gets: raw ones are activated in float32, or float64."""
    if options and options.get("use_gate_in_kernel") and g.dtype != torch.float64:
        return torch.float32
    return g.dtype


def _gates(v: Tensor, g: Tensor | None, beta: Tensor | None) -> tuple[Tensor, Tensor]:
    """g and beta, where None stands for no decay and for ones."""
    if not isinstance(v, Tensor):
        raise CallError(f"v is a {type(v).__name__}; accepted: a tensor")
    if g is None:
        g = torch.zeros(v.shape[:3], dtype=torch.float32, device=v.device)
    if beta is None:
        beta = torch.ones(v.shape[:3], dtype=torch.float32, device=v.device)
    return g, beta


def _settle(options: Options, state_v_first: bool) -> bool:
    """Take FLA's aliases and hints out of the options, so that adapters see the contract's words alone."""
    for name in options:
        if name not in Options.__annotations__:
            raise TypeError(unknown_name("keyword", name, Options.__annotations__))
    words: Mapping[str, object] = options
    for name in words:
        if name in _FLAGS:
            yes_or_no(name, words[name])
    if options.pop("cp_context", None) is not None:
        raise CallError("cp_context is FLA's context parallelism, which this contract does not have; accepted: None")
    if options.pop("head_first", False):
        raise CallError("head_first=True; accepted: False, with tensors [B, T, H, …]")
    options.pop("chunk_indices", None)
    return bool(options.pop("transpose_state_layout", False)) or state_v_first


def _planned(plan: Plan, cu_seqlens: Tensor | None, options: Options) -> Words:
    """What a plan stands for in a call."""
    if not isinstance(plan, Plan):
        raise CallError(f"plan is a {type(plan).__name__}; accepted: what kernelreg.gdn.plan(…) gives")
    if cu_seqlens is not None or options.get("cu_seqlens_cpu") is not None:
        raise CallError("plan and cu_seqlens, whose place it takes; accepted: one of them")
    options.pop("cu_seqlens_cpu", None)
    return {"cu_seqlens": plan.cu_seqlens, "cu_seqlens_cpu": plan.cu_seqlens_cpu}


def _shown(
    operation: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    words: Words,
    options: Options,
    plan: Plan | None,
) -> tuple[bool, ...]:
    """Which features of ``_SHOWN`` the call uses."""
    initial_state, cu_seqlens, slots = words["initial_state"], words["cu_seqlens"], words.get("state_indices")
    states = (initial_state is not None, bool(words["output_final_state"]))
    sequences = 1 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    several = q.shape[1] > sequences or (slots is not None and slots.dim() == 2)
    raw = bool(options) and bool(options.get("use_gate_in_kernel") or options.get("use_beta_sigmoid_in_kernel"))
    backward = torch.is_grad_enabled() and any(
        isinstance(each, Tensor) and each.requires_grad for each in (q, k, v, g, beta, initial_state, *options.values())
    )
    if slots is not None and backward:
        raise CallError("state_indices updates a pool in place, which has no gradient; accepted: under torch.no_grad()")
    capture = q.is_cuda and torch.cuda.is_current_stream_capturing()
    if plan is None:
        empty = cu_seqlens is not None and _may_be_empty(cu_seqlens, options)
    else:  # a later batch's sequences may be, where this one's are not
        empty = capture or plan.sequences.filled is not None
    return (
        cu_seqlens is not None,
        empty,
        *states,
        bool(words["use_qk_l2norm_in_kernel"]),
        bool(words["state_v_first"]) and any(states),
        raw,
        slots is not None,
        several and operation == _RECURRENT.operation,
        backward,
        torch.are_deterministic_algorithms_enabled(),
        capture,
    )


def _reads_values(words: Words, options: Options) -> bool:
    """Whether the call has edges or slots on the host, whose values are looked up each time."""
    given = (words["cu_seqlens"], options.get("cu_seqlens_cpu"), words.get("state_indices"))
    return any(each is not None and each.device.type == "cpu" for each in given)


def _may_be_empty(cu_seqlens: Tensor, options: Options) -> bool:
    """Whether a sequence may have no tokens: looked up on the host, assumed of edges that lie on a device alone."""
    edges = options.get("cu_seqlens_cpu") if cu_seqlens.device.type != "cpu" else cu_seqlens
    if not isinstance(edges, Tensor) or edges.device.type != "cpu":
        return True
    return bool((edges[1:] == edges[:-1]).any())


def _key(
    dispatch: Dispatcher,
    q: Tensor,
    v: Tensor,
    gate: torch.dtype,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    shown: tuple[bool, ...],
) -> tuple[Hashable, ...]:
    """All that a descriptor or a policy can tell two calls apart by."""
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    buckets = dispatch.buckets()
    tokens, sequences = buckets
    return (
        buckets,
        q.device,
        q.dtype,
        gate,
        None if initial_state is None else initial_state.dtype,
        K,
        V,
        H,
        HV,
        tokens(B * T),
        sequences(B if cu_seqlens is None else len(cu_seqlens) - 1),
        shown,
        current_override(),
    )


def _call(
    operation: str,
    q: Tensor,
    v: Tensor,
    gate: torch.dtype,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    shown: tuple[bool, ...],
) -> Call:
    """The call as a descriptor reads it."""
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    call = Call(
        operation=operation,
        device=str(q.device),
        dtype=_name(q.dtype),
        gate_dtype=_name(gate),
        state_dtype=None if initial_state is None else _name(initial_state.dtype),
        head_dim_k=K,
        head_dim_v=V,
        heads=H,
        value_heads=HV,
        tokens=B * T,
        sequences=B if cu_seqlens is None else len(cu_seqlens) - 1,
        features=frozenset(name for name, used in zip(_SHOWN, shown, strict=True) if used),
    )
    return operation_named(operation).normalise(call)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
