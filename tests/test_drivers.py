"""Machines with NVIDIA cards, as stub libraries tell of them: which devices are seen, and what is said of the rest."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kernelreg import Facts
from kernelreg.machine import Device, Driver, TorchBuild
from tests.machines import decided
from tests.stub_drivers import DRIVER, H200, LIBRARIES, RTX5090, card, detected, environment, instance, rule, uuid


@dataclasses.dataclass(frozen=True)
class Case:
    """A machine.

    Attributes:
        lines: of the stubs' file, after the driver's.
        devices: the UUIDs' first digits, in the order of the facts.
        said: all problems in the facts.
        pynvml: the text of a module of that name that is found before nvidia-ml-py's.
        hangs: who is not waited for as long as the others, since no answer will come.
    """

    name: str
    lines: tuple[str, ...]
    devices: str
    said: tuple[str, ...] = ()
    environ: Mapping[str, str] = dataclasses.field(default_factory=dict)
    libraries: tuple[str, ...] = tuple(LIBRARIES)
    driver: str = DRIVER
    hangs: tuple[str, ...] = ()
    pynvml: str | None = None
    interpreter: str = sys.executable


#: NVML's order is not the bus's: bb33, aa11, aa22 by bus.
ALIKE = (card("aa11", 0x4A), card("aa22", 0xC1), card("bb33", 0x06))
#: The slow card is the first of the bus, and of NVML.
MIXED = (card("aa11", 0x01), card("bb22", 0x02, RTX5090))
MIG = (card("aa11", 0x01, mig=1), card("bb22", 0x02, mig=0), instance(0, "cc33"), instance(0, "cc44"))
ONE = (card("aa11", 0x06),)
TWO = (*ONE, card("bb22", 0x07))
NO_NVML = "nvml: libnvidia-ml.so.1: cannot open shared object file: No such file or directory"
NO_CUDA = "cuda-driver: libcuda.so.1: cannot open shared object file: No such file or directory"
BUS_ORDER = "cuda-order: the CUDA driver does not say how it numbers these cards: listed by PCI bus id"
PCI_ORDER = f"{BUS_ORDER}; set CUDA_DEVICE_ORDER=PCI_BUS_ID to make it so"
DEAD_CUDA = (rule("cuInit", 999),)
DEAD = "cuda-driver: CUDA driver error 999: the stub's error"


def visible(value: str) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": value}


def unseen(entry: str, value: str) -> str:
    return f"CUDA_VISIBLE_DEVICES: {entry!r} in {value!r} names no card here; CUDA ignores it and all behind it"


def twice(value: str) -> str:
    return f"CUDA_VISIBLE_DEVICES: {value!r} names a card twice, and CUDA then shows none"


def unsupported(*whats: str, error: str = "Not Supported", of: int = 0) -> tuple[str, ...]:
    return tuple(f"nvml: device {of} {what}: {error}" for what in whats)


QUERIES = {
    "nvmlDeviceGetCudaComputeCapability": "capability",
    "nvmlDeviceGetPciInfo_v3": "PCI",
    "nvmlDeviceGetMemoryInfo": "memory",
    "nvmlDeviceGetName": "name",
    "nvmlDeviceGetUUID": "UUID",
    "nvmlDeviceGetNumGpuCores": "cores",
}
JETSON = tuple(rule(function, 3) for function in QUERIES)
LOST = tuple(rule(function, 15, 0) for function in ("nvmlDeviceGetHandleByIndex_v2",))
NO_MIG_ORDER = (*MIG, *DEAD_CUDA)

CASES = [
    # -- order ---------------------------------------------------------------------------------------------------
    Case("cards that are alike, NVML in another order", ALIKE, "bb33 aa11 aa22"),
    Case("different cards: the fastest first", MIXED, "bb22 aa11"),
    Case("different cards, FASTEST_FIRST", MIXED, "bb22 aa11", environ={"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}),
    Case("different cards, PCI_BUS_ID", MIXED, "aa11 bb22", environ={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}),
    Case("different cards, an order that CUDA does not know", MIXED, "bb22 aa11", environ={"CUDA_DEVICE_ORDER": "x"}),
    Case("different cards, the second alone", MIXED, "aa11", environ=visible("1")),
    Case("different cards, a CUDA driver that fails", (*MIXED, *DEAD_CUDA), "aa11 bb22", (DEAD, PCI_ORDER)),
    # -- CUDA_VISIBLE_DEVICES ------------------------------------------------------------------------------------
    Case("indices", ALIKE, "aa22 bb33", environ=visible("2,0")),
    Case("indices with more behind them", ALIKE, "aa11 aa22", environ=visible(" 1gpu2,+2ampere")),
    Case("UUIDs", ALIKE, "aa22 aa11", environ=visible(f"{uuid('aa22')},{uuid('aa11')}")),
    Case("a prefix of one card's UUID", ALIKE, "aa22 bb33", environ=visible("GPU-aa2,GPU-b")),
    Case("a prefix of two cards' UUIDs", ALIKE, "", (unseen("GPU-aa", "GPU-aa"),), visible("GPU-aa")),
    Case("no card: an empty value", ALIKE, "", environ=visible("")),
    Case("no card: -1", ALIKE, "", (unseen("-1", "-1"),), visible("-1")),
    Case("no card: a word", ALIKE, "", (unseen("NoDevFiles", "NoDevFiles"),), visible("NoDevFiles")),
    Case("an index that is no card's", ALIKE, "", (unseen("7", "7"),), visible("7")),
    Case("an invalid entry in the middle", ALIKE, "aa22", (unseen("x", "2,x,0"),), visible("2,x,0")),
    Case("a negative entry in the middle", ALIKE, "bb33", (unseen("-1", "0,-1,1"),), visible("0,-1,1")),
    Case("an index twice", ALIKE, "", (twice("1,1"),), visible("1,1")),
    Case("a UUID twice", ALIKE, "", (twice("GPU-b,GPU-bb"),), visible("GPU-b,GPU-bb")),
    Case("an index behind a UUID", ALIKE, "bb33", (unseen("0", "GPU-b,0"),), visible("GPU-b,0")),
    Case("a UUID behind an index", ALIKE, "bb33", (unseen("GPU-aa1", "0,GPU-aa1"),), visible("0,GPU-aa1")),
    Case(
        "an invalid entry, a CUDA driver that fails",
        (*ALIKE, *DEAD_CUDA),
        "aa22",
        (DEAD, unseen("x", "2,x,0")),
        visible("2,x,0"),
    ),
    # -- MIG -----------------------------------------------------------------------------------------------------
    Case("MIG on one of two cards", MIG, "cc33"),
    Case("a MIG instance by its UUID", MIG, "cc44", environ=visible(uuid("MIG-cc44"))),
    Case("a MIG instance by a prefix", MIG, "cc33", environ=visible("MIG-cc3")),
    Case("MIG instances, of which CUDA shows the first alone", MIG, "cc44", environ=visible("MIG-cc4,MIG-cc3")),
    Case("a prefix of two MIG instances", MIG, "", (unseen("MIG-cc", "MIG-cc"),), visible("MIG-cc")),
    Case("the card without MIG", MIG, "bb22", environ=visible("1")),
    Case("MIG, and a CUDA driver that fails", NO_MIG_ORDER, "cc33 bb22", (DEAD, BUS_ORDER)),
    # -- NVML ----------------------------------------------------------------------------------------------------
    Case("no driver", (), "", (NO_NVML, NO_CUDA), libraries=()),
    Case("no NVML (Jetson, WSL)", TWO, "aa11 bb22", (NO_NVML,), libraries=("cuda",)),
    Case("no NVML, the second card alone", TWO, "bb22", (NO_NVML,), visible("1"), ("cuda",)),
    Case("no NVML, no card visible", TWO, "", (NO_NVML,), visible("-1"), ("cuda",)),
    Case("NVML that does not start", (*ONE, rule("nvmlInitWithFlags", 9)), "aa11", ("nvml: Driver Not Loaded",)),
    Case(
        "NVML of another release than the kernel's driver",
        (*ONE, rule("nvmlInitWithFlags", 18), rule("cuInit", 803)),
        "",
        ("nvml: RM has detected an NVML/RM version mismatch.", "cuda-driver: CUDA driver error 803: the stub's error"),
    ),
    Case(
        "NVML that hangs when it starts",
        (*ONE, rule("nvmlInitWithFlags", "hang")),
        "aa11",
        ("nvml: no answer within 0.3 s",),
        hangs=("nvml",),
    ),
    Case(
        "NVML that hangs at one card",
        (*TWO, rule("nvmlDeviceGetMemoryInfo", "hang", 1)),
        "aa11 bb22",
        ("nvml: no answer within 0.3 s",),
        hangs=("nvml",),
    ),
    Case(
        "NVML that crashes",
        (*ONE, rule("nvmlDeviceGetName", "crash")),
        "aa11",
        ("nvml: the library ended its process: SIGSEGV",),
    ),
    Case(
        "a module pynvml that is another's",
        ONE,
        "aa11",
        ("nvml: module 'pynvml' has no attribute 'nvmlInit'",),
        pynvml="",
    ),
    Case(
        "a module pynvml that cannot be imported",
        ONE,
        "aa11",
        ("nvml: no such thing",),
        pynvml="raise ImportError('no such thing')",
    ),
    Case(
        "NVML's library ends the process that loads it",
        (*ONE, rule("loadNvml", "crash")),
        "aa11",
        ("nvml: the library ended its process: SIGSEGV",),
    ),
    Case(
        "NVML's library hangs the process that loads it",
        (*ONE, rule("loadNvml", "hang")),
        "aa11",
        ("nvml: no answer within 0.3 s",),
        hangs=("nvml",),
    ),
    Case(
        "NVML that prints without end",
        (*ONE, rule("nvmlInitWithFlags", "babble")),
        "aa11",
        ("nvml: no answer within 0.3 s",),
        hangs=("nvml",),
    ),
    Case("NVML that leaves a process behind", (*ONE, rule("nvmlInitWithFlags", "helper")), "aa11"),
    Case("NVML that prints", (*ONE, rule("nvmlInitWithFlags", "print")), "aa11"),
    Case("NVML that does not shut down", (*ONE, rule("nvmlShutdown", 999)), "aa11"),
    Case(
        "NVML that does not count the cards",
        (*ONE, rule("nvmlDeviceGetCount_v2", 999)),
        "aa11",
        ("nvml: device count: Unknown Error",),
    ),
    *(
        Case(f"NVML without {what}", (*ONE, rule(function, 3)), "aa11", unsupported(what))
        for function, what in QUERIES.items()
    ),
    Case("NVML that supports no query (Jetson)", (*ONE, *JETSON), "aa11", unsupported(*QUERIES.values())),
    Case(
        "NVML that supports no query, and no CUDA driver",
        (*ONE, *JETSON, *DEAD_CUDA),
        "-",
        (*unsupported(*QUERIES.values()), DEAD, BUS_ORDER),
    ),
    Case(
        "a card that is lost",
        (*TWO, *LOST, rule("cuInit", 999)),
        "bb22",
        ("nvml: device 0: GPU is lost", DEAD, BUS_ORDER),
    ),
    Case(
        "a card that is lost to each query",
        (*TWO, *(rule(function, 15, 0) for function in QUERIES)),
        "aa11 bb22",
        unsupported(*QUERIES.values(), error="GPU is lost"),
    ),
    # -- the CUDA driver -----------------------------------------------------------------------------------------
    Case(
        "NVML without the CUDA driver's library (a container with the driver's utilities alone)",
        TWO,
        "",
        (
            f"{NO_CUDA}; CUDA sees none of NVML's 2 cards; in a container, NVIDIA_DRIVER_CAPABILITIES must have "
            "compute in it",
        ),
        libraries=("nvml",),
    ),
    Case("a CUDA driver that does not start", (*ONE, *DEAD_CUDA), "", (NO_NVML, DEAD), libraries=("cuda",)),
    Case(
        "a CUDA driver that hangs",
        (*MIXED, rule("cuInit", "hang")),
        "aa11 bb22",
        ("cuda-driver: no answer within 0.3 s", PCI_ORDER),
        hangs=("cuda",),
    ),
    Case(
        "a CUDA driver that crashes",
        (*MIXED, rule("cuInit", "crash")),
        "aa11 bb22",
        ("cuda-driver: the library ended its process: SIGSEGV", PCI_ORDER),
    ),
    Case(
        "NVML and the CUDA driver hang",
        (*ONE, rule("nvmlInitWithFlags", "hang"), rule("cuInit", "hang")),
        "",
        ("nvml: no answer within 0.3 s", "cuda-driver: no answer within 0.3 s"),
        hangs=("nvml", "cuda"),
    ),
    Case(
        "the CUDA driver's library ends the process that loads it",
        (*ONE, rule("loadCuda", "crash")),
        "",
        ("cuda-driver: the library ended its process: SIGSEGV; CUDA sees none of NVML's 1 card",),
    ),
    Case(
        "the CUDA driver's library hangs the process that loads it",
        (*ONE, rule("loadCuda", "hang")),
        "",
        ("cuda-driver: no answer within 0.3 s; CUDA sees none of NVML's 1 card",),
        hangs=("nvml",),
    ),
    Case("a CUDA driver that leaves a process behind", (*MIXED, rule("cuInit", "helper")), "bb22 aa11"),
    Case("a CUDA driver that prints", (*MIXED, rule("cuInit", "print")), "bb22 aa11"),
    Case(
        "a CUDA driver that sees no card",
        (*MIXED, rule("cuInit", 100)),
        "",
        ("cuda-driver: shows none of NVML's 2 cards",),
    ),
    Case(
        "a CUDA driver that does not know a card's memory and name",
        (*ONE, rule("cuDeviceTotalMem_v2", 999), rule("cuDeviceGetName", 999)),
        "aa11",
        (
            NO_NVML,
            "cuda-driver: device 0 name: CUDA driver error 999: the stub's error",
            "cuda-driver: device 0 memory: CUDA driver error 999: the stub's error",
        ),
        libraries=("cuda",),
    ),
    Case("a driver older than torch's CUDA", ONE, "aa11", driver="driver 470.199.02 11040"),
    # -- the interpreter -----------------------------------------------------------------------------------------
    Case(
        "an interpreter that cannot start another (embedded, frozen)",
        ONE,
        "",
        tuple(
            f"{source}: not asked: this interpreter cannot start another (sys.executable names none)"
            for source in ("nvml", "cuda-driver")
        ),
        interpreter="",
    ),
    Case(
        "an interpreter that is gone",
        ONE,
        "",
        tuple(
            f"{source}: no child process: [Errno 2] No such file or directory: '/nonexistent/python'"
            for source in ("nvml", "cuda-driver")
        ),
        interpreter="/nonexistent/python",
    ),
]


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Facts]:
    """The facts of each case. One process detects all that have the same libraries: it survives each of them."""

    def module(text: str) -> Path:
        folder = tmp_path_factory.mktemp("pynvml")
        (folder / "pynvml.py").write_text(text)
        return folder

    found: dict[str, Facts] = {}
    for libraries in {case.libraries for case in CASES}:
        cases = [case for case in CASES if case.libraries == libraries]
        machines = [
            {
                "machine": "\n".join((case.driver, *case.lines)),
                "environ": dict(case.environ),
                "limits": dict.fromkeys(case.hangs, 0.3),
                "interpreter": case.interpreter,
                "path": [] if case.pynvml is None else [os.fspath(module(case.pynvml))],
            }
            for case in cases
        ]
        folder = tmp_path_factory.mktemp("machine")
        found.update(zip((case.name for case in cases), detected(machines, libraries, folder), strict=True))
    return found


def keys(found: tuple[Device, ...]) -> str:
    return " ".join((each.uuid or "").partition("-")[2][:4] or "-" for each in found)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_machine_is_what_its_drivers_say(case: Case, facts: dict[str, Facts]) -> None:
    found = facts[case.name]
    assert keys(found.devices) == case.devices
    assert [each.index for each in found.devices] == list(range(len(found.devices)))
    assert tuple(f"{each.source}: {each.error}" for each in found.problems) == case.said


def test_a_device_is_told_whole_whoever_tells_of_it(facts: dict[str, Facts]) -> None:
    first: dict[str, Any] = {
        "index": 0,
        "type": "cuda",
        "vendor": "nvidia",
        "name": "NVIDIA H200",
        "uuid": uuid("aa11"),
        "pci_bus_id": "00000000:06:00.0",
        "compute_capability": "9.0",
        "memory_bytes": H200["memory"],
        "multiprocessors": 132,
        "mig": False,
    }
    by_nvml = facts["NVML that prints"]
    assert by_nvml.devices == (Device(**first),)
    assert by_nvml.driver == Driver(version="580.95.05", cuda="13.0")
    # What NVML does not say the CUDA driver does; it counts what a process can have of the memory.
    by_cuda = facts["NVML that supports no query (Jetson)"]
    assert by_cuda.devices == (Device(**{**first, "memory_bytes": H200["memory"] - 1}),)
    assert by_cuda.driver == by_nvml.driver
    assert facts["no NVML (Jetson, WSL)"].driver == Driver(cuda="13.0")
    for what in QUERIES.values():
        (device,) = facts[f"NVML without {what}"].devices
        lacking: dict[str, dict[str, Any]] = {"memory": {"memory_bytes": None}, "cores": {"multiprocessors": None}}
        assert device == Device(**{**first, **lacking.get(what, {})}), what


def test_a_mig_instance_is_told_as_one_by_nvml_and_without_it(facts: dict[str, Facts]) -> None:
    for name in ("MIG on one of two cards", "a MIG instance by its UUID", "MIG, and a CUDA driver that fails"):
        found = facts[name].devices[0]
        assert (found.mig, found.multiprocessors, found.memory_bytes) == (True, 16, 17179869184)
        assert (found.uuid or "").startswith("MIG-cc")
        assert (found.compute_capability, found.pci_bus_id) == ("9.0", "00000000:01:00.0")


def test_a_driver_that_is_too_old_for_torch_is_the_reason_at_every_kernel(facts: dict[str, Facts]) -> None:
    found = facts["a driver older than torch's CUDA"]
    assert found.driver == Driver(version="470.199.02", cuda="11.4")
    here = msgspec.structs.replace(found, torch=TorchBuild(version="2.9.0", cuda="12.8"))
    for row in decided(here).candidates:
        told = [str(each) for each in row.reasons if str(each.code) == "driver-version"]
        assert told == [
            "driver-version: needs driver >=525.60.13 for torch's CUDA 12.8, here 470.199.02, "
            "which runs CUDA up to 11.4"
        ]


VALUES = ["", "-1", "0", "2,0", "1,0,2", "0,-1,1", "0,9,1", "2,x,0", "1,1", "1,1gpu", "+1", "1gpu2,2ampere", " 1 , 0 "]
VALUES += ["GPU-aa2", "GPU-aa", "GPU-b,GPU-aa1", "GPU-b,GPU-bb", "GPU-b,GPU-x,GPU-aa1", "GPU-b,0", "0,GPU-b", "x", ","]
VALUES += ["GPU-aa2,GPU-b,1", " GPU-b", "GPU-b, GPU-aa1", "gpu-bb33", "GPU-"]

#: What torch's own reader of the variable and of NVML makes of each value, as the cards' UUIDs.
LATER = """
import json, os, sys
import kernelreg

