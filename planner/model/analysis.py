"""A captured model with its logical dimensions, and TaskGraphs without marks."""

from __future__ import annotations

from dataclasses import dataclass

from whalejax.planner.model.dimensions import Dimensions
from whalejax.planner.model.expert_regions import with_expert_regions
from whalejax.planner.model.graph import Graph
from whalejax.planner.model.logical_dimensions import analyse


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphAnalysis:
    """A graph with its logical dimensions; experts are separate TaskGraphs."""

    graph: Graph
    dims: Dimensions


def analyse_graph(graph: Graph) -> GraphAnalysis:
    """Finds logical dimensions, and TaskGraphs without marks.

    Lowering repeats this on its own trace, so it must depend on the graph alone.
    """
    dims = analyse(graph)
    return GraphAnalysis(graph=with_expert_regions(graph, dims), dims=dims)
