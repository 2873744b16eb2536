"""Forks, threads and tasks: nothing is torn, nothing hangs, and CUDA stays untouched in this process.

``RESOLVE_CALLS=1000000 python -m pytest tests/test_concurrency.py -k million`` makes the calls a million; without it
they are fewer, so that the suite stays short.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from functools import partial
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

import kernelreg
from kernelreg import Facts, session
from kernelreg.descriptor import make_descriptor
from kernelreg.machine import Device, Driver, devices
from kernelreg.machine.nvml import Reading
from kernelreg.machine.visible import Card
from kernelreg.registry import Backend, Registry
from kernelreg.resolution import Resolution
from tests.machines import codes, decided, descriptor, machine

THREADS = 64
CALLS = int(os.environ.get("RESOLVE_CALLS", "19200"))
linux = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads /proc")


# -- fork --------------------------------------------------------------------------------------------------------------


def run_script(script: str, **environ: str) -> str:
    """What a new process prints; it must end well."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "H200_FILE": H200_FILE, **environ},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


H200_FILE = os.fspath(Path(__file__).with_name("facts") / "h200.json")
#: A process that has used all that may be used before a fork.
USED = """
    import contextlib, io, os, signal, sys, threading
    import kernelreg
    from kernelreg import cli
    kernelreg.facts()
    H200 = kernelreg.Facts.load(os.environ["H200_FILE"])
    kernelreg.resolve("gdn", facts=H200)
    with contextlib.redirect_stdout(io.StringIO()):
        cli.main(["doctor"])

    def in_child(work):
        "Run the work in a fork; a child that hangs is ended by its alarm."
        pid = os.fork()
        if not pid:
            signal.alarm(30)
            try:
                os._exit(0 if work() else 1)
            finally:
                os._exit(2)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""
USED = textwrap.dedent(USED)


@linux
def test_facts_resolve_and_doctor_leave_no_thread_and_no_cuda_library() -> None:
    told = run_script(
        USED
        + """
print(len(os.listdir("/proc/self/task")), threading.active_count())
maps = open("/proc/self/maps").read()
print([each for each in ("libcudart", "libtorch", "libc10") if each in maps], "torch" in sys.modules)
print(in_child(lambda: kernelreg.resolve("gdn", facts=H200).backend == "flash_qla"))
"""
    )
    assert told.splitlines() == ["1 1", "[] False", "0"]


STUB = r"""
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
static void note(const char *what) {
  FILE *file = fopen(getenv("STUB_NOTES"), "a");
  fprintf(file, "%s %d\n", what, getpid());
  fclose(file);
}
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuInit(unsigned flags) { note("cuInit"); return 100; }
int cuGetErrorString(int status, const char **text) { *text = "no device"; return 0; }
int cuCtxCreate_v2(void *context, unsigned flags, int device) { note("cuCtxCreate"); return 100; }
int cuDevicePrimaryCtxRetain(void *context, int device) { note("cuDevicePrimaryCtxRetain"); return 100; }
"""


@linux
def test_only_a_child_process_initialises_the_cuda_driver(tmp_path: Path) -> None:
    """``cuInit`` breaks CUDA in every later fork of the process that called it."""
    source, library, notes = tmp_path / "stub.c", tmp_path / "libcuda.so.1", tmp_path / "notes"
    source.write_text(STUB, encoding="utf-8")
    try:
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    except FileNotFoundError:
        pytest.skip("no gcc")
    told = run_script(USED + "print(os.getpid())", LD_LIBRARY_PATH=os.fspath(tmp_path), STUB_NOTES=os.fspath(notes))
    called = [line.split() for line in notes.read_text(encoding="utf-8").splitlines()]
    assert {function for function, _ in called} == {"cuInit"}
    assert told.strip() not in {pid for _, pid in called}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_forked_while_another_thread_detects_the_machine_is_not_locked_out() -> None:
    told = run_script(
        USED
        + """
from kernelreg import session as module
inside, go_on, real = threading.Event(), threading.Event(), module.detect
module.detect = lambda *words: inside.set() or go_on.wait(60) and real(*words)
kernelreg.refresh()
threading.Thread(target=kernelreg.facts, daemon=True).start()
inside.wait(60)

