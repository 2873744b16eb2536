"""Ranks agree as real processes: some on other machines, some that die, hang, or never call."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch.distributed")

import torch.distributed as dist

import kernelreg
from kernelreg import ConfigurationError, RanksError, cli
from tests.gloo_ranks import (
    Absent,
    Answer,
    Interrupted,
    Loading,
    OnMachines,
    forced_differently,
    in_groups,
    nothing_in_common,
    pair,
    run_job,
    stores,
    wrong_setting,
)
from tests.machines import FACTS, machine

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed")


def values(answers: dict[int, Answer], size: int) -> list[Any]:
    """What every rank gave; none may be missing or have failed."""
    assert sorted(answers) == list(range(size))
    assert not [each for each in answers.values() if each.error]
    return [answers[rank].value for rank in range(size)]


def test_eight_equal_ranks_decide_as_one_alone() -> None:
    alone = kernelreg.resolve("gdn", facts=machine("h200"))
    for value in values(run_job(8, OnMachines("h200")), 8):
        assert value["chosen"] == (alone.backend, alone.kernel) == ("flash_qla", "sm90")
        assert value["data"]["candidates"] == alone.to_dict()["candidates"]
        assert value["data"]["differences"] == []
        assert [each["rank"] for each in value["data"]["ranks"]] == list(range(8))


def test_one_of_eight_without_flash_qla(tmp_path: Path) -> None:
    path = tmp_path / "without.json"
    machine("h200", packages={"flash-qla": None}).save(path)
    found = values(run_job(8, OnMachines("h200", {5: os.fspath(path)})), 8)
    assert {value["chosen"] for value in found} == {("fla", "triton")}
    (text,) = {value["explanation"] for value in found}
    assert "rank 5: needs flash-qla >=0.1.1, there is none" in text
    assert "packages.flash-qla: 0.1.3 on ranks 0-4, 6-7; none on rank 5" in text
    own = found[0]["data"]["ranks"][5]
    assert (own["backend"], own["kernel"]) == ("fla", "triton")


def test_one_of_eight_on_another_capability() -> None:
    found = values(run_job(8, OnMachines("h200", {0: "a100-ngc"})), 8)
    assert {value["chosen"] for value in found} == {("fla", "triton")}
    for value in found:
        assert "compute-capability: rank 0: needs compute capability ==9.0, here 8.0" in value["explanation"]
    assert found[0]["data"]["facts"] != found[1]["data"]["facts"]


@pytest.mark.parametrize("absent", [0, 6])
def test_a_rank_that_is_killed_midway_is_named_by_all_others(absent: int) -> None:
    answers = run_job(8, Absent(absent, "killed"))
    assert sorted(answers) == [rank for rank in range(8) if rank != absent]
    for answer in answers.values():
        assert answer.value.error == "RanksTimeoutError"
        assert answer.value.ranks == (absent,)
        assert f"rank {absent} of ranks 0-7 did not answer" in answer.value.text


def test_a_rank_that_is_killed_after_its_message_leaves_the_others_of_one_mind() -> None:
    answers = run_job(4, Absent(2, "killed late"))
    assert [answers[rank].value.value["chosen"] for rank in (0, 1, 3)] == [("torch", "chunk")] * 3
    answers = run_job(4, Absent(0, "killed late"))
    assert [(answers[rank].value.error, answers[rank].value.ranks) for rank in (1, 2, 3)] == [
        ("RanksTimeoutError", (0,))
    ] * 3


def test_who_comes_too_late_is_told_what_the_others_were_and_the_next_try_is_everyones() -> None:
    answers = run_job(3, Absent(1, "away"))
    assert sorted(answers) == [0, 1, 2]
    for answer in answers.values():
        first, second = answer.value
        assert (first.error, first.ranks) == ("RanksTimeoutError", (1,))
        assert second["chosen"] == ("torch", "chunk")


@pytest.mark.parametrize(
    ("how", "errors"),
    # A loaded machine may reach the limit before it sees that a connection is gone.
    [("killed", {"RanksError", "RanksTimeoutError"}), ("stopped", {"RanksTimeoutError"})],
)
def test_the_rank_that_keeps_the_store_may_be_lost_too(how: str, errors: set[str]) -> None:
    answers = run_job(3, Absent(0, how), keeper=0, stops=True)
    assert sorted(answers) == [1, 2]
    assert {answer.value.error for answer in answers.values()} <= errors
    for answer in answers.values():
        assert "store" in answer.value.text


def test_a_rank_with_a_wrong_setting_raises_its_own_error_and_the_others_hear_of_it() -> None:
    answers = run_job(3, wrong_setting)
    assert answers[1].error == "ConfigurationError"
    for rank in (0, 2):
        assert (answers[rank].error, answers[rank].ranks) == ("RanksError", (1,))
        assert "rank 1 could not take part: ConfigurationError: KERNELREG_BACKEND" in answers[rank].text


def test_a_force_on_one_rank_alone_is_an_error_on_all() -> None:
    for answer in run_job(4, forced_differently).values():
        assert (answer.error, answer.ranks) == ("RanksError", (2,))
        assert "ranks 0-1, 3: nothing is forced; rank 2: KERNELREG_BACKEND forces torch" in answer.text


def test_where_nothing_runs_on_all_each_rank_says_why() -> None:
    answers = run_job(2, nothing_in_common)
    assert {answer.error for answer in answers.values()} == {"NoBackendError"}
    for answer in answers.values():
        assert "disabled: rank 1: KERNELREG_DISABLE: disables torch" in answer.text
        assert "disabled: rank 0: KERNELREG_DISABLE: disables flash_qla" in answer.text


def test_a_group_agrees_by_itself() -> None:
    found = values(run_job(4, in_groups), 4)
    for rank, (own, everyone) in enumerate(found):
        assert everyone["chosen"] == ("flash_qla", "sm90")
        if rank in (1, 3):
            assert own.value["chosen"] == ("fla", "triton")
            assert "rank 3: needs compute capability ==9.0, here 8.0" in own.value["explanation"]
            assert [each["rank"] for each in own.value["data"]["ranks"]] == [1, 3]
        else:
            assert own.error == "RanksError"
            assert "not in the group" in own.text


def test_prefill_and_decode_are_agreed_on_together_for_one_form_of_the_state() -> None:
    for (chosen, dtype, layout, text), other in values(run_job(2, pair), 2):
        assert chosen == {"gdn.chunk": ("fla", "triton", 2), "gdn.recurrent": ("fla", "triton", 2)}
        assert (dtype, layout) == ("float32", "k-first")
        assert "rank 0: flash_qla sm90" in text
        assert other.error == "RanksError"
        assert "rank 0: bfloat16 k-first; rank 1: float32 k-first" in other.text


def test_an_adapter_that_does_not_import_on_one_rank_is_given_up_by_all(tmp_path: Path) -> None:
    text = "import os\nif os.environ['SOME_RANK'] == '1': raise OSError('no such library')\ndef run(): ...\n"
    (tmp_path / "frail_adapter.py").write_text(text, encoding="utf-8")
    for rank, (late, loaded, early, module, told) in enumerate(values(run_job(3, Loading(os.fspath(tmp_path))), 3)):
        assert late == "frail"  # nobody has imported it yet
        if rank == 1:
            assert loaded.error == "AdapterError"
            assert "no other takes its place on this rank alone" in loaded.text
        else:
            assert loaded.value == "frail_adapter"
        assert (early, module) == ("torch", "kernelreg_backends.torch.adapter")
        assert "import-error: rank 1: frail_adapter: OSError: no such library" in told


@pytest.fixture
def single(tmp_path: Path) -> Any:
    """A process group of this process alone, which meets in a file."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_one_rank_alone_gets_what_resolve_gives(single: Any) -> None:
    heard: list[Any] = []
    undo = kernelreg.on_resolve(heard.append)
    agreed = kernelreg.agree("gdn", single, facts=machine("h200"), dtype="bfloat16")
    undo()
    alone = kernelreg.resolve("gdn", facts=machine("h200"), dtype="bfloat16")
    assert agreed.candidates == alone.candidates
    assert heard == [agreed]
    assert repr(agreed) == "<Agreement gdn.chunk on rank 0: flash_qla sm90>"
    here = kernelreg.agree("gdn", load=True)
    assert here.function is kernelreg.resolve("gdn").function


