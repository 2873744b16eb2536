"""Any text gives a result or a KernelregError, within a second and bounded memory: what the fuzzer found, again.

The fuzzer itself needs atheris (docs/fuzzing.md); its targets, its mutations and the inputs that it kept do not.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelreg.errors import KernelregError
from tests.fuzz import limits
from tests.fuzz.corpus import FAILED, SEEDS, cover, keep, kept
from tests.fuzz.limits import Failure, attempt, minimised
from tests.fuzz.mutate import by_tokens, by_tree, inflated
from tests.fuzz.targets import TARGETS, Target

each_target = pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
#: The same examples every time: what is new is the fuzzer's to find.
same = settings(deadline=None, derandomize=True, database=None)
randoms = st.randoms(use_true_random=False)


def words_of(target: Target) -> list[bytes]:
    """The grammar's words as bytes."""
    return [word.encode("utf-8", "surrogatepass") for word in target.words]


def check(failure: Failure | None) -> None:
    """Nothing failed, or else the test does, with what to keep."""
    assert failure is None, f"{failure.where}: {failure.data[:200]!r}\n{failure.text}"


# -- what is kept ------------------------------------------------------------------------------------------------------


@each_target
def test_what_once_failed_does_not_again(target: Target) -> None:
    for data in kept(FAILED, target.name):
        check(attempt(target.run, data))
        check(attempt(target.run, data, memory=True))


@each_target
def test_what_the_fuzzer_reached(target: Target) -> None:
    inputs = [*target.seeds(), *kept(SEEDS, target.name)]
    assert inputs
    for data in inputs:
        check(attempt(target.run, data))


@each_target
def test_a_seed_gives_a_result(target: Target) -> None:
    """A target whose every input is refused tests the refusal alone."""
    target.run(target.seeds()[0])


def test_kept_inputs_are_of_targets_and_small() -> None:
    files = [path for folder in (FAILED, SEEDS) for path in folder.rglob("*") if path.is_file()]
    assert {path.parent.name for path in files} <= set(TARGETS)
    assert sum(path.stat().st_size for path in files) < 400 << 10


# -- properties --------------------------------------------------------------------------------------------------------


@each_target
def test_any_bytes(target: Target) -> None:
    @settings(same, max_examples=50)
    @given(st.one_of(st.binary(), st.text().map(lambda text: text.encode("utf-8", "surrogatepass"))))
    def holds(data: bytes) -> None:
        check(attempt(target.run, data))

    holds()


@each_target
def test_words_of_the_grammar_in_any_order(target: Target) -> None:
    pieces = st.one_of(st.sampled_from(words_of(target)), st.binary(max_size=3))

    @settings(same, max_examples=50)
    @given(st.lists(pieces, max_size=20).map(b"".join))
    def holds(data: bytes) -> None:
        check(attempt(target.run, data))

    holds()


@each_target
def test_what_was_right_changed(target: Target) -> None:
    words, seeds = words_of(target), target.seeds()

    @settings(same, max_examples=50)
    @given(st.sampled_from(seeds), randoms, st.integers(min_value=1, max_value=3))
    def holds(data: bytes, rng: random.Random, times: int) -> None:
        for _ in range(times):
            tree = by_tree(data, rng, words) if target.json and rng.random() < 0.8 else None
            data = by_tokens(data, 1 << 16, rng, words) if tree is None else tree
        check(attempt(target.run, data))

    holds()


@each_target
def test_as_long_as_it_may_be(target: Target) -> None:
    rng = random.Random(0)
    for _ in range(3):
        data = inflated(rng.choice(target.seeds()), target.longest, rng)
        check(attempt(target.run, data))
    check(attempt(target.run, data, memory=True))


# -- the judge ---------------------------------------------------------------------------------------------------------


def _raises(error: BaseException) -> Callable[[bytes], None]:
    def run(data: bytes) -> None:
        raise error

    return run


def _loops(data: bytes) -> None:
    end = time.process_time() + limits.SECONDS * 1.5
    while time.process_time() < end:
        pass


def _fills(data: bytes) -> None:
    bytearray(limits.MEMORY_BYTES + (1 << 20))


@pytest.mark.parametrize(
    ("run", "memory", "where"),
    [
        (_raises(ValueError("x")), False, "ValueError in test_fuzz.py:run"),
        (_raises(SystemExit(1)), False, "SystemExit in test_fuzz.py:run"),
        (_raises(RecursionError()), True, "RecursionError in test_fuzz.py:run"),
        (_loops, False, "time"),
        (_fills, True, "memory"),
    ],
)
def test_a_failure_is_seen(
    run: Callable[[bytes], None], memory: bool, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SECONDS", 0.05)
    failure = attempt(run, b"data", memory=memory)
    assert failure is not None
    assert (failure.where, failure.data) == (where, b"data")
    assert failure.text


def test_an_answer_is_none() -> None:
    assert attempt(_raises(KernelregError("no")), b"") is None
    assert attempt(lambda data: None, b"", memory=True) is None


def test_ctrl_c_ends_the_run() -> None:
    with pytest.raises(KeyboardInterrupt):
        attempt(_raises(KeyboardInterrupt()), b"")


def test_what_failed_is_made_small() -> None:
    def run(data: bytes) -> None:
        if b"x" in data and b"y" in data:
            raise ValueError

    failure = attempt(run, b"abxcd" * 20 + b"yz")
    assert failure is not None
    assert minimised(run, failure).data == b"xy"


def test_inputs_are_kept_as_they_are(tmp_path: Path) -> None:
    inputs = {b"short", b"a" * (1 << 20), bytes(range(256))}
    keep(tmp_path, "version", inputs)
    assert set(kept(tmp_path, "version")) == inputs
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) < 4096


def test_seeds_are_those_that_reach_new_lines() -> None:
    run = TARGETS["version"].run
    assert cover(run, [b"2.8", b"2.9", b"main", b"other"]) == [b"2.8", b"main"]
