"""Importing a backend's adapter: the one place where a third party's code is run, and where its faults end."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from kernelreg.announce import say_once
from kernelreg.descriptor import Kernel
from kernelreg.errors import AdapterError
from kernelreg.faults import fault_of
from kernelreg.machine.detect import ENVIRONMENT
from kernelreg.policy import PREFIX
from kernelreg.reasons import Reason, ReasonCode
from kernelreg.registry import Backend


def load_function(backend: Backend, kernel: Kernel) -> Callable[..., Any]:
    """The kernel's callable. What the import changed of the variables that decide is said, and stays: it may be meant.

    Raises:
        AdapterError: the import failed, in whatever way (flash_qla raises ValueError without a GPU, others exit).
    """
    adapter = backend.descriptor.adapter
    known = adapter in sys.modules
    before = {} if known else deciding(os.environ)
    try:
        function = import_function(adapter, kernel.function)
    except AdapterError as error:
        raise AdapterError(f"{backend.name}: {error}", error.reason) from error.__cause__
    finally:
        for change in [] if known else changes(before, deciding(os.environ)):
            say_once(logging.WARNING, f"importing {adapter} ({backend.name}) changed the environment: {change}")
    return function


def import_function(adapter: str, name: str) -> Callable[..., Any]:
    """A callable of an adapter.

    Raises:
        AdapterError: the import failed, in whatever way, or gave no such callable.
    """
    try:
        module = importlib.import_module(adapter)
        function = getattr(module, name)
        fits = callable(function)
    except BaseException as error:  # SystemExit too: a backend's fault never ends the host process
        text = fault_of(error)
        reason = Reason(code=ReasonCode.IMPORT_ERROR, subject=adapter, actual=text)
        raise AdapterError(f"{adapter} cannot be imported: {text}", reason) from error
    if not fits:
        text = f"{name} is a {type(function).__name__}, not a callable"
        reason = Reason(code=ReasonCode.IMPORT_ERROR, subject=adapter, actual=text)
        raise AdapterError(f"{adapter}: {text}", reason)
    return function  # type: ignore[no-any-return]


def deciding(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that decide: kernelreg's own, and those by which devices are seen and kernels are built."""
    return {name: value for name, value in environ.items() if name.startswith(PREFIX) or name in ENVIRONMENT}


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """What is another value now, a line each."""
    told = []
    for name in sorted(before.keys() | after.keys()):
        was, now = before.get(name), after.get(name)
        if was != now:
            told.append(f"{name} was {_quoted(was)}, is {_quoted(now)}")
    return told


def _quoted(value: str | None) -> str:
    return "not set" if value is None else repr(value)
