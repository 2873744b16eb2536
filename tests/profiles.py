"""Made-up profiles and lock files for tests: data only, nothing is measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kernelreg import Facts
from kernelreg.machine.setup import setup_of
from kernelreg.profile import Failure, Point, Profile, Timing

PACKAGES = ("flash-linear-attention", "flash-qla", "triton")
#: A Qwen3-Next layer.
SHAPE: dict[str, Any] = {"dtype": "bfloat16", "head_dim_k": 128, "head_dim_v": 128, "heads": 16, "value_heads": 32}


def point(times: Mapping[str, float], failed: Mapping[str, str] | None = None, **changes: Any) -> Point:
    """A point with the times of kernels, each named ``backend kernel``, in microseconds."""
    told: dict[str, Any] = {
        "operation": "gdn.chunk",
        "features": (),
        "tokens": 1024,
        "sequences": 1,
    }
    return Point(
        timings=tuple(
            Timing(**_row(name), median_us=micros, spread_us=micros / 50, repeats=5) for name, micros in times.items()
        ),
        failures=tuple(Failure(**_row(name), reason=reason) for name, reason in (failed or {}).items()),
        **{**told, **SHAPE, **changes},
    )


def _row(name: str) -> dict[str, str]:
    backend, _, kernel = name.partition(" ")
    return {"backend": backend, "kernel": kernel}


def profile(facts: Facts, points: Iterable[Point], device: str = "cuda:0") -> Profile:
    """A profile of the machine's device."""
    card = facts.device(device)
    assert card is not None
    setup = setup_of(facts, card, PACKAGES)
    return Profile(date="2026-12-04", fingerprint=facts.fingerprint, setup=setup, points=tuple(points))
