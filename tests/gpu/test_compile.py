"""``torch.compile(fullgraph=True)`` around each backend's kernels: no graph break, few graphs, right numbers."""

from __future__ import annotations

import pytest
import torch

import kernelreg
from kernelreg.gdn import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from kernelreg.ops import operation_named
from kernelreg.testing.plugin import Record
from tests.compiling import anew, counted, whole
from tests.gdn_cases import Call, expected, gdn_call, leaves, relative

__all__ = ["anew"]

FORWARD = ("torch", "fla", "flash_qla", "flashinfer")
BACKWARD = ("torch", "fla", "flash_qla")


def call_of(T: int, edges: list[int] | None = None) -> Call:
    return gdn_call(T=T, edges=edges, H=4, HV=8, K=128, V=128, dtype=torch.bfloat16, device="cuda")


@pytest.mark.parametrize("backend", FORWARD)
def test_lengths_share_a_graph(backend: str, record: Record) -> None:
    run, graphs = counted(chunk_gated_delta_rule)
    bound = operation_named("gdn").tolerances["bfloat16"].forward
    errors = []
    with kernelreg.use(backend=backend), torch.no_grad():
        for T in (100, 130, 200, 256, 300):
            call = call_of(T)
            errors += [relative(*pair) for pair in zip(run(**call), expected(call), strict=True)]
        packed = call_of(300, [0, 40, 120, 300])
        errors += [relative(*pair) for pair in zip(run(**packed), expected(packed), strict=True)]
    assert max(errors) <= bound
    assert len(graphs) <= 3  # the first length, all lengths, packed
    record("torch.compile: five lengths and a packed batch", backend, f"{len(graphs)} graphs, {max(errors):.1e}")


@pytest.mark.parametrize("backend", ["torch", "fla", "flashinfer"])
def test_decode_in_a_graph(backend: str, record: Record) -> None:
    run, graphs = counted(fused_recurrent_gated_delta_rule)
    call = call_of(1)
    wanted = expected(call)
    with kernelreg.use(backend=backend), torch.no_grad():
        errors = [relative(*pair) for pair in zip(run(**call), wanted, strict=True)]
    assert max(errors) <= operation_named("gdn.recurrent").tolerances["bfloat16"].forward
    record("torch.compile: decode", backend, f"{len(graphs)} graph, {max(errors):.1e}")


@pytest.mark.parametrize("backend", BACKWARD)
def test_gradients_in_a_graph(backend: str, record: Record) -> None:
    grads = []
    for function in (whole(chunk_gated_delta_rule), chunk_gated_delta_rule):
        call = call_of(200)
        inputs = leaves(call)
        with kernelreg.use(backend=backend):
            o, final = function(**call)
            assert final is not None
            loss = o.float().square().sum() + final.square().sum()
            grads.append(torch.autograd.grad(loss, list(inputs.values())))
    errors = {name: relative(*pair) for name, *pair in zip(inputs, *grads, strict=True)}
    bounds = operation_named("gdn").tolerances["bfloat16"]
    assert not {name: error for name, error in errors.items() if error > bounds.own.get(name, bounds.backward)}
    said = " / ".join(f"{error:.1e}" for error in errors.values())
    record("torch.compile: gradients beside the eager call's", backend, said)
