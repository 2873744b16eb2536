"""The torch build, read without importing torch: from its files, or from the module where it is loaded already."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import sys
from pathlib import Path

from kernelreg.machine.model import Problem, TorchBuild


def detect_torch() -> tuple[TorchBuild | None, list[Problem]]:
    """What ``import torch`` would give: version, CUDA and HIP build."""
    loaded = sys.modules.get("torch")
    version = getattr(loaded, "version", None)
    if version is not None and isinstance(getattr(version, "__version__", None), str):
        return TorchBuild(version=version.__version__, cuda=version.cuda, hip=version.hip), []
    return _from_files()


def _from_files() -> tuple[TorchBuild | None, list[Problem]]:
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError) as error:
        return None, [Problem(source="torch", error=f"{type(error).__name__}: {error}")]
    if spec is None:
        return None, []
    if spec.origin is None:  # a directory of that name, not a package
        places = ", ".join(spec.submodule_search_locations or ())
        return None, [Problem(source="torch", error=f"{places} is a directory without code, not torch")]
    file = Path(spec.origin).with_name("version.py")
    try:
        values = _assignments(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
        return _from_metadata([Problem(source="torch", error=f"{file}: {error}")])
    version = values.get("__version__")
    if version is None:
        return _from_metadata([Problem(source="torch", error=f"{file}: no __version__ in it")])
    return TorchBuild(version=version, cuda=values.get("cuda"), hip=values.get("hip")), []


def _from_metadata(problems: list[Problem]) -> tuple[TorchBuild | None, list[Problem]]:
    """The distribution's version alone; its CUDA or HIP build is then not known, and the problem says why."""
    try:
        return TorchBuild(version=importlib.metadata.version("torch")), problems
    except (importlib.metadata.PackageNotFoundError, KeyError, OSError, ValueError):
        return None, problems


def _assignments(source: str) -> dict[str, str]:
    """The module's top-level ``name = "text"`` lines, annotated or not."""
    found: dict[str, str] = {}
    for node in ast.parse(source).body:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(text)))
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant(value=str(text)))
            ):
                found[name] = text
            case _:
                pass
    return found
