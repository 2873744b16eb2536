"""A measured profile: how long each kernel took on one card, kept as a JSON file, and what it says of a call.

Which measured point speaks for a call: one of the same operation, dtype, head sizes and kind (dense or packed, forward
or with gradients, eager or captured, with a pool of states or without). Of those the one with the nearest numbers of
heads, then the fewest other features that differ, then the nearest number of tokens, then of sequences; near is a small
ratio, and of what the call does not say the largest counts. Where there is no such point, the profile says nothing.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from kernelreg._version import __version__
from kernelreg.call import Call
from kernelreg.decoding import ONE_LINE, read_json
from kernelreg.errors import ConfigurationError, unknown_name
from kernelreg.kinds import kind_features, told_kind
from kernelreg.machine.model import Device, Facts
from kernelreg.machine.setup import Setup
from kernelreg.ops import operation_named
from kernelreg.registry import Registry
from kernelreg.writing import write_whole

#: Some ten thousand points of a few kernels each.
MAX_BYTES = 4 << 20

Count = Annotated[int, msgspec.Meta(ge=1, le=2**53)]
Microseconds = Annotated[float, msgspec.Meta(gt=0, le=1e12)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=100, pattern=ONE_LINE)]
Text = Annotated[str, msgspec.Meta(max_length=1000, pattern=ONE_LINE)]

#: A kernel: backend and row.
Row = tuple[str, str]


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class _OfKernel(_Record, frozen=True, kw_only=True):
    backend: Name
    kernel: Name

    @property
    def row(self) -> Row:
        """Which kernel."""
        return self.backend, self.kernel


class Timing(_OfKernel, frozen=True, kw_only=True):
    """One kernel at one point, in microseconds a call.

    Attributes:
        median_us: of the repeats.
        spread_us: the slowest repeat less the fastest.
        repeats: how many there were.
    """

    median_us: Microseconds
    spread_us: Annotated[float, msgspec.Meta(ge=0, le=1e12)]
    repeats: Count


class Failure(_OfKernel, frozen=True, kw_only=True):
    """A kernel that was to be measured at a point, and why there is no time of it. It ranks last there."""

    reason: Text


class Point(_Record, frozen=True, kw_only=True):
    """One call that was measured.

    Attributes:
        heads, value_heads, head_dim_k, head_dim_v: H, HV, K and V.
        features: what the call used; ``capture`` for a replay of a CUDA graph.
        tokens: B × T, all tokens of the call.
        sequences: N.
    """

    operation: Name
    dtype: Literal["bfloat16", "float16", "float32", "float64"]
    heads: Count
    value_heads: Count
    head_dim_k: Count
    head_dim_v: Count
    features: tuple[Name, ...]
    tokens: Count
    sequences: Count
    timings: tuple[Timing, ...] = ()
    failures: tuple[Failure, ...] = ()

    def __post_init__(self) -> None:
        try:
            operation = operation_named(self.operation)
        except ConfigurationError as error:
            raise ValueError(str(error)) from None
        if self.operation != operation.name:
            raise ValueError(f"operation {self.operation!r}; accepted: its full name, {operation.name}")
        for feature in self.features:
            if feature not in operation.features:
                raise ValueError(unknown_name("feature", feature, operation.features))
        seen: set[Row] = set()
        for row in (each.row for each in self.all):
            if row in seen:
                raise ValueError(f"{row[0]} {row[1]} is there twice; accepted: one timing or failure of a kernel")
            seen.add(row)

    @property
    def all(self) -> tuple[Timing | Failure, ...]:
        """What came of every kernel that was to be measured."""
        return (*self.timings, *self.failures)

    @property
    def place(self) -> tuple[object, ...]:
        """All that tells the point from another of its profile."""
        shape = (self.heads, self.value_heads, self.head_dim_k, self.head_dim_v)
        return (self.operation, self.dtype, frozenset(self.features), *shape, self.tokens, self.sequences)

    @property
    def kind(self) -> str:
        """In words: ``dense, forward, eager``."""
        return told_kind(self.features)

    @property
    def size(self) -> str:
        """``1,024 tokens``, and in how many sequences where they are several of more than one token."""
        several = f" in {self.sequences:,} sequences" if 1 < self.sequences < self.tokens else ""
        return f"{self.tokens:,} token{'s' if self.tokens > 1 else ''}{several}"


class Profile(_Record, frozen=True, kw_only=True):
    """All that was measured on one card.

    Attributes:
        kernelreg: the release that measured.
        date: of the day, such as ``2026-12-04``.
        fingerprint: of the facts of the machine that measured. What has to be the same elsewhere is ``setup`` alone.
    """

    schema: Literal[1] = 1
    kernelreg: Name = __version__
    date: Name
    fingerprint: Name
    setup: Setup
    points: tuple[Point, ...] = ()

    def __post_init__(self) -> None:
        seen: set[object] = set()
        for point in self.points:
            if point.place in seen:
                raise ValueError(f"points: {point.operation}, {point.kind}, {point.size} of one shape are there twice")
            seen.add(point.place)

    def adding(self, points: Iterable[Point]) -> Profile:
        """With more points, each in the place of what was there of the same call."""
        known = {each.place: each for each in (*self.points, *points)}
        return msgspec.structs.replace(self, points=tuple(known.values()))

    def to_json(self) -> str:
        """The text of a profile's file, a line a point."""
        head = msgspec.json.format(msgspec.json.encode(msgspec.structs.replace(self, points=())), indent=1).decode()
        before, _, after = head.rpartition("[]")
        points = ",\n  ".join(msgspec.json.encode(each).decode() for each in self.points)
        return f"{before}[\n  {points}\n ]{after}" if points else head

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile's file, whole or not at all.

        Raises:
            ConfigurationError: it cannot be written; names it and the cause.
        """
        write_whole(path, self.to_json() + "\n", ConfigurationError)


def load_profile(path: str | os.PathLike[str]) -> Profile:
    """Read a profile.

    Raises:
        ConfigurationError: unreadable, not JSON, an unknown or missing key, a value out of range; names file and key.
    """
    return read_json(Path(path), Profile, ConfigurationError, limit=MAX_BYTES)


class Evidence:
    """A profile as the resolver asks it.

    Args:
        profile: what was measured.
        name: what explanations call it, such as its path.
    """

    def __init__(self, profile: Profile, name: str) -> None:
        self.profile = profile
        self.name = name
        #: Each kernel that it has a time of, or that failed, once, with its operation.
        self.rows = tuple(dict.fromkeys((point.operation, each.row) for point in profile.points for each in point.all))
        groups: dict[tuple[object, ...], list[Point]] = {}
        for point in profile.points:
            if point.timings:
                groups.setdefault(point.place[:-2], []).append(point)
        #: By operation and kind: points that differ in their sizes alone, together.
        self._groups: dict[tuple[str, frozenset[str]], list[list[Point]]] = {}
        for points in groups.values():
            key = (points[0].operation, kind_features(points[0].features))
            self._groups.setdefault(key, []).append(points)

    def speaks_of(self, device: Device | None) -> bool:
        """Whether the device is a card like the one that was measured."""
        return self.profile.setup.is_of(device)

    def point(self, call: Call, facts: Facts) -> Point | None:
        """The measured point that speaks for the call, or None."""
        if not self.speaks_of(facts.device(call.device)):
            return None
        groups = self._groups.get((call.operation, kind_features(call.features)), [])
        exact = [(name, wanted) for name in ("dtype", "head_dim_k", "head_dim_v") if (wanted := getattr(call, name))]
        fitting = [each for each in groups if all(getattr(each[0], name) == wanted for name, wanted in exact)]
        if not fitting:
            return None
        found = min(fitting, key=lambda each: _distance(each[0], call))
        tokens = nearest_size(call.tokens, (each.tokens for each in found))
        found = [each for each in found if each.tokens == tokens]
        sequences = nearest_size(call.sequences, (each.sequences for each in found))
        return next(each for each in found if each.sequences == sequences)

    def told(self, point: Point, call: Call) -> str:
        """Where the evidence stands: ``PROFILE at 1,024 tokens``, and the heads where they are not the call's."""
        own = all(getattr(call, name) in (None, getattr(point, name)) for name in ("heads", "value_heads"))
        heads = "" if own else f", {point.heads} and {point.value_heads} heads"
        return f"{self.name} at {point.size}{heads}"

    def edges(self, operation: str) -> tuple[set[int], set[int]]:
        """The numbers of tokens, and of sequences, at which another point may become the nearest."""
        groups = [each for (name, _), those in self._groups.items() if name == operation for each in those]
        tokens: set[int] = set()
        sequences: set[int] = set()
        for points in groups:
            several: dict[int, set[int]] = {}
            for point in points:
                several.setdefault(point.tokens, set()).add(point.sequences)
            tokens |= _edges(several)
            sequences = sequences.union(*map(_edges, several.values()))
        return tokens, sequences


