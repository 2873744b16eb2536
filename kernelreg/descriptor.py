"""A backend's ``backend.toml``: its types, and reading it strictly. Data only: no code of the backend is run."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from kernelreg.capability import parse_capabilities
from kernelreg.decoding import decode_toml, explain, read_bytes
from kernelreg.errors import ConfigurationError, DescriptorError, unknown_name
from kernelreg.ops import operation_named
from kernelreg.versions import BUILDS, parse_range

DeviceType: TypeAlias = Literal["cuda", "rocm", "xpu", "mps", "cpu", "any"]
Dtype: TypeAlias = Literal["bfloat16", "float16", "float32", "float64"]
Layout: TypeAlias = Literal["k-first", "v-first"]
Size = Annotated[int, msgspec.Meta(ge=0)]
Text = Annotated[str, msgspec.Meta(min_length=1)]

_NAME = re.compile(r"^[a-z][a-z0-9_]*$")
_MODULE = re.compile(r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class PackageRule(_Table, frozen=True, kw_only=True):
    """A distribution's version range, where a bare range is not enough.

    Attributes:
        version: PEP 440 specifier set, or ``*``.
        by: compare as PEP 440 says (``pep440``) or by release number alone (``release``). When it is not said,
            builds such as triton's compare by release and all others as PEP 440 says.
        also: other distributions that install the same package (``pytorch-triton-rocm`` for ``triton``).

    In a descriptor that was read, every package's rule is in this full form, and where ``by`` or ``also`` was said
    of a package in the backend's ``[requires]``, it holds wherever that package is named.
    """

    version: str = "*"
    by: Literal["pep440", "release"] | None = None
    also: tuple[str, ...] = ()


Packages: TypeAlias = dict[str, str | PackageRule]


def _full_rule(name: str, rule: str | PackageRule, known: dict[str, PackageRule]) -> PackageRule:
    """A rule's full form: what it does not say of ``by`` and ``also``, the backend's own rule or the name says."""
    written = rule if isinstance(rule, PackageRule) else PackageRule(version=rule)
    said = known.get(name, PackageRule(by="release" if name in BUILDS else "pep440"))
    return PackageRule(version=written.version, by=written.by or said.by, also=written.also or said.also)


class Span(_Table, frozen=True, kw_only=True):
    """Whole numbers from ``min`` to ``max``, both included, and multiples of ``multiple_of`` only."""

    min: Size = 0
    max: Size | None = None
    multiple_of: Annotated[int, msgspec.Meta(ge=1)] = 1

    def __str__(self) -> str:
        bounds = f"{self.min} or more" if self.max is None else f"{self.min} to {self.max}"
        return bounds if self.multiple_of == 1 else f"{bounds}, a multiple of {self.multiple_of}"

    def holds(self, value: int | None) -> bool:
        """Whether the number lies in the span; None is a large, round number."""
        if value is None:
            return self.max is None
        return self.min <= value <= (value if self.max is None else self.max) and value % self.multiple_of == 0


Sizes: TypeAlias = tuple[Size, ...] | Span


def _check_known(given: Iterable[str], accepted: Iterable[str], kind: str) -> None:
    for name in given:
        if name not in accepted:
            raise ValueError(unknown_name(kind, name, accepted))


def _check_ranges(table: Requires | When, packages: Packages, tools: dict[str, str]) -> None:
    ranges = {name: getattr(table, name, None) for name in ("torch", "cuda", "hip", "driver", "python")}
    ranges |= {
        f"packages.{name}": rule.version if isinstance(rule, PackageRule) else rule for name, rule in packages.items()
    }
    ranges |= {f"tools.{name}": text for name, text in tools.items()}
    for key, text in ranges.items():
        try:
            if text is not None:
                parse_range(text)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from None
    if table.compute_capability is not None:
        try:
            parse_capabilities(table.compute_capability)
        except ValueError as error:
            raise ValueError(f"compute_capability: {error}") from None


def _check_sources(table: Requires | Accepts) -> None:
    _check_known(table.source, set(table.__struct_fields__) - {"source"}, "key in source")


class Requires(_Table, frozen=True, kw_only=True):
    """Where a kernel runs. Every limit may have its ``source``: the page, release or run that it comes from.

    Attributes:
        device: the type of device, or several; ``any`` asks only that torch can use it.
        compute_capability: NVIDIA capability rule, such as ``==9.0``, ``==10.*`` or ``>=8.0 || ==7.5``.
        torch, cuda, hip, driver: ranges for torch, its CUDA or HIP build, and the driver.
        python: range for the interpreter.
        platform: ``system-machine`` names, such as ``Linux-x86_64``.
        tools: ranges for programs, such as ``nvcc``.
        packages: ranges for distributions.
    """

    device: DeviceType | tuple[DeviceType, ...] = "any"
    compute_capability: str | None = None
    torch: str | None = None
    cuda: str | None = None
    hip: str | None = None
    driver: str | None = None
    python: str | None = None
    platform: tuple[str, ...] = ()
    tools: dict[str, str] = {}
    packages: Packages = {}
    source: dict[str, Text] = {}

    @property
    def devices(self) -> tuple[str, ...]:
        """The types of device, as a tuple."""
        return (self.device,) if isinstance(self.device, str) else self.device

    def __post_init__(self) -> None:
        _check_ranges(self, self.packages, self.tools)
        _check_sources(self)


class Accepts(_Table, frozen=True, kw_only=True):
    """Which calls a kernel takes. What is not named is not limited, but a feature that is not named is not there.

    The backend's own table holds for each of its kernels, key by key, unless the kernel's says otherwise.

    Attributes:
        state_layout: ``k-first`` for states ``[K, V]``, ``v-first`` for ``[V, K]`` (also the feature
            ``state-v-first``); both where it is not said.
    """

    dtype: tuple[Dtype, ...] | None = None
    gate_dtype: tuple[Dtype, ...] | None = None
    state_dtype: tuple[Dtype, ...] | None = None
    head_dim_k: Sizes | None = None
    head_dim_v: Sizes | None = None
    heads: Sizes | None = None
    value_heads: Sizes | None = None
    tokens: Sizes | None = None
    sequences: Sizes | None = None
    state_layout: tuple[Layout, ...] | None = None
    features: tuple[str, ...] | None = None
    source: dict[str, Text] = {}

    def __post_init__(self) -> None:
        _check_sources(self)

    def over(self, base: Accepts) -> Accepts:
        """This table with another's words where it has none."""
        said = {name: getattr(self, name) for name in self.__struct_fields__ if getattr(self, name) is not None}
        return msgspec.structs.replace(base, **{**said, "source": {**base.source, **self.source}})


