"""Facts: saving and loading them, what decides their fingerprint, and detection of torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kernelreg.errors import FactsError
from kernelreg.machine import CPU, Device, Driver, Facts, Platform, Problem, Tool, TorchBuild, detect
from kernelreg.machine.torch_build import detect_torch
from tests.distributions import install
from tests.machines import FACTS, machine, rocm_device

SAMPLES = sorted(path.name for path in FACTS.glob("*.json"))
PLATFORM = {"system": "Linux", "machine": "x86_64", "python": "3.12.3", "implementation": "cpython"}


def file_with(**keys: Any) -> bytes:
    """A facts file's bytes."""
    return json.dumps({"schema": 1, "platform": PLATFORM, **keys}).encode()


# -- files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SAMPLES)
def test_a_facts_file_is_saved_as_it_was_loaded(tmp_path: Path, name: str) -> None:
    facts = Facts.load(FACTS / name)
    facts.save(tmp_path / "copy.json")
    assert json.loads((tmp_path / "copy.json").read_bytes()) == json.loads((FACTS / name).read_bytes())
    assert Facts.load(tmp_path / "copy.json") == facts
    assert facts.to_dict() == json.loads(facts.to_json())


def test_saving_replaces_the_file_whole_and_leaves_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "facts.json"
    machine("h200").save(path)
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", fail)
        with pytest.raises(FactsError, match="No space left on device"):
            machine("cpu-only").save(path)
    assert path.read_bytes() == before
    machine("cpu-only").save(path)
    assert Facts.load(path) == machine("cpu-only")
    assert [each.name for each in tmp_path.iterdir()] == ["facts.json"]


@pytest.mark.parametrize(
    ("name", "said"), [("no/such/facts.json", "No such file"), ("", "directory")], ids=["missing", "folder"]
)
def test_a_place_that_cannot_be_written_is_named_and_left_clean(tmp_path: Path, name: str, said: str) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    with pytest.raises(FactsError, match=said) as caught:
        machine("h200").save(folder / name)
    assert str(caught.value).startswith(f"{folder / name}: ")
    assert [each.name for each in tmp_path.rglob("*")] == ["here"]


