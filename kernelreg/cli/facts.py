"""``kernelreg facts``: what this machine is, as a facts file."""

from __future__ import annotations

import argparse

from kernelreg.cli._shared import facts_of, warn_of_environment, write

NAME = "facts"
HELP = "Print the facts of this machine as JSON: `kernelreg facts > here.json` makes a facts file."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Nothing beyond what every command has."""


def run(words: argparse.Namespace) -> int:
    """JSON with or without ``--json``: a facts file is for programs and people alike."""
    warn_of_environment()
    write(facts_of(words).to_json())
    return 0
