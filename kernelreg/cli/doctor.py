"""``kernelreg doctor``: what will run on this machine, what will not, why, and what to paste to change it."""

from __future__ import annotations

import argparse
import os
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from kernelreg._version import __version__
from kernelreg.call import make_call
from kernelreg.cli._shared import console, describe, devices_of, facts_of, known_backend, seconds, working, write
from kernelreg.errors import ConfigurationError, FactsError, encodable
from kernelreg.imports import IMPORT_SECONDS, Adapter, Imported, import_adapter
from kernelreg.machine import CPU, Facts, Problem
from kernelreg.ops import operation_named
from kernelreg.policy import Policy
from kernelreg.reasons import HARDWARE_CODES, Reason
from kernelreg.registry import Registry
from kernelreg.resolver import Candidate, Decision, decide
from kernelreg.session import session

if TYPE_CHECKING:
    from rich.console import Console

NAME = "doctor"
HELP = "Say what will run on every visible device, what will not and why, and what to paste to change it."

#: Training asks more of a kernel than inference does, so the doctor looks at both.
_LOOKS = (("gdn.chunk", ()), ("gdn.chunk", ("backward",)), ("gdn.recurrent", ()))


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All that the doctor found.

    Attributes:
        unmet: why the exit code is not 0.
        adapters: what came of importing each usable backend's adapter; None where that was not asked for.
        profile: the measured profile that ranks, and of what card it is; None where the descriptors rank.
    """

    schema: int = 1
    kernelreg: str = __version__
    ok: bool
    unmet: tuple[str, ...]
    problems: tuple[Problem, ...]
    policy: Policy
    decisions: tuple[Decision, ...]
    adapters: tuple[Imported, ...] | None = None
    profile: str | None = None
    fingerprint: str
    facts: Facts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What must hold."""
    parser.add_argument(
        "--require",
        action="append",
        default=[],
        metavar="OP=BACKEND",
        help="exit 1 unless this backend is chosen for the operation on every visible device; may be repeated",
    )
    parser.add_argument(
        "--deep",
        action="store_true",
        help="import the adapter of every usable backend too, each in a child process",
    )
    parser.add_argument(
        "--ranks",
        action="store_true",
        help="under torchrun: one report of how the ranks' machines differ and of what they agree on",
    )
    parser.add_argument(
        "--limit",
        type=seconds,
        metavar="S",
        help=f"seconds for each import of --deep ({IMPORT_SECONDS:g}), or that --ranks waits for each other (60)",
    )


def run(words: argparse.Namespace) -> int:
    """0 when every operation has a kernel on every device and every override and requirement is met, else 1."""
    if words.deep and words.facts is not None:
        raise ConfigurationError("--deep imports adapters on this machine; --facts speaks of another")
    registry = session.registry()
    required = [_requirement(text, registry) for text in words.require]
    if words.limit is not None and not (words.deep or words.ranks):
        raise ConfigurationError("--limit is for --deep and --ranks; give it with one of them")
    if words.ranks:
        from kernelreg.cli import _ranks

        return _ranks.run(words, registry, required)
    facts, trouble = _facts_and_trouble(words)
    limit = (words.limit or IMPORT_SECONDS) if words.deep else None
    report = examine(facts, registry, required, trouble, limit)
    if words.json:
        write(msgspec.json.format(msgspec.json.encode(report, order="deterministic"), indent=2).decode())
    else:
        show(report, console())
    return 0 if report.ok else 1


def _facts_and_trouble(words: argparse.Namespace) -> tuple[Facts, list[Problem]]:
    """The machine to speak of. A file that ``KERNELREG_FACTS`` names and that cannot be read is one trouble of many."""
    try:
        return facts_of(words), []
    except FactsError as error:
        if words.facts is not None:
            raise
        return session.detected(), [Problem(source="KERNELREG_FACTS", error=encodable(str(error)))]


