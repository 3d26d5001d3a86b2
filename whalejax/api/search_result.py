"""Result of ``wh.search``, with its charts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from whalejax.display import searches
from whalejax.meshes.arguments.wrong_arguments import names_arguments
from whalejax.meshes.errors import warn
from whalejax.planner.plan.report.search_data import (
    ClusterCandidate as ClusterCandidate,
)
from whalejax.planner.plan.report.search_data import (
    InfeasibleCluster as InfeasibleCluster,
)
from whalejax.planner.plan.report.search_data import SearchData


@names_arguments(
    "SearchResult",
    instance="found",
    habits={"best": "found[0] is the best plan"},
)
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SearchResult(SearchData):
    """Plans of one model on several clusters, best first; the result of ``wh.search``.

    It is a sequence: ``found[0]`` is the best plan, and ``found["h100:8"]`` is the best
    plan on this cluster. ``print`` shows a table.

    Attributes:
        plans: Plans, best first.
        names: Cluster of each plan, as the user named it.
        refused: Clusters without a plan; those that lack least memory come first.
        weighed: Evaluated candidates of all clusters.
        notes: Reasons why the plans cannot be compared directly.
    """

    def _repr_mimebundle_(
        self, include: object = None, exclude: object = None
    ) -> dict[str, str]:
        return searches.bundle(self)

    def chart(self) -> searches.SearchChart:
        """Returns a chart of the step time and peak memory of all candidates.

        The pointer over a plan shows the mesh and the largest costs; a click shows the
        plan. The chart needs the extra ``whalejax[notebook]``, but no network.

        Returns:
            Chart that a notebook draws. ``save`` writes it as ``.html`` or ``.svg``.
            Its attribute ``altair`` is an Altair chart, which can be changed.

        Raises:
            WhaleError: The extra is not installed.
        """
        return searches.chart(self)


def __getattr__(name: str) -> Any:
    if name == "Found":
        warn("Found is called SearchResult now", DeprecationWarning)
        return SearchResult
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
