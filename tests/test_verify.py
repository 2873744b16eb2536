"""The judge against backends that are wrong in every way, and ``kernelreg verify`` as a user runs it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

import kernelreg
from kernelreg.call import make_call
from kernelreg.cli import main
from kernelreg.findings import quarantine_reasons
from kernelreg.ops import operation_named
from kernelreg.verify.cases import Case, cases
from kernelreg.verify.judge import judge
from kernelreg.verify.outcome import Outcome
from kernelreg.verify.records import Record
from tests.distributions import install
from tests.machines import descriptor, machine

#: A backend whose function is the torch backend's, and then whatever FAULT does to it.
ADAPTER = """
import ctypes, os, signal, subprocess, sys, time
import torch
from kernelreg_backends.torch.adapter import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

def run(q, k, v, g, beta, **options):
    edges = options.get("cu_seqlens")
    kinds = ["dense"] if edges is None else ["varlen", str(edges.dtype)]
    kinds += ["pool"] if "state_indices" in options else []
    faults = [each.partition("@") for each in os.environ.get("FAULT", "").split(",")]
    bad = {name for name, _, where in faults if where in ("", *kinds)}
    if "abort" in bad: os.abort()
    if "hang" in bad: time.sleep(600)
    if "exit" in bad: sys.exit(3)
    if "vanish" in bad: os._exit(0)
    if "seize" in bad: seize()
    if "leave" in bad: os.fork() or time.sleep(600); os._exit(4)
    if "raises" in bad: raise RuntimeError("the library's own words")
    if "prints" in bad: print("noise " * 20000); os.write(1, b"noise")
    function = fused_recurrent_gated_delta_rule if "state_indices" in options else chunk_gated_delta_rule
    o, final = function(q, k, v, g, beta, **options)
    if "wrong" in bad: o = o * 1.05
    if "long" in bad and q.shape[1] > 64: o = o * 1.05
    if "nan" in bad: o = o.clone(); o.view(-1)[:1] = float("nan")
    if "writes" in bad: v.zero_()
    if "overruns" in bad: q.as_strided((q.numel() + 8,), (1,), q.storage_offset())[-8:] = 1.0
    if "shape" in bad: o = o[:, :-1]
    if "dtype" in bad: o = o.float()
    if "keeps-state" in bad: final = None
    if "tail" in bad: o = torch.where(o == 0, 1e-30, o)
    if "varies" in bad: o = o + 1e-3 * torch.rand(())
    if "slot" in bad and "state_indices" in options: options["initial_state"][11] += 1
    return o, final

def seize():
    "Hang with the interpreter's lock held and a compiler running, both of which hold a pipe open."
    held = os.open(os.environ["HELD"], os.O_WRONLY)
    subprocess.Popen(["sleep", "600"], pass_fds=[held])
    os.write(held, b"x")
    ctypes.PyDLL(None).sleep(600)
"""
FEATURES = sorted(operation_named("gdn").features - {"capture", "capture-varlen", "deterministic"})


DESCRIPTOR = f"""
schema = 1
name = "acme"
adapter = "acme_adapter"
accepts = {{ features = {json.dumps(FEATURES)} }}

[[kernel]]
operation = "gdn.chunk"
name = "only"
function = "run"

[[kernel]]
operation = "gdn.recurrent"
name = "decode"
function = "run"
"""


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Registers ``acme`` and gives the function that makes it faulty."""
    (tmp_path / "acme_adapter.py").write_text(ADAPTER)
    (tmp_path / "backend.toml").write_text(DESCRIPTOR)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("acme_adapter", None)
    undo = kernelreg.register(tmp_path / "backend.toml")
    yield lambda fault: monkeypatch.setenv("FAULT", fault)
    undo()
    sys.modules.pop("acme_adapter", None)


def case(name: str, operation: str = "gdn.chunk") -> Case:
    return next(each for each in cases(operation, "small") if each.name == name)


def test_a_right_backend_is_right_or_refuses_with_a_reason(backend: Any) -> None:
    outcomes = [judge(each, "acme", "cpu") for name in ("gdn.chunk", "gdn.recurrent") for each in cases(name, "small")]
    assert {each.status for each in outcomes} == {"right", "refused", "not here"}
    refused = {each.case: each.reason for each in outcomes if each.status == "refused"}
    assert refused == {
        "deterministic": "feature: deterministic: not supported",
        "gradients, deterministic": "feature: deterministic: not supported",
    }


