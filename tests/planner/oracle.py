"""The wide search's model written once more, one case at a time, and every case of it.

Nothing here is an array: rows, flows, collectives, layouts and schedules are those of
single plans, and cuts and shares are found by trying all of them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from tests.planner.oracle_stage import Inner, compositions, shares_of
from whalejax.meshes.fitted_constants import WHOLE, constants
from whalejax.planner.cost.collectives import axis_parts, collective_seconds, runs_as
from whalejax.planner.model.layer_chain import ENDS, EVERYWHERE, FIRST, LAST, LAYER
from whalejax.planner.pipeline.schedules import schedule
from whalejax.planner.pipeline.simulate import simulate
from whalejax.planner.search.batched.branch_and_bound import WideSearch
from whalejax.planner.search.batched.cases import PLACES, Placement
from whalejax.planner.search.batched.mesh_grid import CHUNKS, ORDERS
from whalejax.planner.search.batched.parameter_bytes import HOLDERS
from whalejax.planner.sharding.layout import spec_of
from whalejax.planner.terms import OFFLOADS


table_of = cache(schedule)


def in_flight(name: str, stages: int, parts: int, chunks: int) -> tuple[int, ...]:
    return table_of(name, stages, parts, chunks).in_flight


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Everything that a plan decides."""

    placement: Placement
    variant: int
    sizes: tuple[int, int, int, int]  # samples, expert, context, tensor
    stage: int
    data: int
    fsdp: int
    micro_batches: int
    schedule: str
    chunks: int
    order: tuple[str, ...]
    ring: bool
    remat: tuple[str, ...]
    zero: int
    offload: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What it costs."""

    step: float
    fits: bool


class Oracle:
    """Evaluates every choice of a search."""

    def __init__(self, search: WideSearch) -> None:
        self.search = search
        self.links = search.space.links
        self.homes = sorted({s.task_graph for s in self.links.chain.spots})
        self.layers = self.links.chain.layers
        self.cluster = search.cluster
        self.hidden = constants().platforms.get(self.cluster.platform, WHOLE)
        self._inner: dict[Any, Inner] = {}
        self._pipelines: dict[Any, Pipeline] = {}

    def inner(self, choice: Choice) -> Inner:
        key = choice.variant, choice.sizes
        if key not in self._inner:
            variant = self.search.served[choice.variant]
            self._inner[key] = Inner(self.search, self.links, variant, choice.sizes)
        return self._inner[key]

    def pipeline(self, choice: Choice, kinds: Sequence[int]) -> Pipeline:
        """A pipeline; of those that differ in their schedule alone the last is kept."""
        plain = dataclasses.replace(choice, schedule="", chunks=1)
        key = plain, tuple(kinds)
        if key not in self._pipelines:
            if len(self._pipelines) > 4096:
                self._pipelines.clear()
            self._pipelines[key] = Pipeline(self, choice, kinds)
        return self._pipelines[key].under(choice)

    # All choices.

    def choices(self) -> Iterator[Choice]:
        """Every choice, but for what may lie in host memory."""
        for placement in self.search.placements():
            for variant, one in enumerate(self.search.served):
                p = one.points
                for sizes in zip(p.samples, p.expert, p.context, p.tensor, strict=True):
                    whole = tuple(int(n) for n in sizes)
                    yield from self._frames(placement, variant, whole)  # type: ignore[arg-type]

    def _frames(
        self, placement: Placement, variant: int, sizes: tuple[int, int, int, int]
    ) -> Iterator[Choice]:
        samples, expert, context, tensor = sizes
        total = self.search.request.num_devices
        for stage, data, fsdp in itertools.product(range(1, total + 1), repeat=3):
            inside = expert * context * tensor * fsdp * stage
            if inside * data != total or stage > self.layers:
                continue
            replicas = placement.by == "replicas"
            each = samples * expert * fsdp * (1 if replicas else data)
            if self.search.batch % each:
                continue
            parts = self.search.batch // each
            if replicas and any(n % inside for n in placement.counts):
                continue
            if placement.by == "stages" and any(
                stage * n % total or stage * n < total for n in placement.counts
            ):
                continue
            base = Choice(
                placement=placement,
                variant=variant,
                sizes=sizes,
                stage=stage,
                data=data,
                fsdp=fsdp,
                micro_batches=parts,
                schedule="1f1b",
                chunks=1,
                order=ORDERS[0],
                ring=False,
                remat=(),
                zero=0,
                offload=frozenset(),
            )
            yield from self._options(base)

    def _options(self, base: Choice) -> Iterator[Choice]:
        names = ["none", "dots", "full"] + (["named"] if self.links.named else [])
        tables = [("1f1b", 1)]
        if base.stage > 1 and base.placement.by != "replicas":
            tables += [("1f1b-ahead", 1), ("gpipe", 1)]
            if base.placement.by == "all" and base.micro_batches % base.stage == 0:
                tables += [
                    ("interleaved", n) for n in CHUNKS if base.stage * n <= self.layers
                ]
        rings = (False, True) if base.sizes[2] > 1 else (False,)
        sizes = dict(zip(("expert", "context", "tensor"), base.sizes[1:], strict=True))
        sizes |= {"stage": base.stage, "data": base.data, "fsdp": base.fsdp}
        # Orders that place devices alike are one.
        orders = {tuple(a for a in o if sizes[a] > 1): o for o in reversed(ORDERS)}
        for order, ring, zero, (name, chunks) in itertools.product(
            orders.values(), rings, (0, 1, 2), tables
        ):
            for remat in itertools.product(names, repeat=len(self.homes)):
                yield dataclasses.replace(
                    base,
                    schedule=name,
                    chunks=chunks,
                    order=order,
                    ring=ring,
                    zero=zero,
                    remat=remat,
                )

    def best(self) -> float:
        """The least step time of all choices that fit; infinite where none does."""
        kinds = self.cluster.kinds
        host = all(k.host_memory_bytes and k.host_link_bytes_per_second for k in kinds)
        subsets = [
            frozenset(some)
            for count in range(len(OFFLOADS) + 1)
            for some in itertools.combinations(OFFLOADS, count)
            if "gradients" not in some or "params" in some
        ]
        least = math.inf
        for choice in self.choices():
            fitting: list[frozenset[str]] = []
            for some in subsets if host else subsets[:1]:
                if any(less < some for less in fitting):
                    continue
                moved = dataclasses.replace(choice, offload=some)
                found = self.evaluate(moved)
                if found.fits:
                    fitting.append(some)
                    least = min(least, found.step)
        return least

    # One choice.

    def evaluate(self, choice: Choice) -> Outcome:
        """Step time, and whether memory holds it."""
        placement = choice.placement
        if placement.by == "stages":
            stages = [
                k
                for k, n in zip(placement.kinds, placement.counts, strict=True)
                for _ in range(choice.stage * n // sum(placement.counts))
            ]
            return self.pipeline(choice, stages).outcome(choice.micro_batches)
        if placement.by == "all":
            slowest = self.cluster.kinds.index(self.cluster.slowest)
            stages = [slowest] * choice.stage
            return self.pipeline(choice, stages).outcome(choice.micro_batches)
        pipelines = [self.pipeline(choice, [k] * choice.stage) for k in placement.kinds]
        inside = math.prod(choice.sizes[1:]) * choice.fsdp * choice.stage
        counts = [n // inside for n in placement.counts]
        shares = shares_of(choice.micro_batches, counts, [p.pace for p in pipelines])
        found = [
            p.outcome(max(1, share)) for p, share in zip(pipelines, shares, strict=True)
        ]
        return Outcome(
            step=max(f.step for f in found),
            fits=all(f.fits for f in found) and min(shares) >= 1,
        )


class Pipeline:
    """One choice on stages of given kinds of devices."""

    def __init__(self, oracle: Oracle, choice: Choice, kinds: Sequence[int]) -> None:
        self.oracle = oracle
        self.choice = choice
        self.kinds = kinds
        self.inner = oracle.inner(choice)
        self.remat = dict(zip(oracle.homes, choice.remat, strict=True))
        samples, expert, context, tensor = choice.sizes
        sizes = {
            "stage": choice.stage,
            "data": choice.data,
            "fsdp": choice.fsdp,
            "expert": expert,
            "context": context,
            "tensor": tensor,
        }
        self.mesh = {axis: sizes[axis] for axis in choice.order}
        self.leaves = [self._leaf(leaf) for leaf in oracle.links.leaves]
        self._cuts: dict[int, list[int]] = {}

    def under(self, choice: Choice) -> Pipeline:
        """The same with another schedule."""
        self.choice = choice
        if choice.chunks not in self._cuts:
            self._cuts[choice.chunks] = self._counts()
        self.counts = self._cuts[choice.chunks]
        self.pace = max(
            sum(self.stage(i, self.counts[i])) for i in range(len(self.kinds))
        )
        return self

    def collective(self, kind: Any, axes: Sequence[str], nbytes: float) -> float:
        parts = axis_parts(tuple(axes), self.mesh, self.oracle.cluster)
        kind = runs_as(kind, parts, self.oracle.cluster)
        return collective_seconds(kind, nbytes, parts) if parts else 0.0

    # Parameters.

    def _leaf(self, leaf: Any) -> tuple[Any, float, float, float]:
        """A leaf and its parts: computed with, stored, and owned."""
        group, s = leaf.group, self.inner.s
        table = self.inner.variant.spots[group.home]
        spec = spec_of(group.layout, group.sizes, table, s.mesh)
        taken = [math.prod(s.mesh[a] for a in axes) for axes in spec]
        found = [float(math.prod(taken))]
        for axis in ("fsdp", "data"):
            size = self.mesh[axis]
            for dim in group.order if size > 1 else ():
                if group.shape[dim] % (taken[dim] * size) == 0:
                    taken[dim] *= size
                    break
            found.append(float(math.prod(taken)))
        return leaf, found[0], found[1], found[2]

    def held(self, place: int) -> tuple[float, float, float]:
        return self._held[place]

    @cached_property
    def _held(self) -> dict[int, tuple[float, float, float]]:
        return {place: self._held_at(place) for place in HOLDERS}

    def _held_at(self, place: int) -> tuple[float, float, float]:
        """Stored parameters, gradients and optimizer state of a place."""
        params = gradients = state = 0.0
        for leaf, _, stored, owned in self.leaves:
            if leaf.place == place:
                nbytes = leaf.count * leaf.group.nbytes
                params += nbytes / stored
                gradients += nbytes / (owned if self.choice.zero >= 2 else stored)
                extra = leaf.count * leaf.group.optimizer_bytes
                state += extra / (owned if self.choice.zero >= 1 else stored)
        return params, gradients, state

    def saved(self, place: int) -> float:
        return sum(
            self.inner.saved[home, place, policy] for home, policy in self.remat.items()
        )

    # Time of one micro-batch.

    @cached_property
    def _places(self) -> dict[tuple[int, int, str], float]:
        return {
            (kind, place, phase): self._place(kind, place, phase)
            for kind in set(self.kinds)
            for place in PLACES
            for phase in ("forward", "backward")
        }

    def _place(self, kind: int, place: int, phase: str) -> float:
        """All of a place; of one layer where it is the layers."""
        inner, oracle = self.inner, self.oracle
        compute = total = 0.0
        for home, policy in self.remat.items():
            if phase == "forward":
                compute += inner.work["ahead", home, place, kind]
                total += inner.work["launch", home, place, kind] / 3
            else:
                compute += inner.work["behind", home, place, kind]
                if policy in ("full", "named"):
                    compute += inner.work["ahead", home, place, kind]
                elif policy == "dots":
                    compute += inner.work["again", home, place, kind]
                total += inner.work["launch", home, place, kind] * 2 / 3
        total += compute + self._traffic(kind, place, phase)
        for leaf, whole, stored, _ in self.leaves:
            where = leaf.place if leaf.place in PLACES else FIRST
            if where == place and stored > whole:
                cast = oracle.search.request.cast_bytes * leaf.group.narrowed
                nbytes = leaf.group.nbytes * cast / leaf.slices / whole
                times = leaf.group.gathers * leaf.count * leaf.slices
                once = self.collective("all-gather", ("fsdp",), nbytes)
                total += once * times * (1 - oracle.hidden.overlap_parameters) / 2
        total += self._transfers(kind, place, phase, compute)
        return total / (oracle.layers if place == LAYER else 1)

    def _traffic(self, kind: int, place: int, phase: str) -> float:
        seconds = context = 0.0
        for home, where, c in self.inner.traffic:
            again = c.phase == "forward" and self.remat[home] in ("full", "named")
            if where != place or (
                c.phase != phase and not (again and phase == "backward")
            ):
                continue
            axes = (*c.axes, "fsdp") if "data" in c.axes else c.axes
            once = self.collective(c.kind, axes, c.payload_bytes) * c.count
            # Loss and statistics are summed when all is there; keys go round.
            keys = c.axes == ("context",) and c.kind != "all-reduce"
            if keys and place == LAYER:
                context += once
            else:
                seconds += once
        if self.choice.ring and place == LAYER:
            parts = self.choice.sizes[2]
            products = self.inner.work["attention", phase, kind]
            context = max(0.0, context - products * (parts - 1) / parts)
        return seconds + context

    def _transfers(self, kind: int, place: int, phase: str, compute: float) -> float:
        link = self.oracle.cluster.kinds[kind].host_link_bytes_per_second
        away = self.choice.offload
        if not away or not link:
            return 0.0
        params, gradients, _ = self.held(place)
        nbytes = self.saved(place) * ("activations" in away)
        nbytes += params * ("params" in away)
        if phase == "backward":
            nbytes += 2 * gradients * ("gradients" in away)
        return max(0.0, nbytes / link - compute)

    def stage(self, index: int, layers: float) -> tuple[float, float]:
        """Forward and backward of one micro-batch on one stage."""
        kind, found = self.kinds[index], []
        for phase in ("forward", "backward"):
            seconds = layers * self._places[kind, LAYER, phase]
            seconds += (index == 0) * self._places[kind, FIRST, phase]
            seconds += (index == len(self.kinds) - 1) * self._places[kind, LAST, phase]
            found.append(seconds)
        return found[0], found[1]

    def _counts(self) -> list[int]:
        """Layers of each stage: of all ways, those whose slowest stage is fastest."""
        stages, total = len(self.kinds), self.oracle.layers
        if self.choice.chunks > 1:
            parts = stages * self.choice.chunks
            even = [total // parts + (p < total % parts) for p in range(parts)]
            return [sum(even[stage::stages]) for stage in range(stages)]
        ways = list(compositions(total, stages))
        pace = min(self._slowest(c) for c in ways)
        most = [
            max(
                k
                for k in range(total + 1)
                if not k or self._one(i, k) <= pace * (1 + 1e-9)
            )
            for i in range(stages)
        ]
        # Of what could be held beyond that, the first stages do without one each.
        good = [
            c
            for c in ways
            if all(m >= n >= m - 1 for n, m in zip(c, most, strict=True))
        ]
        return list(min(good))

    def _one(self, index: int, layers: int) -> float:
        """Computation of a stage for one micro-batch, nothing computed again."""
        kind, work = self.kinds[index], self.inner.work
        shares = {
            FIRST: float(index == 0),
            LAYER: layers / self.oracle.layers,
            LAST: float(index == len(self.kinds) - 1),
        }
        return sum(
            shares[place] * work[what, home, place, kind]
            for place in PLACES
            for home in self.oracle.homes
            for what in ("ahead", "behind", "launch")
        )

    def _slowest(self, counts: Sequence[int]) -> float:
        """Of the stages that have layers."""
        return max(self._one(i, n) for i, n in enumerate(counts) if n)

    # The step.

    def outcome(self, micro_batches: int) -> Outcome:
        """Step time and fit with so many micro-batches."""
        step = self._pipeline(micro_batches)
        step += max(self._after(i, micro_batches) for i in range(len(self.kinds)))
        fits = all(self._fits(i, micro_batches) for i in range(len(self.kinds)))
        return Outcome(step=step, fits=fits)

    def _pipeline(self, micro_batches: int) -> float:
        stages, chunks = len(self.kinds), self.choice.chunks
        if stages == 1:
            return micro_batches * self.pace
        table = table_of(self.choice.schedule, stages, micro_batches, chunks)
        parts = stages * chunks
        if chunks > 1:
            total = self.oracle.layers
            layers = [total // parts + (p < total % parts) for p in range(parts)]
        else:
            layers = self.counts
        seconds = []
        for phase in ("forward", "backward"):
            along = [
                layers[p] * self._places[self.kinds[p % stages], LAYER, phase]
                for p in range(parts)
            ]
            along[0] += self._places[self.kinds[0], FIRST, phase]
            along[-1] += self._places[self.kinds[-1], LAST, phase]
            seconds.append(along)
        parts_of = axis_parts(("stage",), self.mesh, self.oracle.cluster)
        wait = collective_seconds("collective-permute", self.inner.stream, parts_of)
        return simulate(table, seconds[0], seconds[1], wait).step_seconds

    def _shares(self, index: int) -> dict[int, float]:
        return {
            FIRST: float(index == 0),
            LAYER: self.counts[index] / self.oracle.layers,
            LAST: float(index == len(self.kinds) - 1),
            ENDS: float(index in (0, len(self.kinds) - 1)),
            EVERYWHERE: 1.0,
        }

    def _after(self, index: int, micro_batches: int) -> float:
        shares, oracle = self._shares(index), self.oracle
        total = self._gradients(shares, micro_batches)
        moved = transfers = 0.0
        for leaf, _, stored, owned in self.leaves:
            share = shares[leaf.place]
            parts = owned if self.choice.zero >= 1 else stored
            once = 3 * leaf.group.nbytes + 2 * leaf.group.optimizer_bytes
            moved += share * leaf.count * once / parts
            if self.choice.zero >= 1 and owned > stored:
                each = self.collective(
                    "all-gather", ("data",), leaf.group.nbytes / stored
                )
                exposed = 1 - oracle.hidden.overlap_parameters
                total += share * leaf.count * each * exposed
        for place in HOLDERS:
            away, (params, gradients, state) = self.choice.offload, self.held(place)
            transfers += shares[place] * 2 * state * ("optimizer" in away)
            transfers += shares[place] * 2 * params * ("params" in away)
            transfers += shares[place] * gradients * ("gradients" in away)
        kind = oracle.cluster.kinds[self.kinds[index]]
        if transfers:
            total += transfers / (kind.host_link_bytes_per_second or math.inf)
        return total + float(kind.elementwise_seconds(moved))

    def _gradients(self, shares: Mapping[int, float], micro_batches: int) -> float:
        payloads: dict[tuple[str, ...], float] = defaultdict(float)
        for (axes, place), nbytes in self.inner.gradients.items():
            payloads[axes] += nbytes * shares[place]
        total = 0.0
        for place in (ENDS, EVERYWHERE):
            nbytes = shares[place] * sum(
                leaf.count * leaf.group.nbytes / stored
                for leaf, _, stored, _ in self.leaves
                if leaf.place == place
            )
            if nbytes:
                total += self.collective("all-reduce", ("stage",), nbytes)
        for axes, nbytes in ((a, n) for a, n in payloads.items() if n):
            named = (*axes, "fsdp") if "data" in axes else axes
            compiler = self.oracle.cluster.compiler
            sharding = {"fsdp", "data"} if self.choice.zero >= 2 else {"fsdp"}
            scattered = [a for a in named if a in sharding]
            several = sum(self.mesh[a] > 1 for a in named) > 1
            at_once = several and not compiler.reduces_in_parts
            if at_once or not compiler.reduce_scatter:
                total += micro_batches * self.collective("all-reduce", named, nbytes)
                continue
            once = self.collective("reduce-scatter", scattered, nbytes)
            left = nbytes / math.prod(self.mesh[a] for a in scattered)
            rest = [a for a in named if a not in sharding]
            once += self.collective("all-reduce", rest, left)
            total += once * micro_batches
        return total * (1 - self.oracle.hidden.overlap_gradients)

    def _fits(self, index: int, micro_batches: int) -> bool:
        shares, away = self._shares(index), self.choice.offload
        request = self.oracle.search.request
        held = [self.held(place) for place in HOLDERS]
        params, gradients, state = (
            sum(shares[p] * held[p][i] for p in HOLDERS) for i in range(3)
        )
        flight = in_flight(
            self.choice.schedule, len(self.kinds), micro_batches, self.choice.chunks
        )[index]
        flight = flight / self.choice.chunks
        activations = flight * sum(shares[p] * self.saved(p) for p in PLACES)
        total = self._working(shares, micro_batches, held[LAYER])
        ranks = self.mesh["data"] * self.mesh["fsdp"]
        total += request.state_bytes + sum(request.batch_bytes) / ranks
        total += self.oracle.links.facts.optimizer_other_bytes
        several = self.oracle.layers / 2
        # What is whole, and what stays on the device of what lies with the host.
        terms = {
            "gradients": (gradients, min(gradients, self.held(LAYER)[1] / several)),
            "params": (params, 0.0),
            "optimizer": (state, 0.0),
            "activations": (activations, min(activations, self.saved(LAYER) / several)),
        }
        host = sum(whole for name, (whole, _) in terms.items() if name in away)
        total += sum(pair[name in away] for name, pair in terms.items())
        kinds = self._sharing(index)
        fits = total <= min(k.memory_bytes for k in kinds)
        return fits and host <= min(k.host_memory_bytes or 0 for k in kinds)

    def _sharing(self, index: int) -> Sequence[Any]:
        """Kinds of devices that a stage may lie on."""
        kinds = self.oracle.cluster.kinds
        alike = self.choice.placement.by == "all"
        return kinds if alike else (kinds[self.kinds[index]],)

    def _working(
        self,
        shares: Mapping[int, float],
        micro_batches: int,
        layer: tuple[float, float, float],
    ) -> float:
        request, away = self.oracle.search.request, self.choice.offload
        gathered = copies = fresh = 0.0
        for leaf, whole, stored, owned in self.leaves:
            share = shares[leaf.place]
            if not share:
                continue
            gradient = owned if self.choice.zero >= 2 else stored
            cast = request.cast_bytes * leaf.group.narrowed
            one = leaf.group.nbytes / leaf.slices / whole
            if stored > whole:
                gathered = max(gathered, one * cast)
            elif cast < 1.0:
                copies += share * leaf.count * leaf.group.nbytes * cast / whole
            if gradient > whole:
                gathered = max(gathered, one)
            fresh = max(fresh, leaf.group.nbytes / gradient)
        if "params" in away:
            copies = 2 * layer[0] / self.oracle.layers
        again = 0.0
        saved = self.inner.saved
        for home, policy in self.remat.items():
            for place in PLACES:
                if shares[place]:
                    less = saved[home, place, "none"] - saved[home, place, policy]
                    each = self.oracle.layers if place == LAYER else 1
                    again = max(again, less / each)
        total = copies + 2 * gathered + self.inner.rebuilt + 2 * self.inner.largest
        return total + again + (fresh if micro_batches > 1 else 0.0)
