"""What FlashInfer's functions take, release by release."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def words_of(function: Callable[..., Any]) -> frozenset[str]:
    """The keywords that a function names."""
    return frozenset(inspect.signature(inspect.unwrap(function)).parameters)
