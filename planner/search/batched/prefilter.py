"""Chooses the meshes that plans that run are searched on, where there are many.

The plans that run today are weighed one by one, under programs that are traced for
each: a thousand devices have hundreds of meshes. The wide search prices all meshes of
each of these programs as arrays, in a fraction of a second and with the same formulas.
What it finds far from the best is not looked at again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import ClassVar, Final, TypeVar

import numpy as np

from whalejax.meshes.cluster import Cluster
from whalejax.planner.model.graph import Graph
from whalejax.planner.search.batched.branch_and_bound import (
    FINITE,
    NoMeshError,
    WideSearch,
)
from whalejax.planner.search.batched.cases import Cases, Placement
from whalejax.planner.search.batched.cells import Column
from whalejax.planner.search.batched.exact_memory import ExactMemory
from whalejax.planner.search.batched.layout_variants import Array
from whalejax.planner.search.batched.mesh_grid import Frames
from whalejax.planner.search.batched.partition import cut_layers
from whalejax.planner.search.batched.peak import memory_of
from whalejax.planner.search.batched.space import Spaces
from whalejax.planner.search.batched.step_time import CaseCosts, weigh
from whalejax.planner.search.enumerate import PLANNED_AXES
from whalejax.planner.search.request import Hosted, Request
from whalejax.planner.search.zero1_slices import sliceable
from whalejax.planner.terms import OFFLOADS, Chosen, Remat


MANY: Final = 40
"""Meshes that are looked at one by one; of more, the promising ones are."""

ROOMS: Final = (1.0, 2.0)
"""Parts of a device's memory that plans may fill where arrays sum it up.

