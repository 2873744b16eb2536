"""A case's tensors, each in a buffer of its own with guard bands, so that no write goes unseen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from kernelreg.verify.cases import Case
from kernelreg.verify.inputs import Arguments, gdn_call, pool_call

#: Elements before and behind each tensor; keeps the alignment that an allocation has.
_BAND = 128
_POOL = 24
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def prepare(case: Case, device: str, seed: int | None = None, lengths: tuple[int, ...] | None = None) -> Arguments:
    """The arguments of the case's call. ``seed`` and ``lengths`` give another batch of the same shapes."""
    seed = case.seed if seed is None else seed
    lengths = case.lengths if lengths is None else lengths
    options: dict[str, Any] = {
        "H": case.heads,
        "HV": case.value_heads,
        "K": case.head_dim_k,
        "V": case.head_dim_v,
        "dtype": getattr(torch, case.dtype),
        "normalised": case.normalised,
        "zero_gates": case.zero_gates,
        "device": device,
        "seed": seed,
    }
    if case.slots:
        options |= {"pool": _POOL, "pool_dtype": getattr(torch, case.pool_dtype), "behind": case.behind}
        call = pool_call(lengths, case.slots, accepted=case.accepted or None, packed=case.packed, **options)
    elif case.packed:
        edges = [sum(lengths[:place]) for place in range(len(lengths) + 1)]
        call = gdn_call(T=edges[-1] + case.behind, edges=edges, state=case.state, **options)
    else:
        length = lengths[0] if lengths else 5
        call = gdn_call(B=len(lengths), T=length, state=case.state, **options)
    call |= {"output_final_state": case.final, "scale": case.scale}
    if case.strong:
        call["g"][:, 1::7] = -80.0
    if case.small_vectors:
        for name in ("q", "k"):
            call[name][:, ::3] = 0
            call[name][:, 1::3] *= 1e-4
    for name, dtype in case.cast.items():
        call[name] = call[name].to(getattr(torch, dtype))
    if case.raw:
        call |= _raw(case, call, seed)
    for place in _unseen(case, lengths):
        for name in ("q", "k", "v", "g", "beta"):
            call[name][place] = float("nan")
    if case.host_edges:
        call["cu_seqlens_cpu"] = call["cu_seqlens"].cpu()
    if case.int32:
        for name in ("cu_seqlens", "state_indices", "num_accepted_tokens"):
            if name in call:
                call[name] = call[name].int()
    if case.state_v_first:
        call["state_v_first"] = True
        if "initial_state" in call:
            call["initial_state"] = call["initial_state"].mT.contiguous()
    if "initial_state" in call:
        call["initial_state"] = _PLACED[case.states](call["initial_state"])
    if case.sliced:
        for names in (("q", "k", "v"), ("g", "beta")):
            call |= _slices({name: call[name] for name in names})
    if case.broken == "device":
        call["cu_seqlens"] = call["cu_seqlens"].to("meta" if device == "cpu" else "cpu")
    return call


def _unseen(case: Case, lengths: tuple[int, ...]) -> Iterator[tuple[int | slice, ...]]:
    """Where the tokens lie that must not matter: behind the last sequence, and of sequences without a slot."""
    if case.behind:
        yield 0, slice(sum(lengths), None)
    rows: tuple[int | tuple[int, ...], ...] = case.slots
    for number, slots in enumerate(rows):
        token = case.accepted[number] - 1 if case.accepted else 0
        if not 0 <= (slots[token] if isinstance(slots, tuple) else slots) < _POOL:
            first = sum(lengths[:number])
            yield (0, slice(first, first + lengths[number])) if case.packed else (number,)


def _between(states: Tensor) -> Tensor:
    """The states with other data between them, as in a cache that holds more than states."""
    rows = states.new_zeros(len(states), states[:1].numel() + _BAND)
    return rows[:, : states[:1].numel()].view(states.shape).copy_(states)


_PLACED: dict[str, Callable[[Tensor], Tensor]] = {
    "alone": lambda states: states,
    "between": _between,
    "turned": lambda states: states.mT.contiguous().mT,
}


def _raw(case: Case, call: Arguments, seed: int) -> Arguments:
    generator = torch.Generator().manual_seed(seed + 2)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(call["q"].device)

    more: Arguments = {}
    if "gate" in case.raw:
        more |= {"use_gate_in_kernel": True, "A_log": random(case.value_heads), "dt_bias": random(case.value_heads)}
        if "unbiased" in case.raw:
            more["dt_bias"] = None
        more["g"] = random(*call["g"].shape).to(call["g"].dtype)
    if "beta" in case.raw:
        more |= {"use_beta_sigmoid_in_kernel": True, "beta": random(*call["beta"].shape).to(call["beta"].dtype)}
    return more | ({"allow_neg_eigval": True} if "negative" in case.raw else {})


def _slices(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors ``[B, T, …]`` as neighbours in one, as a fused projection leaves them; other dtypes stay."""
    first = next(iter(tensors.values()))
    alike = {name: x for name, x in tensors.items() if x.dtype == first.dtype}
    widths = [x[0, 0].numel() if x.numel() else 0 for x in alike.values()]
    if not all(widths):
        return tensors
    whole = torch.cat([x.flatten(2) for x in alike.values()], 2)
    parts = torch.split(whole, widths, 2)
    return tensors | {
        name: part.view(*part.shape[:2], *alike[name].shape[2:]) for name, part in zip(alike, parts, strict=True)
    }


class Guard:
    """The call's tensors between guard bands.

    Attributes:
        call: the arguments, with views into guarded buffers in place of the tensors.
    """

    def __init__(self, call: Arguments) -> None:
        self.call = dict(call)
        self._flat: dict[str, Tensor] = {}
        for name, value in call.items():
            if isinstance(value, Tensor) and not value.is_meta:
                self._put(name, value)
        self.keep()

    def _put(self, name: str, value: Tensor) -> None:
        reach = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
        span = 1 + reach if value.numel() else 0
        self._flat[name] = torch.full((span + 2 * _BAND,), 77, dtype=value.dtype, device=value.device)
        self.call[name] = self._view(name, self._flat[name], value).copy_(value)

    def _view(self, name: str, flat: Tensor, like: Tensor | None = None) -> Tensor:
        like = self.call[name] if like is None else like
        return flat.as_strided(like.shape, like.stride(), _BAND)

    def keep(self) -> None:
        """Remember the tensors as they are now."""
        self._kept = {name: flat.detach().clone() for name, flat in self._flat.items()}

    def before(self, name: str) -> Tensor:
        """The tensor as it was when it was last kept."""
        return self._view(name, self._kept[name])

    def disturbed(self, writable: str | None = None, where: Tensor | None = None) -> list[str]:
        """The tensors of which a bit has changed since, in them or around them.

        Args:
            writable: a tensor that may have changed, in the rows that ``where`` (a mask over its first dimension) says.
        """
        found = []
        for name, flat in self._flat.items():
            wanted = self._kept[name]
            if name == writable and where is not None:
                wanted = wanted.clone()
                self._view(name, wanted)[where] = self.call[name][where]
            bits = _BITS[flat.element_size()]
            if not torch.equal(flat.detach().view(bits), wanted.view(bits)):
                found.append(name)
        return found
