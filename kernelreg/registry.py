"""The backends that are there: this project's own and everyone's, found through one entry-point group.

An entry point's value names a package (or a module beside it), and the ``backend.toml`` in that folder is read
without importing any of the package's code. ``package:other.toml`` names another file in the folder.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kernelreg.descriptor import Descriptor, Kernel, load_descriptor
from kernelreg.errors import ConfigurationError, DescriptorError
from kernelreg.faults import fault_of, printable
from kernelreg.machine.model import Problem
from kernelreg.ops import operation_named

GROUP = "kernelreg.backends"
#: The entry points that name folders of measured profiles.
PROFILES = "kernelreg.profiles"
#: The distribution whose backends are built in: they come first and survive ``KERNELREG_PLUGINS=off``.
BUILT_IN = "kernelreg"
#: Characters of a distribution's name and its entry point; they are shown.
_LONGEST_ORIGIN = 300


class Backend(msgspec.Struct, frozen=True, kw_only=True):
    """A descriptor and where it came from.

    Attributes:
        distribution: what installed a third party's; its version is one of the machine's facts.
    """

    descriptor: Descriptor
    origin: str
    distribution: str | None = None

    @property
    def name(self) -> str:
        return self.descriptor.name


class Registry(msgspec.Struct, frozen=True):
    """Backends in name order, and what went wrong on the way to them. A value: changing it makes another."""

    backends: tuple[Backend, ...] = ()
    problems: tuple[Problem, ...] = ()

    def names(self) -> tuple[str, ...]:
        return tuple(backend.name for backend in self.backends)

    def packages(self) -> frozenset[str]:
        """Every distribution that any descriptor names, and those that installed the backends of others."""
        named = {name for backend in self.backends for name in backend.descriptor.packages}
        return frozenset(named | {each.distribution for each in self.backends if each.distribution is not None})

    def kernels(self, operation: str) -> Iterator[tuple[Backend, Kernel]]:
        """The rows of an operation, by backend name and then in the order of the descriptor."""
        canonical = operation_named(operation).name
        for backend in self.backends:
            for kernel in backend.descriptor.kernel:
                if kernel.operation == canonical:
                    yield backend, kernel

    def find(self, backend: str, operation: str, kernel: str) -> tuple[Backend, Kernel] | None:
        """One row by its names, or None."""
        rows = self.kernels(operation)
        return next((row for row in rows if row[0].name == backend and row[1].name == kernel), None)

    def adding(self, backend: Backend) -> Registry:
        """With one more backend; a name that is taken is not taken over, and that is a problem.

        Raises:
            ConfigurationError: it is no backend.
        """
        if not isinstance(backend, Backend):
            raise ConfigurationError(f"adding({backend!r:.100}); accepted: a Backend, a descriptor and its origin")
        holder = next((each for each in self.backends if each.name == backend.name), None)
        if holder is not None:
            text = f"a backend named {backend.name!r} is there already, from {holder.origin}; the first keeps the name"
            problem = Problem(source=backend.origin, error=text)
            return Registry(self.backends, (*self.problems, problem))
        backends = sorted((*self.backends, backend), key=lambda each: each.name)
        return Registry(tuple(backends), self.problems)

    def adding_problem(self, problem: Problem) -> Registry:
        return Registry(self.backends, (*self.problems, problem))


def discover(*, plugins: bool = True) -> Registry:
    """Every backend of the entry-point group; a descriptor that cannot be read costs only that backend."""
    entry_points, problems = _entry_points(GROUP)
    registry = Registry(problems=tuple(problems) if plugins else ())
    for distribution, entry_point in entry_points:
        if not plugins and distribution != BUILT_IN:
            continue
        origin = printable(f"{distribution}: {entry_point.name} = {entry_point.value}")
        try:
            if len(origin) > _LONGEST_ORIGIN:
                origin = origin[:_LONGEST_ORIGIN] + " …"
                raise DescriptorError(f"an entry point of more than {_LONGEST_ORIGIN} characters")
            path = descriptor_path(entry_point)
            owner = None if distribution == BUILT_IN else distribution
            backend = Backend(descriptor=load_descriptor(path), origin=origin, distribution=owner)
        except DescriptorError as error:
            registry = registry.adding_problem(Problem(source=origin, error=str(error)))
        except BaseException as error:  # other people's finders, which may exit: any fault costs that backend alone
            registry = registry.adding_problem(Problem(source=origin, error=fault_of(error)))
        else:
            registry = registry.adding(backend)
    return registry


def descriptor_path(entry_point: importlib.metadata.EntryPoint) -> Path:
    """The ``backend.toml`` that an entry point leads to, found without importing what it names.

    Raises:
        DescriptorError: the value leads to no such file.
    """
    try:
        folders, file = _folders(entry_point.module), entry_point.attr or "backend.toml"
    except (AttributeError, AssertionError):  # the value has not even the form of one; from 3.13 on this is asserted
        raise DescriptorError(
            f"entry point {entry_point.name!r} names {entry_point.value!r}; accepted: package, or package:file.toml"
        ) from None
    for folder in folders:
        if (folder / file).is_file():
            return folder / file
    top = entry_point.module.partition(".")[0]
    looked = ", ".join(str(folder / file) for folder in dict.fromkeys(folders)) or f"no package {top!r}"
    raise DescriptorError(f"entry point {entry_point.name!r} leads to no descriptor; looked for: {looked}")


def shipped_profiles(*, plugins: bool = True) -> tuple[list[tuple[str, Path]], list[Problem]]:
    """The measured profiles that distributions ship, this project's first: what each is called, and its file.

    An entry point of the group names a package, and every ``*.json`` in that folder is one. None of the package's
    code is run, and no file is read.
    """
    found: list[tuple[str, Path]] = []
    entry_points, problems = _entry_points(PROFILES)
    for distribution, entry_point in entry_points:
        if not plugins and distribution != BUILT_IN:
            continue
        source = printable(f"{distribution}: {entry_point.name} = {entry_point.value}")[:_LONGEST_ORIGIN]
        try:
            folder = next(filter(Path.is_dir, _folders(entry_point.module)), None)
            files = sorted(folder.glob("*.json")) if folder is not None else []
        except BaseException as error:  # other people's finders: any fault costs their profiles alone
            problems.append(Problem(source=source, error=fault_of(error)))
            continue
        if folder is None:
            problems.append(Problem(source=source, error="there is no such folder"))
        found += [(printable(f"{distribution}'s {each.name}")[:_LONGEST_ORIGIN], each) for each in files]
    return found, problems if plugins else []


def _folders(module: str) -> list[Path]:
    """The folders in which the data of a package, or beside a module, may lie; nothing of it is imported."""
    top, *below = module.split(".")
    # Only the top-level name is looked up: finding a submodule would import its parents.
    spec = importlib.util.find_spec(top)
    roots = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not roots and spec is not None and spec.has_location and spec.origin:
        roots = [str(Path(spec.origin).parent)]
    return [folder for root in roots for folder in (Path(root, *below), Path(root, *below[:-1]))]


def _entry_points(group: str) -> tuple[list[tuple[str, importlib.metadata.EntryPoint]], list[Problem]]:
    """A group's entry points with their distributions, this project's first and the rest by both names."""
    problems: list[Problem] = []
    try:
        found = list(importlib.metadata.entry_points(group=group))
    except BaseException as error:  # one unreadable entry_points.txt on the path: ask each distribution for its own
        fault_of(error)
        found = []
        for distribution in _distributions(problems):
            try:
                found += distribution.entry_points.select(group=group)
            except BaseException as error:
                source = f"entry points of {_name(distribution)}"
                problems.append(Problem(source=source, error=fault_of(error)))
    named = {(_name(each.dist), each.name, each.value): each for each in reversed(found)}
    ordered = sorted(named, key=lambda key: (key[0] != BUILT_IN, *key))
    return [(key[0], named[key]) for key in ordered], problems


def _distributions(problems: list[Problem]) -> Iterator[importlib.metadata.Distribution]:
    """Every distribution of every finder on its own, so that one finder's fault hides nothing of the others."""
    context = importlib.metadata.DistributionFinder.Context()
    for finder in tuple(sys.meta_path):
        try:
            find = getattr(finder, "find_distributions", None)
            yield from find(context) if find is not None else ()
        except GeneratorExit:
            raise
        except BaseException as error:
            problems.append(Problem(source=f"distributions of {_kind(finder)}", error=fault_of(error)))


def _kind(finder: object) -> str:
    """A finder's name: some are classes, some are instances of one."""
    return finder.__name__ if isinstance(finder, type) else type(finder).__name__


def _name(distribution: importlib.metadata.Distribution | None) -> str:
    try:
        name: str | None = distribution.name if distribution is not None else None
    except BaseException as error:  # metadata that is no text
        fault_of(error)
        name = None
    return name if isinstance(name, str) and name else "unknown distribution"
