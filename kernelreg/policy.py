"""What the user asked for: environment variables, ``use()``, and how they add up.

Strongest first: ``use()``, environment, lock file, measured profile, descriptors' evidence.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from kernelreg.errors import ConfigurationError, KernelregError, encodable, several, unknown_name
from kernelreg.ops import operation_named, operations

PREFIX = "KERNELREG_"
VARIABLES = {
    "KERNELREG_BACKEND": "force a backend, for all operations or as gdn.chunk=fla,gdn.recurrent=torch",
    "KERNELREG_PREFER": "backends to rank first, in this order; the rest stays eligible",
    "KERNELREG_DISABLE": "backends never to use",
    "KERNELREG_STRICT": "1: no fallback at run time, and a wish that cannot be met is an error",
    "KERNELREG_PROFILE": "measured profile to rank by: a path, or off",
    "KERNELREG_LOCK": "lock file that pins decisions: a path",
    "KERNELREG_FACTS": "a facts file to use instead of detection",
    "KERNELREG_PLUGINS": "off: built-in backends only",
    "KERNELREG_LOG": "level of the kernelreg logger",
}

#: What ``KERNELREG_PROFILE`` says where the descriptors alone are to rank.
OFF = "off"
_TRUE, _FALSE = ("1", "true", "on", "yes"), ("0", "false", "off", "no")
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


class Policy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What was asked for. ``origin`` says where each part comes from, for explanations.

    Attributes:
        backend: the forced backend of each operation that has one.
        profile: the path of the measured profile to rank by, or ``off``.
        lock: the path of the lock file that pins decisions.
    """

    backend: dict[str, str] = {}
    prefer: tuple[str, ...] = ()
    disable: tuple[str, ...] = ()
    strict: bool = False
    profile: str | None = None
    lock: str | None = None
    origin: dict[str, str] = {}

    def overlaid(self, over: Policy) -> Policy:
        """This policy with another's words above it: what the other says wins, what it leaves out stays."""
        said = over.origin
        return Policy(
            backend={**self.backend, **over.backend},
            prefer=over.prefer if "prefer" in said else self.prefer,
            disable=over.disable if "disable" in said else self.disable,
            strict=over.strict if "strict" in said else self.strict,
            profile=over.profile if "profile" in said else self.profile,
            lock=over.lock if "lock" in said else self.lock,
            origin={**self.origin, **said},
        )


def make_policy(
    backends: Iterable[str],
    *,
    backend: str | Mapping[str, str] | None = None,
    prefer: Sequence[str] | str | None = None,
    disable: Sequence[str] | str | None = None,
    strict: bool | None = None,
    profile: str | os.PathLike[str] | None = None,
    lock: str | os.PathLike[str] | None = None,
    origin: str | Mapping[str, str] = "policy",
) -> Policy:
    """A policy from what a person wrote; None says nothing.

    Args:
        backends: the names there are.
        backend: one name for every operation, text such as ``gdn.chunk=fla``, or a mapping.
        prefer, disable: names, as a sequence or comma-separated text.
        profile: the path of a measured profile, or ``off``; it is read when something is decided.
        lock: the path of a lock file, read then too.
        origin: what to call the source of these words in explanations and errors.

    Raises:
        ConfigurationError: an unknown backend or operation, or a value of the wrong form; names the nearest.
    """
    known = tuple(backends)
    said: dict[str, Any] = {}
    origins: dict[str, str] = {}

    def source(field: str) -> str:
        return origin if isinstance(origin, str) else origin[field]

    def place(field: str, value: object) -> str:
        """What was written, as it was written."""
        name = source(field)
        return f"{name[:-1]}{field}={value!r})" if name.endswith("()") else f"{name}={value!r}"

    if backend is not None:
        said["backend"] = _forced(backend, known, place("backend", backend))
        origins |= {f"backend.{operation}": source("backend") for operation in said["backend"]}
    for field, names in (("prefer", prefer), ("disable", disable)):
        if names is not None:
            said[field] = _names(names, known, place(field, names))
            origins[field] = source(field)
    if strict is not None:
        if not isinstance(strict, bool):
            raise ConfigurationError(f"{place('strict', strict)}; accepted: True, False")
        said["strict"] = strict
        origins["strict"] = source("strict")
    for field, path in (("profile", profile), ("lock", lock)):
        if path is not None:
            said[field] = _path(path, place(field, path))
            origins[field] = source(field)
    return Policy(**said, origin=origins)


