"""What the installed FlashQLA says of itself, for ``kernelreg backends --stale``.

It chooses its kernels at import, for the target that TileLang reports, and raises where it has none. So it is imported
once for each target, as if the card were there: of the card itself it reads only the number of its multiprocessors.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

from kernelreg.claims import Claim, Unasked, forget, refusal, unasked
from kernelreg.faults import fault_of

_TARGETS = ("8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "10.7", "11.0", "12.0", "12.1")
_CHUNK = "flash_qla.ops.gated_delta_rule.chunk"


def claims() -> Iterator[Claim | Unasked]:
    """Targets, with and without a backward, and dtypes."""
    import tilelang

    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(multi_processor_count=132)  # type: ignore[assignment,return-value]
    chosen: Any = None
    for target in _TARGETS:
        tilelang.contrib.nvcc.get_target_compute_version = lambda _=None, target=target: target
        forget("flash_qla")
        try:
            chunk: Any = import_module(_CHUNK)
            said = _missing(chunk)
            chosen = chunk
        except (ImportError, ValueError) as error:
            chunk, said = None, fault_of(error)
        except Exception as error:
            yield unasked(f"import flash_qla for {target}", error)
            continue
        asked = f"import flash_qla for {target}"
        yield Claim(operation="gdn.chunk", asked=asked, takes=said is None, said=said, compute_capability=target)
        if chunk is None or said is not None:
            continue
        backward = getattr(chunk, "fused_gdr_bwd", None) is not None
        yield Claim(
            operation="gdn.chunk",
            asked=f"{_CHUNK}.fused_gdr_bwd for {target}",
            takes=backward,
            said=None if backward else "there is none",
            compute_capability=target,
            features=("backward",),
        )
    if chosen is not None:
        yield from _dtypes(chosen)


def _missing(chunk: Any) -> str | None:
    """What every call imports and these kernels do not define: SM120 in 0.1.3 lacks ``aggregate_card_state``."""
    prepare = getattr(chunk, "cp_preprocess_fwd", None)
    if prepare is None:
        return None
    idle = SimpleNamespace(is_inter=False, is_intra=False)
    named = dict.fromkeys(inspect.signature(prepare).parameters)
    try:
        prepare(*[idle if name == "cp_context" else None for name in named])
    except ImportError as error:
        return fault_of(error)
    except Exception:
        return None  # it came further than its imports
    return None


def _dtypes(chunk: Any) -> Iterator[Claim | Unasked]:
    function = inspect.unwrap(chunk.chunk_gated_delta_rule)
    for dtype in ("bfloat16", "float16", "float32"):
        x = torch.empty(1, 64, 2, 128, dtype=getattr(torch, dtype), device="meta")
        gates = torch.empty(1, 64, 2, device="meta")
        asked = f"{_CHUNK}.chunk_gated_delta_rule"
        try:
            said = refusal(function, x, x, x, gates, gates)
        except Exception as error:
            yield unasked(f"{asked} in {dtype}", error)
            continue
        yield Claim(operation="gdn.chunk", asked=asked, takes=said is None, said=said, dtype=dtype)
