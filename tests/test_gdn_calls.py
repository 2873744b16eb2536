"""``kernelreg.gdn`` per call: what a call shows of itself, the cached decision, FLA's keywords, and bad arguments."""

from __future__ import annotations

import inspect
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import softplus

import kernelreg
from kernelreg import CallError, gdn
from kernelreg.gdn import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from tests.gdn_cases import expected, gdn_call, relative
from tests.machines import descriptor

#: Dtypes that no tensor of real numbers has, or that no kernel here computes with.
NO_REALS = [torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn]
RAW: dict[str, Any] = {"use_gate_in_kernel": True, "A_log": torch.zeros(4)}
ADAPTER = """
calls = []

def run(q, k, v, g, beta, **options):
    calls.append(options)
    return v, None
"""


@pytest.fixture
def spy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A backend that outranks all others on packed calls of 100 tokens and more, and keeps what it was given."""
    import importlib
    import sys

    (tmp_path / "spy_adapter.py").write_text(ADAPTER)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("spy_adapter", None)
    preference = [{"speedup": 1e6, "source": "a test"}]
    features = sorted(kernelreg.ops.operation_named("gdn").features)
    accepts = {"tokens": {"min": 100}, "features": features}
    undo = kernelreg.register(descriptor("spy", kernel={"accepts": accepts, "preference": preference}))
    yield importlib.import_module("spy_adapter")
    undo()


def test_resolve_like_gives_the_very_call_that_is_made(spy: Any) -> None:
    made: list[kernelreg.Resolution] = []
    undo = kernelreg.on_resolve(made.append)
    call = gdn_call(T=120, edges=[0, 20, 120])
    chunk_gated_delta_rule(**call)
    like = kernelreg.resolve("gdn", like=call)
    undo()
    assert made[0] == like
    assert like.backend == "spy"
    assert like.call == kernelreg.Call(
        operation="gdn.chunk",
        device="cpu",
        dtype="float32",
        gate_dtype="float32",
        state_dtype="float32",
        head_dim_k=32,
        head_dim_v=48,
        heads=2,
        value_heads=4,
        tokens=120,
        sequences=2,
        features=frozenset({"varlen", "initial-state", "final-state", "qk-l2norm", "grouped-value-heads"}),
    )


@pytest.mark.parametrize(
    ("change", "feature"),
    [
        (lambda call: call["k"].requires_grad_(), "backward"),
        (lambda call: call["initial_state"].requires_grad_(), "backward"),
        (
            lambda call: call.update(state_v_first=True, initial_state=call["initial_state"].mT),
            "state-v-first",
        ),
        (lambda call: call.update(use_gate_in_kernel=True, A_log=torch.zeros(4)), "raw-gates"),
        (lambda call: call.update(use_beta_sigmoid_in_kernel=True), "raw-gates"),
    ],
    ids=["k", "h0", "v-first", "gate", "beta"],
)
def test_each_feature_is_seen(change: Any, feature: str) -> None:
    call = gdn_call()
    assert feature not in kernelreg.resolve("gdn", like=call).call.features
    change(call)
    assert feature in kernelreg.resolve("gdn", like=call).call.features
    with torch.no_grad():
        assert "backward" not in kernelreg.resolve("gdn", like=call).call.features


def test_a_decision_is_made_once_and_again_after_a_change(spy: Any) -> None:
    made: list[kernelreg.Resolution] = []
    undo = kernelreg.on_resolve(made.append)
    for tokens in (120, 500, 501):  # no descriptor tells these apart
        chunk_gated_delta_rule(**gdn_call(B=1, T=tokens))
    assert len(made) == 1
    chunk_gated_delta_rule(**gdn_call(B=1, T=99))  # the spy takes 100 and more
    assert [each.backend for each in made] == ["spy", "torch"]
    with kernelreg.use(disable="spy"):
        chunk_gated_delta_rule(**gdn_call(B=1, T=120))
    chunk_gated_delta_rule(**gdn_call(B=1, T=120))
    assert [each.backend for each in made] == ["spy", "torch", "torch"]
    kernelreg.refresh()
    chunk_gated_delta_rule(**gdn_call(B=1, T=120))
    assert len(made) == 4
    undo()


def test_a_changed_environment_holds_from_the_next_resolve_on(spy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    chunk_gated_delta_rule(**gdn_call(T=120))
    monkeypatch.setenv("KERNELREG_DISABLE", "spy")
    kernelreg.resolve("gdn")
    chunk_gated_delta_rule(**gdn_call(T=120))
    assert len(spy.calls) == 1


def test_the_chosen_gets_the_contracts_words_alone(spy: Any) -> None:
    hint = torch.tensor([[0, 0]])
    call = gdn_call(T=120)
    call["initial_state"] = call["initial_state"].mT
    chunk_gated_delta_rule(**call, transpose_state_layout=True, chunk_indices=hint, cp_context=None, head_first=False)
    (options,) = spy.calls
    assert options["state_v_first"] is True
    assert not {"transpose_state_layout", "chunk_indices", "cp_context", "head_first"} & set(options)


@pytest.mark.parametrize("function", [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule])
def test_raw_gates_are_activated_as_fla_does(function: Any) -> None:
    call = gdn_call()
    A_log, dt_bias = torch.rand(4), torch.rand(4)
    raw = {"use_gate_in_kernel": True, "A_log": A_log, "dt_bias": dt_bias, "use_beta_sigmoid_in_kernel": True}
    o, _ = function(**call, **raw, allow_neg_eigval=True)
    plain = {**call, "g": -A_log.exp() * softplus(call["g"] + dt_bias), "beta": 2 * call["beta"].sigmoid()}
    assert relative(o, expected(plain)[0]) <= 1e-5


def test_the_values_of_the_edges_may_come_from_the_cpu() -> None:
    call = gdn_call(edges=[0, 30, 300])
    o, _ = chunk_gated_delta_rule(**call, cu_seqlens_cpu=call["cu_seqlens"].clone())
    assert relative(o, expected(call)[0]) <= 1e-5


def test_names_order_and_defaults_are_flas() -> None:
    ours = inspect.signature(chunk_gated_delta_rule).parameters
    assert list(ours)[:9] == [
        "q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel",
    ]  # fmt: skip
    fla = pytest.importorskip("fla.ops.gated_delta_rule")
    for name in ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"):
        words = {*inspect.signature(getattr(gdn, name)).parameters, *gdn.Options.__annotations__}
        theirs = set(inspect.signature(inspect.unwrap(getattr(fla, name))).parameters)
        assert theirs - words <= {"gk", "gv", "kwargs"}  # per-channel decays are another operation


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"q": [1.0]}, "q is a list; accepted: a tensor"),
        ({"beta": None}, "beta is a NoneType"),
        ({"cu_seqlens_cpu": torch.tensor([0, 300])}, "cu_seqlens_cpu without cu_seqlens"),
        ({"cu_seqlens_cpu": 5}, "cu_seqlens_cpu without cu_seqlens"),
        ({"output_final_state": "no"}, "output_final_state is a str; accepted: True or False"),
        ({"output_final_state": torch.zeros(1)}, "output_final_state is a Tensor; accepted: True or False"),
        ({"use_qk_l2norm_in_kernel": 2}, "use_qk_l2norm_in_kernel is a int; accepted: True or False"),
        ({"state_v_first": [True]}, "state_v_first is a list; accepted: True or False"),
        ({"transpose_state_layout": "no"}, "transpose_state_layout is a str; accepted: True or False"),
        ({"use_gate_in_kernel": "no"}, "use_gate_in_kernel is a str; accepted: True or False"),
        ({"head_first": torch.zeros(1)}, "head_first is a Tensor; accepted: True or False"),
        ({"q": torch.zeros(2, 300, 32)}, r"q is \[2, 300, 32\]"),
        ({"k": torch.zeros(2, 300, 2, 16)}, r"k is \[2, 300, 2, 16\]; accepted: q's"),
        ({"v": torch.zeros(2, 300, 3, 48)}, r"HV \(here 3\) a multiple of H \(2\)"),
        ({"v": torch.zeros(2, 299, 4, 48)}, r"v is \[2, 299, 4, 48\]"),
        ({"g": torch.zeros(2, 300, 2)}, r"g is \[2, 300, 2\]; accepted: \[2, 300, 4\]"),
        ({"beta": torch.zeros(2, 300)}, r"beta is \[2, 300\]"),
        (
            {"initial_state": torch.zeros(2, 4, 48, 32)},
            r"initial_state is \[2, 4, 48, 32\].*\[2, 4, 32, 48\]",
        ),
        ({"v": torch.zeros(2, 300, 4, 48, dtype=torch.float64)}, "one dtype for the three"),
        ({"g": torch.zeros(2, 300, 4, device="meta")}, "g is on meta"),
        ({"cu_seqlens": torch.tensor([0, 300])}, "packed in one row"),
        *(
            (
                {name: torch.zeros(2, 300, 2, 32, dtype=dtype) for name in "qk"}
                | {"v": torch.zeros(2, 300, 4, 48, dtype=dtype)},
                f"q is {dtype}; accepted: bfloat16, float16, float32, float64",
            )
            for dtype in NO_REALS
        ),
        ({"scale": "0.1"}, "scale is '0.1'; accepted: None, or a finite real number"),
        ({"scale": torch.tensor([0.1, 0.2])}, "scale is tensor"),
        ({"scale": float("nan")}, "scale is nan"),
        ({"scale": 10**400}, "scale is 1000"),
        ({"scale": 1j}, "scale is 1j"),
        ({"head_first": True}, "head_first=True"),
        ({"cp_context": object()}, "context parallelism"),
        ({"A_log": torch.zeros(4)}, "without use_gate_in_kernel"),
        ({"use_gate_in_kernel": True}, "without A_log"),
        ({"allow_neg_eigval": True}, "without use_beta_sigmoid_in_kernel"),
        ({"A_log": torch.zeros(3), "use_gate_in_kernel": True}, r"A_log is \[3\]; accepted: \[HV\] = \[4\]"),
        ({"A_log": torch.zeros(1), "use_gate_in_kernel": True}, r"A_log is \[1\]"),
        ({"A_log": [0.0] * 4, "use_gate_in_kernel": True}, "A_log is a list"),
        ({**RAW, "dt_bias": torch.zeros(2, 4)}, r"dt_bias is \[2, 4\]"),
        ({**RAW, "dt_bias": torch.zeros(4, device="meta")}, "dt_bias is on meta; accepted: q's device, cpu"),
    ],
)
def test_arguments_that_break_the_contract_are_named(change: dict[str, Any], told: str) -> None:
    with pytest.raises(CallError, match=told):
        chunk_gated_delta_rule(**{**gdn_call(), **change})
    with pytest.raises(CallError, match=told):
        kernelreg.resolve("gdn", like={**gdn_call(), **change})


@pytest.mark.parametrize("dtype", NO_REALS, ids=str)
@pytest.mark.parametrize("name", ["g", "beta", "initial_state", "A_log", "dt_bias"])
def test_gates_and_states_are_real_numbers(name: str, dtype: torch.dtype) -> None:
    call = {**gdn_call(T=3), **RAW, "dt_bias": torch.zeros(4)}
    with pytest.raises(CallError, match=f"{name} is {dtype}; accepted: bfloat16, float16, float32, float64"):
        chunk_gated_delta_rule(**{**call, name: call[name].to(dtype)})


@pytest.mark.parametrize("scale", [2, -1.5, np.float32(0.5), Fraction(1, 2)], ids=repr)
def test_scale_may_be_any_real_number(spy: Any, scale: Any) -> None:
    chunk_gated_delta_rule(**gdn_call(T=120), scale=scale)
    (options,) = spy.calls
    assert type(options["scale"]) is float
    assert options["scale"] == scale


def test_no_gates_do_not_hide_what_v_is() -> None:
    call = gdn_call()
    with pytest.raises(CallError, match="v is a list; accepted: a tensor"):
        fused_recurrent_gated_delta_rule(call["q"], call["k"], [1.0])  # type: ignore[arg-type]


@pytest.mark.parametrize("edges", [[1, 300], [0, 200, 100, 300], [0, 301]])
@pytest.mark.parametrize("function", [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule])
def test_edges_that_are_none_are_named(edges: list[int], function: Any) -> None:
    call = {**gdn_call(edges=[0, 300], state=False), "cu_seqlens": torch.tensor(edges)}
    with pytest.raises(CallError, match="from 0, never back, and not beyond T = 300"):
        function(**call)
    with pytest.raises(CallError, match="from 0, never back, and not beyond T = 300"):
        kernelreg.resolve("gdn", like=call)


@pytest.mark.parametrize(
    "edges", [torch.tensor([[0, 300]]), torch.tensor([0.0, 300.0]), torch.tensor([], dtype=torch.int32)]
)
def test_edges_of_another_form_are_named(edges: torch.Tensor) -> None:
    with pytest.raises(CallError, match="int32 or int64"):
        chunk_gated_delta_rule(**{**gdn_call(edges=[0, 300]), "cu_seqlens": edges})


def test_an_unknown_keyword_is_refused_with_the_nearest() -> None:
    with pytest.raises(TypeError, match="did you mean 'allow_neg_eigval'"):
        chunk_gated_delta_rule(**gdn_call(), allow_neg_eigvals=True)  # type: ignore[call-arg]


def test_like_refuses_what_the_function_would() -> None:
    with pytest.raises(kernelreg.ConfigurationError, match="missing a required argument: 'beta'"):
        kernelreg.resolve("gdn", like={name: x for name, x in gdn_call().items() if name != "beta"})
    with pytest.raises(kernelreg.ConfigurationError, match="did you mean 'allow_neg_eigval'"):
        kernelreg.resolve("gdn", like={**gdn_call(), "allow_neg_eigvals": True})
    with pytest.raises(kernelreg.ConfigurationError, match="give either it or tokens"):
        kernelreg.resolve("gdn", like=gdn_call(), tokens=3)


def test_a_call_that_nothing_fits_raises_with_every_reason() -> None:
    with kernelreg.use(backend="flash_qla"), pytest.raises(kernelreg.NoBackendError, match="device-type"):
        chunk_gated_delta_rule(**gdn_call())


@pytest.fixture
def narrow(spy: Any) -> Any:
    """Registers a backend that outranks all others on what it accepts, with the spy's adapter."""
    undone = []

    def register(**accepts: Any) -> None:
        preference = [{"speedup": 1e6, "source": "a test"}]
        plain = ["final-state", "grouped-value-heads", "initial-state", "qk-l2norm", "varlen", "raw-gates"]
        kernel = {"accepts": {"features": plain, **accepts}, "preference": preference}
        undone.append(kernelreg.register(descriptor("narrow", adapter="spy_adapter", kernel=kernel)))

    yield register
    for undo in undone:
        undo()