def read_environment(
    environ: Mapping[str, str], backends: Iterable[str]
) -> tuple[Policy, list[ConfigurationError], list[str]]:
    """The environment's policy, every error in it, and a warning for each unknown variable.

    A variable that is wrong says nothing in the policy; who resolves raises the first error, the doctor shows all.
    """
    errors: list[ConfigurationError] = []
    said: dict[str, Any] = {}
    known = tuple(backends)
    for field in ("backend", "prefer", "disable", "strict", "profile", "lock"):
        variable = PREFIX + field.upper()
        value = environ.get(variable, "").strip()
        if not value:
            continue
        try:
            word: Any = read_boolean(variable, value) if field == "strict" else value
            make_policy(known, **{field: word}, origin=variable)
            said[field] = word
        except ConfigurationError as error:
            errors.append(error)
    for read in (read_plugins, read_log_level):
        try:
            read(environ)
        except ConfigurationError as error:
            errors.append(error)
    warnings = [
        unknown_name("environment variable", name, VARIABLES)
        for name in sorted(environ)
        if name.startswith(PREFIX) and name not in VARIABLES
    ]
    origins = {field: PREFIX + field.upper() for field in said}
    return make_policy(known, **said, origin=origins), errors, warnings


def read_boolean(variable: str, value: str) -> bool:
    """The one reader of boolean variables.

    Raises:
        ConfigurationError: none of the accepted words.
    """
    word = value.strip().lower()
    if word not in _TRUE + _FALSE:
        pairs = ", ".join(f"{yes}/{no}" for yes, no in zip(_TRUE, _FALSE, strict=True))
        raise ConfigurationError(f"{variable}={value!r}; accepted: {pairs}")
    return word in _TRUE


def read_plugins(environ: Mapping[str, str]) -> bool:
    """Whether plugins beside the built-in backends are looked for (``KERNELREG_PLUGINS``)."""
    value = environ.get("KERNELREG_PLUGINS", "").strip()
    return read_boolean("KERNELREG_PLUGINS", value) if value else True


def read_log_level(environ: Mapping[str, str]) -> str | None:
    """The level that ``KERNELREG_LOG`` names, in the logging module's words."""
    value = environ.get("KERNELREG_LOG", "").strip().upper()
    if value and value not in LEVELS:
        raise ConfigurationError("KERNELREG_LOG: " + unknown_name("level", value, LEVELS))
    return value or None


def _forced(value: str | Mapping[str, str], known: tuple[str, ...], place: str) -> dict[str, str]:
    """Operation name → backend, from any of the accepted forms."""
    if isinstance(value, str):
        if "=" not in value:
            name = _name(value.strip(), known, place)
            return {operation.name: name for operation in operations()}
        pairs = []
        for part in value.split(","):
            operation, equals, name = part.partition("=")
            if not equals or not operation.strip() or not name.strip():
                raise ConfigurationError(f"{place}: {part!r} is no pair; accepted: BACKEND, or OPERATION=BACKEND[,…]")
            pairs.append((operation.strip(), name.strip()))
    elif isinstance(value, Mapping):
        pairs = list(value.items())
    else:
        raise ConfigurationError(f"{place}; accepted: a backend's name, or operations and backends")
    forced: dict[str, str] = {}
    for operation, name in pairs:
        try:
            canonical = operation_named(operation).name
        except KernelregError as error:
            raise ConfigurationError(f"{place}: {error}") from None
        if forced.get(canonical, name) != name:
            raise ConfigurationError(f"{place} names two backends for {canonical}; accepted: one")
        forced[canonical] = _name(name, known, place)
    return forced


def _path(value: object, place: str) -> str:
    path = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not path or not isinstance(path, str) or encodable(path) != path:
        raise ConfigurationError(f"{place}; accepted: the path of a file, in UTF-8")
    return path


def _names(value: Sequence[str] | str, known: tuple[str, ...], place: str) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",")]
    parts = several(place, value, "backends' names")
    return tuple(dict.fromkeys(_name(part, known, place) for part in parts if part != ""))


def _name(name: str, known: tuple[str, ...], place: str) -> str:
    if name not in known:
        raise ConfigurationError(f"{place}: {unknown_name('backend', str(name), known)}")
    return name
