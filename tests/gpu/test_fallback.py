"""Kernels that really fail to compile: the next one runs, and it is said once; a strict choice raises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernelreg.testing.plugin import Record

ROOT = Path(__file__).parents[2]
#: Each library's cache of compiled kernels, which cannot be written where its folder is below a file.
CACHES = {"fla": "TRITON_CACHE_DIR", "flash_qla": "TILELANG_CACHE_DIR"}
#: FLA's second row for the call compiles the same forward kernel.
LINES = {"fla": 2, "flash_qla": 1}
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


@pytest.mark.parametrize("name", CACHES)
def test_a_kernel_that_cannot_be_compiled_is_stood_in_for(name: str, tmp_path: Path, record: Record) -> None:
    (tmp_path / "file").write_text("")
    others = ",".join(sorted({"fla", "flash_qla", "flashinfer"} - {name}))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, name, others],
        cwd=ROOT,
        env={**os.environ, CACHES[name]: str(tmp_path / "file" / "cache"), "PYTHONPATH": _path()},
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
    assert len(lines) == LINES[name]
    assert all(f": {name} " in line for line in lines)
    assert lines[-1].startswith("gdn.chunk on cuda:0 runs torch chunk: ")
    assert name in found["strict"]
    record(f"fallback: no cache folder for {name}, automatic", name, " ⏎ ".join(lines).replace(str(tmp_path), "…"))
    record(f"fallback: no cache folder for {name}, strict", name, found["strict"].replace(str(tmp_path), "…"))


def _path() -> str:
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