@pytest.mark.parametrize(
    ("content", "place", "said"),
    [
        (file_with(devcies=[]), "", "unknown key 'devcies'|did you mean 'devices'?"),
        (file_with(devices=[{"index": 0, "type": "cuda", "uid": "x"}]), "devices[0]", "unknown key 'uid'|'uuid'?"),
        (
            file_with(torch={"version": "2.8.0", "cdua": None}),
            "torch",
            "unknown key 'cdua'; accepted: cuda, hip, version",
        ),
        (file_with(tools={"nvcc": {"pth": "x"}}), "tools[...]", "unknown key 'pth'|did you mean 'path'?"),
        (file_with(devices=[{"index": -1, "type": "cuda"}]), "devices[0].index", ">= 0"),
        (file_with(devices=[{"index": "0", "type": "cuda"}]), "devices[0].index", "Expected `int`, got `str`"),
        (file_with(packages={"triton": 3.6}), "packages[...]", "Expected `str`, got `float`"),
        (file_with(schema=2), "schema", "unknown value '2'; accepted: 1"),
        (b'{"schema": 1}', "", "missing required field `platform`"),
        (
            file_with(devices=[{"index": i, "type": kind} for i, kind in ((1, "cuda"), (1, "xpu"), (1, "rocm"))]),
            "",
            "devices: two of them are cuda:1; an index names one device of a type",
        ),
        (b"[]", "", "Expected `object`, got `array`"),
        (b"", "not JSON", ""),
        (b"{", "not JSON", ""),
        (b"schema = 1", "not JSON", ""),
        (b'{"schema": "\xff"}', "not JSON", ""),
        (b"\x7fELF\x00\xff\xfe\x80" * 100, "not JSON", ""),
        (b"[" * 1_000_000, "not JSON", ""),
        (b" " * (2 << 20), "larger than 1 MiB, which no such file is", ""),
    ],
    ids=lambda value: value[:30].decode("latin-1") if isinstance(value, bytes) else None,
)
def test_a_file_that_holds_no_facts_is_named_with_the_key(
    tmp_path: Path, content: bytes, place: str, said: str
) -> None:
    path = tmp_path / "odd.json"
    path.write_bytes(content)
    with pytest.raises(FactsError) as caught:
        Facts.load(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: {place}")
    assert [words for words in said.split("|") if words not in message] == []


@pytest.mark.parametrize(("name", "said"), [("missing.json", "No such file"), ("", "directory"), ("a\0b", "null")])
def test_a_path_that_cannot_be_read_is_named_with_the_cause(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(FactsError, match=said) as caught:
        Facts.load(tmp_path / name)
    assert str(caught.value).startswith(f"{tmp_path / name}: ")


# -- fingerprint and devices ---------------------------------------------------------------------------------


def test_how_facts_were_found_is_not_in_the_fingerprint() -> None:
    facts = machine("h200")
    found = msgspec.structs.replace(
        facts, problems=(Problem(source="nvml", error="x"),), environment={"CUDA_VISIBLE_DEVICES": "0"}
    )
    packages = dict(reversed(list(facts.packages.items())))
    assert found != facts
    assert found.fingerprint == facts.fingerprint == msgspec.structs.replace(facts, packages=packages).fingerprint
    assert len(facts.fingerprint) == len(bytes.fromhex(facts.fingerprint)) * 2 == 16


@pytest.mark.parametrize(
    "changes",
    [
        {"torch": TorchBuild(version="2.11.0+cu130", cuda="12.8")},
        {"torch": None},
        {"driver": Driver(version="1", cuda="13.0")},
        {"devices": ()},
        {"device": {"compute_capability": "9.1"}},
        {"tools": {"nvcc": Tool(path="/usr/local/cuda/bin/nvcc", version="12.6")}},
        {"packages": {"triton": "3.6.1"}},
        {"packages": {"triton": None}},
        {"platform": Platform(system="Linux", machine="aarch64", python="3.12.3", implementation="cpython")},
    ],
    ids=str,
)
def test_whatever_decides_changes_the_fingerprint(changes: dict[str, Any]) -> None:
    assert machine("h200", **changes).fingerprint != machine("h200").fingerprint


@pytest.mark.parametrize(
    ("name", "capability"), [("cuda", "12.0"), ("cuda:0", "12.0"), ("cuda:1", "9.0"), ("cuda:2", None), ("xpu", None)]
)
def test_a_device_goes_by_the_name_that_torch_gives_it(name: str, capability: str | None) -> None:
    device = machine("mixed-h100-rtx5090").device(name)
    assert (device and device.compute_capability) == capability


def test_a_rocm_device_is_named_cuda_and_the_processor_is_always_there() -> None:
    facts = machine("cpu-only", devices=(rocm_device(), Device(index=1, type="xpu")))
    assert facts.device("cuda:0") == facts.device("cuda") == rocm_device()
    assert facts.device("rocm:0") is None
    assert facts.device("xpu:1") == facts.devices[1]
    assert facts.device("cpu") == machine("h200").device("cpu") == CPU
    assert [each.torch_name for each in (*facts.devices, CPU)] == ["cuda:0", "xpu:1", "cpu"]


# -- detection -----------------------------------------------------------------------------------------------


def test_only_harmless_variables_get_into_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "hunter2-do-not-tell"
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "KERNELREG_FACTS", "CUDA_API_KEY", "GITHUB_TOKEN"):
        monkeypatch.setenv(name, secret)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("KERNELREG_PREFER", "fla")
    facts = detect(["msgspec"])
    assert secret not in facts.to_json()
    assert facts.environment["CUDA_VISIBLE_DEVICES"] == "0"
    assert facts.environment["KERNELREG_PREFER"] == "fla"


def test_a_path_that_is_no_unicode_can_still_be_saved(tmp_path: Path) -> None:
    facts = detect([], {"CUDA_HOME": "/opt/\udcff", "PATH": ""})
    facts.save(tmp_path / "facts.json")
    assert Facts.load(tmp_path / "facts.json").environment == {"CUDA_HOME": "/opt/?"}


def test_detection_imports_neither_torch_nor_a_kernel_library() -> None:
    code = (
        "import sys, kernelreg; facts = kernelreg.facts(); facts.to_json(); "
        "watched = {'torch', 'triton', 'fla', 'flash_qla', 'flashinfer', 'tilelang', 'kernelreg_backends', 'numpy'}; "
        "print(sorted(watched & {name.partition('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.fixture
def torch_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)


@pytest.mark.usefixtures("torch_not_loaded")
def test_torch_read_from_its_files_is_the_torch_that_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    from_files = detect_torch()
    monkeypatch.undo()
    torch = pytest.importorskip("torch")
    assert sys.modules["torch"] is torch
    assert from_files == detect_torch()
    assert from_files == (TorchBuild(version=torch.__version__, cuda=torch.version.cuda, hip=torch.version.hip), [])


@pytest.mark.usefixtures("torch_not_loaded")
@pytest.mark.parametrize(
    ("text", "build"),
    [
        ("__version__ = '2.8.0a0+x.nv25.06'\ncuda = '12.9'\nhip = None\n", ("2.8.0a0+x.nv25.06", "12.9", None)),
        (
            "from typing import Optional\n__version__: str = '2.9.0'\nhip: Optional[str] = '6.4.43482-0f2d60242'\n",
            ("2.9.0", None, "6.4.43482-0f2d60242"),
        ),
    ],
)
def test_torch_is_read_from_plain_and_annotated_assignments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, build: tuple[str, str | None, str | None]
) -> None:
    fake_torch(tmp_path, monkeypatch, text)
    version, cuda, hip = build
    assert detect_torch()[0] == TorchBuild(version=version, cuda=cuda, hip=hip)


