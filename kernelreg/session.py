"""This process: its registry, facts, environment and findings, each read once and kept until told otherwise.

All that is impure about a decision is here; the resolver gets it as arguments.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from functools import reduce
from typing import NamedTuple

import msgspec

from kernelreg.adapters import load_function
from kernelreg.announce import announce, announce_unused, logger, say_once, set_level
from kernelreg.call import Call
from kernelreg.errors import AdapterError, ConfigurationError, KernelregError, NoBackendError, unknown_name
from kernelreg.findings import Finding
from kernelreg.lock import Pins, load_lock
from kernelreg.machine import CPU, Device, Facts, detect
from kernelreg.machine.detect import ENVIRONMENT
from kernelreg.machine.setup import CARD, Change
from kernelreg.machine.torch_devices import current_index, observed_device
from kernelreg.policy import OFF, PREFIX, Policy, read_environment, read_log_level, read_plugins
from kernelreg.profile import Evidence, check_names, load_profile
from kernelreg.reasons import Reason
from kernelreg.registry import Backend, Registry, discover, shipped_profiles
from kernelreg.resolution import Resolution
from kernelreg.resolver import Decision, Judged, decide, judge
from kernelreg.together import JointResolution, decide_together
from kernelreg.verify.records import load_record, save_record

Observer = Callable[[Resolution], object]
#: Variables that facts are made from, of those that decide.
_OF_FACTS = {"KERNELREG_FACTS"} | {name for name in ENVIRONMENT if not name.startswith(PREFIX)}


class Override:
    """A policy that ``use()`` lays over what holds outside. Equal ones are one object, which a key can hold."""

    __slots__ = ("policy",)

    def __init__(self, policy: Policy) -> None:
        self.policy = policy


_overrides: dict[bytes, Override] = {}
#: The innermost ``use()`` of this task or thread, already laid over the outer ones.
_use: ContextVar[Override | None] = ContextVar("kernelreg_use", default=None)


class Grounds(NamedTuple):
    """What a decision rests on, all of one moment: no thread's change lies between two of the parts."""

    registry: Registry
    facts: Facts
    policy: Policy
    ruled_out: Mapping[str, Reason]
    findings: tuple[Finding, ...]
    evidence: Evidence | None = None
    pins: Pins | None = None

    def judge(self, call: Call) -> list[Judged]:
        """Where every kernel of the call's operation stands, and all reasons against it."""
        return judge(self.registry, self.facts, call, *self[2:])

    def decide(self, call: Call) -> Decision:
        """The decision on the call."""
        return decide(self.registry, self.facts, call, *self[2:])


