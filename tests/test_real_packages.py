"""flash-linear-attention, flash-qla, tilelang, triton and transformers as installed, on a machine without a GPU.

Each test skips where its package is not installed; the project's CI installs all of them.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import kernelreg
from kernelreg.adapters import load_function
from kernelreg.gdn import chunk_gated_delta_rule
from kernelreg.registry import discover
from kernelreg.verify.cases import cases
from kernelreg.verify.outcome import Outcome
from tests.gdn_cases import EXACT, expected, gdn_call, relative
from tests.machines import codes


def installed(*names: str) -> pytest.MarkDecorator:
    """Skip where a distribution is missing, or where a GPU makes the test's premise false."""
    missing = []
    for name in names:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    reason = f"not installed: {', '.join(missing)}" if missing else "a GPU is visible: tests/gpu covers it"
    return pytest.mark.skipif(bool(missing) or torch.cuda.is_available(), reason=reason)


@installed("flash-linear-attention", "flash-qla", "tilelang", "triton")
def test_everything_is_installed_and_the_torch_kernel_runs_with_a_reason_for_each_other() -> None:
    packages = kernelreg.facts().packages
    assert {"flash-linear-attention", "fla-core", "flash-qla", "tilelang", "triton"} <= set(packages)
    assert all(importlib.metadata.version(name) == version for name, version in packages.items())
    resolution = kernelreg.resolve("gdn")
    assert (resolution.device, resolution.backend) == ("cpu", "torch")
    for backend, kernel in (("fla", "triton"), ("flash_qla", "sm90")):
        assert "device-type" in codes(resolution, backend, kernel)
        assert "package-missing" not in codes(resolution, backend, kernel)
    call = gdn_call()
    assert relative(chunk_gated_delta_rule(**call)[0], expected(call)[0]) <= 1e-5


@installed("flash-linear-attention", "flash-qla", "tilelang", "triton")
@pytest.mark.parametrize("command", [["doctor"], ["resolve", "gdn"], ["backends"]])
def test_the_command_line_works_beside_them(command: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kernelreg", *command], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "flash_qla" in done.stdout


@installed("flash-qla", "tilelang")
def test_flash_qlas_import_error_is_a_reason_and_not_a_crash() -> None:
    row = discover().find("flash_qla", "gdn.chunk", "sm90")
    assert row is not None
    with pytest.raises(kernelreg.AdapterError) as caught:
        load_function(*row)
    reason = caught.value.reason
    assert reason.code == "import-error"
    assert reason.actual is not None
    assert reason.actual.startswith("ValueError: No CUDA architecture was specified")


@installed("flash-linear-attention", "triton")
def test_flas_own_dispatch_is_out_of_the_way_and_left_alone() -> None:
    library = importlib.import_module("kernelreg_backends.fla.library")
    public: Any = importlib.import_module("fla.ops.gated_delta_rule.chunk")
    inside = inspect.unwrap(library.chunk).__globals__
    for name in library.DISPATCHED:
        assert not hasattr(inside[name], "__wrapped__"), name
    assert hasattr(public.chunk_gated_delta_rule_fwd_h, "__wrapped__")
    assert inside is not vars(public)


INTERPRETED = """
import msgspec, sys, torch
import kernelreg
from kernelreg.verify.cases import cases
from kernelreg.verify.judge import judge
from tests.test_real_packages import interpreted_descriptor
kernelreg.register(interpreted_descriptor())
outcomes = [judge(each, "fla_interpreted", "cpu") for each in cases("gdn.recurrent", "tiny", draws=20)]
sys.stdout.buffer.write(msgspec.json.encode(outcomes))
"""


def interpreted_descriptor() -> kernelreg.Descriptor:
    """FLA's decode row on the CPU, where Triton interprets it."""
    row = discover().find("fla", "gdn.recurrent", "triton")
    assert row is not None
    descriptor, kernel = row[0].descriptor, row[1]
    anywhere = msgspec.structs.replace(descriptor.requires, device="any")
    return msgspec.structs.replace(
        descriptor, name="fla_interpreted", requires=anywhere, kernel=(kernel,), known_bad=()
    )


@installed("flash-linear-attention", "triton")
def test_flas_recurrent_kernel_keeps_the_contract_under_the_triton_interpreter() -> None:
    root = Path(__file__).parent.parent
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", INTERPRETED],
        env=environment,
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    outcomes = msgspec.json.decode(done.stdout, type=list[Outcome])
    assert not [each for each in outcomes if each.status == "wrong"]
    refused = {each.case for each in outcomes if each.status == "refused"}
    gradients = {each.name for each in cases("gdn.recurrent", "tiny") if each.backward}
    assert refused == {"deterministic", "float64", *gradients}
    assert len([each for each in outcomes if each.status == "right"]) >= 60


@installed("flash-linear-attention", "triton")
def test_flas_chunk_kernels_mask_out_the_rows_that_a_batch_does_not_need() -> None:
    """The real kernels, with chunk tables at a fixed maximum as a CUDA graph has them, and exact ones."""
    root = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.fla_chunk_interpreted"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    found = msgspec.json.decode(done.stdout.splitlines()[-1], type=dict[str, list[float]])
    assert len(found) == 12
    assert not {name: errors for name, errors in found.items() if not max(errors) <= EXACT[torch.float32]}


FLASH_QLA = """
import torch
from types import SimpleNamespace
import tilelang
torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(multi_processor_count=132)
tilelang.contrib.nvcc.get_target_compute_version = lambda _=None: "9.0"
from kernelreg_backends._direct import batch_of
from kernelreg_backends.flash_qla import forward

launched = []

def instead(maker):
    def make(*sizes, **words):
        program = maker.get_tir(*sizes, **words)  # the library's own, from what the adapter asks for
        def launch(*given):
            assert len(given) == len(program.params)
            for parameter, value in zip(program.params, given):
                buffer = program.buffer_map.get(parameter)
                if buffer is not None:
                    assert len(buffer.shape) == value.dim(), parameter
                    assert str(value.dtype) == f"torch.{buffer.dtype}", (parameter, value.dtype)
                    assert value.is_contiguous(), parameter
            launched.append([str(each).removesuffix("_handle") for each in program.params])
        return launch
    return make

makers = forward.MAKERS
forward.MAKERS = forward._Makers(*map(instead, makers[:3]), makers[3])
q, v, g = torch.zeros(1, 200, 2, 128).bfloat16(), torch.zeros(1, 200, 4, 128).bfloat16(), torch.zeros(1, 200, 4)
with torch.no_grad():
    for edges in (None, torch.tensor([0, 0, 70, 100])):
        for state in (None, torch.zeros(1 if edges is None else 3, 4, 128, 128).bfloat16()):
            forward.run_forward(
                q, q, v, g, g, batch_of(q, edges, None), scale=1.0, initial_state=state, output_final_state=True,
                use_qk_l2norm_in_kernel=False, state_v_first=state is not None,
            )
for names in launched[-3:]:
    print(*names)
"""


@installed("flash-qla", "tilelang")
def test_flash_qlas_kernels_get_what_they_take() -> None:
    """The parameters of the real programs, as they are built for SM90, beside what the adapter launches them with."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FLASH_QLA], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-3:] == [
        "g_raw cu_seqlens chunk_indices g_cumsum",
        "k b cu_seqlens chunk_indices a",
        "q k v a g b h0 cu_seqlens chunk_offsets cp_seq_map raw_cu_seqlens o h ht",
    ]
