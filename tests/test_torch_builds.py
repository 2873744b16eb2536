"""Builds of torch, whole and broken, by files as pip leaves them: what they are taken for, and which reasons follow."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import msgspec
import pytest

from kernelreg import Facts
from kernelreg.machine import Device, Driver, TorchBuild, detect
from tests.distributions import install
from tests.machines import codes, decided, machine
from tests.stub_drivers import detected

FLASH_QLA, FLA, TORCH = ("flash_qla", "sm90"), ("fla", "triton"), ("torch", "chunk")
H200 = machine("h200").devices[0]
#: A capability that reads like Hopper's.
MI355X = Device(index=0, type="rocm", vendor="amd", name="AMD Instinct MI355X", compute_capability="9.0")
XPU = Device(index=0, type="xpu", vendor="intel", name="Intel Data Center GPU Max 1550")
DEVICE_TYPE, CUDA_BUILD, MISSING = "device-type", "cuda-build", "torch-missing"
CAPABILITY, UNKNOWN = "compute-capability", "version-unknown"
UNREAD = "its devices are read once torch has initialised them"


def version_file(version: str, cuda: str | None = None, hip: str | None = None, xpu: str | None = None) -> str:
    """``torch/version.py`` as torch's build writes it."""
    texts = [f"{name}: Optional[str] = {value!r}" for name, value in (("cuda", cuda), ("hip", hip), ("xpu", xpu))]
    return "\n".join(["from typing import Optional", f"__version__ = {version!r}", *texts, ""])


@dataclasses.dataclass(frozen=True)
class Case:
    """An installation of torch, and what it means for kernels on a device.

    Attributes:
        version_py: the text of ``torch/version.py``; None where there is none.
        package: there is a ``torch/__init__.py``.
        metadata: the version in the distribution's metadata; None where there is no distribution.
        said: the facts' one problem, with SITE for the folder.
        reasons: of FlashQLA's, FLA's and the torch kernel on the device.
    """

    name: str
    version_py: str | None
    build: TorchBuild | None
    device: Device
    reasons: tuple[set[str], set[str], set[str]]
    said: str | None = None
    package: bool = True
    metadata: str | None = "2.9.0"


BROKEN = TorchBuild(version="2.9.0", cuda="", hip="")
BROKEN_REASONS = ({UNKNOWN}, set[str](), set[str]())
CASES = [
    Case(
        "a CUDA build on an NVIDIA card",
        version_file("2.9.0+cu130", cuda="13.0"),
        TorchBuild(version="2.9.0+cu130", cuda="13.0"),
        H200,
        (set(), set(), set()),
    ),
    Case(
        "a CPU build on an NVIDIA card",
        version_file("2.9.0+cpu"),
        TorchBuild(version="2.9.0+cpu"),
        H200,
        ({CUDA_BUILD}, {CUDA_BUILD}, {CUDA_BUILD}),
    ),
    Case(
        "a ROCm build on an NVIDIA card",
        version_file("2.9.0+rocm6.4", hip="6.4.43482-0f2d60242"),
        TorchBuild(version="2.9.0+rocm6.4", hip="6.4.43482-0f2d60242"),
        H200,
        ({CUDA_BUILD}, {CUDA_BUILD}, {CUDA_BUILD}),
        f"torch: built for ROCm 6.4.43482-0f2d60242: {UNREAD}",
    ),
    Case(
        "a ROCm build on an AMD card whose capability reads like an NVIDIA card's",
        version_file("2.9.0+rocm7.0", hip="7.0.51831-a3e329ad8"),
        TorchBuild(version="2.9.0+rocm7.0", hip="7.0.51831-a3e329ad8"),
        MI355X,
        ({DEVICE_TYPE, CAPABILITY, CUDA_BUILD}, set(), set()),
        f"torch: built for ROCm 7.0.51831-a3e329ad8: {UNREAD}",
    ),
    Case(
        "an XPU build on an Intel card",
        version_file("2.9.0+xpu", xpu="20250201"),
        TorchBuild(version="2.9.0+xpu"),
        XPU,
        ({DEVICE_TYPE, CAPABILITY, CUDA_BUILD}, set(), set()),
        f"torch: built for XPU 20250201: {UNREAD}",
    ),
    *(
        Case(
            f"a build with {what}",
            version_file(version),
            TorchBuild(version=version),
            Device(index=0, type=kind),
            ({DEVICE_TYPE, CAPABILITY, CUDA_BUILD}, {DEVICE_TYPE, CUDA_BUILD}, set()),
        )
        for what, version, kind in (
            ("MPS on a Mac", "2.9.0", "mps"),
            ("torch_musa on a Moore Threads card", "2.5.0", "musa"),
            ("torch_npu on an Ascend card", "2.8.0+cpu", "npu"),
        )
    ),
    Case("no torch", None, None, H200, ({MISSING}, {MISSING}, {MISSING}), package=False, metadata=None),
    Case(
        "a version file that ends in the middle",
        "__version__ = '2.9.0+cu1",
        BROKEN,
        H200,
        BROKEN_REASONS,
        "torch: SITE/torch/version.py: unterminated string literal (detected at line 1) (<unknown>, line 1)",
    ),
    Case(
        "no version file",
        None,
        BROKEN,
        H200,
        BROKEN_REASONS,
        "torch: SITE/torch/version.py: No such file or directory",
    ),
    Case(
        "no version file and no metadata",
        None,
        TorchBuild(version="", cuda="", hip=""),
        H200,
        ({UNKNOWN}, {UNKNOWN}, {UNKNOWN}),
        "torch: SITE/torch/version.py: No such file or directory",
        metadata=None,
    ),
    Case(
        "metadata without a package",
        None,
        BROKEN,
        H200,
        BROKEN_REASONS,
        "torch: its metadata is installed, but there is no package to import",
        package=False,
    ),
]