def examine(
    facts: Facts,
    registry: Registry,
    required: list[tuple[str, str]],
    trouble: list[Problem],
    limit: float | None = None,
) -> Report:
    """Decide every operation on every visible device, and collect what is wrong.

    Args:
        limit: import the adapters that could be chosen, within so many seconds each, and decide on what that showed.
    """
    policy, errors, warnings = session.environment_policy()
    findings = session.findings(facts)
    evidence, pins, refused = session.files(policy, facts)
    errors += refused
    trouble = [*trouble, *(Problem(source="configuration", error=encodable(str(each))) for each in errors)]

    def decided(ruled_out: Mapping[str, Reason]) -> list[Decision]:
        calls = [
            make_call(operation, device.torch_name, features=features)
            for device in devices_of(facts)
            for operation, features in _LOOKS
        ]
        return [decide(registry, facts, call, policy, ruled_out, findings, evidence, pins) for call in calls]

    decisions, adapters = decided({}), None
    if limit is not None:
        adapters = _import_adapters(decisions, registry, limit)
        decisions = decided({each.backend: each.reason for each in adapters if each.reason is not None})
    unmet = [each.error for each in trouble]
    for decision in decisions:
        unmet += _unmet(decision, policy, registry, required)
    noticed = [Problem(source="environment", error=encodable(text)) for text in warnings]
    noticed += [
        Problem(source=f"import of {each.backend}", error=text) for each in adapters or () for text in each.changed
    ]
    first = {each.scope: each for each in reversed(findings)}  # one cause for each scope is enough here
    noticed += [Problem(source="quarantine", error=encodable(str(each))) for each in reversed(first.values())]
    if policy.profile is None and evidence is None:
        noticed += [
            Problem(source="profile", error=f"{each.name} does not rank here: {'; '.join(map(str, changes))}")
            for each, changes in session.shipped(facts)
        ]
    if os.environ.get("KERNELREG_FACTS"):
        text = encodable(f"stands for this machine: {os.environ['KERNELREG_FACTS']}")
        noticed.append(Problem(source="KERNELREG_FACTS", error=text))
    if not registry.backends:
        noticed.append(Problem(source="registry", error="no backend is installed; fix, in a clone: pip install -e ."))
    return Report(
        ok=not unmet,
        unmet=tuple(dict.fromkeys(unmet)),
        problems=(*trouble, *noticed, *registry.problems, *facts.problems),
        policy=policy,
        decisions=tuple(decisions),
        adapters=adapters,
        profile=f"{evidence.name} ({evidence.profile.setup.description}, {evidence.profile.date})"
        if evidence
        else None,
        fingerprint=facts.fingerprint,
        facts=facts,
    )


def _import_adapters(decisions: Sequence[Decision], registry: Registry, limit: float) -> tuple[Imported, ...]:
    """Import the adapter of each backend that could be chosen, with the functions of those of its rows that could."""
    functions: dict[str, dict[str, None]] = {}
    for decision in decisions:
        for candidate in decision.candidates:
            row = registry.find(candidate.backend, decision.operation, candidate.kernel)
            if candidate.accepted and row is not None:
                functions.setdefault(candidate.backend, {})[row[1].function] = None
    modules = {backend.name: backend.descriptor.adapter for backend in registry.backends}
    found = []
    for name, wanted in sorted(functions.items()):
        with working(f"importing the adapter of {name}"):
            found.append(import_adapter(name, Adapter(module=modules[name], functions=tuple(wanted)), limit))
    return tuple(found)


def _unmet(decision: Decision, policy: Policy, registry: Registry, required: list[tuple[str, str]]) -> list[str]:
    """What must hold of an operation on a device and does not; the look at training is for information alone."""
    if decision.call.features:
        return []
    where = f"{decision.operation} on {decision.device}"
    if decision.backend is None:
        forced = policy.backend.get(decision.operation)
        cause = f" ({policy.origin[f'backend.{decision.operation}']} forces {forced})" if forced else ""
        return [f"{where}: no usable backend{cause}"]
    unmet = [
        f"{where}: --require {operation}={backend}, but {decision.backend} is chosen"
        for operation, backend in required
        if operation == decision.operation and backend != decision.backend
    ]
    able = {backend.name for backend, _ in registry.kernels(decision.operation)}
    wishes = [name for name in policy.prefer if name in able]
    if decision.operation not in policy.backend and wishes and decision.backend not in wishes:
        wished = " or ".join(wishes)
        unmet.append(f"{where}: {policy.origin['prefer']} wishes for {wished}, but {decision.backend} is chosen")
    return unmet


def _requirement(text: str, registry: Registry) -> tuple[str, str]:
    operation, equals, backend = text.partition("=")
    if not equals:
        raise ConfigurationError(f"--require {text}: accepted: OP=BACKEND, such as gdn.chunk=fla")
    canonical = operation_named(operation.strip()).name
    return canonical, known_backend(f"--require {text}", backend.strip(), registry.names())


# -- for a person ------------------------------------------------------------------------------------------------------


def show(report: Report, out: Console) -> None:
    """The report as text: devices and their kernels first, then what is wrong, then the verdict."""
    facts = report.facts
    out.print(f"kernelreg {report.kernelreg}", style="bold")
    for label, text in [*_machine(facts), *([("profile", report.profile)] if report.profile else [])]:
        out.print(f"  {label:10}{text}")
    for device in devices_of(facts):
        out.print()
        title = f"{device.torch_name}  {describe(device)}" if device is not CPU else "cpu  (no accelerator is visible)"
        out.print(title, style="bold")
        _show_device([each for each in report.decisions if each.device == device.torch_name], out)
    _show_list(out, "Overrides", _overrides(report.policy), "cyan")
    _show_list(out, "Noticed", _noticed(report), "yellow")
    out.print()
    if report.ok:
        were = "were not" if report.adapters is None else "were"
        out.print(f"All operations have a usable backend on every device. Adapters {were} imported.", style="green")
    else:
        _show_list(out, "Not met", list(report.unmet), "red", gap=False)


