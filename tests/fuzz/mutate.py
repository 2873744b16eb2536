"""New inputs from old ones: by tokens with the grammar's words, and by making one piece very long."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

_TOKEN = re.compile(rb"\w+|\s+|[^\w\s]", re.DOTALL)


def by_tokens(data: bytes, longest: int, rng: random.Random, words: Sequence[bytes]) -> bytes:
    """One to three changes: a token replaced, put in, taken out, doubled, or changed for another of the text."""
    tokens = _TOKEN.findall(data)
    for _ in range(rng.randint(1, 3)):
        place = rng.randrange(len(tokens) + 1)
        end = min(len(tokens), place + rng.choice((1, 1, 1, 2, 8, 32)))
        other = rng.choice(tokens) if tokens else b""
        match rng.randrange(6):
            case 0:
                tokens[place:place] = [rng.choice(words)]
            case 1:
                tokens[place:end] = [rng.choice(words)]
            case 2:
                del tokens[place:end]
            case 3:
                tokens[place:place] = tokens[place:end]
            case 4:
                tokens[place:end] = [other]
            case _:
                start = rng.randrange(len(tokens) + 1)
                tokens[place:place] = tokens[start : start + end - place]
    return b"".join(tokens)[:longest]


def inflated(data: bytes, longest: int, rng: random.Random) -> bytes:
    """The same text with one piece of it repeated until no more is allowed: what takes square time shows itself."""
    tokens = _TOKEN.findall(data) or [b"\0"]
    place = rng.randrange(len(tokens))
    piece = b"".join(tokens[place : place + rng.choice((1, 1, 2, 3, 5, 8, 50))])
    if rng.random() < 0.2:  # half of a pair: an opening bracket, quote or escape that nothing closes
        piece = bytes([rng.choice(b"[{(\"'\\=.,#\n \t0-!|*")]) + (piece if rng.random() < 0.5 else b"")
    before = b"".join(tokens[:place])
    after = b"".join(tokens[place + 1 :]) if rng.random() < 0.7 else b""
    times = max(1, (longest - len(before) - len(after)) // len(piece))
    return (before + piece * times + after)[:longest]
