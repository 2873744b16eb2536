"""CUDA_VISIBLE_DEVICES as CUDA reads it, on machines as data; ``test_drivers.py`` has the drivers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelreg.machine import Device
from kernelreg.machine.visible import Card, select_visible


def device(uuid: str, **fields: Any) -> Device:
    """A card, or with ``mig`` an instance of one, by its UUID."""
    return Device(index=0, type="cuda", vendor="nvidia", uuid=uuid, **fields)


CARDS = [Card(device(uuid)) for uuid in ("GPU-aa11", "GPU-aa22", "GPU-bb33")]
MIG = [
    Card(device("GPU-aa11"), (device("MIG-1", mig=True), device("MIG-2", mig=True)), mig_enabled=True),
    Card(device("GPU-bb22")),
    Card(device("GPU-cc33"), (), mig_enabled=True),
]


def names(found: Sequence[Device]) -> list[str | None]:
    return [each.uuid for each in found]


# -- CUDA_VISIBLE_DEVICES --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "seen"),
    [
        (None, ["GPU-aa11", "GPU-aa22", "GPU-bb33"]),
        ("", []),
        ("  ", []),
        ("1", ["GPU-aa22"]),
        ("2,0", ["GPU-bb33", "GPU-aa11"]),
        (" 1 , 0 ", ["GPU-aa22", "GPU-aa11"]),
        ("+1", ["GPU-aa22"]),
        ("1gpu", ["GPU-aa22"]),
        ("1gpu2,2ampere", ["GPU-aa22", "GPU-bb33"]),
        ("GPU-aa22", ["GPU-aa22"]),
        ("GPU-b", ["GPU-bb33"]),
        ("GPU-bb33,GPU-aa11", ["GPU-bb33", "GPU-aa11"]),
    ],
)
def test_the_listed_cards_are_seen_in_the_lists_order(value: str | None, seen: list[str]) -> None:
    found, problems = select_visible(CARDS, value)
    assert names(found) == seen
    assert [each.index for each in found] == list(range(len(seen)))
    assert problems == []


@pytest.mark.parametrize(
    ("value", "seen", "invalid"),
    [
        ("-1", [], "-1"),
        ("0,-1,1", ["GPU-aa11"], "-1"),
        ("2,x,0", ["GPU-bb33"], "x"),
        ("0,,1", ["GPU-aa11"], ""),
        ("0,3,1", ["GPU-aa11"], "3"),
        ("99999999999999999999", [], "99999999999999999999"),
        ("GPU-a", [], "GPU-a"),
        ("GPU-", [], "GPU-"),
        ("1,GPU-dd", ["GPU-aa22"], "GPU-dd"),
        ("gpu-aa11", [], "gpu-aa11"),
        ("MIG-1", [], "MIG-1"),
        ("GPU-bb33,0", ["GPU-bb33"], "0"),
        ("0,GPU-bb33", ["GPU-aa11"], "GPU-bb33"),
        ("GPU-bb33, GPU-aa11", ["GPU-bb33"], "GPU-aa11"),
        ("NoDevFiles", [], "NoDevFiles"),
        ("\uff11", [], "\uff11"),  # a digit to Python, not to C
        ("0,\u0661", ["GPU-aa11"], "\u0661"),
        ("\xa00", [], "\xa00"),  # nor is this a space
    ],
)
def test_an_invalid_entry_ends_the_list_and_is_a_problem(value: str, seen: list[str], invalid: str) -> None:
    found, (problem,) = select_visible(CARDS, value)
    assert names(found) == seen
    assert problem.source == "CUDA_VISIBLE_DEVICES"
    assert problem.error.startswith(f"{invalid!r} in {value!r} names no card here")


@pytest.mark.parametrize("value", ["0,0", "1,2,1", "GPU-aa11,GPU-aa1", "1,1gpu", "GPU-b,GPU-bb33,x"])
def test_a_card_named_twice_hides_every_card(value: str) -> None:
    found, (problem,) = select_visible(CARDS, value)
    assert found == ()
    assert f"{value!r} names a card twice" in problem.error


@pytest.mark.parametrize(
    ("value", "seen"),
    [
        (None, ["MIG-1", "GPU-bb22"]),
        ("MIG-2", ["MIG-2"]),
        ("MIG-2,MIG-1", ["MIG-2", "MIG-1"]),
        ("0", ["MIG-1"]),
        ("GPU-aa", ["MIG-1"]),
        ("1,0", ["GPU-bb22", "MIG-1"]),
    ],
)
def test_mig_instances_go_by_their_uuid_and_a_card_stands_for_its_first(value: str | None, seen: list[str]) -> None:
    found, problems = select_visible(MIG, value)
    assert names(found) == seen
    assert [each.mig for each in found] == [name.startswith("MIG") for name in seen]
    assert problems == []


@pytest.mark.parametrize("value", ["MIG-", "2", "GPU-cc33", "MIG-3"])
def test_an_ambiguous_instance_or_a_card_without_one_is_a_problem(value: str) -> None:
    found, problems = select_visible(MIG, value)
    assert found == ()
    assert len(problems) == 1


def test_cards_that_tell_nothing_of_themselves_are_still_two() -> None:
    blank = [Card(Device(index=0, type="cuda")), Card(Device(index=0, type="cuda"))]
    found, problems = select_visible(blank, "1,0")
    assert ([each.index for each in found], problems) == ([0, 1], [])


ENTRY = st.sampled_from(["0", "1", "2", "-1", "GPU-a", "GPU-aa11", "MIG-", "MIG-2", "MIG-1", "", " ", "1x", "+0", "٣"])


@given(cards=st.sampled_from([CARDS, MIG, [], CARDS[:1]]), value=st.text() | st.lists(ENTRY).map(",".join))
def test_any_value_gives_distinct_devices_numbered_from_zero(cards: list[Card], value: str) -> None:
    found, problems = select_visible(cards, value)
    assert [each.index for each in found] == list(range(len(found)))
    assert len(set(names(found))) == len(found)
    there = {each.uuid for card in cards for each in (card.device, *card.instances)}
    assert set(names(found)) <= there
    # Whatever was asked for and is not seen has been said.
    assert problems or len(found) == len(value.split(",") if value.strip() else [])
