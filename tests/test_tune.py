"""tune and bench on the CPU: what is measured, by whose clock, and what is made of it. No time is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

import kernelreg
from kernelreg import KernelregError, asking, gdn, warming
from kernelreg.asking import NoAnswerError
from kernelreg.cli import main
from kernelreg.kinds import kind_features
from kernelreg.measure import Effort, arguments, measure, side_by_side
from kernelreg.models import MODELS, Shape, model_named
from kernelreg.ops import operation_named
from kernelreg.profile import load_profile
from kernelreg.session import session
from kernelreg.verify.judge import expected, relative
from kernelreg.workloads import WORKLOADS, Spot, Workload, call_of, most_telling_first, spots, workload_of
from tests.machines import descriptor, machine
from tests.profiles import point, profile

SMALL = Shape(1, 2, 8, 8)
QUICK = ["--heads", "1,2", "--head-dim", "8", "--tokens", "8,4", "--batch", "2", "--sequences", "2,64"]
QUICK += ["--repeats", "2", "--seconds", "1e-6"]


# -- the clock ---------------------------------------------------------------------------------------------------------


class Clock:
    """A clock that stands still but for what runs take, and a log of what ran."""

    def __init__(self) -> None:
        self.time = 0.0
        self.ran: list[str] = []

    def run(self, name: str, takes: Callable[[int], float]) -> Callable[[], object]:
        calls = iter(range(10**6))

        def one() -> None:
            self.time += takes(next(calls))
            self.ran.append(name)

        return one


def test_kernels_take_turns_and_every_second_round_goes_the_other_way() -> None:
    clock = Clock()
    runs = {(name, "only"): clock.run(name, lambda call: 1.0) for name in "abc"}
    times, failed = side_by_side(runs, Effort(repeats=3, seconds=1.0), lambda: None, lambda: clock.time)
    assert "".join(clock.ran) == "aaabbbccc" + "abc" + "cba" + "abc"
    assert times == {(name, "only"): [1.0] * 3 for name in "abc"}
    assert not failed


def test_what_the_first_calls_take_is_not_counted() -> None:
    clock = Clock()
    run = clock.run("a", lambda call: [60.0, 9.0, 0.25][call] if call < 3 else 0.5)
    times, _ = side_by_side({("a", "only"): run}, Effort(repeats=2, seconds=1.0), lambda: None, lambda: clock.time)
    assert times == {("a", "only"): [0.5, 0.5]}
    assert len(clock.ran) == 3 + 2 * 4  # as many calls as fill a round by the third one's time


def test_a_round_ends_when_the_device_is_done() -> None:
    clock = Clock()

    def wait() -> None:
        clock.time += 5.0
        clock.ran.append("wait")

    run = clock.run("a", lambda call: 1.0)
    times, _ = side_by_side({("a", "only"): run}, Effort(repeats=1, seconds=12.5), wait, lambda: clock.time)
    assert times == {("a", "only"): [3.5]}  # two calls and one wait
    assert clock.ran[-3:] == ["a", "a", "wait"]


def test_a_kernel_that_fails_is_left_out_with_its_reason_and_the_others_go_on() -> None:
    clock = Clock()

    def fails(call: int) -> float:
        if call >= 4:
            raise RuntimeError("no more")
        return 1.0

    def exits(call: int) -> float:
        raise SystemExit(3)

    runs = {
        ("late", "only"): clock.run("late", fails),
        ("early", "only"): clock.run("early", exits),
        ("good", "only"): clock.run("good", lambda call: 1.0),
    }
    times, failed = side_by_side(runs, Effort(repeats=4, seconds=1.0), lambda: None, lambda: clock.time)
    assert times == {("good", "only"): [1.0] * 4}
    assert failed == {("late", "only"): "RuntimeError: no more", ("early", "only"): "SystemExit: 3"}


def test_a_device_that_failed_ends_it() -> None:
    def broken() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    def lost() -> None:
        raise RuntimeError("launch failure")

    with pytest.raises(KernelregError, match="the device failed while a only was measured"):
        side_by_side({("a", "only"): broken}, Effort(), lost)


# -- the calls ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda each: each.name)
def test_the_tensors_are_the_workloads_call(workload: Workload) -> None:
    """What is measured is a call of the contract, of the kind that a lock file pins under the same name."""
    shape = Shape(1, 2, 8, 4)
    sequences = 6 if workload.decodes else 2 if workload.packed else 1
    spot = Spot(workload=workload, shape=shape, dtype="float32", tokens=6, sequences=sequences)
    with torch.set_grad_enabled(workload.trains):
        call = arguments(spot, "cpu")
        needs = gdn.call_like(workload.operation, call)
        pinned = call_of(workload, shape, "cpu", dtype="float32").features
        assert needs.features | {"empty-sequences"} == pinned | {"empty-sequences"}
        assert kind_features(needs.features) == kind_features(workload.features)
        assert (needs.tokens, needs.sequences) == (6, sequences)
        assert workload_of(needs.operation, needs.features) is workload
        before = {
            name: each.detach().clone() if isinstance(each, torch.Tensor) else each for name, each in call.items()
        }
        o, _ = getattr(gdn, operation_named(needs.operation).function)(**call)
    wanted, _ = expected(before)
    assert relative(o, wanted) < 1e-3


def test_every_size_of_a_shape_is_measured_before_the_next_shape() -> None:
    planned = list(
        spots(
            WORKLOADS,
            [SMALL, Shape(2, 4), SMALL],
            dtype="bfloat16",
            tokens=[64, 8],
            batches=[2],
            sequences=[1, 2, 16],
            captured=True,
        )
    )
    assert [each.shape for each in planned] == sorted((each.shape for each in planned), key=lambda each: each.heads)
    assert len(planned) == len(set(planned))
    told = [(each.workload.name, each.captured, each.tokens, each.sequences) for each in planned if each.shape == SMALL]
    assert told[:2] == [("prefill", False, 8, 1), ("prefill", False, 64, 1)]
    assert ("prefill-varlen", True, 8, 2) in told
    assert ("prefill-varlen", True, 8, 16) not in told  # less than a token each
    assert not any(captured for name, captured, *_ in told if name.startswith("training"))


def test_what_tells_most_is_measured_first() -> None:
    """The ends, then the middle: the nearest point speaks for what was not measured. Gradients come last."""
    shapes = [Shape(2 * number, 4 * number) for number in range(1, 6)]
    words: dict[str, Any] = {"dtype": "bfloat16", "batches": [1, 8, 64], "sequences": [2], "captured": True}
    planned = list(spots(WORKLOADS, shapes, tokens=[4, 8, 16, 32, 64, 128], **words))
    ordered = most_telling_first(planned)
    assert sorted(map(str, ordered)) == sorted(map(str, planned))
    assert [each.workload.trains for each in ordered] == sorted(each.workload.trains for each in planned)
    assert list(dict.fromkeys(each.shape.heads for each in ordered)) == [2, 10, 6, 4, 8]
    first = [each for each in ordered if each.shape == shapes[0] and not each.workload.trains]
    assert list(dict.fromkeys(each.tokens for each in first if not each.workload.decodes)) == [4, 128, 16, 64, 8, 32]
    assert list(dict.fromkeys(each.tokens for each in first if each.workload.decodes)) == [1, 64, 8]
    assert {each.workload.name for each in first[: len(first) // 3]} == {
        each.name for each in WORKLOADS if not each.trains
    }
    assert most_telling_first([]) == []


def test_models_are_split_evenly_and_have_a_source() -> None:
    assert model_named("Qwen3-Next-80B-A3B").shape == Shape(16, 32, 128, 128)
    assert model_named("qwen3.5-27b").shape.split(8) == Shape(2, 6)
    for model in MODELS.values():
        assert "https://" in model.source
        for tp in (1, 2, 4, 8):
            share = model.shape.split(tp)
            assert (share.heads * tp, share.value_heads * tp) == (model.shape.heads, model.shape.value_heads)
    with pytest.raises(kernelreg.ConfigurationError, match=r"accepted: 1, 2, 4, 8, 16"):
        Shape(16, 48).split(5)


def test_the_model_table_has_the_heads_of_the_real_config() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3NextConfig()
    shape = MODELS["qwen3-next-80b-a3b"].shape
    assert shape.heads == config.linear_num_key_heads
    assert shape.value_heads == config.linear_num_value_heads
    assert (shape.head_dim_k, shape.head_dim_v) == (config.linear_key_head_dim, config.linear_value_head_dim)


# -- measuring ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two more backends on this machine: one gives zeros, the other fails."""
    features = sorted({feature for each in WORKLOADS for feature in each.features} | {"grouped-value-heads"})

    def zeros(q: Any, k: Any, v: Any, g: Any, beta: Any, **words: Any) -> Any:
        return (q.sum() + k.sum() + v + g.unsqueeze(-1) + beta.unsqueeze(-1)) * 0, None

    def fails(*arguments: Any, **words: Any) -> Any:
        raise ValueError("not today")

    undo = []
    for name, run in (("zeros", zeros), ("fails", fails)):
        module = types.ModuleType(f"{name}_adapter")
        module.run = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, f"{name}_adapter", module)
        undo.append(kernelreg.register(descriptor(name, kernel={"accepts": {"features": features}})))
    yield
    for each in undo:
        each()