@pytest.mark.usefixtures("torch_not_loaded")
@pytest.mark.parametrize(
    "text", [None, "__version__ = (", "cuda = '12.8'", "\0", "__version__ = compute()", "# \xff", "(" * 5000]
)
def test_a_torch_whose_version_file_is_broken_keeps_its_metadata_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    fake_torch(tmp_path, monkeypatch, text)
    install(tmp_path, "torch", version="2.7.1")
    build, problems = detect_torch()
    assert build == TorchBuild(version="2.7.1", cuda="", hip="")
    assert [problem.source for problem in problems] == ["torch"]
    assert str(tmp_path / "torch" / "version.py") in problems[0].error


@pytest.mark.usefixtures("torch_not_loaded")
def test_a_folder_named_torch_is_not_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    build, problems = detect_torch()
    assert build is None
    assert [problem.source for problem in problems] == ["torch"]
    assert f"{tmp_path / 'torch'} is a directory without code" in problems[0].error
    (tmp_path / "torch").rmdir()
    assert detect_torch() == (None, [])


def fake_torch(folder: Path, monkeypatch: pytest.MonkeyPatch, version_file: str | None) -> None:
    """A package named torch, first on the path, that must not be imported."""
    package = folder / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit(3)\n")
    if version_file is not None:
        (package / "version.py").write_text(version_file, encoding="latin-1")
    monkeypatch.syspath_prepend(folder)


def test_a_saved_file_has_the_usual_permissions(tmp_path: Path) -> None:
    (tmp_path / "usual").write_text("")
    machine("h200").save(tmp_path / "saved.json")
    assert (tmp_path / "saved.json").stat().st_mode == (tmp_path / "usual").stat().st_mode