@pytest.mark.parametrize(
    ("arguments", "words", "kind", "told"),
    [
        (("gdn", 3), {}, RanksError, "group=3; accepted: a torch.distributed process group"),
        (("gdn",), {"timeout": 0}, ConfigurationError, "timeout=0; accepted: seconds, more than 0"),
        (("gdn",), {"timeout": float("nan")}, ConfigurationError, "accepted: seconds"),
        (("gdn",), {"timeout": "60"}, ConfigurationError, "timeout='60'"),
        (("gnd",), {}, ConfigurationError, "did you mean 'gdn'?"),
        (("gdn",), {"hed_dim_k": 128}, ConfigurationError, "did you mean 'head_dim_k'?"),
        ((7,), {}, ConfigurationError, "accepted: an operation's name, or what resolve()"),
    ],
)
def test_wrong_usage_is_told(
    single: Any, arguments: tuple[Any, ...], words: dict[str, Any], kind: type[Exception], told: str
) -> None:
    with pytest.raises(kind) as caught:
        kernelreg.agree(*arguments, **words)
    assert told in str(caught.value)


def test_a_resolution_says_all_of_the_call(single: Any) -> None:
    alone = kernelreg.resolve("gdn", facts=machine("h200"))
    with pytest.raises(ConfigurationError, match="dtype: a resolution says all"):
        kernelreg.agree(alone, dtype="bfloat16")
    with pytest.raises(ConfigurationError, match="read from data"):
        kernelreg.agree(kernelreg.Resolution.from_json(alone.to_json()))


