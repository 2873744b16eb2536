"""The automatic choice beside every kernel and beside FLA's own entry point, over the heads and lengths of real models.

    python benchmarks/auto_choice.py [--models 27B,397B/122B] [--tp 1,2] [--warm 12] [--limit 240] [--output FILE.md]

All sides take turns in one process on the same tensors: ``kernelreg.gdn`` with nothing forced, each kernel's
adapter called directly, and ``fla.ops.gated_delta_rule.chunk_gated_delta_rule`` as installed, with FlashQLA behind
its dispatcher. Ratios are of medians: the choice over the best kernel (1.00 is the best there is), and FLA's own entry
point over the choice (above 1 where kernelreg is faster). ``KERNELREG_PROFILE`` names the profile to choose by. The
tables are written as they grow, the head shapes that are furthest apart first, and what there was no time for is named.
"""

from __future__ import annotations

import argparse
import datetime
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import kernelreg
from kernelreg.gdn import chunk_gated_delta_rule
from kernelreg.measure import Effort, arguments, side_by_side
from kernelreg.models import Shape
from kernelreg.testing.ground import measured_on
from kernelreg.warming import tasks_of, warm
from kernelreg.workloads import Spot, most_telling_first, workloads_named

#: H and HV of each family, by the name that the issue tracker of LightLLM's patch gives it.
MODELS = {"27B": Shape(16, 48), "9B/4B": Shape(16, 32), "397B/122B": Shape(16, 64)}
#: Tokens of each sequence, and sequences.
CALLS = ((256, 1), (1024, 1), (2048, 1), (4096, 1), (8192, 1), (16384, 1), (32768, 1), (4096, 2), (8192, 2))
BACKENDS = ("fla", "flash_qla", "flashinfer")
AUTO, OWN = ("kernelreg", "automatic"), ("fla", "own entry point")
WITHIN = 0.03

Row = tuple[str, str]


def plan(given: argparse.Namespace) -> list[Spot]:
    """The calls, those of equal local shapes once, the most telling first."""
    layers = [Shape(*given.heads)] if given.heads else [MODELS[name] for name in given.models]
    shapes = dict.fromkeys(layer.split(tp) for layer in layers for tp in given.tp)
    shapes = dict.fromkeys(sorted(shapes, key=lambda each: (each.value_heads, each.heads)))
    dense, packed = workloads_named(["prefill", "prefill-varlen"])
    spots = [
        Spot(
            workload=packed if several > 1 else dense,
            shape=shape,
            dtype="bfloat16",
            tokens=each * several,
            sequences=several,
        )
        for shape in shapes
        for each, several in CALLS
        if each in given.tokens
    ]
    return most_telling_first(spots)


def flas_own() -> Callable[..., Any] | None:
    """FLA's public function, as its users call it; None where FLA is not installed."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as own
    except ImportError:
        return None
    function: Callable[..., Any] = own
    return function


def sides(call: dict[str, Any], own: Callable[..., Any] | None) -> tuple[dict[Row, Callable[[], object]], str]:
    """What takes turns, and the kernel that is chosen."""

    words = {"scale": None, "state_v_first": False, "initial_state": None, "cu_seqlens": None, **call}

    def bare(backend: str) -> Callable[[], object]:
        """The backend's adapter, called with no dispatch before it."""
        with kernelreg.use(backend=backend):
            function = kernelreg.resolve("gdn", like=call).function
        return lambda: function(**words)

    runs: dict[Row, Callable[[], object]] = {AUTO: lambda: chunk_gated_delta_rule(**call)}
    found = kernelreg.resolve("gdn", like=call)
    for backend in [*BACKENDS, *([] if call["q"].is_cuda else ["torch"])]:  # elsewhere it is the last resort
        first = next((each for each in found.candidates if each.backend == backend and each.accepted), None)
        if first is not None:
            runs[backend, first.kernel] = bare(backend)
    if own is not None and call["q"].is_cuda:
        runs[OWN] = lambda: own(**call)
    return runs, f"{found.backend} {found.kernel}"


