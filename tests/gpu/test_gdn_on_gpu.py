"""Every backend under the GDN contract on a real GPU: the right numbers, or a refusal with a reason."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import pytest
import torch

import kernelreg
from kernelreg.gdn import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from tests.gdn_cases import BOUNDS, Call, expected, gdn_call, leaves, relative
from tests.gpu.conftest import Record

BACKENDS = ("torch", "fla", "flash_qla")
#: FLA and FlashQLA multiply float32 matrices in TF32 where the hardware does.
TF32_BOUND = 1e-2

Function = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


def case(**options: Any) -> Call:
    """The one head shape that everything here shares: each new one costs compile time."""
    return gdn_call(**{"H": 4, "HV": 8, "K": 128, "V": 128, "dtype": torch.bfloat16, "device": "cuda", **options})


def judge(name: str, backend: str, call: Call, record: Record, function: Function = chunk_gated_delta_rule) -> None:
    """Run the call on one backend: numbers within the bound, or ``NoBackendError``, which the caller expects."""
    bound = BOUNDS[call["q"].dtype]
    if call["q"].dtype == torch.float32 and backend != "torch":
        bound = TF32_BOUND
    wanted = expected(call)
    with kernelreg.use(backend=backend), torch.no_grad():
        o, final = function(**call)
    errors = [relative(o, wanted[0])]
    if final is not None:
        errors.append(relative(final, wanted[1]))
    record(name, backend, " / ".join(f"{error:.1e}" for error in errors))
    assert all(error <= bound for error in errors), errors


def refused(name: str, backend: str, call: Call, record: Record, code: str, subject: str) -> None:
    """The call is refused, and each row of the backend that this card could run says why."""
    with kernelreg.use(backend=backend), pytest.raises(kernelreg.NoBackendError) as caught:
        chunk_gated_delta_rule(**call)
    best = next(each for each in caught.value.resolution.candidates if each.backend == backend)
    reasons = [each for row in caught.value.resolution.candidates if row.backend == backend for each in row.reasons]
    assert any(reason.code == code and reason.subject == subject for reason in reasons), best
    record(name, backend, f"refused: {code} {subject}")


@pytest.mark.parametrize("backend", BACKENDS)
class TestChunk:
    def test_dense(self, backend: str, record: Record) -> None:
        judge("dense, B 2, T 300", backend, case(), record)

    def test_no_state_keys_normalised_by_the_caller(self, backend: str, record: Record) -> None:
        judge("no state, q and k of unit length", backend, case(state=False, normalised=True), record)

    def test_packed(self, backend: str, record: Record) -> None:
        judge("varlen", backend, case(edges=[0, 64, 130, 300]), record)

    def test_packed_int32(self, backend: str, record: Record) -> None:
        call = case(edges=[0, 64, 130, 300])
        judge("varlen, int32", backend, {**call, "cu_seqlens": call["cu_seqlens"].int()}, record)

    def test_edges_changed_in_place(self, backend: str, record: Record) -> None:
        call = case(edges=[0, 64, 130, 300])
        with kernelreg.use(backend=backend), torch.no_grad():
            chunk_gated_delta_rule(**call)
        call["cu_seqlens"].copy_(torch.tensor([0, 101, 260, 300]))
        judge("varlen, cu_seqlens changed in place", backend, call, record)

    def test_empty_sequences(self, backend: str, record: Record) -> None:
        judge("empty sequences", backend, case(edges=[0, 0, 64, 64, 300, 300]), record)

    def test_tokens_behind_the_last_sequence(self, backend: str, record: Record) -> None:
        call = case(edges=[0, 64, 200])
        for name in ("q", "k", "v", "g", "beta"):
            call[name][:, 200:] = float("nan")
        clean = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in call.items()}
        for name in ("q", "k", "v", "g", "beta"):
            clean[name][:, 200:] = 0
        wanted = expected(clean)
        with kernelreg.use(backend=backend), torch.no_grad():
            o, final = chunk_gated_delta_rule(**call)
        assert final is not None
        errors = relative(o, wanted[0]), relative(final, wanted[1])
        record("NaN behind cu_seqlens[-1]", backend, " / ".join(f"{error:.1e}" for error in errors))
        assert max(errors) <= BOUNDS[torch.bfloat16]
        assert not o[:, 200:].any()

    def test_no_tokens(self, backend: str, record: Record) -> None:
        judge("T = 0", backend, case(T=0), record)

    def test_bfloat16_beta_and_state(self, backend: str, record: Record) -> None:
        call = case()
        call |= {name: call[name].bfloat16() for name in ("beta", "initial_state")}
        judge("beta and initial state in bfloat16", backend, call, record)

    def test_bfloat16_gate(self, backend: str, record: Record) -> None:
        call = case()
        call["g"] = call["g"].bfloat16()
        if backend == "flash_qla":
            refused("g in bfloat16", backend, call, record, "dtype", "gate_dtype")
        else:
            judge("g in bfloat16", backend, call, record)

    def test_float32(self, backend: str, record: Record) -> None:
        if backend == "flash_qla":
            refused("float32", backend, case(dtype=torch.float32), record, "dtype", "dtype")
        else:
            judge("float32", backend, case(dtype=torch.float32), record)

    def test_other_head_dim(self, backend: str, record: Record) -> None:
        if backend == "flash_qla":
            refused("K = V = 64", backend, case(K=64, V=64), record, "head-dim", "head_dim_k")
        else:
            judge("K = V = 64", backend, case(K=64, V=64), record)

    def test_strided_and_v_first(self, backend: str, record: Record) -> None:
        call = case()
        call |= {name: call[name].transpose(1, 2).contiguous().transpose(1, 2) for name in ("q", "k", "v")}
        call |= {"initial_state": call["initial_state"].mT.contiguous(), "state_v_first": True}
        judge("strided inputs, state_v_first", backend, call, record)

    def test_scale_zero(self, backend: str, record: Record) -> None:
        call = case()
        with kernelreg.use(backend=backend), torch.no_grad():
            o, final = chunk_gated_delta_rule(**call, scale=0.0)
        error = relative(final, expected(call)[1]) if final is not None else float("nan")
        record("scale = 0.0", backend, f"zeros / {error:.1e}")
        assert not o.any()
        assert error <= BOUNDS[torch.bfloat16]

    def test_raw_gates(self, backend: str, record: Record) -> None:
        call = case()
        raw = torch.randn(call["g"].shape, device="cuda")
        A_log, dt_bias = torch.rand(8, device="cuda"), torch.rand(8, device="cuda")
        given = {**call, "g": raw, "use_gate_in_kernel": True, "A_log": A_log, "dt_bias": dt_bias}
        wanted = expected({**call, "g": -A_log.exp() * torch.nn.functional.softplus(raw + dt_bias)})
        with kernelreg.use(backend=backend), torch.no_grad():
            o, _ = chunk_gated_delta_rule(**given)
        record("raw gates", backend, f"{relative(o, wanted[0]):.1e}")
        assert relative(o, wanted[0]) <= BOUNDS[torch.bfloat16]

    def test_edges_on_the_cpu(self, backend: str, record: Record) -> None:
        call = case(edges=[0, 64, 300])
        call["cu_seqlens"] = call["cu_seqlens"].cpu()
        with kernelreg.use(backend=backend), pytest.raises(kernelreg.CallError, match="cu_seqlens is on cpu"):
            chunk_gated_delta_rule(**call)
        record("cu_seqlens on the CPU", backend, "CallError")

    def test_gradients(self, backend: str, record: Record) -> None:
        call = case(T=256, B=1)
        tensors = leaves(call)
        if backend == "fla":
            refused("gradients q k v g beta h0", backend, call, record, "known-bad", "crash")
            return
        with kernelreg.use(backend=backend):
            o, final = chunk_gated_delta_rule(**call)
        assert final is not None
        grads = torch.autograd.grad(o.float().square().sum() + final.square().sum(), list(tensors.values()))
        reference = {**call, **{name: x.detach().double().requires_grad_() for name, x in tensors.items()}}
        wanted_o, wanted_final = expected(reference)
        inputs = [reference[name] for name in tensors]
        wanted = torch.autograd.grad(wanted_o.square().sum() + wanted_final.square().sum(), inputs)
        errors = {name: relative(a, b) for name, a, b in zip(tensors, grads, wanted, strict=True)}
        record("gradients q k v g beta h0", backend, " ".join(f"{error:.1e}" for error in errors.values()))
        # dk is a small difference of large terms here, in bfloat16 (FLA's own kernels give 5.8e-2).
        assert all(error <= (8e-2 if name == "k" else 1e-2) for name, error in errors.items()), errors

    def test_captured_dense(self, backend: str, record: Record) -> None:
        call, other = case(), case(seed=7)
        with kernelreg.use(backend=backend), torch.no_grad():
            o, final, graph = capture(call)
        for name, value in call.items():
            if isinstance(value, torch.Tensor):
                value.copy_(other[name])
        graph.replay()
        torch.cuda.synchronize()
        wanted = expected(other)
        errors = relative(o, wanted[0]), relative(final, wanted[1])
        record("CUDA graph, dense, replayed on new data", backend, " / ".join(f"{error:.1e}" for error in errors))
        assert max(errors) <= BOUNDS[torch.bfloat16]

    def test_captured_packed(self, backend: str, record: Record) -> None:
        call, other = case(edges=[0, 64, 130, 300]), case(edges=[0, 0, 201, 290], seed=7)
        if backend != "torch":
            with (
                kernelreg.use(backend=backend),
                torch.no_grad(),
                pytest.raises(kernelreg.NoBackendError) as caught,
            ):
                capture(call)
            assert "feature: capture-varlen" in str(caught.value)
            record("CUDA graph, varlen, replayed on other edges", backend, "refused: feature capture-varlen")
            return
        with kernelreg.use(backend=backend), torch.no_grad():
            o, final, graph = capture(call)
        for name, value in call.items():
            if isinstance(value, torch.Tensor):
                value.copy_(other[name])
        graph.replay()
        torch.cuda.synchronize()
        wanted = expected(other)
        errors = relative(o, wanted[0]), relative(final, wanted[1])
        record("CUDA graph, varlen, replayed on other edges", backend, " / ".join(f"{e:.1e}" for e in errors))
        assert max(errors) <= BOUNDS[torch.bfloat16]


def capture(call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.cuda.CUDAGraph]:
    """The call in a CUDA graph, warmed up on a side stream first."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        chunk_gated_delta_rule(**call)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, final = chunk_gated_delta_rule(**call)
    assert final is not None
    return o, final, graph


