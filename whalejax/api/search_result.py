"""Result of ``wh.search``, with its pictures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from whalejax.display import searches
from whalejax.meshes.errors import warn
from whalejax.planner.plan.report.search_data import (
    ClusterCandidate as ClusterCandidate,
)
from whalejax.planner.plan.report.search_data import (
    InfeasibleCluster as InfeasibleCluster,
)
from whalejax.planner.plan.report.search_data import SearchData


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SearchResult(SearchData):
    """Plans of one model on several clusters, best first; ``wh.search`` makes it.

    A sequence: ``found[0]`` is the best plan. ``print`` shows a table.

    Attributes:
        plans: Best first.
        names: Each plan's cluster, as the user named it.
        refused: Clusters on which there is no plan, those that lack least first.
        weighed: Every plan that was evaluated and is remembered, on all clusters.
        notes: Reasons why the plans cannot be compared as they are.
    """

    def _repr_mimebundle_(
        self, include: object = None, exclude: object = None
    ) -> dict[str, str]:
        return searches.bundle(self)

    def chart(self) -> searches.SearchChart:
        """Step time and peak memory of every plan that was evaluated, on all clusters.

        Hovering shows the mesh and the largest costs; a click on a plan that was found
        leads to it. It needs the extra ``whalejax[notebook]``, and no network.

        Returns:
            What a notebook draws; ``save`` writes it as ``.html`` or ``.svg``, and its
            ``altair`` is the chart to be changed.

        Raises:
            WhaleError: The extra is not installed.
        """
        return searches.chart(self)


def __getattr__(name: str) -> Any:
    if name == "Found":
        warn("Found is called SearchResult now", DeprecationWarning)
        return SearchResult
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
