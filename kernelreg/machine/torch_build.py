"""The torch build, read without importing torch: from its files, or from the module where it is loaded already."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path

from kernelreg.decoding import read_bytes
from kernelreg.errors import FactsError
from kernelreg.faults import fault_of
from kernelreg.machine.model import Problem, TorchBuild
from kernelreg.machine.torch_devices import initialised_accelerator


def detect_torch() -> tuple[TorchBuild | None, list[Problem]]:
    """What ``import torch`` would give: version, CUDA and HIP build."""
    loaded = sys.modules.get("torch")
    version = getattr(loaded, "version", None)
    if version is not None and isinstance(getattr(version, "__version__", None), str):
        # The text alone: torch's own class of it cannot be saved.
        return _build({name: str(value) for name, value in vars(version).items() if isinstance(value, str)})
    return _from_files()


def _from_files() -> tuple[TorchBuild | None, list[Problem]]:
    try:
        spec = importlib.util.find_spec("torch")
    except BaseException as error:  # other people's finders, a module of that name which is none
        return _from_metadata(fault_of(error))
    if spec is None:
        return _from_metadata(None)
    if spec.origin is None:  # a directory of that name, not a package
        places = ", ".join(spec.submodule_search_locations or ())
        return _from_metadata(f"{places} is a directory without code, not torch")
    file = Path(spec.origin).with_name("version.py")
    try:
        values = _assignments(read_bytes(file, FactsError).decode("utf-8"))
    except FactsError as error:  # it names the file
        return _from_metadata(str(error), imported_from=file)
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        return _from_metadata(f"{file}: {error}", imported_from=file)
    if "__version__" not in values:
        return _from_metadata(f"{file}: no __version__ in it", imported_from=file)
    return _build(values)


def _build(values: Mapping[str, str]) -> tuple[TorchBuild, list[Problem]]:
    """The build that the names in ``torch/version.py`` tell of, and which devices it has that no other source knows."""
    build = TorchBuild(version=values["__version__"], cuda=values.get("cuda"), hip=values.get("hip"))
    if build.cuda or initialised_accelerator() is not None:
        return build, []
    others = [f"{name} {values[key]}" for key, name in (("hip", "ROCm"), ("xpu", "XPU")) if values.get(key)]
    text = "its devices are read once torch has initialised them"
    return build, [Problem(source="torch", error=f"built for {other}: {text}") for other in others]


def _from_metadata(problem: str | None, imported_from: Path | None = None) -> tuple[TorchBuild | None, list[Problem]]:
    """A torch that does not say what it is, by its distribution's version; None where nothing of it is installed.

    Its CUDA or HIP build is then not known, and an import will say what is wrong with it.
    """
    problems = [] if problem is None else [Problem(source="torch", error=problem)]
    try:
        version = importlib.metadata.version("torch") or ""
    except importlib.metadata.PackageNotFoundError:
        if imported_from is None:
            return None, problems
        version = ""
    except BaseException as error:  # metadata is other people's files
        fault_of(error)
        version = ""
    if problem is None:
        problems = [Problem(source="torch", error="its metadata is installed, but there is no package to import")]
    return TorchBuild(version=version, cuda="", hip=""), problems


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
