"""What ``tune``, ``bench`` and ``lock`` are told of a model's layers."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from kernelreg.call import DTYPES
from kernelreg.errors import ConfigurationError, unknown_name
from kernelreg.models import MODELS, Shape, model_named
from kernelreg.ops import operation_named
from kernelreg.workloads import WORKLOADS, Workload, workloads_named


def add_layer_arguments(parser: argparse.ArgumentParser) -> None:
    """The layer's shape, how it is shared, and what it computes in."""
    names = ", ".join(MODELS)
    parser.add_argument("--model", type=words, metavar="NAME,…", help=f"head shapes of models: {names}")
    parser.add_argument("--heads", type=integers, metavar="H,HV", help="a head shape of your own: of q and k, and of v")
    parser.add_argument("--head-dim", type=integers, metavar="K[,V]", help="with --heads: 128 if not given")
    parser.add_argument("--tp", type=integers, default=[1], metavar="N,…", help="devices that share the heads (1)")
    parser.add_argument("--dtype", default="bfloat16", help=f"of q, k and v (bfloat16): {', '.join(DTYPES)}")
    workloads = "; ".join(f"{each.name}, {each.summary}" for each in WORKLOADS)
    parser.add_argument("--workload", type=words, metavar="W,…", help=f"these alone: {workloads}")


def integers(text: str) -> list[int]:
    """Whole numbers above 0 with commas between them, for argparse.

    Raises:
        ArgumentTypeError: they are none.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and 0 < int(part) < 2**31 for part in parts):
        raise argparse.ArgumentTypeError(f"{text}; accepted: whole numbers above 0, such as 1,2,4")
    return [int(part) for part in parts]


def words(text: str) -> list[str]:
    """Names with commas between them, for argparse."""
    return [part.strip() for part in text.split(",") if part.strip()]


def shapes_of(given: argparse.Namespace) -> list[Shape]:
    """One device's share of each layer, for each way of sharing it.

    Raises:
        ConfigurationError: no layer, or one that cannot be shared so.
    """
    if bool(given.model) == bool(given.heads):
        raise ConfigurationError(f"give one of --model and --heads; models: {', '.join(MODELS)}")
    if given.model:
        if given.head_dim is not None:
            raise ConfigurationError("--head-dim goes with --heads; a model has its own")
        layers = [model_named(name).shape for name in given.model]
    else:
        shape = Shape(*_pair("--heads", given.heads), *_pair("--head-dim", given.head_dim or [128]))
        if shape.value_heads % shape.heads:
            raise ConfigurationError(f"--heads {shape.heads},{shape.value_heads}: HV is no multiple of H")
        layers = [shape]
    return list(dict.fromkeys(layer.split(each) for layer in layers for each in given.tp))


def _pair(flag: str, values: Sequence[int]) -> tuple[int, int]:
    """One number for both, or one for each."""
    if len(values) > 2:
        raise ConfigurationError(f"{flag} {','.join(map(str, values))}; accepted: one number, or two")
    return values[0], values[-1]


def workloads_of(given: argparse.Namespace, operations: Sequence[str]) -> tuple[Workload, ...]:
    """The workloads that were asked for, of these operations.

    ``gdn`` stands for all of its family here, as each model makes both kinds of call.

    Raises:
        ConfigurationError: an unknown name, or nothing left of them.
    """
    wanted = [] if "gdn" in operations else [operation_named(each).name for each in operations]
    found = workloads_named(given.workload, wanted)
    if not found:
        raise ConfigurationError(f"--workload {','.join(given.workload)}: none is of {', '.join(wanted)}")
    if given.dtype not in DTYPES:
        raise ConfigurationError(f"--dtype: {unknown_name('dtype', given.dtype, DTYPES)}")
    return found
