"""Memory of single cases by liveness, as of plans that run.

Arrays estimate memory from sums over places of the chain. What a search gives back is
priced here once more: by what is in memory in every span of a step (``memory``), on the
fullest stage where there are several.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

from whalejax.planner.cost.operation_cost import Setting
from whalejax.planner.memory.live_sets import Moments
from whalejax.planner.model.layer_chain import ENDS, EVERYWHERE, FIRST, LAST, LAYER
from whalejax.planner.search.analysis_cache import AnalysedProgram
from whalejax.planner.search.batched.cases import Cases, Group
from whalejax.planner.search.batched.cells import Column
from whalejax.planner.search.batched.space import Space
from whalejax.planner.search.host_offload import Hosting
from whalejax.planner.search.layout_memory import Laid, LayoutMemory, MomentsByLayout
from whalejax.planner.search.request import Request
from whalejax.planner.sharding.layout import GRID_AXES
from whalejax.planner.sharding.parameter_layout import batch_homes, lay_out
from whalejax.planner.terms import OFFLOADS, MemoryTerms


Shares = dict[int, float]
"""Which part of each place of the chain lies on a stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fullest:
    """Memory of a case on the stage that leaves least of its device's.

    Attributes:
        terms: of it.
        over, host_over: bytes beyond those of its device, and of its host; less than 0
            is room.
    """

    terms: MemoryTerms
    over: float
    host_over: float

    @classmethod
    def of(cls, cases: Cases, group: Group, terms: MemoryTerms) -> Fullest:
        """On a stage of a group, by the devices that it lies on."""
        device, host = cases.capacity(group.kind)
        return cls(
            terms=terms,
            over=terms.total_bytes - device / cases.model.room,
            host_over=terms.host_bytes - host,
        )

    @property
    def lacks(self) -> tuple[float, float]:
        """Bytes that it lacks on a device, and on its host."""
        return max(0.0, self.over), max(0.0, self.host_over)

    @property
    def order(self) -> tuple[float, float]:
        """What tells the fullest of several: what it lacks, then what it leaves."""
        return sum(self.lacks), self.over


