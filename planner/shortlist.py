"""Meshes that are worth a closer look, where there are too many to look at all.

The plans that run today are weighed one by one, under programs that are traced for
each: a thousand devices have hundreds of meshes. The wide search prices the same
meshes as arrays, in a fraction of a second and with the same formulas, but knows
neither attention in blocks nor logits made in parts. What it finds far from the best
is not looked at again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

from whalejax.meshes.cluster import Cluster
from whalejax.planner.frames import Frames
from whalejax.planner.graph import Graph
from whalejax.planner.outlook import Placement
from whalejax.planner.priced import Column
from whalejax.planner.search import PLANNED_AXES, Request
from whalejax.planner.weigh import Weighed
from whalejax.planner.wide import NoMeshError, WideSearch


MANY: Final = 40
"""Meshes that are looked at one by one; of more, the promising ones are."""

MOST: Final = 8
"""Promising meshes of one program that are looked at."""

SLACK: Final = 0.1
"""A mesh is promising whose best plan is slower than the best by this part at most."""


def promising(
    graphs: Sequence[Graph], cluster: Cluster, request: Request
) -> tuple[frozenset[tuple[int, ...]], float]:
    """Meshes whose plans may be among the best.

    Args:
        graphs: the captured loss, and what else may be run for it.
        cluster: the machine.
        request: what is asked of plans that run.

    Returns:
        Their sizes of ``PLANNED_AXES``, none where nothing is found that fits; and
        seconds of a step that a plan which is looked at may take.
    """
    mesh = {"stage": 1, "context": 1, **(request.mesh or {})}
    asked = dataclasses.replace(request, mesh=mesh)
    every = [_steps(graph, cluster, asked) for graph in graphs]
    limit = min((s for one in every for s in one.values()), default=0.0) * (1 + SLACK)
    near = [
        mesh
        for steps in every
        for mesh in sorted(steps, key=lambda mesh: steps[mesh])[:MOST]  # noqa: B023
        if steps[mesh] <= limit
    ]
    return frozenset(near), limit


def _steps(
    graph: Graph, cluster: Cluster, request: Request
) -> dict[tuple[int, ...], float]:
    """Seconds of a step in the best plan of each mesh that is near the best."""
    try:
        search = _Search(graph, cluster, request)
    except NoMeshError:
        return {}
    search.run()
    return search.steps


class _Search(WideSearch):
    """A wide search that remembers meshes, and stops later.

    Attributes:
        steps: seconds of a step in the best plan of each mesh.
    """

    def __init__(self, graph: Graph, cluster: Cluster, request: Request) -> None:
        super().__init__(graph, cluster, request)
        self.steps: dict[tuple[int, ...], float] = {}

    def placements(self) -> list[Placement]:
        """Plans that run today treat all devices as the slowest."""
        return super().placements()[:1]

    def _limit(self) -> float:
        return self.tally.best * (1 + SLACK)

    def _keep(
        self,
        placement: Placement,
        frames: Frames,
        found: Weighed,
        counts: Sequence[tuple[int, ...]],
        index: int,
    ) -> None:
        step, cell = float(found.step[index]), frames.cell[index]
        self.tally.best = min(self.tally.best, step)
        sizes = {"data": frames.data[index], "fsdp": frames.fsdp[index]}
        mesh = tuple(
            int(sizes[a] if a in sizes else self.model.cells[Column(a)][cell])
            for a in PLANNED_AXES
        )
        self.steps[mesh] = min(step, self.steps.get(mesh, step))
