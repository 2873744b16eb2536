"""Versions of installed distributions. Their metadata decides: a directory of the right name proves nothing."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable

from kernelreg.faults import fault_of
from kernelreg.machine.model import Problem


def detect_packages(names: Iterable[str]) -> tuple[dict[str, str], list[Problem]]:
    """The version of each named distribution that is installed."""
    versions: dict[str, str] = {}
    problems: list[Problem] = []
    for name in sorted(set(names)):
        try:
            version: str | None = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        except BaseException as error:  # other people's files and finders: whatever is wrong becomes a problem
            problems.append(Problem(source=f"package {name}", error=fault_of(error)))
            version = ""
        if version is None:
            problems.append(Problem(source=f"package {name}", error="its metadata names no version"))
        # Installed, but its version cannot be told: an empty text, which no range accepts and no check calls missing.
        versions[name] = version or ""
    return versions, problems