def told():
    found = kernelreg.facts()
    try:
        resolution = kernelreg.resolve("gdn", device="cuda:0")
    except kernelreg.NoBackendError as error:  # as with a torch for the CPU
        resolution = error.resolution
    (actual,) = {
        reason.actual
        for each in resolution.candidates
        for reason in each.reasons
        if each.kernel == "sm103" and reason.code == "compute-capability"
    }
    return [found.environment.get("CUDA_VISIBLE_DEVICES"), [each.compute_capability for each in found.devices], actual]

seen = [told()]
for value in ("1", "0", "1,0", None):
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    os.environ.update({"CUDA_VISIBLE_DEVICES": value} if value else {})
    seen.append(told())
if not os.fork():  # a worker, which is given its card once it runs
    os.environ["CUDA_VISIBLE_DEVICES"] = "1"
    print(json.dumps([*seen, told()]), flush=True)
    os._exit(0)
os.wait()
"""


def test_a_card_that_is_chosen_later_is_the_one_that_is_spoken_of(tmp_path: Path) -> None:
    (tmp_path / "machine").write_text("\n".join((DRIVER, *MIXED)) + "\n")
    done = subprocess.run(
        [sys.executable, "-c", LATER],
        env=environment(STUB_MACHINE=str(tmp_path / "machine")),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    fast, slow, both = ["12.0"], ["9.0"], ["12.0", "9.0"]
    assert json.loads(done.stdout) == [
        [None, both, "12.0"],
        ["1", slow, "9.0"],
        ["0", fast, "12.0"],
        ["1,0", both[::-1], "9.0"],
        [None, both, "12.0"],
        ["1", slow, "9.0"],
    ]


TORCH = """
import json, os, sys
import torch.cuda as cuda
uuids, seen = cuda._raw_device_uuid_nvml(), []
for os.environ["CUDA_VISIBLE_DEVICES"] in json.load(sys.stdin):
    shown = cuda._parse_visible_devices()
    if shown and isinstance(shown[0], str):
        shown = cuda._transform_uuid_to_ordinals(shown, uuids)
    assert len(shown) >= cuda._device_count_nvml() >= 0
    seen.append([uuids[index] for index in shown[: cuda._device_count_nvml()]])
print(json.dumps(seen))
"""


def test_torch_itself_numbers_the_same_cards(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    # torch takes NVML's order for CUDA's, as it is where the bus decides both.
    lines = (DRIVER, *sorted(ALIKE, key=lambda line: line.split()[2]))
    (tmp_path / "machine").write_text("\n".join(lines) + "\n")
    done = subprocess.run(
        [sys.executable, "-c", TORCH],
        input=json.dumps(VALUES),
        env=environment(STUB_MACHINE=str(tmp_path / "machine")),
        capture_output=True,
        text=True,
        check=True,
    )
    for rules in ((), DEAD_CUDA):  # with and without the CUDA driver's word
        machines = [{"machine": "\n".join((*lines, *rules)), "environ": visible(value)} for value in VALUES]
        ours = [[each.uuid for each in found.devices] for found in detected(machines, LIBRARIES, tmp_path)]
        assert dict(zip(VALUES, ours, strict=True)) == dict(zip(VALUES, json.loads(done.stdout), strict=True))