def test_why_flash_qla_refuses_bfloat16_gates_flash_qla(record: Record) -> None:
    flash_qla = pytest.importorskip("flash_qla")
    call = case()
    wanted = expected({**call, "g": call["g"].bfloat16()})
    with torch.no_grad():
        o, _ = flash_qla.chunk_gated_delta_rule(**{**call, "g": call["g"].bfloat16(), "scale": 128**-0.5})
    record("g in bfloat16, given to the library as it is", "flash_qla", f"{relative(o, wanted[0]):.1e}")
    assert relative(o, wanted[0]) > BOUNDS[torch.bfloat16]


@pytest.mark.parametrize("backend", ["torch", "fla"])
class TestRecurrent:
    def test_decode(self, backend: str, record: Record) -> None:
        judge("recurrent, B 4, T 1", backend, case(B=4, T=1), record, fused_recurrent_gated_delta_rule)

    def test_packed_with_gaps(self, backend: str, record: Record) -> None:
        call = case(T=24, edges=[0, 1, 1, 5, 20])
        judge("recurrent, varlen with gaps", backend, call, record, fused_recurrent_gated_delta_rule)

    def test_no_gates(self, backend: str, record: Record) -> None:
        call = case(B=3, T=2)
        ones = {**call, "g": torch.zeros_like(call["g"]), "beta": torch.ones_like(call["beta"])}
        wanted = expected(ones)
        with kernelreg.use(backend=backend), torch.no_grad():
            o, _ = fused_recurrent_gated_delta_rule(**{**call, "g": None, "beta": None})
        record("recurrent, g and beta None", backend, f"{relative(o, wanted[0]):.1e}")
        assert relative(o, wanted[0]) <= BOUNDS[torch.bfloat16]


