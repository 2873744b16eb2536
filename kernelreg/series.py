"""A profile's points as a person compares them: those of one kind and head shape together, by size."""

from __future__ import annotations

from typing import NamedTuple

from kernelreg.kinds import kind_features
from kernelreg.profile import Point, Profile, Row


class Series(NamedTuple):
    """Points that differ in their size alone, the smaller ones first, and the kernels that any of them has."""

    title: str
    points: tuple[Point, ...]
    rows: tuple[Row, ...]


def series_of(profile: Profile) -> list[Series]:
    """The profile's points, grouped, in the order in which they were measured."""
    groups: dict[tuple[object, ...], list[Point]] = {}
    for point in profile.points:
        shape = (point.heads, point.value_heads, point.head_dim_k, point.head_dim_v, point.dtype)
        several = point.sequences if "varlen" in point.features else 0
        kind = kind_features(point.features)
        groups.setdefault((point.operation, kind, frozenset(point.features), shape, several), []).append(point)
    found = []
    for points in groups.values():
        points.sort(key=lambda each: (each.tokens, each.sequences))
        rows = dict.fromkeys(each.row for point in points for each in point.timings)
        found.append(Series(_title(points[0]), tuple(points), tuple(rows)))
    return found


def _title(point: Point) -> str:
    sizes = f"{point.head_dim_k}" if point.head_dim_k == point.head_dim_v else f"{point.head_dim_k}, {point.head_dim_v}"
    several = f", {point.sequences} sequences" if "varlen" in point.features else ""
    heads = f"{point.heads} and {point.value_heads} heads of {sizes}"
    return f"{point.operation}: {point.kind}{several}; {heads}, {point.dtype}"
