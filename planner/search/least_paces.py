"""Lower bounds on the seconds of a micro-batch, by the number of micro-batches.

The search for pipelines skips the numbers of micro-batches with which, by these bounds,
no pipeline is fast enough.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Collection
from typing import Any

import numpy as np

from whalejax.meshes.cluster import Cluster
from whalejax.meshes.units import milliseconds
from whalejax.planner.cost.layout_cases import LayoutCases
from whalejax.planner.cost.step_time import TimeColumns
from whalejax.planner.cost_terms import ALL, Chosen, Remat
from whalejax.planner.model.graph import Graph
from whalejax.planner.model.repeated_layers import stacked_loops
from whalejax.planner.pipeline.heterogeneous_stages import by_memory, grounds
from whalejax.planner.pipeline.schedule_bounds import (
    StageSeconds,
    least_divided_seconds,
)
from whalejax.planner.plan_errors import NotFaster
from whalejax.planner.search.layout_search import Search
from whalejax.planner.search.request import Request
from whalejax.planner.search.spmd_search import Again, ProgramAnalyses, ProgramCache
from whalejax.planner.sharding.layout import divisors
from whalejax.planner.step_options import options_off


STAGES_SHARE = 0.82
"""Lower bound on the time of all stages' passes, over the time of the full model.

The full model runs on the devices of one stage, without sequence parallelism. Stages
with their fastest layouts took 0.95 to 1.02 of its time. Sequence parallelism saved at
most 8% of it (T5-large, BERT-large and four encoder layers, 2 to 16 stages). Tiny
models, which mostly wait for kernel launches, took 0.84.
"""

MOST_ROUNDS = 16
"""Largest evaluated number of micro-batches per stage."""


def least_stage_steps(
    graph: Graph,
    cluster: Cluster,
    request: Request,
    *,
    again: Again | None,
    known: ProgramCache,
    most: int,
    most_seconds: float = math.inf,
) -> dict[int, float]:
    """Returns lower bounds on the step seconds, by number of stages of equal devices.

    A bound is the time of the full model on the devices of one stage, divided by the
    number of stages. Layouts count only if a device's parameters and state, divided by
    the number of stages, fit. Stages that divide a scan recompute at least everything
    but products. Each micro-batch passes through the stages in turn.

    Args:
        graph: Captured loss.
        cluster: Devices of one kind.
        request: Options of the search for all devices.
        again: Function that traces other programs of the loss.
        known: Programs that were analysed before.
        most: Largest number of stages.
        most_seconds: Step seconds above which bounds are not needed; default: infinite.

    Returns:
        Seconds by number of stages. Numbers of stages without a layout are left out.
        Those with seconds above ``most_seconds`` may be left out.
    """
    devices = request.num_devices
    samples = graph.batch_size * graph.num_micro_batches
    stages = [n for n in divisors(devices) if 1 < n <= most]
    asked = request.num_micro_batches
    counts = divisors(samples) if asked is None else [asked]
    allowed = {
        devices // n: [c for c in counts if 1 < c <= MOST_ROUNDS * n] for n in stages
    }
    scanned = bool(stacked_loops(graph)) and again is not None
    remats: list[Remat] = [()]
    if scanned:
        between = [p for p in request.policies if p not in ("none", "full")]
        remats = [((ALL, policy),) for policy in between or ["full"]]
    if request.remat is not None:
        remats = [request.remat]
    analyses = ProgramAnalyses(graph=graph, cluster=cluster, again=again, known=known)
    steps: dict[int, float] = {}
    for remat in remats if any(allowed.values()) else ():
        analysed = analyses.of(remat, (), 1)
        if analysed is None:
            continue
        asked_alone = dataclasses.replace(
            request,
            num_micro_batches=None,
            is_part=True,
            **options_off("sequence_parallel"),
        )
        parts, shared = analysed
        given = parts.graph, parts.dims, cluster, asked_alone
        search = Search(*given, program=shared, grids=known.grids)
        cases = search.at_every_count(allowed)
        if not len(cases):
            continue
        held = search.evaluator.least_memory(cases, ()) * cases.devices / devices
        cases = cases.take(np.flatnonzero(held <= cluster.memory_bytes))
        if not len(cases):
            continue
        if scanned:
            number, step = _least_lockstep(search, cases, devices, most_seconds)
        else:
            number = devices // cases.devices
            passes = _least_passes(search.evaluator.times(cases), cases)
            total = StageSeconds.of(*passes, recomputes=bool(remat))
            step = least_divided_seconds(total, number, cases.count)
        for n in stages:
            here = float(step[number == n].min(initial=np.inf))
            steps[n] = min(here, steps.get(n, np.inf))
    return {n: seconds for n, seconds in steps.items() if seconds < np.inf}


def _least_lockstep(
    search: Search, cases: LayoutCases, devices: int, most_seconds: float
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (number of stages, least step seconds) of cases that are fast enough."""
    number = devices // cases.devices
    turns = (cases.count + number - 1) / number
    rows, pace, ahead = _paces(search, cases, most_seconds * cases.count / turns)
    return number[rows], np.maximum(pace * turns[rows], ahead)


