"""Strict decoding of files into typed values, with errors that name file, key and what is accepted.

msgspec validates; this module says it in the words of the person who wrote the file.
"""

from __future__ import annotations

import os
import re
import stat
import sys
import types
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec

from kernelreg.errors import KernelregError, unknown_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T", bound=msgspec.Struct)

#: All that msgspec raises over what is no JSON, or not of the type: text that is not UTF-8, brackets without end.
NOT_JSON = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)

#: No facts file or record comes near this size; a larger one is a mistake, or an attack that takes seconds to read.
MAX_BYTES = 1 << 20
#: Parts of a dotted key: the reader's time grows with their square.
_MAX_PARTS = 64

#: A text of one line without characters that move a terminal's cursor or hide what follows: it is shown, and pasted.
ONE_LINE = r"^(?![\s\S]*[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff])"

_NONBLOCK = getattr(os, "O_NONBLOCK", 0)
_KINDS = {
    stat.S_ISDIR: "a directory",
    stat.S_ISFIFO: "a named pipe",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
    stat.S_ISSOCK: "a socket",
}
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(?P<field>.*)`")
_UNKNOWN_VALUE = re.compile(r"Invalid enum value '?(?P<value>.*?)'?$")
_PATH = re.compile(r" - at (?P<key>`key` in )?`(?P<path>[^`]*)`$")
_PATTERN = "Expected `str` matching regex "
#: What no key stands in: strings of all four kinds, closed or not, and comments.
_QUOTED = re.compile(
    r'"""(?:[^\\]|\\.)*?(?:"""|\Z)'
    r"|'{3}.*?(?:'{3}|\Z)"
    r'|"(?:[^"\\\n]|\\.)*"?'
    r"|'[^'\n]*'?"
    r"|#[^\n]*",
    re.DOTALL,
)
_DOTTED = re.compile(rf"(?<![\w-])(?:[\w-]+[ \t]*\.[ \t]*){{{_MAX_PARTS}}}")
_STEP = re.compile(r"\.?([^.\[\]]+)|\[(\d+|\.\.\.)\]")


def read_bytes(path: Path, error: type[KernelregError], *, limit: int = MAX_BYTES) -> bytes:
    """The file's bytes.

    Args:
        limit: how many bytes it may have.

    Raises:
        error: the file cannot be read, is no regular file (a pipe may never answer, a device never ends), or is
            larger; names the file and the cause.
    """
    try:
        _check_regular(path.stat().st_mode)
        # Not blocking, for what takes the file's place between the look and the opening.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | _NONBLOCK)) as file:
            _check_regular(os.fstat(file.fileno()).st_mode)
            data = file.read(limit + 1) or b""
    except (OSError, ValueError) as cause:
        text = getattr(cause, "strerror", None) or str(cause)
        raise error(f"{path}: {text}") from cause
    if len(data) > limit:
        size = f"{limit >> 20} MiB" if limit >= 1 << 20 else f"{limit >> 10} KiB"
        raise error(f"{path}: larger than {size}, which no such file is")
    return data


def _check_regular(mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = next((name for is_kind, name in _KINDS.items() if is_kind(mode)), "something else")
        raise ValueError(f"{kind}, not a regular file")


def decode_toml(data: bytes, kind: type[T], *, source: str, error: type[KernelregError]) -> T:
    """``data`` as TOML of the given type; ``source`` names it in errors."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as cause:
        raise error(f"{source}: not UTF-8 at byte {cause.start}") from cause
    if _DOTTED.search(_QUOTED.sub("q", text)):
        raise error(f"{source}: a key of more than {_MAX_PARTS} parts, which no such file has")
    try:
        parsed = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as cause:
        raise error(f"{source}: not TOML: {cause}") from cause
    return _convert(parsed, kind, source, error)


def decode_json(data: bytes, kind: type[T], *, source: str, error: type[KernelregError]) -> T:
    """``data`` as JSON of the given type; ``source`` names it in errors."""
    try:
        parsed = msgspec.json.decode(data)
    except NOT_JSON as cause:
        raise error(f"{source}: not JSON: {cause}") from cause
    return _convert(parsed, kind, source, error)


def read_json(path: Path, kind: type[T], error: type[KernelregError], *, limit: int = MAX_BYTES) -> T:
    """A file of JSON of the given type.

    Args:
        limit: how many bytes it may have.

    Raises:
        error: unreadable, not JSON, an unknown or missing key, a value out of range; names file and key.
    """
    return decode_json(read_bytes(path, error, limit=limit), kind, source=os.fspath(path), error=error)


def _convert(parsed: object, kind: type[T], source: str, error: type[KernelregError]) -> T:
    try:
        return msgspec.convert(parsed, kind, str_keys=True)
    except (msgspec.ValidationError, RecursionError) as cause:
        raise error(f"{source}: {explain(str(cause), kind)}") from cause


def explain(message: str, kind: type[msgspec.Struct]) -> str:
    """msgspec's message as ``key: what is wrong; what is accepted``."""
    found = _PATH.search(message)
    path = found["path"] if found else "$"
    text = message[: found.start()] if found else message
    if text.startswith(_PATTERN):
        text = "control characters, or more than one line; accepted: one line of text"
    if found and found["key"]:
        text = f"a key of it: {text}"
    unknown = _UNKNOWN_FIELD.match(text)
    if unknown:
        structs = [
            each for each in _types_at(kind, path) if isinstance(each, type) and issubclass(each, msgspec.Struct)
        ]
        accepted = sorted({name for each in structs for name in each.__struct_encode_fields__})
        text = unknown_name("key", unknown["field"], accepted)
    choice = _UNKNOWN_VALUE.match(text)
    if choice:
        literals = [each for each in _types_at(kind, path) if get_origin(each) is Literal]
        text = unknown_name("value", choice["value"], {str(value) for each in literals for value in get_args(each)})
    key = path.removeprefix("$").lstrip(".")
    return f"{key}: {text}" if key else text


def _types_at(kind: Any, path: str) -> list[Any]:
    """The types that may stand at ``path`` below ``kind``, unions taken apart."""
    places: list[Any] = [kind]
    for name, index in _STEP.findall(path.removeprefix("$")):
        below: list[Any] = []
        for place in places:
            for member in _members(place):
                if index:
                    below.extend(get_args(member))
                elif isinstance(member, type) and issubclass(member, msgspec.Struct):
                    fields = {field.encode_name: field.type for field in msgspec.structs.fields(member)}
                    below.extend([fields[name]] if name in fields else [])
                else:  # a dict's value
                    below.extend(get_args(member)[1:])
        places = below
    return [member for place in places for member in _members(place)]


def _members(place: Any) -> list[Any]:
    """The alternatives of a union, else the type itself; without what is said beside a type."""
    if get_origin(place) is Annotated:
        return _members(get_args(place)[0])
    if get_origin(place) in (Union, types.UnionType):
        return [member for each in get_args(place) for member in _members(each)]
    return [place]
