"""Counts the graphs that torch.compile makes and runs; they run as written, without Inductor."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch._dynamo.utils import counters

from litft.model import loss


class GraphCounts:
    """How many graphs were made and run.

    A function that Dynamo leaves alone because tracing it raised runs none.
    """

    def __init__(self) -> None:
        self.made = self.run = 0
        # for each graph, the names of the numbers that are no constants in it
        self.symbols: list[list[str]] = []

    def backend(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        """Return the graph, counted."""
        self.made += 1
        sources = torch._guards.TracingContext.get().fake_mode.shape_env.var_to_sources
        self.symbols.append(
            [
                source.name if isinstance(source.name, str) else source.name()
                for source, *_ in sources.values()
            ]
        )

        def run(*inputs: Any) -> Any:
            self.run += 1
            return graph.forward(*inputs)

        return run

    def reset(self) -> tuple[int, int]:
        """Return the counts since the last call: graphs made, and graphs run."""
        counts = self.made, self.run
        self.made = self.run = 0
        return counts

    @property
    def breaks(self) -> dict[str, int]:
        """Return the graph breaks by reason."""
        return dict(counters["graph_break"])


@contextmanager
def counted_graphs() -> Iterator[GraphCounts]:
    """Within the context, torch.compile counts graphs instead of generating code."""
    counts, compile_with = GraphCounts(), torch.compile
    torch._dynamo.reset()
    loss._compiled_softmax_loss.cache_clear()
    counters.clear()

    def compiled(
        model: Any = None, *, mode: str | None = None, backend: Any = None, **settings: Any
    ) -> Any:
        return compile_with(model, backend=counts.backend, **settings)

    with mock.patch.object(torch, "compile", compiled):
        yield counts
    torch._dynamo.reset()
    loss._compiled_softmax_loss.cache_clear()
