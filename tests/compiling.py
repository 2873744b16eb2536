"""``torch.compile`` with no way around a graph break, and the graphs that it makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    """Each test compiles for itself."""
    yield
    torch._dynamo.reset()


def whole(function: Callable[..., Any], backend: Any = "aot_eager") -> Callable[..., Any]:
    """The function compiled with no way around a graph break."""

    def run(**call: Any) -> Any:
        return function(**call)

    return torch.compile(run, fullgraph=True, backend=backend)


def counted(function: Callable[..., Any]) -> tuple[Callable[..., Any], list[torch.fx.GraphModule]]:
    """The function in one graph for each kind of call, and the graphs as they come."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, example: object) -> Any:
        graphs.append(graph)
        return graph.forward

    return whole(function, backend), graphs