def test_every_kernel_that_takes_the_call_is_measured(others: Any) -> None:
    grounds = session.grounds()
    spot = Spot(workload=WORKLOADS[0], shape=SMALL, dtype="float32", tokens=4, sequences=1)
    found = measure(spot, grounds, "cpu", grounds.registry.names(), Effort(3, 1e-6))
    assert found.point is not None
    assert {each.row for each in found.point.timings} == {("torch", "chunk"), ("zeros", "only")}
    assert all(each.repeats == 3 and each.median_us > 0 and each.spread_us >= 0 for each in found.point.timings)
    assert [(each.row, each.reason) for each in found.point.failures] == [(("fails", "only"), "ValueError: not today")]
    assert found.refused["flash_qla", "sm90"].startswith("device-type: needs device cuda")
    found = measure(spot, grounds, "cpu", ["zeros"], Effort(1, 1e-6))
    assert found.point is not None
    assert [each.row for each in found.point.all] == [("zeros", "only")]


def test_what_ranks_or_forces_does_not_change_what_is_measured(others: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELREG_BACKEND", "zeros")
    monkeypatch.setenv("KERNELREG_DISABLE", "fails")
    grounds = session.grounds()
    spot = Spot(workload=WORKLOADS[0], shape=SMALL, dtype="float32", tokens=4, sequences=1)
    found = measure(spot, grounds, "cpu", grounds.registry.names(), Effort(1, 1e-6))
    assert found.point is not None
    assert {each.row for each in found.point.all} == {("torch", "chunk"), ("zeros", "only")}


def test_tune_writes_a_profile_that_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    path = tmp_path / "cpu.json"
    # A file that the environment names already, of another machine, is no reason not to make the right one.
    profile(machine("h200"), [point({"fla triton": 1})]).save(path)
    monkeypatch.setenv("KERNELREG_PROFILE", str(path))
    assert main(["tune", "gdn", *QUICK, "--no-verify", "--output", str(path)]) == 0
    out = capsys.readouterr().out
    assert "gdn.chunk: torch chunk is the fastest at" in out
    assert f"KERNELREG_PROFILE={path}" in out
    assert "not measured: flash_qla sm100, sm103, sm120, sm120-forward, sm90: device-type" in out
    made = load_profile(path)
    assert made.fingerprint == kernelreg.facts().fingerprint
    assert made.setup.type == "cpu"
    kinds = {(each.operation, each.kind, each.tokens, each.sequences) for each in made.points}
    assert kinds == {
        *(("gdn.chunk", f"dense, {way}, eager", size, 1) for way in ("forward", "backward") for size in (4, 8)),
        *(("gdn.chunk", f"varlen, {way}, eager", size, 2) for way in ("forward", "backward") for size in (4, 8)),
        ("gdn.recurrent", "dense, forward, eager", 2, 2),
        ("gdn.recurrent", "dense, forward, eager, state-pool", 2, 2),
    }
    assert all(each.timings and not each.failures for each in made.points)
    monkeypatch.setenv("KERNELREG_PROFILE", str(path))
    kernelreg.refresh()
    assert kernelreg.resolve("gdn", device="cpu", tokens=8).backend == "torch"


def test_tune_adds_to_a_profile_of_the_same_setup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cpu.json"
    words = ["tune", "gdn.recurrent", *QUICK, "--no-verify", "--output", str(path)]
    assert main([*words, "--workload", "decode"]) == 0
    assert main([*words, "--workload", "decode-pool", "--add", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out.partition("{")[1] + path.read_text().partition("{")[2])
    assert len(printed["points"]) == 2
    assert main([*words, "--workload", "decode", "--add"]) == 0
    assert len(load_profile(path).points) == 2
    profile(machine("h200"), [point({"fla triton": 1})]).save(path)
    assert main([*words, "--add"]) == 2
    assert "--add: " in (err := capsys.readouterr().err)
    assert "was measured elsewhere: the card was NVIDIA H200" in err


def test_tune_verifies_first_and_leaves_out_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The judge is another test's; here it is told that the torch chunk kernel is wrong on packed calls."""
    from kernelreg.cli import verify
    from kernelreg.verify.outcome import Outcome

    def run_backend(task: Any, limit: float, total: int, told: Any) -> list[Outcome]:
        chunk = task.operation == "gdn.chunk"
        words = {"operation": task.operation, "backend": task.backend, "device": task.device, "errors": {"o": 1e-3}}
        kernel = "chunk" if chunk else "recurrent"
        outcomes = [Outcome(case="dense", kernel=kernel, status="right", **words)]
        if chunk:
            outcomes.append(Outcome(case="varlen", kernel=kernel, status="wrong", features=("varlen",), **words))
        return outcomes

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(verify, "run_backend", run_backend)
    assert kernelreg.resolve("gdn", device="cpu", features={"varlen"}).backend == "torch"  # nothing is known yet
    path = tmp_path / "cpu.json"
    assert main(["tune", *QUICK, "--backend", "torch", "--output", str(path)]) == 0
    assert "gdn.chunk torch: 1 cases wrong here; not measured on calls like them" in capsys.readouterr().err
    made = load_profile(path)
    assert {each.kind for each in made.points if each.operation == "gdn.chunk"} == {
        "dense, forward, eager",
        "dense, backward, eager",
    }


def test_a_run_that_is_cut_short_keeps_what_it_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kernelreg import measure as measuring

    done: list[Spot] = []
    real = measuring.measure

    def once(spot: Spot, *rest: Any) -> Any:
        done.append(spot)
        if len(done) > 1:
            raise fault
        return real(spot, *rest)

    monkeypatch.setattr(measuring, "measure", once)
    words = ["tune", "gdn.recurrent", *QUICK, "--no-verify"]
    fault: BaseException = KernelregError("the device failed while fla triton was measured")
    assert main([*words, "--output", str(tmp_path / "one.json")]) == 1
    assert "cut short: the device failed while fla triton was measured" in capsys.readouterr().err
    assert len(load_profile(tmp_path / "one.json").points) == 1
    done.clear()
    fault = KeyboardInterrupt()
    assert main([*words, "--output", str(tmp_path / "two.json")]) == 130
    assert len(load_profile(tmp_path / "two.json").points) == 1


def test_what_there_is_no_time_for_is_said_and_the_rest_is_a_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kernelreg import measure as measuring
    from kernelreg.cli import _measuring

    clock = [0.0]
    real = measuring.measure

    def slow(*words: Any) -> Any:
        clock[0] += 10
        return real(*words)

    monkeypatch.setattr(_measuring, "time", types.SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(measuring, "measure", slow)
    path = tmp_path / "cpu.json"
    words = ["tune", "gdn.chunk", *QUICK[:4], "--tokens", "16,4,8,2", "--workload", "prefill,training", *QUICK[10:]]
    assert main([*words, "--no-verify", "--within", "25", "--output", str(path)]) == 0
    made = load_profile(path)
    assert [(each.kind, each.tokens) for each in made.points] == [
        ("dense, forward, eager", size) for size in (2, 4, 16)
    ]
    assert capsys.readouterr().err.splitlines() == [
        "kernelreg: no time for 1 points of prefill, 1 and 2 heads of 8",
        "kernelreg: no time for 4 points of training, 1 and 2 heads of 8",
    ]


def test_kernels_are_compiled_first_in_processes_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    real = asking.ask

    def ask(module: str, task: Any, *words: Any) -> Any:
        answer = real(module, task, *words)
        asked.append((task.backend, [each.workload.name for each in task.spots], answer[0].points))
        return answer

    monkeypatch.setattr(warming, "ask", ask)
    words = ["tune", "gdn", *QUICK, "--workload", "decode,prefill", "--backend", "torch", "--no-verify"]
    assert main([*words, "--warm", "2", "--output", str(tmp_path / "cpu.json")]) == 0
    assert sorted(asked) == [("torch", ["decode"], 1), ("torch", ["prefill", "prefill"], 2)]
    assert len(load_profile(tmp_path / "cpu.json").points) == 3


def test_compiling_ahead_leaves_time_to_measure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []

    def ask(module: str, task: Any, answer: Any, limit: float) -> Any:
        limits.append(limit)
        raise NoAnswerError("it takes longer than that")

    monkeypatch.setattr(warming, "ask", ask)
    words = ["tune", "gdn", *QUICK, "--workload", "prefill", "--backend", "torch", "--no-verify"]
    assert main([*words, "--warm", "1", "--within", "500", "--output", str(tmp_path / "cpu.json")]) == 0
    assert limits
    assert max(limits) < 400
    assert load_profile(tmp_path / "cpu.json").points


def test_compiling_ahead_is_bounded_and_costs_nothing_where_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = list(
        spots(WORKLOADS, [SMALL, Shape(2, 4)], dtype="bfloat16", tokens=[8], batches=[2], sequences=[1], captured=True)
    )
    tasks = warming.tasks_of(planned, ["one", "two"], "cpu")
    kinds = {
        (each.backend, each.spots[0].shape, each.spots[0].workload.operation, each.spots[0].workload.trains)
        for each in tasks
    }
    assert len(tasks) == len(kinds) == 2 * 2 * 3  # backends, shapes, and prefill, training and decode
    assert sorted(str(spot) for task in tasks if task.backend == "one" for spot in task.spots) == sorted(
        str(spot) for spot in planned if not spot.captured
    )
    limits: list[float] = []

    def fails(module: str, task: Any, answer: Any, limit: float) -> Any:
        limits.append(limit)
        raise NoAnswerError("it died")

    monkeypatch.setattr(warming, "ask", fails)
    told: list[str] = []
    warming.warm(tasks, 3, time.monotonic() + 50, told.append)
    assert sorted(told) == sorted(map(str, tasks))
    assert len(limits) == len(tasks)
    assert all(0 < each <= 50 for each in limits)
    warming.warm(tasks, 3, time.monotonic(), told.append)  # there is no time
    assert len(limits) == len(tasks)
    assert len(told) == 2 * len(tasks)


@pytest.mark.parametrize("command", ["tune", "bench"])
@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "give one of --model and --heads"),
        (["--heads", "2,3"], "HV is no multiple of H"),
        (["--heads", "2", "--backend", "flaa"], "did you mean 'fla'?"),
        (["--heads", "2", "--device", "cuda:5"], "--device cuda:5: not there; accepted: cpu"),
        (["--heads", "2", "--facts", "x.json"], "runs kernels on this machine"),
        (["gdn.recurrent", "--heads", "2", "--workload", "prefill"], "none is of gdn.recurrent"),
        (["--heads", "2", "--output", "/no-such-folder/x.json"], "--output /no-such-folder/x.json: cannot be written"),
        (["--heads", "2", "--repeats", "1,2"], "--repeats 1,2; accepted: one number"),
        (["--heads", "2", "--warm", "1,2"], "--warm 1,2; accepted: one number"),
    ],
)
def test_wrong_words_are_told_before_anything_runs(
    command: str, words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, *words]) == 2
    err = capsys.readouterr().err
    assert told in err
    assert len(err.splitlines()) == 1


