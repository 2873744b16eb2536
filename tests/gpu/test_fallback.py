"""Kernels that really fail to compile: the next one runs, and it is said once; a strict choice raises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kernelreg.testing.plugin import Record

ROOT = Path(__file__).parents[2]
NVCC = """#!/bin/sh
case "$*" in
  *--version*) echo "Cuda compilation tools, release 13.0, V13.0.88" ;;
  *) echo "nvcc fatal : Could not open output file" >&2; exit 1 ;;
esac
"""
SCRIPT = """
import json, logging, sys
import torch
import kernelreg
from kernelreg.gdn import chunk_gated_delta_rule
from kernelreg.ops import operation_named
from tests.gdn_cases import expected, gdn_call, relative

class Lines(logging.Handler):
    def emit(self, record):
        told.append(record.getMessage())

told, name, others = [], sys.argv[1], sys.argv[2].split(",")
logging.getLogger("kernelreg").addHandler(Lines(logging.WARNING))
call = gdn_call(T=100, H=4, HV=8, K=128, V=128, dtype=torch.bfloat16, device="cuda")
first = kernelreg.resolve("gdn", like=call, policy=kernelreg.make_policy(disable=others)).backend
strict = "nothing"
with kernelreg.use(disable=others), torch.no_grad():
    with kernelreg.use(strict=True):
        try:
            chunk_gated_delta_rule(**call)
        except kernelreg.KernelregError as error:
            strict = str(error)
    told.clear()
    for _ in range(3):
        o, _ = chunk_gated_delta_rule(**call)
    now = kernelreg.resolve("gdn", like=call).backend
error = relative(o, expected(call)[0]) / operation_named("gdn").tolerances["bfloat16"].forward
print(json.dumps({"first": first, "now": now, "told": told, "strict": strict, "error": error}))
"""


def no_cache_folder(variable: str, folder: Path) -> dict[str, str]:
    """The library's cache of compiled kernels cannot be written: its folder is below a file."""
    (folder / "file").write_text("")
    return {variable: str(folder / "file" / "cache")}


def compiler_that_fails(variable: str, folder: Path) -> dict[str, str]:
    """``nvcc`` tells its version and compiles nothing, and the cache is empty."""
    program = folder / "bin" / "nvcc"
    program.parent.mkdir()
    program.write_text(NVCC)
    program.chmod(0o755)
    path = os.pathsep.join([str(program.parent), os.environ.get("PATH", os.defpath)])
    return {variable: str(folder / "cache"), "CUDA_HOME": str(folder), "CUDA_PATH": str(folder), "PATH": path}


@pytest.mark.parametrize(
    ("name", "variable", "fault", "count"),
    [
        ("fla", "TRITON_CACHE_DIR", no_cache_folder, 2),  # its second row for the call compiles the same kernel
        ("flash_qla", "TILELANG_CACHE_DIR", no_cache_folder, 1),
        ("flash_qla", "TILELANG_CACHE_DIR", compiler_that_fails, 1),
    ],
)
def test_a_kernel_that_cannot_be_compiled_is_stood_in_for(
    name: str,
    variable: str,
    fault: Callable[[str, Path], dict[str, str]],
    count: int,
    tmp_path: Path,
    record: Record,
) -> None:
    others = ",".join(sorted({"fla", "flash_qla", "flashinfer"} - {name}))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, name, others],
        cwd=ROOT,
        env={**os.environ, **fault(variable, tmp_path), "PYTHONPATH": _path()},
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["first"], found["now"]) == (name, "torch")
    assert found["error"] <= 1
    lines = found["told"]  # one for each of the backend's rows that runs this call
    assert len(lines) == count
    assert all(f": {name} " in line for line in lines)
    assert lines[-1].startswith("gdn.chunk on cuda:0 runs torch chunk: ")
    assert name in found["strict"]
    case = f"fallback: {fault.__name__.replace('_', ' ')} for {name}"
    record(f"{case}, automatic", name, " ⏎ ".join(lines).replace(str(tmp_path), "…"))
    record(f"{case}, strict", name, found["strict"].replace(str(tmp_path), "…"))


def _path() -> str:
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
