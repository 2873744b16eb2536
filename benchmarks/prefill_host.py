"""What a prefill call costs with its host work: kernelreg beside FLA's and FlashQLA's own entry points, on a GPU.

    python benchmarks/prefill_host.py [--output FILE.md]

All sides run in turn in one process on the same tensors, calls one after the other as a model's layers make them. Each
call is right to the operation's tolerance against the float64 recurrence, or the script ends with an error.
"""

from __future__ import annotations

import argparse
import cProfile
import datetime
import os
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import kernelreg
from kernelreg.gdn import chunk_gated_delta_rule, plan
from kernelreg.ops import operation_named
from kernelreg.testing.ground import measured_on
from kernelreg.verify.inputs import gdn_call
from kernelreg.verify.judge import expected, relative

HEADS: dict[str, Any] = {"H": 16, "HV": 32, "K": 128, "V": 128, "dtype": torch.bfloat16, "device": "cuda"}
#: Tokens and sequences; one sequence is a dense call.
SHAPES = ((1024, 1), (4096, 1), (1024, 8), (4096, 8))
#: Functions of a profile that are told.
MOST = 12
#: Calls that one graph holds, as layers of a model.
LAYERS = 16

Run = Callable[[], tuple[Tensor, Any]]


class Side(NamedTuple):
    """One way to make a call.

    Attributes:
        name: as the table has it.
        run: the call; of a graph, the replay of ``calls`` of them.
        library: it is a library's own entry point.
        captured: it is a graph.
        calls: calls that one run makes.
    """

    name: str
    run: Run
    library: bool = False
    captured: bool = False
    calls: int = 1


def libraries() -> dict[str, Callable[..., Any]]:
    """The libraries' own entry points that can be imported; FLA's without its dispatch to FlashQLA."""
    os.environ["FLA_FLASH_QLA"] = "0"
    found: dict[str, Callable[..., Any]] = {}
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as flas

        found["FLA's own"] = flas
    except ImportError as error:
        print(f"left out: fla ({error})")
    try:
        import flash_qla

        found["FlashQLA's own"] = flash_qla.chunk_gated_delta_rule
    except (ImportError, ValueError) as error:
        print(f"left out: flash_qla ({error})")
    return found


def sides(call: dict[str, Any], own: dict[str, Callable[..., Any]], backends: list[str]) -> Iterator[Side]:
    """The libraries, then kernelreg: the automatic choice, each backend, with a plan, and captured."""
    for name, function in own.items():
        yield Side(name, lambda function=function: function(**call, scale=128**-0.5), library=True)  # type: ignore[misc]
    chosen = kernelreg.resolve("gdn", like=call)
    yield Side(f"kernelreg ({chosen.backend})", lambda: chunk_gated_delta_rule(**call))
    planned = call
    if "cu_seqlens" in call:
        batch = plan(call["cu_seqlens"].cpu(), device="cuda")
        planned = {**{name: value for name, value in call.items() if name != "cu_seqlens"}, "plan": batch}
        chosen = kernelreg.resolve("gdn", like=planned)
        yield Side(f"kernelreg, plan ({chosen.backend})", lambda: chunk_gated_delta_rule(**planned))
    for backend in backends:
        yield Side(f"kernelreg, plan, {backend}", forced(backend, lambda: chunk_gated_delta_rule(**planned)))
    yield captured("kernelreg, captured", lambda: chunk_gated_delta_rule(**planned))
    for backend in backends:
        run = forced(backend, lambda: chunk_gated_delta_rule(**planned))
        yield captured(f"kernelreg, captured, {backend}", run)


def forced(backend: str, run: Run) -> Run:
    def with_backend() -> tuple[Tensor, Any]:
        with kernelreg.use(backend=backend):
            return run()

    return with_backend


