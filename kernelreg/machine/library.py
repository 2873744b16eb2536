"""What else is to be said of a driver's library that the loader does not find."""

from __future__ import annotations

from pathlib import Path

#: Where WSL puts the Windows driver's libraries. Its distributions tell the loader; a container or a sandbox may not.
_WSL = Path("/usr/lib/wsl/lib")


def with_hint(error: str, library: str) -> str:
    """A child's error, with where the library is, if WSL has it and the loader could not find it."""
    if error.startswith(f"{library}: cannot open") and (_WSL / library).exists():
        return f"{error}; {_WSL} has it: put that folder on LD_LIBRARY_PATH"
    return error
