"""Kernels for prefill and decode that share a state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import kernelreg
from kernelreg import ConfigurationError, NoBackendError
from tests.machines import machine

FEATURES = ["initial-state", "final-state", "state-v-first", "state-pool", "varlen"]


def backend(
    name: str, speedup: float, chunk: dict[str, Any] | None, recurrent: dict[str, Any] | None
) -> dict[str, Any]:
    """A backend with a row for each operation that it has; the dictionaries limit the states that a row takes."""
    rows = [
        {
            "operation": operation,
            "name": operation.partition(".")[2],
            "function": "run",
            "accepts": limits | {"features": FEATURES},
            "preference": [{"speedup": speedup, "source": "made up for a test"}],
        }
        for operation, limits in (("gdn.chunk", chunk), ("gdn.recurrent", recurrent))
        if limits is not None
    ]
    return {"schema": 1, "name": name, "adapter": f"{name}_adapter", "kernel": rows}


@pytest.fixture
def add() -> Iterator[Callable[..., None]]:
    """Registers backends for the test."""
    undo: list[Callable[[], None]] = []
    yield lambda *those: undo.extend(kernelreg.register(each) for each in those)
    for each in undo:
        each()


def test_without_conflict_each_operation_has_its_own_best() -> None:
    facts = machine("h200")
    pair = kernelreg.resolve_together(["gdn.chunk", "gdn.recurrent"], facts=facts, dtype="bfloat16", head_dim_k=128)
    alone = [kernelreg.resolve(name, facts=facts, dtype="bfloat16", head_dim_k=128) for name in pair]
    assert [each.backend for each in pair.values()] == [each.backend for each in alone]
    assert pair["gdn"] is pair["gdn.chunk"]
    assert (pair.state_dtype, pair.state_v_first) == ("float32", False)
    assert {"initial-state", "final-state"} <= pair["gdn.chunk"].call.features


def test_the_pair_is_best_where_the_best_two_differ_on_the_layout(add: Callable[..., None]) -> None:
    add(
        backend("left", 500, {"state_layout": ["k-first"]}, {"state_layout": ["k-first"]}),
        backend("right", 5000, None, {"state_layout": ["v-first"]}),
    )
    pair = kernelreg.resolve_together(facts=machine("cpu-only"))
    # left and left: 500 × 500; torch and right: 1 × 5000.
    assert [each.backend for each in pair.values()] == ["left", "left"]
    assert pair.state_layout == "k-first"
    (told,) = (each for each in pair.mismatches if each.kernels[1][1] == "right" and each.kernels[0][1] == "left")
    assert told.kernels == (("gdn.chunk", "left", "chunk"), ("gdn.recurrent", "right", "recurrent"))
    assert told.reason.code == "layout"
    assert "k-first for left chunk" in str(told)
    assert "v-first for right recurrent" in str(told)
    assert str(told) in pair.explain()
    rejected = next(each for each in pair["gdn.recurrent"].candidates if each.backend == "right")
    assert [str(each.code) for each in rejected.reasons] == ["layout"]


def test_float32_is_not_given_up_for_speed(add: Callable[..., None]) -> None:
    add(
        backend("half", 500, {"state_dtype": ["bfloat16"]}, {"state_dtype": ["bfloat16"]}),
        backend("wide", 0.5, None, {"state_dtype": ["float32"]}),
    )
    pair = kernelreg.resolve_together(facts=machine("cpu-only"))
    assert (pair.state_dtype, pair["gdn"].backend) == ("float32", "torch")
    codes = {(each.kernels[0][1], each.kernels[1][1]): str(each.reason.code) for each in pair.mismatches}
    assert codes == {("half", "wide"): "dtype"}
    asked = kernelreg.resolve_together(facts=machine("cpu-only"), state_dtype="bfloat16")
    assert (asked.state_dtype, asked["gdn"].backend, asked["gdn.recurrent"].backend) == ("bfloat16", "half", "half")


def test_what_an_operation_uses_is_its_own() -> None:
    features = {"gdn.recurrent": {"state-pool", "state-v-first"}, "gdn": {"varlen", "initial-state"}}
    pair = kernelreg.resolve_together(facts=machine("cpu-only"), features=features)
    assert pair["gdn.recurrent"].call.features == {"state-pool", "state-v-first"}
    assert pair["gdn"].call.features == {"varlen", "initial-state", "state-v-first"}


def test_as_data_it_says_the_same() -> None:
    pair = kernelreg.resolve_together(facts=machine("cpu-only"))
    data = pair.to_dict()
    assert data["resolutions"]["gdn.chunk"] == pair["gdn.chunk"].to_dict()
    assert (data["state_layout"], data["state_dtype"]) == (pair.state_layout, "float32")


def test_where_one_operation_has_nothing_all_reasons_are_told() -> None:
    with pytest.raises(NoBackendError) as caught:
        kernelreg.resolve_together(facts=machine("cpu-only"), policy=kernelreg.make_policy(disable="torch"))
    assert "gdn.chunk on cpu: no kernel fits" in str(caught.value)
    assert "gdn.recurrent on cpu: no kernel fits" in str(caught.value)


@pytest.mark.parametrize(
    ("operations", "options", "told"),
    [
        (["gdn"], {}, "two operations or more"),
        (["gdn", "gdn.chunk"], {}, "two operations or more"),
        (["gdn", "gdn.recurent"], {}, "did you mean 'gdn.recurrent'"),
        (["gdn", "gdn.recurrent"], {"features": {"gdn.chunks": {"varlen"}}}, "did you mean"),
        (["gdn", "gdn.recurrent"], {"features": {"gdn": {"varlenn"}}}, "did you mean 'varlen'"),
        (["gdn", "gdn.recurrent"], {"features": {"varlen"}}, "of each operation"),
        (["gdn", "gdn.recurrent"], {"head_dims_k": 128}, "did you mean 'head_dim_k'"),
        ("gdn", {}, "operations='gdn'; accepted: two operations or more"),
        (None, {}, "operations=None; accepted: two operations or more"),
        (5, {}, "operations=5; accepted: two operations or more"),
        (iter(["gdn"]), {}, r"operations=\['gdn'\]; accepted: two operations or more"),
        ([1, 2], {}, "unknown operation 1; accepted: gdn, gdn.chunk, gdn.recurrent"),
        ([["gdn"], "gdn.recurrent"], {}, r"unknown operation \['gdn'\]"),
        *(
            (
                ["gdn", "gdn.recurrent"],
                {"features": {"gdn": value}},
                rf"features\['gdn'\]={value!r}; accepted: a set of",
            )
            for value in ("varlen", None, 5)
        ),
        (["gdn", "gdn.recurrent"], {"features": {"gdn": [["varlen"]]}}, r"unknown feature \['varlen'\]; accepted"),
        (["gdn", "gdn.recurrent"], {"features": {5: {"varlen"}}}, "unknown operation 5"),
        (
            ["gdn", "gdn.recurrent"],
            {"features": {"gdn": {"varlen"}, "gdn.chunk": {"final-state"}}},
            "gdn.chunk is given twice; accepted: once",
        ),
        (["gdn", "gdn.recurrent"], {"policy": 5}, "policy=5; accepted: None, or what kernelreg.make_policy gives"),
        (["gdn", "gdn.recurrent"], {"facts": 5}, "facts=5; accepted: kernelreg.Facts, or the path"),
    ],
)
def test_wrong_words_are_named(operations: Any, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        kernelreg.resolve_together(operations, **{"facts": machine("cpu-only"), **options})


def test_a_pair_keeps_a_mappings_manners() -> None:
    pair = kernelreg.resolve_together(facts=machine("cpu-only"))
    assert "gdn" in pair
    assert "gdn.recurent" not in pair
    strangers: list[Any] = [5, None, ["gdn"]]
    assert not any(each in pair for each in strangers)
    assert pair.get("gdn.recurent") is None
    for error in (KeyError, ConfigurationError):
        with pytest.raises(error) as caught:
            pair["gdn.recurent"]
        assert str(caught.value).startswith("unknown operation 'gdn.recurent'; accepted: gdn, ")
        assert str(caught.value).endswith("did you mean 'gdn.recurrent'?")
