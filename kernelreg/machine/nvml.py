"""Cards as NVML sees them, asked in a child process: no CUDA context, and a hang or a crash ends there."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import msgspec

from kernelreg.decoding import NOT_JSON
from kernelreg.faults import fault_of
from kernelreg.machine.child import NoAnswerError, answer_of
from kernelreg.machine.cuda_driver import LIBRARY as CUDA_LIBRARY
from kernelreg.machine.cuda_driver import cuda_version
from kernelreg.machine.library import with_hint
from kernelreg.machine.model import Driver, Problem
from kernelreg.machine.visible import Card

#: Seconds that NVML may take to start; a machine with eight cards and no persistence daemon needs several.
NVML_SECONDS = 30.0

#: The library that nvidia-ml-py loads on Linux; on Windows it knows several places.
_LIBRARY = "libnvidia-ml.so.1"


class Reading(msgspec.Struct, frozen=True):
    """What NVML says of driver and cards.

    Attributes:
        cards: in PCI bus order; None where NVML is not there or does not count them.
        whole: each card was told with all that its place among the others and its kernels depend on.
        cuda_library: what keeps the CUDA driver's library from being loaded, or None.
    """

    driver: Driver | None
    cards: tuple[Card, ...] | None
    problems: tuple[Problem, ...]
    whole: bool = True
    cuda_library: str | None = None


class _Versions(msgspec.Struct, frozen=True):
    version: str | None
    cuda: int | None


class _Answer(msgspec.Struct, frozen=True):
    driver: _Versions | None
    cards: tuple[Card | None, ...] | None
    problems: tuple[str, ...]


def read_nvml() -> Reading:
    """Ask NVML for the driver and every card."""
    ended = None
    try:
        folder = _folder_of_pynvml()
        data = answer_of("_nvml_child.py", _LIBRARY, os.fspath(folder), CUDA_LIBRARY, seconds=NVML_SECONDS)
    except NoAnswerError as error:
        data, ended = error.printed, str(error)
    nvml, answered, cuda = data.partition(b"\n")
    try:
        if ended and not answered:
            raise NoAnswerError(ended)
        answer = msgspec.json.decode(nvml, type=_Answer)
        # Where the child did not live to say it, loading the CUDA driver's library has ended it.
        unloadable = ended if not cuda else msgspec.json.decode(cuda, type=str | None)
    except (NoAnswerError, *NOT_JSON) as error:
        return Reading(None, None, (Problem(source="nvml", error=str(error)),))
    known = [card for card in answer.cards or () if card is not None]
    known.sort(key=lambda card: card.device.pci_bus_id or "")
    return Reading(
        driver=_driver(answer.driver),
        cards=None if answer.cards is None else tuple(known),
        problems=tuple(Problem(source="nvml", error=with_hint(text, _LIBRARY)) for text in answer.problems),
        whole=all(card is not None and _is_whole(card) for card in answer.cards or ()),
        cuda_library=None if unloadable is None else with_hint(unloadable, CUDA_LIBRARY),
    )


def _driver(told: _Versions | None) -> Driver | None:
    if told is None:
        return None
    return Driver(version=told.version, cuda=None if told.cuda is None else cuda_version(told.cuda))


def _is_whole(card: Card) -> bool:
    device = card.device
    return None not in (device.name, device.uuid, device.pci_bus_id, device.compute_capability)


def _folder_of_pynvml() -> Path:
    """The folder from which ``import pynvml`` would load nvidia-ml-py's module.

    Raises:
        NoAnswerError: there is none.
    """
    try:
        spec = importlib.util.find_spec("pynvml")
    except BaseException as error:  # other people's finders
        raise NoAnswerError(f"pynvml: {fault_of(error)}") from error
    if spec is None or spec.origin is None:
        raise NoAnswerError("nvidia-ml-py is not installed; fix: pip install nvidia-ml-py")
    origin = Path(spec.origin)
    return origin.parents[1] if spec.submodule_search_locations else origin.parent
