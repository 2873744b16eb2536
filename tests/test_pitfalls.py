"""Each detection pitfall that facts can decide: what went wrong elsewhere cannot go wrong here.

The numbers are the project's own list of public reports: TransformerEngine #1277, #1821 and #3334, composer #3161,
LightLLM #1292, bitsandbytes #1599, FLA #640, #983, #1094 and #1098, vllm #7472, #9728, #37507, #41848 and #55715.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

import kernelreg
from kernelreg.machine import Facts, Problem
from kernelreg.machine.visible import Card, select_visible
from kernelreg.policy import read_boolean
from kernelreg.versions import satisfies
from tests.machines import codes, decided, descriptor, machine, rocm_device


@pytest.mark.parametrize(
    "version", ["2.8.0a0+5228986c39.nv25.06", "2.8.0rc1", "2.8.0.dev20250601+cu128", "2.8.0+gitabc"]
)
def test_vendor_pre_release_and_nightly_builds_of_a_release_satisfy_it(version: str) -> None:
    resolution = decided(machine("h200", torch=version))
    assert "torch-version" not in codes(resolution, "flash_qla", "sm90")  # it needs >=2.8
    assert resolution.backend == "flash_qla"


def test_a_nightly_of_2_9_satisfies_2_9_and_not_2_10() -> None:
    nightly = "2.9.0.dev20250801+cu128"
    assert satisfies(nightly, ">=2.9", by_release=True) is True
    assert satisfies(nightly, ">=2.10", by_release=True) is False


@pytest.mark.parametrize("version", ["2.7.1", "2.7.1+cu128", "2.7.0a0+git"])
def test_an_older_torch_is_named_with_both_versions(version: str) -> None:
    resolution = decided(machine("h200", torch=version))
    row = next(each for each in resolution.candidates if (each.backend, each.kernel) == ("flash_qla", "sm90"))
    (reason,) = row.reasons
    assert (reason.code, reason.required, reason.actual) == ("torch-version", ">=2.8", version)
    assert reason.fix == 'pip install "torch>=2.8"'
    assert reason.url


@pytest.mark.parametrize("version", ["main", "", "2.x", "unknown", "2.8.0-weird build", "9" * 5000])
def test_what_is_no_version_is_a_reason_with_the_raw_text_and_never_an_error(version: str) -> None:
    resolution = decided(machine("h200", torch=version))
    row = next(each for each in resolution.candidates if (each.backend, each.kernel) == ("flash_qla", "sm90"))
    unknown = next(reason for reason in row.reasons if reason.code == "version-unknown")
    assert unknown.actual == (version or "a version that cannot be read")


def test_a_cpu_build_of_torch_on_a_gpu_machine_is_a_build_reason() -> None:
    facts = machine("h200", torch=kernelreg.machine.TorchBuild(version="2.13.0+cpu"))
    on_the_card = decided(facts, device="cuda:0")
    for row in on_the_card.candidates:
        assert "cuda-build" in codes(on_the_card, row.backend, row.kernel)
    automatic = decided(facts)
    assert (automatic.device, automatic.backend) == ("cpu", "torch")  # this torch cannot reach the card
    assert "cuda-build" in codes(automatic, "flash_qla", "sm90")


def test_every_limit_can_be_traced_from_its_reason() -> None:
    for name in ("h200", "cpu-only", "a100-ngc", "mixed-h100-rtx5090"):
        resolution = decided(machine(name), dtype="float64", head_dim_k=64, features={"deterministic"})
        for row in resolution.candidates:
            for reason in row.reasons:
                if reason.code not in ("outranked", "no-device") and not (
                    row.backend == "fla" and reason.code == "dtype"
                ):
                    assert reason.url, (row.backend, row.kernel, reason)


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A backend that ranks above all others and whose adapter raises at import, as flash_qla's does without a GPU."""
    pytest.importorskip("torch")
    (tmp_path / "broken_adapter.py").write_text("raise ValueError('No CUDA architecture was specified')\n")
    monkeypatch.syspath_prepend(tmp_path)
    preference = [{"speedup": 99.0, "source": "a test"}]
    undo = kernelreg.register(descriptor("broken", kernel={"preference": preference}))
    yield
    undo()


@pytest.mark.usefixtures("broken")
def test_an_adapter_that_raises_at_import_costs_only_itself(caplog: pytest.LogCaptureFixture) -> None:
    resolution = kernelreg.resolve("gdn", device="cpu")
    assert resolution.backend == "broken"
    with caplog.at_level(logging.WARNING, logger="kernelreg"):
        assert callable(resolution.function)
    assert resolution.backend == "torch"
    reason = next(each for each in resolution.candidates if each.backend == "broken").reasons[0]
    assert reason.code == "import-error"
    assert "ValueError: No CUDA architecture was specified" in str(reason)
    (line,) = [record.message for record in caplog.records]
    assert "broken only is installed and ranks higher, but cannot run: import-error" in line
    assert kernelreg.resolve("gdn", device="cpu").backend == "torch"


