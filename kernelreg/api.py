"""The public functions. ``kernelreg`` itself only names them, so that importing it costs next to nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from kernelreg import policy as policies
from kernelreg.call import STATES, Call, make_call, read_features
from kernelreg.descriptor import Descriptor, load_descriptor, make_descriptor
from kernelreg.errors import ConfigurationError, several, unknown_name
from kernelreg.findings import Quarantine
from kernelreg.machine import Facts
from kernelreg.ops import operation_named
from kernelreg.policy import Policy
from kernelreg.registry import Backend
from kernelreg.resolution import Resolution
from kernelreg.session import Grounds, Observer, overriding, session
from kernelreg.together import JointResolution


def resolve(
    operation: str = "gdn",
    *,
    like: Mapping[str, Any] | None = None,
    device: object = None,
    facts: Facts | str | os.PathLike[str] | None = None,
    policy: Policy | None = None,
    dtype: object = None,
    gate_dtype: object = None,
    state_dtype: object = None,
    head_dim_k: int | None = None,
    head_dim_v: int | None = None,
    heads: int | None = None,
    value_heads: int | None = None,
    tokens: int | None = None,
    sequences: int | None = None,
    features: Iterable[str] | None = None,
) -> Resolution:
    """Which kernel runs a call, and why not the others. What is not given is not tested.

    Args:
        operation: ``gdn.chunk`` (alias ``gdn``) or ``gdn.recurrent``.
        like: the arguments of a call, by name (``q``, ``k``, ``v``, ``g``, ``beta`` …): what these tensors need.
        device: a device as torch names it; the current accelerator when not given, else ``cpu``.
        facts: the machine to decide for, or the path of its facts file; this machine when not given.
        policy: the whole policy (:func:`kernelreg.make_policy`); environment and ``use()`` when not given.
        dtype, gate_dtype, state_dtype: of q/k/v, of g, of the state; a torch dtype or its name.
        head_dim_k, head_dim_v: K and V.
        heads, value_heads: H and HV.
        tokens: B × T.
        sequences: N.
        features: what the call uses, such as ``{"varlen", "backward"}``.

    Raises:
        NoBackendError: nothing fits; its message and ``resolution`` hold every reason.
        ConfigurationError: an override or an argument names something unknown.
    """
    options = {
        "dtype": dtype,
        "gate_dtype": gate_dtype,
        "state_dtype": state_dtype,
        "head_dim_k": head_dim_k,
        "head_dim_v": head_dim_v,
        "heads": heads,
        "value_heads": value_heads,
        "tokens": tokens,
        "sequences": sequences,
        "features": features,
    }
    return session.resolve(*asked(operation, like=like, device=device, facts=facts, policy=policy, **options))


def asked(
    operation: str,
    *,
    like: Mapping[str, Any] | None = None,
    device: object = None,
    facts: Facts | str | os.PathLike[str] | None = None,
    policy: Policy | None = None,
    **options: Any,
) -> tuple[Grounds, Call]:
    """What :func:`resolve`'s words ask for, and what it is decided on; raises as it does."""
    given = None if facts is None else _read_facts(facts)
    if like is None:
        grounds = session.grounds(given, policy)
        return grounds, make_call(operation, _place(device, grounds.facts), **options)
    said = sorted(name for name, value in options.items() if value is not None)
    if said or device is not None:
        raise ConfigurationError(f"like= says all of the call; give either it or {', '.join(said or ['device'])}")
    if not isinstance(like, Mapping):
        raise ConfigurationError(f"like={like!r:.100}; accepted: a call's arguments by name, {{'q': q, 'k': k, …}}")
    from kernelreg.gdn import call_like

    call = call_like(operation, like)
    return session.grounds(given, policy, device=call.device), call


def _place(device: object, facts: Facts) -> str:
    """The device that a person named, or the current one."""
    return session.default_device(facts) if device is None else session.named_device(str(device), facts)


def resolve_together(
    operations: Sequence[str] = ("gdn.chunk", "gdn.recurrent"),
    *,
    device: object = None,
    facts: Facts | str | os.PathLike[str] | None = None,
    policy: Policy | None = None,
    features: Mapping[str, Iterable[str]] | None = None,
    **options: Any,
) -> JointResolution:
    """The best kernels for operations that hand each other a state: one layout and one dtype that all of them take.

    float32 states are chosen before bfloat16 ones, and then the faster kernels; ``state_dtype=`` and the feature
    ``state-v-first`` say what is not to be chosen.

    Args:
        operations: two or more; prefill and decode when not given.
        device, facts, policy: as :func:`resolve` takes them.
        features: what each operation's calls use, by operation. One that is not named, or whose features say nothing
            of states, takes an initial state and gives a final one.
        options: ``dtype``, ``gate_dtype``, ``state_dtype``, ``head_dim_k``, ``head_dim_v``, ``heads`` and
            ``value_heads`` of all calls, as :func:`resolve` takes them.

    Raises:
        NoBackendError: an operation has no kernel on any form of the state; the message has all reasons.
        ConfigurationError: an override or an argument names something unknown.
    """
    given = None if facts is None else _read_facts(facts)
    if features is not None and not isinstance(features, Mapping):
        raise ConfigurationError(
            f"features={features!r}; accepted: of each operation, {{'gdn.recurrent': {{'state-pool'}}}}"
        )
    grounds = session.grounds(given, policy)
    place = _place(device, grounds.facts)
    wanted = several(f"{operations=}", operations, "two operations or more, ['gdn.chunk', 'gdn.recurrent']")
    names = list(dict.fromkeys(operation_named(name).name for name in wanted))
    if len(names) < 2:
        raise ConfigurationError(f"operations={wanted!r}; accepted: two operations or more")
    said: dict[str, frozenset[str]] = {}
    for word, each in (features or {}).items():
        operation = operation_named(word)
        if operation.name not in names:
            raise ConfigurationError(unknown_name("operation in features", word, names))
        if operation.name in said:
            raise ConfigurationError(f"features={features!r}: {operation.name} is given twice; accepted: once")
        said[operation.name] = read_features(f"features[{word!r}]={each!r}", each, operation)
    calls = []
    for name in names:
        uses = said.get(name, frozenset())
        uses = uses if uses & STATES else uses | {"initial-state", "final-state"}
        calls.append(make_call(name, place, features=uses, **options))
    return session.resolve_together(grounds, calls)


