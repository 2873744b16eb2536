"""In which order devices are numbered: when the CUDA driver is asked for it, and what becomes of its silence."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kernelreg.children import alone
from kernelreg.machine import Device, Driver, Problem, cuda_driver, devices
from kernelreg.machine.cuda_driver import read_cuda_driver
from kernelreg.machine.devices import detect_devices
from kernelreg.machine.nvml import Reading
from kernelreg.machine.visible import Card

Answer = tuple[Driver | None, tuple[Device, ...] | None, list[Problem]]

RTX = Device(
    index=0,
    type="cuda",
    vendor="nvidia",
    name="RTX 5090",
    uuid="GPU-b1",
    pci_bus_id="00000000:01:00.0",
    compute_capability="12.0",
    memory_bytes=34190917632,
    multiprocessors=170,
)
H100 = msgspec.structs.replace(
    RTX, name="H100", uuid="GPU-b2", pci_bus_id="00000000:02:00.0", compute_capability="9.0", memory_bytes=85520809984
)
TWIN = msgspec.structs.replace(RTX, uuid="GPU-b3", pci_bus_id="00000000:03:00.0")
NVML_DRIVER, CUDA_DRIVER = Driver(version="570.1", cuda="12.8"), Driver(cuda="12.8")
SILENT: Answer = (None, None, [Problem(source="cuda-driver", error="no answer")])
NO_NVML = Problem(source="nvml", error="not found")


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Sets what NVML, the CUDA driver and torch answer; gives the list of whom of the latter two was asked."""

    def answer(cards: tuple[Card, ...] | None, driver: Answer = SILENT, torch: tuple[Device, ...] = ()) -> list[str]:
        asked: list[str] = []
        reading = Reading(None, None, (NO_NVML,)) if cards is None else Reading(NVML_DRIVER, cards, ())
        monkeypatch.setattr(devices, "read_nvml", lambda: reading)

        def read_driver() -> Answer:
            asked.append("driver")
            return driver

        def read_torch() -> tuple[Device, ...]:
            asked.append("torch")
            return torch

        monkeypatch.setattr(devices, "read_cuda_driver", read_driver)
        monkeypatch.setattr(devices, "read_torch_devices", read_torch)
        return asked

    return answer


