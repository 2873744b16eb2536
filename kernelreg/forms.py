"""What of a call decides everything but its numbers: its form. A form that was met once is one look-up.

Imports torch.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

#: One C call a tensor: nearly all that a form costs.
_tensor = attrgetter("shape", "dtype", "device", "requires_grad")


def form_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    words: Mapping[str, Any],
    options: Mapping[str, Any],
    override: object,
) -> Hashable:
    """The form of a call: whatever its checks and its decision look at, but for values that lie on the host.

    Args:
        words: the keywords that every kernel gets; ``scale`` counts for nothing.
        options: the further ones.
        override: the ``use()`` that holds.

    Raises:
        AttributeError: an argument is no tensor.
        TypeError: an argument cannot be part of a key; the look-up may raise it as well.
    """
    state, edges = words["initial_state"], words["cu_seqlens"]
    return (
        _tensor(q),
        _tensor(k),
        _tensor(v),
        _tensor(g),
        _tensor(beta),
        state is not None and _tensor(state),
        edges is not None and _tensor(edges),
        words["output_final_state"],
        words["use_qk_l2norm_in_kernel"],
        words["state_v_first"],
        "state_indices" in words and _pool(words),
        _further(options) if options else None,
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        q.is_cuda and torch.cuda.is_current_stream_capturing(),
        override,
    )


def _pool(words: Mapping[str, Any]) -> Hashable:
    """Of a pool that is updated in place its strides count, too."""
    pool, slots, accepted = words["initial_state"], words["state_indices"], words["num_accepted_tokens"]
    inference = (pool.is_inference(), torch.is_inference_mode_enabled())
    return (pool.stride(), inference, _tensor(slots), accepted is not None and _tensor(accepted))


def _further(options: Mapping[str, Any]) -> Hashable:
    return tuple((name, _tensor(x) if isinstance(x, Tensor) else x) for name, x in options.items())
