"""Making a lock file, and holding one against a machine.

A decision is a step function of the numbers of tokens and sequences: it can change only where a descriptor, or the
profile, tells sizes apart. So each of those bands is decided once, and neighbours that decide alike are joined.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TypeVar

import msgspec

from kernelreg.call import Call
from kernelreg.descriptor import Span
from kernelreg.dispatch import size_limits
from kernelreg.lock import EXACT, TORCH, Lock, Pin, Pins
from kernelreg.machine.model import CPU, Device, Facts
from kernelreg.machine.setup import setup_of
from kernelreg.models import Shape
from kernelreg.policy import Policy
from kernelreg.profile import Row
from kernelreg.reasons import Reason
from kernelreg.registry import Registry
from kernelreg.resolver import Decision
from kernelreg.session import Grounds
from kernelreg.workloads import Workload, call_of

T = TypeVar("T")


class Unpinned(msgspec.Struct, frozen=True, kw_only=True):
    """Calls that no kernel takes, so that there is nothing to pin for them."""

    calls: str
    reasons: tuple[str, ...]


def make_lock(
    grounds: Grounds,
    device: Device,
    workloads: Iterable[Workload],
    shapes: Iterable[Shape],
    *,
    dtype: str,
    state_dtype: str,
    more: Iterable[str] = (),
    models: Sequence[str] = (),
    tp: Sequence[int] = (1,),
) -> tuple[Lock, tuple[Unpinned, ...]]:
    """The decisions for a model's calls, and the calls that no kernel takes.

    Args:
        grounds: what is decided on. A lock file among them pins nothing here.
        device: whose decisions they are.
        shapes: each device's share of the layer.
        more: features that the calls may use beside the workloads' own.
        models, tp: what the file says of itself.

    Raises:
        ConfigurationError: an unknown dtype or feature.
    """
    grounds = grounds._replace(pins=None)
    pins: list[Pin] = []
    unpinned: list[Unpinned] = []
    graphs = (False, True) if device.torch_name.startswith("cuda") else (False,)
    for workload in workloads:
        bands = _bands(grounds, workload.operation)
        for captured in (False,) if workload.trains else graphs:
            for shape in dict.fromkeys(shapes):
                call = call_of(
                    workload,
                    shape,
                    device.torch_name,
                    dtype=dtype,
                    state_dtype=state_dtype,
                    captured=captured,
                    more=more,
                )
                found = list(_pins(grounds, call, *bands))
                pins += found
                if not found:
                    unpinned.append(_unpinned(grounds.decide(call)))
    backends = sorted({each.backend for each in pins})
    lock = Lock(
        models=tuple(models),
        tp=tuple(tp),
        setup=setup_of(grounds.facts, device),
        versions={name: versions_of(name, grounds.registry, grounds.facts) for name in backends},
        pins=tuple(pins),
    )
    return lock, tuple(unpinned)


def versions_of(backend: str, registry: Registry, facts: Facts) -> dict[str, str | None]:
    """The versions of torch and of every package that the backend names."""
    packages = next((each.descriptor.packages for each in registry.backends if each.name == backend), frozenset())
    named = {name: facts.packages.get(name) for name in sorted(packages)}
    return {TORCH: facts.torch.version if facts.torch else None, **named}


# -- bands -------------------------------------------------------------------------------------------------------------


class _Band(msgspec.Struct, frozen=True):
    """Sizes that nothing tells apart, and one of them that stands for all."""

    span: Span
    size: int


def _bands(grounds: Grounds, operation: str) -> tuple[list[_Band], list[_Band]]:
    """The bands of tokens and of sequences."""
    limits = size_limits(grounds.registry, operation)
    edges = grounds.evidence.edges(operation) if grounds.evidence is not None else (set[int](), set[int]())
    return _banded(limits[0], edges[0]), _banded(limits[1], edges[1])


def _banded(limits: Iterable[object], edges: Iterable[int]) -> list[_Band]:
    found, multiples = set(edges), set()
    for limit in limits:
        if isinstance(limit, Span):
            found.update([limit.min] if limit.max is None else [limit.min, limit.max + 1])
            multiples.add(limit.multiple_of)
        elif isinstance(limit, tuple):
            found.update(edge for size in limit for edge in (size, size + 1))
    multiples.discard(1)
    starts = sorted(found | {0})
    spans = [Span(min=first, max=then - 1) for first, then in pairwise(starts)] + [Span(min=starts[-1])]
    return [_Band(span, _typical(span, multiples)) for span in spans]


def _typical(span: Span, multiples: set[int]) -> int:
    """A size of the span of which no kernel asks that it is a round number: what takes it takes the others."""
    sizes = range(span.min, span.min + 64 if span.max is None else span.max + 1)
    return next((size for size in sizes if not any(size % each == 0 for each in multiples)), span.min)


def _pins(grounds: Grounds, call: Call, tokens: list[_Band], sequences: list[_Band]) -> Iterator[Pin]:
    """The decisions on the call at every size, in as few pins as can say them."""

    def decided(size: _Band, several: _Band) -> Row | None:
        decision = grounds.decide(msgspec.structs.replace(call, tokens=size.size, sequences=several.size))
        return (decision.backend, decision.kernel or "") if decision.backend else None

    columns = [(band.span, _joined([(each.span, decided(each, band)) for each in tokens])) for band in sequences]
    for several, runs in _joined(columns):
        for span, row in runs:
            if row is not None:
                yield Pin(
                    operation=call.operation,
                    **{name: getattr(call, name) for name in EXACT},
                    features=tuple(sorted(call.features)),
                    tokens=span,
                    sequences=several,
                    backend=row[0],
                    kernel=row[1],
                )


def _joined(parts: Sequence[tuple[Span, T]]) -> list[tuple[Span, T]]:
    """Neighbours with the same value as one."""
    joined: list[tuple[Span, T]] = []
    for span, value in parts:
        if joined and joined[-1][1] == value:
            span = Span(min=joined.pop()[0].min, max=span.max)
        joined.append((span, value))
    return joined


def _unpinned(decision: Decision) -> Unpinned:
    call = decision.call
    told = {f"{each.backend} {each.kernel}": each.reasons for each in decision.candidates}
    reasons = [f"{name}: {those[0] if those else 'not at every size'}" for name, those in told.items()]
    return Unpinned(calls=f"{call.operation} ({call})", reasons=tuple(reasons))


# -- holding a lock file against a machine -----------------------------------------------------------------------------


class Broken(msgspec.Struct, frozen=True, kw_only=True):
    """A pin that no longer holds.

    Attributes:
        calls: what it pins.
        now: the kernel that would be chosen without it; None where nothing fits.
        reasons: why the pinned kernel cannot run, or is not the one that was pinned.
    """

    calls: str
    backend: str
    kernel: str
    now: str | None
    reasons: tuple[Reason, ...]


class Outranked(msgspec.Struct, frozen=True, kw_only=True):
    """A pin that holds, though another kernel would be chosen without it."""

    calls: str
    backend: str
    kernel: str
    now: str


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """A lock file against a machine. ``ok`` is whether every pin holds.

    Attributes:
        machine: how the machine differs from the one that was locked for; another card breaks all.
    """

    schema: int = 1
    ok: bool
    machine: tuple[str, ...]
    broken: tuple[Broken, ...]
    outranked: tuple[Outranked, ...]


def check_lock(lock: Lock, grounds: Grounds) -> Check:
    """Whether every pin of the file still holds on these grounds. The policy's own wishes are left aside."""
    changes = lock.setup.changes(grounds.facts)
    device = next((each for each in (*grounds.facts.devices, CPU) if lock.setup.is_of(each)), None)
    bare = grounds._replace(policy=Policy(), pins=None)
    broken: list[Broken] = []
    outranked: list[Outranked] = []
    if device is not None:
        for pin in lock.pins:
            call = _call(pin, device)
            alone = Lock(setup=lock.setup, versions=lock.versions, pins=(pin,))
            held, free = bare._replace(pins=Pins(alone, "the lock file")).decide(call), bare.decide(call)
            now = f"{free.backend} {free.kernel}" if free.backend else None
            told = {"calls": pin.calls, "backend": pin.backend, "kernel": pin.kernel}
            if held.backend is None:
                broken.append(Broken(**told, now=now, reasons=_why(held, pin)))
            elif now is not None and now != f"{pin.backend} {pin.kernel}":
                outranked.append(Outranked(**told, now=now))
    return Check(
        ok=device is not None and not broken,
        machine=tuple(map(str, changes)),
        broken=tuple(broken),
        outranked=tuple(outranked),
    )


def _call(pin: Pin, device: Device) -> Call:
    return Call(
        operation=pin.operation,
        device=device.torch_name,
        **{name: getattr(pin, name) for name in EXACT},
        tokens=pin.tokens.min,
        sequences=pin.sequences.min,
        features=frozenset(pin.features),
    )


def _why(decision: Decision, pin: Pin) -> tuple[Reason, ...]:
    """The pinned kernel's reasons; where it is not there, any other's, which say so."""
    own = [each for each in decision.candidates if (each.backend, each.kernel) == (pin.backend, pin.kernel)]
    return (own or list(decision.candidates))[0].reasons