def site_of(case: Case, folder: Path) -> Path:
    """A folder with the case's files."""
    folder.mkdir()
    if case.package:
        (folder / "torch").mkdir()
        (folder / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')\n")
    if case.version_py is not None:
        (folder / "torch" / "version.py").write_text(case.version_py)
    if case.metadata is not None:
        install(folder, "torch", version=case.metadata)
    return folder


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Facts, Path]]:
    """What is detected of each case, by one process that has no other torch and imports none."""
    root = tmp_path_factory.mktemp("torch")
    sites = [site_of(case, root / str(place)) for place, case in enumerate(CASES)]
    # The real torch of this environment, where there is one, must not be found behind the case's.
    machines = [{"path": [os.fspath(site)], "hide": "torch"} for site in sites]
    found = detected(machines, (), root)
    return {case.name: (each, site) for case, each, site in zip(CASES, found, sites, strict=True)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_build_is_what_its_files_say(case: Case, facts: dict[str, tuple[Facts, Path]]) -> None:
    found, site = facts[case.name]
    assert found.torch == case.build
    said = [f"torch: {each.error}" for each in found.problems if each.source == "torch"]
    assert [text.replace(os.fspath(site), "SITE") for text in said] == ([case.said] if case.said else [])
    on_device = machine("h200", torch=found.torch, devices=(case.device,))
    resolution = decided(on_device, device=case.device.torch_name)
    assert tuple(codes(resolution, *row) & ALL for row in (FLASH_QLA, FLA, TORCH)) == case.reasons


#: The codes that a build of torch decides; the others are of packages and ranks.
ALL = {DEVICE_TYPE, CUDA_BUILD, MISSING, CAPABILITY, UNKNOWN, "driver-version"}


@pytest.mark.parametrize(
    ("hip", "unknown"),
    [
        ("5.7.31921-d1770ee1b", False),
        ("6.2.41133-dd7f95766", False),
        ("7.0.0", False),
        ("", True),
        ("6.4-custom-build", True),
    ],
)
def test_a_hip_version_is_read_with_its_compilers_commit(hip: str, unknown: bool) -> None:
    from kernelreg.descriptor import Requires
    from kernelreg.requirements.machine import machine_reasons

    facts = machine("h200", torch=TorchBuild(version="2.9.0", hip=hip), devices=(MI355X,))
    reasons = machine_reasons(Requires(device="rocm", hip=">=5.7"), facts, "cuda:0")
    assert [str(each.code) for each in reasons] == ([UNKNOWN] if unknown else [])


# -- a torch that does not import ------------------------------------------------------------------------------


ASKED = """
import json, sys, kernelreg, kernelreg_backends
from pathlib import Path
from kernelreg.session import session
session.registry()  # its backends lie beside a real torch, which is then taken out of sight
sys.path[:] = [sys.argv[1], *(each for each in sys.path if not Path(each, "torch").exists())]
resolution = kernelreg.resolve("gdn", device="cpu")
try:
    resolution.function
except kernelreg.NoBackendError as error:
    rows = {row.backend + " " + row.kernel: [[str(each.code), each.actual] for each in row.reasons]
            for row in error.resolution.candidates}
    print(json.dumps([kernelreg.facts().to_dict()["torch"], rows]))
"""

#: What is in ``torch/__init__.py``, and how its import ends.
FAULTS = {
    "a library that torch needs is missing": (
        "import ctypes\nctypes.CDLL('libcudart-missing.so.13')\n",
        "OSError: libcudart-missing.so.13: cannot open shared object file: No such file or directory",
    ),
    "a library of torch of another ABI": (
        "from torch._C import *\n",
        "ImportError: SITE/torch/_C.so: undefined symbol",
    ),
    "a version file that ends in the middle": (
        "from .version import __version__\n",
        "SyntaxError: unterminated string literal",
    ),
    "a torch that exits": ("raise SystemExit('no GPU here')\n", "SystemExit: no GPU here"),
    "metadata without a package": (None, "ModuleNotFoundError: No module named 'torch'"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_torch_that_does_not_import_is_an_import_error_with_its_cause(tmp_path: Path, fault: str) -> None:
    init, said = FAULTS[fault]
    site = tmp_path / "site"
    install(site, "torch", version="2.9.0")
    if init is not None:
        (site / "torch").mkdir()
        (site / "torch" / "__init__.py").write_text(init)
        text = "__version__ = '2.9.0+cu" if "version" in fault else version_file("2.9.0+cu130", cuda="13.0")
        (site / "torch" / "version.py").write_text(text)
    if "ABI" in fault:
        broken_extension(site / "torch" / "_C.so")
    done = subprocess.run(
        [sys.executable, "-c", ASKED, str(site)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    torch, rows = json.loads(done.stdout)
    assert torch["version"].startswith("2.9.0")
    ((code, actual),) = rows["torch chunk"]
    assert code == "import-error"
    assert said.replace("SITE", str(site)) in actual
    assert not [row for row, reasons in rows.items() if MISSING in dict(reasons)]


def test_verify_says_it_once_and_holds_it_against_no_kernel(tmp_path: Path) -> None:
    site = tmp_path / "site"
    install(site, "torch", version="2.9.0", files={"torch/__init__.py": "raise ImportError('of another ABI')\n"})
    (site / "torch" / "version.py").write_text(version_file("2.9.0+cpu"))
    path = os.pathsep.join([str(site), *filter(None, sys.path)])
    environ = {**os.environ, "PYTHONPATH": path, "XDG_STATE_HOME": str(tmp_path)}
    asked = ["verify", "gdn.recurrent", "--backend", "torch", "--json", "--device", "cpu"]
    done = subprocess.run(
        [sys.executable, "-m", "kernelreg", *asked], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    (outcome,) = json.loads(done.stdout)["outcomes"]
    assert (outcome["status"], outcome["kernel"]) == ("wrong", None)
    assert outcome["reason"].endswith("ImportError: of another ABI")


def broken_extension(file: Path) -> None:
    """A module that was built against another torch: a symbol of it is nowhere."""
    compiler = next(filter(None, map(shutil.which, ("gcc", "cc", "clang"))), None)
    if compiler is None or sys.platform != "linux":
        pytest.skip("a broken extension needs Linux and a C compiler")
    source = file.with_suffix(".c")
    source.write_text("extern int of_another_torch;\nint *PyInit__C(void) { return &of_another_torch; }\n")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", os.fspath(file), os.fspath(source)], check=True)


# -- the driver ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cuda", "driver", "system", "said"),
    [
        ("12.8", Driver(version="525.60.13", cuda="12.0"), "Linux", None),  # minor version compatibility
        ("12.8", Driver(version="580.95.05", cuda="13.0"), "Linux", None),
        ("13.0", Driver(version="580.65.06", cuda="13.0"), "Linux", None),
        ("13.0", Driver(version="535.104.05", cuda="13.0"), "Linux", None),  # the forward compatibility package
        ("12.8", Driver(version="470.199.02", cuda="11.4"), "Linux", ">=525.60.13 for torch's CUDA 12.8"),
        ("13.0", Driver(version="575.57.08", cuda="12.9"), "Linux", ">=580 for torch's CUDA 13.0"),
        ("12.8", Driver(version="527.41", cuda="11.8"), "Windows", ">=528.33 for torch's CUDA 12.8"),
        ("11.8", Driver(version="450.80.01", cuda=None), "Linux", ">=450.80.02 for torch's CUDA 11.8"),
        ("11.8", Driver(version="450.80.02", cuda=None), "Linux", None),
        ("13.0", Driver(version="579.99", cuda=None), "Linux", ">=580 for torch's CUDA 13.0"),
        ("13.0", Driver(version=None, cuda="12.9"), "Linux", ">=580 for torch's CUDA 13.0"),
        ("14.1", Driver(version="580.95.05", cuda="13.0"), "Linux", "for torch's CUDA 14.1"),
        ("14.1", Driver(version="700.1", cuda=None), "Linux", None),  # no table says what it needs
        ("12.8", Driver(), "Linux", None),
        ("12.8", Driver(version="odd", cuda="odd"), "Linux", None),
        ("12.8", None, "Linux", None),
        ("odd", Driver(version="470.199.02", cuda="11.4"), "Linux", None),
        ("", Driver(version="470.199.02", cuda="11.4"), "Linux", None),
        (None, Driver(version="470.199.02", cuda="11.4"), "Linux", None),
    ],
)
def test_a_driver_runs_the_minor_releases_of_its_cuda(
    cuda: str | None, driver: Driver | None, system: str, said: str | None
) -> None:
    torch = TorchBuild(version="2.9.0", cuda=cuda)
    platform = msgspec.structs.replace(machine("h200").platform, system=system)
    resolution = decided(machine("h200", torch=torch, driver=driver, platform=platform))
    for row in resolution.candidates:
        found = [each for each in row.reasons if str(each.code) == "driver-version"]
        assert [each.required for each in found] == ([said] if said else []), row.kernel
    # Where no tensor is on the card, its driver is nobody's concern.
    assert resolution_on_cpu(torch, driver) == set()


def resolution_on_cpu(torch: TorchBuild, driver: Driver | None) -> set[str]:
    resolution = decided(machine("h200", torch=torch, driver=driver), device="cpu")
    return {str(each.code) for row in resolution.candidates for each in row.reasons} & {"driver-version"}


def test_the_reason_names_driver_and_fix() -> None:
    facts: Any = machine("h200", driver=Driver(version="535.104.05", cuda="12.2"))
    row = next(each for each in decided(facts).candidates if each.backend == "torch")
    (reason,) = row.reasons
    assert str(reason) == (
        "driver-version: needs driver >=580 for torch's CUDA 13.0, here 535.104.05, which runs CUDA up to 12.2"
    )
    assert reason.fix == "pip install --force-reinstall torch  # a CUDA 12 build, or update the driver"
    assert (reason.url or "").startswith("https://docs.nvidia.com/deploy/cuda-compatibility/")


def test_a_stand_in_for_torch_has_no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of a server, and builds of its documentation, put one in torch's place, which answers with anything."""
    monkeypatch.setitem(sys.modules, "torch", MagicMock())
    facts = detect([], {})
    assert facts.devices == ()
    assert len(facts.fingerprint) == 16  # it is plain data
