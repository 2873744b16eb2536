"""One case on one backend: the right numbers within the operation's tolerances, or a refusal with a reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

import kernelreg
from kernelreg import gdn
from kernelreg.ops import operation_named
from kernelreg.ops.gdn_reference import reference_gated_delta_rule
from kernelreg.ops.tolerances import ONE_PART
from kernelreg.resolver import Candidate, closest_row
from kernelreg.verify.cases import Case
from kernelreg.verify.inputs import DIFFERENTIABLE, Arguments, leaves
from kernelreg.verify.outcome import Outcome, Status
from kernelreg.verify.prepare import Guard, prepare

Results = dict[str, Tensor]
#: The error of a tensor as a whole, and that of its worst part.
Distance = tuple[float, float]
#: The dimensions of one part, by result.
_PARTS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("o", "dq", "dk", "dv"), (-1,)),
    **dict.fromkeys(("state", "dinitial_state"), (-2, -1)),
    **dict.fromkeys(("dg", "dbeta"), (1,)),
}

#: What the float64 recurrence is not told: gates are activated before it, and it reads values where they lie.
_UNTOLD = {"use_gate_in_kernel", "A_log", "dt_bias", "use_beta_sigmoid_in_kernel", "allow_neg_eigval"}
_UNTOLD |= {"output_final_state", "cu_seqlens_cpu"}


class _WrongError(Exception):
    """What a kernel did that it must not."""


def judge(case: Case, backend: str, device: str) -> Outcome:
    """Run the case on the backend and compare it with the float64 recurrence.

    Wrong are: a number outside the tolerance, a NaN, another shape or dtype, a write outside the output and the pool's
    own slots, two results of a deterministic call that differ, and an exception that is no refusal.
    """
    told: dict[str, Any] = {"case": case.name, "operation": case.operation, "backend": backend}
    told |= {"device": device, "dtype": case.dtype}
    if case.capture and not device.startswith("cuda"):
        return Outcome(**told, status="not here", reason="CUDA graphs need a CUDA device")
    # Slots that a device holds are not waited for: there a strange one is padding.
    broken = case.broken and not (case.broken == "slots" and device != "cpu")
    call = prepare(case, device)
    try:
        with kernelreg.use(backend=backend), _conditions(case):
            row = kernelreg.resolve(case.operation, like=call)
            told |= {"kernel": row.kernel, "features": tuple(sorted(row.call.features))}
            distances = _run(case, call, device)
    except kernelreg.NoBackendError as error:
        return Outcome(**told, status="refused", reason=_refusal(error.resolution.candidates, backend))
    except kernelreg.CallError as error:
        status: Status = "right" if broken else "wrong"
        return Outcome(**told, status=status, reason=f"CallError: {error}")
    except _WrongError as error:
        return Outcome(**told, status="wrong", reason=str(error))
    except Exception as error:  # whatever a library raises here should have been a reason
        cause = error.__cause__ if isinstance(error, kernelreg.KernelFailedError) else error
        text = f"{type(cause).__name__}: {cause}".strip().splitlines()[0]
        return Outcome(**told, status="wrong", reason=f"unexplained {text[:300]}")
    if broken:
        return Outcome(**told, status="wrong", reason="the contract is broken, and no CallError says so")
    bounds = _bounds(case, distances)
    far = [text for name, distance in distances.items() for text in _beyond(name, distance, bounds[name])]
    return Outcome(
        **told,
        status="wrong" if far else "right",
        errors={name: whole for name, (whole, _) in distances.items()},
        bounds=bounds,
        worst_part=max((part / bounds[name] for name, (_, part) in distances.items()), default=0.0),
        reason="; ".join(far) or None,
    )


def foresee(case: Case, backend: str, device: str) -> dict[str, Any]:
    """The row that would run the case on the backend, and the features of the call; nothing is launched."""
    try:
        with kernelreg.use(backend=backend), _conditions(case):
            row = kernelreg.resolve(case.operation, like=prepare(case, device))
    except kernelreg.KernelregError:
        return {"kernel": None, "features": ()}
    return {"kernel": row.kernel, "features": tuple(sorted(row.call.features))}


def expected(call: Arguments) -> tuple[Tensor, Tensor]:
    """Output and final state (or pool) of the float64 recurrence, from raw gates too."""
    plain = {name: value for name, value in call.items() if name not in _UNTOLD}
    if call.get("use_gate_in_kernel"):
        bias = 0 if call.get("dt_bias") is None else call["dt_bias"].double()
        plain["g"] = -call["A_log"].double().exp() * softplus(call["g"].double() + bias)
    if call.get("use_beta_sigmoid_in_kernel"):
        plain["beta"] = call["beta"].double().sigmoid() * (2 if call.get("allow_neg_eigval") else 1)
    return reference_gated_delta_rule(**plain)


def relative(actual: Tensor, reference: Tensor) -> float:
    """‖actual − reference‖ / ‖reference‖; 0 where both are empty, NaN where ``actual`` has one."""
    difference = torch.linalg.vector_norm(actual.detach().double() - reference.detach().double())
    return float(difference / torch.linalg.vector_norm(reference.detach().double()).clamp_min(1e-300))


def _distance(name: str, actual: Tensor, reference: Tensor) -> Distance:
    """The errors of a result as a whole and of its worst part, so that a fault in one token or head is not lost.

    A part is one token's vector, one head's state, or one head's gates. Its error is measured by its own norm, or by
    that of the average part where it is smaller: small parts may be sums of large terms.
    """
    whole = relative(actual, reference)
    dims = _PARTS.get(name)
    if dims is None or not actual.numel():
        return whole, whole
    wanted = reference.detach().double()
    sizes = torch.linalg.vector_norm(wanted, dim=dims)
    errors = torch.linalg.vector_norm(actual.detach().double() - wanted, dim=dims)
    average = sizes.square().mean().sqrt().clamp_min(1e-300)
    return whole, float((errors / torch.maximum(sizes, average)).max())


def _refusal(candidates: tuple[Candidate, ...], backend: str) -> str:
    closest = closest_row(candidates, backend)
    if closest is None:
        return "the backend has no kernel for this operation"
    return "; ".join(str(reason) for reason in closest.reasons)


def _beyond(name: str, distance: Distance, bound: float) -> Iterator[str]:
    """What of a result is farther off than it may be."""
    whole, part = distance
    if not whole <= bound:
        yield f"{name} is {whole:.1e} off, allowed {bound:.1e}"
    elif not part <= ONE_PART * bound:
        yield f"{name} is {part:.1e} off in one place, allowed {ONE_PART * bound:.1e}"


def _bounds(case: Case, names: Iterable[str]) -> dict[str, float]:
    tolerance = operation_named(case.operation).tolerances[case.dtype]
    bounds = {name: tolerance.gradient(name[1:]) if name.startswith("d") else tolerance.forward for name in names}
    if case.slots and "state" in bounds:
        pool = operation_named(case.operation).tolerances[case.pool_dtype].forward
        bounds["state"] = max(bounds["state"], pool)
    return bounds


@contextmanager
def _conditions(case: Case) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(case.deterministic)
    try:
        with torch.set_grad_enabled(case.backward):
            yield
    finally:
        torch.use_deterministic_algorithms(before)


def _run(case: Case, call: Arguments, device: str) -> dict[str, Distance]:
    function = getattr(gdn, operation_named(case.operation).function)
    guard = Guard(call)
    if case.capture:
        return _replayed(function, case, guard, device)
    if case.backward:
        return _gradients(function, case, guard)
    first: Results = {}
    if case.other_lengths:
        first = _outputs(function, case, guard)
        first.pop("state" if case.slots else "", None)
        kept = {name: value.clone() for name, value in first.items()}
        _overwrite(guard, prepare(case, device, case.seed + 1, case.other_lengths))
    results = _outputs(function, case, guard)
    if not all(torch.equal(value, kept[name]) for name, value in first.items()):
        raise _WrongError("a later call changed an earlier one's results")
    if case.deterministic:
        again = _outputs(function, case, Guard(call))
        if not all(torch.equal(again[name], value) for name, value in results.items()):
            raise _WrongError("two calls on the same data differ")
    return _errors(case, guard, results)


def _outputs(function: Callable[..., Any], case: Case, guard: Guard) -> Results:
    o, final = function(**guard.call)
    if o.is_cuda:
        torch.cuda.synchronize(o.device)
    return _checked(case, guard, o, final)


def _checked(case: Case, guard: Guard, o: Tensor, final: Tensor | None) -> Results:
    """The results of a call, with everything checked that needs no reference."""
    call = guard.call
    if o.shape != call["v"].shape or o.dtype != call["q"].dtype:
        raise _WrongError(f"the output is {o.dtype} {list(o.shape)}")
    if (final is not None) is not case.final:
        raise _WrongError(f"a final state was {'not ' if case.final else ''}given")
    results = {"o": o}
    if case.slots:
        results["state"] = call["initial_state"]
        disturbed = guard.disturbed("initial_state", _named(call))
        if final is not None and final.data_ptr() != call["initial_state"].data_ptr():
            raise _WrongError("another tensor than the pool was given back")
    else:
        disturbed = guard.disturbed()
        if final is not None:
            wide = torch.float64 if case.dtype == "float64" else torch.float32
            if final.dtype != wide:
                raise _WrongError(f"the final state is {final.dtype}")
            results["state"] = final
    if disturbed:
        raise _WrongError(f"wrote into or around {', '.join(disturbed)}")
    if case.behind and o[:, -case.behind :].any():
        raise _WrongError("tokens behind the last sequence are not zero")
    return results


def _named(call: Arguments) -> Tensor:
    """Which slots of the pool the call's indices name."""
    slots = torch.arange(len(call["initial_state"]), device=call["q"].device)
    named: Tensor = (slots[:, None] == call["state_indices"].flatten()[None]).any(1)
    return named


