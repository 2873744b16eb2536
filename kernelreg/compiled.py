"""GDN calls inside ``torch.compile``: one opaque operator each, which resolves its kernel when it runs.

A graph holds the operator alone, so nothing of a library or of the dispatch is traced, and neither breaks the graph nor
adds a guard. The gradient is an operator, too: it runs the call once more with gradients on, since what the first run
left for its own backward cannot leave an operator, and differentiates that. Eager calls do not come by here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., tuple[Tensor, Tensor | None]]

#: What has a gradient, and what has none, in the order of the operators' arguments.
_LEAVES = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")
_OTHERS = {
    "cu_seqlens": "Tensor?",
    "cu_seqlens_cpu": "Tensor?",
    "scale": "float?",
    "output_final_state": "bool",
    "use_qk_l2norm_in_kernel": "bool",
    "state_v_first": "bool",
    "use_gate_in_kernel": "bool",
    "use_beta_sigmoid_in_kernel": "bool",
    "allow_neg_eigval": "bool",
}
_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta"
_GATES = "Tensor? A_log, Tensor? dt_bias"
_WORDS = ", ".join(f"{kind} {name}" for name, kind in _OTHERS.items())


def compiled(name: str, function: Function) -> Function:
    """The function as a graph may hold it: the same call, through ``torch.ops.kernelreg.<name>``.

    Args:
        name: of the operator.
        function: the eager one, with the keywords of :func:`kernelreg.gdn.chunk_gated_delta_rule`.
    """
    forward = _forward(name, function)

    def run(*tensors: Tensor, **words: Any) -> tuple[Tensor, Tensor | None]:
        o, final = forward(*_arguments(tensors, words))
        return o, final if words["output_final_state"] else None

    return run


def compiled_on_pool(name: str, function: Function) -> Function:
    """The same of a call that updates a pool of states in place, and has no gradient."""

    def on_pool(*arguments: Any) -> Tensor:
        *given, slots, accepted = arguments
        words = _words(given)
        return function(*words.pop("tensors"), state_indices=slots, num_accepted_tokens=accepted, **words)[
            0
        ].contiguous()

    schema = f"({_TENSORS}, Tensor(a!) initial_state, {_GATES}, {_WORDS}, Tensor slots, Tensor? accepted) -> Tensor"
    operator = torch.library.custom_op(f"kernelreg::{name}", on_pool, mutates_args=("initial_state",), schema=schema)
    operator.register_fake(lambda *arguments: arguments[2].new_empty(arguments[2].shape, dtype=arguments[0].dtype))

    def run(*tensors: Tensor, **words: Any) -> tuple[Tensor, Tensor | None]:
        slots, accepted = words["state_indices"], words["num_accepted_tokens"]
        o: Tensor = operator(*_arguments(tensors, words), slots, accepted)
        return o, words["initial_state"] if words["output_final_state"] else None

    return run


def _forward(name: str, function: Function) -> Callable[..., tuple[Tensor, Tensor]]:
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        words = _words(arguments)
        with torch.no_grad():  # by a kernel that need not know a backward
            o, final = function(*words.pop("tensors"), **words)
        return o.contiguous(), _nothing(o) if final is None else final.contiguous()

    def fake(*arguments: Any) -> tuple[Tensor, Tensor]:
        named = dict(zip((*_LEAVES, *_OTHERS), arguments, strict=True))
        q, v, edges = named["q"], named["v"], named["cu_seqlens"]
        o = v.new_empty(v.shape, dtype=q.dtype)
        if not named["output_final_state"]:
            return o, _nothing(o)
        sequences = q.shape[0] if edges is None else edges.shape[0] - 1
        sizes = (v.shape[3], q.shape[3]) if named["state_v_first"] else (q.shape[3], v.shape[3])
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        return o, v.new_empty((sequences, v.shape[2], *sizes), dtype=wide)

    states = f"{_TENSORS}, Tensor? initial_state, {_GATES}, {_WORDS}"
    operator = torch.library.custom_op(
        f"kernelreg::{name}", forward, mutates_args=(), schema=f"({states}) -> (Tensor, Tensor)"
    )
    operator.register_fake(fake)
    gradients = _gradients(name, states, function)

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        places = [place for place, each in enumerate(inputs) if isinstance(each, Tensor)]
        ctx.save_for_backward(*(inputs[place] for place in places))
        ctx.places, ctx.plain = places, [None if isinstance(each, Tensor) else each for each in inputs]

    def backward(ctx: Any, grad_o: Tensor | None, grad_final: Tensor | None) -> tuple[Tensor | None, ...]:
        arguments = list(ctx.plain)
        for place, tensor in zip(ctx.places, ctx.saved_tensors, strict=True):
            arguments[place] = tensor
        wanted = list(ctx.needs_input_grad[: len(_LEAVES)])
        found = gradients(grad_o, grad_final, wanted, *arguments)
        given = [each if want else None for each, want in zip(found, wanted, strict=True)]
        return (*given, *(None for _ in _OTHERS))

    operator.register_autograd(backward, setup_context=keep)
    return operator


def _gradients(name: str, states: str, function: Function) -> Callable[..., list[Tensor]]:
    def gradients(
        grad_o: Tensor | None, grad_final: Tensor | None, wanted: list[bool], *arguments: Any
    ) -> list[Tensor]:
        leaves = [
            each.detach().requires_grad_(want) if isinstance(each, Tensor) else each
            for each, want in zip(arguments, wanted, strict=False)
        ]
        words = _words((*leaves, *arguments[len(leaves) :]))
        with torch.enable_grad(), _recording():
            results = function(*words.pop("tensors"), **words)
        pairs = [
            (result, grad)
            for result, grad in zip(results, (grad_o, grad_final), strict=True)
            if result is not None and grad is not None and result.requires_grad
        ]
        asked = [leaf for leaf, want in zip(leaves, wanted, strict=True) if want]
        outputs, grads = zip(*pairs, strict=True)
        found = iter(torch.autograd.grad(outputs, asked, grads, allow_unused=True, materialize_grads=True))
        return [next(found).contiguous() if want else _nothing(arguments[0]) for want in wanted]

    def fake(grad_o: Tensor | None, grad_final: Tensor | None, wanted: list[bool], *arguments: Any) -> list[Tensor]:
        q = arguments[0]
        return [
            each.new_empty(each.shape) if want else _nothing(q) for each, want in zip(arguments, wanted, strict=False)
        ]

    schema = f"(Tensor? grad_o, Tensor? grad_final, bool[] wanted, {states}) -> Tensor[]"
    operator = torch.library.custom_op(f"kernelreg::{name}_backward", gradients, mutates_args=(), schema=schema)
    operator.register_fake(fake)
    return operator


def _arguments(tensors: tuple[Tensor, ...], words: dict[str, Any]) -> list[Any]:
    """A call in the operators' order."""
    flags = {name: bool(words.get(name)) if kind == "bool" else words.get(name) for name, kind in _OTHERS.items()}
    return [*tensors, *(words.get(name) for name in _LEAVES[len(tensors) :]), *flags.values()]


def _words(arguments: Any) -> dict[str, Any]:
    """A call as the eager function takes it; what was not said is left out."""
    named = dict(zip((*_LEAVES, *_OTHERS), arguments, strict=True))
    tensors = [named.pop(name) for name in _LEAVES[:5]]
    said = {name: value for name, value in named.items() if value is not None and value is not False}
    return {"tensors": tensors, **said}


def _recording() -> AbstractContextManager[object]:
    """A block that autograd records inside an operator, which torch runs below it. There is no public way to ask."""
    guard: AbstractContextManager[object] = torch._C._SetExcludeDispatchKeyGuard(
        torch._C.DispatchKey.AutogradFunctionality, False
    )
    return guard


def _nothing(x: Tensor) -> Tensor:
    """What stands for None where an operator must give a tensor."""
    return x.new_empty(0)
