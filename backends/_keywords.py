"""What a library's function takes, release by release."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def keywords_of(function: Callable[..., Any]) -> frozenset[str]:
    """The keywords that the function names, under whatever wraps it; a library may swallow others in silence."""
    return frozenset(inspect.signature(inspect.unwrap(function)).parameters)
