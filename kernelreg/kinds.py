"""What makes one kind of call: calls of one kind are measured together, and pinned together."""

from __future__ import annotations

from collections.abc import Iterable

#: Features that make a kernel another program, or another way of calling it. The others change a pass or two around it.
_TELLING = frozenset({"varlen", "backward", "capture", "state-pool", "multi-token"})

#: How a person says each, and that the call does not use it; the other features are said as they are.
_WORDS = {"varlen": ("varlen", "dense"), "backward": ("backward", "forward"), "capture": ("captured", "eager")}


def kind_features(features: Iterable[str]) -> frozenset[str]:
    """The features by which a call's kind is told."""
    return _TELLING.intersection(features)


def told_kind(features: Iterable[str]) -> str:
    """A kind in words: ``dense, forward, eager``."""
    kind = kind_features(features)
    told = [used if name in kind else plain for name, (used, plain) in _WORDS.items()]
    return ", ".join([*told, *sorted(kind - set(_WORDS))])