@pytest.mark.parametrize(
    ("fault", "name", "told"),
    [
        ("wrong", "dense", "o is 5.0e-02 off, allowed 9.8e-03"),
        ("nan", "dense", "o has NaN"),
        ("raises", "dense", "unexplained RuntimeError: the library's own words"),
        ("writes", "dense", "wrote into or around v"),
        ("overruns", "dense", "wrote into or around q"),
        ("shape", "dense", r"the output is torch.bfloat16 \[2, 89, 4, 32\]"),
        ("dtype", "dense", "the output is torch.float32"),
        ("keeps-state", "dense", "a final state was not given"),
        ("tail", "tokens behind the last sequence", "tokens behind the last sequence are not zero"),
        ("wrong", "gradients", "o is 5.0e-02 off"),
    ],
)
def test_each_fault_is_seen(backend: Any, fault: str, name: str, told: str) -> None:
    backend(fault)
    outcome = judge(case(name), "acme", "cpu")
    assert outcome.status == "wrong"
    assert outcome.reason is not None
    assert re.search(told, outcome.reason), outcome.reason


def test_a_write_to_a_slot_of_no_sequence_is_seen(backend: Any) -> None:
    backend("slot")
    outcome = judge(case("pool, float32, with padding", "gdn.recurrent"), "acme", "cpu")
    assert (outcome.status, outcome.reason) == ("wrong", "wrote into or around initial_state")


def test_two_results_that_differ_are_seen(backend: Any) -> None:
    backend("varies")
    accepts = {"features": [*FEATURES, "deterministic"]}
    undo = kernelreg.register(descriptor("dice", adapter="acme_adapter", kernel={"accepts": accepts}))
    outcome = judge(case("deterministic"), "dice", "cpu")
    undo()
    assert (outcome.status, outcome.reason) == ("wrong", "two calls on the same data differ")


def test_draws_are_the_same_for_a_seed_and_cover_the_contract() -> None:
    for operation in ("gdn.chunk", "gdn.recurrent"):
        drawn = cases(operation, "small", draws=200)[-200:]
        assert drawn == cases(operation, "small", draws=200)[-200:]
        assert drawn != cases(operation, "small", draws=200, seed=7)[-200:]
        for field in ("packed", "behind", "int32", "state", "final", "sliced", "raw", "strong", "state_v_first"):
            assert len({getattr(each, field) for each in drawn}) > 1, field
        assert any(0 in each.lengths for each in drawn)
    assert {len(each.accepted) > 0 for each in drawn} == {True, False}


def outcome(status: Literal["right", "wrong"], device: str) -> Outcome:
    return Outcome(
        operation="gdn.chunk",
        backend="fla",
        kernel="triton",
        case="dense",
        status=status,
        device=device,
        errors={"o": 1e-3} if status == "right" else {},
    )


@pytest.mark.parametrize(
    ("outcomes", "kept_from"),
    [
        ([("wrong", "cuda:1")], {"cuda:1", "cuda:2"}),  # two H100
        ([("wrong", "cuda:0")], {"cuda:0"}),  # the only RTX 5090
        ([("wrong", "cuda:1"), ("right", "cpu")], {"cuda:1", "cuda:2"}),
        ([("wrong", "cuda:1"), ("right", "cuda:2")], {"cuda:1"}),
        ([("wrong", "cuda:1"), ("right", "cuda:0")], {"cuda:1", "cuda:2"}),
        ([("wrong", "cuda:1"), ("right", "cuda:1")], set()),
    ],
)
def test_a_card_is_judged_by_what_it_and_its_like_did(
    outcomes: list[tuple[Literal["right", "wrong"], str]], kept_from: set[str]
) -> None:
    facts = machine("mixed-h100-rtx5090")
    second = msgspec.structs.replace(facts.devices[1], index=2, uuid=None, pci_bus_id=None)
    facts = msgspec.structs.replace(facts, devices=(*facts.devices, second))
    record = Record(date="2026-12-02", fingerprint=facts.fingerprint)
    for each in outcomes:
        record = record.with_run((outcome(*each),), "2026-12-02")
    calls = [make_call("gdn.chunk", name) for name in ("cuda:0", "cuda:1", "cuda:2", "cpu")]
    findings = record.findings(facts)
    assert {each.device for each in calls if quarantine_reasons(findings, "fla", "triton", each)} == kept_from


# -- the command -------------------------------------------------------------------------------------------------------


