"""Parallel pipelines on mixed devices, each with its own number of micro-batches.

The devices are divided into equal parts, in node order. Each part runs the full model
as a pipeline, whose cut points suit its device kinds. Shares are the integers that
minimise the time of the slowest pipeline under its schedule. Whale instead balances
every pipeline equally, with the same number of micro-batches.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from whalejax.meshes.cluster import Cluster
from whalejax.meshes.units import count_text, gigabytes
from whalejax.planner.balance.shares import (
    even_shares,
    gain_words,
    idle_note,
    largest_remainder,
    speed_bound,
)
from whalejax.planner.cost.collectives import axis_parts, collective_seconds
from whalejax.planner.cost_terms import MemoryTerms, TimeTerms
from whalejax.planner.model.graph import Graph
from whalejax.planner.pipeline.combined_steps import replicas_step
from whalejax.planner.pipeline.layer_stack import STAGE
from whalejax.planner.pipeline.schedules import schedule
from whalejax.planner.pipeline.simulate import simulate
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan.uneven_replica_plans import counts
from whalejax.planner.plan_entries import Candidate, Collective, LeafPlan
from whalejax.planner.plan_errors import NothingFits, PlanError
from whalejax.planner.search.least_paces import StageBounds, not_faster
from whalejax.planner.search.request import Request
from whalejax.planner.search.spmd_search import ProgramCache, check_marks
from whalejax.planner.search.stage_models import TooFewParts
from whalejax.planner.search.user_shares import DATA, check_shares, said_of
from whalejax.planner.sharding.layout import divisors


Decide = Callable[[Cluster, Request, float], Plan]
"""Function that returns the plan of one pipeline on its devices, or raises an error if
its step takes longer than a given number of seconds.
"""

MOST_COUNTS = 3
"""Largest number of micro-batch counts to evaluate per number of pipelines."""

MOST_REPLICAS = 16
"""Largest number of parallel pipelines that the planner chooses."""

MUCH = 2.0
"""Ratio of two pipelines' possible step times from which the pipeline with less time is
tried first. It shows sooner that no shares are fast enough.
"""

FAR, LESS = 0.2, 0.05
"""Limits for trying a larger number of pipelines, as fractions of a step time. No
larger number is tried if the last one was slower than the known plan by more than the
first, and faster than fewer pipelines by less than the second.
"""


class _Pipeline:
    """One pipeline, with its step times for other numbers of micro-batches."""

    def __init__(self, plan: Plan) -> None:
        assert plan.stages is not None
        self.plan, self._stages = plan, plan.stages
        self._known = {0: 0.0}

    def seconds(self, count: int) -> float:
        if count not in self._known:
            stages = self._stages
            table = schedule(stages.schedule, len(stages.plans), count)
            weight = [pace.weight_seconds for pace in stages.paces]
            self._known[count] = simulate(
                table,
                [pace.forward_seconds for pace in stages.paces],
                [pace.backward_seconds for pace in stages.paces],
                stages.handed_seconds,
                weight_seconds=weight if table.splits_backward else None,
            ).step_seconds
        return self._known[count]

    def most_within(self, seconds: float, most: int) -> int:
        """Returns the largest number of micro-batches, up to ``most``, that is in time.

        A step with that many takes less than ``seconds``.
        """
        return bisect.bisect_left(
            range(1, most + 1), seconds - self.once, key=self.seconds
        )

    @property
    def once(self) -> float:
        """Seconds of a step after its micro-batches."""
        plan = self.plan
        return max(0.0, plan.time.step_seconds - self.seconds(plan.num_micro_batches))

    @property
    def kinds(self) -> list[str]:
        names = [plan.cluster.kinds[0].display_name() for plan in self.plan.stage_plans]
        return [*dict.fromkeys(names)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ParallelPipelines:
    """Parallel pipelines, with the all-reduce of their gradients and its seconds."""

    plans: tuple[_Pipeline, ...]
    shares: tuple[int, ...]
    exchange: tuple[Collective, float]

    @property
    def pace(self) -> float:
        return _pace(self.plans, self.shares)

    @property
    def rest(self) -> float:
        return self.exchange[1] + max(plan.once for plan in self.plans)

    @property
    def step_seconds(self) -> float:
        return self.pace + self.rest

    @property
    def memory(self) -> MemoryTerms:
        """Memory of the fullest device, with the exchange buffer of gradients."""
        return max(
            (
                (stage.memory.with_exchange_buffer, stage.cluster.memory_bytes)
                for stage in self._stages()
            ),
            key=lambda pair: pair[0].total_bytes / pair[1],
        )[0]

    @property
    def lacks_bytes(self) -> int:
        return max(
            stage.memory.with_exchange_buffer.total_bytes - stage.cluster.memory_bytes
            for stage in self._stages()
        )

    @property
    def layout(self) -> str:
        stages = self.plans[0].plan.axis_sizes[STAGE]
        each = " and ".join(map(str, self.shares))
        return (
            f"data {len(self.plans)} × stage {stages}, {each} of {sum(self.shares)} "
            "micro-batches"
        )

    def _stages(self) -> Iterator[Plan]:
        for plan in self.plans:
            yield from plan.plan.stage_plans


def decide_pipelines(
    graph: Graph,
    cluster: Cluster,
    request: Request,
    *,
    stages: int,
    asked: Sequence[int] | None,
    decide: Decide,
    known_seconds: float = math.inf,
    known: ProgramCache | None = None,
) -> Plan:
    """Chooses parallel pipelines for a model, and their shares of the micro-batches.

    Args:
        graph: The captured loss.
        cluster: Cluster to plan for.
        request: Options of the request for all devices; its mesh lacks ``stage``.
        stages: Number of stages of each pipeline.
        asked: Requested shares in node order, or None.
        decide: Function that returns the plan of one pipeline on its devices.
        known_seconds: Step time of a known plan. If some pipelines are far slower, more
            pipelines are not tried.
        known: Programs of the loss that were analysed before.

    Raises:
        PlanError: The request is impossible, or nothing fits.
    """
    known = ProgramCache() if known is None else known
    _check(graph, request, stages, asked)
    result: list[_ParallelPipelines] = []
    problems: list[PlanError] = []
    here = math.inf
    for replicas in _replicas(request, stages, asked):
        least = 2 * stages * replicas
        several = counts(graph, request, asked, least=least)[:MOST_COUNTS]
        free = asked is None and DATA not in (request.mesh or {})
        if free and several[-1] < replicas:
            continue  # Some pipelines would have no micro-batch.
        steps = [one.step_seconds for one in result if one.lacks_bytes <= 0]
        limit = min(known_seconds, *steps, math.inf)
        parts = _Parts(cluster, replicas, request.num_devices // replicas)
        try:
            if limit < math.inf:
                parts.bound(graph, request, stages, several, known)
        except PlanError as error:  # A stage would have devices of several kinds.
            problems.append(error)
            continue
        weigh = functools.partial(_weigh, parts, request, stages, asked, decide, limit)
        some = [*_while_faster(weigh, several, problems)]
        result += some
        ends = (one.step_seconds for one in some if one.lacks_bytes <= 0)
        before, here = here, min(ends, default=math.inf)
        if known_seconds * (1 + FAR) < here and before * (1 - LESS) < here < math.inf:
            break
    if not result and problems:
        short = [error for error in problems if isinstance(error, NothingFits)]
        raise min(short, key=lambda error: error.lacks_bytes, default=problems[0])
    if not result:
        raise PlanError(
            f"{request.num_devices} devices are too few for two pipelines of {stages} "
            "stages. Use fewer stages, or more devices"
        )
    fitting = [one for one in result if one.lacks_bytes <= 0]
    if not fitting:
        raise _too_large(min(result, key=lambda one: one.lacks_bytes))
    best = min(fitting, key=lambda one: one.step_seconds)
    return _build_plan(cluster, stages, best, result)


def _while_faster(
    weigh: Callable[[int], _ParallelPipelines],
    several: Sequence[int],
    problems: list[PlanError],
) -> Iterator[_ParallelPipelines]:
    """Evaluates numbers of micro-batches, the fewest first, while more of them help.

    If the fewest do not fit, it starts again from the most, which need the least
    memory.
    """
    best, lacking = math.inf, False
    left = [*several]
    while left:
        try:
            one = weigh(left.pop(-1 if lacking else 0))
        except TooFewParts:
            raise  # Other numbers of micro-batches need the same parts.
        except NothingFits as error:
            problems.append(error)
            if lacking:
                return
            lacking = True
        except PlanError as error:
            problems.append(error)
        else:
            yield one
            slower = one.step_seconds > best
            if one.lacks_bytes <= 0:
                if slower and not lacking:
                    return
                best = min(best, one.step_seconds)


def _check(
    graph: Graph, request: Request, stages: int, asked: Sequence[int] | None
) -> None:
    if request.zero:
        raise PlanError(
            f"zero is {request.zero}: pipelines with unequal shares each store the "
            "full state of their stages. Drop zero, or the shares"
        )
    if request.offload:
        raise PlanError(
            f"offload is {list(request.offload)}: pipelines with unequal shares store "
            "everything in the devices' memory. Drop offload, or the shares"
        )
    if asked is not None:
        check_shares(
            graph, request, asked, num_devices=request.num_devices, stages=stages
        )
        size = request.num_devices // len(asked)
        with said_of(
            f"shares makes {count_text(len(asked), 'pipeline')} of "
            f"{count_text(size, 'device')} each"
        ):
            check_marks(graph, size, stages)


def _replicas(
    request: Request, stages: int, asked: Sequence[int] | None
) -> Iterator[int]:
    if asked is not None:
        yield len(asked)
        return
    data = dict(request.mesh or {}).get(DATA)
    for replicas in divisors(request.num_devices // stages):
        if 1 < replicas <= MOST_REPLICAS and data in (None, replicas):
            yield replicas


class _Parts:
    """Equal parts of a cluster, each for one pipeline.

    Attributes:
        each: Devices of each part, in node order.
        alike: Number of parts by their device kinds.
        size: Number of devices of a part.
    """

    def __init__(self, cluster: Cluster, replicas: int, size: int) -> None:
        self.cluster, self.size = cluster, size
        self.each = [cluster.part(size, r * size) for r in range(replicas)]
        self.alike = Counter(_kinds_of(part) for part in self.each)
        self._bounds: dict[tuple[str, ...], StageBounds] = {}

    def bound(
        self,
        graph: Graph,
        request: Request,
        stages: int,
        several: Sequence[int],
        known: ProgramCache,
    ) -> None:
        """Computes bounds for ``most_within``, for numbers of micro-batches."""
        one = self.request_of_one(request, 1)
        self._bounds = {
            kinds: StageBounds(graph, part, one, stages, several, known=known)
            for kinds, part in {_kinds_of(part): part for part in self.each}.items()
        }

    def request_of_one(self, request: Request, count: int) -> Request:
        """Returns the request for one pipeline that computes all micro-batches.

        Args:
            request: Request for all pipelines.
            count: Number of micro-batches.
        """
        mesh = {**(request.mesh or {}), DATA: 1}
        return dataclasses.replace(
            request,
            num_devices=self.size,
            num_micro_batches=count,
            mesh=mesh,
            zero=0,
        )

    def most_within(self, seconds: float, count: int) -> dict[tuple[str, ...], int]:
        """Returns the most micro-batches that a pipeline may compute, by device kinds.

        Args:
            seconds: Limit on the seconds of a step.
            count: Number of micro-batches of all pipelines.
        """
        bounds = self._bounds
        return {
            kinds: bounds[kinds].most_within(seconds, count) if bounds else count
            for kinds in self.alike
        }


def _weigh(
    parts: _Parts,
    request: Request,
    stages: int,
    asked: Sequence[int] | None,
    decide: Decide,
    limit: float,
    count: int,
) -> _ParallelPipelines:
    """Evaluates pipelines whose step takes less than ``limit`` seconds."""
    one = parts.request_of_one(request, count)
    most = parts.most_within(limit, count)
    pipelines: dict[tuple[str, ...], _Pipeline] = {}

    def slowest(kinds: tuple[str, ...]) -> float:
        """Returns the seconds within which parts of some kinds must run everything."""
        others = sum(n * most[k] for k, n in parts.alike.items() if k != kinds)
        needed = math.ceil((count - others) / parts.alike[kinds])
        if needed > most[kinds]:
            raise not_faster(stages, limit)
        # A part that is fast enough for the micro-batches that it must take can run all
        # of them, one after the other, in at most this time.
        return limit * count / needed if needed > 0 else math.inf

    # Parts of the same kinds have one plan. The others copy the settings of the first
    # part, so the part with least memory comes first.
    ordered = sorted(parts.each, key=lambda part: part.memory_bytes)
    first = min(ordered, key=lambda part: slowest(_kinds_of(part)))
    limits = [slowest(_kinds_of(part)) for part in (first, ordered[0])]
    if limits[0] * MUCH < limits[1]:
        # A pipeline with settings of its own is at least as fast.
        decide(first, one, limits[0])
    for part in ordered:
        kinds = _kinds_of(part)
        if kinds not in pipelines:
            result = decide(part, one, slowest(kinds))
            pipelines[kinds] = _Pipeline(result)
            most[kinds] = pipelines[kinds].most_within(limit, most[kinds])
            inner = {axis: n for axis, n in result.axes if axis != STAGE}
            mesh = {**(one.mesh or {}), **inner}
            one = dataclasses.replace(one, mesh=mesh, remat=result.remat)
    plans = [pipelines[_kinds_of(part)] for part in parts.each]
    whole = [pipeline.plan for pipeline in plans]
    _check_alike(whole)
    return _ParallelPipelines(
        plans=tuple(plans),
        shares=tuple(asked) if asked is not None else _shares(plans, count),
        exchange=_exchange(whole, parts.cluster, stages),
    )


def _kinds_of(part: Cluster) -> tuple[str, ...]:
    return tuple(n.kind.name for n in part.nodes for _ in range(n.count))


def _check_alike(plans: Sequence[Plan]) -> None:

    def stored(plan: Plan) -> dict[str, tuple[object, ...]]:
        return {
            leaf.path: (home.axes, own.param_spec, own.optimizer_spec)
            for leaf in plan.leaves
            for home in [plan.home(leaf.path)]
            for own in [home.leaf(leaf.path)]
        }

    first = stored(plans[0])
    for number, plan in enumerate(plans[1:], 1):
        others = {p for p, spec in stored(plan).items() if spec != first[p]}
        if others:
            raise PlanError(
                f"pipelines 0 and {number} would store {', '.join(sorted(others)[:3])} "
                "in different shards. Fix the axes inside a stage with mesh="
            )


def _pace(plans: Sequence[_Pipeline], shares: Sequence[int]) -> float:
    return max(p.seconds(k) for p, k in zip(plans, shares, strict=True))


def _shares(plans: Sequence[_Pipeline], count: int) -> tuple[int, ...]:
    """Returns shares by speed, improved while the last pipeline then ends earlier.

    Each improvement moves micro-batches from the pipeline that ends last to another
    one.
    """
    shares = [*largest_remainder(count, [1 / p.seconds(count) for p in plans])]
    while True:
        ends = [p.seconds(k) for p, k in zip(plans, shares, strict=True)]
        last = ends.index(max(ends))
        next_ends = [p.seconds(k + 1) for p, k in zip(plans, shares, strict=True)]
        first = next_ends.index(min(next_ends))
        if next_ends[first] >= ends[last]:
            return tuple(shares)
        shares[last] -= 1
        shares[first] += 1


def _exchange(
    plans: Sequence[Plan], cluster: Cluster, stages: int
) -> tuple[Collective, float]:
    payload = max(
        one.memory.gradients_bytes for plan in plans for one in plan.stage_plans
    )
    summed = Collective(
        kind="all-reduce",
        axes=(DATA,),
        phase="update",
        what="gradient",
        payload_bytes=payload,
        count=1,
    )
    inside = plans[0].num_devices // stages
    mesh = {DATA: len(plans), STAGE: stages, "inside": inside}
    parts = axis_parts((DATA,), mesh, cluster)
    return summed, collective_seconds(summed.kind, payload, parts)


def _too_large(one: _ParallelPipelines) -> NothingFits:
    total = one.memory.total_bytes
    return NothingFits(
        f"{one.layout}: a device needs {gigabytes(total)} with the buffers of the "
        f"gradient reduction, {gigabytes(one.lacks_bytes)} more than it has. Use more "
        "stages or micro-batches, or shard more inside a stage (fsdp, tensor)",
        lacks_bytes=one.lacks_bytes,
        of_bytes=total - one.lacks_bytes,
        nearest=one.layout,
    )


def _build_plan(
    cluster: Cluster,
    stages: int,
    best: _ParallelPipelines,
    found: Sequence[_ParallelPipelines],
) -> Plan:
    first = best.plans[0].plan
    unlike = {best.layout: best}
    for one in sorted(found, key=lambda one: one.step_seconds):
        unlike.setdefault(one.layout, one)
    candidates = [
        Candidate(
            layout=one.layout,
            time=_time(one),
            memory=one.memory,
            fits=one.lacks_bytes <= 0,
            verdict="chosen"
            if one is best
            else "slower"
            if one.lacks_bytes <= 0
            else "does not fit",
        )
        for one in unlike.values()
    ]
    inner = tuple(axis for axis in first.axes if axis[0] != STAGE)
    return dataclasses.replace(
        first,
        cluster=cluster,
        axes=((DATA, len(best.plans)), (STAGE, stages), *inner),
        shares=best.shares,
        pipelines=tuple(
            dataclasses.replace(plan.plan, candidates=(), notes=())
            for plan in best.plans
        ),
        leaves=tuple(_summed(leaf) for leaf in first.leaves),
        time=_time(best),
        memory=best.memory,
        collectives=(best.exchange[0],),
        candidates=tuple(candidates),
        notes=tuple(dict.fromkeys(_notes(best))),
    )


def _summed(leaf: LeafPlan) -> LeafPlan:
    axes = (DATA, *leaf.summed) if leaf.trained else ()
    return dataclasses.replace(leaf, summed=axes)


def _time(one: _ParallelPipelines) -> TimeTerms:
    ends = [p.seconds(k) for p, k in zip(one.plans, one.shares, strict=True)]
    last = one.plans[ends.index(max(ends))]
    time, exchange = last.plan.time, one.exchange[1]
    return replicas_step(
        time,
        one.step_seconds - exchange - time.update_seconds,
        update_seconds=time.update_seconds,
        exchange_seconds=exchange,
    )


def _notes(one: _ParallelPipelines) -> Iterator[str]:
    for pipeline in one.plans:
        yield from pipeline.plan.notes
    total = sum(one.shares)
    even = even_shares(total, len(one.plans))
    gain = (_pace(one.plans, even) + one.rest) / one.step_seconds
    bound = speed_bound([pipeline.seconds(total) for pipeline in one.plans])
    each = ", ".join(
        f"{share} on {' → '.join(pipeline.kinds)}"
        for pipeline, share in zip(one.plans, one.shares, strict=True)
    )
    words = gain_words(gain, bound)
    yield f"pipelines take {each} of {count_text(total, 'micro-batch')}: {words}"
    ends = [pipeline.seconds(1) for pipeline in one.plans]
    if note := idle_note("pipelines", one.shares, ends, _pace(one.plans, one.shares)):
        yield note
