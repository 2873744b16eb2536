"""What the installed FlashInfer says of itself, for ``kernelreg backends --stale``.

Its lists of capabilities where its functions have them (``is_compute_capability_supported``). Prefill has none up to
0.7.4: it takes the kernel of the card's generation, and has None in the place of one that it cannot offer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from kernelreg.claims import Claim, Unasked, unasked

_CARDS = ("7.5", "8.0", "8.6", "8.7", "8.9", "9.0", "10.0", "10.3", "10.7", "11.0", "12.0", "12.1")
_KERNEL = re.compile(r"chunk_gated_delta_rule_sm(\d+)")
#: Operation, module and function: what the adapter calls.
_FUNCTIONS = (
    ("gdn.chunk", "flashinfer.gdn_prefill", "chunk_gated_delta_rule"),
    ("gdn.recurrent", "flashinfer.gdn_decode", "gated_delta_rule_decode_pretranspose"),
)


def claims() -> Iterator[Claim | Unasked]:
    """The cards that prefill and decode take."""
    for operation, place, name in _FUNCTIONS:
        asked = f"{place}.{name}"
        try:
            function = getattr(import_module(place), name)
            listed = getattr(function, "is_compute_capability_supported", None)
            if listed is not None:
                yield from _listed(operation, asked, listed)
            elif operation == "gdn.chunk":
                yield from _by_kernel(operation)
            else:
                yield Unasked(asked=asked, cause="it has no list of capabilities")
        except Exception as error:
            yield unasked(asked, error)


def _listed(operation: str, asked: str, supported: Any) -> Iterator[Claim]:
    for card in _CARDS:
        takes = bool(supported(int(card.replace(".", ""))))
        said = None if takes else "not in its list of capabilities"
        yield Claim(
            operation=operation,
            asked=f"{asked}.is_compute_capability_supported",
            takes=takes,
            said=said,
            compute_capability=card,
        )


def _by_kernel(operation: str) -> Iterator[Claim | Unasked]:
    """By the kernels that there are, one for each generation, and the cards that the CuTe DSL here compiles for."""
    place = "flashinfer.gdn_kernels"
    kernels = import_module(place)
    found = {match[1]: name for name in dir(kernels) if (match := _KERNEL.fullmatch(name))}
    if not found:
        raise LookupError(f"{place} has no chunk_gated_delta_rule_smNN")
    compiles = _compiles()
    for card in _CARDS:
        major, minor = map(int, card.split("."))
        names = [name for generation, name in found.items() if int(generation) // 10 == major]
        asked = f"{place}.{names[0]}" if names else f"the kernels of {place}"
        if names and all(getattr(kernels, name) is None for name in names):
            yield Unasked(asked=asked, cause="it is None: its module does not import here")
            continue
        takes = bool(names) and compiles(major, minor)
        said = (
            None if takes else "the installed CuTe DSL has no such target" if names else f"{', '.join(found.values())}"
        )
        yield Claim(operation=operation, asked=asked, takes=takes, said=said, compute_capability=card)


def _compiles() -> Any:
    """The library's own test of the compiler; releases before it take what they have a kernel for."""
    try:
        return import_module("flashinfer.cute_dsl.availability").is_cute_dsl_arch_supported
    except (ImportError, AttributeError):
        return lambda major, minor: True