class Session:
    """What one process knows. Reads are of immutable values; changes swap a value under the lock."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._lock = threading.RLock()
        self._registry: Registry | None = None
        self._discovered: Registry | None = None
        self._added: tuple[Backend, ...] = ()
        self._facts: Facts | None = None
        self._policy: Policy | None = None
        self._seen: dict[str, str] = {}
        self.ruled_out: dict[str, Reason] = {}
        self._causes: dict[str, AdapterError] = {}
        self._findings: dict[str, tuple[Finding, ...]] = {}
        self._failed: tuple[Finding, ...] = ()
        self._profiles: dict[str, Evidence] = {}
        self._shipped: tuple[Evidence, ...] | None = None
        self._locks: dict[str, Pins] = {}
        self._trusting = False
        self.observers: tuple[Observer, ...] = ()
        self._listeners: list[Callable[[], None]] = []

    # -- what there is ---------------------------------------------------------------------------------------------

    def registry(self) -> Registry:
        """The backends of this process."""
        with self._lock:
            self._notice_environment()
            if self._registry is None:
                self._registry = reduce(Registry.adding, self._added, self.installed())
            return self._registry

    def installed(self) -> Registry:
        """The backends that are installed, without those that were added to this process: what its children have."""
        with self._lock:
            self._notice_environment()
            if self._discovered is None:
                self._discovered = discover(plugins=self._plugins_wanted())
                for problem in self._discovered.problems:
                    say_once(logging.WARNING, f"backend left out: {problem.source}: {problem.error}")
            return self._discovered

    def facts(self) -> Facts:
        """This machine's facts, or those of the file that ``KERNELREG_FACTS`` names.

        Raises:
            FactsError: the file cannot be read.
        """
        with self._lock:
            self._notice_environment()
            if self._facts is None:
                path = self._seen.get("KERNELREG_FACTS", "").strip()
                self._facts = Facts.load(path) if path else self.detected()
            return self._facts

    def detected(self) -> Facts:
        """This machine's facts, whatever ``KERNELREG_FACTS`` says."""
        return detect(self.registry().packages(), self._variables(all_of_them=True))

    def facts_seeing(self, device: str) -> Facts:
        """The facts with the device of a live tensor in them: it exists, whoever failed to list it."""
        facts = self.facts()
        if facts.device(device) is not None:
            return facts
        with self._lock:
            if not self._seen.get("KERNELREG_FACTS", "").strip():
                self._facts = self.detected()
            facts = self.facts()
            if facts.device(device) is None:
                devices = (*facts.devices, observed_device(device))
                self._facts = facts = msgspec.structs.replace(facts, devices=devices)
            return facts

    def policy(self) -> Policy:
        """What holds now: the environment's words under those of ``use()``.

        Raises:
            ConfigurationError: the environment says something unknown.
        """
        with self._lock:
            self._notice_environment()
            if self._policy is None:
                self._policy = self._read_policy()
        over = _use.get()
        return self._policy if over is None else self._policy.overlaid(over.policy)

    def findings(self, facts: Facts) -> tuple[Finding, ...]:
        """What failed in this process, and what ``kernelreg verify`` found wrong on these facts.

        A record that cannot be read is said once.
        """
        fingerprint = facts.fingerprint
        with self._lock:
            known = () if self._trusting else self._findings.get(fingerprint)
            if known is None:
                try:
                    record = load_record(fingerprint)
                except KernelregError as error:
                    say_once(logging.WARNING, f"results of kernelreg verify are left out: {error}")
                    record = None
                known = self._findings[fingerprint] = record.findings(facts) if record else ()
            return (*self._failed, *known)

    def grounds(self, facts: Facts | None = None, policy: Policy | None = None, device: str | None = None) -> Grounds:
        """What a decision made now rests on.

        Args:
            facts: another machine's; this one's when not given.
            policy: the whole policy; what holds now when not given.
            device: a live tensor's, which this machine's facts are to hold.
        """
        with self._lock:
            while True:
                registry, seen = self.registry(), self._seen
                known = facts
                if known is None:
                    known = self.facts() if device is None else self.facts_seeing(device)
                wanted = self._wanted(policy)
                evidence, pins, errors = self.files(wanted, known)
                if self._seen is seen:  # the environment knows no lock: once more where it changed in between
                    if errors:
                        raise errors[0]
                    return Grounds(registry, known, wanted, self.ruled_out, self.findings(known), evidence, pins)

    def files(
        self, policy: Policy, facts: Facts
    ) -> tuple[Evidence | None, Pins | None, tuple[ConfigurationError, ...]]:
        """The profile and the lock file that the policy names, read once; and why one cannot be used on these facts.

        Where the policy names no profile, it is the first shipped one that was measured on such a machine, if any.
        A profile is for one card and for what runs on it: that of another machine, driver or package is an error. A
        lock file is for one card, and holds each of its kernels to its versions when it is asked for.
        """
        errors: list[ConfigurationError] = []
        evidence = pins = None
        with self._lock:
            if policy.profile is None:
                evidence = next((each for each, changes in self.shipped(facts) if not changes), None)
            elif policy.profile != OFF:
                try:
                    evidence = self._profile(policy.profile, facts)
                except ConfigurationError as error:
                    errors.append(_named("profile", policy, error))
            if policy.lock is not None:
                try:
                    pins = self._pins(policy.lock, facts)
                except ConfigurationError as error:
                    errors.append(_named("lock", policy, error))
        return evidence, pins, tuple(errors)

    def shipped(self, facts: Facts) -> list[tuple[Evidence, tuple[Change, ...]]]:
        """The shipped profiles of cards that the machine has, each with what else is not as it was.

        They stand in for what descriptors cite, so that less has to be the same than of a profile that was asked for:
        the card, the packages that the kernels come from, the driver's branch and torch's release line.
        """
        with self._lock:
            if self._shipped is None:
                self._shipped = tuple(self._read_shipped())
            told = [(each, each.profile.setup.changes(facts, nearly=True)) for each in self._shipped]
        return [(each, changes) for each, changes in told if not any(change.field == CARD for change in changes)]

    def _read_shipped(self) -> Iterator[Evidence]:
        """Every shipped profile. One that cannot be read, or is of kernels that are not there, is said once."""
        found, problems = shipped_profiles(plugins=self._plugins_wanted())
        told = [f"{each.source}: {each.error}" for each in problems]
        for name, path in found:
            try:
                evidence = Evidence(load_profile(path), name)
                check_names(evidence, self.installed())
            except ConfigurationError as error:
                told.append(f"{name}: {error}")
            else:
                yield evidence
        for each in told:
            say_once(logging.WARNING, f"shipped profile left out: {each}")

    def _profile(self, path: str, facts: Facts) -> Evidence:
        if path not in self._profiles:
            self._profiles[path] = Evidence(load_profile(path), path)
        evidence = self._profiles[path]
        changes = evidence.profile.setup.changes(facts)
        if changes:
            raise ConfigurationError(f"{path}: measured elsewhere: {'; '.join(map(str, changes))}")
        try:
            check_names(evidence, self.registry())
        except ConfigurationError as error:
            raise self.with_hint(ConfigurationError(f"{path}: {error}")) from None
        return evidence

    def _pins(self, path: str, facts: Facts) -> Pins:
        if path not in self._locks:
            self._locks[path] = Pins(load_lock(path), path)
        pins = self._locks[path]
        card = next((each for each in pins.lock.setup.changes(facts) if each.field == CARD), None)
        if card is not None:
            raise ConfigurationError(f"{path}: locked for another machine: {card}")
        return pins

    def edges(self, operation: str) -> tuple[set[int], set[int]]:
        """The numbers of tokens, and of sequences, at which the profile or the lock file may say something else.

        Files that cannot be used say nothing here: whoever decides raises why.
        """
        tokens: set[int] = set()
        sequences: set[int] = set()
        with self._lock:
            for file in self.files(self.policy(), self.facts())[:2]:
                if file is not None:
                    more = file.edges(operation)
                    tokens |= more[0]
                    sequences |= more[1]
        return tokens, sequences

    def trust_all(self) -> None:
        """Decide as if nothing had been found wrong: for who is about to find out."""
        with self._lock:
            self._trusting = True
            self._changed()

    def steady(self) -> AbstractContextManager[object]:
        """A block in which no other thread changes what this process knows."""
        return self._lock

    # -- what changes it -------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Forget facts, backends, their import failures and the environment; all is read anew when next asked for."""
        with self._lock:
            self._seen = {}
            self.ruled_out = {}
            self._causes = {}
            self._findings = {}
            self._failed = ()
            self._profiles = {}
            self._locks = {}
            self._discovered = self._shipped = None
            self._changed_backends()

    def add(self, backend: Backend) -> Callable[[], None]:
        """Add a backend; gives the function that takes it out again.

        Raises:
            ConfigurationError: the name is taken.
        """
        with self._lock:
            registry = self.registry()
            if backend.name in registry.names():
                problem = registry.adding(backend).problems[-1]
                raise ConfigurationError(f"{problem.source}: {problem.error}")
            self._added = (*self._added, backend)
            self._changed_backends()

        def undo() -> None:
            with self._lock:
                self._added = tuple(each for each in self._added if each is not backend)
                self._changed_backends()

        return undo

    def rule_out(self, backend: str, error: AdapterError) -> None:
        """Remember that a backend's adapter does not import, and why."""
        with self._lock:
            self._causes = {**self._causes, backend: error}
            self.ruled_out = {**self.ruled_out, backend: error.reason}
            self._changed()

    def _cause(self, decision: Decision) -> AdapterError | None:
        """The error to chain a refusal to: that of the best kernel whose adapter did not import, however long ago."""
        for candidate in decision.candidates:
            error = self._causes.get(candidate.backend)
            if error is not None and error.reason in candidate.reasons:
                return error
        return None

    def keep_away(self, finding: Finding) -> None:
        """Remember that a kernel failed, for as long as this process lives or until it is trusted again."""
        with self._lock:
            self._failed = (*self._failed, finding)
            self._changed()

    def trust(self, backend: str | None) -> None:
        """Forget what failed or was found wrong, of one backend or (None) of all, for good.

        Raises:
            ConfigurationError: an unknown backend.
            KernelregError: what ``kernelreg verify`` has kept cannot be changed.
        """
        with self._lock:
            names = self.registry().names()
            if backend is not None and backend not in names:
                raise ConfigurationError(unknown_name("backend", backend, names))
            fingerprint = self.facts().fingerprint
            record = load_record(fingerprint)
            if record is not None and (left := record.trusting(backend)) != record:
                save_record(left)
            self._failed = tuple(each for each in self._failed if backend not in (None, each.backend))
            self._findings = {}
            self._changed()

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` whenever an answer given before may not hold any more. The lock is held then."""
        self._listeners.append(listener)

    def observe(self, observer: Observer) -> Callable[[], None]:
        """Call ``observer`` after each decision; gives the function that stops it."""
        with self._lock:
            self.observers = (*self.observers, observer)

        def undo() -> None:
            with self._lock:
                self.observers = tuple(each for each in self.observers if each is not observer)

        return undo

    def after_fork(self) -> None:
        """In a forked child: a lock that another thread of the parent held is free, and what it was changing forgotten.

        That thread is not there any more to finish. Where nobody held the lock, all that is known stays known.
        """
        if self._lock.acquire(blocking=False):
            self._lock.release()
            return
        self._lock = threading.RLock()
        self._seen = {}
        self._discovered = None
        self._changed_backends()

    # -- deciding --------------------------------------------------------------------------------------------------

    def resolve(self, grounds: Grounds, call: Call) -> Resolution:
        """Decide one call, tell the log and the observers.

        Raises:
            NoBackendError: nothing fits.
        """
        decision = grounds.decide(call)
        resolution = self._resolution(decision, grounds)
        if decision.backend is None:
            raise NoBackendError(resolution.explain(), resolution) from self._cause(decision)
        return resolution

    def resolve_together(self, grounds: Grounds, calls: Sequence[Call]) -> JointResolution:
        """Decide several calls on one state, tell the log and the observers.

        Raises:
            NoBackendError: an operation has no kernel on any form of the state.
        """
        joint = decide_together(grounds.registry, grounds.facts, calls, *grounds[2:])
        resolutions = [self._resolution(each, grounds) for each in joint.decisions]
        found = JointResolution(joint, resolutions)
        for each in resolutions:
            if each.backend is None:
                raise NoBackendError(found.explain(), each) from self._cause(each.decision)
        return found

    def _wanted(self, policy: object) -> Policy:
        """The policy that was given, or the one that holds now."""
        if policy is None:
            return self.policy()
        if not isinstance(policy, Policy):
            raise ConfigurationError(f"policy={policy!r}; accepted: None, or what kernelreg.make_policy gives")
        return policy

    def _resolution(self, decision: Decision, grounds: Grounds) -> Resolution:
        """A decision with the means to load it, told to the log and the observers."""
        facts = grounds.facts
        resolution = Resolution(decision, lambda decided: self.load(decided, facts), facts)
        announce(decision, grounds.registry, facts, grounds.evidence)
        announce_unused(decision, facts, grounds.evidence, grounds.pins)
        self.tell(resolution)
        return resolution

    def tell(self, resolution: Resolution) -> None:
        """Tell the observers. One that raises is said once: its fault is not the call's."""
        for observer in self.observers:
            try:
                observer(resolution)
            except Exception as error:
                name = getattr(observer, "__qualname__", type(observer).__qualname__)
                say_once(logging.WARNING, f"on_resolve observer {name} raised {type(error).__name__}: {error}")
                logger.debug("an on_resolve observer raised", exc_info=True)

    def load(self, decision: Decision, facts: Facts) -> tuple[Decision, Callable[..., object]]:
        """The callable of what was decided. Where its adapter does not import, the next kernel that fits, said once.

        Raises:
            NoBackendError: nothing fits (any more), or the policy allows no other.
        """
        while True:
            registry = self.registry()
            row = registry.find(decision.backend or "", decision.operation, decision.kernel or "")
            if row is not None:
                try:
                    return decision, load_function(*row)
                except AdapterError as error:
                    self.rule_out(row[0].name, error)
            # The adapter failed, or the backend was taken out since: decide again on what there is now.
            grounds = self.grounds(facts, decision.policy)
            decision = grounds.decide(decision.call)
            if decision.backend is None:
                resolution = Resolution(decision)
                raise NoBackendError(resolution.explain(), resolution) from self._cause(decision)
            announce(decision, grounds.registry, facts, grounds.evidence)

    def named_device(self, name: str, facts: Facts) -> str:
        """A device as a person names it: without an index it is the current one, as in torch."""
        kind, colon, index = name.partition(":")
        if kind == CPU.torch_name and index in ("", "0"):
            return CPU.torch_name
        if colon or kind not in ("cuda", "xpu") or facts is not self._facts:
            return name
        return f"{kind}:{current_index(kind)}"

    def default_device(self, facts: Facts) -> str:
        """The current accelerator that this torch can use, else ``cpu``."""
        usable = [device for device in facts.devices if _usable(device, facts)]
        if not usable:
            return CPU.torch_name
        kind = usable[0].torch_name.partition(":")[0]
        current = f"{kind}:{current_index(kind)}" if facts is self._facts else usable[0].torch_name
        return current if facts.device(current) is not None else usable[0].torch_name

    # -- the environment -------------------------------------------------------------------------------------------

    def environment_policy(self) -> tuple[Policy, list[ConfigurationError], list[str]]:
        """The environment's policy with every error and warning, for the doctor."""
        with self._lock:
            names = self.registry().names()
            policy, errors, warnings = read_environment(self._seen, names)
            return policy, [self.with_hint(error) for error in errors], warnings

    def with_hint(self, error: ConfigurationError) -> ConfigurationError:
        """An unknown backend's error, with the backends that are not known because something keeps them out."""
        hints = [f"{each.source}: {each.error}" for each in self.registry().problems]
        if not self._plugins_wanted():
            hints.append("KERNELREG_PLUGINS leaves all plugins out")
        if not hints or "unknown backend" not in str(error):
            return error
        return ConfigurationError(f"{error} (left out: {'; '.join(hints)})")

    def _read_policy(self) -> Policy:
        policy, errors, warnings = self.environment_policy()
        if errors:
            raise errors[0]
        set_level(read_log_level(self._seen))
        for warning in warnings:
            say_once(logging.WARNING, warning)
        return policy

    def _plugins_wanted(self) -> bool:
        try:
            return read_plugins(self._seen)
        except ConfigurationError:  # the policy's reader raises it where someone can act on it
            return True

    def _notice_environment(self) -> None:
        """Drop what was read from variables that have another value now."""
        now = self._variables()
        if now == self._seen:
            return
        before, self._seen = self._seen, now
        changed = {name for name, _ in before.items() ^ now.items()}
        self._policy = None
        if changed & _OF_FACTS:
            self._facts = None
        if "KERNELREG_PLUGINS" in changed:
            self._discovered = self._shipped = None
            self._changed_backends()
        self._changed()

    def _variables(self, *, all_of_them: bool = False) -> dict[str, str]:
        """The variables that decide, as they are: kernelreg's, and those by which devices are seen and kernels built.

        Names first, then each value: another thread may take one out between the two.
        """
        names = [name for name in list(self._environ) if all_of_them or name.startswith(PREFIX) or name in ENVIRONMENT]
        return {name: value for name in names if (value := self._environ.get(name)) is not None}

    def _changed_backends(self) -> None:
        """Other backends may name other packages, and other names are known."""
        self._registry = self._facts = self._policy = None
        self._changed()

    def _changed(self) -> None:
        for listener in self._listeners:
            listener()


session = Session(os.environ)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=session.after_fork)


def _named(field: str, policy: Policy, error: ConfigurationError) -> ConfigurationError:
    """What is wrong with a file, with the setting that names it and the way out."""
    origin = policy.origin.get(field, field)
    fix = f"unset {origin}, or " if origin.startswith(PREFIX) else ""
    command = {"profile": "tune gdn", "lock": "lock"}[field]
    return ConfigurationError(f"{origin}: {error}; fix: {fix}python -m kernelreg {command} --output FILE")


def _interned(policy: Policy) -> Override:
    return _overrides.setdefault(msgspec.json.encode(policy, order="sorted"), Override(policy))


@contextmanager
def overriding(over: Policy) -> Iterator[None]:
    """Lay a policy over the current one, for this task or thread, until the block ends."""
    outer = _use.get()
    token = _use.set(_interned(over if outer is None else outer.policy.overlaid(over)))
    try:
        yield
    finally:
        with suppress(ValueError):  # a generator that is closed elsewhere: what holds there is another's
            _use.reset(token)


#: The override that holds in this task or thread, or None.
current_override = _use.get


def _usable(device: Device, facts: Facts) -> bool:
    """Whether the torch build can put tensors there; without torch, nothing says that it could not."""
    if facts.torch is None:
        return True
    return {"cuda": facts.torch.cuda, "rocm": facts.torch.hip}.get(device.type, "yes") is not None
