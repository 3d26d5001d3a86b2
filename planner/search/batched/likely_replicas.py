"""Chooses the replicas of unlike devices that plans that run are searched on.

Replicas of each size and number of micro-batches are weighed one by one: there are
many. The wide search prices all of them as arrays. What it finds far from the best is
not looked at again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar, Final

from whalejax.meshes.cluster import Cluster
from whalejax.planner.model.graph import Graph
from whalejax.planner.search.batched.branch_and_bound import (
    NoMeshError,
    WideSearch,
)
from whalejax.planner.search.batched.cases import Placement
from whalejax.planner.search.batched.cells import Column
from whalejax.planner.search.batched.mesh_grid import Frames
from whalejax.planner.search.batched.step_time import CaseCosts
from whalejax.planner.search.enumerate import PLANNED_AXES
from whalejax.planner.search.request import Hosted, Request
from whalejax.planner.search.zero1_slices import sliceable
from whalejax.planner.terms import OFFLOADS, Chosen


MOST: Final = 8
"""Meshes of one replica that are looked at for each number of micro-batches."""

SLACK: Final = 0.1
"""How much slower than the best replicas may be that are looked at."""


Mesh = tuple[int, ...]

_Case = tuple[Chosen, int, int, int]
"""How attention runs, devices of a replica, micro-batches and the level of ZeRO."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Likely:
    """Replicas of unlike devices that may be among the best.

    Attributes:
        size: devices of a replica.
        count: micro-batches of all.
        zero: level over replicas.
        seconds: of a step, as the wide search has it.
        among: sizes of ``PLANNED_AXES`` of the promising meshes of one replica.
        attention: how it runs.
        policies: of remat, from the lightest that may be among the best.
    """

    size: int
    count: int
    zero: int
    seconds: float
    among: frozenset[Mesh]
    attention: Chosen
    policies: tuple[str, ...]

    def of(self, request: Request) -> Request:
        """What is asked, and no more than this."""
        return dataclasses.replace(
            request,
            among=self.among,
            attention=self.attention,
            policies=self.policies,
        )


def likely_replicas(
    graphs: Mapping[Chosen, Graph],
    cluster: Cluster,
    request: Request,
    allowed: Mapping[int, Collection[int]],
) -> list[Likely]:
    """Sizes of replicas and numbers of micro-batches, the most promising first.

    Args:
        graphs: the captured loss, and what else may be run for it, by how attention
            runs.
        cluster: the machine.
        request: what is asked of replicas that take unlike shares.
        allowed: by devices of a replica, the numbers of micro-batches to look at.
    """
    asked = dataclasses.replace(
        request, mesh={"stage": 1, **(request.mesh or {})}, num_micro_batches=None
    )
    cases: dict[_Case, dict[Mesh, float]] = {}
    lightest: dict[_Case, int] = {}
    for attention, graph in graphs.items():
        try:
            search = _Replicas(graph, cluster, asked, ((), attention, 1))
        except NoMeshError:
            continue
        search.run()
        for (mesh, count, zero), step in search.counted.items():
            inner = (1, *mesh[1:])
            size = math.prod(inner)
            if count in allowed.get(size, ()):
                case = attention, size, count, zero
                steps = cases.setdefault(case, {})
                steps[inner] = min(step, steps.get(inner, step))
                policy = search.lightest[mesh, count, zero]
                lightest[case] = min(policy, lightest.get(case, policy))
    policies = {case: request.policies[n:] for case, n in lightest.items()}
    return _near(cases, policies) if cases else []


def _near(
    cases: Mapping[_Case, dict[Mesh, float]],
    policies: Mapping[_Case, tuple[str, ...]],
) -> list[Likely]:
    limit = min(min(steps.values()) for steps in cases.values()) * (1 + SLACK)
    found = [
        Likely(
            size=size,
            count=count,
            zero=zero,
            seconds=min(steps.values()),
            among=frozenset(mesh for mesh in _least(steps) if steps[mesh] <= limit),
            attention=attention,
            policies=policies[attention, size, count, zero],
        )
        for (attention, size, count, zero), steps in cases.items()
    ]
    return sorted(
        (one for one in found if one.seconds <= limit),
        key=lambda one: (one.seconds, one.zero, one.size, one.count, one.attention),
    )


def _least(values: dict[Mesh, float]) -> list[Mesh]:
    return sorted(values, key=lambda mesh: values[mesh])[:MOST]


class _Replicas(WideSearch):
    """A wide search of replicas on unlike devices.

    Attributes:
        counted: seconds of a step in the best plan of each mesh, number of
            micro-batches and level of ZeRO.
        lightest: of the same, the lightest policy of remat in any plan, by its place
            among those of the request.
    """

    orders: ClassVar[bool] = False

    def __init__(
        self, graph: Graph, cluster: Cluster, request: Request, program: object
    ) -> None:
        super().__init__(graph, cluster, request, program=program)
        self.counted: dict[tuple[Mesh, int, int], float] = {}
        self.lightest: dict[tuple[Mesh, int, int], int] = {}

    @property
    def slack(self) -> float:
        """By which part cases may be slower than the best, and are remembered."""
        return SLACK

    def placements(self) -> list[Placement]:
        """Replicas of one kind each."""
        return [p for p in super().placements() if p.by == "replicas"]

    def _offloads(self) -> list[int]:
        """Without what no executor keeps in host memory, or this optimizer cannot."""
        hosted = Hosted() if self.request.hosted is None else self.request.hosted()
        never = {"gradients"}
        if not self.liveness.program.waiting:  # Where nothing is computed again.
            never.add("activations")
        if not hosted.params:
            never.add("params")
        if not any(hosted.state.values()):
            never.add("optimizer")
        bits = sum(1 << OFFLOADS.index(name) for name in never)
        return [one for one in super()._offloads() if not one & bits] or [0]

    def _zeros(self) -> list[int]:
        """Slices of the optimizer's state are all that replicas can cut, if that."""
        if self.request.zero is not None:
            return [self.request.zero]
        return [0, 1] if sliceable(self.request) and not self.request.offload else [0]

    def _keep(
        self,
        placement: Placement,
        frames: Frames,
        found: CaseCosts,
        counts: Sequence[tuple[int, ...]],
        index: int,
    ) -> None:
        step, mesh = float(found.step[index]), self._mesh(frames, index)
        self.tally.best = min(self.tally.best, step)
        key = mesh, int(frames.micro_batches[index]), int(frames.zero[index])
        self.counted[key] = min(step, self.counted.get(key, step))
        kept, known = (
            self.model.policies[int(frames.remat[index])],
            self.request.policies,
        )
        place = min((known.index(p) for p in kept.values() if p in known), default=0)
        self.lightest[key] = min(place, self.lightest.get(key, place))

    def _mesh(self, frames: Frames, index: int) -> Mesh:
        cell = frames.cell[index]
        sizes = {"data": frames.data[index], "fsdp": frames.fsdp[index]}
        return tuple(
            int(sizes[a] if a in sizes else self.model.cells[Column(a)][cell])
            for a in PLANNED_AXES
        )
