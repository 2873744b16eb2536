"""Devices: CUDA_VISIBLE_DEVICES as CUDA reads it, and what NVML answers or does not."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelreg.machine import Device, Driver, Problem
from kernelreg.machine.nvml import Reading, read_nvml
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
        ("GPU-bb33,0", ["GPU-bb33", "GPU-aa11"]),
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
        ("NoDevFiles", [], "NoDevFiles"),
    ],
)
def test_an_invalid_entry_ends_the_list_and_is_a_problem(value: str, seen: list[str], invalid: str) -> None:
    found, (problem,) = select_visible(CARDS, value)
    assert names(found) == seen
    assert problem.source == "CUDA_VISIBLE_DEVICES"
    assert problem.error.startswith(f"{invalid!r} in {value!r} names no card here")


@pytest.mark.parametrize("value", ["0,0", "1,2,1", "GPU-aa11,0", "1,1gpu", "2,GPU-b,x"])
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
        ("1,MIG-2", ["GPU-bb22", "MIG-2"]),
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


# -- NVML ------------------------------------------------------------------------------------------------------


class NVMLError(Exception):
    pass


class FakeNvml:
    """As much of ``pynvml`` as is asked for. A card's missing key, like a broken query, answers NOT_SUPPORTED."""

    NVMLError = NVMLError
    NVML_DEVICE_MIG_ENABLE = 1

    def __init__(self, *cards: dict[str, Any], broken: Sequence[str] = (), as_bytes: bool = False) -> None:
        self.cards, self.broken, self.as_bytes = cards, broken, as_bytes
        self.opened = 0

    def nvmlInit(self) -> None:  # noqa: N802  (NVML's name, as are those below)
        self._answer("nvmlInit")
        self.opened += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.opened -= 1
        self._answer("nvmlShutdown")

    def _answer(self, function: str, value: Any = "") -> Any:
        if function in self.broken or value is None:
            raise NVMLError("Not Supported")
        return value.encode() if self.as_bytes and isinstance(value, str) else value

    def __getattr__(self, function: str) -> Any:
        simple = {
            "nvmlSystemGetDriverVersion": "580.95",
            "nvmlSystemGetCudaDriverVersion_v2": 13000,
            "nvmlDeviceGetCount": len(self.cards),
        }
        if function in simple:
            return lambda: self._answer(function, simple[function])
        field = {
            "nvmlDeviceGetCudaComputeCapability": "capability",
            "nvmlDeviceGetName": "name",
            "nvmlDeviceGetUUID": "uuid",
            "nvmlDeviceGetNumGpuCores": "cores",
            "nvmlDeviceGetMigMode": "mig",
            "nvmlDeviceGetMaxMigDeviceCount": "places",
        }
        if function in field:
            return lambda handle: self._answer(function, handle.get(field[function]))
        if function == "nvmlDeviceGetHandleByIndex":
            return lambda index: self._answer(function, self.cards[index])
        if function == "nvmlDeviceGetPciInfo":
            return lambda handle: SimpleNamespace(busId=self._answer(function, handle.get("bus")))
        if function == "nvmlDeviceGetMemoryInfo":
            return lambda handle: SimpleNamespace(total=self._answer(function, handle.get("memory")))
        if function == "nvmlDeviceGetMigDeviceHandleByIndex":
            return lambda parent, place: self._answer(function, parent["instances"][place])
        if function == "nvmlDeviceGetAttributes":
            return lambda handle: SimpleNamespace(multiprocessorCount=self._answer(function, handle.get("sms")))
        raise AttributeError(function)


def card(bus: str, **changes: Any) -> dict[str, Any]:
    """An H200 as NVML tells of it."""
    uuid = f"GPU-{bus}"
    card = {
        "capability": (9, 0),
        "name": "NVIDIA H200",
        "uuid": uuid,
        "cores": 132 * 128,
        "memory": 150 << 30,
        "bus": bus,
    }
    return {**card, **changes}