def _read_facts(facts: object) -> Facts:
    if isinstance(facts, Facts):
        return facts
    if not isinstance(facts, (str, os.PathLike)):
        raise ConfigurationError(f"facts={facts!r}; accepted: kernelreg.Facts, or the path of a facts file")
    return Facts.load(facts)


def facts() -> Facts:
    """This machine's facts: detected once, kept until :func:`refresh`.

    Raises:
        FactsError: ``KERNELREG_FACTS`` names a file that cannot be read.
    """
    return session.facts()


def refresh() -> None:
    """Forget facts, plugins, which adapters failed to import, and the environment; all is read anew."""
    session.refresh()


def quarantine() -> Quarantine:
    """The kernels that are kept from calls now: what failed in this process, and what ``kernelreg verify`` found wrong.

    A sequence of :class:`kernelreg.Finding`, with ``clear()``, ``save(path)`` and ``to_dict()``.
    """
    return Quarantine(session.findings(session.facts()), session.trust)


def use(
    *,
    backend: str | Mapping[str, str] | None = None,
    prefer: Sequence[str] | str | None = None,
    disable: Sequence[str] | str | None = None,
    strict: bool | None = None,
) -> AbstractContextManager[None]:
    """Override the policy for a ``with`` block, in this task or thread alone. Blocks nest; what one leaves out stays.

    Args:
        backend: force one: a name, ``"gdn.chunk=fla"``, or ``{"gdn.chunk": "fla"}``.
        prefer: rank these first, in this order.
        disable: never these.
        strict: no fallback at run time, and a wish that cannot be met is an error.

    Raises:
        ConfigurationError: a name that no backend has; names the nearest.
    """
    names = session.registry().names()
    try:
        over = policies.make_policy(
            names, backend=backend, prefer=prefer, disable=disable, strict=strict, origin="use()"
        )
    except ConfigurationError as error:
        raise session.with_hint(error) from None
    return overriding(over)


def make_policy(
    *,
    backend: str | Mapping[str, str] | None = None,
    prefer: Sequence[str] | str | None = None,
    disable: Sequence[str] | str | None = None,
    strict: bool | None = None,
    profile: str | os.PathLike[str] | None = None,
    lock: str | os.PathLike[str] | None = None,
) -> Policy:
    """A whole policy for :func:`resolve`'s ``policy=``, with :func:`use`'s words and two files.

    Args:
        backend, prefer, disable, strict: as :func:`use` takes them.
        profile: the path of a measured profile to rank by, or ``off``.
        lock: the path of a lock file that pins decisions.

    Raises:
        ConfigurationError: a name that no backend has; names the nearest.
    """
    names = session.registry().names()
    return policies.make_policy(
        names, backend=backend, prefer=prefer, disable=disable, strict=strict, profile=profile, lock=lock
    )


def register(backend: str | os.PathLike[str] | Mapping[str, Any] | Descriptor) -> Callable[[], None]:
    """Add a backend to this process; gives the function that takes it out again.

    Only this process knows it: ``python -m kernelreg``, and the child processes in which ``verify`` judges, know the
    backends that are installed.

    Args:
        backend: the path of a ``backend.toml``, its content as plain data, or a descriptor.

    Raises:
        DescriptorError: the descriptor is not one; names file, key and what is accepted.
        ConfigurationError: a backend of that name is there already, or none of the three was given.
    """
    if isinstance(backend, Descriptor):
        descriptor, origin = backend, "register()"
    elif isinstance(backend, Mapping):
        descriptor, origin = make_descriptor(dict(backend)), "register()"
    elif isinstance(backend, (str, os.PathLike)):
        descriptor, origin = load_descriptor(backend), os.fspath(backend)
    else:
        raise ConfigurationError(
            f"register({backend!r:.100}); accepted: the path of a backend.toml, its content as a mapping, "
            "or a Descriptor"
        )
    return session.add(Backend(descriptor=descriptor, origin=origin))


def on_resolve(callback: Observer) -> Callable[[], None]:
    """Call ``callback(resolution)`` after each decision; gives the function that stops it.

    A callback that raises is said once in the log, and the call goes on.

    Raises:
        ConfigurationError: it cannot be called.
    """
    if not callable(callback):
        raise ConfigurationError(f"on_resolve({callback!r:.100}); accepted: a callable that takes a Resolution")
    return session.observe(callback)