def test_sizes_that_are_no_numbers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["tune", "--heads", "2", "--tokens", "4k"])
    assert caught.value.code == 2
    assert "4k; accepted: whole numbers above 0, such as 1,2,4" in capsys.readouterr().err


# -- what is made of it ------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A profile of three kernels, of which the torch one failed at the long call."""
    path = tmp_path / "h200.json"
    points = [
        point({"fla triton": 410, "flash_qla sm90": 300}, {"torch chunk": "no memory"}, tokens=8192),
        point({"fla triton": 41, "flash_qla sm90": 63.5, "torch chunk": 1900}, tokens=1024),
        point({"fla triton": 12, "flash_qla sm90": 13}, tokens=1024, features=("capture",)),
        point({"fla triton": 50}, tokens=1024, features=("varlen",), sequences=8),
        point({"fla triton": 9}, operation="gdn.recurrent", tokens=64, sequences=64),
    ]
    profile(machine("h200"), points).save(path)
    return path


def test_bench_prints_the_kernels_side_by_side(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--from", str(saved)]) == 0
    text = capsys.readouterr().out
    lines = [line.split() for line in text.splitlines()]
    assert text.startswith("NVIDIA H200, compute capability 9.0; torch 2.11.0+cu130, flash-linear-attention 0.6.0")
    assert ["1,024", "tokens", "41", "µs", "±", "1%", "*", "63.5", "µs", "±", "1%", "1,900", "µs", "±", "1%"] in lines
    assert ["8,192", "tokens", "410", "µs", "±", "1%", "300", "µs", "±", "1%", "*", "failed"] in lines
    assert "gdn.chunk: dense, forward, captured; 16 and 32 heads of 128, bfloat16" in text
    assert "gdn.chunk: varlen, forward, eager, 8 sequences;" in text


def test_bench_shows_what_is_asked_for_of_a_profile(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "gdn.chunk", "--from", str(saved), "--workload", "prefill", "--no-captured", "--tokens", "8192"]
    assert main([*words, "--json"]) == 0
    (only,) = json.loads(capsys.readouterr().out)["points"]
    assert only["tokens"] == 8192
    assert main([*words, "--heads", "2"]) == 2
    assert "none of its 5 points is asked for" in capsys.readouterr().err
    assert main([*words, "--output", "x.json"]) == 2


def test_bench_measures_and_saves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bench.json"
    assert main(["bench", "gdn.recurrent", *QUICK, "--workload", "decode", "--output", str(path)]) == 0
    assert "torch recurrent" in capsys.readouterr().out
    assert [each.tokens for each in load_profile(path).points] == [2]
    assert main(["bench", "gdn.recurrent", *QUICK, "--backend", "flash_qla"]) == 1


def test_without_matplotlib_plot_names_the_extra_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["bench", *QUICK, "--plot", str(tmp_path / "x.svg")]) == 2
    assert capsys.readouterr().err == (
        "kernelreg: --plot needs matplotlib, which is not installed; fix: pip install 'kernelreg[plot]'\n"
    )


