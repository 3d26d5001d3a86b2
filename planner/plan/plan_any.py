"""From a captured loss and a cluster to a Plan, whether an executor runs it or not.

The plan that runs is made first. The wide search then looks for what no
executor runs, and only for what would be faster. Whatever is reported was priced as the
plan of that row alone would be: rows that run by the search that chose them, the others
on the program that they would compute.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from whalejax.meshes.cluster import Cluster
from whalejax.meshes.units import gigabytes, milliseconds
from whalejax.planner.entries import BatchLeaf, Candidate
from whalejax.planner.errors import NothingFits, PlanError
from whalejax.planner.model.analysis import analyse_graph
from whalejax.planner.model.graph import Graph
from whalejax.planner.plan.build import KEPT_CANDIDATES, verdict_of
from whalejax.planner.plan.estimate_plan import (
    EstimatedPlan,
    estimated_plan,
    hosts_params,
    hosts_state,
)
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan.spmd import decide
from whalejax.planner.search.batched.branch_and_bound import (
    Case,
    NoMeshError,
    WideSearch,
)
from whalejax.planner.search.batched.cases import Placement
from whalejax.planner.search.batched.layout_variants import Array
from whalejax.planner.search.batched.mesh_grid import Frames
from whalejax.planner.search.batched.space import Spaces
from whalejax.planner.search.enumerate import Search
from whalejax.planner.search.infeasible import refusal
from whalejax.planner.search.ranking import TIE
from whalejax.planner.search.request import Request
from whalejax.planner.search.spmd import Again, Known, by_marks, unlike
from whalejax.planner.search.user_choices import Asked
from whalejax.planner.step_options import ProgramOptions, StepOptions, options_of
from whalejax.planner.terms import OFFLOADS, Chosen


def decide_any(
    graph: Graph,
    cluster: Cluster,
    request: Request,
    *,
    precision: str = "f32",
    batch: Sequence[BatchLeaf] = (),
    again: Again | None = None,
    known: Known | None = None,
    spaces: Spaces | None = None,
    runs: Callable[[], Plan] | None = None,
) -> Plan:
    """Choose how a model could run on a cluster, whether it can today or not.

    Args:
        graph: the captured loss.
        cluster: the machine.
        request: optimizer state, micro-batches and the default strategy.
        precision: noted in the plan.
        batch: leaves of the GLOBAL batch, in the order of ``graph.batch_dims``.
        again, known: as for ``spmd.decide``.
        spaces: what other searches of the same loss ranged over.
        runs: makes the best plan that runs; one program for all devices if left out.

    Raises:
        PlanError: the marks cannot be obeyed, or nothing fits; the smallest missing
            resource is named in bytes.
    """
    stages = Asked.of(graph, request).mesh.get("stage", 1)
    asked = by_marks(graph, request, stages)
    _check_stages(graph)
    spaces = spaces or Spaces()
    options = {"precision": precision, "batch": batch, "again": again, "known": known}
    if runs is None:
        runs = functools.partial(_one_program, graph, cluster, asked, stages, **options)
    beyond = _EstimateSearch(graph, cluster, asked, again, spaces)
    beyond.prepare()
    plan: Plan | None = None
    problem: PlanError | None = None
    try:
        plan = runs()
    except PlanError as error:
        problem = error
    found = beyond.run(plan)
    if again is not None:
        for one in found:
            if not one.why_not:
                fixed = _fixed(asked, one)
                plan = _faster(plan, graph, cluster, fixed, **options)
        found = [one for one in found if one.why_not]
    if plan is None and not found:
        raise beyond.problem(problem)
    gain = functools.partial(_gain, plan, problem)
    return _joined(graph, plan, found, beyond, gain, precision, batch)


def _fixed(request: Request, one: EstimatedPlan) -> Request:
    """What is asked, with everything fixed as in a case."""
    return dataclasses.replace(
        request,
        mesh={a: n for a, n in one.mesh.items() if a != "stage"},
        zero=one.zero,
        num_micro_batches=one.micro_batches,
        **options_of(one.options),
    )


def _faster(plan: Plan | None, *given: Any, **options: Any) -> Plan | None:
    """The plan of what is given, if there is one and it is faster than another."""
    try:
        other = decide(*given, **options)
    except PlanError:
        return plan
    if plan is None:
        return other
    if other.time.step_seconds * (1 + TIE) >= plan.time.step_seconds:
        return plan
    return dataclasses.replace(other, candidates=_rows(other, plan.candidates))


def _one_program(
    graph: Graph, cluster: Cluster, request: Request, stages: int, **options: Any
) -> Plan:
    """The best plan of one program for all devices."""
    if stages > 1:
        raise PlanError("one program for all devices has no stages")
    mesh = {a: n for a, n in (request.mesh or {}).items() if a != "stage"}
    return decide(graph, cluster, dataclasses.replace(request, mesh=mesh), **options)


MOST_SEARCHES, LESS_MEMORY = 4, 0.9
"""Searches of one program at most, and what of the memory of one the next may fill."""


class _EstimateSearch:
    """What no executor runs and would be faster, of every program of a loss.

    Args:
        graph, cluster, request, again, spaces: as of ``decide_any``.

    Attributes:
        plan: the best that runs, or None.
        covered, weighed: of all searches.
        bound: seconds below which none of the cases are.
        short: cases that memory does not hold after all, and by which factor they take
            more of it than arrays say.
    """

    def __init__(
        self,
        graph: Graph,
        cluster: Cluster,
        request: Request,
        again: Again | None,
        spaces: Spaces,
    ) -> None:
        self.graph, self.cluster, self.request = graph, cluster, request
        self.again, self.spaces = again, spaces
        self.plan: Plan | None = None
        self.known = math.inf
        self.searches: list[WideSearch] = []
        self.others: list[WideSearch] = []
        self.short: list[tuple[EstimatedPlan, float]] = []

    @property
    def covered(self) -> int:
        """Cases among which was chosen."""
        return sum(search.tally.covered for search in self.searches)

    @property
    def weighed(self) -> int:
        """Cases whose time was computed."""
        return sum(one.tally.weighed for one in (*self.searches, *self.others))

    @property
    def bound(self) -> float:
        """Seconds that no case is faster than, of all that were covered.

        Searches that leave a part of the memory leave out cases, and prove nothing.
        """
        return min((search.tally.bound for search in self.searches), default=math.inf)

    def gap(self, plan: float) -> float:
        """By which part of its time a plan could at most be beaten.

        Args:
            plan: seconds of a step in it.
        """
        return max(0.0, 1 - self.bound / plan)

    def prepare(self) -> None:
        """Price what is searched, which the search for plans that run reads, too."""
        for attention in self._ways():
            program = ProgramOptions(attention=attention)
            graph = self._graph(program)
            if graph is not None:
                self.spaces.of(graph, self.cluster, self.request, program)

    def run(self, plan: Plan | None) -> list[EstimatedPlan]:
        """The best cases that fit and are faster than a plan, the fastest first.

        Args:
            plan: the best that runs, or None.
        """
        self.plan = plan
        self.known = math.inf if plan is None else plan.time.step_seconds
        found: list[EstimatedPlan] = []
        known = self.known
        for program in self._programs():
            found += self._of_program(program, known)
            known = min([known, *(one.case.step_seconds for one in found)])
        each: dict[str, EstimatedPlan] = {}
        for one in sorted(found, key=lambda e: e.case.step_seconds):
            if one.case.step_seconds < self.known:
                each.setdefault(one.layout, one)
        for one in each.values():
            one.covered, one.gap = self.covered, self.gap(one.case.step_seconds)
        return [*each.values()][:KEPT_CANDIDATES]

    def _ways(self) -> list[Chosen]:
        """How attention may run."""
        if self.again is None:
            return [()]
        return [*unlike(self.graph, self.request, self.again)]

    def _programs(self) -> list[ProgramOptions]:
        """What is searched, as far as the user leaves it open."""
        plan = StepOptions() if self.again is None else self.plan
        return ProgramOptions.looked_at(self.request, plan, self._ways())

    def _graph(self, program: ProgramOptions) -> Graph | None:
        """The graph of one program, or None where there is none such."""
        if self.again is None or program == ProgramOptions():
            return self.graph
        graph = self.again(*program)
        cut = not program.makes_parts or any(op.chunks > 1 for op in graph.ops)
        return graph if cut else None

    def _search(
        self,
        program: ProgramOptions,
        request: Request,
        known_seconds: float,
        wanted: Callable[..., Array],
        room: float = 1.0,
    ) -> WideSearch | None:
        graph, traced = self._graph(program), self.again is not None
        if graph is None:
            return None
        try:
            return WideSearch(
                graph,
                self.cluster,
                request,
                self.spaces,
                program=program,
                known_seconds=known_seconds,
                wanted=functools.partial(wanted, traced),
                rings=not traced,
                room=room,
            )
        except NoMeshError:
            return None

    def _of_program(
        self, program: ProgramOptions, known_seconds: float
    ) -> list[EstimatedPlan]:
        """The best cases of one program that fit.

        Where arrays sum up less memory than liveness finds, cases are looked for that
        leave so much more of it.
        """
        room, found = 1.0, list[EstimatedPlan]()
        for _ in range(MOST_SEARCHES):
            given = program, self.request, known_seconds, _not_covered
            search = self._search(*given, room=room)
            if search is None:
                break
            (self.others if room < 1 else self.searches).append(search)
            estimates = [EstimatedPlan(search, c, program) for c in search.run()]
            before = len(self.short)
            found = [
                one
                for estimate in estimates
                for one in self._with_exact_memory(estimate)
            ]
            if found or len(self.short) == before:
                break
            lack = min(more for _, more in self.short[before:])
            room = min(room * LESS_MEMORY, 1 / lack)
        return found

    def _with_exact_memory(self, estimate: EstimatedPlan) -> list[EstimatedPlan]:
        """A case on its own program, with memory by liveness; none if that lacks some.

        Where it lacks, how much is remembered.
        """
        found = []
        for one in self._on_its_own_program(estimate):
            case = one.search.remembered(one.case)
            again = EstimatedPlan(one.search, case, one.program)
            if case.weighed.fits[case.row]:
                found.append(again)
            else:
                more = again.memory.total_bytes / max(1.0, estimate.case.memory_bytes)
                self.short.append((again, more))
        return found

    def _on_its_own_program(self, estimate: EstimatedPlan) -> list[EstimatedPlan]:
        """A case priced on the program that computes again what it says.

        A search prices policies of remat on the program without: what is computed again
        takes as long there as it took at first. Compilers fuse some of it.
        """
        case = estimate.case
        if self.again is None or not estimate.remat or case.placement.by == "replicas":
            return [estimate]
        f = case.frames
        request = dataclasses.replace(
            self.request,
            mesh=estimate.mesh,
            zero=int(f.zero[0]),
            num_micro_batches=int(f.micro_batches[0]),
            remat=(),
            offload=estimate.offload,
            sequence_parallel=case.variant.sequence_parallel,
        )
        program = estimate.program._replace(remat=estimate.remat)
        like = functools.partial(_like, case)
        search = self._search(program, request, math.inf, like)
        if search is None or not len(search.frames(case.placement)):
            return [estimate]  # It cannot be priced any better.
        cases = search.run()[:1]
        if not cases:
            nearest = search.nearest(case.placement)
            more = nearest.memory_bytes / max(1.0, case.memory_bytes)
            self.short.append((EstimatedPlan(search, nearest, program), more))
        return [EstimatedPlan(search, one, program) for one in cases]

    def problem(self, runs: PlanError | None) -> PlanError:
        """Why there is no plan.

        Args:
            runs: why there is none that runs.
        """
        covered = [search for search in self.searches if search.tally.covered]
        if not covered:
            return _no_mesh(self.graph, self.cluster, self.request)
        short = [one for one, _ in self.short if any(one.case.lacks)]
        if short:
            return _memory_error(min(short, key=lambda one: sum(one.case.lacks)))
        return _nothing_fits(covered[0], runs)


def _not_covered(
    traced: bool, search: WideSearch, placement: Placement, frames: Frames
) -> Array:
    """Cases at which the search of plans that run does not look.

    Args:
        traced: it looks at programs that compute again, too.
        search: the wide search.
        placement: kinds of devices.
        frames: cases.
    """
    if placement.by != "all" or not search.cluster.is_uniform:
        return np.ones(len(frames), dtype=bool)  # One program runs on one kind.
    request = search.request
    tried = request.policies if traced else ("none",)
    policies = [set(policy.values()) for policy in search.model.policies]
    same = [
        len(p) == 1 and (p <= {*tried} or request.remat is not None) for p in policies
    ]
    full = np.array([p == {"full"} for p in policies])[frames.remat]
    optimizer, activations, params, gradients = (
        (frames.offload >> bit & 1) > 0 for bit in range(len(OFFLOADS))
    )
    found = (frames.stage == 1) & (frames.order == 0) & (frames.ring == 0)
    found &= np.array(same)[frames.remat] & ~gradients & (~activations | full)
    # What the optimizer updates is asked for where it matters alone.
    if optimizer.any():
        found &= ~optimizer | hosts_state(search)
    if params.any():
        found &= ~params | ((frames.zero == 0) & hosts_params(search))
    wanted: Array = ~found
    return wanted


def _like(
    case: Case, traced: bool, search: WideSearch, placement: Placement, frames: Frames
) -> Array:
    """Cases that are laid out and scheduled as another."""
    same = np.full(len(frames), placement == case.placement)
    for name in ("schedule", "chunks", "order", "zero"):
        same &= getattr(frames, name) == getattr(case.frames, name)[0]
    return same


def _joined(
    graph: Graph,
    plan: Plan | None,
    found: Sequence[EstimatedPlan],
    beyond: _EstimateSearch,
    gain: Callable[[Plan], list[str]],
    precision: str,
    batch: Sequence[BatchLeaf],
) -> Plan:
    """The best of what runs and what does not, with both among its candidates."""
    best = next(iter(found), None)
    seconds = math.inf if plan is None else plan.time.step_seconds
    rows = [*(() if plan is None else plan.candidates), *(one.row for one in found)]
    if best is not None and best.case.step_seconds * (1 + TIE) < seconds:
        taken = estimated_plan(graph, best, precision, batch)
        own: Candidate | None = dataclasses.replace(best.row, verdict="chosen")
        rows = [row for row in rows if row.layout != best.layout]
        notes = (*taken.notes, *gain(taken), *_proof(beyond, taken))
    else:
        assert plan is not None  # else there is nothing to join
        taken, notes = plan, (*plan.notes, *_proof(beyond, plan))
        own = next((row for row in rows if row.verdict == "chosen"), None)
        rows = [row for row in rows if row is not own]
    if plan is taken and not found:
        return dataclasses.replace(taken, notes=notes)
    taken = dataclasses.replace(taken, candidates=() if own is None else (own,))
    return dataclasses.replace(taken, candidates=_rows(taken, rows), notes=notes)


def _rows(taken: Plan, others: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """The rows of the plan that is taken, and others beside it, the fastest first."""
    first = {c.layout: c for c in taken.candidates if c.verdict == "chosen"}
    every = (*taken.candidates, *others)
    rest = {c.layout: c for c in reversed(every) if c.layout not in first}
    order = sorted(rest.values(), key=lambda c: (not c.fits, c.step_seconds))
    fitting = [
        dataclasses.replace(c, verdict=verdict_of(taken.time, c.time))
        for c in order
        if c.fits
    ]
    refused = [c for c in order if not c.fits]
    return (*first.values(), *fitting[: KEPT_CANDIDATES - 1], *refused)


def _gain(plan: Plan | None, problem: PlanError | None, taken: Plan) -> list[str]:
    """What the estimate gains over the best plan that runs, or why none does."""
    if plan is None and not isinstance(problem, NothingFits):
        return [f"none runs: {' '.join(str(problem).split())}"]
    if plan is None:
        return ["no plan that runs fits"]
    own = next((c.layout for c in plan.candidates if c.verdict == "chosen"), "")
    step = plan.time.step_seconds
    words = f" ({own})" if own else ""
    return [
        f"the best plan that runs{words} takes {milliseconds(step)} a step, "
        f"{milliseconds(step - taken.time.step_seconds)} more"
    ]


def _proof(beyond: _EstimateSearch, taken: Plan) -> list[str]:
    """Among how many cases was chosen, and what bounds the others; if there are any."""
    if not beyond.covered:
        return []
    return [
        f"chosen among {beyond.covered:,} combinations, {beyond.weighed:,} weighed, "
        "the others ruled out by a lower bound on their step time "
        f"(gap {beyond.gap(taken.time.step_seconds):.2%})"
    ]


def _check_stages(graph: Graph) -> None:
    """Refuse marks that say where to cut."""
    staged = {
        g.name: None
        for g in graph.task_graphs
        if any(m.kind == "stage" for m in g.marks)
    }
    if staged:
        raise PlanError(
            f"{', '.join(staged)}: stage marks say where to cut, and estimates "
            "(runnable=False) cut where they find it best. Remove them, or plan what "
            "runs"
        )


def _no_mesh(graph: Graph, cluster: Cluster, request: Request) -> PlanError:
    """Why no mesh serves the marks, the batch and what the user fixed."""
    mesh = dict(request.mesh or {})
    stages = mesh.pop("stage", 1)
    analysed = analyse_graph(graph)
    request = dataclasses.replace(request, mesh=mesh)
    search = Search(analysed.graph, analysed.dims, cluster, request)
    if not search.run() and stages == 1:
        return refusal([search])
    named = f"stage {stages}" if stages > 1 else "such a mesh"
    devices, batch = request.num_devices, graph.batch_size * graph.num_micro_batches
    return PlanError(
        f"no plan has {named}: stages need as many equal layers, the "
        f"sequence must divide by context, and with the other axes both must divide "
        f"{devices} devices and leave a batch of {batch} that divides by what shares "
        "it and by the micro-batches that are asked for. Change one of them"
    )


def _nothing_fits(search: WideSearch, runs: PlanError | None) -> PlanError:
    """The plan that lacks least, and how much of what.

    Args:
        search: that found nothing.
        runs: why no plan runs, which is what there is to say where memory holds some.
    """
    case = search.nearest()
    count, copies = search.request.num_devices, search.request.copies
    if not any(case.lacks) and copies > 1:
        return PlanError(
            f"no plan serves the marks: devices= gives one copy of the model "
            f"{count // copies} of {count} devices. Change it, or leave it out"
        )
    if not any(case.lacks) and runs is not None:
        return runs
    return _memory_error(EstimatedPlan(search, case, ProgramOptions()))


def _memory_error(chosen: EstimatedPlan) -> PlanError:
    """Says what the nearest case lacks."""
    search, case = chosen.search, chosen.case
    lacks, host = case.lacks
    kinds, memory = search.cluster.kinds, case.weighed.memory_terms(case.row)
    held = memory.total_bytes - lacks if lacks > 0 else 0.0
    # Terms are rounded to bytes.
    device = min(kinds, key=lambda kind: abs(kind.memory_bytes - held))
    limit = device.memory_bytes
    whose = "" if search.cluster.is_uniform else f" ({device.name})"
    terms = ", ".join(
        f"{name} {gigabytes(nbytes)}"
        for name, nbytes in memory.by_name().items()
        if nbytes
    )
    short = (
        f"lacks {gigabytes(lacks)} ({int(lacks)} bytes) of {gigabytes(limit)} per "
        f"device{whose}"
        if lacks > 0
        else f"lacks {gigabytes(host)} ({int(host)} bytes) of host memory per device"
    )
    step = milliseconds(case.step_seconds)
    room = min(kind.host_memory_bytes or 0 for kind in search.cluster.kinds)
    return NothingFits(
        f"no plan fits, with anything computed again or moved to host memory: the "
        f"nearest ({chosen.layout}; {step} a step) {short} ({terms}). Use more "
        "devices, a smaller batch or a smaller model",
        lacks_bytes=int(lacks if lacks > 0 else host),
        of_bytes=limit if lacks > 0 else room,
        nearest=chosen.layout,
        what="device memory" if lacks > 0 else "host memory",
    )