class When(_Table, frozen=True, kw_only=True):
    """A condition on machine and call; it holds when each part that is named holds. An empty one always holds."""

    device: DeviceType = "any"
    compute_capability: str | None = None
    torch: str | None = None
    cuda: str | None = None
    driver: str | None = None
    packages: Packages = {}
    kernels: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    dtype: tuple[Dtype, ...] | None = None
    tokens: Span | None = None
    sequences: Span | None = None
    value_heads: Span | None = None

    def __post_init__(self) -> None:
        _check_ranges(self, self.packages, {})


class Preference(_Table, frozen=True, kw_only=True):
    """Evidence for a kernel's rank on the calls that ``when`` describes.

    Attributes:
        speedup: measured time of the built-in ``torch`` kernel over this kernel's, on the same call.
        source: where the measurement is.
    """

    speedup: Annotated[float, msgspec.Meta(gt=0)]
    source: Text
    when: When = When()


class KnownBad(_Table, frozen=True, kw_only=True):
    """A fault of some releases, machines or calls. ``slow`` ranks the kernel last; the others rule it out."""

    when: When
    severity: Literal["wrong-result", "crash", "hang", "slow"]
    because: Text
    url: Text
    fix: str | None = None


class Kernel(_Table, frozen=True, kw_only=True):
    """One row: an operation, where it runs and which calls it takes.

    Attributes:
        function: the callable's name in the adapter.
        validated_on: compute capabilities (or device types) where the project's own suite has passed.
    """

    operation: str
    name: Text
    function: Text
    requires: Requires = Requires()
    accepts: Accepts = Accepts()
    preference: tuple[Preference, ...] = ()
    validated_on: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        try:
            operation = operation_named(self.operation)
        except ConfigurationError as error:
            raise ValueError(str(error)) from None
        for features in (self.accepts.features or (), *(each.when.features for each in self.preference)):
            _check_known(features, operation.features, "feature")
        msgspec.structs.force_setattr(self, "operation", operation.name)


