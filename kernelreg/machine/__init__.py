"""Facts: what a machine is. Detection imports no kernel library and creates no CUDA context."""

from kernelreg.machine.detect import detect
from kernelreg.machine.model import CPU, Device, Driver, Facts, Platform, Problem, Tool, TorchBuild

__all__ = ["CPU", "Device", "Driver", "Facts", "Platform", "Problem", "Tool", "TorchBuild", "detect"]
