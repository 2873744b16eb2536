"""What a measurement stands on, as evidence files tell it."""

from __future__ import annotations

import os
import sys

from kernelreg.machine import Facts


def measured_on(facts: Facts) -> str:
    """The card (or the processor), the driver and every version, in one line."""
    where = f"{facts.platform.machine}, {os.cpu_count()} cores, no GPU"
    if facts.devices:
        device = facts.devices[0]
        where = f"{device.name}, compute capability {device.compute_capability}, "
        where += f"driver {facts.driver and facts.driver.version}"
    nvcc = facts.tools["nvcc"].version if "nvcc" in facts.tools else "none"
    packages = ", ".join(f"{name} {version}" for name, version in sorted(facts.packages.items()))
    torch = facts.torch and facts.torch.version
    python = sys.version.split()[0]
    return f"{where}; Python {python}, torch {torch}, nvcc {nvcc}, {packages or 'no kernel library'}."