def work():
    go_on.set()
    os.environ["KERNELREG_DISABLE"] = "torch"
    return kernelreg.facts().platform and kernelreg.resolve("gdn", facts=H200).candidates[-1].reasons[0]

print(in_child(work))
go_on.set()
print(kernelreg.resolve("gdn", facts=H200).backend)
"""
    )
    assert told.splitlines() == ["0", "flash_qla"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_keeps_what_its_parent_knew_and_the_block_it_is_in() -> None:
    told = run_script(
        USED
        + """
from kernelreg import session as module
known = kernelreg.facts()
module.detect = None
with kernelreg.use(backend="fla"):
    print(in_child(lambda: kernelreg.facts() is known and kernelreg.resolve("gdn", facts=H200).backend == "fla"))
with module.session.steady():  # held by the very thread that forks
    print(in_child(lambda: kernelreg.facts() is known))
"""
    )
    assert told.splitlines() == ["0", "0"]


# -- threads -----------------------------------------------------------------------------------------------------------


def together(works: Iterable[Callable[[], None]]) -> None:
    """Run all at once; the first error of any thread is raised here."""
    failed: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # a hundred times as many switches as Python makes by itself
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    if failed:
        raise failed[0]


def small(name: str, speedup: float, **changes: Any) -> dict[str, Any]:
    """A backend of one row."""
    kernel = {"preference": [{"speedup": speedup, "source": "made up for a test"}], **changes.pop("kernel", {})}
    return descriptor(name, kernel=kernel, **changes)


GAMMA = small("gamma", 9, requires={"packages": {"gamma-lib": ">=1"}})


@pytest.fixture
def small_world(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two small backends, and a machine on which every package is installed that the backends name."""
    base = Registry()
    for each in (small("alpha", 5), small("beta", 3)):
        base = base.adding(Backend(descriptor=make_descriptor(each), origin="a test"))

    def detect(packages: Iterable[str], environ: Any) -> Facts:
        return machine("cpu-only", packages=dict.fromkeys(packages, "1.0"))

    monkeypatch.setattr(session, "discover", lambda plugins: base)
    monkeypatch.setattr(session, "detect", detect)
    for name in SETTINGS:
        monkeypatch.setenv(name, "")  # as good as unset, and put back whatever the threads leave there
    kernelreg.refresh()
    yield
    monkeypatch.undo()
    kernelreg.refresh()


#: What a program may change while others resolve: each variable's values, where "" is as good as unset.
SETTINGS = {
    "KERNELREG_PREFER": (None, "beta"),
    "KERNELREG_DISABLE": (None, "alpha"),
    "KERNELREG_FACTS": (None, os.fspath(Path(H200_FILE).with_name("a100-ngc.json"))),
}
USES: tuple[dict[str, Any], ...] = ({}, {"backend": "alpha"}, {"strict": True})


def put(name: str, value: str | None) -> None:
    """Set or unset a variable. ``os.environ.pop`` would raise where another thread is faster."""
    if value is not None:
        os.environ[name] = value
        return
    with suppress(KeyError):
        del os.environ[name]


def outcome(uses: dict[str, Any]) -> bytes:
    """The whole decision as text, or all reasons against it."""
    with kernelreg.use(**uses) if uses else nullcontext():
        return msgspec.json.encode(decided_here().decision, order="deterministic")


def decided_here() -> Resolution:
    """This process's decision, also where nothing fits."""
    try:
        return kernelreg.resolve("gdn")
    except kernelreg.NoBackendError as error:
        return error.resolution


