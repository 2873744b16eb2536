"""Detection against torch and the driver on a real GPU."""

from __future__ import annotations

import multiprocessing
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
