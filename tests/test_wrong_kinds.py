"""The public functions given what is no argument of theirs: an error of kernelreg's that says what is accepted."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kernelreg
from kernelreg.descriptor import load_descriptor
from kernelreg.errors import KernelregError
from kernelreg.registry import Registry

#: Things that no argument below may be.
STRANGE: dict[str, Any] = {"number": 5, "None": None, "bytes": b"x", "list": [5], "object": object(), "type": int}


class BytesPath(os.PathLike[bytes]):
    """A path, but not one that a text could name."""

    def __fspath__(self) -> bytes:
        return b"x"


TAKES_A_PATH: dict[str, Callable[[Any], object]] = {
    "Facts.load": kernelreg.Facts.load,
    "Facts.save": lambda value: kernelreg.facts().save(value),
    "load_descriptor": load_descriptor,
    "quarantine().save": lambda value: kernelreg.quarantine().save(value),
    "register": kernelreg.register,
}


@pytest.mark.parametrize("value", [*STRANGE.values(), BytesPath()], ids=[*STRANGE, "path of bytes"])
@pytest.mark.parametrize("name", TAKES_A_PATH)
def test_what_is_no_path_is_told_so(name: str, value: object) -> None:
    with pytest.raises(KernelregError, match=r"; accepted: (a path|the path of a backend\.toml)") as caught:
        TAKES_A_PATH[name](value)
    assert name in str(caught.value) or isinstance(value, BytesPath)


@pytest.mark.parametrize("name", TAKES_A_PATH)
def test_a_path_that_no_file_can_have_is_told_with_its_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(KernelregError, match=r"file.x"):
        TAKES_A_PATH[name](tmp_path / "file\0x")


OTHERS: dict[str, tuple[Callable[[Any], object], list[str]]] = {
    "on_resolve": (kernelreg.on_resolve, ["number", "None", "bytes", "list", "object"]),
    "adding": (Registry().adding, [*STRANGE]),
    "device": (lambda value: kernelreg.facts().device(value), [*STRANGE]),
    "from_json": (kernelreg.Resolution.from_json, ["number", "None", "list", "object", "type"]),
    "operation": (kernelreg.resolve, [*STRANGE]),
    "device=": (lambda value: kernelreg.resolve(device=value), ["number", "bytes", "list", "object", "type"]),
    "facts": (lambda value: kernelreg.resolve(facts=value), ["number", "bytes", "list", "object", "type"]),
    "policy": (lambda value: kernelreg.resolve(policy=value), ["number", "bytes", "list", "object", "type"]),
    "backend": (lambda value: kernelreg.use(backend=value), ["number", "bytes", "list", "object", "type"]),
    "prefer": (lambda value: kernelreg.use(prefer=value), ["number", "bytes", "list", "object", "type"]),
    "clear": (lambda value: kernelreg.quarantine().clear(value), ["number", "bytes", "list", "object", "type"]),
}


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, (_, kinds) in OTHERS.items() for kind in kinds])
def test_what_is_no_argument_is_told_with_what_is(name: str, kind: str) -> None:
    with pytest.raises(KernelregError, match="accepted: "):
        OTHERS[name][0](STRANGE[kind])


def test_what_was_refused_left_nothing_behind(facts_folder: Path) -> None:
    facts = facts_folder / "h200.json"
    before = kernelreg.resolve("gdn", facts=facts)
    takes: list[Callable[[Any], object]] = [kernelreg.register, kernelreg.on_resolve]
    for take in takes:
        with pytest.raises(KernelregError):
            take(5)
    assert kernelreg.resolve("gdn", facts=facts) == before


def test_a_long_value_is_not_repeated_whole() -> None:
    with pytest.raises(KernelregError) as caught:
        kernelreg.Facts.load([5] * 1000)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 200
