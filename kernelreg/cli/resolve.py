"""``kernelreg resolve``: which kernel runs a call, and why not the others."""

from __future__ import annotations

import argparse

from kernelreg.api import resolve
from kernelreg.call import DTYPES
from kernelreg.cli._shared import facts_of, write
from kernelreg.errors import NoBackendError

NAME = "resolve"
HELP = "Explain which kernel runs a call, and why not the others. What is not said of the call is not tested."

_DTYPE_FLAGS = {
    "dtype": "dtype of q, k and v",
    "gate-dtype": "dtype of g",
    "state-dtype": "dtype of the state",
}
_SIZE_FLAGS = {
    "head-dim-k": "K",
    "head-dim-v": "V",
    "heads": "H",
    "value-heads": "HV",
    "tokens": "B × T; unknown counts as many",
    "sequences": "N",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The call, in the words of ``kernelreg.resolve``."""
    parser.add_argument("operation", help="gdn.chunk (or gdn), gdn.recurrent")
    parser.add_argument("--device", help="as torch names it, such as cuda:0; the current accelerator if not given")
    for flag, text in _DTYPE_FLAGS.items():
        parser.add_argument(f"--{flag}", help=f"{text}: {', '.join(DTYPES)}")
    for flag, text in _SIZE_FLAGS.items():
        parser.add_argument(f"--{flag}", type=int, metavar="N", help=text)
    parser.add_argument("--features", help="what the call uses, comma-separated: varlen,backward")


def run(words: argparse.Namespace) -> int:
    """0 with a kernel, 1 without."""
    features = None if words.features is None else [each.strip() for each in words.features.split(",") if each.strip()]
    flags = [flag.replace("-", "_") for flag in (*_DTYPE_FLAGS, *_SIZE_FLAGS)]
    options = {flag: getattr(words, flag) for flag in flags}
    try:
        found = resolve(words.operation, device=words.device, facts=facts_of(words), features=features, **options)
    except NoBackendError as error:
        found = error.resolution
    if words.json:
        write(found.to_json())
    else:
        write(found.explain())
    return 0 if found.backend else 1
