"""Chooses the executor of a plan: one program, or stages in one program or in several.

The module is long because ``_Staging`` tries the executors in order and reports why
each of them cannot run.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from whalejax import _compat
from whalejax.api.fixed_axes import EVEN, Uneven, check_mesh
from whalejax.capture import Captured
from whalejax.capture.layer_scan import IndivisibleLayersError, stack_of
from whalejax.capture.loss_options import check_runs
from whalejax.capture.loss_programs import Programs
from whalejax.capture.program_units import units_of
from whalejax.meshes import Cluster
from whalejax.meshes.errors import Problems, warn
from whalejax.planner.cost_terms import Remat
from whalejax.planner.model.graph import Graph
from whalejax.planner.model.repeated_layers import stacked_loop, stacked_loops
from whalejax.planner.pipeline.layer_stack import STAGE
from whalejax.planner.pipeline.program_cut import FlowsBackwards
from whalejax.planner.plan.build import KEPT_CANDIDATES
from whalejax.planner.plan.estimates import (
    as_estimate,
    gain_notes,
    paper_note,
    why_not,
)
from whalejax.planner.plan.pipeline_mpmd import SCHEDULES, decide_mpmd
from whalejax.planner.plan.pipeline_spmd import LOCKSTEP, decide_stages
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan.spmd_plan import decide
from whalejax.planner.plan.stage_notes import (
    evened,
    lopsided,
    merged_pipelines_note,
    speed_difference_text,
    uncut,
)
from whalejax.planner.plan.uneven_pipelines import decide_pipelines
from whalejax.planner.plan.uneven_replica_plans import decide_shares
from whalejax.planner.plan_errors import NothingFits, PlanError
from whalejax.planner.search.layout_search import PLANNED_AXES, fixed_space
from whalejax.planner.search.least_paces import least_stage_steps, least_steps
from whalejax.planner.search.ranking import SURE, TIE
from whalejax.planner.search.request import OffloadableState, Request
from whalejax.planner.search.spmd_search import ProgramCache, check_marks
from whalejax.planner.search.stage_models import DivisibleProgram, TooFewParts
from whalejax.planner.search.user_choices import PipelineConstraints
from whalejax.planner.sharding.layout import divisors
from whalejax.planner.sharding.metadata_constraints import pinned_axes, pins_of


ALIKE = "one program runs all stages in lockstep: their layers are one scan"
"""Note on the plans of lockstep stages."""


def decider(
    programs: Programs,
    request: Request,
    *,
    runnable: bool,
    uneven: Uneven = False,
    allow_idle: bool = False,
) -> tuple[Callable[..., Plan], Request]:
    """Returns the search for a model's executor, and its request.

    Args:
        programs: Programs of the loss: as written, and its variants.
        request: Request of the search.
        runnable: Whether plans that cannot run are excluded.
        uneven: Whether replicas have unequal shares, or those shares.
        allow_idle: Whether some devices may be idle.

    Returns:
        The search and its request. With stages, the request is for the devices of one
        stage.

    Raises:
        PlanError: The requested pipeline is contradictory or cannot run, or marks or
            mesh do not suit the pipeline or the devices.
    """
    known = programs.known
    if not runnable:
        return functools.partial(_any, programs, uneven, allow_idle), request
    if _marked(programs.graph):
        _check_widths(programs.graph)
    if not allow_idle:  # With idle devices, smaller numbers of devices are tried.
        check_marks(programs.graph, request.num_devices)
    asked, requested_pipeline = _requested_pipeline(programs.graph, request)
    mesh = dict(asked.mesh)
    stages = mesh.pop(STAGE, 1)
    if request.num_devices == 1 and STAGE not in (request.mesh or {}):
        stages, requested_pipeline = (
            1,
            False,
        )  # One device ignores the marks.
    if mesh and stages > 1 and request.num_devices % stages == 0:
        # Marks may define the stages, and ``request.mesh`` does not contain these.
        check_mesh(asked.mesh, request.num_devices, allow_idle, PLANNED_AXES)
    request = dataclasses.replace(
        request, mesh=mesh, num_micro_batches=asked.num_micro_batches
    )
    if requested_pipeline and isinstance(uneven, tuple):
        raise PlanError(
            f"shares is {list(uneven)}, but the number of stages is not fixed: "
            "shares divide micro-batches between pipelines with a known number of "
            "stages. Give num_stages, or the axis stage in mesh"
        )
    problems = Problems("mesh", PlanError)
    for text in space_problems(
        mesh, stages=requested_pipeline or stages > 1, uneven=bool(uneven)
    ):
        problems.add(text)
    problems.raise_if_any()
    staging = _Staging(programs, asked, uneven)
    if requested_pipeline or stages > 1:
        search = staging.of_any_number if requested_pipeline else staging
        return functools.partial(_search_with_warning, search), request
    search = _without_stages(staging, request, known)
    named = STAGE in pinned_axes(programs.graph) and STAGE not in asked.mesh
    if named and not isinstance(uneven, tuple):
        return functools.partial(staging.of_named, search), request
    return search, request


def space_problems(
    mesh: Mapping[str, int], *, stages: bool, uneven: bool
) -> Iterator[str]:
    """Yields conflicts of spatial axes with stages or unequal shares.

    Args:
        mesh: Axis sizes that are fixed.
        stages: Whether the model is divided into stages.
        uneven: Whether replicas have unequal shares.
    """
    space = fixed_space(mesh)
    given = " × ".join(f"{axis} {size}" for axis, size in space.items())
    if space and stages:
        yield (
            f"mesh= fixes {given}, and stages of a pipeline do not share the space of "
            "samples. Leave out stage and the marks stage and pipeline, or these axes"
        )
    if space and uneven:
        yield (
            f"mesh= fixes {given}, and devices that share the space of a sample have "
            "equal parts of it: neither shares= nor devices of several kinds go with "
            "it. Leave out shares=, take a cluster of one kind, or leave out these axes"
        )


def _any(
    programs: Programs,
    uneven: Uneven,
    allow_idle: bool,
    graph: Graph,
    cluster: Cluster,
    request: Request,
    **options: Any,
) -> Plan:
    def runs() -> Plan:
        # Estimates may offload more than executors support.
        check_runs(request.offload, request.hosted or OffloadableState)
        search, asked = decider(
            programs, request, runnable=True, uneven=uneven, allow_idle=allow_idle
        )
        return search(graph, cluster, asked, **options)

    if fixed_space(request.mesh):
        return runs()
    plans, problem = _feasible_plans(runs)
    best = plans[0] if plans else None
    result: list[Plan] = []
    other: PlanError | None = None
    for make in _estimates(programs, graph, cluster, request, best, **options):
        several, why = _feasible_plans(make)
        result, other = [*result, *several], other or why
    reasons = {id(plan): why_not(graph, request, plan) for plan in result}
    result = [
        as_estimate(plan, reasons[id(plan)]) if reasons[id(plan)] else plan
        for plan in result
    ]
    fastest = min(result, key=_seconds, default=None)
    known = math.inf if best is None else _seconds(best)
    if fastest is None or _seconds(fastest) * (1 + TIE) >= known:
        return _fastest(plans, problem or other) if best is None else best
    taken = _fastest([*plans, *result], problem, fastest)
    if taken.runnable:
        return taken
    gains = gain_notes(best, problem, taken)
    return dataclasses.replace(taken, notes=(*taken.notes, *gains))


def _estimates(
    programs: Programs,
    graph: Graph,
    cluster: Cluster,
    request: Request,
    best: Plan | None,
    **options: Any,
) -> Iterator[Callable[[], Plan]]:
    asked, requested_pipeline = _requested_pipeline(graph, request)
    mesh = dict(asked.mesh)
    stages = mesh.pop(STAGE, None)
    wanted = dataclasses.replace(
        request, mesh=mesh, num_micro_batches=asked.num_micro_batches, estimate=True
    )
    given = graph, cluster
    # More kinds of offload are tried only if memory is short.
    roomy = best is not None and not (best.remat or best.offload or best.stages)
    if (
        stages in (None, 1)
        and not requested_pipeline
        and not (roomy and cluster.is_uniform)
    ):
        yield functools.partial(decide, *given, wanted, known=programs.known, **options)
    known = math.inf if best is None else _seconds(best)
    bounds = {stages: 0.0} if stages is not None and stages > 1 else {}
    more = 1.0
    if stages is None and (best is None or _stages_may_gain(best)):
        more = 1 + SURE
        bounds = least_stage_steps(
            *given,
            wanted,
            again=options.get("again"),
            known=programs.known,
            most=MOST_STAGES,
            most_seconds=known / more,
        )
    staging = _Staging(programs, asked, uneven=False)
    for count, bound in bounds.items():
        if bound * more < known:
            search = functools.partial(staging.of(count, known).alone, *given)
            yield functools.partial(_with_host_memory, search, wanted, **options)


def _with_host_memory(
    search: Callable[..., Plan], request: Request, **options: Any
) -> Plan:
    if request.offload is not None:
        return search(request, **options)
    try:
        return search(dataclasses.replace(request, offload=()), **options)
    except NothingFits:
        return search(dataclasses.replace(request, offload=("optimizer",)), **options)


def _busy_seconds(plan: Plan) -> float:
    time = plan.time
    return (time.compute_seconds + time.launch_seconds) * _first_time(plan)


def _stages_may_gain(plan: Plan) -> bool:
    busy = _busy_seconds(plan) * (1 + SURE)
    return not _has_many_launches(plan) and busy < _seconds(plan)


def _has_many_launches(plan: Plan) -> bool:
    return plan.time.launch_seconds > SURE * _seconds(plan)


def _without_stages(
    staging: _Staging, request: Request, known: ProgramCache
) -> Callable[..., Plan]:
    uneven = staging.uneven
    if not uneven:
        one_program = functools.partial(decide, known=known)
        marked = any(graph.marks for graph in staging.programs.graph.task_graphs)
        decided = STAGE in staging.asked.mesh or marked or request.default
        if decided or request.refused_by_stages():
            return one_program
        return staging.or_one_program(one_program)
    shares = functools.partial(
        decide_shares,
        asked=uneven if isinstance(uneven, tuple) else None,
        even=uneven == EVEN,
        decide=decide,
        known=known,
    )
    fixed = staging.asked.mesh or request.zero or request.offload
    open_choice = uneven is True and not fixed
    return staging.or_shares(shares) if open_choice else shares


MOST_STAGES = 16
"""Largest number of stages that is tried if none is requested."""

FIRST_TIME = {"none": 1.0, "dots": 0.9, "full": 0.75}
"""Least fraction of a step's work that is no recomputation, by remat policy. Forward
products are a third of all products, and the work of other operations is smaller."""


class _Staging:
    """Plans in stages, by the executor that can run them.

    ``uneven`` tells whether parallel pipelines may have unequal shares, or has the
    shares.
    """

    def __init__(
        self, programs: Programs, asked: PipelineConstraints, uneven: Uneven
    ) -> None:
        self.programs = programs
        self.asked = asked
        self.uneven: Uneven = uneven
        self.known_seconds = math.inf
        self.traced = functools.cache(self._traced)

    @property
    def captured(self) -> Captured:
        return self.programs.captured

    def __call__(
        self, graph: Graph, cluster: Cluster, request: Request, **options: Any
    ) -> Plan:
        alone = functools.partial(self.alone, graph, cluster, request, **options)
        if not self.uneven or self.uneven == EVEN:
            return alone()
        several = functools.partial(
            decide_pipelines,
            graph,
            cluster,
            request,
            stages=self.asked.mesh[STAGE],
            known=self.programs.known,
            decide=lambda part, one, known: self.plan_parallel_pipelines(
                graph, part, one, known_seconds=known, **options
            ),
        )
        if isinstance(self.uneven, tuple):
            return several(asked=self.uneven)
        call, problem = _feasible_plans(alone)
        least = min(self.known_seconds, *map(_seconds, call), math.inf)
        more, other = _feasible_plans(
            functools.partial(several, asked=None, known_seconds=least)
        )
        more = [plan for plan in more if plan.num_devices == request.num_devices]
        return _fastest([*call, *more], problem or other)

    def or_one_program(self, one_program: Callable[..., Plan]) -> Callable[..., Plan]:
        def plan_with_fewer_idle(
            graph: Graph, cluster: Cluster, request: Request, **options: Any
        ) -> Plan:
            plan = one_program(graph, cluster, request, **options)
            if not (cluster.is_uniform and _stages_may_gain(plan)):
                return plan
            known = _seconds(plan) / (1 + SURE)
            given = graph, cluster, request
            # The bound ignores bubbles and unequal stages for cuts between layers.
            more = 1.0 if stacked_loop(graph) else 1 + SURE
            bounds = least_stage_steps(
                *given,
                again=options.get("again"),
                known=self.programs.known,
                most=MOST_STAGES,
                most_seconds=known / more,
            )
            near = [n for n, bound in bounds.items() if bound * more < known]
            staged, _ = _feasible_plans(
                *(
                    functools.partial(self.of(n, known).alone, *given, **options)
                    for n in near
                )
            )
            if any(_seconds(one) < known for one in staged):
                plan = _fastest([plan, *staged], None)
            # Of several scans, lockstep stages would divide only one.
            several = len(stacked_loops(graph)) > 1
            return self._with_paper_note(
                plan, near if several else (), *given, **options
            )

        return plan_with_fewer_idle

    def _with_paper_note(
        self,
        plan: Plan,
        stages: Sequence[int],
        graph: Graph,
        cluster: Cluster,
        request: Request,
        **options: Any,
    ) -> Plan:
        """Adds a note on the gain of stages that no executor supports."""
        known = _seconds(plan) / (1 + SURE)
        wanted = dataclasses.replace(request, estimate=True)
        given = graph, cluster
        made, _ = _feasible_plans(
            *(
                functools.partial(
                    _with_host_memory,
                    functools.partial(self.of(n, known).alone, *given),
                    wanted,
                    **options,
                )
                for n in stages
            )
        )
        result = {id(one): why_not(graph, wanted, one) for one in made}
        papers = [one for one in made if result[id(one)] and _seconds(one) < known]
        if not papers:
            return plan
        best = min(papers, key=_seconds)
        layout = next(c.layout for c in best.candidates if c.verdict == "chosen")
        note = paper_note(layout, _seconds(best), result[id(best)], plan)
        return dataclasses.replace(plan, notes=(*plan.notes, note))

    def or_shares(self, shares: Callable[..., Plan]) -> Callable[..., Plan]:
        """Returns a search for replicas with shares, or for pipelines.

        Pipelines are chosen if they are faster, or if replicas do not fit.
        """

        def search_again(
            graph: Graph, cluster: Cluster, request: Request, **options: Any
        ) -> Plan:
            given = graph, cluster, request
            plans, problem = _feasible_plans(
                functools.partial(shares, *given, **options)
            )
            if problem and request.num_devices < cluster.num_devices:
                raise problem
            known = min(map(_seconds, plans), default=math.inf) / (1 + SURE)
            each = [
                functools.partial(self.of(n, known), *given, **options)
                for n in _whole_stages(cluster, request.num_devices)
                if not plans
                or not _has_many_launches(plans[0])
                and self._may_be_faster(n, known, *given)
            ]
            staged, _ = _feasible_plans(*each)
            clearly = [
                plan
                for plan in staged
                if not plans
                or plan.time.step_seconds * (1 + SURE) < plans[0].time.step_seconds
            ]
            best = min(clearly or plans, key=_seconds, default=None)
            return _fastest([*plans, *staged], problem, best)

        return search_again

    def _may_be_faster(
        self,
        stages: int,
        known_seconds: float,
        graph: Graph,
        cluster: Cluster,
        request: Request,
    ) -> bool:
        # With one micro-batch, the bound is the smallest of all.
        count = request.num_micro_batches or 1
        part = _largest_part(self.traced(()))
        given = graph, cluster, request, stages, [count]
        known = self.programs.known
        try:
            bound = least_steps(*given, known=known, largest_part=part)
        except PlanError:
            return False  # A stage would have devices of several kinds.
        return bound[count] < known_seconds

    def of(self, stages: int, known_seconds: float = math.inf) -> _Staging:
        asked = dataclasses.replace(self.asked, mesh={**self.asked.mesh, STAGE: stages})
        result = _Staging(self.programs, asked, self.uneven)
        result.traced = self.traced
        result.known_seconds = known_seconds
        return result

    def alone(
        self, graph: Graph, cluster: Cluster, request: Request, **options: Any
    ) -> Plan:
        asked, marked = self.asked, bool(_marked(self.captured.graph))
        why = _why_apart(self.captured, asked, marked, cluster)
        if why is None:
            known = self.known_seconds
            given = {"piped": asked, "known_seconds": known, **options}
            plan = decide_stages(graph, cluster, request, **given)
            return dataclasses.replace(plan, notes=(*plan.notes, ALIKE))
        options["known_seconds"] = self.known_seconds
        return self._with_programs(why, graph, cluster, request, asked, **options)

    def plan_parallel_pipelines(
        self, graph: Graph, cluster: Cluster, request: Request, **options: Any
    ) -> Plan:
        asked = dataclasses.replace(self.asked, schedule=self.asked.schedule or "1f1b")
        if asked.schedule == "interleaved":
            raise PlanError(
                "the schedule interleaved takes whole rounds of micro-batches, and "
                "pipelines side by side take any number. Take another schedule"
            )
        why = "pipelines side by side take micro-batches of their own", ""
        return self._with_programs(why, graph, cluster, request, asked, **options)

    def _with_programs(
        self,
        why: tuple[str, str],
        graph: Graph,
        cluster: Cluster,
        request: Request,
        asked: PipelineConstraints,
        known_seconds: float = math.inf,
        **options: Any,
    ) -> Plan:
        """Returns the plan of stage programs.

        ``why`` has the reason, and a remedy or an empty text.
        """
        reason, remedy = why
        marked = bool(_marked(self.captured.graph))
        try:
            plan = decide_mpmd(
                graph,
                cluster,
                request,
                piped=asked,
                traced=self.traced,
                marked=marked,
                known_seconds=known_seconds,
                **options,
            )
        except TooFewParts as error:
            both = TooFewParts(_neither(error.cut, reason, remedy))
            both.cut = error.cut
            raise both from None
        uneven = uncut(graph, plan)
        notes = [f"{uneven}. {evened(remedy)}"] if uneven else []
        if not uneven and (said := lopsided(plan, marked=marked)):
            notes.append(said)
        said = "" if uneven or not remedy else f". {remedy}"
        notes.append(f"stages have programs of their own: {reason}{said}")
        return dataclasses.replace(plan, notes=(*plan.notes, *notes))

    def of_any_number(
        self, graph: Graph, cluster: Cluster, request: Request, **options: Any
    ) -> Plan:
        result, problem = self._each_number(graph, cluster, request, **options)
        if not result:
            raise PlanError(
                f"no number of stages that {request.num_devices} devices divide into "
                f"can be had: {problem or 'a pipeline needs two'}"
            ) from problem
        return _fastest(result, problem)

    def of_named(
        self,
        search: Callable[..., Plan],
        graph: Graph,
        cluster: Cluster,
        request: Request,
        **options: Any,
    ) -> Plan:
        named = pinned_axes(graph)
        layers = {t.path for t in graph.params if (0, STAGE) in pins_of(t)}
        made, _ = self._each_number(graph, cluster, request, **options)
        result = [
            plan
            for plan in made
            if any(
                leaf.path in layers and STAGE in leaf.param_spec[0]
                for leaf in plan.leaves
            )
        ]
        problem = None
        if not result or len(named) > 1:
            plain = functools.partial(search, graph, cluster, request, **options)
            others, problem = _feasible_plans(plain)
            result += others

        def obeyed(plan: Plan) -> int:
            return sum(plan.axis_sizes.get(axis, 1) > 1 for axis in named)

        most = max(map(obeyed, result), default=0)
        return _fastest([plan for plan in result if obeyed(plan) == most], problem)

    def _each_number(
        self, graph: Graph, cluster: Cluster, request: Request, **options: Any
    ) -> tuple[list[Plan], PlanError | None]:
        counts = [n for n in divisors(request.num_devices) if n > 1]
        each = [
            functools.partial(self.of(n), graph, cluster, request, **options)
            for n in counts
        ]
        return _feasible_plans(*each)

    def _traced(self, remat: Remat) -> DivisibleProgram:
        program = self.captured.with_remat(remat) if remat else self.captured
        return DivisibleProgram(graph=program.graph, units=units_of(program))


def _feasible_plans(*each: Callable[[], Plan]) -> tuple[list[Plan], PlanError | None]:
    feasible_plans: list[Plan] = []
    problem: PlanError | None = None
    for make in each:
        try:
            feasible_plans.append(make())
        except PlanError as error:
            problem = problem or error
    return feasible_plans, problem


def _seconds(plan: Plan) -> float:
    return plan.time.step_seconds


def _first_time(plan: Plan) -> float:
    return min((FIRST_TIME.get(p, 0.75) for _, p in plan.remat), default=1.0)


def _largest_part(program: DivisibleProgram) -> float:
    starts = sorted(program.units.borders.values())
    work = [0] * (len(starts) + 1)
    for op in program.graph.ops:
        unit = program.units.unit_at(op.position)
        if unit is not None:
            work[bisect_right(starts, unit)] += op.flops * op.trip
    return max(work) / max(1, sum(work))


def _fastest(
    found: Sequence[Plan], problem: PlanError | None, best: Plan | None = None
) -> Plan:
    """Returns ``best`` or the fastest plan, with the others among its candidates."""
    if not found:
        assert problem is not None
        raise problem
    taken = best or min(found, key=_seconds)
    others = sorted(
        (
            dataclasses.replace(
                c, verdict=speed_difference_text(c.step_seconds, _seconds(taken))
            )
            if c.fits
            else c
            for plan in found
            for c in plan.candidates
            if plan is not taken or c.verdict != "chosen"
        ),
        key=lambda c: (not c.fits, c.step_seconds),
    )
    chosen = [c for c in taken.candidates if c.verdict == "chosen"]
    kept = (*chosen, *others[:KEPT_CANDIDATES])
    return dataclasses.replace(taken, candidates=kept)


def _whole_stages(cluster: Cluster, devices: int) -> list[int]:
    """Returns the least number of stages of one device kind each, and its double."""
    sizes = [
        sum(node.count for node in nodes)
        for _, nodes in itertools.groupby(cluster.nodes, lambda node: node.kind.name)
    ]
    least = devices // math.gcd(*sizes)
    each = (least, 2 * least)
    return [n for n in each if 1 < n <= MOST_STAGES and devices % n == 0]


def _marked(graph: Graph) -> set[int]:
    return {
        int(mark.get("i") or 0)
        for task_graph in graph.task_graphs
        for mark in task_graph.marks
        if mark.kind == "stage"
    }


def _requested_pipeline(
    graph: Graph, request: Request
) -> tuple[PipelineConstraints, bool]:
    marked = _marked(graph)
    asked = PipelineConstraints.of(graph, request, SCHEDULES)
    count = asked.mesh.get(STAGE)
    if marked:
        if len(marked) == 1 and (several := merged_pipelines_note(graph)):
            raise PlanError(several)
        if len(marked) == 1:
            raise PlanError(
                "one stage is marked, and a pipeline needs two. A mark inside a scan "
                "covers the whole loop: put marks around loops, or remove them and "
                "give num_stages"
            )
        if count not in (None, len(marked)):
            raise PlanError(
                f"{len(marked)} stages are marked, and {count} are asked for. Drop "
                "num_stages and the axis stage, or the marks"
            )
        mesh = {**asked.mesh, STAGE: len(marked)}
        return dataclasses.replace(asked, mesh=mesh), False
    pipelines = (m for g in graph.task_graphs for m in g.marks if m.kind == "pipeline")
    return asked, count is None and any(pipelines)


def _check_widths(graph: Graph) -> None:
    widths = {
        str(mark): mark.devices
        for task_graph in graph.task_graphs
        for mark in task_graph.marks
        if mark.kind == "stage" and mark.devices is not None
    }
    if len(set(widths.values())) > 1:
        raise PlanError(
            f"{', '.join(widths)}: stages have equally many devices so far. Leave "
            "devices= out, or give all the same"
        )


def _why_apart(
    captured: Captured, asked: PipelineConstraints, marked: bool, cluster: Cluster
) -> tuple[str, str] | None:
    """Returns why each stage has its own program, and what would allow one program.

    The result is None if one program runs all stages. The remedy may be empty.
    """
    if marked:
        return "marks say where the model is cut", ""
    if not cluster.is_uniform:
        return "devices are of several kinds, and one program runs on one kind", ""
    try:
        stack_of(captured)
    except IndivisibleLayersError as error:
        shared, remedy = error.reason, error.remedy
    else:
        shared = remedy = ""
    if asked.schedule not in (None, *LOCKSTEP):
        reason = (
            f"one program for all stages does not follow {asked.schedule}, only "
            f"{' and '.join(LOCKSTEP)}, which divide the layers of a scan; other "
            "schedules take layers that are not in one"
        )
        return reason, "" if shared else f"Leave out the schedule {asked.schedule}"
    if _compat.open_jaxpr(captured.jaxpr)[0].effects:
        return (
            "the loss prints or calls back, which one program for all stages would "
            "repeat in its backward pass, and in turns without a micro-batch"
        ), ""
    return (shared, remedy) if shared else None


def _neither(apart: str, reason: str, remedy: str) -> str:
    if remedy:
        return f"{reason}. {remedy}. With programs of each stage's own: {apart}"
    return f"{apart.rstrip('.')}. One program for all stages: {reason}"


def _search_with_warning(
    search: Callable[..., Plan], graph: Graph, *given: Any, **options: Any
) -> Plan:
    try:
        plan = search(graph, *given, **options)
    except TooFewParts as error:  # Searches alone use it.
        raise PlanError(str(error)) from None
    except FlowsBackwards as error:
        if not (several := merged_pipelines_note(graph)):
            raise
        raise PlanError(f"{error}\n{several}") from None
    said = (uncut(graph, part) for part in plan.pipelines or (plan,))
    for uneven in dict.fromkeys(filter(None, said)):
        note = next((n for n in plan.notes if n.startswith(uneven)), "")
        if note:
            warn(note)
    notes = filter(None, [merged_pipelines_note(graph)])
    return dataclasses.replace(plan, notes=(*plan.notes, *notes))