def least_paces(
    search: Search, counts: Collection[int]
) -> dict[int, tuple[float, float]]:
    """Returns lower bounds on the seconds of one micro-batch in any layout.

    Layouts count whether they fit or not.

    The bounds also hold for plans that shard the sequence over ``tensor``.

    Args:
        search: Search of the program without remat.
        counts: Numbers of micro-batches.

    Returns:
        (Seconds of a micro-batch, seconds of its forward pass), by number of
        micro-batches. Both are 0 if no layout has that number. The search for pipelines
        reports the reason.
    """
    paces = dict.fromkeys(counts, (0.0, 0.0))
    cases = search.at_every_count({search.request.num_devices: counts})
    if not len(cases):
        return paces
    _, pace, ahead = _paces(search, cases)
    for count in paces:
        some = cases.count == count
        if some.any():
            paces[count] = float(pace[some].min()), float(ahead[some].min())
    return paces


def _paces(
    search: Search, cases: LayoutCases, seconds: Any = math.inf
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the indices of fast enough cases, and the ``least_paces`` of each."""
    rows, times = search.evaluator.near(cases, seconds, sequence_parallel=True)
    cases = cases.take(rows)
    tensor = cases.mesh["tensor"]
    _, step = times.sequence_parallel(tensor)
    # Without recomputation, a forward pass takes a third of the time.
    shared = times.between / cases.count / 3 * (1 - 1 / tensor)
    update = times.terms.get("update", 0.0)  # Without cases there are no terms.
    return rows, (step - update) / cases.count, times.ahead - shared


def least_steps(
    graph: Graph,
    cluster: Cluster,
    request: Request,
    stages: int,
    counts: Collection[int],
    *,
    known: ProgramCache | None = None,
    largest_part: float = 0.0,
) -> dict[int, float]:
    """Returns lower bounds on the step seconds of stages with programs of their own.

    All stages together take at least the time of the full model on the devices of one
    stage. With several device kinds, each kind takes at least its part of the work.
    Layouts count whether they fit or not. ``largest_part`` makes the result an
    estimate, in which one stage computes the largest indivisible part.

    Args:
        graph: Captured loss.
        cluster: Devices of all stages.
        request: Options of the search for all devices.
        stages: Number of stages.
        counts: Numbers of micro-batches.
        known: Programs of the loss that were analysed before.
        largest_part: Fraction of the products in the largest part of the model that no
            cut point divides; default: 0. One stage takes this fraction of all compute
            seconds.

    Returns:
        Step seconds by number of micro-batches; 0 if no layout has that number. For
        such a number, the search reports the reason.

    Raises:
        PlanError: A stage would have devices of several kinds.
    """
    bounds = StageBounds(graph, cluster, request, stages, counts, known=known)
    return {
        count: max(bounds.seconds(count), largest_part * bounds.compute_seconds(count))
        for count in counts
    }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _KindSeconds:
    """Lower bounds for the full model on one stage's devices of one kind.

    Attributes:
        ratio: Measured time over predicted time on this kind.
        stages: Number of stages on this kind.
        count: Number of micro-batches of each layout.
        passes: Seconds of the forward and backward passes of a step, by layout.
        reduction: Seconds of the gradient reduction, by layout.
        compute: Compute seconds, by layout.
    """

    ratio: float
    stages: int
    count: np.ndarray
    passes: np.ndarray
    reduction: np.ndarray
    compute: np.ndarray


class StageBounds:
    """Lower bounds on the step seconds of one pipeline; see ``least_steps``."""

    def __init__(
        self,
        graph: Graph,
        cluster: Cluster,
        request: Request,
        stages: int,
        counts: Collection[int],
        *,
        known: ProgramCache | None = None,
        again: Again | None = None,
    ) -> None:
        """Evaluates the full model on the devices of one stage of each kind.

        Args:
            graph: Captured loss.
            cluster: Devices of all stages.
            request: Options of the search for all devices.
            stages: Number of stages.
            counts: Numbers of micro-batches.
            known: Programs of the loss that were analysed before.
            again: Function that traces other programs of the loss. With it, the bounds
                also hold for blocked attention.

        Raises:
            PlanError: A stage would have devices of several kinds.
        """
        attentions: list[Chosen] = [(), ((ALL, "ring"),)] if again else [()]
        devices = request.num_devices // stages
        asked = dataclasses.replace(
            request, num_devices=devices, num_micro_batches=None, **options_off()
        )
        known = ProgramCache() if known is None else known
        parts = grounds(graph, cluster, devices, stages)
        self._stages = stages
        self._recomputes = bool(request.remat)
        self._kinds: list[_KindSeconds] = []
        for part in by_memory(parts):
            alike = sum(other.kind.name == part.kind.name for other in parts)
            analyses = ProgramAnalyses(
                graph=graph, cluster=part.cluster, again=again, known=known
            )
            priced: list[tuple[LayoutCases, TimeColumns]] = []
            for attention in attentions:
                program = analyses.of((), attention, 1)
                if program is None:
                    continue  # The model has no attention.
                analysed, shared = program
                given = analysed.graph, analysed.dims, part.cluster, asked
                search = Search(*given, program=shared, grids=known.grids)
                cases = search.at_every_count({devices: counts})
                if len(cases):
                    priced.append((cases, search.evaluator.times(cases)))
            if not priced:
                self._kinds = []
                break
            least = [_least_passes(times, cases) for cases, times in priced]
            self._kinds.append(
                _KindSeconds(
                    ratio=part.ratio,
                    stages=alike,
                    count=np.concatenate([cases.count for cases, _ in priced]),
                    passes=np.concatenate([passes for passes, _ in least]),
                    reduction=np.concatenate([reduction for _, reduction in least]),
                    compute=np.concatenate([x.terms["compute"] for _, x in priced]),
                )
            )

    def seconds(self, count: int, done: int | None = None) -> float:
        """Returns a lower bound on the step seconds; 0 if no layout has ``count``.

        Args:
            count: Number of micro-batches of the global batch.
            done: Number of micro-batches that the pipeline computes; default: all.
        """
        done = count if done is None else done
        speed = 0.0
        for kind in self._kinds:
            some = kind.count == count
            passes = kind.passes[some] * (done / count)
            total = StageSeconds.of(
                passes, kind.reduction[some], recomputes=self._recomputes
            )
            if kind.stages == self._stages:
                step = least_divided_seconds(total, self._stages, done)
            else:
                step = total.busy * kind.ratio / kind.stages
            least = step.min(initial=np.inf)
            speed += 1 / least if some.any() else math.inf
        return 1 / float(speed) if speed else 0.0

    def compute_seconds(self, count: int) -> float:
        """Returns the least compute seconds of a step on any kind; 0 without a layout.

        Args:
            count: Number of micro-batches.
        """
        least = math.inf
        for kind in self._kinds:
            compute = kind.compute[kind.count == count]
            busy = kind.ratio * float(compute.min(initial=np.inf))
            least = min(least, busy) if busy < math.inf else 0.0
        return least if least < math.inf else 0.0

    def most_within(self, seconds: float, count: int) -> int:
        """Returns the most micro-batches that the pipeline may compute in a given time.

        Args:
            seconds: Step time in seconds, which the bound must stay below.
            count: Number of micro-batches of the global batch.
        """
        numbers = range(1, count + 1)
        return bisect.bisect_left(
            numbers, seconds, key=lambda done: self.seconds(count, done)
        )


def _least_passes(
    times: TimeColumns, cases: LayoutCases
) -> tuple[np.ndarray, np.ndarray]:
    """Returns least seconds of all stages' passes, and of the gradient reduction."""
    _, step = times.sequence_parallel(cases.mesh["tensor"])
    reduction = times.terms["gradient"]
    once = times.terms["update"] + reduction
    passes = np.maximum(step - once, STAGES_SHARE * (times.step - once))
    return passes, STAGES_SHARE * reduction


def not_faster(stages: int, known_seconds: float) -> NotFaster:
    """Returns the error that no plan with these stages is faster than a known plan.

    Args:
        stages: Number of stages.
        known_seconds: Step time of the known plan, in seconds.
    """
    known = milliseconds(known_seconds)
    return NotFaster(f"stage {stages}: no plan takes less than {known} a step")
