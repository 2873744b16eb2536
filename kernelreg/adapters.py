"""Importing a backend's adapter: the one place where a third party's code is run, and where its faults end."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from kernelreg.descriptor import Kernel
from kernelreg.errors import AdapterError
from kernelreg.reasons import Reason, ReasonCode
from kernelreg.registry import Backend


def load_function(backend: Backend, kernel: Kernel) -> Callable[..., Any]:
    """The kernel's callable.

    Raises:
        AdapterError: the import failed, in whatever way (flash_qla raises ValueError without a GPU, others exit).
    """
    adapter = backend.descriptor.adapter
    try:
        module = importlib.import_module(adapter)
        function = getattr(module, kernel.function)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too: a backend's fault never ends the host process
        text = _chain(error)
        reason = Reason(code=ReasonCode.IMPORT_ERROR, subject=adapter, actual=text, fix=None)
        raise AdapterError(f"{backend.name}: {adapter} cannot be imported: {text}", reason) from error
    if not callable(function):
        text = f"{kernel.function} is a {type(function).__name__}, not a callable"
        reason = Reason(code=ReasonCode.IMPORT_ERROR, subject=adapter, actual=text)
        raise AdapterError(f"{backend.name}: {adapter}: {text}", reason)
    return function  # type: ignore[no-any-return]


def _chain(error: BaseException) -> str:
    """The error and what caused it, outermost first, each in one line."""
    told: list[str] = []
    link: BaseException | None = error
    while link is not None and len(told) < 5:
        lines = str(link).strip().splitlines()
        told.append(f"{type(link).__name__}: {lines[0][:300]}" if lines else type(link).__name__)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return " ← ".join(told)