class Descriptor(_Table, frozen=True, kw_only=True):
    """A backend as data.

    Attributes:
        adapter: the module that has the kernels' functions; imported when one of them is chosen.
        homepage: where the library is described.
        install: the command that installs it.
        bridges: what the adapter does in the library's place, so that the contract holds, with its cost.
    """

    schema: Literal[1]
    name: str
    adapter: str
    homepage: str | None = None
    install: str | None = None
    bridges: dict[str, Text] = {}
    requires: Requires = Requires()
    accepts: Accepts = Accepts()
    kernel: tuple[Kernel, ...] = ()
    known_bad: tuple[KnownBad, ...] = ()

    def __post_init__(self) -> None:
        if not _NAME.match(self.name):
            raise ValueError(f"name {self.name!r}; accepted: lower-case letters, digits and underscores")
        if not _MODULE.match(self.adapter):
            raise ValueError(f"adapter {self.adapter!r}; accepted: a module's dotted name")
        rows = [(kernel.operation, kernel.name) for kernel in self.kernel]
        for row in rows:
            if rows.count(row) > 1:
                raise ValueError(f"two kernels of {row[0]} are named {row[1]!r}; a name is a row's own")
        for kernel in self.kernel:
            features = operation_named(kernel.operation).features
            _check_known(self.accepts.features or (), features, "feature")
            msgspec.structs.force_setattr(kernel, "accepts", kernel.accepts.over(self.accepts))
        self._complete_packages()
        self._check_known_bad()

    def _complete_packages(self) -> None:
        known = {name: _full_rule(name, rule, {}) for name, rule in self.requires.packages.items()}
        for table in self._package_tables():
            table.update({name: _full_rule(name, rule, known) for name, rule in table.items()})

    def _check_known_bad(self) -> None:
        names = {kernel.name for kernel in self.kernel}
        read = {name for table in self._required() for name in table}
        features = {name for kernel in self.kernel for name in operation_named(kernel.operation).features}
        for entry in self.known_bad:
            _check_known(entry.when.kernels, names, "kernel in known_bad")
            _check_known(entry.when.features, features, "feature in known_bad")
            # A version that nothing requires is one that nobody checks to be readable.
            _check_known(entry.when.packages, read, "package in known_bad (it must stand in requires too)")

    def _required(self) -> list[Packages]:
        return [self.requires.packages, *(each.requires.packages for each in self.kernel)]

    def _package_tables(self) -> list[Packages]:
        tables = self._required()
        tables += [each.when.packages for each in self.known_bad]
        return tables + [each.when.packages for kernel in self.kernel for each in kernel.preference]

    @property
    def packages(self) -> frozenset[str]:
        """Every distribution that the descriptor names."""
        return frozenset(
            each
            for table in self._package_tables()
            for name, rule in full(table).items()
            for each in (name, *rule.also)
        )


def full(packages: Packages) -> dict[str, PackageRule]:
    """A table of packages as it is once a descriptor has been read."""
    return {name: rule for name, rule in packages.items() if isinstance(rule, PackageRule)}


def load_descriptor(path: str | os.PathLike[str]) -> Descriptor:
    """Read and validate a ``backend.toml``.

    Raises:
        DescriptorError: names the file, the key and what is accepted there.
    """
    data = read_bytes(Path(path), DescriptorError)
    return decode_toml(data, Descriptor, source=os.fspath(path), error=DescriptorError)


def make_descriptor(data: dict[str, Any]) -> Descriptor:
    """A descriptor from plain data, validated as a file is.

    Raises:
        DescriptorError: names the key and what is accepted there.
    """
    try:
        return msgspec.convert(data, Descriptor)
    except msgspec.ValidationError as cause:
        raise DescriptorError(f"descriptor: {explain(str(cause), Descriptor)}") from cause


__all__ = [
    "Accepts",
    "Descriptor",
    "Kernel",
    "KnownBad",
    "PackageRule",
    "Preference",
    "Requires",
    "Span",
    "When",
    "full",
    "load_descriptor",
    "make_descriptor",
]
