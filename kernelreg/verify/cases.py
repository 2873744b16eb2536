"""The calls that a backend is judged by: each row of the contract once, and calls drawn from it at random."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from kernelreg.errors import ConfigurationError, unknown_name
from kernelreg.ops import operation_named

Broken = Literal["", "heads", "device", "slots"]
States = Literal["alone", "between", "turned"]


class Sizes(msgspec.Struct, frozen=True):
    """The head shape that most cases share, since a kernel is compiled anew for each, and the other ones.

    Attributes:
        heads, value_heads: H and HV.
        head_dim: K and V.
        tokens: T of a dense call; packed ones have as many in all.
        other_dims: further (K, V).
    """

    heads: int
    value_heads: int
    head_dim: int
    tokens: int
    other_dims: tuple[tuple[int, int], ...]


#: ``real`` is a layer's head shape on an accelerator, ``ungrouped`` the same for kernels that know no grouped heads;
#: ``small`` is for CPUs, ``tiny`` for interpreters of kernels.
SIZES = {
    "real": Sizes(4, 8, 128, 300, ((64, 64), (256, 256), (128, 64))),
    "ungrouped": Sizes(4, 4, 128, 300, ((64, 64), (256, 256), (128, 64))),
    "small": Sizes(2, 4, 32, 90, ((16, 16), (24, 40))),
    "tiny": Sizes(2, 4, 16, 9, ((32, 16),)),
}


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One call, as data; :func:`kernelreg.verify.prepare.prepare` makes its tensors.

    Attributes:
        lengths: tokens of each sequence; packed in one row where ``packed``, else all alike.
        behind: tokens behind the last packed sequence, all NaN.
        host_edges: ``cu_seqlens_cpu`` is given, too.
        cast: arguments in another dtype than the call's.
        sliced: q, k and v are slices of one projection, g and beta of another.
        states: where the initial states (or the pool) lie: alone, with other data ``between`` them, or ``turned``,
            so that their last two dimensions are the other way round in memory.
        small_vectors: some q and k vectors are zero, and some so short that the norm's epsilon counts.
        raw: which gates are raw; ``unbiased`` is without ``dt_bias``.
        strong: some decays are as good as zero.
        gradients_of: the inputs that require gradients in a ``backward`` case; all where none is named.
        other_lengths: after a first call (or in a replay) the tensors hold another batch, of these lengths.
        slots, accepted, pool_dtype: of a decode pool. Tokens of sequences without a slot are NaN.
        broken: what breaks the contract, so that a CallError is the right answer.
    """

    name: str
    operation: str
    heads: int
    value_heads: int
    head_dim_k: int
    head_dim_v: int
    lengths: tuple[int, ...]
    packed: bool = False
    behind: int = 0
    dtype: str = "bfloat16"
    cast: dict[str, str] = {}
    int32: bool = False
    host_edges: bool = False
    state: bool = True
    final: bool = True
    normalised: bool = False
    state_v_first: bool = False
    scale: float | None = None
    sliced: bool = False
    states: States = "alone"
    small_vectors: bool = False
    raw: tuple[Literal["gate", "beta", "negative", "unbiased"], ...] = ()
    zero_gates: bool = False
    strong: bool = False
    backward: bool = False
    gradients_of: tuple[str, ...] = ()
    deterministic: bool = False
    capture: bool = False
    other_lengths: tuple[int, ...] = ()
    slots: tuple[int, ...] | tuple[tuple[int, ...], ...] = ()
    accepted: tuple[int, ...] = ()
    pool_dtype: str = "float32"
    broken: Broken = ""
    seed: int = 0


def cases(operation: str, sizes: str, *, draws: int = 0, seed: int = 0, quick: bool = False) -> list[Case]:
    """The cases of an operation.

    Args:
        operation: its name or alias.
        sizes: ``real``, ``ungrouped``, ``small`` or ``tiny``.
        draws: how many more to draw at random.
        seed: of the draws.
        quick: only those that need no kernel beyond the first few compiled ones.

    Raises:
        ConfigurationError: an unknown operation or size.
    """
    name = operation_named(operation).name
    if sizes not in SIZES:
        raise ConfigurationError(unknown_name("sizes", sizes, SIZES))
    found = list(_Maker(name, SIZES[sizes]).all(quick))
    return found + [_drawn(name, SIZES[sizes], seed + number) for number in range(draws)]