@pytest.mark.usefixtures("broken")
def test_under_strict_a_failed_import_is_an_error_every_time() -> None:
    with kernelreg.use(strict=True):
        with pytest.raises(kernelreg.NoBackendError, match="strict allows no fallback"):
            _ = kernelreg.resolve("gdn", device="cpu").function
        for _ in range(2):
            with pytest.raises(kernelreg.NoBackendError, match="broken only ranks higher and cannot be imported"):
                kernelreg.resolve("gdn", device="cpu")
    assert kernelreg.resolve("gdn", device="cpu").backend == "torch"


@pytest.mark.parametrize(
    ("capability", "rule", "fits"),
    [
        ("12.0", "==12.0", True),
        ("12.1", "==12.0", False),
        ("12.1", "==12.*", True),
        ("10.3", "==10.*", True),
        ("10.3", "==9.0 || ==10.3", True),
        ("8.6", ">=8.0", True),
        ("7.5", ">=8.0", False),
        ("9.0", ">=8.0,<9.0", False),
    ],
)
def test_exact_family_range_and_alternatives_are_different_rules(capability: str, rule: str, fits: bool) -> None:
    undo = kernelreg.register(descriptor("ruled", kernel={"requires": {"compute_capability": rule}}))
    try:
        resolution = decided(machine("h200", device={"compute_capability": capability}))
        assert ("compute-capability" not in codes(resolution, "ruled", "only")) is fits
    finally:
        undo()


def test_each_card_has_its_own_answer() -> None:
    facts = machine("mixed-h100-rtx5090")
    answers = {device.torch_name: decided(facts, device=device.torch_name).backend for device in facts.devices}
    assert answers == {"cuda:0": "fla", "cuda:1": "flash_qla"}


def test_a_mig_uuid_shows_the_instance() -> None:
    parent = machine("h200").devices[0]
    instance = kernelreg.machine.Device(index=0, type="cuda", uuid="MIG-1234", mig=True, compute_capability="9.0")
    devices, problems = select_visible([Card(parent, (instance,), mig_enabled=True)], "MIG-1234")
    assert [device.uuid for device in devices] == ["MIG-1234"]
    assert not problems


@pytest.mark.parametrize(("triton", "fla"), [("3.4.0", "0.4.1"), ("3.7.0", "0.4.2"), ("3.5.1+gitabc", "0.3.2")])
def test_hoppers_wrong_gradients_are_known(triton: str, fla: str) -> None:
    facts = machine("h200", packages={"triton": triton, "flash-linear-attention": fla, "fla-core": fla})
    row = "triton-0.4" if fla.startswith("0.4") else "triton-0.3"
    training = decided(facts, features={"backward"})
    assert "known-bad" in codes(training, "fla", row)
    reason = next(each for row in training.candidates for each in row.reasons if each.subject == "wrong-result")
    assert reason.url == "https://github.com/fla-org/flash-linear-attention/issues/640"
    assert "known-bad" not in codes(decided(facts), "fla", row)  # the forward pass is right


@pytest.mark.parametrize(
    ("triton", "fla", "capability"),
    [("3.3.1", "0.4.1", "9.0"), ("3.7.1", "0.6.0", "9.0"), ("3.5.0", "0.4.1", "8.0")],
)
def test_the_gradient_fault_is_not_claimed_elsewhere(triton: str, fla: str, capability: str) -> None:
    packages = {"triton": triton, "flash-linear-attention": fla, "fla-core": fla}
    facts = machine("h200", packages=packages, device={"compute_capability": capability})
    for row in decided(facts, features={"backward"}).candidates:
        assert row.backend != "fla" or "known-bad" not in codes(
            decided(facts, features={"backward"}), "fla", row.kernel
        )


def test_a_missing_nvcc_and_an_old_one_are_told_before_the_choice() -> None:
    missing = decided(machine("h200", tools={}))
    assert codes(missing, "flash_qla", "sm90") == {"tool-missing"}
    old = decided(machine("h200", tools={"nvcc": kernelreg.machine.Tool(path="/opt/nvcc", version="12.4")}))
    assert codes(old, "flash_qla", "sm90") == {"tool-version"}
    assert missing.backend == old.backend == "fla"