def test_a_plot_has_a_panel_a_series_and_a_line_a_kernel_told_apart_without_colour(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    from kernelreg.plot import figure_of

    figure = figure_of(load_profile(saved))
    panels = [ax for ax in figure.axes if ax.get_visible()]
    assert len(panels) == 4
    assert {(ax.get_xscale(), ax.get_yscale()) for ax in panels} == {("log", "log")}
    containers: list[Any] = list(panels[0].containers)
    drawn = {}
    for container in containers:
        line = container.lines[0]
        drawn[container.get_label()] = (line.get_xdata().tolist(), line.get_ydata().tolist())
    assert drawn == {
        "fla triton": ([1024, 8192], [41, 410]),
        "flash_qla sm90": ([1024, 8192], [63.5, 300]),
        "torch chunk": ([1024], [1900]),
    }
    styles = [(each.lines[0].get_marker(), each.lines[0].get_linestyle()) for each in containers]
    assert len({marker for marker, _ in styles}) == 3
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts == ["fla triton", "flash_qla sm90", "torch chunk"]


def test_a_plot_is_the_same_file_each_time(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    files = [tmp_path / "one.svg", tmp_path / "two.svg"]
    for file in files:
        assert main(["bench", "--from", str(saved), "--plot", str(file)]) == 0
    assert files[0].read_text() == files[1].read_text()
    assert "<svg" in files[0].read_text()
    assert main(["bench", "--from", str(saved), "--plot", str(tmp_path / "x.gif")]) == 2
    assert "ends in .eps, .jpg, .pdf, .png, .svg" in capsys.readouterr().err
    assert main(["bench", "--from", str(saved), "--plot", "/no-such-folder/x.svg"]) == 2


def test_the_commands_start_without_torch() -> None:
    """Their help, their errors and a lock need none."""
    facts = Path(__file__).with_name("facts") / "h200.json"
    words = ["lock", "--model", "qwen3.5-9b", "--facts", str(facts)]
    code = "import sys; sys.modules['torch'] = None; from kernelreg.cli import main; raise SystemExit(main("
    code = f"{code}{words!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["models"] == ["qwen3.5-9b"]
