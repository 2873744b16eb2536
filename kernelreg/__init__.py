"""kernelreg: which Gated Delta Net kernel should run here, and why not the others.

``kernelreg.resolve("gdn")`` decides and explains; ``kernelreg.gdn`` has the functions that decide per call.
Importing this package imports nothing else: each public name is fetched when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kernelreg._version import __version__

if TYPE_CHECKING:
    from kernelreg.agreement import Agreement
    from kernelreg.api import (
        facts,
        make_policy,
        on_resolve,
        quarantine,
        refresh,
        register,
        resolve,
        resolve_together,
        use,
    )
    from kernelreg.call import Call
    from kernelreg.descriptor import Descriptor
    from kernelreg.errors import (
        AdapterError,
        CallError,
        ConfigurationError,
        DescriptorError,
        FactsError,
        KernelFailedError,
        KernelregError,
        NoBackendError,
        RanksError,
        RanksTimeoutError,
    )
    from kernelreg.findings import Finding, Quarantine
    from kernelreg.machine import Facts
    from kernelreg.policy import Policy
    from kernelreg.ranks import agree
    from kernelreg.reasons import Reason, ReasonCode
    from kernelreg.resolution import Resolution
    from kernelreg.resolver import Candidate
    from kernelreg.together import JointResolution

_HOME = {
    "kernelreg.agreement": ("Agreement",),
    "kernelreg.api": (
        "facts",
        "make_policy",
        "on_resolve",
        "quarantine",
        "refresh",
        "register",
        "resolve",
        "resolve_together",
        "use",
    ),
    "kernelreg.call": ("Call",),
    "kernelreg.descriptor": ("Descriptor",),
    "kernelreg.errors": (
        "AdapterError",
        "CallError",
        "ConfigurationError",
        "DescriptorError",
        "FactsError",
        "KernelFailedError",
        "KernelregError",
        "NoBackendError",
        "RanksError",
        "RanksTimeoutError",
    ),
    "kernelreg.findings": ("Finding", "Quarantine"),
    "kernelreg.machine": ("Facts",),
    "kernelreg.policy": ("Policy",),
    "kernelreg.ranks": ("agree",),
    "kernelreg.reasons": ("Reason", "ReasonCode"),
    "kernelreg.resolution": ("Resolution",),
    "kernelreg.resolver": ("Candidate",),
    "kernelreg.together": ("JointResolution",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "AdapterError",
    "Agreement",
    "Call",
    "CallError",
    "Candidate",
    "ConfigurationError",
    "Descriptor",
    "DescriptorError",
    "Facts",
    "FactsError",
    "Finding",
    "JointResolution",
    "KernelFailedError",
    "KernelregError",
    "NoBackendError",
    "Policy",
    "Quarantine",
    "RanksError",
    "RanksTimeoutError",
    "Reason",
    "ReasonCode",
    "Resolution",
    "__version__",
    "agree",
    "facts",
    "make_policy",
    "on_resolve",
    "quarantine",
    "refresh",
    "register",
    "resolve",
    "resolve_together",
    "use",
]


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'kernelreg' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