def test_a_million_calls_of_64_threads_give_what_some_order_could(small_world: None) -> None:
    possible: list[set[bytes]] = [set() for _ in USES]
    for gamma, values in product((False, True), product(*SETTINGS.values())):
        for name, value in zip(SETTINGS, values, strict=True):
            put(name, value)
        undo = kernelreg.register(GAMMA) if gamma else lambda: None
        for place, uses in enumerate(USES):
            possible[place].add(outcome(uses))
        undo()
    assert [len(each) for each in possible] == [16, 16, 16]  # no two orders look alike

    told: list[Counter[bytes]] = []

    def work(number: int) -> None:
        chance, mine = random.Random(number), Counter[bytes]()
        undo: Callable[[], None] | None = None
        for turn in range(CALLS // THREADS):
            if turn % 8 == 0:
                kind = number % 8
                if number == 0:  # only one may hold the name
                    if undo is None:
                        undo = kernelreg.register(GAMMA)
                    else:
                        undo()
                        undo = None
                elif kind <= len(SETTINGS) and kind:
                    name = list(SETTINGS)[kind - 1]
                    put(name, chance.choice(SETTINGS[name]))
                elif kind == 4:
                    kernelreg.refresh()
            place = chance.randrange(len(USES))
            found = outcome(USES[place])
            assert found in possible[place], found
            mine[found] += 1
        if undo is not None:
            undo()
        told.append(mine)  # one step, where two threads' Counter.update would lose counts of each other

    together([partial(work, number) for number in range(THREADS)])
    seen = sum(told, Counter[bytes]())
    assert sum(seen.values()) == CALLS // THREADS * THREADS
    assert len(seen) > len(USES) * 4  # they did change the policy under each other's hands


def test_no_observer_is_lost_between_two_threads(small_world: None) -> None:
    heard: Counter[int] = Counter()

    def work(number: int) -> None:
        for _ in range(200):
            undo = kernelreg.on_resolve(lambda _: None)
            undo()
        kernelreg.on_resolve(lambda _: heard.update([number]))

    before = session.session.observers
    together([partial(work, number) for number in range(16)])
    kernelreg.resolve("gdn")
    session.session.observers = before
    assert sorted(heard) == list(range(16))


def test_what_is_said_once_is_said_once_by_all_threads(small_world: None, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kernelreg")

    def work() -> None:
        for _ in range(20):
            kernelreg.resolve("gdn")

    together([work] * 16)
    assert len(caplog.messages) == 1


def test_a_resolutions_decision_and_function_are_of_one_load() -> None:
    decisions = [kernelreg.resolve("gdn", facts=machine(name)).decision for name in ("h200", "cpu-only")]
    pairs: dict[int, Callable[[], None]] = {
        id(decision): partial(print, place) for place, decision in enumerate(decisions)
    }
    for _ in range(200):
        meet, turns = threading.Barrier(2), iter(range(2))

        def load(_: Any, meet: threading.Barrier = meet, turns: Iterator[int] = turns) -> Any:
            decision = decisions[next(turns)]
            meet.wait(10)
            return decision, pairs[id(decision)]

        resolution = Resolution(decisions[0], load)
        together([lambda resolution=resolution: resolution.function and None] * 2)  # type: ignore[misc]
        assert resolution.function is pairs[id(resolution.decision)]


@pytest.fixture
def call(small_world: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], str]:
    """Call ``kernelreg.gdn`` with so many tokens; gives the name of the backend that ran."""
    torch = pytest.importorskip("torch")
    from kernelreg.gdn import chunk_gated_delta_rule

    for name in ("alpha", "beta", "short", "tiny"):
        module = ModuleType(f"{name}_adapter")
        module.run = lambda *_, name=name, **__: name  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)

    def call(tokens: int) -> str:
        q = torch.zeros(1, tokens, 1, 16)
        name: Any = chunk_gated_delta_rule(q, q, q, torch.zeros(1, tokens, 1), torch.zeros(1, tokens, 1))
        assert isinstance(name, str)
        return name

    return call


SHORT = small("short", 9, kernel={"accepts": {"tokens": {"max": 20}}})
TINY = small("tiny", 9, kernel={"accepts": {"tokens": {"max": 5}}})


def test_the_functions_never_run_a_kernel_on_a_size_that_it_does_not_take(call: Callable[[int], str]) -> None:
    """A backend that comes and goes tells sizes apart that the others do not: no key of one time may serve another."""
    assert call(40) == "alpha"
    seen: Counter[tuple[int, str]] = Counter()

    def change() -> None:
        for _ in range(100):
            kernelreg.register(SHORT)()

    def run() -> None:
        for turn in range(200):
            tokens = 10 if turn % 2 else 40
            seen[tokens, call(tokens)] += 1

    together([change, *[run] * 8])
    assert set(seen) <= {(10, "alpha"), (10, "short"), (40, "alpha")}


