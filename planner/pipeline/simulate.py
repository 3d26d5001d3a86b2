"""Simulates pipeline schedules: computes when each row of a schedule ends.

The simulation is the same for all schedules. It reads only rows, their dependencies,
and whether stages are in lockstep. Stages in lockstep synchronise after each turn, and
then exchange the results of the turn. ``time_schedule`` simulates the schedule of a
plan, with the predicted seconds of its stages.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from whalejax.meshes.errors import Problems
from whalejax.meshes.units import count_text
from whalejax.planner.balance.shares import micro_batch_ranges
from whalejax.planner.pipeline.schedules import (
    Action,
    Columns,
    Key,
    Schedule,
    ScheduleRow,
    columns_of,
    numbered,
    schedule,
)
from whalejax.planner.plan_data import PlanData
from whalejax.planner.plan_entries import VirtualStagePrediction
from whalejax.planner.plan_errors import PlanError


STEADY_AFTER = 3
"""Number of micro-batches per stage after which each further one adds equal time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleTimeline:
    """End of each row of a schedule, and the step time.

    Attributes:
        step_seconds: Seconds until the last action ends.
        ends_seconds: End of each row in seconds, in the schedule's order.
        busy_seconds: Seconds that each stage computes.
    """

    step_seconds: float
    ends_seconds: tuple[float, ...]
    busy_seconds: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """Fraction of the time of all stages in which stages wait."""
        whole = self.step_seconds * len(self.busy_seconds)
        return 1.0 - sum(self.busy_seconds) / whole if whole else 0.0


def simulate(
    table: Schedule,
    forward_seconds: Sequence[float],
    backward_seconds: Sequence[float],
    transfer_seconds: float = 0.0,
    *,
    weight_seconds: Sequence[float] | None = None,
) -> ScheduleTimeline:
    """Computes when each row of a schedule ends.

    Args:
        table: Pipeline schedule.
        forward_seconds, backward_seconds: Seconds of one micro-batch on each virtual
            stage, in the model's order.
        transfer_seconds: Seconds of a transfer between virtual stages of different
            stages. Sending does not delay the next action, except in lockstep. Default:
            0.
        weight_seconds: Seconds of the gradients of parameters on each virtual stage,
            for a schedule that splits the backward pass; ``backward_seconds`` are then
            only for the gradients of inputs. Default: None.

    Raises:
        PlanError: The times are for another number of virtual stages, or for actions
            that the schedule does not have, or are missing; lists all problems.

    >>> from whalejax.planner.pipeline.schedules import schedule
    >>> simulate(schedule("gpipe", 2, 3), [1.0, 1.0], [2.0, 2.0]).step_seconds
    12.0
    >>> one = [1.0] * 4
    >>> simulate(schedule("zb-h1", 4, 8), one, one, weight_seconds=one).step_seconds
    27.0
    """
    seconds = _by_action(table, forward_seconds, backward_seconds, weight_seconds)
    busy, free = [0.0] * table.num_stages, [0.0] * table.num_stages
    wait, pause = _transfers(table, transfer_seconds)
    ends: list[float] = []
    sent: dict[Key, float] = {}
    turn = 0
    for row in table.rows:  # By tick, so rows follow their dependencies.
        if table.turn(row) > turn:
            turn, free = table.turn(row), [max(free) + pause] * table.num_stages
        key, needed = table.key(row), table.needs(row)
        start, took = free[row.stage], seconds[row.action][key[0]]
        # A stage runs its rows in order, so results of its own have ended.
        if needed is not None and needed[0] != key[0]:
            # One other virtual stage reads a result, so reading removes it.
            start = max(start, sent.pop(needed) + wait)
        free[row.stage] = end = start + took
        busy[row.stage] += took
        if row.action != "weight":
            sent[key] = end
        ends.append(end)
    return ScheduleTimeline(
        step_seconds=max(ends, default=0.0),
        ends_seconds=tuple(ends),
        busy_seconds=tuple(busy),
    )


def _transfers(table: Schedule, seconds: Any) -> tuple[Any, Any]:
    """Returns the seconds of transfers before a result is read, and after a turn."""
    if table.num_stages == 1:
        return 0.0, 0.0
    return (0.0, seconds) if table.turn_ticks else (seconds, 0.0)


@dataclass(frozen=True, slots=True)
class _TickRows:
    """Independent rows of several stages at one tick.

    Attributes:
        together: Whether all stages synchronise before these rows.
        stages, places, actions: Stage, virtual stage and action of each row.
        reads, waits: Slots that are read, and indices of the rows that read them.
        writes, leaves: Slots that are written, and indices of the rows that write them.
    """

    together: bool
    stages: np.ndarray
    places: np.ndarray
    actions: np.ndarray
    reads: np.ndarray
    waits: np.ndarray
    writes: np.ndarray
    leaves: np.ndarray