@pytest.mark.parametrize(
    ("cards", "environ", "expected"),
    [
        ((Card(RTX), Card(TWIN)), {}, [(0, "GPU-b1"), (1, "GPU-b3")]),
        ((Card(RTX), Card(TWIN)), {"CUDA_VISIBLE_DEVICES": "1"}, [(0, "GPU-b3")]),
        ((Card(RTX), Card(H100)), {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, [(0, "GPU-b1"), (1, "GPU-b2")]),
        (
            (Card(RTX), Card(H100)),
            {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "1,0"},
            [(0, "GPU-b2"), (1, "GPU-b1")],
        ),
        ((), {}, []),
    ],
)
def test_where_only_the_bus_can_be_the_order_nobody_else_is_asked(
    sources: Callable[..., list[str]],
    cards: tuple[Card, ...],
    environ: dict[str, str],
    expected: list[tuple[int, str]],
) -> None:
    asked = sources(cards)
    driver, found, problems = detect_devices(environ)
    assert [(each.index, each.uuid) for each in found] == expected
    assert (driver, problems, asked) == (NVML_DRIVER, [], [])


@pytest.mark.parametrize("environ", [{}, {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, {"CUDA_VISIBLE_DEVICES": "1,0"}])
def test_of_different_cards_the_driver_says_the_order_and_nvml_the_rest(
    sources: Callable[..., list[str]], environ: dict[str, str]
) -> None:
    numbered = tuple(
        msgspec.structs.replace(each, index=index, memory_bytes=1) for index, each in enumerate((H100, RTX))
    )
    asked = sources((Card(RTX), Card(H100)), (CUDA_DRIVER, numbered, []))
    driver, found, problems = detect_devices(environ)
    # The driver has applied CUDA_VISIBLE_DEVICES already: doing so once more would turn its order round.
    assert found == (H100, msgspec.structs.replace(RTX, index=1))
    assert (driver, problems, asked) == (NVML_DRIVER, [], ["driver"])


def test_mig_on_some_cards_only_is_a_difference(sources: Callable[..., list[str]]) -> None:
    instance = msgspec.structs.replace(RTX, uuid="MIG-7", memory_bytes=16 << 30, multiprocessors=16, mig=True)
    cards = (Card(RTX, (instance,), mig_enabled=True), Card(TWIN))
    seen = msgspec.structs.replace(RTX, uuid="GPU-7", memory_bytes=1, multiprocessors=16)
    asked = sources(cards, (CUDA_DRIVER, (seen,), []))
    _, found, problems = detect_devices({})
    assert found == (instance,)
    assert (problems, asked) == ([], ["driver"])


def test_a_device_that_nvml_does_not_know_is_as_the_driver_says(sources: Callable[..., list[str]]) -> None:
    stranger = msgspec.structs.replace(TWIN, uuid="GPU-unknown", memory_bytes=7)
    sources((Card(RTX), Card(H100)), (CUDA_DRIVER, (stranger,), []))
    assert detect_devices({})[1] == (stranger,)


def test_a_silent_driver_leaves_the_bus_order_and_two_problems(sources: Callable[..., list[str]]) -> None:
    sources((Card(RTX), Card(H100)))
    driver, found, problems = detect_devices({"CUDA_VISIBLE_DEVICES": "1,0,9"})
    assert [(each.index, each.name) for each in found] == [(0, "H100"), (1, "RTX 5090")]
    assert driver == NVML_DRIVER
    assert [each.source for each in problems] == ["cuda-driver", "cuda-order", "CUDA_VISIBLE_DEVICES"]
    assert "set CUDA_DEVICE_ORDER=PCI_BUS_ID" in problems[1].error


def test_without_nvml_the_devices_are_the_drivers(sources: Callable[..., list[str]]) -> None:
    asked = sources(None, (CUDA_DRIVER, (H100,), []))
    assert detect_devices({"CUDA_VISIBLE_DEVICES": "7"}) == (CUDA_DRIVER, (H100,), [NO_NVML])
    assert asked == ["driver"]


def test_without_nvml_and_driver_the_devices_are_those_of_a_torch_that_has_them(
    sources: Callable[..., list[str]],
) -> None:
    amd = Device(index=0, type="rocm", vendor="amd")
    asked = sources(None, torch=(amd,))
    assert detect_devices({}) == (None, (amd,), [NO_NVML, *SILENT[2]])
    assert asked == ["driver", "torch"]


# -- the driver's child process --------------------------------------------------------------------------------


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a script in the place of the child process, on a machine where the driver's library loads."""
    monkeypatch.setattr(cuda_driver, "ctypes", SimpleNamespace(CDLL=lambda _: None))
    script = tmp_path / "child.py"
    monkeypatch.setattr(cuda_driver, "_CHILD", script)

    def write(text: str) -> None:
        script.write_text(text, encoding="utf-8")

    return write


def printing(value: Any) -> str:
    """A script that prints a value as JSON."""
    return f"print({json.dumps(value)!r})"


def test_the_childs_answer_is_the_driver_and_its_devices(child: Callable[[str], None]) -> None:
    child(printing({"cuda": 12080, "devices": msgspec.to_builtins([H100])}))
    assert read_cuda_driver() == (CUDA_DRIVER, (H100,), [])


def test_the_child_gets_the_librarys_name_and_runs_apart_from_the_users_packages(child: Callable[[str], None]) -> None:
    child("import sys; sys.exit(f'{sys.argv[1]} {sys.flags.isolated} {sys.flags.no_site}')")
    assert read_cuda_driver()[2] == [Problem(source="cuda-driver", error=f"{cuda_driver._LIBRARY} 1 1")]


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("print('junk')", "JSON is malformed"),
        ("pass", "truncated"),
        ("import sys; sys.stdout.buffer.write(b'\\xff\\x00')", "malformed"),
        (printing({"cuda": 13000}), "missing required field `devices`"),
        (printing({"cuda": "new", "devices": []}), "Expected `int`, got `str`"),
        (printing({"cuda": 13000, "devices": [{"index": 0}]}), "missing required field `type`"),
        ("import sys; sys.exit(1)", "exit code 1"),
        ("import sys; sys.exit('warning\\nCUDA driver error 100: no device')", "CUDA driver error 100: no device"),
        ("import os; os.kill(os.getpid(), 9)", "exit code -9"),
        ("raise SyntaxError", "SyntaxError"),
    ],
)
def test_a_child_that_fails_is_a_problem(child: Callable[[str], None], script: str, said: str) -> None:
    child(script)
    driver, found, (problem,) = read_cuda_driver()
    assert (driver, found, problem.source) == (None, None, "cuda-driver")
    assert said in problem.error


def test_a_child_that_hangs_is_given_up(child: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "DRIVER_SECONDS", 0.5)
    child("import time; time.sleep(600)")
    assert read_cuda_driver() == (None, None, [Problem(source="cuda-driver", error="no answer within 0 s")])


def test_a_machine_without_the_drivers_library_starts_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    def unused(*_: object, **__: object) -> None:
        raise AssertionError("a child process was started")

    monkeypatch.setattr(cuda_driver, "_LIBRARY", "libno-such-driver.so.1")
    monkeypatch.setattr(subprocess, "run", unused)
    driver, found, (problem,) = read_cuda_driver()
    assert (driver, found) == (None, None)
    assert "libno-such-driver.so.1" in problem.error


def test_a_child_that_hangs_ends_by_itself(tmp_path: Path) -> None:
    """Whoever waited for it may have been killed. Here, opening the library never ends."""
    library = tmp_path / "libcuda.so.1"
    os.mkfifo(library)
    done = subprocess.run(alone(cuda_driver._CHILD, str(library), "0.5"), capture_output=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (-signal.SIGALRM, b"")