def row(spot: Spot, times: dict[Row, list[float]], chosen: str, failed: dict[Row, str]) -> dict[str, Any]:
    """A point's figures as data, times in microseconds."""
    middle = {side: statistics.median(each) * 1e6 for side, each in times.items()}
    spread = {side: (max(each) - min(each)) / statistics.median(each) for side, each in times.items()}
    kernels = {" ".join(side): each for side, each in middle.items() if side not in (AUTO, OWN)}
    told: dict[str, Any] = {
        "heads": [spot.shape.heads, spot.shape.value_heads],
        "tokens": spot.tokens,
        "sequences": spot.sequences,
        "chosen": chosen,
        "automatic_us": middle.get(AUTO),
        "automatic_spread": spread.get(AUTO),
        "kernels_us": kernels,
        "own_us": middle.get(OWN),
        "own_spread": spread.get(OWN),
        "failed": {" ".join(side): text for side, text in failed.items()},
    }
    if AUTO in middle and kernels:
        # By the times of the kernels alone: the choice is one of them, and its own turn differs from theirs by noise.
        if chosen in kernels:
            told["choice_over_best"] = kernels[chosen] / min(kernels.values())
        told["automatic_over_best"] = middle[AUTO] / min(kernels.values())
    if AUTO in middle and OWN in middle:
        told["own_over_automatic"] = middle[OWN] / middle[AUTO]
    return told