@dataclass(frozen=True, slots=True)
class Compiled:
    """Schedule as array operations, which evaluate many sets of times at once.

    Attributes:
        table: Pipeline schedule; without rows if it was compiled from columns.
        beats: Rows of the schedule by tick.
        slots: Number of slots that store results until they are read.
    """

    table: Schedule
    beats: tuple[_TickRows, ...]
    slots: int

    def step_seconds(
        self,
        forward: np.ndarray,
        backward: np.ndarray,
        transfer: np.ndarray,
        *,
        weight: np.ndarray | None = None,
    ) -> np.ndarray:
        """Returns the step time of many cases, as ``simulate`` would for each.

        Args:
            forward, backward: Seconds on each virtual stage, (virtual stage, case).
            transfer: Seconds of a transfer between stages, (case,).
            weight: Seconds of the gradients of parameters, (virtual stage, case), if
                the schedule splits the backward pass. Default: None.

        Raises:
            PlanError: The times do not fit the schedule, as in ``simulate``.
        """
        table = self.table
        given = _by_action(table, forward, backward, weight)
        seconds = np.stack([given[name] for name in table.actions])
        free = np.zeros((table.num_stages, seconds.shape[-1]))
        sent = np.empty((self.slots, seconds.shape[-1]))
        wait, pause = _transfers(table, transfer)
        for beat in self.beats:
            if beat.together:
                free[:] = free.max(axis=0) + pause
            start = free[beat.stages]
            if len(beat.reads):
                arrived = sent[beat.reads] + wait
                start[beat.waits] = np.maximum(start[beat.waits], arrived)
            start += seconds[beat.actions, beat.places]
            free[beat.stages] = start
            if len(beat.writes):
                sent[beat.writes] = start[beat.leaves]
        result: np.ndarray = free.max(axis=0)
        return result


def compiled(table: Schedule, columns: Columns | None = None) -> Compiled:
    """Compiles a schedule for repeated evaluation.

    Args:
        table: Pipeline schedule.
        columns: Rows of the schedule, if ``table`` has none.

    >>> from whalejax.planner.pipeline.schedules import schedule
    >>> steps = compiled(schedule("gpipe", 2, 3))
    >>> one = np.ones((2, 1))
    >>> steps.step_seconds(one, 2 * one, np.zeros(1))
    array([12.])
    """
    rows = columns_of(table) if columns is None else columns
    key, needs = numbered(table, rows)
    place = rows.chunk * table.num_stages + rows.stage
    turn = rows.tick // table.turn_ticks if table.turn_ticks else 0 * rows.tick
    # A stage runs its rows in order, so results of its own have ended.
    last = table.num_places - 1
    waits = ((rows.action == 0) & (place > 0)) | ((rows.action == 1) & (place < last))
    leaves = ((rows.action == 0) & (place < last)) | ((rows.action == 1) & (place > 0))
    window = _window(table, key, rows.tick, needs[waits], rows.tick[waits])

    def slots(keys: np.ndarray) -> np.ndarray:
        source, micro_batch = divmod(keys, table.num_micro_batches)
        return np.asarray(source * window + micro_batch % window)

    first = np.flatnonzero(np.diff(rows.tick, prepend=-1))
    reads, writes = slots(needs), slots(key)
    beats = []
    before = 0
    for start, end in zip(first, [*first[1:], len(key)], strict=True):
        here = slice(start, end)
        waiting, leaving = np.flatnonzero(waits[here]), np.flatnonzero(leaves[here])
        beats.append(
            _TickRows(
                bool(turn[start] > before),
                rows.stage[here],
                place[here],
                rows.action[here],
                reads[here][waiting],
                waiting,
                writes[here][leaving],
                leaving,
            )
        )
        before = turn[start]
    return Compiled(table, tuple(beats), window * 2 * table.num_places)


def _window(
    table: Schedule,
    keys: np.ndarray,
    ticks: np.ndarray,
    needs: np.ndarray,
    needed: np.ndarray,
) -> int:
    """Returns after how many micro-batches a slot can be used again.

    Its result has been read by then.
    """
    shape = len(table.actions) * table.num_places, table.num_micro_batches
    made, read = np.zeros(math.prod(shape)), np.full(math.prod(shape), -1)
    made[keys], read[needs] = ticks, needed
    made, read = made.reshape(shape), read.reshape(shape)
    window = 1
    while (read[:, :-window] > made[:, window:]).any():
        window *= 2
    return window