@pytest.mark.parametrize(
    ("accepts", "not_fits"),
    [
        ({"gate_dtype": ["float32"]}, {"g": torch.bfloat16}),
        ({"state_dtype": ["float32"]}, {"initial_state": torch.bfloat16}),
        ({"dtype": ["float32"]}, {"q": torch.float64, "k": torch.float64, "v": torch.float64}),
    ],
)
def test_calls_that_differ_in_a_dtype_are_decided_apart(
    spy: Any, narrow: Any, accepts: dict[str, Any], not_fits: dict[str, torch.dtype]
) -> None:
    narrow(**accepts)
    call = gdn_call(T=40)
    chunk_gated_delta_rule(**call)
    assert len(spy.calls) == 1
    chunk_gated_delta_rule(**{**call, **{name: call[name].to(dtype) for name, dtype in not_fits.items()}})
    assert len(spy.calls) == 1


def test_raw_gates_are_decided_by_what_they_become(spy: Any, narrow: Any) -> None:
    narrow(gate_dtype=["float32"])
    call = gdn_call(T=40)
    call["g"] = call["g"].bfloat16()
    chunk_gated_delta_rule(**call, use_gate_in_kernel=True, A_log=torch.zeros(4))  # becomes float32
    assert len(spy.calls) == 1
    chunk_gated_delta_rule(**call, use_beta_sigmoid_in_kernel=True)  # g stays bfloat16
    assert len(spy.calls) == 1