def test_backends_that_change_between_a_calls_key_and_its_decision_leave_no_wrong_key(
    call: Callable[[int], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kernelreg import gdn

    real = gdn._call
    short, tiny = kernelreg.register(SHORT), list[Callable[[], None]]()

    def meanwhile(*arguments: Any) -> Any:
        """What another thread may do at this very moment."""
        if not tiny:
            short()
            tiny.append(kernelreg.register(TINY))
        return real(*arguments)

    monkeypatch.setattr(gdn, "_call", meanwhile)
    assert call(10) == "alpha"  # up to 20 tokens were told apart when the key was made, up to 5 are now
    assert (call(3), call(10)) == ("tiny", "alpha")
    tiny[0]()


# -- tasks -------------------------------------------------------------------------------------------------------------


def test_tasks_do_not_see_each_others_policies() -> None:
    facts = machine("h200")
    backends = ("torch", "fla", "flash_qla")

    async def one(number: int) -> bool:
        mine = backends[number % 3]
        with kernelreg.use(backend=mine):
            await asyncio.sleep(0)
            inner = asyncio.create_task(other(backends[(number + 1) % 3]))
            seen = [decided(facts).backend]
            await asyncio.sleep(0)
            seen.append(decided(facts).backend)
            # A task starts with its maker's policy, and what it changes is its own.
            assert await inner == (mine, backends[(number + 1) % 3])
            seen.append(decided(facts).backend)
            seen.append((await asyncio.to_thread(decided, facts)).backend)
        return seen == [mine] * 4 and decided(facts).backend == "flash_qla"

    async def other(name: str) -> tuple[str | None, str | None]:
        before = decided(facts).backend
        await asyncio.sleep(0)
        with kernelreg.use(backend=name):
            await asyncio.sleep(0)
            return before, decided(facts).backend

    async def all_of_them() -> list[bool]:
        return list(await asyncio.gather(*(one(number) for number in range(30))))

    assert asyncio.run(all_of_them()) == [True] * 30


# -- what changes while the process runs -------------------------------------------------------------------------------


def test_a_device_that_vanished_is_gone_after_refresh(monkeypatch: pytest.MonkeyPatch) -> None:
    def shows(*cards: Device) -> None:
        found = tuple(Card(each) for each in cards)
        monkeypatch.setattr(devices, "read_nvml", lambda: Reading(Driver(version="580.159.04"), found, ()))

    (first,) = machine("h200").devices
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    shows(first, msgspec.structs.replace(first, uuid="GPU-2", pci_bus_id="00000000:4A:00.0"))
    kernelreg.refresh()
    assert [each.torch_name for each in kernelreg.facts().devices] == ["cuda:0", "cuda:1"]
    second = decided(kernelreg.facts(), device="cuda:1")
    shows(first)
    assert len(kernelreg.facts().devices) == 2  # read once, until someone asks for more
    kernelreg.refresh()
    assert [each.torch_name for each in kernelreg.facts().devices] == ["cuda:0"]
    again = decided(kernelreg.facts(), device="cuda:1")
    for backend, kernel in (("fla", "triton"), ("torch", "chunk")):
        assert "no-device" not in codes(second, backend, kernel)
        assert "no-device" in codes(again, backend, kernel)
    shows()
    kernelreg.refresh()
    assert decided(kernelreg.facts()).device == "cpu"


def test_an_observer_that_raises_costs_one_line_and_no_call(caplog: pytest.LogCaptureFixture) -> None:
    def broken(_: Resolution) -> None:
        raise ValueError("no such column")

    heard: list[Resolution] = []
    undo = [kernelreg.on_resolve(broken), kernelreg.on_resolve(heard.append)]
    for _ in range(2):
        assert kernelreg.resolve("gdn", facts=machine("h200")).backend == "flash_qla"
    for each in undo:
        each()
    assert len(heard) == 2
    (told,) = [each for each in caplog.messages if "observer" in each]
    assert "broken raised ValueError: no such column" in told


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, asyncio.CancelledError])
def test_an_observer_may_end_the_program(kind: type[BaseException]) -> None:
    def stop(_: Resolution) -> None:
        raise kind

    undo = kernelreg.on_resolve(stop)
    with pytest.raises(kind):
        kernelreg.resolve("gdn", facts=machine("h200"))
    undo()
