"""FLA's and FlashQLA's adapters on the CPU, over stand-ins: which of a library's functions a call goes through.

The stand-ins compute with the float64 recurrence from what they are given, so that a wrong table shows in the numbers.
The libraries' own kernels: tests/test_real_packages.py under Triton's interpreter, tests/gpu on a GPU.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import kernelreg
from kernelreg.gdn import plan
from kernelreg.ops.gdn_reference import reference_gated_delta_rule
from tests.gdn_cases import EXACT, Call, expected, gdn_call, relative

LAYOUTS = ([0, 3, 3, 70, 135], [0, 200], [0, 0, 1], [0], [0, 64, 128, 129, 130, 190])
TOKENS, SEQUENCES = 200, 5

FLA_CHUNK = """
import functools
import torch
from tests.test_below_autograd import kept, recurrence

def l2norm_fwd(x):
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt(), None

def chunk_local_cumsum(g, cu_seqlens=None, chunk_indices=None): return g

def recompute_w_u_fwd(k): return k

def chunk_gated_delta_rule_fwd_intra(k): return recompute_w_u_fwd(k)

def chunk_bwd_dqkwg(): raise AssertionError

def prepare_chunk_offsets(cu_seqlens, chunk_size): raise AssertionError("by identity")

def chunk_gated_delta_rule_fwd_h(cu_seqlens):
    return None if cu_seqlens is None else prepare_chunk_offsets(cu_seqlens, 64)

def chunk_fwd_o(*given, **words): return recurrence(*given, **words)

def chunk_gated_delta_rule_fwd(
    q, k, v, g, beta, scale, initial_state, output_final_state, state_v_first=False, cu_seqlens=None{indices},
):
    kept.append("forward")
    offsets = chunk_gated_delta_rule_fwd_h(cu_seqlens)
    g, k = chunk_local_cumsum(g), chunk_gated_delta_rule_fwd_intra(k)
    o, final = chunk_fwd_o(q, k, v, g, beta, scale, initial_state, cu_seqlens, chunk_indices, offsets, state_v_first)
    return g, o, None, final if output_final_state else None, initial_state, None

def chunk_gated_delta_rule(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    cu_seqlens=None, state_v_first=False,
):
    kept.append("entry point")
    from kernelreg.ops.gdn_reference import reference_gated_delta_rule
    o, final = reference_gated_delta_rule(
        q, k, v, g, beta, scale, initial_state, use_qk_l2norm_in_kernel, cu_seqlens, state_v_first
    )
    return o.to(q.dtype), final.float()
"""

#: What the stand-ins were called for.
kept: list[str] = []


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    state: Tensor | None,
    edges: Tensor | None,
    indices: Tensor | None,
    offsets: Tensor | None,
    v_first: bool,
) -> tuple[Tensor, Tensor]:
    """What kernels give that read edges and tables as the libraries' do: garbage where no row of a table reaches."""
    assert all(x.is_contiguous() for x in (q, k, v, g, beta, *([] if state is None else [state])))
    words = {"scale": scale, "initial_state": state, "cu_seqlens": edges, "state_v_first": v_first}
    o, final = reference_gated_delta_rule(q, k, v, g, beta, **words)  # type: ignore[arg-type]
    if edges is not None:
        assert indices is not None
        assert offsets is not None
        assert edges.dtype == indices.dtype == offsets.dtype == torch.int64
        reached = torch.full(o.shape[1:2], float("nan"), dtype=o.dtype)
        spans = list(pairwise(edges.tolist()))
        for row, (sequence, number) in enumerate(indices.tolist()):
            start, end = spans[sequence]
            tokens = slice(start + 64 * number, min(start + 64 * number + 64, end))
            if tokens.start < end:
                assert row == offsets[sequence] + number
                reached[tokens] = 0
        o = o + reached[None, :, None, None]
    return o.to(q.dtype), final.float()


def forget(*names: str) -> None:
    for name in [each for each in sys.modules if each.startswith(names)]:
        del sys.modules[name]


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """FLA's adapter over a stand-in; without ``chunk_indices`` where the parameter says so."""
    old = getattr(request, "param", None) == "old"
    package = tmp_path / "fla" / "ops" / "gated_delta_rule"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").write_text("")
    source = FLA_CHUNK.replace("{indices}", "" if old else ", chunk_indices=None")
    source = source.replace("chunk_indices, offsets", "None, None") if old else source
    (package / "chunk.py").write_text(source)
    (package / "__init__.py").write_text("def fused_recurrent_gated_delta_rule(q, k, v): ...\n")
    with monkeypatch.context() as patched:
        for name in [each for each in sys.modules if each == "fla" or each.startswith("fla.")]:
            patched.delitem(sys.modules, name)
        patched.syspath_prepend(str(tmp_path))
        forget("kernelreg_backends.fla.")
        kept.clear()
        yield importlib.import_module("kernelreg_backends.fla.adapter")
        forget("kernelreg_backends.fla.", "fla.")
        sys.modules.pop("fla", None)
    importlib.invalidate_caches()


