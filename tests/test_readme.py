"""The README's output is what the program prints: every command in it that reads a facts file is run again."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
#: A command at a prompt, and what stands below it until the block ends or the next prompt comes.
_SHOWN = re.compile(r"^\$ python (.+)\n((?:(?!\$ |```).*\n)*)", re.MULTILINE)
SHOWN = {
    command: output
    for command, output in _SHOWN.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    if "--facts" in command
}


def test_the_readme_shows_the_doctor_and_a_decision() -> None:
    assert {command.split()[2] for command in SHOWN} >= {"doctor", "resolve"}


@pytest.mark.parametrize("command", SHOWN)
def test_the_output_is_the_programs(command: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KERNELREG_")}
    done = subprocess.run(
        [sys.executable, *shlex.split(command)],
        cwd=ROOT,
        env={**environment, "COLUMNS": "110"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.stdout.strip() == SHOWN[command].strip()