class ExactMemory:
    """Memory of the cases of one space.

    Args:
        space: what is priced.
        request: what is asked.
        copies: how many times the batch of the space is that of a step.
    """

    def __init__(self, space: Space, request: Request, copies: int) -> None:
        chain, reading = space.links.chain, space.reading
        self.space, self.chain, self.copies = space, chain, copies
        self.facts = space.links.facts
        self.batch = frozenset(r.index for r in reading.dims.batch)
        self.program = AnalysedProgram(
            reading.graph, reading.dims, space.cluster.compiler, reading.views
        )
        hosting = Hosting(self.program, space.cluster, request, self.facts)
        self.memory = LayoutMemory(
            facts=self.facts,
            hosting=hosting,
            dims=reading.dims,
            homes=batch_homes(chain.graph),
        )
        self._fitting: dict[tuple[object, ...], bool] = {}

    @functools.cached_property
    def knows(self) -> bool:
        """Liveness can be told: every layer is there, or all are one loop.

        Where layers that are written out stand for each other, spans are not those of
        the program. On CPUs it depends on what collectives gather.
        """
        once = all(n == 1 for n in self.chain.leaf_times.values())
        return once and not self.space.cluster.compiler.reduces_at_end

    @functools.cached_property
    def _moments(self) -> MomentsByLayout:
        return MomentsByLayout(self.chain.graph, self.facts, self.program)

    @functools.cached_property
    def _group_places(self) -> list[int]:
        places = self.chain.leaf_places()
        found = [FIRST] * len(self.facts.groups)
        pairs = zip(self.facts.tensors, self.facts.group_of, strict=True)
        for tensor, group in pairs:
            found[group] = places[tensor.id]
        return found

    def of(self, cases: Cases, row: int) -> Fullest | None:
        """Memory of one case on its fullest stage; None where it is not known.

        Args:
            cases: cut by ``cut_layers``; of one placement, replicas not unlike.
            row: which of them.
        """
        laid = self._laid(cases, row)
        if laid is None:
            return None
        stage = int(cases.mesh["stage"][row])
        count = int(cases.frames.micro_batches[row])
        s = self._setting(cases, row, count)
        found = self._moments.of(laid)
        stages = [
            Fullest.of(
                cases,
                g,
                self.memory.of(found, laid, s)
                if stage == 1
                else self.memory.of(
                    self._on_stage(found, _shares(cases, g, row)),
                    dataclasses.replace(laid, in_flight=self._held(cases, g, row)),
                    s,
                ),
            )
            for g in cases.groups
            if g.count[row] > 0
        ]
        return max(stages, key=lambda one: one.order)

    def may_fit(self, cases: Cases, row: int) -> bool:
        """Whether memory holds a case, were each sample a micro-batch of its own.

        More micro-batches take no more memory, so that no other number fits where
        this does not. Each answer is worked out once.

        Args:
            cases, row: as for ``of``; there is one stage, and ``of`` knows the case.
        """
        frames = cases.frames
        cell = int(frames.cell[row])
        samples = int(cases.model.cells[Column("samples")][cell])
        count = int(frames.micro_batches[row]) * samples
        variant = int(cases.model.cells[Column("variant")][cell])
        sizes = tuple(int(cases.mesh[axis][row]) for axis in GRID_AXES)
        key = variant, sizes, int(frames.zero[row]), int(frames.offload[row]), count
        if key not in self._fitting:
            laid = self._laid(cases, row)
            assert laid is not None
            laid = dataclasses.replace(laid, accumulates=count > 1)
            terms = self.memory.of(
                self._moments.of(laid), laid, self._setting(cases, row, count)
            )
            here = Fullest.of(cases, cases.groups[0], terms)
            self._fitting[key] = not any(here.lacks)
        return self._fitting[key]

    def _setting(self, cases: Cases, row: int, count: int) -> Setting:
        inside = {a: int(cases.mesh[a][row]) for a in GRID_AXES if a != "stage"}
        return Setting(
            inside,
            count * self.copies,
            self.space.cluster,
            self.space.reading.dims,
            self.batch,
        )

    def _laid(self, cases: Cases, row: int) -> Laid | None:
        """The layout of a case; None where its memory is not known."""
        frames = cases.frames
        policy = cases.model.policies[int(frames.remat[row])]
        bits = int(frames.offload[row])
        offload = tuple(n for i, n in enumerate(OFFLOADS) if bits >> i & 1)
        apart = "activations" in offload
        plain = set(policy.values()) <= {"none"} and "gradients" not in offload
        if not (self.knows and plain) or (apart and not self.program.waiting):
            return None
        cell = int(frames.cell[row])
        variant = self.space.served[int(cases.model.cells[Column("variant")][cell])]
        inside = {a: int(cases.mesh[a][row]) for a in GRID_AXES if a != "stage"}
        return Laid(
            tables=variant.spots,
            layouts=lay_out(self.facts, variant.spots, inside, int(frames.zero[row])),
            offload=offload,
            accumulates=int(frames.micro_batches[row]) > 1,
        )

    def _held(self, cases: Cases, group: Group, row: int) -> float:
        """Micro-batches in flight on a stage of a group."""
        return float(cases.in_flight(group, cases.frames.micro_batches)[row])

    def _on_stage(self, found: Moments, shares: Shares) -> Moments:
        return found.on_stage(
            [shares[self.chain.spots[k.task_graph].place] for k in found.kinds],
            [shares[place] for place in self._group_places],
        )


def _shares(cases: Cases, group: Group, row: int) -> Shares:
    """Which part of each place lies on the fullest stage of a group."""
    first, last = float(group.first[row]), float(group.last[row])
    return {
        FIRST: first,
        LAST: last,
        LAYER: float(group.layers[row]) / cases.model.layers,
        ENDS: max(first, last),
        EVERYWHERE: 1.0,
    }
