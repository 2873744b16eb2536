"""tune on a real card: captured calls too, every kernel that is there, and a profile that ranks what it measured."""

from __future__ import annotations

from pathlib import Path

import pytest

import kernelreg
from kernelreg.cli import main
from kernelreg.kinds import kind_features
from kernelreg.profile import load_profile


def test_a_profile_made_here_ranks_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "card.json"
    words = ["tune", "gdn", "--heads", "4,8", "--tokens", "512", "--batch", "4", "--sequences", "2", "--no-verify"]
    assert main([*words, "--repeats", "3", "--seconds", "0.005", "--output", str(path)]) == 0
    made = load_profile(path)
    assert {"capture" in each.features for each in made.points} == {True, False}
    assert not [each for point in made.points for each in point.failures]
    monkeypatch.setenv("KERNELREG_PROFILE", str(path))
    kernelreg.refresh()
    for point in made.points:
        able = {each.row: each.median_us for each in point.timings}
        found = kernelreg.resolve(
            point.operation,
            dtype=point.dtype,
            gate_dtype="float32",
            heads=4,
            value_heads=8,
            head_dim_k=128,
            head_dim_v=128,
            tokens=point.tokens,
            sequences=point.sequences,
            features=point.features,
        )
        assert (found.backend, found.kernel) == min(able, key=lambda row: able[row]), kind_features(point.features)
