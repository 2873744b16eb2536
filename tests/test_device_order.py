"""What torch has initialised is what counts, and a driver's child process that answers nonsense is a problem."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kernelreg.children import alone
from kernelreg.machine import Device, Driver, Problem, child, cuda_driver, devices, nvml
from kernelreg.machine.cuda_driver import read_cuda_driver
from kernelreg.machine.devices import detect_devices
from kernelreg.machine.nvml import Reading, read_nvml
from kernelreg.machine.torch_devices import current_index, initialised_accelerator
from kernelreg.machine.visible import Card

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
TWIN = msgspec.structs.replace(RTX, uuid="GPU-b3", pci_bus_id="00000000:03:00.0")
DRIVER = Driver(version="570.1", cuda="12.8")
NO_NVML = Problem(source="nvml", error="not found")
NO_CUDA = Problem(source="cuda-driver", error="not found")


# -- torch -----------------------------------------------------------------------------------------------------


class Properties:
    """What torch says of an RTX 5090, or of another device."""

    def __init__(self, **values: Any) -> None:
        rtx = {"name": "RTX 5090", "major": 12, "minor": 0, "total_memory": 7, "multi_processor_count": 170}
        vars(self).update({**rtx, **values})


def torch_with(kind: str, *properties: Properties, cuda: str | None = None, hip: str | None = None) -> SimpleNamespace:
    """A torch module that has initialised these devices."""

    def properties_of(index: int) -> Properties:
        if not vars(properties[index]):
            raise RuntimeError("the device is lost")
        return properties[index]

    accelerator = SimpleNamespace(
        is_initialized=lambda: True,
        device_count=lambda: len(properties),
        current_device=lambda: len(properties) - 1,
        get_device_properties=properties_of,
    )
    return SimpleNamespace(**{kind: accelerator}, version=SimpleNamespace(__version__="2.9.0", cuda=cuda, hip=hip))


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets NVML's cards, a CUDA driver that is not there, and what torch has initialised."""

    def answer(cards: tuple[Card, ...] | None, torch: SimpleNamespace) -> None:
        reading = Reading(None, None, (NO_NVML,)) if cards is None else Reading(DRIVER, cards, ())
        monkeypatch.setattr(devices, "read_nvml", lambda: reading)
        monkeypatch.setattr(devices, "read_cuda_driver", lambda: (None, None, [NO_CUDA]))
        monkeypatch.setitem(sys.modules, "torch", torch)

    return answer


def test_devices_that_torch_numbers_alike_are_as_nvml_tells_them(sources: Callable[..., None]) -> None:
    sources((Card(RTX), Card(TWIN)), torch_with("cuda", Properties(uuid="b1"), Properties(uuid="b3"), cuda="12.8"))
    assert detect_devices({}) == (DRIVER, (RTX, msgspec.structs.replace(TWIN, index=1)), [])
    sources((Card(RTX),), torch_with("cuda", Properties(), cuda="12.8"))  # an older torch tells no UUID
    assert detect_devices({}) == (DRIVER, (RTX,), [])


