"""The inputs that are kept in the repository, and which ones of a run are worth it."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

from tests.fuzz.limits import attempt, name_of

HERE = Path(__file__).parent
#: Inputs that once failed, each since its fix, by target.
FAILED = HERE / "corpus"
#: A few inputs that reach every line of kernelreg that the fuzzer reached, by target.
SEEDS = HERE / "seeds"


#: A longer input is stored compressed: those that took too long repeat one piece, and shrink to almost nothing.
_PLAIN_BYTES = 16 << 10


def kept(folder: Path, target: str) -> list[bytes]:
    """What is kept for a target."""
    return [read(path) for path in sorted((folder / target).glob("*"))]


def read(path: Path) -> bytes:
    """One kept input."""
    return zlib.decompress(path.read_bytes()) if path.suffix == ".z" else path.read_bytes()


def place(folder: Path, target: str, data: bytes) -> Path:
    """Where an input is kept."""
    return folder / target / (name_of(data) + (".z" if len(data) > _PLAIN_BYTES else ""))


def keep(folder: Path, target: str, inputs: Iterable[bytes]) -> None:
    """Write inputs under their hashes."""
    for data in inputs:
        path = place(folder, target, data)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(zlib.compress(data, 9) if path.suffix == ".z" else data)


def cover(run: Callable[[bytes], None], inputs: Iterable[bytes]) -> list[bytes]:
    """The short inputs first, those that reach a line of kernelreg which none before them did."""
    chosen, reached = [], set[tuple[str, int]]()
    for data in sorted(inputs, key=lambda each: (len(each), each)):
        lines = _lines(run, data)
        if not lines <= reached:
            chosen.append(data)
            reached |= lines
    return chosen


def _lines(run: Callable[[bytes], None], data: bytes) -> set[tuple[str, int]]:
    lines: set[tuple[str, int]] = set()

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        file = frame.f_code.co_filename
        if "kernelreg" not in file or "tests" in file:
            return None
        lines.add((file, frame.f_lineno))
        return trace

    sys.settrace(trace)
    try:
        attempt(run, data)
    finally:
        sys.settrace(None)
    return lines