def test_an_interrupt_in_the_middle_is_told_at_once_and_the_next_call_meets() -> None:
    first, second = values(run_job(2, Interrupted("_loads")), 2)
    assert first == ("RanksError", "rank 1 could not take part: KeyboardInterrupt", [Answer(value="torch")])
    assert second == ("KeyboardInterrupt", "", [Answer(value="torch")])


def test_another_part_of_a_call_is_not_taken_for_an_answer() -> None:
    first, second = values(run_job(2, Interrupted("messages")), 2)
    told = "rank 1 did not send whether the kernel loads, but another part of agree()"
    assert first == ("RanksError", told, [Answer(value="torch")])
    interrupted, _, (error, again) = second
    assert (interrupted, error.error, again) == ("KeyboardInterrupt", "RanksError", Answer(value="torch"))
    assert error.text == "rank 0 did not send their messages, but another part of agree()"


@contextmanager
def alone_on(store: Any) -> Iterator[None]:
    """A process group of this process alone, for a block."""
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_a_group_agrees_on_a_store_that_an_earlier_one_has_used() -> None:
    """As a launcher's, when an engine destroys its group and makes another."""
    store = stores.HashStore()
    for machines in (("h200", "cpu-only"), ("a100-ngc", "h200")):
        with alone_on(store):
            chosen = [kernelreg.agree("gdn", facts=machine(name)).backend for name in machines]
            alone = [kernelreg.resolve("gdn", facts=machine(name)).backend for name in machines]
            assert chosen == alone


