"""Plans with stage programs: each stage has its own program and devices.

The cut points are those with the fastest slowest stage, by predicted cost, or ``stage``
marks. Each stage is then a model with its own layout, searched on the devices of one
stage. The simulated schedule gives the step time of all stages together.

The module is long because one class holds all results of a cut: the layouts of its
stages, their time and memory, and the plan.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from whalejax.meshes.cluster import Cluster
from whalejax.meshes.units import count_text
from whalejax.planner.cost_terms import Remat, TimeTerms
from whalejax.planner.model.graph import Graph
from whalejax.planner.pipeline.combined_steps import MicroBatchCost, scheduled_step
from whalejax.planner.pipeline.heterogeneous_stages import HeterogeneousPlacement, notes
from whalejax.planner.pipeline.layer_stack import STAGE
from whalejax.planner.pipeline.program_cut import Division
from whalejax.planner.pipeline.schedule_bounds import PricedStages, StageSeconds
from whalejax.planner.pipeline.schedules import Schedule, schedule
from whalejax.planner.pipeline.simulate import simulate
from whalejax.planner.pipeline.stage_graph import places_of, tensors_of
from whalejax.planner.plan.build import build_plan
from whalejax.planner.plan.plan import Plan, Stages
from whalejax.planner.plan.report.why import mesh_words
from whalejax.planner.plan.stage_notes import (
    batch_of,
    candidates,
    check_stages,
    too_large,
)
from whalejax.planner.plan_entries import BatchLeaf, VirtualStagePrediction
from whalejax.planner.plan_errors import NotFaster, PlanError
from whalejax.planner.search.layout_search import ranked
from whalejax.planner.search.least_paces import least_steps, not_faster
from whalejax.planner.search.request import Request
from whalejax.planner.search.spmd_search import by_marks
from whalejax.planner.search.stage_models import (
    DivisibleProgram,
    ModelCut,
    ModelCuts,
    StageLayout,
    laid_out,
)
from whalejax.planner.search.stage_time import (
    handed_bytes,
    handed_seconds,
    turn_of,
)
from whalejax.planner.search.tied_parameters import copied_bytes
from whalejax.planner.search.user_choices import PipelineConstraints
from whalejax.planner.sharding.layout import divisors
from whalejax.planner.step_options import options_off


SCHEDULES = ("1f1b", "gpipe", "1f1b-ahead", "interleaved", "zb-h1")
"""Schedules that stage programs can follow."""

SURE = 0.1
"""Smallest gain over 1F1B that justifies another schedule, as a fraction of its step
time. A split backward pass took 1.09 times the CPU time of an unsplit one.
"""

CHUNKS = 2
"""Virtual stages per stage in an interleaved schedule."""

MOST_CUTS = 4
"""Largest number of cuts to try for stages on mixed device kinds."""

ESTIMATED = ("offload",)
"""Options that no executor runs in stages; only estimates may have them."""

NEAR = 0.2
"""Fraction by which other layouts of a stage may be slower than the chosen one."""

MOST_NEAR, MOST_IMPROVED = 12, 3
"""Largest number of other layouts per stage, and of plans whose layouts are improved.
"""

COUNTS = (2, 4, 8)
"""Numbers of micro-batches to evaluate, as multiples of the number of stages."""

Traced = Callable[[Remat], DivisibleProgram]
"""Function that returns the captured loss with some TaskGraphs rematerialised."""


def decide_mpmd(
    graph: Graph,
    cluster: Cluster,
    request: Request,
    *,
    piped: PipelineConstraints,
    traced: Traced,
    marked: bool,
    precision: str = "f32",
    batch: Sequence[BatchLeaf] = (),
    again: Any = None,
    known_seconds: float = math.inf,
) -> Plan:
    """Chooses how to run a model as stage programs.

    Args:
        graph, cluster, request, precision, batch: Arguments of ``decide``. The mesh
            that the request fixes is the mesh of one stage.
        piped: Requested pipeline settings.
        traced: Function that returns the captured loss with a remat policy.
        marked: Whether ``stage`` marks set the cut points.
        again: Unused.
        known_seconds: Step time of a known plan; slower plans are not tried.

    Raises:
        PlanError: The pipeline is impossible, nothing fits, or no plan is faster.
    """
    del again
    stages = piped.mesh[STAGE]
    request = by_marks(graph, request, stages)
    check_stages(request, stages, most=request.num_devices, estimated=ESTIMATED)
    _check_interleaved(piped, marked, cluster)
    result: list[_MpmdCandidate] = []
    problems: list[PlanError] = []
    counts = [*_counts(graph, request, piped)]
    least = dict.fromkeys((count for _, count in counts), 0.0)
    fewest = min(least)
    if len(counts) > 1 or known_seconds < math.inf:
        given = graph, cluster, request, stages, [*least]
        least = least_steps(*given, known=traced(()).known)
    counts.sort(key=lambda pair: least[pair[1]])
    policies = [request.remat] if request.remat is not None else [(), *_remats(request)]
    for remat in policies:
        program = traced(remat)
        if remat and request.remat is None and program.graph is graph:
            continue
        ask = _Ask(
            cluster=cluster,
            request=request,
            stages=stages,
            schedule=piped.schedule or "1f1b",
            program=program,
            cuts=ModelCuts(whole=program, cluster=cluster, marked=marked, count=fewest),
            remat=remat,
            count=fewest,
            batch=batch,
            priced=PricedStages(stages),
        )
        found, refused = ask.at_counts(counts, least, known_seconds)
        result += found
        problems += refused
        # If all plans are too slow, recomputation makes them slower still.
        if any(one.fits for one in result) or not (found or refused):
            break
    if not result:
        raise next(iter(problems), not_faster(stages, known_seconds))
    if piped.schedule is None:
        result += _other_schedules(result, known_seconds)
    for one in sorted(result, key=_slow)[:MOST_IMPROVED]:
        result[result.index(one)] = one.improved()
    if not (best := min(result, key=_slow)).fits:
        raise too_large(min(result, key=lambda one: one.memory.total_bytes))
    return best.plan(request, precision, batch, graph, result)


def _runner_up_seconds(found: Sequence[_MpmdCandidate]) -> float:
    steps: dict[str, float] = {}
    for one in found:
        if one.fits:
            known = steps.get(one.layout, math.inf)
            steps[one.layout] = min(known, one.time.step_seconds)
    return sorted((*steps.values(), math.inf, math.inf))[1]


def _check_interleaved(
    piped: PipelineConstraints, marked: bool, cluster: Cluster
) -> None:
    if piped.schedule != "interleaved":
        return
    if marked:
        raise PlanError(
            "the schedule interleaved needs several parts of the model on each stage, "
            "but stage marks give each stage one. Drop the marks and give num_stages, "
            "or choose another schedule"
        )
    if not cluster.is_uniform:
        raise PlanError(
            "the schedule interleaved needs several parts of the model on each stage, "
            "but stages on devices of several kinds have one each. Choose another "
            "schedule"
        )


def _slow(one: _MpmdCandidate) -> tuple[bool, float]:
    """Returns the sort key of a candidate: whether it lacks memory, then its time.

    1F1B is simplest, so another schedule must be faster by more than ``SURE``.
    """
    seconds = one.time.step_seconds
    plain = one.table.name == "1f1b"
    return not one.fits, seconds if plain else seconds * (1 + SURE)


def _other_schedules(
    found: Sequence[_MpmdCandidate], known_seconds: float
) -> list[_MpmdCandidate]:
    """Returns plans of the same programs under other schedules.

    Interleaved schedules are tried only with the best numbers of micro-batches.
    """
    best = min(found, key=_slow)
    others = [replace(one.ask, schedule="zb-h1").of(one) for one in found]
    several = not (
        best.ask.cuts.marked
        or best.ask.request.one_part
        or best.heterogeneous_placement
    )
    # With short bubbles, other numbers of micro-batches are best than with 1F1B.
    counts = dict.fromkeys(one.ask.count for one in (best, min(others, key=_slow)))
    for count in counts if several else ():
        if count % best.ask.stages:
            continue
        slow = (_slow(one)[1] for one in (*found, *others) if one.fits)
        limit = min(known_seconds, min(slow, default=math.inf) / (1 + SURE))
        ask = replace(best.ask, schedule="interleaved", count=count)
        with contextlib.suppress(PlanError):
            others += ask.candidate_plans(limit)
    return others


def _near(chosen: StageLayout, fitting: Sequence[StageLayout]) -> list[StageLayout]:
    most = chosen.scored.time.step_seconds * (1 + NEAR)
    near = (
        one
        for one in fitting
        if one is not chosen and one.scored.time.step_seconds <= most
    )
    return sorted(near, key=lambda one: one.scored.time.step_seconds)[:MOST_NEAR]


def _remats(request: Request) -> list[Remat]:
    return [(("*", p),) for p in request.policies if p != "none"]


def _counts(
    graph: Graph, request: Request, piped: PipelineConstraints
) -> Iterator[tuple[bool, int]]:
    """Yields (whether it is usual, number of micro-batches); usual numbers first."""
    if request.num_micro_batches is not None:
        yield True, request.num_micro_batches
        return
    size, stages = graph.batch_size * graph.num_micro_batches, piped.mesh[STAGE]
    matches = [n for n in (stages * k for k in COUNTS) if size % n == 0]
    others = [
        n for n in divisors(size) if n <= COUNTS[-1] * stages and n not in matches
    ]
    matches = matches or [n for n in others if 1 < n <= stages][-1:] or [1]
    yield from ((True, n) for n in matches)
    yield from ((False, n) for n in reversed(others) if n not in matches)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ask:
    """Inputs of candidates with one number of micro-batches and one remat policy.

    ``priced`` records the stage times that were computed for this remat policy.
    """

    cluster: Cluster
    request: Request
    stages: int
    schedule: str
    program: DivisibleProgram
    cuts: ModelCuts
    remat: Remat
    count: int
    batch: Sequence[BatchLeaf]
    priced: PricedStages

    @property
    def table(self) -> Schedule:
        chunks = CHUNKS if self.schedule == "interleaved" else 1
        return schedule(self.schedule, self.stages, self.count, chunks)

    @property
    def one(self) -> Request:
        """Request for the full model on the devices of one stage."""
        return replace(
            self.request,
            num_devices=self.request.num_devices // self.stages,
            num_micro_batches=self.count,
            hosted=self.request.hosted if self.request.estimate else None,
            policies=("none",),
            **options_off(
                "sequence_parallel", *(ESTIMATED if self.request.estimate else ())
            ),
        )

    def at_counts(
        self,
        counts: Sequence[tuple[bool, int]],
        least: Mapping[int, float],
        known_seconds: float,
    ) -> tuple[list[_MpmdCandidate], list[PlanError]]:
        """Returns the plans that may be fast enough, and the errors of other numbers.

        ``counts`` has (is usual, number of micro-batches), by rising bound. ``least``
        has the lower bound on the step seconds of each number.
        """
        result: list[_MpmdCandidate] = []
        problems: list[PlanError] = []
        for usual, count in counts:
            limit = min(known_seconds, _runner_up_seconds(result))
            if least[count] >= limit or (result and not (usual or least[count])):
                break
            try:
                result += replace(self, count=count).candidate_plans(limit)
            except PlanError as error:
                problems.append(error)
        return result, problems

    def candidate_plans(self, limit: float) -> list[_MpmdCandidate]:
        """Returns the plans of two cuts, with the fastest layout that fits each stage.

        The first cut assumes that transfers add to the time of both stages. The second
        assumes that transfers overlap with computation. The schedule decides which
        assumption is closer. Plans that take ``limit`` seconds or more are left out.
        """
        cuts: list[object] = []
        candidate_plans: dict[object, _MpmdCandidate] = {}
        problems: list[PlanError] = []
        for hidden in (False, True):
            try:
                one = self.cuts.of(self.table, self.one, hidden=hidden)
                if one.cut_key not in cuts:
                    cuts.append(one.cut_key)
                    weighed = self._fitted(one, limit, hidden=hidden)
                    candidate_plans.setdefault(weighed.found.cut_key, weighed)
            except NotFaster:
                pass
            except PlanError as error:
                problems.append(error)
        if problems and not candidate_plans:
            raise problems[0]
        return [*candidate_plans.values()]

    def _fitted(self, found: ModelCut, limit: float, *, hidden: bool) -> _MpmdCandidate:
        """Returns the plan of a cut, or of another cut if it lacks memory."""
        one = self._in(found, limit)
        reserved: dict[str, float] = {}
        for _ in range(MOST_CUTS):
            if one.fits or one.heterogeneous_placement is None:
                break
            before, reserved = reserved, one.reserved(reserved)
            if reserved == before:
                break
            again = self.cuts.of(self.table, self.one, reserved, hidden=hidden)
            one = self._in(again, limit)
        return one

    def _in(self, found: ModelCut, limit: float) -> _MpmdCandidate:
        """Returns the plan of a cut.

        The layouts of slow stages are searched first, and of late stages among equals.
        These stages raise the bound on the step time most.
        """
        chosen: dict[int, StageLayout] = {}
        others: dict[int, list[StageLayout]] = {}
        each = range(self.stages)
        places = [
            places_of(stage, self.stages, self.table.num_chunks) for stage in each
        ]
        paces = [sum(found.paces[place] for place in several) for several in places]
        for stage in sorted(each, key=lambda n: (paces[n], n), reverse=True):
            self._check_bounds(found, limit)
            ground = found.grounds[stage]
            laid = self._stage(found, stage, ground.cluster)
            busy = (self._busy_seconds(x.scored.time * ground.ratio) for x in laid)
            least = StageSeconds.least(busy)
            self.priced.record(found.cut_key, self.count, stage, least)
            room = ground.cluster.memory_bytes
            fitting = [x for x in laid if x.scored.memory.total_bytes <= room]
            if fitting:
                best = ranked([one.scored for one in fitting])[0]
                chosen[stage] = next(one for one in fitting if one.scored is best)
            else:
                chosen[stage] = min(laid, key=lambda x: x.scored.memory.total_bytes)
            others[stage] = _near(chosen[stage], fitting)
        self._check_bounds(found, limit)
        layouts = [chosen[stage] for stage in each], [others[stage] for stage in each]
        return _MpmdCandidate(self, found, *layouts)

    def _busy_seconds(self, time: TimeTerms) -> StageSeconds:
        passes, reduction = time.pass_seconds, time.gradient_seconds
        return StageSeconds.of(passes, reduction, recomputes=bool(self.remat))

    def _check_bounds(self, found: ModelCut, limit: float) -> None:
        """Raises ``NotFaster`` if no schedule of a cut stays below a limit."""
        chunks = self.table.num_chunks
        least = self.priced.least_of(found.cut_key, self.count, chunks)
        if self.cluster.is_uniform:
            least = max(least, self.priced.least_of_any(self.count))
        if least >= limit:
            raise not_faster(self.stages, limit)

    def of(self, other: _MpmdCandidate) -> _MpmdCandidate:
        """Returns the same layouts under this schedule, with as many virtual stages."""
        chosen = [self.with_memory(n, laid) for n, laid in enumerate(other.chosen)]
        return _MpmdCandidate(self, other.found, chosen, other.others, other.turns)

    def with_memory(self, stage: int, laid: StageLayout) -> StageLayout:
        """Returns a layout of a stage with its memory under this schedule."""
        held = self.table.in_flight[stage] / self.table.num_chunks
        memory = laid.search.memory_of(laid.scored, max(1.0, held))
        return replace(laid, scored=replace(laid.scored, memory=memory))

    def _stage(self, found: ModelCut, stage: int, part: Cluster) -> list[StageLayout]:
        table, division = self.table, found.division
        graph, known = found.graphs[stage]
        owned = {
            graph.tensors[i].path
            for i, path in enumerate(division.units.params)
            if division.owner(i, table.num_stages) == stage
        }
        bytes_of = self.request.optimizer.by_path
        hosted = self.one.hosted

        def of_stage(path: str, nbytes: int) -> int:
            return nbytes if path in owned else 0

        one = replace(
            self.one,
            hosted=None if hosted is None else lambda: hosted().with_state(of_stage),
            optimizer=replace(
                self.request.optimizer,
                by_path={path: of_stage(path, n) for path, n in bytes_of.items()},
            ),
            batch_bytes=tuple(
                self._batch_bytes(t.id) for t in graph.tensors if t.kind == "batch"
            ),
            in_flight=max(1.0, table.in_flight[stage] / table.num_chunks),
        )
        return laid_out(graph, part, one, known)

    def _batch_bytes(self, tensor: int) -> int:
        leaves = [t.id for t in self.program.graph.tensors if t.kind == "batch"]
        if tensor in leaves:
            sizes = self.request.batch_bytes
            return sizes[leaves.index(tensor)] if sizes else 0
        t = self.program.graph.tensors[tensor]
        parts = self.count // self.program.graph.num_micro_batches
        return t.nbytes // parts * (max(self.table.in_flight) + 1)


class _MpmdCandidate:
    """Candidate plan: a layout for every stage on one mesh, with their joint cost.

    ``memory`` is the memory of ``fullest``, the stage that uses most of its devices.
    ``others`` has the layouts of each stage that are nearly as fast as the chosen one.
    """

    def __init__(
        self,
        ask: _Ask,
        found: ModelCut,
        chosen: Sequence[StageLayout],
        others: Sequence[Sequence[StageLayout]],
        turns: Sequence[MicroBatchCost] | None = None,
    ) -> None:
        self.ask = ask
        self.table = ask.table
        self.found = found
        self.division: Division = found.division
        self.paces = found.paces
        self.chosen = chosen
        self.others = others
        self.turns = turns or [self._turn(n, laid) for n, laid in enumerate(chosen)]
        needs = [
            (one.scored.memory, ground.cluster.memory_bytes)
            for one, ground in zip(chosen, found.grounds, strict=True)
        ]
        self.fullest, (self.memory, self.room_bytes) = max(
            enumerate(needs), key=lambda pair: pair[1][0].total_bytes / pair[1][1]
        )
        self.fits = self.memory.total_bytes <= self.room_bytes
        self.copied = copied_bytes(self.division, chosen)
        self.time = self._time()

    @property
    def heterogeneous_placement(self) -> HeterogeneousPlacement | None:
        return self.found.allotted

    def reserved(self, before: Mapping[str, float]) -> dict[str, float]:
        """Returns the bytes by kind that stages need beyond the cut's estimate."""
        assert self.heterogeneous_placement is not None
        result = dict(before)
        for one, ground, counted in zip(
            self.chosen,
            self.found.grounds,
            self.heterogeneous_placement.needs_bytes,
            strict=True,
        ):
            more = one.scored.memory.total_bytes - counted
            result[ground.kind.name] = max(result.get(ground.kind.name, 0.0), more)
        return result

    def _turn(self, stage: int, laid: StageLayout) -> MicroBatchCost:
        turn = turn_of(laid.search, laid.scored)
        return turn.measured(self.found.grounds[stage].ratio)

    def improved(self) -> _MpmdCandidate:
        """Returns this plan with other stage layouts, where they make its step faster.

        The fastest layout of one stage may delay other stages.
        """
        best = self
        for stage, others in enumerate(self.others) if self.fits else ():
            for other in others:
                chosen, turns = [*best.chosen], [*best.turns]
                chosen[stage] = self.ask.with_memory(stage, other)
                turns[stage] = self._turn(stage, other)
                one = _MpmdCandidate(self.ask, self.found, chosen, self.others, turns)
                if one.fits and one.time.step_seconds < best.time.step_seconds:
                    best = one
        return best

    @property
    def slowest(self) -> int:
        seconds = [turn.both.step_seconds for turn in self.turns]
        return seconds.index(max(seconds))

    def _time(self) -> TimeTerms:
        table = self.table
        ahead, behind, weight = self._by_place()
        line = simulate(
            table,
            ahead,
            behind,
            self._transfer_seconds(),
            weight_seconds=weight if table.splits_backward else None,
        )
        copied = [self._over_seconds(stage, n) for stage, n in enumerate(self.copied)]
        return scheduled_step(self.turns, table, line, ahead=ahead, copied=copied)

    def _by_place(self) -> tuple[list[float], list[float], list[float]]:
        """Returns the seconds of each virtual stage: forward, backward, weight."""
        stages, chunks = self.table.num_stages, self.table.num_chunks
        ahead, behind, weight = [], [], []
        for place in range(self.table.num_places):
            stage = place % stages
            own = sum(self.paces[p] for p in places_of(stage, stages, chunks))
            share = self.paces[place] / own if own else 1 / chunks
            turn = self.turns[stage]
            back = turn.both.step_seconds - turn.ahead.step_seconds
            late = turn.weight_share if self.table.splits_backward else 0.0
            ahead.append(share * turn.ahead.step_seconds)
            behind.append(share * back * (1 - late))
            weight.append(share * back * late)
        return ahead, behind, weight

    def _paces(self) -> Iterator[VirtualStagePrediction]:
        seconds = zip(*self._by_place(), strict=True)
        for place, (ahead, behind, weight) in enumerate(seconds):
            handed, returned = self._handed_bytes[place]
            yield VirtualStagePrediction(
                forward_seconds=ahead,
                backward_seconds=behind,
                weight_seconds=weight,
                handed_bytes=handed,
                returned_bytes=returned,
                copied_bytes=self.copied[place] if place < len(self.copied) else 0,
            )

    @functools.cached_property
    def _handed_bytes(self) -> list[tuple[int, int]]:
        """Bytes that each virtual stage's devices receive per micro-batch and pass."""
        graph, units = self.ask.program.graph, self.ask.program.units
        parts, stages = self.ask.count // graph.num_micro_batches, len(self.chosen)
        result = []
        for place, part in enumerate(self.division.parts):
            makers = {
                tensor: self.division.made_at[value] % stages
                for value in part.imports
                for tensor in tensors_of(units, [value])
            }
            laid = self.chosen[place % stages]
            handed = handed_bytes(laid.analysed, laid.scored, [*makers], parts)
            returned = 0.0
            for maker in set(makers.values()):
                back = [
                    t
                    for t, made in makers.items()
                    if made == maker and graph.tensors[t].differentiable
                ]
                laid = self.chosen[maker]
                returned += handed_bytes(laid.analysed, laid.scored, back, parts)
            result.append((int(handed), int(returned)))
        return result

    def _transfer_seconds(self) -> float:
        stages = self.table.num_stages
        return max(
            self._over_seconds(place % stages, handed)
            for place, (handed, _) in enumerate(self._handed_bytes)
        )

    def _over_seconds(self, stage: int, nbytes: float) -> float:
        whole = {STAGE: self.table.num_stages, **self.chosen[stage].scored.mesh}
        return handed_seconds(nbytes, whole, self.ask.cluster) if nbytes else 0.0

    @property
    def layout(self) -> str:
        each = dict.fromkeys(mesh_words(one.scored.mesh) for one in self.chosen)
        inner = f" × ({' | '.join(each)})" if [*each] != ["one device"] else ""
        words = (
            f"stage {self.table.num_stages}{inner}, "
            f"{count_text(self.ask.count, 'micro-batch')}"
        )
        return f"{words}, {self.table.name}"

    def plan(
        self,
        request: Request,
        precision: str,
        batch: Sequence[BatchLeaf],
        graph: Graph,
        weighed: Sequence[_MpmdCandidate],
    ) -> Plan:
        plans = [
            replace(
                self._stage_plan(stage, request, precision, batch),
                model_hash=graph.model_hash,
                remat=self.ask.remat,
            )
            for stage in range(self.table.num_stages)
        ]
        slowest = plans[self.slowest]
        by_path = {leaf.path: leaf for plan in reversed(plans) for leaf in plan.leaves}
        names = {r.name: r for plan in reversed(plans) for r in plan.roles}
        common = [axis for axis in plans[0].axes if all(axis in p.axes for p in plans)]
        return replace(
            slowest,
            cluster=self.ask.cluster,
            axes=((STAGE, self.table.num_stages), *common),
            zero=max(plan.zero for plan in plans),
            sequence_parallel=any(plan.sequence_parallel for plan in plans),
            leaves=tuple(by_path[t.path] for t in graph.params),
            roles=tuple(names.values()),
            compute=tuple(
                replace(region, task_graph=f"{region.task_graph} in stage {number}")
                for number, plan in enumerate(plans)
                for region in plan.compute
            ),
            batch=batch_of(plans, batch),
            stages=Stages(
                schedule=self.table.name,
                chunks=self.table.num_chunks,
                executor="mpmd",
                starts=self.division.starts,
                plans=tuple(plans),
                paces=tuple(self._paces()),
                handed_seconds=self._transfer_seconds(),
                **self._lying(),
            ),
            time=self.time,
            memory=self.memory,
            candidates=candidates(weighed, self),
            notes=(
                *dict.fromkeys(note for plan in plans for note in plan.notes),
                *(
                    []
                    if self.heterogeneous_placement is None
                    else self._shared_out(graph)
                ),
            ),
        )

    def _lying(self) -> dict[str, Any]:
        lying = self.found.grounds
        if self.heterogeneous_placement is None:
            return {}
        blocks = tuple(ground.block for ground in lying)
        return {
            "kinds": tuple(ground.kind.display_name() for ground in lying),
            "blocks": () if blocks == tuple(range(len(blocks))) else blocks,
        }

    def _shared_out(self, graph: Graph) -> Iterator[str]:
        assert self.heterogeneous_placement is not None
        lying = sorted(self.found.grounds, key=lambda ground: ground.block)
        return notes(lying, graph, self.heterogeneous_placement)

    def _stage_plan(
        self,
        stage: int,
        request: Request,
        precision: str,
        batch: Sequence[BatchLeaf],
    ) -> Plan:
        laid = self.chosen[stage]
        whole = self.ask.program.graph
        leaves = [t.id for t in whole.tensors if t.kind == "batch"]
        own = []
        for t in laid.analysed.graph.tensors:
            if t.kind == "batch":
                own.append(
                    batch[leaves.index(t.id)]
                    if t.id in leaves
                    else BatchLeaf(path=t.path, shape=t.shape, dtype=t.dtype, spec=())
                )
        plan = build_plan(
            laid.analysed,
            laid.search,
            [laid.scored],
            self.found.grounds[stage].cluster,
            replace(request, state_bytes=0),
            precision,
            own,
        )
        return replace(plan, candidates=(), question=None)
