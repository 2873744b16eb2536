"""What ``kernelreg verify`` found, kept for the machine and the packages that it was found with.

One file for each facts fingerprint, in the user's state folder. Another driver, package or card is another fingerprint,
and another release of kernelreg has other adapters: neither is judged by what was found before.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from kernelreg._version import __version__
from kernelreg.decoding import read_json
from kernelreg.errors import KernelregError
from kernelreg.findings import Finding
from kernelreg.machine.model import Facts
from kernelreg.verify.outcome import Outcome
from kernelreg.writing import write_whole


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The outcomes of one machine.

    Attributes:
        date: of the last run, as ``2026-12-01``.
        fingerprint: of the facts.
    """

    schema: Literal[1] = 1
    kernelreg: str = __version__
    date: str
    fingerprint: str
    outcomes: tuple[Outcome, ...] = ()

    def findings(self, facts: Facts) -> tuple[Finding, ...]:
        """The wrong outcomes, as the resolver takes them. What one card gets wrong is held against its like, too."""
        judged = {each.key for each in self.outcomes if each.status in ("right", "wrong")}
        found = []
        for each in self.outcomes:
            if each.status == "wrong" and each.kernel:
                _, *case = each.key
                like = {name for name in _alike(each.device, facts) if (name, *case) not in judged}
                found.append(_finding(each, frozenset({each.device, *like}), self.outcomes, self.date))
        return tuple(found)

    def trusting(self, backend: str | None) -> Record:
        """This record without what was wrong: of one backend, or (None) of all."""
        kept = tuple(each for each in self.outcomes if each.status != "wrong" or backend not in (None, each.backend))
        return msgspec.structs.replace(self, outcomes=kept)

    def with_run(self, outcomes: tuple[Outcome, ...], date: str) -> Record:
        """This record with a run's outcomes in place of what was known of the same cases.

        What was wrong stays so until the same case is judged again on the same device: a run that was cut short,
        refused the case or drew another clears nothing.
        """
        judged = {each.key for each in outcomes if each.status == "right" or (each.status == "wrong" and each.kernel)}
        again = {each.key for each in outcomes}
        kept = tuple(each for each in self.outcomes if each.key not in (judged if each.status == "wrong" else again))
        return msgspec.structs.replace(self, outcomes=(*kept, *outcomes), date=date)


def _alike(name: str, facts: Facts) -> Iterator[str]:
    """The devices that are the same model as this one."""
    own = facts.device(name)
    for each in facts.devices:
        if own and (each.name, each.compute_capability, each.mig) == (own.name, own.compute_capability, own.mig):
            yield each.torch_name


def _finding(outcome: Outcome, devices: frozenset[str], outcomes: Iterable[Outcome], date: str) -> Finding:
    """What a wrong outcome is blamed on: what it used and no right call of the same kernel did.

    Where that is nothing, or nothing was right, the kernel is to blame, for every call.
    """
    row = (outcome.device, outcome.operation, outcome.backend, outcome.kernel)
    right = [each for each in outcomes if each.computed and (*each.key[:3], each.kernel) == row]
    used = frozenset(outcome.features) if right else frozenset()
    harmless = {feature for each in right for feature in each.features}
    dtypes = {each.dtype for each in right}
    return Finding(
        operation=outcome.operation,
        backend=outcome.backend,
        kernel=outcome.kernel or "",
        devices=devices,
        features=used - harmless,
        dtype=outcome.dtype if dtypes and outcome.dtype not in dtypes else None,
        cause=f"kernelreg verify on {outcome.device}, {date}, {outcome.case!r}: {outcome.reason}",
        fix=f"python -m kernelreg verify {outcome.operation} --backend {outcome.backend} --device {outcome.device}",
    )


def folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Where records are kept: ``$XDG_STATE_HOME/kernelreg/verified``, else below the home; None where there is none."""
    state = environ.get("XDG_STATE_HOME", "").strip()
    if state and Path(state).is_absolute():
        return Path(state) / "kernelreg" / "verified"
    try:
        return Path.home() / ".local" / "state" / "kernelreg" / "verified"
    except RuntimeError:
        return None


def load_record(fingerprint: str) -> Record | None:
    """The record of these facts by this release, or None where there is none.

    Raises:
        KernelregError: there is one that cannot be read; names the file and what is wrong.
    """
    where = folder()
    path = where / f"{fingerprint}.json" if where else None
    try:
        if path is None or not path.is_file():
            return None
    except OSError as error:  # a folder that this user may not search, a name that is too long
        raise KernelregError(f"{path}: {error.strerror or error}") from error
    record = read_json(path, Record, KernelregError)
    return record if record.kernelreg == __version__ and record.fingerprint == fingerprint else None


def save_record(record: Record) -> Path:
    """Write the record; gives its path.

    Raises:
        KernelregError: it cannot be written.
    """
    where = folder()
    if where is None:
        raise KernelregError("no home folder to keep results in; set XDG_STATE_HOME")
    path = where / f"{record.fingerprint}.json"
    text = msgspec.json.format(msgspec.json.encode(record, order="deterministic"), indent=1).decode()
    try:
        where.mkdir(parents=True, exist_ok=True)
        write_whole(path, text, KernelregError)
    except (OSError, KernelregError) as error:
        told = f"{path}: {error.strerror or error}" if isinstance(error, OSError) else str(error)
        raise KernelregError(f"{told}; XDG_STATE_HOME names another place") from error
    return path


def forget_record(fingerprint: str) -> bool:
    """Delete the record of these facts; whether there was one.

    Raises:
        KernelregError: it cannot be deleted.
    """
    where = folder()
    try:
        if where is None or not (where / f"{fingerprint}.json").exists():
            return False
        (where / f"{fingerprint}.json").unlink()
    except OSError as error:
        raise KernelregError(f"{where}: {error.strerror or error}") from error
    return True