@pytest.fixture
def flash_qla(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Any]:
    """FlashQLA's adapter over a stand-in; with other kernels where the parameter says so."""
    place = "flash_qla.ops.gated_delta_rule.chunk"
    old = getattr(request, "param", None) == "old"

    def cumulate(H, chunk_size, accum_dtype, g_dtype, seqlen_dtype, is_varlen, reverse, zero_last_chunk):  # type: ignore[no-untyped-def]
        def run(g: Tensor, *rest: Any) -> None:
            rest[-1 if is_varlen else 0].copy_(g)

        return run

    def solve(H, Hg, DK, chunk_size, accum_dtype, qkva_dtype, b_dtype, seqlen_dtype, is_varlen):  # type: ignore[no-untyped-def]
        def run(k: Tensor, beta: Tensor, *rest: Any) -> None:
            tables.append(rest[1] if is_varlen else None)

        return run

    def scan(  # type: ignore[no-untyped-def]
        H, Hg, DK, DV, chunk_size, scale, accum_dtype, qkva_dtype, g_dtype, b_dtype, h0_dtype, ht_dtype, h_dtype,
        o_dtype, seqlen_dtype, use_initial_state, store_final_state, store_h, store_o, is_varlen, is_cp, state_v_first,
        block_DV=128,
    ):  # fmt: skip
        def run(q: Tensor, k: Tensor, v: Tensor, a: Tensor, g: Tensor, b: Tensor, *rest: Any) -> None:
            kept.append("kernels")
            h0, edges, offsets, _, _, o, _, ht = rest
            start = h0 if use_initial_state else None
            indices = tables.pop()
            if not is_varlen:
                edges = offsets = None
            out, final = recurrence(q, k, v, g, b, scale, start, edges, indices, offsets, state_v_first)
            o.copy_(out)
            ht.copy_(final)

        return run

    def entry_point(**words: Any) -> tuple[Tensor, Tensor]:
        kept.append("entry point")
        told = inspect.signature(reference_gated_delta_rule).parameters.keys() & words.keys()
        o, final = reference_gated_delta_rule(**{name: words[name] for name in told})
        return o.to(words["q"].dtype), final.float()

    def made(function: Callable[..., Any]) -> Any:
        """As ``tilelang.jit`` leaves it: callable, with the parameters beside it."""
        names = list(inspect.signature(function).parameters)
        given = dict.fromkeys(names[:-1] if old else names)
        return type("Made", (), {"__call__": staticmethod(function), "signature": SimpleNamespace(parameters=given)})()

    def fused_gdr_fwd() -> None: ...

    tables: list[Tensor | None] = []
    fused_gdr_fwd.__module__ = f"{place}.hopper.fused_fwd"
    modules: dict[str, dict[str, Any]] = {
        "flash_qla": {"chunk_gated_delta_rule": entry_point},
        "flash_qla.utils": {"l2norm_fwd": lambda x: (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt(), None)},
        place: {"fused_gdr_fwd": fused_gdr_fwd},
        "flash_qla.ops.utils.cumsum": {"tilelang_chunk_local_cumsum": made(cumulate)},
        f"{place}.hopper.kkt_solve": {"tilelang_kkt_solve": made(solve)},
        f"{place}.hopper.fused_fwd": {"tilelang_fused_chunk_gdr_fwd": made(scan), "TARGET_NUM_CTAS": 92},
    }
    parents = {".".join(name.split(".")[:end]) for name in modules for end in range(1, name.count(".") + 1)}
    for name in sorted({*modules, *parents}):
        module = ModuleType(name)
        module.__path__ = []
        vars(module).update(modules.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)
    forget("kernelreg_backends.flash_qla.")
    kept.clear()
    adapter: Any = importlib.import_module("kernelreg_backends.flash_qla.adapter")
    monkeypatch.setattr(adapter, "_capability", lambda device: (9, 0))
    yield adapter
    forget("kernelreg_backends.flash_qla.")


def call_of(seed: int, end: int) -> tuple[Call, Call]:
    """A call with NaN behind its last sequence, and what of it the reference may see."""
    call = gdn_call(B=1, T=TOKENS, H=1, HV=2, K=128, V=128, seed=seed)
    call["initial_state"] = torch.randn(SEQUENCES, 2, 128, 128, generator=torch.Generator().manual_seed(seed))
    seen = {name: value.clone() if isinstance(value, Tensor) else value for name, value in call.items()}
    for name in ("q", "k", "v", "g", "beta"):
        call[name][:, end:] = float("nan")
        seen[name][:, end:] = 0
    return call, seen