ROOT = Path(kernelreg.__file__).parents[1]


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    """A user's environment with no override and a state folder of its own."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("KERNELREG_", "PYTHONPATH"))}
    return plain | {"XDG_STATE_HOME": str(tmp_path / "state"), **more}


@pytest.fixture
def verify(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the command line on a machine with the backend ``acme`` installed."""
    site = tmp_path / "site"
    install(
        site,
        "acme",
        entry_points={"acme": "acme_gdn"},
        files={"acme_gdn/__init__.py": "", "acme_gdn/backend.toml": DESCRIPTOR, "acme_adapter.py": ADAPTER},
    )

    def run(
        *words: str, fault: str = "", state: str = "state", more: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        told = {"PYTHONPATH": str(site), "XDG_STATE_HOME": str(tmp_path / state), "FAULT": fault, **(more or {})}
        return subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "kernelreg", *words],
            env=environment(tmp_path, **told),
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )

    return run


def test_a_right_machine_is_ok(verify: Any) -> None:
    done = verify("verify", "--backend", "acme", "--json", fault="prints")
    report = json.loads(done.stdout)
    assert (done.returncode, report["ok"]) == (0, True), done.stderr
    assert {each["status"] for each in report["outcomes"]} == {"right", "refused", "not here"}
    assert {each["backend"] for each in report["outcomes"]} == {"acme"}
    assert verify("resolve", "gdn", "--json").stdout.count("quarantined") == 0


def test_a_wrong_kernel_is_not_chosen_again_for_such_calls(verify: Any) -> None:
    done = verify("verify", "gdn", "--backend", "acme", fault="wrong@varlen")
    assert done.returncode == 1
    assert "gdn.chunk acme only, varlen: o is 5.0e-02 off, allowed 9.8e-03" in " ".join(done.stdout.split())
    words = ("resolve", "gdn", "--json")
    used = "varlen"
    rows = json.loads(verify(*words, "--features", used).stdout)["candidates"]
    (row,) = (each for each in rows if each["backend"] == "acme")
    assert row["reasons"][0]["code"] == "quarantined"
    assert "'varlen'" in row["reasons"][0]["actual"]
    assert len([each for each in row["reasons"] if each["code"] == "quarantined"]) == 1
    told = " ".join(verify("doctor").stdout.split())
    assert "quarantine: acme only is kept from gdn.chunk calls with varlen on cpu: kernelreg verify" in told
    assert row["reasons"][0]["fix"] == "python -m kernelreg verify gdn.chunk --backend acme --device cpu"
    assert "quarantined" not in verify(*words, "--features", "initial-state").stdout  # dense calls were right
    assert verify("verify", "--forget").stdout == "forgotten\n"
    assert "quarantined" not in verify(*words, "--features", used).stdout


def test_a_fault_that_no_feature_explains_keeps_the_kernel_from_every_call(verify: Any) -> None:
    """Wrong where sequences are long, right where they are short, with the same features."""
    assert verify("verify", "gdn", "--backend", "acme", fault="long").returncode == 1
    rows = json.loads(verify("resolve", "gdn", "--json").stdout)["candidates"]
    (row,) = (each for each in rows if each["backend"] == "acme")
    assert [each["code"] for each in row["reasons"]] == ["quarantined"]
    assert "acme only is kept from all gdn.chunk calls on cpu" in " ".join(verify("doctor").stdout.split())


def test_a_backend_that_computed_nothing_is_not_ok(verify: Any, tmp_path: Path) -> None:
    descriptor = tmp_path / "site" / "acme_gdn" / "backend.toml"
    descriptor.write_text(DESCRIPTOR.replace("accepts = {", "accepts = { head_dim_k = [7],", 1))
    done = verify("verify", "--backend", "acme")
    assert done.returncode == 1
    assert "no case computed anything on acme (gdn.chunk)" in done.stdout
    assert "not ok: 0 wrong, 2 not tried" in done.stdout


def test_a_run_that_judged_nothing_clears_nothing(verify: Any) -> None:
    verify("verify", "gdn", "--backend", "acme", fault="wrong")
    assert "quarantined" in verify("resolve", "gdn", "--json").stdout
    verify("verify", "gdn", "--backend", "acme", "--limit", "0.3")  # ends before the first case
    assert "quarantined" in verify("resolve", "gdn", "--json").stdout
    verify("verify", "gdn", "--backend", "acme")  # judged again, and right
    assert "quarantined" not in verify("resolve", "gdn", "--json").stdout


def test_what_others_print_before_the_child_starts_is_no_message(verify: Any, tmp_path: Path) -> None:
    (tmp_path / "site" / "sitecustomize.py").write_text("print('hello')")
    done = verify("verify", "gdn", "--backend", "acme")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["x" * 400, "file"])
def test_a_state_folder_that_cannot_be_searched_costs_no_decision(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / name))
    kernelreg.refresh()
    assert kernelreg.resolve("gdn").backend == "torch"
    if name != "file":
        assert "results of kernelreg verify are left out" in caplog.text


