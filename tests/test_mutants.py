"""Kernels that are right on a plain call and wrong in one corner of the contract: the suite has a case for each."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

import kernelreg
from kernelreg.ops import operation_named
from kernelreg.verify.cases import cases
from kernelreg.verify.judge import judge
from tests.machines import descriptor

Words = dict[str, Any]
Result = tuple[Tensor, "Tensor | None"]
#: What is wrong: gets the call's arguments and the right function, gives the result.
Mutant = Callable[[Words, Callable[..., Result]], Result]

#: By operation, the case that must see it, and its name.
MUTANTS: dict[tuple[str, str, str], Mutant] = {}


def caught_by(name: str, operation: str = "gdn.chunk") -> Callable[[Mutant], Mutant]:
    """Adds a mutant, with the case that must see it."""

    def add(mutant: Mutant) -> Mutant:
        MUTANTS[operation, name, mutant.__name__] = mutant
        return mutant

    return add


def scaled_gradient(x: Tensor, factor: float = 1.5) -> Tensor:
    """x, with another gradient."""
    return x.detach() + factor * (x - x.detach())


def some_gradient_is_wrong(condition: Callable[[Words], object]) -> Mutant:
    def mutant(words: Words, right: Callable[..., Result]) -> Result:
        o, final = right(**words)
        return (scaled_gradient(o) if condition(words) else o), final

    return mutant


GRADIENTS: dict[str, Callable[[Words], object]] = {
    "no states": lambda words: words["initial_state"] is None,
    "no final state": lambda words: not words["output_final_state"],
    "state_v_first": lambda words: words["state_v_first"],
    "scale = 0.25, q and k of unit length already": lambda words: words["scale"] is not None,
    "varlen with gaps": lambda words: words["cu_seqlens"] is not None,
    "varlen, int32, tokens behind": lambda words: (
        words["cu_seqlens"] is not None and words["cu_seqlens"].dtype == torch.int32
    ),
    "g, beta and initial state in bfloat16": lambda words: words["g"].dtype == torch.bfloat16,
    "raw gates": lambda words: words.get("use_gate_in_kernel"),
    "strong decays": lambda words: words["g"].min() < -50,
    "sliced, states turned in memory": lambda words: not words["q"].is_contiguous(),
    "of q alone": lambda words: not words["k"].requires_grad,
    "of the gates and the initial state alone": lambda words: not words["q"].requires_grad,
}
for _name, _condition in GRADIENTS.items():
    MUTANTS["gdn.chunk", f"gradients, {_name}", "some_gradient_is_wrong"] = some_gradient_is_wrong(_condition)


@caught_by("gradients, raw gates")
def forgets_the_gradient_of_a_log(words: Words, right: Callable[..., Result]) -> Result:
    if isinstance(words.get("A_log"), Tensor):
        words["A_log"] = scaled_gradient(words["A_log"])
    return right(**words)


@caught_by("two calls, both results kept")
def gives_one_buffer_to_all_calls(words: Words, right: Callable[..., Result]) -> Result:
    o, final = right(**words)
    buffer = _buffers.setdefault((o.shape, o.dtype), torch.empty_like(o))
    return buffer.copy_(o), final


_buffers: dict[object, Tensor] = {}


@caught_by("zero and very short q and k vectors")
def has_no_epsilon(words: Words, right: Callable[..., Result]) -> Result:
    if words["use_qk_l2norm_in_kernel"]:
        words |= {name: normalize(words[name].float(), dim=-1).to(words[name].dtype) for name in ("q", "k")}
    return right(**{**words, "use_qk_l2norm_in_kernel": False})


@caught_by("scale = -0.25")
def knows_no_negative_scale(words: Words, right: Callable[..., Result]) -> Result:
    return right(**{**words, "scale": words["scale"] and abs(words["scale"])})


@caught_by("cu_seqlens on the host, too")
def believes_every_sequence_of_a_host_has_tokens(words: Words, right: Callable[..., Result]) -> Result:
    edges = words.get("cu_seqlens_cpu")
    o, final = right(**words)
    if edges is not None and final is not None:
        final[edges[1:] == edges[:-1]] = 0
    return o, final


@caught_by("raw gates without dt_bias")
def cannot_do_without_a_bias(words: Words, right: Callable[..., Result]) -> Result:
    if words.get("use_gate_in_kernel") and words["dt_bias"] is None:
        words["dt_bias"] = torch.ones_like(words["A_log"])
    return right(**words)


@caught_by("raw gates, beta doubled")
def doubles_beta_only_without_a_raw_gate(words: Words, right: Callable[..., Result]) -> Result:
    if words.get("use_gate_in_kernel"):
        words.pop("allow_neg_eigval", None)
    return right(**words)


@caught_by("K = 24, V = 40, state_v_first")
def turns_square_states_alone(words: Words, right: Callable[..., Result]) -> Result:
    o, final = right(**words)
    if final is not None and words["state_v_first"]:
        final = final.mT.contiguous().view(final.shape)
        final = final.mT.contiguous() if final.shape[-1] == final.shape[-2] else final
    return o, final


@caught_by("initial state in float16")
def takes_every_half_for_bfloat16(words: Words, right: Callable[..., Result]) -> Result:
    if words["initial_state"] is not None and words["initial_state"].dtype == torch.float16:
        words["initial_state"] = words["initial_state"].view(torch.bfloat16)
    return right(**words)


def as_if_contiguous(x: Tensor) -> Tensor:
    """What a kernel reads that never looks at strides."""
    flat = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    return flat[x.storage_offset() :][: x.numel()].view(x.shape)


@caught_by("initial states with other data between them")
@caught_by("initial states turned in memory")
def ignores_strides_of_states(words: Words, right: Callable[..., Result]) -> Result:
    if words["initial_state"] is not None:
        words["initial_state"] = as_if_contiguous(words["initial_state"])
    return right(**words)


@caught_by("many short sequences")
def has_room_for_64_sequences(words: Words, right: Callable[..., Result]) -> Result:
    o, final = right(**words)
    if final is not None:
        final[64:] = 0
    return o, final


@caught_by("a long sequence")
def loses_count_after_300_tokens(words: Words, right: Callable[..., Result]) -> Result:
    o, final = right(**words)
    o[:, 300:] *= 1.5
    return o, final


@caught_by("dense")
def is_off_in_one_token_of_one_head(words: Words, right: Callable[..., Result]) -> Result:
    o, final = right(**words)
    if o.shape[:2] == (2, 90):
        o[1, 40, 2] *= 0.85
    return o, final


@caught_by("dense")
def is_off_in_one_state_of_one_head(words: Words, right: Callable[..., Result]) -> Result:
    o, final = right(**words)
    if final is not None and o.shape[:2] == (2, 90):
        final[1, 3, 0] *= 0.8
    return o, final


@caught_by("pool with other data between the states", "gdn.recurrent")
@caught_by("pool with its states turned in memory", "gdn.recurrent")
def updates_a_copy_of_a_pool_with_strides(words: Words, right: Callable[..., Result]) -> Result:
    if "state_indices" in words:
        words["initial_state"] = words["initial_state"].contiguous()
    return right(**words)


@caught_by("pool, float16", "gdn.recurrent")
@caught_by("pool, float64", "gdn.recurrent")
def updates_pools_of_the_common_dtypes_alone(words: Words, right: Callable[..., Result]) -> Result:
    if "state_indices" in words and words["initial_state"].dtype not in (torch.float32, torch.bfloat16):
        words["initial_state"] = words["initial_state"].clone()
    return right(**words)


@caught_by("pool given back", "gdn.recurrent")
def never_gives_the_pool_back(words: Words, right: Callable[..., Result]) -> Result:
    o, final = right(**words)
    return o, None if "state_indices" in words else final


@caught_by("pool, float32, with padding", "gdn.recurrent")
def always_gives_the_pool_back(words: Words, right: Callable[..., Result]) -> Result:
    o, final = right(**words)
    return o, words["initial_state"] if "state_indices" in words else final


@caught_by("pool, two calls, both results kept", "gdn.recurrent")
def gives_one_buffer_to_all_steps(words: Words, right: Callable[..., Result]) -> Result:
    return gives_one_buffer_to_all_calls(words, right)


@caught_by("verification, more slots than tokens", "gdn.recurrent")
def reads_as_many_slots_as_tokens(words: Words, right: Callable[..., Result]) -> Result:
    if words.get("num_accepted_tokens") is not None:
        words["num_accepted_tokens"] = words["num_accepted_tokens"].clamp_max(words["q"].shape[1])
    return right(**words)


@caught_by("pool, float32, with padding", "gdn.recurrent")
def multiplies_padding_by_zero(words: Words, right: Callable[..., Result]) -> Result:
    o, final = right(**words)
    slots = words.get("state_indices")
    if slots is not None and slots.dim() == 1 and words["cu_seqlens"] is None:
        o = o + 0 * words["v"] * (slots < 0)[:, None, None, None]
    return o, final


@pytest.fixture
def mutate() -> Iterator[Callable[[Mutant], None]]:
    """Registers ``mutant`` with this behaviour."""
    undo: list[Callable[[], None]] = []

    def add(mutant: Mutant) -> None:
        module = ModuleType("mutant_adapter")
        names = {each: operation_named(each).function for each in ("gdn.chunk", "gdn.recurrent")}
        for function in names.values():
            right = getattr(import_module("kernelreg_backends.torch.adapter"), function)
            run = lambda q, k, v, g, beta, _right=right, **words: mutant(  # noqa: E731
                {"q": q, "k": k, "v": v, "g": g, "beta": beta, **words}, _right
            )
            setattr(module, function, run)
        sys.modules["mutant_adapter"] = module
        features = sorted(operation_named("gdn").features - {"capture", "capture-varlen"})
        rows = [
            {"operation": each, "name": each.partition(".")[2], "function": function, "accepts": {"features": features}}
            for each, function in names.items()
        ]
        undo.append(kernelreg.register({**descriptor("mutant", adapter="mutant_adapter"), "kernel": rows}))

    yield add
    for each in undo:
        each()
    sys.modules.pop("mutant_adapter", None)


@pytest.mark.parametrize(("operation", "name", "mutant"), MUTANTS)
def test_the_suite_has_a_case_that_sees_it(
    mutate: Callable[[Mutant], None], operation: str, name: str, mutant: str
) -> None:
    mutate(MUTANTS[operation, name, mutant])
    there = {each.name: each for each in cases(operation, "small")}
    assert name == "dense" or judge(there["dense"], "mutant", "cpu").status == "right"
    outcome = judge(there[name], "mutant", "cpu")
    assert outcome.status == "wrong", str(outcome)