@pytest.mark.parametrize(
    ("visible", "seen", "order"),
    [
        (None, ["b3", "b1"], ["GPU-b3", "GPU-b1"]),
        ("0", ["b3"], ["GPU-b3"]),  # set when torch had read it already
        ("0", ["b1", "b3"], ["GPU-b1", "GPU-b3"]),
    ],
)
def test_devices_that_torch_numbers_otherwise_are_as_torch_numbers_them(
    sources: Callable[..., None], visible: str | None, seen: list[str], order: list[str]
) -> None:
    sources((Card(RTX), Card(TWIN)), torch_with("cuda", *(Properties(uuid=each) for each in seen), cuda="12.8"))
    _, found, (problem,) = detect_devices({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    assert [each.uuid for each in found] == order
    assert [(each.index, each.memory_bytes) for each in found] == [(i, RTX.memory_bytes) for i in range(len(order))]
    assert problem.source == "torch"
    assert "numbers them otherwise: cuda:0 is RTX 5090" in problem.error


@pytest.mark.parametrize(
    ("kind", "hip", "expected"),
    [
        ("cuda", "6.4.43482-0f2d60242", ("rocm", "amd", "9.5")),
        ("xpu", None, ("xpu", "intel", None)),
        ("npu", None, ("npu", "huawei", None)),
        ("musa", None, ("musa", "moore-threads", "3.1")),
    ],
)
def test_without_a_driver_the_devices_are_those_of_a_torch_that_has_them(
    sources: Callable[..., None], kind: str, hip: str | None, expected: tuple[str, str, str | None]
) -> None:
    versions = {"rocm": {"major": 9, "minor": 5}, "musa": {"major": 3, "minor": 1}}
    values = {"name": "a device", "total_memory": 7, **versions.get(expected[0], {})}
    properties = Properties()
    vars(properties).clear()
    vars(properties).update(values)
    sources(None, torch_with(kind, properties, hip=hip))
    driver, (device,), problems = detect_devices({})
    assert (driver, problems) == (None, [NO_NVML, NO_CUDA])
    assert (device.type, device.vendor, device.compute_capability) == expected
    assert (device.name, device.memory_bytes) == ("a device", 7)


def test_an_extension_in_the_place_of_cuda_is_no_cuda(sources: Callable[..., None]) -> None:
    sources(None, torch_with("cuda", Properties(name="Ascend910B")))
    assert detect_devices({}) == (None, (), [NO_NVML, NO_CUDA])
    assert initialised_accelerator() is None


def test_a_device_that_torch_has_lost_is_a_problem(sources: Callable[..., None]) -> None:
    lost = Properties()
    vars(lost).clear()
    torch = torch_with("cuda", lost, cuda="12.8")
    sources((Card(RTX),), torch)
    driver, found, problems = detect_devices({})
    assert (driver, found) == (DRIVER, (RTX,))
    assert problems == [Problem(source="torch", error="cuda devices: RuntimeError: the device is lost")]
    assert current_index("cuda") == 0
    torch.cuda.current_device = lambda: 1 // 0
    assert current_index("cuda") == 0


# -- child processes -------------------------------------------------------------------------------------------


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a script in the place of both child processes."""
    monkeypatch.setattr(child, "_FOLDER", tmp_path)

    def write(text: str) -> None:
        for name in ("_cuda_driver_child.py", "_nvml_child.py"):
            (tmp_path / name).write_text(text, encoding="utf-8")

    return write


def printing(value: Any) -> str:
    """A script that prints a value as JSON."""
    return f"print({json.dumps(value)!r})"


def test_a_child_runs_apart_from_the_users_packages(script: Callable[[str], None]) -> None:
    script("import sys; sys.exit(f'{len(sys.argv)} {sys.flags.isolated} {sys.flags.no_site}')")
    assert read_cuda_driver()[2] == [Problem(source="cuda-driver", error="3 1 1")]
    assert read_nvml().problems == (Problem(source="nvml", error="5 1 1"),)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("print('junk')", "JSON is malformed"),
        ("pass", "truncated"),
        ("import sys; sys.stdout.buffer.write(b'\\xff\\x00')", "malformed"),
        (printing({"cuda": 13000, "driver": {"version": None, "cuda": None}}), "missing required field"),
        (printing([]), "Expected `object`, got `array`"),
        (printing({"cuda": 13000, "devices": [{"index": 0}], "cards": [{"device": {"index": 0}}]}), "missing required"),
        ("import sys; sys.exit(1)", "exit code 1"),
        ("import sys; sys.exit('warning\\nCUDA driver error 999: unknown')", "CUDA driver error 999: unknown"),
        ("import os; os.kill(os.getpid(), 9)", "the library ended its process: SIGKILL"),
        ("import os; os.abort()", "the library ended its process: SIGABRT"),
        ("raise SyntaxError", "SyntaxError"),
    ],
)
def test_a_child_that_fails_is_a_problem(script: Callable[[str], None], text: str, said: str) -> None:
    script(text)
    driver, found, (problem,) = read_cuda_driver()
    assert (driver, found, problem.source) == (None, None, "cuda-driver")
    assert said in problem.error
    reading = read_nvml()
    assert (reading.driver, reading.cards) == (None, None)
    assert [each.source for each in reading.problems] == ["nvml"]
    assert said in reading.problems[0].error


def test_a_process_that_a_child_leaves_behind_holds_nobody_up(
    script: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_driver, "DRIVER_SECONDS", 1e9)
    answer = printing({"cuda": 13000, "devices": []})
    for apart in ("", "    os.setsid()\n"):
        # It keeps the pipes open, also in a session of its own, where it cannot be ended with the child.
        script(f"import os, time\nif os.fork():\n    {answer}\nelse:\n{apart}    time.sleep(20)\n")
        assert read_cuda_driver() == (Driver(cuda="13.0"), (), [])


def without_driver(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of both drivers' libraries on a machine that has neither."""
    name = "libno-such-driver.so.1"
    for module, attribute in ((cuda_driver, "LIBRARY"), (nvml, "CUDA_LIBRARY"), (nvml, "_LIBRARY")):
        monkeypatch.setattr(module, attribute, name)
    return name


@pytest.mark.parametrize("read", [read_cuda_driver, lambda: [read_nvml().problems]])
def test_a_library_that_wsl_has_and_the_loader_does_not_find_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, read: Callable[[], Any]
) -> None:
    name = without_driver(monkeypatch)
    (problem,) = read()[-1]
    assert problem.error == f"{name}: cannot open shared object file: No such file or directory"
    monkeypatch.setattr("kernelreg.machine.library._WSL", tmp_path)
    (tmp_path / name).touch()
    (problem,) = read()[-1]
    assert problem.error.endswith(f"{tmp_path} has it: put that folder on LD_LIBRARY_PATH")


def test_on_a_machine_without_a_driver_one_child_says_so_of_both_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    name, started, popen = without_driver(monkeypatch), [], subprocess.Popen

    def start(*arguments: Any, **words: Any) -> Any:
        started.append(arguments)
        return popen(*arguments, **words)

    monkeypatch.setattr(subprocess, "Popen", start)
    driver, found, problems = detect_devices({})
    assert (driver, found, len(started)) == (None, (), 1)
    said = f"{name}: cannot open shared object file: No such file or directory"
    assert problems == [Problem(source="nvml", error=said), Problem(source="cuda-driver", error=said)]


def test_a_child_that_hangs_ends_by_itself(tmp_path: Path) -> None:
    """Whoever waited for it may have been killed. Here, opening the library never ends."""
    library = tmp_path / "libcuda.so.1"
    os.mkfifo(library)
    script = Path(child.__file__).with_name("_cuda_driver_child.py")
    done = subprocess.run(alone(script, str(library), "0.5"), capture_output=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (-signal.SIGALRM, b"")