def test_another_version_of_the_plugin_is_another_machine(verify: Any, tmp_path: Path) -> None:
    verify("verify", "gdn", "--backend", "acme", fault="wrong")
    assert "quarantined" in verify("resolve", "gdn", "--json").stdout
    (metadata,) = (tmp_path / "site").glob("*.dist-info/METADATA")
    metadata.write_text(metadata.read_text().replace("Version: 1.0", "Version: 1.1"))
    assert "quarantined" not in verify("resolve", "gdn", "--json").stdout


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("abort@torch.int32", "the process died of SIGABRT"),
        ("exit@torch.int32", "unexplained SystemExit: 3"),
        ("vanish@torch.int32", "exit code 0"),
        ("leave@torch.int32", "exit code 4"),
    ],
)
def test_a_crash_costs_its_cases_alone(verify: Any, fault: str, told: str) -> None:
    report = json.loads(verify("verify", "gdn", "--backend", "acme", "--json", fault=fault).stdout)
    wrong = {each["case"]: each["reason"] for each in report["outcomes"] if each["status"] == "wrong"}
    assert wrong
    assert all(told in reason for reason in wrong.values()), wrong
    assert "varlen, int32" in wrong
    right = [each["case"] for each in report["outcomes"] if each["status"] == "right"]
    assert {"dense", "scale = 0.0", "gradients"} <= set(right)  # cases after the first crash, too


def test_a_hang_is_ended_and_named(verify: Any) -> None:
    done = verify("verify", "gdn", "--backend", "acme", "--limit", "20", "--json", fault="hang@varlen")
    last = json.loads(done.stdout)["outcomes"][-1]
    assert (last["case"], last["status"], last["reason"]) == ("varlen", "wrong", "not done after 20 s")


def test_an_asked_for_backend_that_cannot_run_is_not_ok(verify: Any) -> None:
    done = verify("verify", "gdn", "--backend", "flash_qla")
    assert done.returncode == 1
    assert "gdn.chunk flash_qla cannot run here: " in done.stdout
    assert "not ok: nothing could run" in done.stdout


def test_a_registered_backend_is_left_out_with_the_reason(backend: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Its name is no child process's, and that is no fault of its kernels."""
    assert main(["verify", "gdn", "--backend", "acme", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    (left,) = report["left_out"]
    assert "it was given to kernelreg.register()" in left["reasons"][0]
    assert report["outcomes"] == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("gdnn",), "did you mean 'gdn'"),
        (("--backend", "acm"), "did you mean 'acme'"),
        (("--backend", "mine"), "not those that a program gives to kernelreg.register()"),
        (("--facts", "x.json"), "verify runs kernels on this machine"),
        (("--limit", "soon"), "--limit"),
        (("--device", "meta"), "no data to judge"),
    ],
)
def test_wrong_words_are_usage_errors(verify: Any, words: tuple[str, ...], told: str) -> None:
    done = verify("verify", *words)
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_a_broken_record_is_said_and_costs_nothing(verify: Any, tmp_path: Path) -> None:
    verify("verify", "gdn.chunk", "--backend", "torch")
    (record,) = (tmp_path / "state" / "kernelreg" / "verified").iterdir()
    record.write_text("{")
    done = verify("resolve", "gdn")
    assert done.returncode == 0
    assert "results of kernelreg verify are left out" in done.stderr
    assert "Traceback" not in done.stderr
    assert verify("verify", "gdn.chunk", "--backend", "torch").returncode == 0  # and the next run replaces it
    assert verify("resolve", "gdn").stderr == ""