class _Maker:
    """Cases that differ from one plain call in what each is about."""

    def __init__(self, operation: str, sizes: Sizes) -> None:
        self.operation = operation
        self.sizes = sizes
        quarter, third = sizes.tokens // 4, sizes.tokens // 3
        self.uneven = (quarter, third, 1, sizes.tokens - quarter - third - 1)
        self.gaps = (0, quarter, 0, third, 0, 0, 1)
        self.many = tuple(number % 4 for number in range(sizes.tokens))

    def all(self, quick: bool) -> Iterator[Case]:
        yield from self._basic()
        if self.operation == "gdn.recurrent":
            yield from self._pools()
        if not quick:
            yield from self._compiled_anew()

    def _case(self, name: str, lengths: tuple[int, ...] | None = None, **changes: Any) -> Case:
        sizes = self.sizes
        plain: dict[str, Any] = {
            "heads": sizes.heads,
            "value_heads": sizes.value_heads,
            "head_dim_k": sizes.head_dim,
            "head_dim_v": sizes.head_dim,
            "lengths": (sizes.tokens, sizes.tokens) if lengths is None else lengths,
        }
        return Case(name=name, operation=self.operation, **{**plain, **changes})

    def _basic(self) -> Iterator[Case]:
        case, packed = self._case, self.uneven
        half = {"g": "bfloat16", "beta": "bfloat16"}
        yield case("dense")
        yield case("one token", (1, 1, 1))
        yield case("T = 0", (0, 0))
        yield case("no sequence, B = 0", ())
        yield case("no states", state=False, final=False)
        yield case("q and k of unit length already", normalised=True)
        yield case("varlen", packed, packed=True)
        yield case("varlen, int32", packed, packed=True, int32=True)
        yield case("varlen, around a chunk's edge", (63, 64, 65, 128), packed=True)
        yield case("one-token sequences", (1, 1, 1, 1), packed=True)
        yield case("empty sequences", self.gaps, packed=True)
        yield case("empty sequences alone", (0, 0), packed=True)
        yield case("many short sequences", self.many, packed=True)
        yield case("a long sequence", (5 * self.sizes.tokens + 1,))
        yield case("tokens behind the last sequence", packed, packed=True, behind=9)
        yield case("cu_seqlens changed in place", packed, packed=True, other_lengths=packed[::-1])
        yield case("cu_seqlens on the host, too", self.gaps, packed=True, host_edges=True)
        yield case("two calls, both results kept", other_lengths=(self.sizes.tokens,) * 2)
        yield case("g and beta in bfloat16", cast=half)
        yield case("g in bfloat16, varlen", packed, packed=True, cast={"g": "bfloat16"})
        yield case("initial state in bfloat16", cast={"initial_state": "bfloat16"})
        yield case("initial state in float16", cast={"initial_state": "float16"})
        yield case("initial states with other data between them", states="between")
        yield case("initial states turned in memory", states="turned")
        yield case("q, k, v sliced from one projection", sliced=True)
        yield case("zero and very short q and k vectors", small_vectors=True)
        yield case("state_v_first", state_v_first=True)
        yield case("state_v_first, varlen with gaps", self.gaps, packed=True, state_v_first=True)
        yield case("scale = 0.0", scale=0.0)
        yield case("scale = 0.25", scale=0.25)
        yield case("scale = -0.25", scale=-0.25)
        yield case("raw gates", raw=("gate", "beta"))
        yield case("raw gates, beta doubled", raw=("gate", "beta", "negative"))
        yield case("raw gates without dt_bias", raw=("gate", "unbiased"))
        yield case("raw beta, doubled", raw=("beta", "negative"))
        yield case("a quarter of the heads never forgets", zero_gates=True)
        yield case("strong decays", strong=True)
        yield case("deterministic", deterministic=True)
        yield case("HV not a multiple of H", value_heads=self.sizes.value_heads + 1, broken="heads")
        yield case("cu_seqlens on another device", packed, packed=True, broken="device")
        if self.operation == "gdn.chunk":
            yield case("gradients", (self.sizes.tokens,), backward=True)

    def _compiled_anew(self) -> Iterator[Case]:
        case, packed = self._case, self.uneven
        yield case("float16", dtype="float16")
        yield case("float32", dtype="float32")
        yield case("float64", dtype="float64")
        yield case("as many value heads as heads", value_heads=self.sizes.heads)
        yield case("one head for all value heads", heads=1)
        for K, V in self.sizes.other_dims:
            yield case(f"K = {K}, V = {V}", head_dim_k=K, head_dim_v=V)
            if K != V:
                yield case(f"K = {K}, V = {V}, state_v_first", head_dim_k=K, head_dim_v=V, state_v_first=True)
        yield case("CUDA graph, dense, replayed on other data", capture=True)
        yield case("CUDA graph, varlen, other edges", packed, packed=True, capture=True, other_lengths=packed[::-1])
        yield from self._gradients()

    def _gradients(self) -> Iterator[Case]:
        def case(name: str, lengths: tuple[int, ...] = (self.sizes.tokens,), **changes: Any) -> Case:
            return self._case(f"gradients, {name}", lengths, **{"backward": True, **changes})

        half = dict.fromkeys(("g", "beta", "initial_state"), "bfloat16")
        yield case("deterministic", deterministic=True)
        yield case("no states", state=False, final=False)
        yield case("no final state", final=False)
        yield case("state_v_first", state_v_first=True)
        yield case("scale = 0.25, q and k of unit length already", scale=0.25, normalised=True)
        yield case("varlen with gaps", self.gaps, packed=True)
        yield case("varlen, int32, tokens behind", self.uneven, packed=True, int32=True, behind=9)
        yield case("g, beta and initial state in bfloat16", cast=half)
        yield case("raw gates", raw=("gate", "beta"))
        yield case("strong decays", strong=True)
        yield case("sliced, states turned in memory", sliced=True, states="turned")
        yield case("of q alone", gradients_of=("q",))
        yield case("of the gates and the initial state alone", gradients_of=("g", "beta", "initial_state"))

    def _pools(self) -> Iterator[Case]:
        def case(name: str, lengths: tuple[int, ...], **changes: Any) -> Case:
            return self._case(name, lengths, **{"final": False, **changes})

        ones, slots = (1, 1, 1, 1), (5, -1, 0, 7)
        verify = ((1, 4, 6), (0, 2, 3), (-1, -1, -1), (8, 9, 10))
        yield case("pool, float32, with padding", ones, slots=slots)
        yield case("pool, float32, state_v_first", ones, slots=slots, state_v_first=True)
        yield case("pool, bfloat16", ones, slots=slots, pool_dtype="bfloat16")
        yield case("pool, bfloat16, state_v_first", ones, slots=slots, pool_dtype="bfloat16", state_v_first=True)
        yield case("pool, int32 indices", ones, slots=slots, int32=True)
        yield case("pool, padding alone", ones, slots=(-1, -1, -1, -1))
        yield case("pool, float16", ones, slots=slots, pool_dtype="float16")
        yield case("pool, float64", ones, slots=slots, pool_dtype="float64")
        yield case("pool given back", ones, slots=slots, final=True)
        yield case("pool, two calls, both results kept", ones, slots=slots, other_lengths=ones)
        for form in ("", ", state_v_first"):
            turned = {"state_v_first": bool(form)}
            yield case(f"pool with other data between the states{form}", ones, slots=slots, states="between", **turned)
            yield case(f"pool with its states turned in memory{form}", ones, slots=slots, states="turned", **turned)
        yield case("pool, raw gates", ones, slots=slots, raw=("gate", "beta"))
        yield case("pool, raw gates, state_v_first", ones, slots=slots, raw=("gate", "beta"), state_v_first=True)
        half = {"g": "bfloat16", "beta": "bfloat16"}
        layer: dict[str, Any] = {"raw": ("gate", "beta"), "cast": half, "state_v_first": True}
        yield case("pool, raw gates in bfloat16, state_v_first", ones, slots=slots, **layer)
        for each in ("between", "turned"):
            name = f"pool, raw gates in bfloat16, state_v_first, states {each}"
            yield case(name, ones, slots=slots, states=each, **layer)
        yield case("pool, raw gates in bfloat16, state_v_first, CUDA graph", ones, slots=slots, capture=True, **layer)
        yield case("pool, three tokens a sequence", (3, 3, 3, 3), slots=slots, state_v_first=True)
        yield case("pool, packed, with gaps", (2, 3, 0, 1), packed=True, behind=2, slots=slots)
        for form in ("", ", state_v_first"):
            turned = {"state_v_first": bool(form)}
            yield case(f"verification, a slot a token{form}", (3, 3, 3, 3), slots=verify, **turned)
            yield case(f"verification, accepted tokens{form}", (3,) * 4, slots=verify, accepted=(3, 1, 2, 2), **turned)
        yield case("verification, more slots than tokens", (2,) * 4, slots=verify, accepted=(3, 1, 2, 2))
        yield case("verification, packed", (3, 0, 1, 2), packed=True, slots=verify, accepted=(3, 1, 2, 2))
        yield case("pool, CUDA graph", ones, slots=slots, capture=True, state_v_first=True)
        strange = (5, 40, 0, 7)
        yield case("a slot that the pool does not have", ones, slots=strange, broken="slots")
        yield case(
            "a slot that the pool does not have, raw gates in bfloat16", ones, slots=strange, broken="slots", **layer
        )