def captured(name: str, run: Run) -> Side:
    """The replay of a graph of some calls, as a model's layers make them, warmed up on a side stream."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [run() for _ in range(LAYERS)]

    def replay() -> tuple[Tensor, Any]:
        graph.replay()
        return results[-1]

    return Side(name, replay, captured=True, calls=LAYERS)


def milliseconds(side: Side, calls: int) -> float:
    """Of one call, among so many: the host's or the device's time, whichever is longer."""
    repeats = max(1, calls // side.calls)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        side.run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats / side.calls * 1e3


def errors(side: Side, wanted: tuple[Tensor, Tensor]) -> tuple[float, float]:
    o, final = side.run()
    torch.cuda.synchronize()
    return relative(o, wanted[0]), relative(final, wanted[1])


def section(tokens: int, sequences: int, own: dict[str, Callable[..., Any]], asked: argparse.Namespace) -> list[str]:
    """The table of one shape, and what it says of the aims."""
    edges = [tokens * each // sequences for each in range(sequences + 1)] if sequences > 1 else None
    call = gdn_call(B=1, T=tokens, state=False, edges=edges, **HEADS)
    wanted = expected(call)
    made = list(sides(call, own, asked.backends))
    found = {side.name: errors(side, wanted) for side in made}
    for side in made:
        milliseconds(side, asked.calls)
    times: dict[str, list[float]] = {side.name: [] for side in made}
    for number in range(asked.rounds):
        for side in made if number % 2 else made[::-1]:
            times[side.name].append(milliseconds(side, asked.calls))
    middle = {name: statistics.median(each) for name, each in times.items()}
    best_own = min((middle[side.name] for side in made if side.library), default=float("nan"))
    best_eager = min(middle[side.name] for side in made if not side.captured)
    shape = f"{tokens:,} tokens, " + ("dense" if sequences == 1 else f"varlen, {sequences} sequences")
    lines = [
        f"## {shape}",
        "",
        "| side | ms a call | ± | × over the faster library | × over the best eager call | error of o, state |",
        "|---|---|---|---|---|---|",
    ]
    for side in made:
        low, _, high = statistics.quantiles(times[side.name], n=4)
        now = middle[side.name]
        o, state = found[side.name]
        lines.append(
            f"| {side.name} | {now:.4f} | {(high - low) / now:.0%} | {best_own / now:.2f} | {best_eager / now:.2f} "
            f"| {o:.1e}, {state:.1e} |"
        )
    bound = operation_named("gdn").tolerances["bfloat16"].forward
    wrong = [name for name, each in found.items() if not max(each) <= bound]
    if wrong:
        raise SystemExit(f"{shape}: wrong beyond {bound:.1e}: {', '.join(wrong)}")
    return [*lines, ""]


def host_time(backend: str, calls: int) -> list[str]:
    """The functions that hold the host longest in a dense call of 1,024 tokens, as Python's own profiler sees them."""
    call = gdn_call(B=1, T=1024, state=False, **HEADS)
    run = forced(backend, lambda: chunk_gated_delta_rule(**call))
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    profiler = cProfile.Profile()
    with profiler:
        for _ in range(calls):
            run()
    torch.cuda.synchronize()
    stats: dict[tuple[str, int, str], Any] = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    longest = sorted(stats.items(), key=lambda each: -each[1][2])[:MOST]
    lines = [
        f"## Host time, {backend}, 1,024 tokens, dense",
        "",
        "| function | calls | µs of its own |",
        "|---|---|---|",
    ]
    for (file, _, name), (_, count, own, *_) in longest:
        place = "/".join(Path(file).parts[-3:]) if file != "~" else "built in"
        lines.append(f"| `{name.replace('|', chr(92) + '|')}`, {place} | {count / calls:g} | {own / calls * 1e6:.1f} |")
    total = sum(each[2] for each in stats.values()) / calls * 1e6
    return [*lines, f"| all | | {total:.1f} |", ""]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="times that each side is measured (default: 15)")
    parser.add_argument("--calls", type=int, default=48, help="calls of one measurement (default: 48)")
    parser.add_argument(
        "--backends", nargs="*", default=["fla", "flash_qla"], help="forced beside the automatic choice"
    )
    parser.add_argument("--profile", nargs="*", default=[], help="of these backends, where the host's time goes")
    parser.add_argument(
        "--shapes", nargs="*", type=int, default=range(len(SHAPES)), help="of the tables, these alone (from 0)"
    )
    parser.add_argument("--output", type=Path, help="also write the tables to this file")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: what these calls cost on a host beside a GPU cannot be measured here")
        return 0
    own = libraries()
    lines = [
        f"# What a prefill call costs with its host work, {datetime.date.today().isoformat()}",
        "",
        f"Made by `python {' '.join(sys.argv)}`: H 16, HV 32, K = V = 128, bfloat16, g and beta in float32, q and k "
        "brought to unit length in the call, final states asked for, no gradients. Medians of "
        f"{asked.rounds} rounds of {asked.calls} calls one after the other, the sides in turn in one process; ± is the "
        f"middle half of the rounds over the median. Captured: a graph of {LAYERS} calls, time per call. Errors are "
        "‖x − ref‖ / ‖ref‖ against the float64 recurrence.",
        "",
        measured_on(kernelreg.facts()),
        "",
    ]
    print("\n".join(lines), flush=True)
    with torch.no_grad():
        for tokens, sequences in (SHAPES[each] for each in asked.shapes):
            found = section(tokens, sequences, own, asked)
            lines += found
            print("\n".join(found), flush=True)
            keep(lines, asked.output)
        for backend in asked.profile:
            found = host_time(backend, asked.calls)
            lines += found
            print("\n".join(found), flush=True)
            keep(lines, asked.output)
    return 0


def keep(lines: list[str], path: Path | None) -> None:
    """Write what there is, so that a run that is cut short keeps it."""
    if path:
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
