"""What a kernel requires of the machine, against facts."""

from __future__ import annotations

from packaging.version import Version

from kernelreg.capability import matches_capability
from kernelreg.descriptor import Requires, full
from kernelreg.machine.model import Device, Facts
from kernelreg.reasons import Reason, ReasonCode
from kernelreg.requirements.driver import driver_reasons
from kernelreg.versions import parse_range, parse_version, satisfies

#: What a person pastes to get a tool that kernels compile with.
_TOOL_FIX = {"nvcc": "pip install nvidia-cuda-nvcc"}

_LABELS = {"cuda": "CUDA", "rocm": "ROCm"}


def machine_reasons(requires: Requires, facts: Facts, device_name: str, *, install: str | None = None) -> list[Reason]:
    """Every reason of the machine against a table of requirements.

    Args:
        requires: the backend's or the kernel's table.
        facts: the machine.
        device_name: the device of the call, as torch names it.
        install: the backend's own install command, the fix where a package is missing.
    """
    device = facts.device(device_name)
    return [
        *_device_reasons(requires, facts, device_name, device),
        *_platform_reasons(requires, facts),
        *_torch_reasons(requires, facts, device),
        *_driver_reasons(requires, facts, device),
        *_package_reasons(requires, facts, install),
        *_tool_reasons(requires, facts),
    ]


def _device_reasons(requires: Requires, facts: Facts, name: str, device: Device | None) -> list[Reason]:
    if device is None:
        visible = ", ".join(each.torch_name for each in facts.devices) or "none but cpu"
        return [Reason(code=ReasonCode.NO_DEVICE, subject=name, actual=f"not visible here ({visible})")]
    reasons = []
    if "any" not in requires.devices and device.type not in requires.devices:
        reasons.append(
            Reason(
                code=ReasonCode.DEVICE_TYPE,
                subject="device",
                required=" or ".join(requires.devices),
                actual=device.type,
                url=requires.source.get("device"),
            )
        )
    rule = requires.compute_capability
    if rule is None or device.type == "cpu":
        return reasons
    # A ROCm device's (9, 5) reads like an NVIDIA capability and is none.
    nvidia = device.type == "cuda"
    if not (nvidia and matches_capability(device.compute_capability or "", rule)):
        actual = device.compute_capability or "unknown"
        reasons.append(
            Reason(
                code=ReasonCode.COMPUTE_CAPABILITY,
                subject="compute capability",
                required=rule,
                actual=actual if nvidia else f"{actual} ({device.type})",
                url=requires.source.get("compute_capability"),
            )
        )
    return reasons


def _platform_reasons(requires: Requires, facts: Facts) -> list[Reason]:
    reasons = []
    here = f"{facts.platform.system}-{facts.platform.machine}"
    if requires.platform and here not in requires.platform:
        reasons.append(
            Reason(
                code=ReasonCode.PLATFORM,
                subject="platform",
                required=" or ".join(requires.platform),
                actual=here,
                url=requires.source.get("platform"),
            )
        )
    if requires.python:
        reasons += _version_reasons(
            ReasonCode.PYTHON_VERSION,
            "python",
            facts.platform.python,
            requires.python,
            requires.source.get("python"),
        )
    return reasons


def _torch_reasons(requires: Requires, facts: Facts, device: Device | None) -> list[Reason]:
    torch = facts.torch
    if torch is None:
        wanted = f"torch{requires.torch or ''}"
        fix = f'pip install "{wanted}"' if requires.torch else "pip install torch"
        return [
            Reason(
                code=ReasonCode.TORCH_MISSING,
                subject="torch",
                required=requires.torch or "any version",
                fix=fix,
                url=requires.source.get("torch"),
            )
        ]
    reasons = []
    if requires.torch:
        fix = f'pip install "torch{requires.torch}"'
        url = requires.source.get("torch")
        reasons += _version_reasons(ReasonCode.TORCH_VERSION, "torch", torch.version, requires.torch, url, fix)
    builds = {"cuda": torch.cuda, "rocm": torch.hip}
    needed = _builds_needed(requires, device)
    here = f"{torch.version} ({torch.build_name})"
    if needed and all(builds[kind] is None for kind in needed):
        label = " or ".join(_LABELS[kind] for kind in needed)
        span = requires.cuda if needed == ("cuda",) else requires.hip if needed == ("rocm",) else None
        reasons.append(
            Reason(
                code=ReasonCode.CUDA_BUILD,
                subject="torch",
                required=f"{label} build" + (f" {span}" if span else ""),
                actual=here,
                # Without such a card there is nothing that another build would make run.
                fix=f"pip install --force-reinstall torch  # a {label} build"
                if any(each.type in needed for each in facts.devices)
                else None,
                url=requires.source.get("cuda") or requires.source.get("device"),
            )
        )
    for kind, build, span in (("cuda", torch.cuda, requires.cuda), ("rocm", torch.hip, requires.hip)):
        if build is not None and span:
            url = requires.source.get("cuda" if kind == "cuda" else "hip")
            fix = f"pip install --upgrade torch  # a build with {_LABELS[kind]} {span}"
            subject = f"torch's {_LABELS[kind]}"
            reasons += _version_reasons(ReasonCode.CUDA_VERSION, subject, build, span, url, fix)
    return reasons