@pytest.fixture(params=["fla", "flash_qla"])
def adapter(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("planned", [False, True], ids=["edges", "plan"])
def test_a_batch_reaches_the_kernels_whole(
    adapter: Any, planned: bool, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct = importlib.import_module("kernelreg_backends._direct")
    for module in (direct, adapter):
        monkeypatch.setattr(module, "captured", lambda x: captured)
    held = plan([0], max_tokens=TOKENS, max_sequences=SEQUENCES, device="cpu")
    for seed, edges in enumerate(LAYOUTS):
        held.update(edges)
        call, seen = call_of(seed, edges[-1])
        own = held.cu_seqlens if planned else held.cu_seqlens.clone()
        words = {"cu_seqlens": own, "cu_seqlens_cpu": held.cu_seqlens_cpu if planned else None}
        with torch.no_grad():
            o, final = adapter.chunk_gated_delta_rule(**call, **words)
        wanted_o, wanted_final = expected({**seen, "cu_seqlens": held.cu_seqlens_cpu})
        assert relative(o, wanted_o) <= EXACT[torch.float32]
        assert relative(final, wanted_final) <= EXACT[torch.float32]
        assert not o[:, edges[-1] :].any()
    assert set(kept) == {"forward" if "forward" in kept else "kernels"}


@pytest.mark.parametrize("v_first", [False, True])
def test_a_dense_call_goes_past_autograd_where_nothing_needs_it(adapter: Any, v_first: bool) -> None:
    call = gdn_call(B=2, T=70, H=1, HV=2, K=128, V=128)
    wide = torch.cat([call["q"], call["q"]], -1)
    call |= {"q": wide[..., :128], "scale": 0.25, "state_v_first": v_first}  # strided
    o, final = adapter.chunk_gated_delta_rule(**call)
    wanted = expected(call)
    assert max(relative(o, wanted[0]), relative(final, wanted[1])) <= EXACT[torch.float32]
    assert kept in (["forward"], ["kernels"])
    kept.clear()
    call["v"].requires_grad_()
    o, _ = adapter.chunk_gated_delta_rule(**call)
    assert o.requires_grad
    assert kept == ["entry point"]
    kept.clear()
    with torch.no_grad():
        adapter.chunk_gated_delta_rule(**call)
    assert kept in (["forward"], ["kernels"])


@pytest.mark.parametrize(("fla", "flash_qla"), [("old", "old")], indirect=True)
@pytest.mark.parametrize("name", ["fla", "flash_qla"])
def test_a_release_put_together_otherwise_is_called_at_its_entry_point(
    name: str, fla: Any, flash_qla: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = {"fla": fla, "flash_qla": flash_qla}[name]
    call, seen = call_of(0, 135)
    edges = torch.tensor([0, 3, 3, 70, 100, 135])
    with torch.no_grad():
        o, final = adapter.chunk_gated_delta_rule(**call, cu_seqlens=edges)
        wanted = expected({**seen, "cu_seqlens": edges})
        assert max(relative(o, wanted[0]), relative(final, wanted[1])) <= EXACT[torch.float32]
        assert kept == ["entry point"]
        monkeypatch.setattr(adapter, "captured", lambda x: True)
        with pytest.raises(kernelreg.KernelregError, match="reads cu_seqlens on the host"):
            adapter.chunk_gated_delta_rule(**call, cu_seqlens=edges)
    assert kept == ["entry point"]


def test_flash_qla_cuts_long_sequences_in_parts_unless_there_is_a_plan(
    flash_qla: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash_qla, "WITHOUT_PARTS", 100)
    call, _ = call_of(0, TOKENS)
    held = plan([0, 150, 200, 200, 200, 200], device="cpu")
    with torch.no_grad():
        flash_qla.chunk_gated_delta_rule(**call, cu_seqlens=held.cu_seqlens.clone())
        flash_qla.chunk_gated_delta_rule(**call, cu_seqlens=held.cu_seqlens, cu_seqlens_cpu=held.cu_seqlens_cpu)
    assert kept == ["entry point", "kernels"]


def test_a_scale_of_zero_gives_zeros(adapter: Any) -> None:
    call = gdn_call(B=1, T=70, H=1, HV=2, K=128, V=128)
    o, final = adapter.chunk_gated_delta_rule(**call, scale=0.0)
    assert not o.any()
    assert relative(final, expected(call)[1]) <= EXACT[torch.float32]