def test_empty_sequences_are_seen_where_the_host_can_see_them(spy: Any, narrow: Any) -> None:
    narrow()
    chunk_gated_delta_rule(**gdn_call(T=50, edges=[0, 20, 50]))
    assert len(spy.calls) == 1
    chunk_gated_delta_rule(**gdn_call(T=50, edges=[0, 20, 20, 50]))
    assert len(spy.calls) == 1


def test_what_else_asks_for_gradients_or_determinism_is_seen() -> None:
    A_log = torch.zeros(4, requires_grad=True)
    like = {**gdn_call(), "use_gate_in_kernel": True, "A_log": A_log}
    assert "backward" in kernelreg.resolve("gdn", like=like).call.features
    torch.use_deterministic_algorithms(True)
    try:
        assert "deterministic" in kernelreg.resolve("gdn", like=gdn_call()).call.features
    finally:
        torch.use_deterministic_algorithms(False)


def test_edges_changed_behind_torchs_back_and_host_copies_are_read_anew() -> None:
    call = gdn_call(edges=[0, 64, 300])
    chunk_gated_delta_rule(**call)
    call["cu_seqlens"].data[1] = 200  # no version of the tensor tells
    assert relative(chunk_gated_delta_rule(**call)[0], expected(call)[0]) <= 1e-5
    copy = torch.tensor([0, 100, 300])
    o, _ = chunk_gated_delta_rule(**call, cu_seqlens_cpu=copy)
    assert relative(o, expected({**call, "cu_seqlens": copy})[0]) <= 1e-5
    assert relative(chunk_gated_delta_rule(**call)[0], expected(call)[0]) <= 1e-5


