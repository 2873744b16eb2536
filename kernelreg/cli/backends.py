"""``kernelreg backends``: every backend and row, where it runs, whether it could run here, and what is out of date."""

from __future__ import annotations

import argparse
import json

import msgspec

from kernelreg.call import make_call
from kernelreg.cli._shared import console, facts_of, seconds, warn_of_environment, working, write
from kernelreg.descriptor import Kernel, full
from kernelreg.errors import ConfigurationError
from kernelreg.machine import Facts, Problem
from kernelreg.ops import operations
from kernelreg.policy import Policy
from kernelreg.registry import Backend
from kernelreg.resolver import Candidate, decide
from kernelreg.schema import descriptor_schema
from kernelreg.session import session
from kernelreg.stale import CLAIMS_SECONDS, Checked, Stale, check

NAME = "backends"
HELP = "List every backend, its kernels and whether they could run here; broken descriptors with their cause."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What else can be printed of them."""
    parser.add_argument("--device", help="the device to judge for; the current accelerator if not given")
    parser.add_argument("--schema", action="store_true", help="print the JSON Schema of backend.toml instead")
    parser.add_argument(
        "--stale",
        action="store_true",
        help="ask the installed libraries what they take, and print the limits that are too wide or too narrow",
    )
    parser.add_argument(
        "--limit",
        type=seconds,
        default=CLAIMS_SECONDS,
        metavar="S",
        help=f"seconds for each library of --stale ({CLAIMS_SECONDS:g})",
    )


def run(words: argparse.Namespace) -> int:
    """0, or 1 where a backend could not be read, or with ``--stale`` where a limit is out of date."""
    if words.schema:
        write(descriptor_schema())
        return 0
    warn_of_environment()
    if words.stale:
        return _run_stale(words)
    registry = session.registry()
    facts = facts_of(words)
    device = words.device or session.default_device(facts)
    verdicts = _verdicts(facts, device)
    if words.json:
        write(json.dumps(_data(registry.backends, registry.problems, device, verdicts), indent=2))
    else:
        _show(registry.backends, registry.problems, device, verdicts)
    return 1 if registry.problems else 0


def _run_stale(words: argparse.Namespace) -> int:
    """0 where no installed library contradicts its descriptor, 1 where one does."""
    if words.facts is not None:
        raise ConfigurationError(
            "--stale asks the libraries that are installed here; --facts speaks of another machine"
        )
    facts, results, silent = session.detected(), [], []
    for backend in session.registry().backends:
        with working(f"asking the library of {backend.name}"):
            found = check(backend, facts, words.limit)
        results += [found] if found is not None else []
        silent += [backend.name] if found is None else []
    stale = any(each.stale for each in results)
    if words.json:
        data = {"schema": 1, "stale": stale, "backends": msgspec.to_builtins(results), "nothing_to_ask": silent}
        write(json.dumps(data, indent=2))
    else:
        _show_stale(results, silent)
    return 1 if stale else 0


def _show_stale(results: list[Checked], silent: list[str]) -> None:
    out = console()
    for each in results:
        packages = ", ".join(f"{name} {version}" for name, version in each.packages.items())
        out.print(f"{each.backend}  {packages}".rstrip(), style="bold")
        if each.agreed:
            out.print(f"  {each.agreed} of its library's answers agree with the descriptor", style="green")
        for stale in each.stale:
            out.print(f"  {stale.limit}: {stale.claim.subject}", style="red")
            for line in _contradiction(stale):
                out.print(f"    {line}")
        for lost in each.unasked:
            out.print(f"  cannot be asked: {lost.asked}: {lost.cause}", style="yellow")
    if silent:
        out.print(f"nothing to ask: {', '.join(silent)}", style="dim")


def _contradiction(stale: Stale) -> list[str]:
    """What the descriptor says, and what the library does."""
    asked = stale.claim.asked
    if stale.limit == "too wide":
        return [
            f"{', '.join(stale.kernels)} would take it",
            f"{asked} refuses it: {stale.claim.said or 'no reason given'}",
        ]
    row = ", ".join(stale.kernels) or "no row of this operation"
    against = [f"{row}: {reason}" + (f" ({reason.url})" if reason.url else "") for reason in stale.reasons]
    return [f"{asked} takes it", *(against or [row])]


def _verdicts(facts: Facts, device: str) -> dict[tuple[str, str, str], Candidate]:
    """Each row's verdict for a call that says nothing, with no override."""
    registry = session.registry()
    findings = session.findings(facts)
    decisions = [
        decide(registry, facts, make_call(each.name, device), Policy(), None, findings) for each in operations()
    ]
    return {
        (candidate.backend, decision.operation, candidate.kernel): candidate
        for decision in decisions
        for candidate in decision.candidates
    }


def _data(
    backends: tuple[Backend, ...],
    problems: tuple[Problem, ...],
    device: str,
    verdicts: dict[tuple[str, str, str], Candidate],
) -> dict[str, object]:
    return {
        "schema": 1,
        "device": device,
        "backends": [
            {
                "name": backend.name,
                "origin": backend.origin,
                "usable": any(each.accepted for key, each in verdicts.items() if key[0] == backend.name),
                "descriptor": msgspec.to_builtins(backend.descriptor),
            }
            for backend in backends
        ],
        "problems": msgspec.to_builtins(problems),
    }


def _show(
    backends: tuple[Backend, ...],
    problems: tuple[Problem, ...],
    device: str,
    verdicts: dict[tuple[str, str, str], Candidate],
) -> None:
    from rich import box
    from rich.table import Table

    out = console()
    for backend in backends:
        descriptor = backend.descriptor
        out.print(f"{backend.name}  {descriptor.homepage or ''}".rstrip(), style="bold")
        out.print(f"  from {backend.origin}; {len(descriptor.known_bad)} known faults", style="dim")
        for what, how in descriptor.bridges.items():
            out.print(f"  bridges {what}: {how}", style="dim")
        table = Table(box=box.SIMPLE_HEAD, pad_edge=True)
        for title in ("operation", "kernel", "needs", "validated on", f"on {device}"):
            table.add_column(title, overflow="fold")
        for kernel in descriptor.kernel:
            candidate = verdicts[backend.name, kernel.operation, kernel.name]
            verdict = "can run" if candidate.accepted else str(candidate.reasons[0])
            validated = ", ".join(kernel.validated_on) or "not validated"
            table.add_row(kernel.operation, kernel.name, _needs(backend, kernel), validated, verdict)
        out.print(table)
    for problem in problems:
        out.print(f"could not be read: {problem.source}: {problem.error}", style="yellow")


def _needs(backend: Backend, kernel: Kernel) -> str:
    """A row's requirements in short, its own and its backend's."""
    needs: dict[str, str] = {}
    for table in (backend.descriptor.requires, kernel.requires):
        if "any" not in table.devices:
            needs["device"] = "/".join(table.devices)
        for name in ("compute_capability", "torch", "cuda", "hip", "driver", "python"):
            if getattr(table, name):
                needs[name.replace("_", " ")] = getattr(table, name)
        needs |= {name: rule.version for name, rule in full(table.packages).items()}
        needs |= table.tools
    return ", ".join(f"{name} {text}".replace(" *", "") for name, text in needs.items()) or "torch"