def _noticed(report: Report) -> list[str]:
    return [f"{each.source}: {each.error}" for each in report.problems if each.error not in report.unmet]


def _machine(facts: Facts) -> list[tuple[str, str]]:
    platform, torch, driver = facts.platform, facts.torch, facts.driver
    built = f"{torch.version or 'version unknown'} ({torch.build_name})" if torch else None
    rows = [
        ("platform", f"{platform.system} {platform.machine}, {platform.implementation} {platform.python}"),
        ("torch", built or "not installed; fix: pip install torch"),
    ]
    if driver:
        rows.append(("driver", f"{driver.version or 'version unknown'} (CUDA {driver.cuda or 'unknown'})"))
    rows += [(name, f"{tool.version or 'version unknown'} ({tool.path})") for name, tool in facts.tools.items()]
    packages = ", ".join(f"{name} {version}" for name, version in sorted(facts.packages.items()))
    return [*rows, ("packages", packages or "no kernel library")]


def _title(decision: Decision) -> str:
    features = "".join(f" + {feature}" for feature in sorted(decision.call.features))
    return decision.operation + features


def _show_device(decisions: list[Decision], out: Console) -> None:
    """A device's decisions; one that reads like the one before is named beside it."""
    told = [(decision, _verdicts(decision)) for decision in decisions]
    place = 0
    while place < len(told):
        decision, verdicts = told[place]
        titles = [_title(decision)]
        while place + 1 < len(told) and told[place + 1][1] == verdicts:
            place += 1
            titles.append(_title(told[place][0]))
        place += 1
        chosen = f"{decision.backend} ({decision.kernel})" if decision.backend else "nothing can run"
        _line(out, 2, f"{' and '.join(titles)}:", chosen, "bold green" if decision.backend else "bold red")
        for label, text, fix in verdicts:
            _line(out, 4, label, text)
            if fix:
                _line(out, 8, "fix:", fix, "cyan")


def _verdicts(decision: Decision) -> list[tuple[str, str, str | None]]:
    """What is said of each backend that was not chosen: could it run, or each reason and its fix."""
    said: list[tuple[str, str, str | None]] = []
    for name in dict.fromkeys(each.backend for each in decision.candidates):
        rows = [each for each in decision.candidates if each.backend == name]
        if name == decision.backend:
            continue
        if rows[0].accepted:
            said.append(("could run:", f"{name} ({rows[0].kernel})", None))
            continue
        said += [("cannot run:", f"{name}: {reason}", reason.fix) for reason in _spoken(rows)]
    return said


def _line(out: Console, indent: int, label: str, text: str, style: str = "") -> None:
    """A labelled line, wrapped below its own text."""
    from rich.text import Text

    start = " " * indent + label + " "
    pieces = textwrap.wrap(text, max(out.width - len(start), 20), break_on_hyphens=False) or [""]
    for place, piece in enumerate(pieces):
        out.print(
            Text.assemble((start if not place else " " * len(start), "" if indent == 2 else "dim"), (piece, style))
        )


def _spoken(rows: list[Candidate]) -> list[Reason]:
    """A backend's reasons in short: those of the row that comes closest, with what its other rows need instead."""
    closest = min(rows, key=lambda row: (row.reasons[0].code in HARDWARE_CODES, len(row.reasons)))
    # Where the device itself does not fit, no package or build makes it fit: the rest is not worth a word.
    hardware = tuple(reason for reason in closest.reasons if reason.code in HARDWARE_CODES)
    spoken = []
    for reason in hardware or closest.reasons:
        alike = [
            each.required
            for row in rows
            for each in row.reasons
            if (each.code, each.subject) == (reason.code, reason.subject) and each.required
        ]
        required = " or ".join(dict.fromkeys(alike)) or None
        spoken.append(msgspec.structs.replace(reason, required=required))
    return spoken


def _overrides(policy: Policy) -> list[str]:
    said = [f"{policy.origin[f'backend.{op}']}: {op} is {name}" for op, name in policy.backend.items()]
    said += [
        f"{policy.origin[field]}: {field} {', '.join(getattr(policy, field))}"
        for field in ("prefer", "disable")
        if getattr(policy, field)
    ]
    said += [
        f"{policy.origin[field]}: {text} {getattr(policy, field)}"
        for field, text in (("profile", "ranked by"), ("lock", "pinned by"))
        if getattr(policy, field)
    ]
    return said + ([f"{policy.origin['strict']}: no fallback at run time"] if policy.strict else [])


def _show_list(out: Console, title: str, lines: list[str], style: str, *, gap: bool = True) -> None:
    if not lines:
        return
    if gap:
        out.print()
    out.print(title, style=f"bold {style}")
    for line in lines:
        out.print(f"  - {line}")
