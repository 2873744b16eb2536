"""The distributions: what is in them, and what works where nothing but the base dependencies is installed."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tests.machines import FACTS

pytestmark = pytest.mark.install
ROOT = Path(__file__).parent.parent


def run(*command: str | Path, code: int = 0, cwd: Path | None = None) -> str:
    """Standard output of a command that must end with this exit code."""
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False, timeout=600, cwd=cwd
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The sdist, and the wheel that is built from it."""
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    return {"wheel": next(folder.glob("*.whl")), "sdist": next(folder.glob("*.tar.gz"))}


@pytest.fixture(scope="module", params=["wheel", "sdist"])
def bare(
    request: pytest.FixtureRequest, distributions: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The Python of a new environment with kernelreg and its base dependencies alone."""
    folder = tmp_path_factory.mktemp(f"bare-{request.param}")
    venv.create(folder, with_pip=True)
    python = folder / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    run(python, "-m", "pip", "install", "--quiet", distributions[request.param])
    return python


def test_both_distributions_hold_every_descriptor(distributions: dict[str, Path]) -> None:
    wheel = set(zipfile.ZipFile(distributions["wheel"]).namelist())
    with tarfile.open(distributions["sdist"]) as archive:
        sdist = {name.partition("/")[2] for name in archive.getnames()}
    for name in ("torch", "fla", "flash_qla", "flashinfer"):
        assert f"kernelreg_backends/{name}/backend.toml" in wheel
        assert f"backends/{name}/backend.toml" in sdist
    assert {"kernelreg/py.typed", "kernelreg_backends/py.typed"} <= wheel
    assert not any(name.startswith(("tests/", "backends/")) for name in wheel)
    assert {"LICENSE", "README.md"} <= sdist


def test_base_dependencies_are_few(bare: Path) -> None:
    listed = run(
        bare, "-c", "import importlib.metadata as m; print(*{each.name.lower() for each in m.distributions()})"
    )
    names = set(listed.split()) - {"pip", "setuptools", "wheel"}
    needed = {"kernelreg", "msgspec", "nvidia-ml-py", "packaging", "rich"}
    assert names - needed <= {"markdown-it-py", "mdurl", "pygments", "tomli"}  # rich's own, and tomli below 3.11
    assert needed <= names


def test_without_torch_it_imports_explains_and_diagnoses(bare: Path, tmp_path: Path) -> None:
    run(bare, "-c", "import kernelreg; kernelreg.facts()", cwd=tmp_path)
    text = run(bare, "-m", "kernelreg", "doctor", code=1, cwd=tmp_path)
    assert "torch-missing" in text
    assert "fix: pip install" in text
    report = json.loads(run(bare, "-m", "kernelreg", "doctor", "--json", code=1, cwd=tmp_path))
    assert report["facts"]["torch"] is None
    assert report["problems"] == report["facts"]["problems"]
    told = run(bare, "-m", "kernelreg", "resolve", "gdn", "--facts", FACTS / "h200.json", cwd=tmp_path)
    assert told.startswith("gdn.chunk on cuda:0: flash_qla sm90")
    listed = json.loads(run(bare, "-m", "kernelreg", "backends", "--json", cwd=tmp_path))
    assert [each["name"] for each in listed["backends"]] == ["fla", "flash_qla", "flashinfer", "torch"]
    assert run(bare.with_name("kernelreg"), "--version").startswith("kernelreg ")
