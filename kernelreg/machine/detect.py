"""Detection: every source is asked once, none may fail the whole, no kernel library is imported."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable, Mapping

from kernelreg.errors import encodable
from kernelreg.machine.devices import detect_devices
from kernelreg.machine.model import Facts, Platform, Problem, Tool
from kernelreg.machine.packages import detect_packages
from kernelreg.machine.tools import detect_tools
from kernelreg.machine.torch_build import detect_torch

#: The only environment variables that facts keep: they decide what is visible or how kernels are built, and none
#: of them holds a secret.
ENVIRONMENT = (
    "CUDA_DEVICE_ORDER",
    "CUDA_HOME",
    "CUDA_PATH",
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "KERNELREG_BACKEND",
    "KERNELREG_DISABLE",
    "KERNELREG_PLUGINS",
    "KERNELREG_PREFER",
    "KERNELREG_STRICT",
    "NVIDIA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "TRITON_INTERPRET",
)


def detect(packages: Iterable[str], environ: Mapping[str, str] | None = None) -> Facts:
    """The facts of this machine and process.

    Args:
        packages: names of the distributions whose versions are wanted.
        environ: the environment to look at; the process's own when not given.
    """
    environ = os.environ if environ is None else environ
    torch, torch_problems = detect_torch()
    driver, devices, device_problems = detect_devices(environ)
    tools, tool_problems = detect_tools(environ)
    versions, package_problems = detect_packages(packages)
    problems: list[Problem] = [*torch_problems, *device_problems, *tool_problems, *package_problems]
    return Facts(
        platform=Platform(
            system=platform.system(),
            machine=platform.machine(),
            python=platform.python_version(),
            implementation=sys.implementation.name,
        ),
        torch=torch,
        driver=driver,
        devices=devices,
        tools={name: Tool(path=encodable(tool.path), version=tool.version) for name, tool in tools.items()},
        packages=versions,
        environment={name: encodable(environ[name]) for name in ENVIRONMENT if name in environ},
        problems=tuple(Problem(source=each.source, error=encodable(each.error)) for each in problems),
    )
