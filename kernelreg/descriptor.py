"""A backend's ``backend.toml``: its types, and reading it strictly. Data only: no code of the backend is run."""

from __future__ import annotations

import keyword
import math
import os
import re
from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Any, Literal, TypeAlias, get_args

import msgspec

from kernelreg.capability import is_capability, parse_capabilities
from kernelreg.decoding import ONE_LINE, decode_toml, explain, read_bytes
from kernelreg.errors import ConfigurationError, DescriptorError, path_of, unknown_name
from kernelreg.ops import operation_named
from kernelreg.versions import BUILDS, parse_range

DeviceType: TypeAlias = Literal["cuda", "rocm", "xpu", "mps", "cpu", "any"]
Dtype: TypeAlias = Literal["bfloat16", "float16", "float32", "float64"]
Layout: TypeAlias = Literal["k-first", "v-first"]
Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Text = Annotated[str, msgspec.Meta(min_length=1, max_length=1000, pattern=ONE_LINE)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=100, pattern=ONE_LINE)]
#: A version range or a rule of capabilities.
Rule = Annotated[str, msgspec.Meta(max_length=200, pattern=ONE_LINE)]

#: The programs that facts know of.
TOOLS = ("nvcc",)
#: No descriptor comes near this size.
MAX_BYTES = 256 << 10

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_ROW = re.compile(r"[A-Za-z0-9][\w.+-]*")
_DISTRIBUTION = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_PLATFORM = re.compile(r"[A-Za-z0-9_]+-[A-Za-z0-9_]+")


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

    version: Rule = "*"
    by: Literal["pep440", "release"] | None = None
    also: tuple[Name, ...] = ()


Packages: TypeAlias = dict[Name, Rule | PackageRule]


def _full_rule(name: str, rule: str | PackageRule, known: dict[str, PackageRule]) -> PackageRule:
    """A rule's full form: what it does not say of ``by`` and ``also``, the backend's own rule or the name says."""
    written = rule if isinstance(rule, PackageRule) else PackageRule(version=rule)
    said = known.get(name, PackageRule(by="release" if name in BUILDS else "pep440"))
    return PackageRule(version=written.version, by=written.by or said.by, also=written.also or said.also)


class Span(_Table, frozen=True, kw_only=True):
    """Whole numbers from ``min`` to ``max``, both included, and multiples of ``multiple_of`` only."""

    min: Size = 0
    max: Size | None = None
    multiple_of: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)] = 1

    def __post_init__(self) -> None:
        if self.max is not None and self.max // self.multiple_of * self.multiple_of < self.min:
            raise ValueError(f"no number is {self}")

    def __str__(self) -> str:
        bounds = f"{self.min} or more" if self.max is None else f"{self.min} to {self.max}"
        return bounds if self.multiple_of == 1 else f"{bounds}, a multiple of {self.multiple_of}"

    def holds(self, value: int | None) -> bool:
        """Whether the number lies in the span; None is a large, round number."""
        if value is None:
            return self.max is None
        return self.min <= value <= (value if self.max is None else self.max) and value % self.multiple_of == 0


Sizes: TypeAlias = tuple[Size, ...] | Span
Dtypes: TypeAlias = tuple[Dtype, ...]
Features: TypeAlias = tuple[Name, ...]
Sources: TypeAlias = dict[str, Text]


def _check_known(given: Iterable[str], accepted: Iterable[str], kind: str) -> None:
    for name in given:
        if name not in accepted:
            raise ValueError(unknown_name(kind, name, accepted))


def _check_ranges(table: Requires | When, packages: Packages, tools: dict[str, str]) -> None:
    _check_packages(packages)
    ranges = {name: getattr(table, name, None) for name in ("torch", "cuda", "hip", "driver", "python")}
    ranges |= {
        f"packages.{name}": rule.version if isinstance(rule, PackageRule) else rule for name, rule in packages.items()
    }
    _check_known(tools, TOOLS, "tool")
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


def _check_packages(packages: Packages) -> None:
    for name, rule in packages.items():
        for each in (name, *(rule.also if isinstance(rule, PackageRule) else ())):
            if not _DISTRIBUTION.fullmatch(each):
                raise ValueError(f"package {each!r}; accepted: a distribution's name, such as flash-qla")


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

    device: DeviceType | Annotated[tuple[DeviceType, ...], msgspec.Meta(min_length=1)] = "any"
    compute_capability: Rule | None = None
    torch: Rule | None = None
    cuda: Rule | None = None
    hip: Rule | None = None
    driver: Rule | None = None
    python: Rule | None = None
    platform: tuple[Name, ...] = ()
    tools: dict[Name, Rule] = {}
    packages: Packages = {}
    source: Sources = {}

    @property
    def devices(self) -> tuple[str, ...]:
        """The types of device, as a tuple."""
        return (self.device,) if isinstance(self.device, str) else self.device

    def __post_init__(self) -> None:
        _check_ranges(self, self.packages, self.tools)
        _check_sources(self)
        for name in self.platform:
            if not _PLATFORM.fullmatch(name):
                raise ValueError(f"platform {name!r}; accepted: system-machine, such as Linux-x86_64")