def test_facts_agree_with_torch(record: Record) -> None:
    facts = kernelreg.facts()
    assert len(facts.devices) == torch.cuda.device_count()
    for device in facts.devices:
        properties = torch.cuda.get_device_properties(device.index)
        assert device.compute_capability == f"{properties.major}.{properties.minor}"
        assert device.uuid == f"GPU-{properties.uuid}"
        assert device.multiprocessors == properties.multi_processor_count
        assert device.name == properties.name
    assert not facts.problems
    record("facts agree with torch", "all", "yes")


def test_the_driver_tells_the_same_devices_as_nvml() -> None:
    from kernelreg.machine.cuda_driver import read_cuda_driver

    driver, devices, problems = read_cuda_driver()
    assert not problems
    assert driver is not None
    assert devices is not None
    for ours, theirs in zip(devices, kernelreg.facts().devices, strict=True):
        assert (ours.uuid, ours.pci_bus_id.lower()) == (theirs.uuid, theirs.pci_bus_id.lower())  # type: ignore[union-attr]
        assert (ours.compute_capability, ours.multiprocessors) == (
            theirs.compute_capability,
            theirs.multiprocessors,
        )


def test_a_long_prompt_is_flash_qlas() -> None:
    call = case(B=1, T=32_768, H=16, HV=32, state=False)
    assert kernelreg.resolve("gdn", like=call).backend == "flash_qla"


def _in_child(queue: Any) -> None:
    queue.put(float(torch.ones(4, device="cuda").sum()))


def _resolve_then_fork(queue: Any) -> None:
    kernelreg.facts()
    kernelreg.resolve("gdn")
    context = multiprocessing.get_context("fork")
    child = context.Process(target=_in_child, args=(queue,))
    child.start()
    child.join(120)


def test_cuda_works_in_a_fork_after_detection(record: Record) -> None:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    parent = context.Process(target=_resolve_then_fork, args=(queue,))
    parent.start()
    assert queue.get(timeout=240) == 4.0
    parent.join(60)
    record("CUDA in a forked child after facts and resolve", "all", "works")
