"""A thousand decode steps on one pool of states, on every backend that decodes."""

from __future__ import annotations

from itertools import product

import pytest
import torch

import kernelreg
from kernelreg.gdn import fused_recurrent_gated_delta_rule
from kernelreg.ops import operation_named
from kernelreg.resolver import closest_row
from kernelreg.testing.plugin import Record
from tests.gdn_cases import Call, pool_call, relative

SLOTS, BATCH, STEPS = 64, 16, 1000
BACKENDS = ("torch", "fla", "flashinfer")


def _step(step: int, slots: list[int], v_first: bool, raw: bool) -> Call:
    call = pool_call(
        [1] * BATCH,
        slots,
        pool=1,
        packed=False,
        H=4,
        HV=8,
        K=128,
        V=128,
        dtype=torch.bfloat16,
        seed=step,
        device="cuda",
    )
    if raw:
        generator = torch.Generator().manual_seed(step)
        call["g"] = torch.randn(call["g"].shape, generator=generator).to("cuda", torch.bfloat16)
        call["beta"] = torch.randn(call["g"].shape, generator=generator).to("cuda", torch.bfloat16)
        call |= {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
        call |= {"A_log": torch.linspace(-1, 1, 8, device="cuda"), "dt_bias": torch.linspace(-2, 0, 8, device="cuda")}
    return {**call, "state_v_first": v_first}


def _exact(pool: torch.Tensor, slots: torch.Tensor, call: Call) -> torch.Tensor:
    """One token of every sequence in float64, on a pool ``[P, HV, K, V]`` that is updated in place."""
    q, k, v, g, beta = (call[name].double()[:, 0] for name in ("q", "k", "v", "g", "beta"))
    if call.get("use_gate_in_kernel"):
        g = -call["A_log"].double().exp() * torch.nn.functional.softplus(g + call["dt_bias"].double())
        beta = beta.sigmoid()
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q, k))
    real = slots >= 0
    state = pool[slots.clamp_min(0)] * g.exp()[..., None, None]
    delta = beta[..., None] * (v - (state * k[..., None]).sum(-2))
    state = state + k[..., None] * delta[..., None, :]
    pool[slots[real]] = state[real]
    o: torch.Tensor = (state * q[..., None]).sum(-2)[:, None] * q.shape[-1] ** -0.5
    return o * real[:, None, None, None]


FORMS = [
    pytest.param(*form, marks=pytest.mark.xdist_group(f"decode {form[:3]}"))
    for form in product(BACKENDS, (torch.float32, torch.bfloat16), (False, True), (False, True))
]


@pytest.mark.parametrize(("backend", "pool_dtype", "v_first", "raw"), FORMS)
def test_a_thousand_steps(backend: str, pool_dtype: torch.dtype, v_first: bool, raw: bool, record: Record) -> None:
    form = "[V, K]" if v_first else "[K, V]"
    name = f"decode, {STEPS} steps on {SLOTS} slots: pool {form} in {str(pool_dtype).removeprefix('torch.')}"
    name += ", raw gates" if raw else ""
    generator = torch.Generator().manual_seed(0)
    pool = torch.zeros(SLOTS, 8, 128, 128, dtype=pool_dtype, device="cuda")
    exact = torch.zeros(SLOTS, 8, 128, 128, dtype=torch.float64, device="cuda")
    worst = 0.0
    for step in range(STEPS):
        slots = torch.randperm(SLOTS, generator=generator)[:BATCH]
        slots[torch.rand(BATCH, generator=generator) < 0.2] = -1
        call = _step(step, slots.tolist(), v_first, raw)
        wanted = _exact(exact, slots.cuda(), call)
        before = pool.clone()
        try:
            with kernelreg.use(backend=backend), torch.no_grad():
                o, _ = fused_recurrent_gated_delta_rule(**{**call, "initial_state": pool})
        except kernelreg.NoBackendError as error:
            closest = closest_row(error.resolution.candidates, backend)
            assert closest is not None
            record(name, backend, "refused: " + "; ".join(map(str, closest.reasons)))
            return
        others = torch.ones(SLOTS, dtype=torch.bool)
        others[slots[slots >= 0]] = False
        assert torch.equal(pool[others], before[others])
        assert not o[slots < 0].any()
        worst = max(worst, relative(o, wanted))
    errors = worst, relative(pool, exact.mT if v_first else exact)
    record(name, backend, " / ".join(f"{error:.1e}" for error in errors))
    assert max(errors) <= operation_named("gdn.recurrent").tolerances["bfloat16"].forward
