"""The command line: one file a command. No traceback, ever; text for a person, ``--json`` for a program."""

from __future__ import annotations

import argparse
import io
import logging
import os
import sys
from collections.abc import Sequence

from kernelreg._version import __version__
from kernelreg.errors import KernelregError, NoBackendError

OK, NOT_OK, USAGE = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; gives the exit code: 0 yes, 1 no, 2 wrong usage."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without a character shows a question mark for it
    parser = _parser()
    words = parser.parse_args(arguments)
    try:
        code: int = words.run(words)
        sys.stdout.flush()
        return code
    except NoBackendError as error:
        print(f"kernelreg: {error}", file=sys.stderr)
        return NOT_OK
    except KernelregError as error:
        print(f"kernelreg: {error}", file=sys.stderr)
        return USAGE
    except BrokenPipeError:  # the reader has left, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NOT_OK
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # a fault of ours: say so in one line, and where to find the rest
        logging.getLogger("kernelreg").debug("unexpected error", exc_info=True)
        print(
            f"kernelreg: unexpected {type(error).__name__}: {error} (please report it; KERNELREG_LOG=DEBUG says where)",
            file=sys.stderr,
        )
        return NOT_OK


def _parser() -> argparse.ArgumentParser:
    from kernelreg.cli import backends, doctor, facts, resolve, verify

    parser = argparse.ArgumentParser(
        prog="kernelreg", description="Which Gated Delta Net kernel runs here, and why not the others."
    )
    parser.add_argument("--version", action="version", version=f"kernelreg {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (doctor, resolve, facts, backends, verify):
        each = commands.add_parser(command.NAME, help=command.HELP, description=command.HELP)
        each.add_argument("--json", action="store_true", help="print JSON")
        each.add_argument("--facts", metavar="FILE", help="a saved facts file instead of this machine")
        command.add_arguments(each)
        each.set_defaults(run=command.run)
    return parser