@pytest.mark.parametrize("as_bytes", [False, True])
def test_nvml_lists_cards_by_bus_id_whatever_their_number_and_form_of_text(as_bytes: bool) -> None:
    fake = FakeNvml(card("00:C1"), card("00:06"), card("00:4A"), as_bytes=as_bytes)
    reading = read_nvml(fake)
    assert reading.driver == Driver(version="580.95", cuda="13.0")
    assert [each.device.pci_bus_id for each in reading.cards or ()] == ["00:06", "00:4A", "00:C1"]
    assert (reading.cards or ())[0].device == device(
        "GPU-00:06",
        name="NVIDIA H200",
        pci_bus_id="00:06",
        compute_capability="9.0",
        memory_bytes=150 << 30,
        multiprocessors=132,
    )
    assert reading.problems == ()
    assert fake.opened == 0


@pytest.mark.parametrize(
    ("function", "field", "what"),
    [
        ("nvmlDeviceGetCudaComputeCapability", "compute_capability", "device 0 capability"),
        ("nvmlDeviceGetPciInfo", "pci_bus_id", "device 0 PCI"),
        ("nvmlDeviceGetName", "name", "device 0 name"),
        ("nvmlDeviceGetUUID", "uuid", "device 0 UUID"),
        ("nvmlDeviceGetMemoryInfo", "memory_bytes", "device 0 memory"),
        ("nvmlDeviceGetNumGpuCores", "multiprocessors", "device 0 cores"),
    ],
)
def test_a_query_that_nvml_does_not_support_costs_its_field_alone(function: str, field: str, what: str) -> None:
    reading = read_nvml(FakeNvml(card("00:06"), broken=[function]))
    (found,) = reading.cards or ()
    assert getattr(found.device, field) is None
    (whole,) = read_nvml(FakeNvml(card("00:06"))).cards or ()
    derived = {"multiprocessors"} if field == "compute_capability" else set()
    kept = {
        name for name in whole.device.__struct_fields__ if getattr(whole.device, name) == getattr(found.device, name)
    }
    assert kept == set(whole.device.__struct_fields__) - {field} - derived
    assert reading.problems == (Problem(source="nvml", error=f"{what}: Not Supported"),)


def test_a_lost_card_costs_itself_and_a_driver_without_version_its_version() -> None:
    broken = ["nvmlSystemGetDriverVersion", "nvmlSystemGetCudaDriverVersion_v2", "nvmlDeviceGetHandleByIndex"]
    reading = read_nvml(FakeNvml(card("00:06"), broken=broken))
    assert (reading.driver, reading.cards) == (Driver(), ())
    assert [each.error.partition(":")[0] for each in reading.problems] == ["CUDA version", "driver version", "device 0"]


def test_nvml_lists_mig_instances_below_their_card() -> None:
    instances = [{"uuid": "MIG-1", "name": "MIG 1g", "memory": 16 << 30, "sms": 16}, None, {"uuid": "MIG-2"}]
    reading = read_nvml(FakeNvml(card("00:06", mig=(1, 1), places=3, instances=instances), card("00:07", mig=(0, 1))))
    first, second = reading.cards or ()
    assert (first.mig_enabled, second.mig_enabled, second.instances) == (True, False, ())
    assert first.instances == (
        device(
            "MIG-1",
            name="MIG 1g",
            pci_bus_id="00:06",
            compute_capability="9.0",
            memory_bytes=16 << 30,
            multiprocessors=16,
            mig=True,
        ),
        device("MIG-2", pci_bus_id="00:06", compute_capability="9.0", mig=True),
    )
    assert "device 0 MIG 2 memory: Not Supported" in [each.error for each in reading.problems]


def test_an_nvml_that_does_not_start_is_a_problem() -> None:
    reading = read_nvml(FakeNvml(card("00:06"), broken=["nvmlInit"]))
    assert reading == Reading(None, None, (Problem(source="nvml", error="Not Supported"),))


def test_a_foreign_module_of_that_name_is_a_problem() -> None:
    foreign = SimpleNamespace(nvmlInit=lambda: None, nvmlShutdown=lambda: None, NVMLError=NVMLError)
    reading = read_nvml(foreign)
    assert (reading.driver, reading.cards) == (None, None)
    assert [problem.source for problem in reading.problems] == ["nvml"]


def test_an_nvml_that_does_not_shut_down_has_answered_all_the_same() -> None:
    reading = read_nvml(FakeNvml(card("00:06"), broken=["nvmlShutdown"]))
    assert len(reading.cards or ()) == 1
