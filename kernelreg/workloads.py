"""The calls that layers make: what is measured, and what is pinned. Data; nothing here imports torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import msgspec

from kernelreg.call import Call, make_call
from kernelreg.errors import ConfigurationError, unknown_name
from kernelreg.kinds import kind_features
from kernelreg.models import Shape

_STATES = frozenset({"initial-state", "final-state", "qk-l2norm"})
#: Edges that lie on a device alone may be of empty sequences.
_PACKED = frozenset({"varlen", "empty-sequences"})


class Workload(msgspec.Struct, frozen=True):
    """One way in which a layer calls an operation.

    Attributes:
        features: what the call uses.
        summary: when a layer calls it so.
    """

    name: str
    operation: str
    features: frozenset[str]
    summary: str

    @property
    def packed(self) -> bool:
        """Whether sequences lie in one row."""
        return "varlen" in self.features

    @property
    def decodes(self) -> bool:
        """Whether each sequence has one token."""
        return self.operation == "gdn.recurrent"

    @property
    def trains(self) -> bool:
        """Whether gradients are taken. A step of training is not captured here."""
        return "backward" in self.features


WORKLOADS = (
    Workload("prefill", "gdn.chunk", _STATES, "one prompt"),
    Workload("prefill-varlen", "gdn.chunk", _STATES | _PACKED, "prompts packed in a row"),
    Workload("training", "gdn.chunk", frozenset({"backward", "qk-l2norm"}), "forward and backward"),
    Workload(
        "training-varlen", "gdn.chunk", frozenset({"backward", "qk-l2norm"}) | _PACKED, "the same on packed sequences"
    ),
    Workload("decode", "gdn.recurrent", _STATES, "a token a sequence"),
    Workload(
        "decode-pool",
        "gdn.recurrent",
        frozenset({"initial-state", "state-pool", "raw-gates", "qk-l2norm", "state-v-first"}),
        "a token a sequence, states in a pool, as engines do it",
    ),
)


def workloads_named(names: Iterable[str] | None, operations: Iterable[str] = ()) -> tuple[Workload, ...]:
    """The workloads of these names (all where none is given), of these operations (of all where none is given).

    Raises:
        ConfigurationError: an unknown name; names the nearest.
    """
    known = {each.name: each for each in WORKLOADS}
    for name in names or ():
        if name not in known:
            raise ConfigurationError(unknown_name("workload", name, known))
    wanted, of = set(names or known), set(operations)
    return tuple(each for each in WORKLOADS if each.name in wanted and (not of or each.operation in of))


class Spot(msgspec.Struct, frozen=True, kw_only=True):
    """One call to measure.

    Attributes:
        tokens: all of them; ``sequences``: how many share them.
        captured: replayed from a CUDA graph.
    """

    workload: Workload
    shape: Shape
    dtype: str
    tokens: int
    sequences: int
    captured: bool = False

    @property
    def features(self) -> frozenset[str]:
        """What the call uses."""
        return self.workload.features | ({"capture"} if self.captured else frozenset())

    def __str__(self) -> str:
        graph = ", captured" if self.captured else ""
        several = f" in {self.sequences}" if 1 < self.sequences < self.tokens else ""
        return f"{self.workload.name}{graph}, {self.shape}, {self.tokens:,} tokens{several}"


def call_of(
    workload: Workload,
    shape: Shape,
    device: str,
    *,
    dtype: str,
    state_dtype: str = "float32",
    captured: bool = False,
    more: Iterable[str] = (),
    tokens: int | None = None,
    sequences: int | None = None,
) -> Call:
    """The call as the resolver takes it.

    Raises:
        ConfigurationError: an unknown dtype or feature.
    """
    features = {*workload.features, *more, *(("capture",) if captured else ())}
    return make_call(
        workload.operation,
        device,
        dtype=dtype,
        gate_dtype="float64" if dtype == "float64" else "float32",
        state_dtype="float64" if dtype == "float64" else state_dtype,
        heads=shape.heads,
        value_heads=shape.value_heads,
        head_dim_k=shape.head_dim_k,
        head_dim_v=shape.head_dim_v,
        tokens=tokens,
        sequences=sequences,
        features=features,
    )


def spots(
    workloads: Iterable[Workload],
    shapes: Iterable[Shape],
    *,
    dtype: str,
    tokens: Sequence[int],
    batches: Sequence[int],
    sequences: Sequence[int],
    captured: bool,
) -> Iterator[Spot]:
    """Every call to measure, those of one head shape together: a kernel is compiled anew for each.

    Args:
        tokens: of prefill and training. batches: sequences of a decode step.
        sequences: how many share the tokens of a packed row; those with less than a token each are left out.
        captured: also as replays of a CUDA graph, where no gradients are taken.
    """
    for shape in dict.fromkeys(shapes):
        for workload in workloads:
            for graph in (False, True) if captured and not workload.trains else (False,):
                for size in sorted(set(batches if workload.decodes else tokens)):
                    for several in _sequences(workload, size, sequences):
                        yield Spot(
                            workload=workload,
                            shape=shape,
                            dtype=dtype,
                            tokens=size,
                            sequences=several,
                            captured=graph,
                        )


def _sequences(workload: Workload, tokens: int, sequences: Iterable[int]) -> list[int]:
    if workload.decodes:
        return [tokens]
    return [each for each in sorted(set(sequences)) if each <= tokens] if workload.packed else [1]


def most_telling_first(planned: Sequence[Spot]) -> list[Spot]:
    """The calls in an order in which what comes first says most, should there be no time for the rest.

    Gradients come last, since they compile kernels of their own. Head shapes are finished one by one, from the ends of
    their row inwards, and so are the sizes of each: the nearest point speaks for what was not measured.
    """
    shapes = _inwards(list(dict.fromkeys(each.shape for each in planned)))
    sizes: dict[Workload, dict[int, int]] = {}
    for workload in dict.fromkeys(each.workload for each in planned):
        sizes[workload] = _inwards(sorted({each.tokens for each in planned if each.workload == workload}))
    return sorted(
        planned, key=lambda each: (each.workload.trains, shapes[each.shape], sizes[each.workload][each.tokens])
    )


T = TypeVar("T")


def _inwards(row: Sequence[T]) -> dict[T, int]:
    """The place of each: the two ends, then what lies half-way between two that are there, and so on."""
    places = dict.fromkeys(range(0, len(row), max(len(row) - 1, 1)))
    step = len(row) - 1
    while len(places) < len(row):
        step = max(step // 2, 1)
        places.update(dict.fromkeys(range(0, len(row), step)))
    return {row[place]: rank for rank, place in enumerate(places)}


def workload_of(operation: str, features: Iterable[str]) -> Workload | None:
    """The workload whose kind of call it is."""
    kind = kind_features(features) - {"capture"}
    return next(
        (each for each in WORKLOADS if each.operation == operation and kind_features(each.features) == kind), None
    )
