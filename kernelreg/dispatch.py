"""The hot path of a call: its key, one look-up, a ready callable.

Nothing here reads the environment, takes a lock or looks up a module once a key is known.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable
from typing import Any

from kernelreg.call import Call
from kernelreg.descriptor import Span
from kernelreg.registry import Registry
from kernelreg.session import session

#: Distinct keys kept for an operation; a process that goes past it starts over.
CAPACITY = 4096


class Buckets:
    """A size as the registry's descriptors can tell it: two sizes that none tells apart fall into one bucket."""

    def __init__(self, limits: Iterable[object]) -> None:
        edges: set[int] = set()
        self._exact = False
        for limit in limits:
            if isinstance(limit, Span):
                edges.add(limit.min)
                edges.update(() if limit.max is None else (limit.max + 1,))
                self._exact |= limit.multiple_of > 1
            elif limit is not None:  # a list of sizes
                self._exact = True
        self._edges = sorted(edges)

    def __call__(self, size: int) -> int:
        return size if self._exact else bisect_right(self._edges, size)


class Dispatcher:
    """Decided calls of one operation.

    Attributes:
        known: key → the callable that was decided for it.
        forms: the form of a call (all but its numbers) → the callable: a form has one key, a key has many forms.
        tokens, sequences: the buckets that stand for these sizes in a key.
    """

    def __init__(self, operation: str) -> None:
        self.operation = operation
        self.known: dict[Hashable, Callable[..., Any]] = {}
        self.forms: dict[Hashable, Callable[..., Any]] = {}
        self._buckets: tuple[Buckets, Buckets] | None = None
        session.on_change(self.forget)

    def forget(self) -> None:
        """Decide everything anew: policy, facts or backends have changed."""
        self._buckets = None
        self.known = {}
        self.forms = {}

    def buckets(self) -> tuple[Buckets, Buckets]:
        """The buckets of tokens and of sequences. They lead a key: those of other backends tell other sizes."""
        found = self._buckets
        if found is None:
            with session.steady():
                found = self._buckets = _buckets(session.registry(), self.operation, session.edges(self.operation))
        return found

    def decide(self, key: tuple[Hashable, ...], call: Call) -> Callable[..., Any]:
        """The callable for a call that was not met before, kept under its key, which the buckets lead.

        Raises:
            NoBackendError: nothing fits.
            ConfigurationError: an override names something unknown.
        """
        if len(self.known) >= CAPACITY:
            self.known = {}
        known = self.known  # what changes meanwhile puts another in its place, and this answer is forgotten with it
        function = session.resolve(session.grounds(device=call.device), call).function
        if key[0] is self._buckets:
            known[key] = function
        return function

    def remember(self, form: Hashable, key: tuple[Hashable, ...], function: Callable[..., Any]) -> None:
        """Keep what a key has given under a call's form as well."""
        if len(self.forms) >= CAPACITY:
            self.forms = {}
        forms = self.forms
        if key[0] is self._buckets:
            forms[form] = function


def size_limits(registry: Registry, operation: str) -> tuple[list[object], list[object]]:
    """All that descriptors say of the numbers of tokens and of sequences: spans, lists of sizes, None."""
    tokens: list[object] = []
    sequences: list[object] = []
    for backend, kernel in registry.kernels(operation):
        conditions = [entry.when for entry in backend.descriptor.known_bad]
        conditions += [preference.when for preference in kernel.preference]
        tokens += [kernel.accepts.tokens, *(when.tokens for when in conditions)]
        sequences += [kernel.accepts.sequences, *(when.sequences for when in conditions)]
    return tokens, sequences


def _buckets(registry: Registry, operation: str, edges: tuple[set[int], set[int]]) -> tuple[Buckets, Buckets]:
    """The buckets by what descriptors tell of sizes, and by where a profile or a lock file begins to say otherwise."""
    tokens, sequences = size_limits(registry, operation)
    tokens += [Span(min=edge) for edge in edges[0]]
    sequences += [Span(min=edge) for edge in edges[1]]
    return Buckets(tokens), Buckets(sequences)
