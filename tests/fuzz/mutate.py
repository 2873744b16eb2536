"""New inputs from old ones: by tokens and by trees with the grammar's words, and by making one piece very long."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

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


def by_tree(data: bytes, rng: random.Random, words: Sequence[bytes]) -> bytes | None:
    """JSON that stays JSON: one value replaced by a word, a number or another's, taken out, doubled, or put inside."""
    try:
        return _changed([msgspec.json.decode(data)], rng, words)
    except (ValueError, RecursionError):
        return None


def _changed(root: list[Any], rng: random.Random, words: Sequence[bytes]) -> bytes:
    for _ in range(rng.choice((1, 1, 2, 4))):
        places = list(_places(root))
        holder, key = rng.choice(places)
        other_holder, other_key = rng.choice(places)
        if rng.random() < 0.6:
            holder[key] = _alike(holder[key], [each[at] for each, at in places], rng, words)
            continue
        match rng.randrange(6):
            case 0:
                holder[key] = _word(rng, words)
            case 1:
                holder[key] = msgspec.json.decode(msgspec.json.encode(other_holder[other_key]))  # it may hold this one
            case 2 if holder is not root:
                del holder[key]
            case 3 if isinstance(holder, dict):
                holder[str(_word(rng, words))] = holder.pop(key)
            case 4:
                holder[key] = [holder[key]]
            case _:
                holder[key] = rng.choice((None, True, 0, -1, 2**63, 2**64, 10**30, 0.5, 1e308, "", [], {}))
    return msgspec.json.encode(root[0])


def _alike(value: object, others: Sequence[object], rng: random.Random, words: Sequence[bytes]) -> object:
    """Another value of the same type: what a reader that checks types lets through."""
    match value:
        case bool():
            return not value
        case int() | float():
            return rng.choice((0, 1, value + 1, -value, value * 2, 2**31, 2**63 - 1))
        case str() if rng.random() < 0.5:
            return rng.choice([each for each in others if isinstance(each, str)])
        case str():
            return by_tokens(value.encode(), 1000, rng, words).decode(errors="replace")
        case list() if value:
            return rng.choices(value, k=rng.randrange(2 * len(value) + 1))
        case dict() if value:
            return {each: value[each] for each in rng.sample(list(value), len(value)) if rng.random() < 0.9}
    return value


def _word(rng: random.Random, words: Sequence[bytes]) -> object:
    """A word as the value that it writes, or else as a text."""
    word = rng.choice(words)
    try:
        return msgspec.json.decode(word)
    except (ValueError, RecursionError):
        return word.decode(errors="replace")


def _places(root: Any) -> Iterator[tuple[Any, Any]]:
    """Where a value stands: what holds it, and under which key."""
    below = [root]
    while below:
        holder = below.pop()
        for key in holder if isinstance(holder, dict) else range(len(holder)):
            yield holder, key
            if isinstance(holder[key], (dict, list)):
                below.append(holder[key])
