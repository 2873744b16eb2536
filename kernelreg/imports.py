"""Importing adapters for real, each in a child process with a limit: what only the import can tell of a backend.

The same module is the parent's side (:func:`import_adapter`) and the child's (:func:`main`).
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import msgspec

from kernelreg.asking import NoAnswerError, ask, reply
from kernelreg.reasons import Reason, ReasonCode

#: Seconds for one adapter: torch, Triton and TileLang from a cold network file system.
IMPORT_SECONDS = 120.0


class Adapter(msgspec.Struct, frozen=True, kw_only=True):
    """What to import: a module, and the callables that kernels name in it."""

    module: str
    functions: tuple[str, ...]


class Imported(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What came of an import.

    Attributes:
        reason: why it failed: ``import-error`` where it raised, ``probe-error`` where it took the process along or did
            not end; None where it did not fail.
        changed: what it changed beside, a sentence each: variables, functions of torch, what it printed.
    """

    backend: str = ""
    reason: Reason | None = None
    changed: tuple[str, ...] = ()


def import_adapter(backend: str, adapter: Adapter, limit: float = IMPORT_SECONDS) -> Imported:
    """Import an adapter in a process of its own."""
    try:
        found, printed = ask(__name__, adapter, Imported, limit)
    except NoAnswerError as error:
        reason = Reason(
            code=ReasonCode.PROBE_ERROR,
            subject=adapter.module,
            actual=f"importing it: {error}",
            fix=f"KERNELREG_DISABLE={backend}",
        )
        return Imported(backend=backend, reason=reason)
    changed = (*found.changed, *([f"it printed {printed!r}"] if printed else []))
    return msgspec.structs.replace(found, backend=backend, changed=changed)


def main() -> int:
    """The child's side."""
    return reply(Adapter, _import)


def _import(adapter: Adapter) -> Imported:
    from kernelreg.adapters import changes, deciding, import_function
    from kernelreg.errors import AdapterError

    environment, torch = dict(os.environ), _TorchWatch()
    sys.meta_path.insert(0, torch)
    reason = None
    try:
        for name in adapter.functions:
            import_function(adapter.module, name)
    except AdapterError as error:
        reason = error.reason
    changed = changes(deciding(environment), deciding(os.environ))
    touched = {name for name, _ in environment.items() ^ dict(os.environ).items()}
    touched -= deciding(environment).keys() | deciding(os.environ).keys()
    if touched:  # what may be a secret is not shown
        changed.append(f"it changed {_named(sorted(touched))}")
    replaced = torch.replaced()
    if replaced:
        changed.append(f"it replaced {_named(replaced)}")
    return Imported(reason=reason, changed=tuple(changed))


#: Names that are told of many.
_TOLD = 6


def _named(names: list[str]) -> str:
    return ", ".join(names[:_TOLD]) + (f" and {len(names) - _TOLD} more" if len(names) > _TOLD else "")


class _TorchWatch:
    """Notes what torch's functions are when torch has been imported, whoever does so."""

    #: Where a patch of torch goes.
    places = ("torch", "torch.Tensor", "torch.nn.functional", "torch.autograd", "torch.cuda")

    def __init__(self) -> None:
        self._at_first: dict[str, object] = {}

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """The import system asks: for torch, its own answer, with a look at the module once it is there."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_look(module: ModuleType) -> None:
                run(module)
                self._at_first = self._functions()

            spec.loader.exec_module = run_and_look  # type: ignore[method-assign]
        return spec

    def replaced(self) -> list[str]:
        """The functions that are others now."""
        return [
            name
            for name, function in self._functions().items()
            if self._at_first.get(name, function) is not function and not _of_torch(function)
        ]

    def _functions(self) -> dict[str, object]:
        found: dict[str, object] = {}
        for place in self.places:
            module, _, attribute = place.rpartition(".")
            owner = sys.modules.get(place) or getattr(sys.modules.get(module), attribute, None)
            members = dict(getattr(owner, "__dict__", {})).items()
            found |= {f"{place}.{name}": value for name, value in members if callable(value)}
        return found


def _of_torch(function: object) -> bool:
    """Whether the code is torch's own: its compiler replaces some functions when it is first imported."""
    file = str(getattr(getattr(function, "__code__", None), "co_filename", ""))
    root = getattr(sys.modules.get("torch"), "__file__", None)
    return root is not None and Path(root).parent in Path(file).parents