def lines_of(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The table and what it comes to."""
    yield "| H, HV | tokens | chosen | automatic | kernels | FLA's own entry point | over the best | × FLA's own |"
    yield "|---|---|---|---|---|---|---|---|"
    for each in rows:
        H, HV = each["heads"]
        several = f"{each['sequences']} × " if each["sequences"] > 1 else ""
        kernels = ", ".join(f"{name} {micros:.1f}" for name, micros in each["kernels_us"].items())
        cells = [
            f"{H}, {HV}",
            f"{several}{each['tokens'] // each['sequences']:,}",
            each["chosen"],
            _time(each["automatic_us"], each["automatic_spread"]),
            kernels + "".join(f"; {name} failed: {text}" for name, text in each["failed"].items()),
            _time(each["own_us"], each["own_spread"]),
            f"{each['automatic_over_best']:.3f}" if "automatic_over_best" in each else "–",
            f"{each['own_over_automatic']:.2f}" if "own_over_automatic" in each else "–",
        ]
        yield "| " + " | ".join(cells) + " |"
    yield ""
    for name, text in told_summary(summary(rows)):
        yield f"{name}: {text}."


def _time(micros: float | None, spread: float | None) -> str:
    return "–" if micros is None or spread is None else f"{micros:.1f} µs ± {spread:.0%}"


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The two aims' figures. A point is within 3% where the automatic call is, or where the chosen kernel is the best.

    The automatic call and the kernel that it chooses are the same code, so that where their two medians differ by more,
    that is noise; both figures are kept.
    """
    over = [each["automatic_over_best"] for each in rows if "automatic_over_best" in each]
    choice = [each["choice_over_best"] for each in rows if "choice_over_best" in each]
    own = [each["own_over_automatic"] for each in rows if "own_over_automatic" in each]
    return {
        "points": len(rows),
        "automatic_within": sum(each <= 1 + WITHIN for each in over),
        "automatic_worst": max(over, default=None),
        "choice_within": sum(each <= 1 + WITHIN for each in choice),
        "choice_worst": max(choice, default=None),
        "own_geometric_mean": statistics.geometric_mean(own) if own else None,
        "own_least": min(own, default=None),
        "own_points": len(own),
    }


def told_summary(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if found["automatic_worst"] is not None:
        yield (
            "Automatic call within 3% of the best kernel's",
            f"{found['automatic_within']} of {found['points']} points, the worst {found['automatic_worst']:.3f}",
        )
    if found["choice_worst"] is not None:
        yield (
            "Chosen kernel within 3% of the best one, by the kernels' own times",
            f"{found['choice_within']} of {found['points']} points, the worst {found['choice_worst']:.3f}",
        )
    if found["own_geometric_mean"] is not None:
        yield (
            "FLA's own entry point over the automatic choice, geometric mean",
            f"× {found['own_geometric_mean']:.2f} over {found['own_points']} points, least {found['own_least']:.2f}",
        )


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def names(text: str) -> list[str]:
    return text.split(",")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=names, default=list(MODELS), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--heads", type=numbers, metavar="H,HV", help="one head shape in their place")
    parser.add_argument("--tp", type=numbers, default=[1, 2, 4, 8], help="devices that share the heads (1,2,4,8)")
    parser.add_argument("--tokens", type=numbers, default=sorted({each for each, _ in CALLS}), help="of a sequence")
    parser.add_argument("--warm", type=int, default=0, metavar="N", help="compile first, in so many processes at once")
    parser.add_argument(
        "--limit", type=float, default=math.inf, metavar="S", help="begin no point after so many seconds"
    )
    parser.add_argument("--repeats", type=int, default=9, help="rounds of each point (9)")
    parser.add_argument("--seconds", type=float, default=0.02, help="of a side's round (0.02)")
    parser.add_argument("--output", type=Path, help="also write the table to this file")
    given = parser.parse_args()
    unknown = [name for name in given.models if name not in MODELS]
    if unknown:
        parser.error(f"--models {unknown[0]}; accepted: {', '.join(MODELS)}")
    until = time.monotonic() + given.limit
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    left = plan(given)
    total = len(left)
    os.environ.setdefault("FLA_FLASH_QLA", "1")
    if given.warm:
        warm(
            tasks_of(left, BACKENDS[:2], device), given.warm, until, lambda text: print(f"compiled: {text}", flush=True)
        )
    own = flas_own()
    rows: list[dict[str, Any]] = []
    effort = Effort(given.repeats, given.seconds)
    wait: Callable[[], object] = torch.cuda.synchronize if device != "cpu" else lambda: None
    while left and time.monotonic() < until:
        spot = left.pop(0)
        with torch.no_grad():
            call = arguments(spot, device)
            runs, chosen = sides(call, own)
            times, failed = side_by_side(runs, effort, wait)
        rows.append(row(spot, times, chosen, failed))
        print(list(lines_of(rows))[1 + len(rows)], flush=True)
        if given.output:
            write(given.output, rows, left)
    print("\n".join(text(rows, left)[-8:]))
    print(f"{len(rows)} of {total} points measured")
    return 0 if rows else 1


def text(rows: list[dict[str, Any]], left: list[Spot]) -> list[str]:
    """The whole page."""
    told = [
        f"# The automatic choice beside every kernel and FLA's own entry point, {datetime.date.today().isoformat()}",
        "",
        f"Made by `python {' '.join(sys.argv)}`: K = V = 128, bfloat16, states in and out. All sides in turn in one "
        "process; times are medians in microseconds, ± the range of the rounds over the median.",
        "",
        f"Ranked by: {ranked_by()}.",
        "",
        measured_on(kernelreg.facts()),
        "",
        *lines_of(rows),
    ]
    return [*told, "", f"Not measured, for lack of time: {'; '.join(map(str, left))}."] if left else told


def ranked_by() -> str:
    """The profile that the choice rests on, by its file's name."""
    evidence = kernelreg.session.session.grounds().evidence
    return "the descriptors, no profile" if evidence is None else Path(evidence.name).name


def write(path: Path, rows: list[dict[str, Any]], left: list[Spot]) -> None:
    path.write_text("\n".join(text(rows, left)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