class Accepts(_Table, frozen=True, kw_only=True):
    """Which calls a kernel takes. What is not named is not limited, but a feature that is not named is not there.

    The backend's own table holds for each of its kernels, key by key, unless the kernel's says otherwise.

    Attributes:
        state_layout: ``k-first`` for states ``[K, V]``, ``v-first`` for ``[V, K]`` (also the feature
            ``state-v-first``); both where it is not said.
    """

    dtype: Dtypes | None = None
    gate_dtype: Dtypes | None = None
    state_dtype: Dtypes | None = None
    head_dim_k: Sizes | None = None
    head_dim_v: Sizes | None = None
    heads: Sizes | None = None
    value_heads: Sizes | None = None
    tokens: Sizes | None = None
    sequences: Sizes | None = None
    state_layout: tuple[Layout, ...] | None = None
    features: Features | None = None
    source: Sources = {}

    def __post_init__(self) -> None:
        _check_sources(self)

    def over(self, base: Accepts) -> Accepts:
        """This table with another's words where it has none."""
        said = {name: getattr(self, name) for name in self.__struct_fields__ if getattr(self, name) is not None}
        return msgspec.structs.replace(base, **{**said, "source": {**base.source, **self.source}})


class When(_Table, frozen=True, kw_only=True):
    """A condition on machine and call; it holds when each part that is named holds. An empty one always holds."""

    device: DeviceType = "any"
    compute_capability: Rule | None = None
    torch: Rule | None = None
    cuda: Rule | None = None
    driver: Rule | None = None
    packages: Packages = {}
    kernels: tuple[Name, ...] = ()
    features: Features = ()
    dtype: Dtypes | None = None
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

    def __post_init__(self) -> None:
        if not math.isfinite(self.speedup):
            raise ValueError(f"speedup: {self.speedup}; accepted: a finite number above 0")


class KnownBad(_Table, frozen=True, kw_only=True):
    """A fault of some releases, machines or calls. ``slow`` ranks the kernel last; the others rule it out."""

    when: When
    severity: Literal["wrong-result", "crash", "hang", "slow"]
    because: Text
    url: Text
    fix: Text | None = None


#: Types of device on which a suite can have passed.
_PLACES = tuple(name for name in get_args(DeviceType) if name != "any")


def _is_identifier(name: str) -> bool:
    return name.isidentifier() and not keyword.iskeyword(name)


class Kernel(_Table, frozen=True, kw_only=True):
    """One row: an operation, where it runs and which calls it takes.

    Attributes:
        function: the callable's name in the adapter.
        validated_on: compute capabilities (or device types) where the project's own suite has passed.
    """

    operation: Name
    name: Name
    function: Name
    requires: Requires = Requires()
    accepts: Accepts = Accepts()
    preference: tuple[Preference, ...] = ()
    validated_on: tuple[Name, ...] = ()

    def __post_init__(self) -> None:
        try:
            operation = operation_named(self.operation)
        except ConfigurationError as error:
            raise ValueError(str(error)) from None
        if not _ROW.fullmatch(self.name):
            raise ValueError(f"name {self.name!r}; accepted: letters, digits and . _ + -, such as sm90-jit")
        if not _is_identifier(self.function):
            raise ValueError(f"function {self.function!r}; accepted: the name of a callable in the adapter")
        for place in self.validated_on:
            if not is_capability(place) and place not in _PLACES:
                accepted = f"a compute capability such as '9.0', or {', '.join(_PLACES)}"
                raise ValueError(f"validated_on: {place!r}; accepted: {accepted}")
        for features in (self.accepts.features or (), *(each.when.features for each in self.preference)):
            _check_known(features, operation.features, "feature")
        msgspec.structs.force_setattr(self, "operation", operation.name)


class Descriptor(_Table, frozen=True, kw_only=True):
    """A backend as data.

    Attributes:
        adapter: the module that has the kernels' functions; imported when one of them is chosen.
        homepage: where the library is described.
        install: the command that installs it.
        claims: a module that asks the installed library what it takes (:mod:`kernelreg.claims`); imported in a child
            process alone, by ``kernelreg backends --stale``.
        bridges: what the adapter does in the library's place, so that the contract holds, with its cost.
    """

    schema: Literal[1]
    name: Name
    adapter: Name
    claims: Name | None = None
    homepage: Text | None = None
    install: Text | None = None
    bridges: dict[Name, Text] = {}
    requires: Requires = Requires()
    accepts: Accepts = Accepts()
    kernel: tuple[Kernel, ...] = ()
    known_bad: tuple[KnownBad, ...] = ()

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"name {self.name!r}; accepted: lower-case letters, digits and underscores")
        for key, module in (("adapter", self.adapter), ("claims", self.claims)):
            if module is not None and not all(map(_is_identifier, module.split("."))):
                raise ValueError(f"{key} {module!r}; accepted: a module's dotted name")
        counts = Counter((kernel.operation, kernel.name) for kernel in self.kernel)
        for (operation, name), count in counts.items():
            if count > 1:
                raise ValueError(f"two kernels of {operation} are named {name!r}; a name is a row's own")
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
        ConfigurationError: ``path`` is no path.
    """
    data = read_bytes(path_of("load_descriptor", path), DescriptorError, limit=MAX_BYTES)
    return decode_toml(data, Descriptor, source=os.fspath(path), error=DescriptorError)


def make_descriptor(data: dict[str, Any]) -> Descriptor:
    """A descriptor from plain data, validated as a file is.

    Raises:
        DescriptorError: names the key and what is accepted there.
    """
    try:
        return msgspec.convert(data, Descriptor)
    except (msgspec.ValidationError, RecursionError) as cause:
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