def _by_action(
    table: Schedule, forward: Any, backward: Any, weight: Any
) -> dict[Action, Any]:
    problems = Problems(f"times of {table.name}", PlanError)
    given: dict[Action, Any] = {"forward": forward, "backward": backward}
    if weight is not None:
        given["weight"] = weight
    for name, values in given.items():
        if name not in table.actions:
            problems.add(
                f"{name}_seconds is given, but {table.name} does not split the "
                "backward pass. Add it to backward_seconds, or choose the schedule "
                "zb-h1"
            )
        elif len(values) != table.num_places:
            problems.add(
                f"{name}_seconds has {count_text(len(values), 'entry')}; expected "
                f"{table.num_places}: {count_text(table.num_chunks, 'chunk')} on each "
                f"of {count_text(table.num_stages, 'stage')}"
            )
    if table.splits_backward and weight is None:
        problems.add(
            f"weight_seconds is missing; {table.name} splits the backward pass. Give "
            f"the seconds of the gradients of parameters on each of {table.num_places} "
            "virtual stages, and subtract them from backward_seconds"
        )
    problems.raise_if_any()
    return given


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One row of a schedule.

    Attributes:
        row: Row of the schedule.
        start_seconds, end_seconds: Seconds since the step began.
    """

    row: ScheduleRow
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedSchedule:
    """Schedule with the time of each row.

    Attributes:
        table: Pipeline schedule.
        rows: Rows with their times, in the schedule's order.
    """

    table: Schedule
    rows: tuple[Timed, ...]


def table_of(plan: PlanData) -> Schedule:
    """Returns the schedule of a plan's stages.

    Args:
        plan: Plan with stages.

    Raises:
        PlanError: The plan has no stages.
    """
    stages = plan.stages
    if stages is None:
        raise PlanError("this plan has no stages, so it has no schedule")
    number = plan.axis_sizes["stage"]
    count = plan.num_micro_batches
    return schedule(stages.schedule, number, count, stages.chunks)


def time_schedule(plan: PlanData) -> TimedSchedule:
    """Returns the rows of a plan's schedule, with their times in seconds.

    Args:
        plan: Plan with stages.

    Raises:
        PlanError: The plan has no stages.
    """
    table, stages = table_of(plan), plan.stages
    assert stages is not None
    # Stages in lockstep take equally long, so their plan has one pace for all.
    paces = stages.paces * (table.num_places // len(stages.paces))
    line = simulate(
        table,
        [pace.forward_seconds for pace in paces],
        [pace.backward_seconds for pace in paces],
        stages.handed_seconds,
        weight_seconds=[pace.weight_seconds for pace in paces]
        if table.splits_backward
        else None,
    )
    rows = tuple(
        Timed(
            row=row,
            start_seconds=end - _seconds(paces[table.key(row)[0]], row.action),
            end_seconds=end,
        )
        for row, end in zip(table.rows, line.ends_seconds, strict=True)
    )
    return TimedSchedule(table=table, rows=rows)


def paced_beside(plan: PlanData) -> list[TimedSchedule]:
    """Returns the timed schedules of parallel pipelines, each with its micro-batches.

    Args:
        plan: Plan with stages; with one pipeline, the list has one item.

    Returns:
        Timed schedule of each pipeline, in node order. Its rows number the
        micro-batches over all pipelines, its ``table`` those of the pipeline alone. A
        pipeline without micro-batches has no rows.

    Raises:
        PlanError: The plan has no stages.
    """
    if not plan.pipelines:
        return [time_schedule(plan)]
    beside = []
    for own, numbers in zip(
        plan.pipelines, micro_batch_ranges(plan.shares), strict=True
    ):
        if not numbers:
            beside.append(
                TimedSchedule(
                    table=dataclasses.replace(table_of(own), rows=()), rows=()
                )
            )
            continue
        one = time_schedule(dataclasses.replace(own, num_micro_batches=len(numbers)))
        rows = (
            dataclasses.replace(
                timed,
                row=timed.row._replace(
                    micro_batch=timed.row.micro_batch + numbers.start
                ),
            )
            for timed in one.rows
        )
        beside.append(dataclasses.replace(one, rows=tuple(rows)))
    return beside


def _seconds(pace: VirtualStagePrediction, action: Action) -> float:
    if action == "forward":
        return pace.forward_seconds
    return pace.backward_seconds if action == "backward" else pace.weight_seconds
