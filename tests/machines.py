"""Machines and backends for tests: the sample facts files, changed where a test says so, and small descriptors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

import kernelreg
from kernelreg import Facts
from kernelreg.machine import Device
from kernelreg.resolution import Resolution

FACTS = Path(__file__).with_name("facts")


def machine(name: str, **changes: Any) -> Facts:
    """A sample machine. ``torch`` may be a version alone, ``packages`` and ``device`` what changes of them."""
    facts = Facts.load(FACTS / f"{name}.json")
    if isinstance(changes.get("torch"), str) and facts.torch is not None:
        changes["torch"] = msgspec.structs.replace(facts.torch, version=changes["torch"])
    if "packages" in changes:
        packages = {**facts.packages, **changes["packages"]}
        changes["packages"] = {name: version for name, version in packages.items() if version is not None}
    if "device" in changes:
        first = msgspec.structs.replace(facts.devices[0], **changes.pop("device"))
        changes["devices"] = (first, *facts.devices[1:])
    return msgspec.structs.replace(facts, **changes)


def decided(facts: Facts, operation: str = "gdn", **call: Any) -> Resolution:
    """The resolution, also where nothing fits."""
    try:
        return kernelreg.resolve(operation, facts=facts, **call)
    except kernelreg.NoBackendError as error:
        return error.resolution


def codes(resolution: Resolution, backend: str, kernel: str) -> set[str]:
    """The codes of a row's reasons."""
    row = next(each for each in resolution.candidates if (each.backend, each.kernel) == (backend, kernel))
    return {str(reason.code) for reason in row.reasons}


def rocm_device() -> Device:
    """What torch reports of an MI355X."""
    return Device(index=0, type="rocm", vendor="amd", name="AMD Instinct MI355X", compute_capability="9.5")


def descriptor(name: str, **changes: Any) -> dict[str, Any]:
    """A one-kernel backend for ``gdn.chunk`` on any device, as plain data."""
    kernel = {"operation": "gdn.chunk", "name": "only", "function": "run", **changes.pop("kernel", {})}
    return {"schema": 1, "name": name, "adapter": f"{name}_adapter", "kernel": [kernel], **changes}
