"""The command line: one file a command. No traceback, ever; text for a person, ``--json`` for a program."""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import sys
from collections.abc import Sequence
from typing import TextIO

from kernelreg._version import __version__
from kernelreg.announce import set_level
from kernelreg.cli._shared import complain
from kernelreg.errors import ConfigurationError, KernelregError, NoBackendError
from kernelreg.policy import read_log_level

OK, NOT_OK, USAGE = 0, 1, 2
#: What a shell calls a program that SIGINT or SIGPIPE ended.
INTERRUPTED, UNREAD = 130, 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; gives the exit code: 0 yes, 1 no, 2 wrong usage, 130 interrupted, 141 the reader has left."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without a character shows a question mark for it
    try:
        try:
            return _run(arguments)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:  # as of `| head`
        _drop_unwritten(sys.stdout, sys.stderr)
        return UNREAD
    except OSError as error:  # a full disk, no process to be had
        _drop_unwritten(sys.stdout)
        complain(str(error))
        return NOT_OK
    except KeyboardInterrupt:
        return INTERRUPTED


def _run(arguments: Sequence[str] | None) -> int:
    words = _parser().parse_args(arguments)
    with contextlib.suppress(ConfigurationError):  # said by the commands that read the environment
        set_level(read_log_level(os.environ))
    try:
        code: int = words.run(words)
        return code
    except NoBackendError as error:
        complain(str(error))
        return NOT_OK
    except KernelregError as error:
        complain(str(error))
        return USAGE
    except OSError:
        logging.getLogger("kernelreg").debug("the system refused", exc_info=True)
        raise
    except Exception as error:  # a fault of ours: say so in one line, and where to find the rest
        logging.getLogger("kernelreg").debug("unexpected error", exc_info=True)
        complain(f"unexpected {type(error).__name__}: {error} (please report it; KERNELREG_LOG=DEBUG says where)")
        return NOT_OK


def _drop_unwritten(*streams: TextIO | None) -> None:
    """What a stream could not write goes nowhere; the interpreter would try again, and complain, at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        if stream is not None:
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _parser() -> argparse.ArgumentParser:
    from kernelreg.cli import backends, bench, doctor, facts, lock, resolve, tune, verify

    parser = argparse.ArgumentParser(
        prog="kernelreg", description="Which Gated Delta Net kernel runs here, and why not the others."
    )
    parser.add_argument("--version", action="version", version=f"kernelreg {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (doctor, resolve, facts, backends, verify, tune, bench, lock):
        each = commands.add_parser(command.NAME, help=command.HELP, description=command.HELP)
        each.add_argument("--json", action="store_true", help="print JSON")
        each.add_argument("--facts", metavar="FILE", help="a saved facts file instead of this machine")
        command.add_arguments(each)
        each.set_defaults(run=command.run)
    return parser
