"""Writing a file whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from kernelreg.errors import KernelregError


def write_whole(path: str | os.PathLike[str], text: str, error: type[KernelregError]) -> None:
    """Put the text in the file's place once all of it is written.

    Raises:
        error: it cannot be written; names the file and the cause.
    """
    target = Path(path)
    try:
        draft = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            draft.write_text(text, encoding="utf-8")
            draft.replace(target)
        finally:
            draft.unlink(missing_ok=True)
    except (OSError, ValueError) as cause:  # no file's name has a NUL, or is empty
        raise error(f"{target}: {getattr(cause, 'strerror', None) or cause}") from cause
