"""The command line, as a person and as a program use it: exit codes, text, JSON, and never a traceback."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernelreg import Facts
from kernelreg.cli import main
from tests.machines import FACTS, machine

Output = pytest.CaptureFixture[str]


def run(*words: str) -> int:
    try:
        return main(list(words))
    except SystemExit as stop:  # argparse's own
        return int(stop.code or 0)


def facts(name: str) -> tuple[str, str]:
    return "--facts", str(FACTS / f"{name}.json")


@pytest.mark.parametrize(("name", "backend"), [("h200", "flash_qla"), ("a100-ngc", "fla"), ("cpu-only", "torch")])
def test_resolve_explains_another_machines_decision(name: str, backend: str, capsys: Output) -> None:
    assert run("resolve", "gdn", *facts(name)) == 0
    assert f": {backend} " in capsys.readouterr().out.splitlines()[0]


def test_resolve_takes_the_whole_call(capsys: Output) -> None:
    words = [
        "--device",
        "cuda:0",
        "--dtype",
        "bfloat16",
        "--gate-dtype",
        "bfloat16",
        "--state-dtype",
        "float32",
    ]
    words += ["--head-dim-k", "128", "--head-dim-v", "128", "--heads", "16", "--value-heads", "32"]
    words += ["--tokens", "32768", "--sequences", "4", "--features", "varlen,final-state"]
    assert run("resolve", "gdn", *words, *facts("h200"), "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["schema"], data["operation"], data["device"], data["backend"]) == (
        1,
        "gdn.chunk",
        "cuda:0",
        "fla",
    )
    assert set(data["call"]["features"]) == {"varlen", "final-state", "grouped-value-heads"}
    qla = next(each for each in data["candidates"] if each["kernel"] == "sm90")
    assert [reason["subject"] for reason in qla["reasons"]] == ["gate_dtype"]


def test_resolve_without_a_kernel_explains_and_exits_1(capsys: Output) -> None:
    assert run("resolve", "gdn", "--device", "cuda:5", *facts("h200")) == 1
    assert "no-device: cuda:5" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["resolve", "gnd"], "did you mean 'gdn'?"),
        (["resolve", "gdn", "--dtype", "bf16"], "did you mean 'bfloat16'?"),
        (["resolve", "gdn", "--features", "varlne"], "did you mean 'varlen'?"),
        (["resolve", "gdn", "--device", "gpu"], "unknown device 'gpu'; accepted: cpu, cuda"),
        (["resolve", "gdn", "--device", "cuda:x"], "did you mean 'cuda'?"),
        (["resolve", "gdn", "--tokens", "-4"], "accepted: a whole number"),
        (["resolve", "gdn", "--tokens", "many"], "invalid int value"),
        (["resolve", "gdn", "--facts", "nowhere.json"], "nowhere.json: No such file"),
        (["doctor", "--require", "fla"], "accepted: OP=BACKEND"),
        (["doctor", "--require", "gdn=flashqla"], "did you mean 'flash_qla'?"),
        (["doctor", "--require", "gdn=mine"], "not those that a program gives to kernelreg.register()"),
        (["doctor", "--require", "gnd=fla"], "did you mean 'gdn'?"),
        (["doctr"], "invalid choice"),
        ([], "required"),
    ],
)
def test_wrong_usage_is_told_and_exits_2(words: list[str], told: str, capsys: Output) -> None:
    assert run(*words) == 2
    said = capsys.readouterr()
    assert told in said.err
    assert "Traceback" not in said.err + said.out


def test_facts_prints_a_file_that_loads_to_this_machines_facts(tmp_path: Path, capsys: Output) -> None:
    import kernelreg

    assert run("facts") == 0
    file = tmp_path / "here.json"
    file.write_text(capsys.readouterr().out)
    assert Facts.load(file) == kernelreg.facts()


@pytest.mark.parametrize("words", [("facts",), ("backends", "--json"), ("backends",), ("facts", *facts("h200"))])
def test_wrong_variables_are_said_where_they_change_nothing(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    code, plain = run(*words), capsys.readouterr()
    assert plain.err == ""
    for name, value in (("BACKEND", "flashqla"), ("STRICT", "maybe"), ("LOG", "loud"), ("BACKEN", "fla")):
        monkeypatch.setenv(f"KERNELREG_{name}", value)
    assert run(*words) == code
    said = capsys.readouterr()
    assert "did you mean 'flash_qla'" in said.err
    assert "KERNELREG_STRICT='maybe'; accepted: " in said.err
    assert "KERNELREG_LOG: unknown level 'LOUD'" in said.err
    assert "unknown environment variable 'KERNELREG_BACKEN'" in said.err
    assert all(line.startswith("kernelreg: warning: ") for line in said.err.splitlines())
    assert said.out == plain.out


def test_facts_reads_a_file_back(capsys: Output) -> None:
    assert run("facts", "--json", *facts("h200")) == 0
    assert json.loads(capsys.readouterr().out) == machine("h200").to_dict()


def test_the_doctor_tells_each_device_what_runs_and_what_to_paste(capsys: Output) -> None:
    assert run("doctor", *facts("mixed-h100-rtx5090")) == 0
    text = capsys.readouterr().out
    card, other = text.split("cuda:1")
    assert "gdn.chunk: fla (triton)" in card
    assert "gdn.chunk + backward: fla (triton)" in card
    assert "cannot run: flash_qla: known-bad" in card
    assert "gdn.chunk: flash_qla (sm90)" in other
    assert "could run: fla (tilelang-backward)" in other
    assert "All operations have a usable backend on every device." in text
    assert not any(line.endswith(" ") for line in text.splitlines())


@pytest.mark.parametrize(
    ("requirement", "code"),
    [("gdn=flash_qla", 0), ("gdn.recurrent=fla", 0), ("gdn.recurrent=torch", 1), ("gdn=fla", 1)],
)
def test_the_doctor_checks_requirements(requirement: str, code: int, capsys: Output) -> None:
    assert run("doctor", *facts("h200"), "--require", requirement) == code
    assert (f"--require {requirement.replace('gdn=', 'gdn.chunk=')}" in capsys.readouterr().out) is bool(code)


def test_the_doctors_json_holds_all_of_it(capsys: Output) -> None:
    assert run("doctor", *facts("a100-ngc"), "--require", "gdn=flash_qla", "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert "flash_qla" in report["unmet"][0]
    assert report["facts"] == machine("a100-ngc").to_dict()
    assert {each["operation"] for each in report["decisions"]} == {"gdn.chunk", "gdn.recurrent"}


@pytest.mark.parametrize(
    ("variable", "value", "code"),
    [
        ("KERNELREG_BACKEND", "fla", 0),
        ("KERNELREG_BACKEND", "flash_qla", 1),  # it has no decode kernel
        ("KERNELREG_BACKEND", "gdn.chunk=flash_qla,gdn.recurrent=fla", 0),
        ("KERNELREG_PREFER", "flash_qla", 0),
        ("KERNELREG_PREFER", "torch", 0),
        ("KERNELREG_DISABLE", "torch,fla", 1),
        ("KERNELREG_BACKEND", "flashqla", 1),
        ("KERNELREG_LOCK", "x.lock", 1),
    ],
)
def test_the_doctor_says_whether_overrides_are_met(
    variable: str, value: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    monkeypatch.setenv(variable, value)
    assert run("doctor", *facts("h200")) == code
    assert variable in capsys.readouterr().out


def test_the_doctor_without_torch_says_so_with_the_fix(tmp_path: Path, capsys: Output) -> None:
    file = tmp_path / "bare.json"
    machine("cpu-only", torch=None).save(file)
    assert run("doctor", "--facts", str(file)) == 1
    text = capsys.readouterr().out
    assert "torch-missing" in text
    assert "fix: pip install" in text


def test_the_doctor_goes_on_when_kernelreg_facts_names_no_file(monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    monkeypatch.setenv("KERNELREG_FACTS", "nowhere.json")
    assert run("doctor") == 1
    assert "nowhere.json: No such file" in capsys.readouterr().out


def test_backends_lists_rows_and_their_verdicts(capsys: Output) -> None:
    assert run("backends", *facts("h200"), "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in data["backends"]] == ["fla", "flash_qla", "flashinfer", "torch"]
    usable = {each["name"]: each["usable"] for each in data["backends"]}
    assert usable == {"fla": True, "flash_qla": True, "flashinfer": False, "torch": True}  # flashinfer is not installed
    assert run("backends", *facts("a100-ngc")) == 0
    assert "can run" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["doctor", "resolve gdn", "facts", "backends"])
def test_no_command_imports_torch_or_a_kernel_library(command: str) -> None:
    watch = (
        "import sys; from kernelreg.cli import main; code = main(sys.argv[1:]); "
        "bad = {'torch', 'triton', 'fla', 'flash_qla', 'flashinfer', 'tilelang'} & set(sys.modules); "
        "sys.exit(f'imported {bad}' if bad else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", watch, *command.split()],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_importing_kernelreg_imports_nothing_heavy() -> None:
    watch = (
        "import sys, kernelreg; print(*sorted({'torch', 'pynvml', 'rich', 'msgspec', 'packaging'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", watch], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == ""


def test_a_reader_that_leaves_early_gets_no_traceback() -> None:
    command = f"{sys.executable} -m kernelreg facts | true"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False, timeout=60)
    assert "Traceback" not in done.stderr


def test_the_doctor_works_with_no_path_no_home_and_a_plain_locale(tmp_path: Path) -> None:
    environment = {"LC_ALL": "C", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    done = subprocess.run(
        [sys.executable, "-m", "kernelreg", "doctor"],
        env=environment, cwd=tmp_path, capture_output=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == (0 if importlib.util.find_spec("torch") else 1), done.stderr
    assert done.stdout.startswith(b"kernelreg ")
    assert b"Traceback" not in done.stderr


COMMANDS = ["--help", "doctor", "doctor --json", "resolve gdn", "facts", "backends", "backends --schema"]
BUFFERED = {"PYTHONUNBUFFERED": ""}  # as Python does it unless told otherwise: the end of the output is written last


def process(command: str, redirected: str) -> subprocess.CompletedProcess[str]:
    """A command in a shell, with its standard streams redirected as a shell does it."""
    return subprocess.run(
        f"exec {sys.executable} -W ignore -m kernelreg {command} {redirected}",
        shell=True, capture_output=True, text=True, check=False, timeout=120, env={**os.environ, **BUFFERED},
    )  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_a_reader_that_has_left_ends_every_command_alike(command: str) -> None:
    read, write = os.pipe()
    os.close(read)
    for errors in (subprocess.PIPE, write):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "kernelreg", *command.split()],
            stdout=write, stderr=errors, check=False, timeout=120, env={**os.environ, **BUFFERED},
        )  # fmt: skip
        assert (done.returncode, done.stderr or b"") == (141, b"")
    os.close(write)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_closed_output_changes_no_answer(command: str) -> None:
    done = process(command, ">&-")
    assert "kernelreg: " not in done.stderr
    assert "Exception" not in done.stderr
    assert done.returncode == process(command, "> /dev/null").returncode


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("command", COMMANDS)
def test_an_output_that_cannot_be_written_is_told_in_one_line(command: str) -> None:
    done = process(command, "> /dev/full")
    assert (done.returncode, done.stderr) == (1, "kernelreg: [Errno 28] No space left on device\n")


@pytest.mark.parametrize("command", ["facts", "backends", "doctor"])
def test_a_fault_of_ours_is_one_line_and_the_log_says_where(command: str) -> None:
    code = (
        f"import sys; from kernelreg.cli import {command}, main; "
        f"{command}.run = lambda words: {{}}['nothing']; sys.exit(main(['{command}']))"
    )
    for level, lines in (("WARNING", 1), ("DEBUG", None)):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            capture_output=True, text=True, check=False, timeout=120, env={**os.environ, "KERNELREG_LOG": level},
        )  # fmt: skip
        assert done.returncode == 1
        assert "kernelreg: unexpected KeyError: 'nothing'" in done.stderr
        assert ("Traceback" not in done.stderr) is (len(done.stderr.splitlines()) == lines)


@pytest.mark.parametrize("words", [("doctor", "--ranks"), ("doctor", "--deep"), ("verify",)])
@pytest.mark.parametrize("limit", ["-1", "0", "soon", "nan", "inf"])
def test_a_limit_is_a_number_of_seconds(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], limit: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*words, f"--limit={limit}"])
    assert f"{limit}; accepted: seconds" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["resolve", "nope"], ["facts", "--facts", "/nonexistent"], ["doctor", "--ranks"]])
def test_where_standard_error_is_closed_standard_output_does_not_take_its_place(words: list[str]) -> None:
    code = (
        "import os, sys; os.close(2); sys.stderr = None\nfrom kernelreg.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], stdout=subprocess.PIPE, check=False)
    assert (done.returncode, done.stdout) == (2, b"")
