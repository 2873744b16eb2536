"""Installed distributions for tests: a site folder with packages and their metadata, as pip would leave it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def install(
    site: Path,
    name: str,
    *,
    version: str | None = "1.0",
    entry_points: Mapping[str, str] | None = None,
    group: str = "kernelreg.backends",
    files: Mapping[str, str] | None = None,
) -> Path:
    """Write a distribution with entry points of one group; gives its metadata folder.

    Args:
        site: the folder to put on ``sys.path``.
        name: the distribution's name.
        version: None leaves the version out of its metadata.
        entry_points: of the group, name to value.
        files: the text of each file, by its path in ``site``.
    """
    info = site / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    said = f"Version: {version}\n" if version is not None else ""
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\n{said}", encoding="utf-8")
    if entry_points:
        lines = "".join(f"{key} = {value}\n" for key, value in entry_points.items())
        (info / "entry_points.txt").write_text(f"[{group}]\n{lines}", encoding="utf-8")
    for path, text in (files or {}).items():
        file = site / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return info
