"""One target in this process: executions guided by coverage (atheris, which is libFuzzer for Python).

atheris never returns, so :mod:`tests.fuzz.__main__` starts one process a target:
``python -m tests.fuzz.engine TARGET EXECUTIONS SEED FOLDER``. What it did stands in ``FOLDER/result.json`` at the end.
"""

from __future__ import annotations

import random
import resource
import sys
import time
from pathlib import Path

import atheris
import msgspec

with atheris.instrument_imports(include=["kernelreg", "packaging", "tomllib"], enable_loader_override=False):
    from tests.fuzz.limits import Failure, attempt, minimised
    from tests.fuzz.mutate import by_tokens, by_tree, inflated
    from tests.fuzz.targets import TARGETS, Target

#: Bytes of an input while coverage guides; short ones cover the same code many times faster.
GUIDED_BYTES = 4096
#: One execution in so many is of an input made as long as the target ever gets one; one in so many counts memory.
INFLATED_ONE_IN, MEMORY_ONE_IN = 1_000, 1_000
#: Address space beyond what this process has at its start.
SPACE_BYTES = 2 << 30


class Result(msgspec.Struct):
    """What one target's process did.

    Attributes:
        executions: of the target, all of them; ``inflated`` and ``measured`` are among them.
        accepted: those that gave a result, and no error.
        failures: by kind: the first input of each, how it failed, how often.
    """

    executions: int = 0
    accepted: int = 0
    inflated: int = 0
    measured: int = 0
    seconds: float = 0.0
    failures: dict[str, tuple[bytes, str, int]] = {}


class Engine:
    """Runs a target on what libFuzzer makes, keeps what fails, goes on."""

    def __init__(self, target: Target, executions: int, seed: int, folder: Path) -> None:
        self.target, self.wanted, self.folder = target, executions, folder
        self.rng = random.Random(seed)
        self.words = [word.encode("utf-8", "surrogatepass") for word in target.words]
        self.result = Result()
        self.start = time.monotonic()

    def run(self, data: bytes) -> None:
        """The target, counted."""
        self.target.run(data)
        self.result.accepted += 1

    def one(self, data: bytes) -> None:
        """libFuzzer's entry: it is called with each input that has been made."""
        result = self.result
        if result.executions >= self.wanted:
            return  # libFuzzer reads its last corpus units once more
        result.executions += 1
        measured = result.executions % MEMORY_ONE_IN == 0
        result.measured += measured
        self._keep(attempt(self.run, data, memory=measured))
        if result.executions % INFLATED_ONE_IN == 0 and result.executions < self.wanted:
            large = inflated(data, self.rng.choice((1 << 16, self.target.longest)), self.rng)
            result.executions += 1
            result.inflated += 1
            self._keep(attempt(self.run, large[: self.target.longest]))
        if result.executions >= self.wanted:
            self.end()
        elif result.executions % (10 * INFLATED_ONE_IN) < 2:
            self.write()

    def mutate(self, data: bytes, longest: int, seed: int) -> bytes:
        """A quarter of the inputs come from libFuzzer's own mutations of bytes, the others know the grammar.

        libFuzzer applies several in turn, and what one made no JSON stays so: by bytes alone hardly any would be read.
        """
        rng = random.Random(seed)
        by = rng.random()
        if by < 0.25:
            return bytes(atheris.Mutate(data, longest))
        tree = by_tree(data, rng, self.words) if self.target.json and by > 0.35 else None
        return by_tokens(data, longest, rng, self.words) if tree is None or len(tree) > longest else tree

    def end(self) -> None:
        """Make what failed small."""
        self.write()
        for where, (data, text, count) in self.result.failures.items():
            small = minimised(self.target.run, Failure(data, where, text))
            self.result.failures[where] = (small.data, small.text, count)
        self.write(ended=True)

    def write(self, *, ended: bool = False) -> None:
        if not ended:
            self.result.seconds = time.monotonic() - self.start
        (self.folder / "result.json").write_bytes(msgspec.json.encode(self.result))

    def _keep(self, failure: Failure | None) -> None:
        if failure is None:
            return
        failures = self.result.failures
        if failure.where == "time" and attempt(self.target.run, failure.data) is None:
            return  # the first call of all, or the collector's: the input itself is not slow
        data, text, count = failures.get(failure.where, (failure.data, failure.text, 0))
        if len(failure.data) < len(data):
            data, text = failure.data, failure.text
        failures[failure.where] = (data, text, count + 1)
        if count == 0:
            self.write()


def main(name: str, executions: str, seed: str, folder: str) -> None:
    """Fuzz one target; ends the process."""
    target, place = TARGETS[name], Path(folder)
    corpus = place / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(target.seeds()):
        (corpus / f"seed-{number}").write_bytes(data)
    engine = Engine(target, int(executions), int(seed), place)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + SPACE_BYTES, resource.RLIM_INFINITY))
    options = {
        "runs": int(executions) + 1,
        "seed": int(seed),
        "max_len": GUIDED_BYTES * (8 if any(len(each) > GUIDED_BYTES for each in target.seeds()) else 1),
        "timeout": 60,  # of the wall's clock, for what never ends; SECONDS is judged after each execution
        "rss_limit_mb": 0,  # RLIMIT_AS bounds it
        "artifact_prefix": f"{place}/",
        "print_final_stats": 1,
        "verbosity": 1,
    }
    words = [f"-{key}={value}" for key, value in options.items()]
    atheris.Setup([sys.argv[0], *words, str(corpus)], engine.one, custom_mutator=engine.mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
