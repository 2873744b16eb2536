"""Compiling ahead: the first calls of many head shapes side by side, each in a child process.

Kernel libraries compile anew for each head shape, on one core, and keep the result on disk: who measures afterwards
finds it there. Where a library also tries out what it compiled, the children that run beside it make that less exact.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from queue import SimpleQueue

import msgspec

from kernelreg.asking import ask, reply
from kernelreg.errors import KernelregError
from kernelreg.workloads import Spot

#: Seconds that a child has; FLA's first call of a head shape takes up to 70 s alone on a machine.
LIMIT = 600.0


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What one child calls: kernels of one backend, on one head shape."""

    spots: tuple[Spot, ...]
    backend: str
    device: str

    def __str__(self) -> str:
        return f"{self.backend}, {self.spots[0].workload.name}, {self.spots[0].shape}"


class Called(msgspec.Struct, frozen=True, kw_only=True):
    """How many of the calls a kernel took."""

    points: int


def tasks_of(spots: Iterable[Spot], backends: Collection[str], device: str) -> list[Task]:
    """The calls in as many tasks as can run side by side: what shares a kernel is one task. Replays compile nothing."""
    groups: dict[tuple[object, ...], list[Spot]] = {}
    for spot in spots:
        if not spot.captured:
            groups.setdefault((spot.workload.trains, spot.shape, spot.workload.operation), []).append(spot)
    return [
        Task(spots=tuple(those), backend=backend, device=device) for those in groups.values() for backend in backends
    ]


def warm(tasks: Sequence[Task], at_once: int, until: float, told: Callable[[str], object]) -> None:
    """Carry out the tasks, so many at once. One that fails costs nothing: who measures will see it again.

    Args:
        until: the time of the monotonic clock at which the rest is left undone.
        told: called with each task's words when it is done.
    """
    waiting, done = deque(tasks), SimpleQueue[Task]()

    def work() -> None:
        while True:
            try:
                task = waiting.popleft()
            except IndexError:
                return
            try:
                if (left := min(LIMIT, until - time.monotonic())) > 0:
                    ask("kernelreg.warming", task, Called, left)
            except KernelregError as error:
                logging.getLogger("kernelreg").debug("compiling ahead, %s: %s", task, error)
            finally:
                done.put(task)

    for _ in range(min(at_once, len(tasks))):
        # None that Ctrl-C would wait for: a child sees that its parent is gone.
        threading.Thread(target=work, daemon=True).start()
    for _ in tasks:
        told(str(done.get()))


def respond(task: Task) -> Called:
    """The child's side: every call of the task, as often as compiling needs it."""
    from kernelreg.measure import Effort, measure
    from kernelreg.session import session

    grounds = session.grounds()
    found = [measure(spot, grounds, task.device, (task.backend,), Effort(1, 1e-9)) for spot in task.spots]
    return Called(points=sum(each.point is not None for each in found))


def main() -> int:
    """A child process that answers one task."""
    return reply(Task, respond)


if __name__ == "__main__":
    sys.exit(main())
