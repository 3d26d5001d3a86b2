"""The wide search: every axis, schedule and way to save memory, and proof of the best.

It covers what ``enumerate`` covers and beyond that pipelines, ring attention, a policy
of remat for each TaskGraph, activations and parameters in host memory, orders of axes
over links and mixed kinds, whether an executor for them exists or not. Nothing is
sampled: frames are taken in order of a lower bound on their step time, and the search
ends where the next bound lies above the best plan by more than plans may tie.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from whalejax.meshes.cluster import Cluster
from whalejax.planner.errors import PlanError
from whalejax.planner.model.graph import Graph
from whalejax.planner.search.batched.bounds import Sieve
from whalejax.planner.search.batched.cases import Cases, Model, Placement
from whalejax.planner.search.batched.cells import Column, ideal
from whalejax.planner.search.batched.exact_memory import ExactMemory
from whalejax.planner.search.batched.fits import FrameOptions, weigh_options
from whalejax.planner.search.batched.layout_variants import Array, Variant
from whalejax.planner.search.batched.mesh_grid import (
    CHUNKS,
    Bounds,
    Frames,
    expansions,
    ordered,
    ringed,
    scheduled,
)
from whalejax.planner.search.batched.partition import cut_layers
from whalejax.planner.search.batched.quick_bounds import promise
from whalejax.planner.search.batched.replicas import ReplicaCases
from whalejax.planner.search.batched.space import INNER, Spaces, whole_batch
from whalejax.planner.search.batched.step_time import (
    CaseCosts,
    settle,
    weigh,
)
from whalejax.planner.search.ranking import TIE, Tally, best_first
from whalejax.planner.search.request import Request
from whalejax.planner.search.user_choices import Asked
from whalejax.planner.sharding.offload_candidates import hosts_known
from whalejax.planner.sharding.remat import policy_for
from whalejax.planner.terms import OFFLOAD_SETS, OFFLOADS


FIRST_BLOCK, LAST_BLOCK = 128, 16384
"""Frames that are looked at together: few while nothing is known, then more."""

MOST_POLICIES = 81
"""Combinations of policies; with more TaskGraphs, all of them have the same one."""

FINITE = np.finfo(float).max
"""Bounds above it are of what is weighed already, or cannot be."""

REFINED = 8192
"""Frames whose bounds are refined together."""

SOME = 2730
"""Frames whose options are weighed together."""

GROWTH = 8
"""How much longer each block is than the one before."""

FEW = 4
"""Cases whose schedules are simulated first: often they rule out all others."""

KEPT = 64
"""Cases that a search remembers."""


class NoMeshError(PlanError):
    """There is nothing to search; ``plan_any`` says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One weighed case, with all that a plan needs of it.

    Attributes:
        placement: kinds of devices.
        frames: one row.
        variant: what shards what.
        step_seconds, memory_bytes, wire_bytes: predictions.
        micro_batches: of one pipeline, by kind where replicas differ.
        weighed, row: all of its terms.
        mark: numbers that tell it from every other case; the least of equals is taken.
        lacks: bytes beyond those of the device and of the host that lack most of them.
    """

    placement: Placement
    frames: Frames
    variant: Variant
    step_seconds: float
    memory_bytes: float
    wire_bytes: float
    micro_batches: tuple[int, ...]
    weighed: CaseCosts
    row: int
    mark: tuple[float, ...]
    lacks: tuple[float, float] = (0.0, 0.0)


Wanted = Callable[["WideSearch", Placement, Frames], Array]
"""Which cases a search is to find, as a mask; the others are looked at elsewhere."""


class WideSearch:
    """One wide search over one captured model.

    Args:
        graph: the captured loss, or a program that computes it otherwise.
        cluster: the machine.
        request: what is asked.
        spaces: what other searches of the same loss ranged over.
        program: what tells this program from others of the same loss.
        known_seconds: of a step in a plan that there is already; slower ones are not
            looked for.
        wanted: which cases to find; all of them if left out.
        rings: attention over ``context`` may be estimated to go round a ring, where no
            program has it in blocks.
        room: which part of the memory of devices cases may fill, as arrays sum it up.

    Attributes:
        space: what it ranges over.
        cases: the best that were found, best first, after ``run``.
        tally: what it did.
        orders: axes may lie on links in another order than the usual one.
    """

    orders: ClassVar[bool] = True

    @property
    def slack(self) -> float:
        """By which part cases may be slower than the best, and are remembered."""
        return TIE

    def __init__(
        self,
        graph: Graph,
        cluster: Cluster,
        request: Request,
        spaces: Spaces | None = None,
        *,
        program: object = None,
        known_seconds: float = math.inf,
        wanted: Wanted | None = None,
        rings: bool = True,
        room: float = 1.0,
    ) -> None:
        self.wanted, self.rings, self.room = wanted, rings, room
        self.spaces = spaces or Spaces()
        self.space = self.spaces.of(graph, cluster, request, program)
        self.dims = self.space.reading.dims
        self.graph = self.space.reading.graph
        self.views = self.space.reading.views
        self.served = self.space.served
        self.batch = whole_batch(graph)
        if not self.served:
            raise NoMeshError("no mesh serves the marks and what the user fixed")
        self.cluster = cluster
        self.request = request
        self.asked = Asked.of(self.graph, request)
        self.model = self._model()
        ideally = dataclasses.replace(
            self.model, cluster=ideal(cluster), wires=self.space.ideal_wires
        )
        self._sizes = self.space.sizes
        self.tally = Tally(best=known_seconds)
        options = FrameOptions(
            remats=range(len(self.model.policies)),
            lightest=self.model.lightest,
            zeros=self._zeros(),
            offloads=self._offloads(),
        )
        self.sieve = Sieve(self.model, ideally, options, self.tally, self.slack)
        self.limits = self._limits()
        self.cases: list[Case] = []

    # What is searched.

    def _model(self) -> Model:
        links = self.space.links
        homes = sorted({spot.task_graph for spot in links.chain.spots})
        names = ["none", "dots", *(["named"] if links.named else []), "full"]
        self.one_policy = len(names) ** len(homes) > MOST_POLICIES
        policies = list(itertools.product(names, repeat=len(homes)))
        if self.one_policy:
            policies = [(name,) * len(homes) for name in names]
        if self.request.remat is not None:
            asked = dict(self.request.remat)
            regions = (self.graph.task_graphs[home].name for home in homes)
            kinds = (policy_for(n, asked).partition(":")[0] for n in regions)
            policies = [tuple(kinds)]
        return Model(
            cells=self.space.cells,
            storage=self.space.storage,
            wires=self.space.wires,
            layers=links.chain.layers,
            policies=[dict(zip(homes, c, strict=True)) for c in policies],
            cluster=self.cluster,
            state_bytes=self.request.state_bytes,
            batch_bytes=sum(self.request.batch_bytes),
            optimizer_other_bytes=links.facts.optimizer_other_bytes,
            room=self.room,
        )

    def _limits(self) -> list[str]:
        """What the search leaves out because there would be too much of it."""
        found = []
        if self.one_policy:
            found.append("so many TaskGraphs: all of them have one policy of remat")
        if self.space.reading.variants.limited:
            found.append(
                "so many TaskGraphs: each tries its heaviest dimensions and none else"
            )
        return found

    def placements(self) -> list[Placement]:
        """Every way to lay stages or replicas on kinds of devices."""
        kinds = self.cluster.kinds
        counts = [
            sum(n.count for n in self.cluster.nodes if n.kind == kind) for kind in kinds
        ]
        every = tuple(range(len(kinds)))
        whole = Placement(by="all", kinds=every, counts=tuple(counts))
        if len(kinds) == 1 or self.request.num_devices < sum(counts):
            return [whole]
        found = [whole, dataclasses.replace(whole, by="replicas")]
        for order in itertools.permutations(every):
            found.append(
                Placement(
                    by="stages", kinds=order, counts=tuple(counts[k] for k in order)
                )
            )
        return found

    def frames(self, placement: Placement) -> Frames:
        """Every mesh that is looked at, on some kinds of devices."""
        return self.spaces.frames(
            self.space,
            placement,
            Bounds(
                num_devices=self.request.num_devices,
                global_batch=self.batch,
                layers=self.model.layers,
                fixed=self.asked.mesh,
                micro_batches=self.asked.num_micro_batches,
            ),
        )

    # The search.

    def run(self) -> list[Case]:
        """Search everything.

        Returns:
            The best cases that fit, best first; empty if none does.
        """
        spaces = []
        for placement in self.placements():
            frames = self.frames(placement)
            self.tally.covered += self._count(placement, frames)
            least = promise(
                self.model, self.sieve.ideal.cluster, placement, frames, self.batch
            )
            spaces.append((placement, frames, least))
        # Always where most is promised, so that a good plan rules out much elsewhere.
        searches = [self._search(*space) for space in spaces]
        queue = [(0.0, place) for place in range(len(searches))]
        while queue:
            _, place = heapq.heappop(queue)
            promised = next(searches[place], math.inf)
            if promised < math.inf:
                heapq.heappush(queue, (promised, place))
        self.tally.bound = min(self.tally.bound, self.tally.best)
        self.cases = ranked(self.cases)
        if self.cases:
            (chosen,) = self._axes(self.cases[0].frames).tolist()
            self.spaces.seeds.append(tuple(chosen))
        return self.cases

    def _axes(self, frames: Frames) -> Array:
        """Sizes of the axes, one row for each frame."""
        inner = [self._sizes[axis][frames.cell] for axis in INNER]
        return np.stack([frames.stage, frames.data, frames.fsdp, *inner], axis=1)

    def _seeded(self, frames: Frames) -> Array:
        """Frames whose mesh was the best for another question about the model."""
        found = np.zeros(len(frames), dtype=bool)
        axes = self._axes(frames)
        for seed in set(self.spaces.seeds):
            found |= (axes == seed).all(axis=1)
        return found

    def _search(
        self, placement: Placement, frames: Frames, least: Array
    ) -> Iterator[float]:
        """Look at frames in order of a bound, in blocks; yields that of the next.

        What a frame promises is refined once it is its turn; it waits again where
        others promise more than it does then.
        """
        size = FIRST_BLOCK
        frames = dataclasses.replace(
            frames, remat=frames.remat.copy(), offload=frames.offload.copy()
        )
        fresh = np.ones(len(frames), dtype=bool)
        if self.spaces.seeds:
            seeded = self._seeded(frames)
            self._block(placement, frames.take(seeded))
            least = np.where(seeded, np.inf, least)
        while True:
            left = np.flatnonzero(least <= min(self.sieve.limit, FINITE))
            if not len(left):
                self.tally.bound = min(self.tally.bound, least.min(initial=np.inf))
                return
            some = left[np.argsort(least[left], kind="stable")[: max(size, REFINED)]]
            here = some[:size]
            if fresh[here].any():
                some = some[fresh[some]]
                refined, least[some] = self.sieve.refined(
                    placement, frames.take(some), least[some]
                )
                frames.remat[some] = refined.remat
                frames.offload[some] = refined.offload
                fresh[some] = False
                continue
            least[here] = np.inf
            self._block(placement, frames.take(here))
            size = min(GROWTH * size, LAST_BLOCK)
            yield float(least.min())

    def _zeros(self) -> list[int]:
        """Levels of ZeRO over ``data``."""
        return [0, 1, 2] if self.request.zero is None else [self.request.zero]

    def _offloads(self) -> list[int]:
        """Sets of what may lie in host memory, least first."""
        if self.request.offload is not None:
            return [sum(1 << OFFLOADS.index(name) for name in self.request.offload)]
        return list(OFFLOAD_SETS) if hosts_known(self.cluster) else [0]

    def _count(self, placement: Placement, frames: Frames) -> int:
        """Cases that frames stand for."""
        options = (
            len(self.model.policies)
            * len(self.sieve.options.zeros)
            * len(self.sieve.options.offloads)
        )
        several = placement.by != "replicas"
        alike = placement.by == "all"
        some = expansions(
            frames,
            self._sizes,
            self.model.layers,
            schedules=several,
            only=self.asked.schedule,
            chunks=CHUNKS if alike else (),
        )
        return some * options

    def _block(self, placement: Placement, frames: Frames) -> None:
        """Weigh frames under every order of their axes, schedule and option."""
        if not len(frames):
            return
        if self.orders:
            frames = ordered(frames, self._sizes)
        least = self.sieve.least_step(placement, frames, self.model, any_schedule=True)
        frames = frames.take(least <= self.sieve.limit)
        if self.rings:
            frames = ringed(frames, self._sizes["context"])
        if placement.by != "replicas":
            frames = scheduled(frames, self.model.layers)
        if placement.by == "stages":
            # Equal parts do not suit unlike devices.
            frames = frames.take(frames.chunks == 1)
        frames = frames.take(self.asked.allows(frames, self._sizes["context"]))
        if not len(frames):
            return
        least = self.sieve.least_step(placement, frames, self.model)
        may = least <= self.sieve.limit
        frames, least = frames.take(may), least[may]
        if len(frames) > FIRST_BLOCK:  # a few are weighed sooner than sieved
            frames, least = self.sieve.scheduled(placement, frames, least)
        order = np.argsort(least, kind="stable")
        at, size = 0, SOME if self.tally.best < math.inf else FIRST_BLOCK
        while at < len(order):
            here = order[at : at + size]
            if least[here[0]] > self.sieve.limit:
                self.tally.bound = min(self.tally.bound, float(least[here[0]]))
                return
            here = here[least[here] <= self.sieve.limit]
            some = frames.take(here)
            none = np.zeros_like(here)
            self._options(
                placement, dataclasses.replace(some, remat=none, offload=none)
            )
            at, size = at + len(here), SOME

    def _options(self, placement: Placement, frames: Frames) -> None:
        """Weigh frames under every option; host memory only where it must be."""
        limit = self.sieve.limit
        found = weigh_options(
            frames,
            self.sieve.options,
            lambda some: self.sieve.least_step(placement, some, self.model) <= limit,
            lambda some, hosts: self.sieve.may_fit(placement, some, hosts=hosts),
            lambda some: self._weigh(placement, some),
            exact=placement.by != "replicas" and self.model.exact is None,
        )
        for cases, weighed in found:
            self._settle(placement, cases, weighed)

    # Weighing.

    def _weigh(self, placement: Placement, frames: Frames) -> CaseCosts:
        self.tally.weighed += len(frames)
        if placement.by == "replicas":
            return ReplicaCases(self.model, frames, placement).weigh()
        cases = Cases(self.model, frames, placement, None)
        cut_layers(cases)
        return weigh(cases)

    def _settle(self, placement: Placement, frames: Frames, found: CaseCosts) -> None:
        """Simulate the schedules of the cases that may be best, best first.

        Those without stages before, which have none.
        """
        may = found.fits & (found.step <= self.sieve.limit)
        if self.wanted is not None:
            may &= self.wanted(self, placement, frames)
        fits = np.flatnonzero(may)
        order = fits[np.argsort(found.step[fits], kind="stable")]
        piped = frames.stage[order] > 1
        for some in (order[~piped], order[piped]):
            at, size = 0, FEW
            while at < len(some):
                here = some[at : at + size]
                here = here[found.step[here] <= self.sieve.limit]
                if not len(here):
                    break
                cases = frames.take(here)
                exact, counts = self._exact(placement, cases)
                for index in range(len(cases)):
                    self._keep(placement, cases, exact, counts, index)
                at, size = at + size, min(GROWTH * size, KEPT)

    def _exact(
        self, placement: Placement, frames: Frames
    ) -> tuple[CaseCosts, list[tuple[int, ...]]]:
        everyone = np.arange(len(frames))
        if placement.by == "replicas":
            replicas = ReplicaCases(self.model, frames, placement)
            return replicas.weigh(exact=True), replicas.counts()
        cases = Cases(self.model, frames, placement, None)
        cut_layers(cases)
        found = weigh(cases)
        settle(cases, found, everyone, frames.micro_batches)
        return found, [(int(m),) for m in frames.micro_batches]

    @functools.cached_property
    def liveness(self) -> ExactMemory:
        """What is in memory in every span of a step."""
        copies = self.space.reading.batch // self.batch
        return ExactMemory(self.space, self.request, copies)

    def remembered(self, case: Case) -> Case:
        """A case with memory by liveness, as far as that can be told.

        Args:
            case: one of this search.

        Returns:
            The case; it fits no more where ``weighed`` says so.
        """
        model = dataclasses.replace(self.model, exact=self.liveness, room=1.0)
        cases = Cases(model, case.frames, case.placement, None)
        if not self.liveness.covers(cases):
            return case
        cut_layers(cases)
        found = weigh(cases)
        settle(cases, found, np.arange(1), case.frames.micro_batches)
        given = case.placement, case.frames, found, [case.micro_batches], 0
        return dataclasses.replace(self._case(*given), lacks=self.liveness.lacks(cases))

    def _keep(
        self,
        placement: Placement,
        frames: Frames,
        found: CaseCosts,
        counts: Sequence[tuple[int, ...]],
        index: int,
    ) -> None:
        self.tally.best = min(self.tally.best, float(found.step[index]))
        if float(found.step[index]) <= self.sieve.limit:
            self.cases.append(self._case(placement, frames, found, counts, index))

    def _case(
        self,
        placement: Placement,
        frames: Frames,
        found: CaseCosts,
        counts: Sequence[tuple[int, ...]],
        index: int,
    ) -> Case:
        variant = int(self.model.cells[Column("variant")][frames.cell[index]])
        one = frames.take(np.array([index]))
        return Case(
            placement=placement,
            frames=one,
            variant=self.served[variant],
            step_seconds=float(found.step[index]),
            memory_bytes=float(found.memory_bytes[index]),
            wire_bytes=float(found.wire[index]),
            micro_batches=counts[index],
            weighed=found,
            row=index,
            mark=(*self._axes(one)[0, ::-1].tolist(), *_options_of(one), variant),
        )

    def nearest(self, placement: Placement | None = None) -> Case:
        """Where nothing fits: the case that lacks least, which says how much.

        Args:
            placement: kinds of devices; equal shares of all if left out.
        """
        placement = placement or self.placements()[0]
        best: tuple[float, float, Frames] | None = None
        for cases, over, host in self.lacking(placement):
            index = int((over + host).argmin())
            if best is None or over[index] + host[index] < best[0] + best[1]:
                chosen = cases.take(np.array([index]))
                best = float(over[index]), float(host[index]), chosen
        assert best is not None  # something was covered
        exact, counts = self._exact(placement, best[2])
        case = self._case(placement, best[2], exact, counts, 0)
        return dataclasses.replace(case, lacks=best[:2])

    def lacking(self, placement: Placement) -> Iterator[tuple[Frames, Array, Array]]:
        """Cases that spare most memory, and bytes that they lack on devices and hosts.

        Args:
            placement: kinds of devices.
        """
        frames = self.frames(placement)
        full = len(self.model.policies) - 1
        asked = self.sieve.options
        room = min(k.host_memory_bytes or math.inf for k in self.cluster.kinds)
        for start in range(0, len(frames), LAST_BLOCK):
            some = frames.take(np.arange(start, min(start + LAST_BLOCK, len(frames))))
            cases = some.with_options([0, full], asked.zeros, asked.offloads)
            found = self._weigh(placement, cases)
            over = np.maximum(0.0, found.memory_bytes - self.cluster.memory_bytes)
            yield cases, over, np.maximum(0.0, found.host - room)


def _options_of(one: Frames) -> list[int]:
    """What one frame says beside the sizes of its axes."""
    return [int(column[0]) for column in dataclasses.astuple(one)[4:]]


def ranked(cases: Sequence[Case]) -> list[Case]:
    """As ``search.ranked``: ties go to less memory, however they were found."""
    return best_first(
        sorted(cases, key=lambda c: (c.placement.by, c.placement.kinds, c.mark)),
        seconds=lambda c: c.step_seconds,
        ties=lambda c: (c.memory_bytes, c.wire_bytes),
        most=KEPT,
    )[:KEPT]