def test_results_that_cannot_be_kept_are_still_shown(verify: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = verify("verify", "gdn.chunk", "--backend", "torch", state="file")
    assert done.returncode == 0
    assert "the results are not kept" in done.stderr


# -- the child process -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["a script", "-c"])
def test_the_child_imports_what_the_command_can_and_nothing_else(verify: Any, tmp_path: Path, start: str) -> None:
    """A script looks in its own folder and where it says, and not in the current one; ``-c`` looks there, too."""
    site = tmp_path / "site"
    run = "import sys; from kernelreg.cli import main; sys.exit(main())"
    script = tmp_path / "bin" / "start.py"
    script.parent.mkdir()
    script.write_text(f"import sys; sys.path[1:1] = [{str(ROOT)!r}, {str(site)!r}]; {run}")
    here = tmp_path / "here"
    here.mkdir()
    for name in ("acme_adapter", "importlib", "json", "linecache", "msgspec", "torch"):
        (here / f"{name}.py").write_text("raise SystemExit('this is no library')")
    done = subprocess.run(
        [sys.executable, *([script] if start == "a script" else ["-c", run]), "verify", "gdn", "--backend", "acme"],
        cwd=here if start == "a script" else site,
        env=environment(tmp_path, **({} if start == "a script" else {"PYTHONPATH": str(ROOT)})),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGHUP, -signal.SIGHUP), (signal.SIGINT, 130), (signal.SIGKILL, -9)],
)
def test_nothing_of_a_child_outlives_the_command_but_what_was_found(
    verify: Any, tmp_path: Path, number: int, code: int
) -> None:
    """The second operation hangs for good; the first was done, and wrong."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    held = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)

    def wait(wanted: bytes) -> None:
        """Until the pipe says this: ``x`` from a process that holds it, nothing once no process does."""
        end = time.monotonic() + 120
        while time.monotonic() < end:
            with contextlib.suppress(BlockingIOError):  # held, and silent
                if os.read(held, 1) == wanted:
                    return
            time.sleep(0.02)
        raise TimeoutError(wanted)

    command = subprocess.Popen(
        [sys.executable, "-m", "kernelreg", "verify", "--backend", "acme"],
        env=environment(tmp_path, PYTHONPATH=str(tmp_path / "site"), FAULT="wrong@dense,seize@pool", HELD=str(pipe)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        preexec_fn=partial(signal.signal, signal.SIGHUP, signal.SIG_DFL),  # nohup ignores it
    )
    try:
        wait(b"x")
        command.send_signal(number)
        _, told = command.communicate(timeout=60)
        assert (command.returncode, told) == (code, b"")
        wait(b"")
    finally:
        command.kill()
        os.close(held)
    assert "quarantined" in verify("resolve", "gdn.chunk", "--json").stdout
    assert "quarantined" not in verify("resolve", "gdn.recurrent", "--json").stdout


# -- the environment ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("KERNELREG_FACTS", "here.json", "unset KERNELREG_FACTS"),
        ("KERNELREG_BACKEND", "acm", "KERNELREG_BACKEND='acm': unknown backend 'acm'"),
        ("KERNELREG_DISABLE", "acm", "did you mean 'acme'"),
        ("KERNELREG_STRICT", "perhaps", "KERNELREG_STRICT='perhaps'; accepted: "),
        ("KERNELREG_LOCK", "x.lock", "KERNELREG_LOCK"),
    ],
)
def test_a_wrong_variable_is_usage_and_no_kernels_fault(verify: Any, variable: str, value: str, told: str) -> None:
    done = verify("verify", "gdn", "--backend", "acme", more={variable: value})
    assert (done.returncode, done.stdout) == (2, "")
    assert told in done.stderr
    assert "acme only is kept" not in verify("doctor").stdout


def test_what_is_disabled_is_left_out_with_the_reason(verify: Any) -> None:
    done = verify("verify", "gdn", "--backend", "acme", more={"KERNELREG_DISABLE": "acme"})
    assert done.returncode == 1
    assert "gdn.chunk acme cannot run here: disabled: KERNELREG_DISABLE" in done.stdout
    assert "not ok: nothing could run" in done.stdout


def test_overrides_that_choose_change_nothing_of_what_is_judged(verify: Any) -> None:
    more = {"KERNELREG_BACKEND": "torch", "KERNELREG_PREFER": "torch", "KERNELREG_STRICT": "1"}
    report = json.loads(verify("verify", "gdn", "--backend", "acme", "--json", fault="wrong", more=more).stdout)
    assert {each["backend"] for each in report["outcomes"]} == {"acme"}
    wrong = {each["kernel"] for each in report["outcomes"] if each["status"] == "wrong"}
    assert wrong == {"only"}


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_results_are_kept_when_the_reader_has_left(verify: Any, tmp_path: Path, words: tuple[str, ...]) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "kernelreg", "verify", "gdn", "--backend", "acme", *words],
        env=environment(tmp_path, PYTHONPATH=str(tmp_path / "site"), FAULT="wrong"),
        stdout=write,
        stderr=write,
        check=False,
        timeout=300,
    )
    os.close(write)
    assert done.returncode == 141
    assert "quarantined" in verify("resolve", "gdn", "--json").stdout


def test_forgetting_as_data(verify: Any) -> None:
    verify("verify", "gdn", "--backend", "acme")
    told = [json.loads(verify("verify", "--forget", "--json").stdout) for _ in range(2)]
    assert [each["forgotten"] for each in told] == [True, False]