@pytest.mark.parametrize(("version", "fits"), [("2.8.3+local", True), ("2.8.3", True), ("2.8.4", False)])
def test_local_parts_never_decide(version: str, fits: bool) -> None:
    assert satisfies(version, "<=2.8.3", by_release=False) is fits
    assert satisfies(version, "==2.8.3", by_release=False) is fits


def test_installed_but_outside_the_window_is_not_called_missing() -> None:
    resolution = decided(machine("h200", packages={"flash-qla": "0.1.0"}))
    row = next(each for each in resolution.candidates if (each.backend, each.kernel) == ("flash_qla", "sm90"))
    (reason,) = row.reasons
    assert (reason.code, reason.subject, reason.actual) == ("package-version", "flash-qla", "0.1.0")
    assert reason.fix == 'pip install "flash-qla>=0.1.1"'


def test_a_directory_of_the_right_name_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "made_up_kernels").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    undo = kernelreg.register(descriptor("made_up", requires={"packages": {"made-up-kernels": "*"}}))
    try:
        assert "package-missing" in codes(decided(kernelreg.facts(), device="cpu"), "made_up", "only")
    finally:
        undo()


def test_fla_installed_without_a_gpu_gives_the_torch_kernel_and_a_reason() -> None:
    resolution = decided(machine("cpu-only"))
    assert (resolution.device, resolution.backend) == ("cpu", "torch")
    for backend, kernel in (("fla", "triton"), ("flash_qla", "sm90")):
        assert codes(resolution, backend, kernel) & {"device-type", "cuda-build"}


def test_a_better_kernel_that_is_installed_but_unusable_is_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    facts = machine("h200", tools={})
    with caplog.at_level(logging.WARNING, logger="kernelreg"):
        assert decided(facts).backend == "fla"
        assert decided(facts).backend == "fla"
    (line,) = [record.message for record in caplog.records]
    assert "flash_qla sm90 is installed and ranks higher" in line
    assert "fix: pip install nvidia-cuda-nvcc" in line


def test_a_backend_is_warned_of_by_its_best_row_alone(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="kernelreg"):
        assert (
            decided(machine("h200", packages={"flash-qla": None, "tilelang": None}), features={"backward"}).backend
            == "torch"
        )
    (line,) = [record.message for record in caplog.records]
    assert "fla triton is installed" in line
    assert 'fix: pip install "triton>=3.7.1"' in line


def test_what_no_repair_would_make_run_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="kernelreg"):
        decided(machine("a100-ngc"))  # another card would be needed
        decided(machine("cpu-only"))
        decided(machine("h200", packages={"flash-qla": None}))  # not installed
    assert not caplog.records


@pytest.mark.parametrize(
    ("word", "value"), [("true", True), ("1", True), ("ON", True), ("false", False), ("no", False)]
)
def test_one_reader_of_booleans(word: str, value: bool) -> None:
    assert read_boolean("X", word) is value


def test_a_boolean_of_another_form_is_refused_by_name() -> None:
    with pytest.raises(kernelreg.ConfigurationError, match=r"X='2'; accepted: 1/0, true/false, on/off, yes/no"):
        read_boolean("X", "2")


def test_an_amd_devices_9_5_is_no_nvidia_capability() -> None:
    build = kernelreg.machine.TorchBuild(version="2.11.0+rocm7.1", hip="7.1.52802-26aae437f6")
    facts: Facts = machine("h200", devices=(rocm_device(),), torch=build, driver=None)
    undo = kernelreg.register(
        descriptor("wide", kernel={"requires": {"compute_capability": ">=9.0"}}, requires={"hip": ">=7.0"})
    )
    try:
        resolution = decided(facts)
        assert resolution.device == "cuda:0"  # as torch names it
        assert codes(resolution, "wide", "only") == {"compute-capability"}
        assert codes(resolution, "flash_qla", "sm90") >= {"device-type", "cuda-build"}
        assert resolution.backend == "fla"
    finally:
        undo()


def test_problems_of_detection_do_not_change_the_decision() -> None:
    troubled = machine("h200", problems=(Problem(source="nvml", error="driver not loaded"),))
    assert decided(troubled) == decided(machine("h200"))


def test_what_a_row_alone_needs_has_a_fix_of_its_own() -> None:
    blackwell = {"compute_capability": "10.0"}
    resolution = decided(machine("h200", packages={"flashinfer-python": "0.7.4"}, device=blackwell))
    row = next(each for each in resolution.candidates if (each.backend, each.kernel) == ("flashinfer", "sm100"))
    fixes = {reason.subject: reason.fix for reason in row.reasons if reason.code == "package-missing"}
    assert fixes == {"nvidia-cutlass-dsl-libs-cu13": 'pip install "nvidia-cutlass-dsl-libs-cu13>=4.4.2"'}