@pytest.mark.parametrize("copy", [torch.tensor([0, 300]), [0, 64, 300], torch.tensor([0.0, 64.0, 300.0])], ids=str)
def test_a_host_copy_of_another_form_is_named(copy: Any) -> None:
    with pytest.raises(CallError, match="cu_seqlens_cpu is"):
        chunk_gated_delta_rule(**gdn_call(edges=[0, 64, 300]), cu_seqlens_cpu=copy)


def test_raw_gates_keep_float64_and_the_tail_out_of_gradients() -> None:
    call = gdn_call(T=100, edges=[0, 30, 80], dtype=torch.float64)
    A_log, dt_bias = (torch.rand(4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    raw: dict[str, Any] = {"use_gate_in_kernel": True, "A_log": A_log, "dt_bias": dt_bias}
    plain = {**call, "g": -A_log.exp() * softplus(call["g"] + dt_bias)}
    assert relative(chunk_gated_delta_rule(**call, **raw)[0], expected(plain)[0]) <= 1e-10
    call["g"][:, 80:] = float("nan")
    o, _ = chunk_gated_delta_rule(**call, **raw)
    assert all(torch.isfinite(grad).all() for grad in torch.autograd.grad(o.sum(), (A_log, dt_bias)))


@pytest.mark.parametrize("function", [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule])
def test_a_call_without_tokens_can_be_followed_by_autograd(function: Any) -> None:
    call = gdn_call(T=0)
    call["v"].requires_grad_()
    o, _ = function(**call)
    o.sum().backward()
    assert call["v"].grad is not None


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_libraries_get_clean_sequences_and_callers_the_contracts_answer(dtype: torch.dtype) -> None:
    """Edges are int64 for the library whatever the caller's are: another dtype would be another compilation."""
    import importlib

    run_clean = importlib.import_module("kernelreg_backends._packed").run_clean
    torch_adapter = importlib.import_module("kernelreg_backends.torch.adapter")
    for edges in ([0, 0, 30, 30, 80], [0, 100], [0, 0], [0]):
        call = gdn_call(T=100, edges=edges, normalised=True)
        call["cu_seqlens"] = call["cu_seqlens"].to(dtype)

        def library(q: Any, k: Any, v: Any, g: Any, beta: Any, packed: torch.Tensor, state: Any) -> Any:
            assert (packed.diff() > 0).all()
            assert packed[-1] == q.shape[1]
            assert packed.dtype == torch.int64
            words = {"cu_seqlens": packed, "initial_state": state, "output_final_state": True}
            return torch_adapter.chunk_gated_delta_rule(q, k, v, g, beta, **words)

        tensors = [call[name] for name in ("q", "k", "v", "g", "beta")]
        words = {name: call[name] for name in ("cu_seqlens", "initial_state", "output_final_state")}
        o, final = run_clean(library, *tensors, cu_seqlens_cpu=None, state_v_first=False, **words)
        wanted_o, wanted_final = expected(call)
        assert relative(o, wanted_o) <= 1e-5
        assert relative(final, wanted_final) <= 1e-5