def _seen(guard: Guard) -> Arguments:
    """The call as it was, with nothing behind the last sequence, and −1 for what is no slot."""
    call = dict(guard.call)
    for name, value in call.items():
        if isinstance(value, Tensor):
            call[name] = guard.before(name).nan_to_num() if value.is_floating_point() else guard.before(name)
    if "state_indices" in call:
        slots = call["state_indices"]
        call["state_indices"] = torch.where(slots < len(call["initial_state"]), slots, -1)
    return call


def _errors(case: Case, guard: Guard, results: Results) -> dict[str, Distance]:
    call = _seen(guard)
    wanted = dict(zip(("o", "state"), expected(call), strict=True))
    if results["o"][~wanted["o"].flatten(2).any(-1)].any():
        raise _WrongError("tokens that must give zeros do not")
    return _distances(results, wanted)


def _distances(results: Results, wanted: Results) -> dict[str, Distance]:
    for name, value in results.items():
        if value.shape != wanted[name].shape:
            raise _WrongError(f"{name} is {list(value.shape)}, not {list(wanted[name].shape)}")
        if not torch.isfinite(value).all():
            raise _WrongError(f"{name} has NaN or infinite values")
    return {name: _distance(name, value, wanted[name]) for name, value in results.items()}


def _gradients(function: Callable[..., Any], case: Case, guard: Guard) -> dict[str, Distance]:
    """Errors of outputs and of the gradient of each input, for one random direction of outputs and states."""
    inputs = leaves(guard.call, case.gradients_of or DIFFERENTIABLE)

    def differentiated(call: Arguments, run: Callable[[Arguments], Any]) -> Results:
        o, final = run(call)
        results = {"o": o} if final is None or not case.final else {"o": o, "state": final}
        generator = torch.Generator().manual_seed(case.seed)
        loss = torch.zeros((), dtype=torch.float64, device=o.device)
        for each in results.values():
            direction = torch.randn(each.shape, generator=generator, dtype=torch.float64).to(each.device)
            loss = loss + (each.double() * direction).sum()
        grads = torch.autograd.grad(loss, [call[name] for name in inputs])
        return results | {f"d{name}": grad for name, grad in zip(inputs, grads, strict=True)}

    found = differentiated(guard.call, lambda call: function(**call))
    _checked(case, guard, found["o"], found.get("state"))
    if case.deterministic:
        again = differentiated(guard.call, lambda call: function(**call))
        if not all(torch.equal(found[name], again[name]) for name in found):
            raise _WrongError("two gradients of the same call differ")
    clean = _seen(guard)
    exact = {**clean, **{name: clean[name].detach().double().requires_grad_() for name in inputs}}
    wanted = differentiated(exact, expected)
    return _distances(found, wanted)


def _replayed(function: Callable[..., Any], case: Case, guard: Guard, device: str) -> dict[str, Distance]:
    """The call in a CUDA graph, warmed up on a side stream, and replayed on another batch."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        function(**guard.call)
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, final = function(**guard.call)
    _overwrite(guard, prepare(case, device, case.seed + 1, case.other_lengths or None))
    graph.replay()
    torch.cuda.synchronize(device)
    return _errors(case, guard, _checked(case, guard, o, final))


def _overwrite(guard: Guard, other: Arguments) -> None:
    """Another batch in the same tensors."""
    for name, value in guard.call.items():
        if isinstance(value, Tensor):
            value.copy_(other[name])
    guard.keep()