def _distance(point: Point, call: Call) -> tuple[object, ...]:
    """How far a group's call is from the one that is asked for, sizes aside; no two groups are equally far."""
    sizes = ((call.value_heads, point.value_heads), (call.heads, point.heads))
    return (
        sum(abs(math.log(max(wanted, 1) / there)) for wanted, there in sizes if wanted is not None),
        -point.value_heads,
        -point.heads,
        len(call.features.symmetric_difference(point.features)),
        point.dtype,
        -point.head_dim_k,
        -point.head_dim_v,
        sorted(point.features),
    )


def nearest_size(wanted: int | None, sizes: Iterable[int]) -> int:
    """The size nearest to what is wanted, by ratio: of two equally near the smaller one, and for None the largest."""
    first, *rest = sorted(set(sizes))
    for size in rest:
        if wanted is None or wanted * wanted > first * size:
            first = size
    return first


def _edges(sizes: Iterable[int]) -> set[int]:
    """The first number that is nearer to the larger one, of each two neighbours."""
    return {math.isqrt(one * other) + 1 for one, other in pairwise(sorted(sizes))}


def check_names(evidence: Evidence, registry: Registry) -> None:
    """See that every kernel of the profile is there.

    Raises:
        ConfigurationError: a backend or kernel that is not; names the nearest.
    """
    for operation, (backend, kernel) in evidence.rows:
        if backend not in registry.names():
            raise ConfigurationError(unknown_name("backend", backend, registry.names()))
        kernels = [each.name for owner, each in registry.kernels(operation) if owner.name == backend]
        if kernel not in kernels:
            raise ConfigurationError(unknown_name(f"kernel of {backend} for {operation}", kernel, kernels))


def timings_of(point: Point | None) -> Mapping[Row, Timing]:
    """The point's timings by kernel."""
    return {} if point is None else {each.row: each for each in point.timings}


def told_time(micros: float) -> str:
    """A time for a person: ``41.2 µs``, ``1,234 µs``."""
    return f"{micros:,.0f} µs" if micros >= 100 else f"{micros:.3g} µs"
