"""Whether the NVIDIA driver is new enough for the CUDA that torch was built with.

CUDA's minor releases run on every driver of their major release: "minor version compatibility". A driver of an older
major release can still run it through the forward compatibility package, a newer ``libcuda.so`` beside an older
kernel module; then the driver's CUDA version, which is the library's, says so, and it decides.
"""

from __future__ import annotations

from packaging.version import Version

from kernelreg.machine.model import Driver, TorchBuild
from kernelreg.reasons import Reason, ReasonCode
from kernelreg.versions import parse_version

URL = "https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html"

#: The oldest driver for each major release of CUDA, on Linux and on Windows: the page above, table 1, and where it
#: names a branch alone, the CUDA toolkit's release notes, table "CUDA Toolkit and Minimum Required Driver Version for
#: CUDA Minor Version Compatibility". Later majors than the last are judged by the driver's CUDA version alone.
_OLDEST = {
    11: ("450.80.02", "452.39"),
    12: ("525.60.13", "528.33"),
    13: ("580", "580"),
}


def driver_reasons(torch: TorchBuild, driver: Driver | None, system: str) -> list[Reason]:
    """At most one reason: the driver cannot run this torch's CUDA. A driver that says nothing of itself gives none."""
    build = parse_version(torch.cuda or "")
    if build is None or driver is None:
        return []
    runs, version = parse_version(driver.cuda or ""), parse_version(driver.version or "")
    oldest = _OLDEST.get(build.major, (None, None))[system == "Windows"]
    if runs is not None:
        fits = runs.major >= build.major
    else:
        fits = version is None or oldest is None or version >= Version(oldest)
    if fits:
        return []
    fix = f"pip install --force-reinstall torch  # a CUDA {runs.major} build, or update the driver" if runs else None
    said = [driver.version or "of unknown version", *([f"which runs CUDA up to {driver.cuda}"] if runs else [])]
    return [
        Reason(
            code=ReasonCode.DRIVER_VERSION,
            subject="driver",
            required=f"{f'>={oldest} ' if oldest else ''}for torch's CUDA {torch.cuda}",
            actual=", ".join(said),
            fix=fix,
            url=URL,
        )
    ]