def _builds_needed(requires: Requires, device: Device | None) -> tuple[str, ...]:
    """Which builds of torch would do: the device's own where the kernel runs on it, else any of the kernel's."""
    listed = tuple(kind for kind in _LABELS if kind in requires.devices)
    if device is not None and (device.type in requires.devices or "any" in requires.devices):
        return (device.type,) if device.type in _LABELS else ()
    return listed


def _driver_reasons(requires: Requires, facts: Facts, device: Device | None) -> list[Reason]:
    reasons = []
    if device is not None and device.type == "cuda" and facts.torch is not None:
        reasons += driver_reasons(facts.torch, facts.driver, facts.platform.system)
    if requires.driver is None:
        return reasons
    url = requires.source.get("driver")
    version = facts.driver.version if facts.driver else None
    if version is None:
        return [
            *reasons,
            Reason(
                code=ReasonCode.DRIVER_VERSION,
                subject="driver",
                required=requires.driver,
                actual=None,
                url=url,
            ),
        ]
    return reasons + _version_reasons(ReasonCode.DRIVER_VERSION, "driver", version, requires.driver, url)


def _package_reasons(requires: Requires, facts: Facts, install: str | None) -> list[Reason]:
    reasons = []
    for name, rule in full(requires.packages).items():
        url = requires.source.get("packages")
        wanted = f'pip install "{name}{rule.version}"' if rule.version != "*" else f"pip install {name}"
        found = next((each for each in (name, *rule.also) if each in facts.packages), None)
        if found is None:
            reasons.append(
                Reason(
                    code=ReasonCode.PACKAGE_MISSING,
                    subject=name,
                    required="any version" if rule.version == "*" else rule.version,
                    fix=install or wanted,
                    url=url,
                )
            )
            continue
        reasons += _version_reasons(
            ReasonCode.PACKAGE_VERSION,
            found,
            facts.packages[found],
            rule.version,
            url,
            wanted if _wants_newer(facts.packages[found], rule.version) else None,
            by_release=rule.by == "release",
        )
    return reasons


def _wants_newer(actual: str, wanted: str) -> bool:
    """Whether the range lies above the version: rows for older releases give no reason to go back to one."""
    version = parse_version(actual)
    floors = [Version(each.version) for each in parse_range(wanted) if each.operator in (">=", ">", "~=")]
    return version is None or any(version < floor for floor in floors)


def _tool_reasons(requires: Requires, facts: Facts) -> list[Reason]:
    reasons = []
    for name, wanted in requires.tools.items():
        tool = facts.tools.get(name)
        url = requires.source.get("tools")
        fix = _TOOL_FIX.get(name)
        if tool is None:
            required = "any version" if wanted == "*" else wanted
            reasons.append(Reason(code=ReasonCode.TOOL_MISSING, subject=name, required=required, fix=fix, url=url))
        elif wanted != "*":
            # No fix: an older tool that is found first stays first, whatever is installed beside it.
            reasons += _version_reasons(ReasonCode.TOOL_VERSION, name, tool.version or "", wanted, url)
    return reasons


def _version_reasons(
    code: ReasonCode,
    subject: str,
    actual: str,
    wanted: str,
    url: str | None,
    fix: str | None = None,
    *,
    by_release: bool = True,
) -> list[Reason]:
    """At most one reason: out of range, or a text that is no version."""
    fits = satisfies(actual, wanted, by_release=by_release)
    if fits:
        return []
    if fits is None:
        code, actual = ReasonCode.VERSION_UNKNOWN, actual or "a version that cannot be read"
    return [Reason(code=code, subject=subject, required=wanted, actual=actual, fix=fix, url=url)]
