"""Detection against torch and the driver on a real GPU."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from typing import Any

import torch

import kernelreg
from kernelreg.cli import main
from kernelreg.testing.plugin import Record
from tests.gdn_cases import gdn_call


def test_facts_agree_with_torch(record: Record) -> None:
    facts = kernelreg.facts()
    assert len(facts.devices) == torch.cuda.device_count()
    for device in facts.devices:
        properties = torch.cuda.get_device_properties(device.index)
        assert device.compute_capability == f"{properties.major}.{properties.minor}"
        assert device.uuid == f"GPU-{properties.uuid}"
        assert device.multiprocessors == properties.multi_processor_count
        assert device.name == properties.name
    assert not facts.problems
    record("machine: facts agree with torch", "all", "yes")


def test_the_driver_tells_the_same_devices_as_nvml() -> None:
    from kernelreg.machine.cuda_driver import read_cuda_driver

    driver, devices, problems = read_cuda_driver()
    assert not problems
    assert driver is not None
    assert devices is not None
    for ours, theirs in zip(devices, kernelreg.facts().devices, strict=True):
        assert (ours.uuid, ours.pci_bus_id.lower()) == (theirs.uuid, theirs.pci_bus_id.lower())  # type: ignore[union-attr]
        assert (ours.compute_capability, ours.multiprocessors) == (
            theirs.compute_capability,
            theirs.multiprocessors,
        )


COUNT = """
import ctypes
cuda, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0)
cuda.cuInit(0)
cuda.cuDeviceGetCount(ctypes.byref(count))
print(count.value)
"""


def test_cuda_shows_as_many_devices_as_the_facts_whatever_the_variable_says(record: Record) -> None:
    """Each value in processes of its own: the driver reads it when it starts, once."""
    uuid = kernelreg.facts().devices[0].uuid or ""
    values = ["", "-1", "0", " 0 ", "+0", "0gpu", "0,0", "0,-1", "0,99", "99,0", "0,", ",0", "x", "0,x", "NoDevFiles"]
    values += [uuid, uuid[:12], "GPU-", uuid.lower().replace("gpu", "GPU"), f"{uuid},0", f"0,{uuid}", f"{uuid},{uuid}"]
    values += [f" {uuid}", f"{uuid} ", f"{uuid}x", f"GPU-zz,{uuid}", f"{uuid},GPU-zz", f"MIG-{uuid}"]
    ours = "import kernelreg; print(len(kernelreg.facts().devices))"
    differing = {}
    for value in values:
        environ = {**os.environ, "CUDA_VISIBLE_DEVICES": value}
        counts = [
            subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True).stdout
            for code in (COUNT, ours)
        ]
        if counts[0] != counts[1]:
            differing[value] = counts
    assert differing == {}
    record("machine: CUDA_VISIBLE_DEVICES, facts against the driver", "all", f"{len(values)} values agree")


def test_a_long_prompt_is_flash_qlas() -> None:
    tensors = gdn_call(B=1, T=32_768, H=1, HV=1, K=128, V=128, dtype=torch.bfloat16, state=False, device="cuda")
    assert kernelreg.resolve("gdn", like=tensors).backend == "flash_qla"


def _in_child(queue: Any) -> None:
    queue.put(float(torch.ones(4, device="cuda").sum()))


def _resolve_then_fork(queue: Any) -> None:
    kernelreg.facts()
    kernelreg.resolve("gdn")
    assert main(["doctor", "--json"]) == 0
    context = multiprocessing.get_context("fork")
    child = context.Process(target=_in_child, args=(queue,))
    child.start()
    child.join(120)


def test_cuda_works_in_a_fork_after_detection(record: Record) -> None:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    parent = context.Process(target=_resolve_then_fork, args=(queue,))
    parent.start()
    assert queue.get(timeout=240) == 4.0
    parent.join(60)
    record("machine: CUDA in a forked child after facts, resolve and doctor", "all", "works")