def test_what_another_job_left_in_the_store_is_no_answer() -> None:
    store = stores.HashStore()
    with alone_on(store):
        kernelreg.agree("gdn", facts=machine("h200"))
    with alone_on(store):
        # The other job's rank has got further than the number that it noted.
        noted = stores.PrefixStore("kernelreg", stores.distributed_c10d._get_process_group_store(dist.group.WORLD))
        noted.set("turns/0", "0")
        with pytest.raises(RanksError, match="what another job agreed on"):
            kernelreg.agree("gdn", facts=machine("a100-ngc"))


def test_without_a_process_group_there_is_nobody_to_agree_with() -> None:
    with pytest.raises(RanksError, match="init_process_group"):
        kernelreg.agree("gdn")


def test_without_torch_the_error_says_so() -> None:
    code = "import sys; sys.modules['torch'] = None; import kernelreg; kernelreg.agree('gdn')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "kernelreg.errors.RanksError: ranks meet through torch, which cannot be imported" in done.stderr


# -- the command -------------------------------------------------------------------------------------------------------


def torchrun(tmp_path: Path, size: int, words: str, **by_rank: dict[int, str]) -> subprocess.CompletedProcess[str]:
    """The doctor under torchrun, with variables that each rank sets for itself."""
    script = tmp_path / "ranks_doctor.py"
    script.write_text(
        "import os, sys\n"
        f"for name, values in {by_rank!r}.items():\n"
        "    if int(os.environ['RANK']) in values: os.environ[name] = values[int(os.environ['RANK'])]\n"
        "from kernelreg.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n",
        encoding="utf-8",
    )
    return subprocess.run(
        f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node={size}".split()
        + f"{script} doctor --ranks {words}".split(),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "KERNELREG_FACTS": os.fspath(FACTS / "h200.json")},
    )


def test_the_doctor_prints_one_report_of_all_ranks(tmp_path: Path) -> None:
    done = torchrun(tmp_path, 3, "", KERNELREG_FACTS={2: os.fspath(FACTS / "a100-ngc.json")})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("kernelreg 0.1.0, ranks 0-2 on 1 host") == 1
    assert "NVIDIA H200, compute capability 9.0, 140 GiB (cuda:0)" in done.stdout
    assert "packages.triton: 3.6.0 on ranks 0-1; 3.3.0 on rank 2" in done.stdout
    assert "  gdn.chunk: fla (triton)\n" in done.stdout
    assert "compute-capability: rank 2: needs compute capability ==9.0, here 8.0" in done.stdout
    assert done.stdout.rstrip().endswith("Adapters were not imported.")


def test_the_doctor_says_who_is_forced_and_how_the_ranks_differ_all_the_same(tmp_path: Path) -> None:
    done = torchrun(tmp_path, 2, "--json", KERNELREG_BACKEND={1: "torch"}, KERNELREG_STRICT={0: "maybe"})
    assert done.returncode == 1
    import json

    report = json.loads(done.stdout)
    assert not report["ok"]
    assert report["differences"][0]["field"] == "policy.backend.gdn.chunk"
    assert "rank 1: KERNELREG_BACKEND forces torch" in report["unmet"][1]
    assert report["unmet"][0].startswith("rank 0: KERNELREG_STRICT='maybe'")


def test_the_doctor_gives_a_rank_up_at_the_limit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = stores.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    said = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    for name, value in {**said, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["doctor", "--ranks", "--limit", "1"]) == 1
    assert "rank 0 of ranks 0-1 did not answer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--ranks"], "no torchrun started this process"),
        (["--limit", "3"], "--limit is for --deep and --ranks"),
    ],
)
def test_the_doctors_words_for_ranks_are_checked(
    words: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert cli.main(["doctor", *words]) == 2
    assert told in capsys.readouterr().err


def test_the_doctor_on_a_rank_without_torch_says_so_and_it_is_no_wrong_usage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    assert cli.main(["doctor", "--ranks"]) == 1
    assert "ranks meet through torch, which cannot be imported" in capsys.readouterr().err
