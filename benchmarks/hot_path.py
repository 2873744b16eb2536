"""What a call costs before its kernel: kernelreg's dispatch beside FLA's, with kernels that do nothing.

    python benchmarks/hot_path.py [--output FILE.md]

All run in turn in one process on the same tensors. A figure is the median over rounds of this thread's processor time
of one call; the spread is (maximum − minimum) / median of the rounds. "over" is what a call costs beyond calling the
kernel itself. A form reads what descriptors can tell apart: four attributes of each tensor, and whether gradients,
determinism and capture are on.
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import kernelreg
from kernelreg.forms import form_of
from kernelreg.gdn import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from kernelreg.ops import operation_named
from kernelreg.testing.ground import measured_on

ROUNDS, CALLS = 21, 5000


def nothing(*tensors: Any, **words: Any) -> tuple[None, None]:
    """A kernel that takes anything."""
    return None, None


@contextmanager
def doing_nothing() -> Iterator[None]:
    """A backend whose kernels do nothing, forced."""
    module = ModuleType("kernelreg_benchmark_nothing")
    module.run = nothing  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    kernels = [
        {
            "operation": name,
            "name": "nothing",
            "function": "run",
            "accepts": {"features": sorted(operation_named(name).features)},
            "preference": [{"speedup": 1.0, "source": "a benchmark"}],
        }
        for name in ("gdn.chunk", "gdn.recurrent")
    ]
    undo = kernelreg.register({"schema": 1, "name": "nothing", "adapter": module.__name__, "kernel": kernels})
    try:
        with kernelreg.use(backend="nothing"):
            yield
    finally:
        undo()


def prefill(device: str) -> dict[str, Any]:
    """A Qwen3-Next layer's prefill of 1,024 tokens."""
    q = torch.zeros(1, 1024, 16, 128, device=device, dtype=torch.bfloat16)
    v = torch.zeros(1, 1024, 32, 128, device=device, dtype=torch.bfloat16)
    g = torch.zeros(1, 1024, 32, device=device)
    return {"q": q, "k": q.clone(), "v": v, "g": g, "beta": g.clone()}


def decode(device: str) -> dict[str, Any]:
    """A decode step of 8 sequences on a pool, with raw gates."""
    q = torch.zeros(8, 1, 16, 128, device=device, dtype=torch.bfloat16)
    v = torch.zeros(8, 1, 32, 128, device=device, dtype=torch.bfloat16)
    g = torch.zeros(8, 1, 32, device=device, dtype=torch.bfloat16)
    heads = torch.zeros(32, device=device)
    return {
        "q": q,
        "k": q.clone(),
        "v": v,
        "g": g,
        "beta": g.clone(),
        "initial_state": torch.zeros(16, 32, 128, 128, device=device),
        "state_indices": torch.arange(8, device=device),
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "A_log": heads,
        "dt_bias": heads.clone(),
        "use_qk_l2norm_in_kernel": True,
    }


def flas_dispatcher(accepting: bool) -> Callable[..., Any] | None:
    """FLA's own dispatch around a kernel that does nothing; None where there is none, or it does not take the call.

    Args:
        accepting: FlashQLA is on and takes the call, and is a kernel that does nothing as well.
    """
    os.environ["FLA_FLASH_QLA"] = str(int(accepting))
    try:
        import fla.ops.gated_delta_rule  # noqa: F401
        from fla.backends import dispatch
        from fla.ops.gated_delta_rule.backends.flash_qla import FlashQLABackend
    except ImportError:
        return None
    taken: list[object] = []

    def chunk_gated_delta_rule(*tensors: Any, **words: Any) -> tuple[None, None]:
        return None, None

    def flash_qla(self: object, *tensors: Any, **words: Any) -> tuple[None, None]:
        taken.append(self)
        return None, None

    FlashQLABackend.chunk_gated_delta_rule = flash_qla
    dispatched = dispatch("gated_delta_rule")(chunk_gated_delta_rule)
    with torch.no_grad():
        dispatched(**prefill("cuda" if torch.cuda.is_available() else "cpu"))
    return dispatched if bool(taken) is accepting else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, help="write the table to this file as well")
    asked = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lines = [
        f"# What a call costs before its kernel, {datetime.date.today().isoformat()}",
        "",
        f"Made by `python {' '.join(sys.argv)}`: kernels that do nothing, tensors on {device}; processor "
        f"time, medians of {ROUNDS} rounds of {CALLS} calls, the sides in turn.",
        "",
        measured_on(kernelreg.facts()),
        "",
    ]
    lines += ["| what | µs a call | over the kernel, µs | spread |", "|---|---|---|---|"]
    call, step = prefill(device), decode(device)
    with torch.no_grad(), doing_nothing():
        held = kernelreg.resolve("gdn", like=call).function
        names = ("initial_state", "cu_seqlens", "output_final_state", "use_qk_l2norm_in_kernel", "state_v_first")
        form_words = {"words": dict.fromkeys(names), "options": {}, "override": None}
        sides: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
            "the kernel, called": (nothing, call),
            "a held `Resolution.function`": (held, call),
            "`kernelreg.gdn`, prefill": (chunk_gated_delta_rule, call),
            "of that, the form that the look-up takes": (form_of, {**call, **form_words}),
        }
        flas = {f"FLA's dispatcher, FlashQLA {state}": flas_dispatcher(state == "on") for state in ("off", "on")}
        sides |= {name: (run, call) for name, run in flas.items() if run is not None}
        if device == "cuda":  # decode's slots lie on the host otherwise, and are looked up
            sides["`kernelreg.gdn`, decode from a pool"] = (fused_recurrent_gated_delta_rule, step)
        times = timed(sides)
    base = statistics.median(times["the kernel, called"])
    for name, rounds in times.items():
        median = statistics.median(rounds)
        spread = (max(rounds) - min(rounds)) / median
        lines.append(f"| {name} | {median:.2f} | {median - base:.2f} | {spread:.0%} |")
    ours = statistics.median(times["`kernelreg.gdn`, prefill"]) - base
    for name in flas:
        if name in times:
            lines += ["", f"{name}, over kernelreg's: × {(statistics.median(times[name]) - base) / ours:.1f}"]
    text = "\n".join(lines)
    print(text)
    if asked.output:
        asked.output.write_text(text + "\n", encoding="utf-8")


def timed(sides: dict[str, tuple[Callable[..., Any], dict[str, Any]]]) -> dict[str, list[float]]:
    """Microseconds a call, of each side in each round, the sides in turn."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(ROUNDS + 1):
        for name, (run, call) in sides.items():
            start = time.thread_time()
            for _ in range(CALLS):
                run(**call)
            if number:  # the first round warms up
                times[name].append((time.thread_time() - start) / CALLS * 1e6)
    return times


if __name__ == "__main__":
    main()