def _drawn(operation: str, sizes: Sizes, seed: int) -> Case:
    """One call drawn from the contract, of the sizes' head shape."""
    rng = random.Random(f"{operation} {seed}")
    packed = rng.random() < 0.6
    longest = 3 * sizes.tokens // 4
    if operation == "gdn.recurrent":
        longest = min(longest, 5)
    if packed:
        lengths = tuple(rng.choice((0, 1, rng.randint(0, longest))) for _ in range(rng.randint(0, 5)))
    else:
        lengths = (rng.randint(0, longest),) * rng.randint(1, 3)
    cast = {name: rng.choice(("bfloat16", "float32")) for name in ("g", "beta", "initial_state")}
    changes: dict[str, Any] = {
        "packed": packed,
        "behind": rng.choice((0, 3)) if packed else 0,
        "cast": cast,
        "int32": rng.random() < 0.5,
        "host_edges": packed and rng.random() < 0.3,
        "state": rng.random() < 0.7,
        "final": rng.random() < 0.7,
        "normalised": rng.random() < 0.5,
        "state_v_first": rng.random() < 0.5,
        "scale": rng.choice((None, None, 0.0, 0.3, -0.3)),
        "sliced": rng.random() < 0.3,
        "states": rng.choice(("alone", "between", "turned")),
        "small_vectors": rng.random() < 0.2,
        "raw": rng.choice(
            ((), (), ("gate",), ("gate", "unbiased"), ("beta",), ("gate", "beta"), ("gate", "beta", "negative"))
        ),
        "zero_gates": rng.random() < 0.3,
        "strong": rng.random() < 0.3,
    }
    if operation == "gdn.recurrent" and lengths and rng.random() < 0.6:
        order = rng.sample(range(24), 24)
        steps = max(*lengths, 1)
        if rng.random() < 0.5:
            rows = [tuple(rng.choice((order.pop(), -1)) for _ in range(min(steps, 4))) for _ in lengths[:4]]
            lengths = tuple(min(length, 4) for length in lengths[:4])
            changes |= {"slots": tuple(rows), "accepted": tuple(rng.randint(1, len(row)) for row in rows)}
        else:
            changes["slots"] = tuple(rng.choice((order.pop(), -1)) for _ in lengths)
        changes |= {"pool_dtype": rng.choice(("float32", "bfloat16")), "state": True, "final": False}
        del cast["initial_state"]
    else:
        changes["backward"] = operation == "gdn.chunk" and any(lengths) and rng.random() < 0.25
        if not changes["state"]:
            del cast["initial_state"]
    said = ", ".join(sorted(name for name, value in changes.items() if value is True)) or "plain"
    return Case(
        name=f"draw {seed}: {len(lengths)} sequences, {said}",
        operation=operation,
        heads=sizes.heads,
        value_heads=sizes.value_heads,
        head_dim_k=sizes.head_dim,
        head_dim_v=sizes.head_dim,
        lengths=lengths,
        seed=seed,
        **changes,
    )
