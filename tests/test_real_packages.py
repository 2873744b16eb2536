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

import pytest
import torch

import kernelreg
from kernelreg.adapters import load_function
from kernelreg.gdn import chunk_gated_delta_rule
from kernelreg.registry import discover
from tests.gdn_cases import expected, gdn_call, relative
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
import sys
from importlib import import_module
adapter = import_module("kernelreg_backends.fla.adapter")
from tests.gdn_cases import expected, gdn_call, relative
for options in ({"T": 5}, {"T": 1, "B": 4}, {"T": 24, "edges": [0, 1, 1, 5, 20]}, {"T": 0}, {"T": 9, "edges": [0, 0]}):
    call = gdn_call(K=32, V=32, **options)
    for turn in (False, True):
        if turn:
            call |= {"initial_state": call["initial_state"].mT.contiguous(), "state_v_first": True}
        o, final = adapter.fused_recurrent_gated_delta_rule(**call)
        wanted_o, wanted_final = expected(call)
        assert relative(o, wanted_o) <= 1e-5, (options, turn)
        assert relative(final, wanted_final) <= 1e-5, (options, turn)
print("all right")
"""


@installed("flash-linear-attention", "triton")
def test_flas_recurrent_kernel_is_right_under_the_triton_interpreter() -> None:
    root = Path(__file__).parent.parent
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", INTERPRETED],
        env=environment,
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.stdout.strip() == "all right", done.stderr


@installed("transformers", "flash-linear-attention", "triton")
def test_qwen3_nexts_layer_crashes_alone_and_is_right_with_kernelreg(monkeypatch: pytest.MonkeyPatch) -> None:
    modeling: Any = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    configuration: Any = importlib.import_module("transformers.models.qwen3_next.configuration_qwen3_next")
    config = configuration.Qwen3NextConfig(
        hidden_size=64,
        num_hidden_layers=1,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        layer_types=["linear_attention"],
    )
    torch.manual_seed(0)
    layer = modeling.Qwen3NextGatedDeltaNet(config, layer_idx=0).eval()
    hidden = torch.randn(2, 70, 64)
    with torch.no_grad(), pytest.raises(RuntimeError, match="0 active drivers"):
        layer(hidden)
    plain = inspect.unwrap(modeling.torch_chunk_gated_delta_rule)
    with torch.no_grad():
        monkeypatch.setattr(modeling, "torch_chunk_gated_delta_rule", plain)
        wanted = layer(hidden)
        monkeypatch.setattr(modeling, "torch_chunk_gated_delta_rule", chunk_gated_delta_rule)
        assert relative(layer(hidden), wanted) <= 1e-5
