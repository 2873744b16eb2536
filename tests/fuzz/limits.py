"""What an input may cost, and what counts as a failure: anything but a result or a KernelregError within the limits."""

from __future__ import annotations

import hashlib
import time
import traceback
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass

from kernelreg.errors import KernelregError

#: Seconds of processor time: a busy machine makes no input slow.
SECONDS = 1.0
#: What an input may take at its peak, beside a multiple of its own size.
MEMORY_BYTES = 64 << 20
MEMORY_FACTOR = 100


@dataclass(frozen=True)
class Failure:
    """An input that gave neither a result nor a KernelregError, or took too much.

    Attributes:
        where: the kind of failure and its place in the code; equal for inputs that fail alike.
    """

    data: bytes
    where: str
    text: str


def name_of(data: bytes) -> str:
    """The file name of an input in the corpus."""
    return hashlib.sha256(data).hexdigest()[:16]


def attempt(run: Callable[[bytes], None], data: bytes, *, memory: bool = False) -> Failure | None:
    """Run a target on one input.

    Args:
        memory: count bytes too, which takes several times as long; the time is then not judged.
    """
    if memory:
        tracemalloc.start()
    start = time.process_time()
    try:
        run(data)
    except KernelregError:
        pass
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        last = next((each for each in reversed(frames) if "kernelreg" in each.filename), frames[-1])
        where = f"{type(error).__name__} in {last.filename.rpartition('/')[2]}:{last.name}"
        return Failure(data, where, "".join(traceback.format_exception(error))[-4000:])
    finally:
        seconds = time.process_time() - start
        peak = 0
        if memory:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
    if memory:
        allowed = MEMORY_BYTES + MEMORY_FACTOR * len(data)
        if peak > allowed:
            return Failure(data, "memory", f"{peak >> 20} MiB for {len(data)} bytes; accepted: {allowed >> 20} MiB")
    elif seconds > SECONDS:
        return Failure(data, "time", f"{seconds:.2f} s for {len(data)} bytes; accepted: {SECONDS:g} s")
    return None


def minimised(run: Callable[[bytes], None], failure: Failure, tries: int = 2000) -> Failure:
    """A smaller input that fails alike: pieces are taken out, halves first, as long as it still does."""
    if failure.where in ("time", "memory"):
        return failure  # such an input is large by nature
    size = max(1, len(failure.data) // 2)
    while size and tries > 0:
        place, smaller = 0, False
        while place < len(failure.data) and tries > 0:
            tries -= 1
            found = attempt(run, failure.data[:place] + failure.data[place + size :])
            if found is not None and found.where == failure.where:
                failure, smaller = found, True
            else:
                place += size
        size = min(size, len(failure.data)) if smaller and size == 1 else size // 2
    return failure