Where layers that are written out stand for each other, arrays sum up what is kept,
whenever that is; what is in memory at once, which decides, may be half. What arrays
find too large is looked for with more in host memory."""

MOST: Final = 8
"""Promising meshes of one program that are looked at, where memory is summed up."""

MEMORY_BLOCK: Final = 256
"""Cases of which memory is asked together; of few it takes as long."""

SLACK: Final = 0.1
"""A mesh is promising whose best plan is slower than the best by this part at most."""

NEAR: Final = 0.02
"""The same where memory is known: more than plans may tie."""


Variant = tuple[Remat, Chosen, int]
"""What is computed again, how attention runs and in how many parts logits are made."""

Mesh = tuple[int, ...]

_Case = tuple[Chosen, int, int, int]
"""How attention runs, devices of a replica, micro-batches and the level of ZeRO."""


def promising(
    variants: Iterable[Variant],
    program: Callable[[Variant], Graph | None],
    cluster: Cluster,
    request: Request,
    spaces: Spaces | None = None,
) -> dict[Variant, dict[Mesh, float]]:
    """Meshes whose plans may be among the best, of each program.

    Args:
        variants: programs that compute the captured loss; those that make logits in
            parts come behind those that do not.
        program: one of them, traced where it is needed; None where there is none.
        cluster: the machine.
        request: what is asked of plans that run.
        spaces: what other searches of the same loss ranged over.

    Returns:
        Seconds of a step by sizes of ``PLANNED_AXES``, of the fastest program first.
        Where nothing is found that fits, infinite ones for those that lack least, of
        the program that does.
    """
    asked = dataclasses.replace(
        request, mesh={"stage": 1, **(request.mesh or {})}, remat=()
    )
    found = _PromisingPrograms(cluster, asked, spaces)
    for variant in variants:
        graph = None if found.is_hopeless(variant) else program(variant)
        if graph is not None:
            found.search_program(variant, graph)
    return found.promising_meshes()


class _PromisingPrograms:
    """Promising meshes of the programs that were searched.

    Attributes:
        best: Seconds of the fastest step of all programs.
        slack: Relative slowdown up to which a mesh is promising, by program.
        steps: Seconds of a step on each mesh, by program.
        lacks: Bytes that each mesh lacks, by program, while nothing fits.
        fastest: Seconds of each program's fastest step, whether memory holds it or not.
    """

    def __init__(
        self, cluster: Cluster, request: Request, spaces: Spaces | None
    ) -> None:
        self.cluster, self.request, self.spaces = cluster, request, spaces
        self.best = math.inf
        self.slack: dict[Variant, float] = {}
        self.steps: dict[Variant, dict[Mesh, float]] = {}
        self.lacks: dict[Variant, dict[Mesh, float]] = {}
        self.fastest: dict[Variant, float] = {}

    def is_hopeless(self, variant: Variant) -> bool:
        """No plan of it is near the best: with all logits at once none would be.

        Logits in parts give memory and take time.
        """
        remat, attention, chunks = variant
        whole = self.fastest.get((remat, attention, 1), 0.0)
        return chunks > 1 and whole > self.best * (1 + NEAR)

    def search_program(self, variant: Variant, graph: Graph) -> None:
        """Search one program."""
        for room in ROOMS:
            try:
                search = _Search(
                    graph,
                    self.cluster,
                    self.request,
                    self.spaces,
                    program=variant,
                    known_seconds=self.best,
                    room=room,
                )
            except NoMeshError:
                return
            search.run()
            self.best = min(self.best, min(search.steps.values(), default=math.inf))
            known = search.model.exact is not None
            steps = self.steps.setdefault(variant, {})
            for mesh in search.steps if known else _least(search.steps):
                steps[mesh] = min(search.steps[mesh], steps.get(mesh, math.inf))
            self.slack[variant] = search.slack
            if self.best == math.inf and (known or room == ROOMS[-1]):
                self.lacks[variant] = search.lacks()
            if known:
                self.fastest[variant] = search.fastest
                return

    def promising_meshes(self) -> dict[Variant, dict[Mesh, float]]:
        """What ``promising`` gives."""
        near = {
            variant: {
                mesh: step
                for mesh, step in steps.items()
                if step <= self.best * (1 + self.slack[variant])
            }
            for variant, steps in self.steps.items()
        }
        if any(near.values()):
            order = sorted(
                (v for v in near if near[v]), key=lambda v: min(near[v].values())
            )
            return {variant: near[variant] for variant in order}
        lacks = self.lacks
        spare = sorted(lacks, key=lambda v: min(lacks[v].values(), default=math.inf))
        return {v: dict.fromkeys(_least(lacks[v]), math.inf) for v in spare[:1]}


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
        for search in _searches({attention: graph}, cluster, asked, _Replicas):
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


def _searches(
    graphs: Mapping[Chosen, Graph],
    cluster: Cluster,
    request: Request,
    kind: type[_Kind],
    spaces: Spaces | None = None,
) -> Iterator[_Kind]:
    for attention, graph in graphs.items():
        program = (), attention, 1
        try:
            search = kind(graph, cluster, request, spaces, program=program)
        except NoMeshError:
            continue
        search.run()
        yield search


class _Search(WideSearch):
    """A wide search that remembers meshes, and stops later.

    Attributes:
        steps: seconds of a step in the best plan of each mesh.
        fastest: seconds of the fastest step that was priced, whether memory holds it.
    """

    orders: ClassVar[bool] = False

    @property
    def slack(self) -> float:
        """Whether a mesh is promising is known as well as its memory."""
        return NEAR if self.liveness.knows else SLACK

    def __init__(
        self,
        graph: Graph,
        cluster: Cluster,
        request: Request,
        spaces: Spaces | None = None,
        *,
        program: object = None,
        known_seconds: float = math.inf,
        room: float = 1.0,
    ) -> None:
        super().__init__(
            graph,
            cluster,
            request,
            spaces,
            program=program,
            known_seconds=known_seconds,
            room=room,
        )
        self.steps: dict[Mesh, float] = {}
        self.fastest = math.inf

    def placements(self) -> list[Placement]:
        """Plans that run today treat all devices as the slowest."""
        return super().placements()[:1]

    def _seeded(self, frames: Frames) -> Array:
        """None: what is found does not depend on what was asked before."""
        return np.zeros(len(frames), dtype=bool)

    def _exact_memory(self) -> ExactMemory | None:
        """By liveness, where that can be told."""
        return self.liveness if self.liveness.knows else None

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

    def _weigh(self, placement: Placement, frames: Frames) -> CaseCosts:
        """Times of all; memory of those that are fast enough, the fastest first."""
        if self.model.exact is None or placement.by == "replicas":
            return super()._weigh(placement, frames)
        self.tally.weighed += len(frames)
        cases = Cases(self.model, frames, placement, None)
        cut_layers(cases)
        found = weigh(cases, memory=False)
        best, step = self.tally.best, found.step
        self.fastest = min(self.fastest, step.min(initial=math.inf))
        alike = self.liveness.block_numbers(cases)
        left = np.argsort(step, kind="stable")
        # Cases of a variant are asked about together, those of the fastest case first.
        while len(left) and step[left[0]] <= best * (1 + self.slack):
            fast = left[step[left] <= best * (1 + self.slack)]
            rows = fast[alike[fast] == alike[fast[0]]][:MEMORY_BLOCK]
            some = frames.take(rows)
            here = Cases(self.model, some, placement, None)
            cut_layers(here)
            found.fits[rows] = memory_of(here, some.micro_batches)[1]
            best = min(best, step[rows][found.fits[rows]].min(initial=math.inf))
            left = left[~np.isin(left, rows)]
        found.pipeline[left] = math.inf
        return found

    def _settle(self, placement: Placement, frames: Frames, found: CaseCosts) -> None:
        """Nothing is simulated where there are no stages."""
        if self.model.exact is None or placement.by == "replicas":
            super()._settle(placement, frames, found)
            return
        may = found.fits & (found.step <= min(self.sieve.limit, FINITE))
        for index in np.flatnonzero(may).tolist():
            self._keep(placement, frames, found, (), index)

    def _keep(
        self,
        placement: Placement,
        frames: Frames,
        found: CaseCosts,
        counts: Sequence[tuple[int, ...]],
        index: int,
    ) -> None:
        if not found.fits[index]:
            return
        step, mesh = float(found.step[index]), self._mesh(frames, index)
        self.tally.best = min(self.tally.best, step)
        self.steps[mesh] = min(step, self.steps.get(mesh, step))

    def _mesh(self, frames: Frames, index: int) -> Mesh:
        cell = frames.cell[index]
        sizes = {"data": frames.data[index], "fsdp": frames.fsdp[index]}
        return tuple(
            int(sizes[a] if a in sizes else self.model.cells[Column(a)][cell])
            for a in PLANNED_AXES
        )

    def lacks(self) -> dict[Mesh, float]:
        """Bytes that each mesh lacks at least, on a device and on its host."""
        found: dict[Mesh, float] = {}
        for cases, over, host in self.lacking(self.placements()[0]):
            lack = over + host
            for index in np.argsort(lack, kind="stable").tolist():
                found.setdefault(self._mesh(cases, index), float(lack[index]))
        return found


_Kind = TypeVar("_Kind", bound=_Search)


class _Replicas(_Search):
    """A wide search of replicas on unlike devices.

    Attributes:
        counted: seconds of a step in the best plan of each mesh, number of
            micro-batches and level of ZeRO.
        lightest: of the same, the lightest policy of remat in any plan, by its place
            among those of the request.
    """

    def __init__(
        self,
        graph: Graph,
        cluster: Cluster,
        request: Request,
        spaces: Spaces | None = None,
        *,
        program: object = None,
        room: float = 1.0,
    ) -> None:
        super().__init__(graph, cluster, request, spaces, program=program, room=room)
        self.counted: dict[tuple[Mesh, int, int], float] = {}
        self.lightest: dict[tuple[Mesh, int, int], int] = {}

    def placements(self) -> list[Placement]:
        """Replicas of one kind each."""
        return [p for p in WideSearch.placements(self) if p.by == "replicas"]

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
        super()._keep(placement, frames, found, counts, index)
        step, mesh = float(found.step[index]), self._mesh(frames, index)
        key = mesh, int(frames.micro_batches[index]), int(frames.zero[index])
        self.counted[key] = min(step, self.counted.get(key, step))
        kept, known = (
            self.model.policies[int(frames.remat[index])],
            self.request.policies,
        )
        place = min((known.index(p) for p in kept.values() if p in known), default=0)
        self.lightest[key] = min(place, self.lightest.get(key, place))
