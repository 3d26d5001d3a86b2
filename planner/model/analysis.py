"""A captured model with its dimensions, and the parts that no mark names."""

from __future__ import annotations

from dataclasses import dataclass

from whalejax.planner.model.dimensions import Dimensions
from whalejax.planner.model.expert_regions import with_expert_regions
from whalejax.planner.model.graph import Graph
from whalejax.planner.model.logical_dimensions import analyse


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphAnalysis:
    """A graph with its dimensions, and experts set apart."""

    graph: Graph
    dims: Dimensions


def analyse_graph(graph: Graph) -> GraphAnalysis:
    """Finds dimensions and TaskGraphs that no mark names.

    Lowering repeats this on its own trace, so it must depend on the graph alone.
    """
    dims = analyse(graph)
    return GraphAnalysis(graph=with_expert_regions(graph, dims), dims=dims)
