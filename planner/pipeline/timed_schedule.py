"""A plan's schedule in seconds: the rows of its stages, with start and end.

It is separate from ``simulate`` because it starts from a plan file: the predictions of
the plan's stages give the duration of each row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from whalejax.planner.balance.shares import micro_batch_ranges
from whalejax.planner.pipeline.schedules import Action, Schedule, ScheduleRow, schedule
from whalejax.planner.pipeline.simulate import simulate
from whalejax.planner.plan_data import PlanData
from whalejax.planner.plan_entries import VirtualStagePrediction
from whalejax.planner.plan_errors import PlanError


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
    """A schedule in seconds.

    Attributes:
        table: The schedule.
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
        raise PlanError("this plan has no stages, and so no schedule")
    number = plan.axis_sizes["stage"]
    count = plan.num_micro_batches
    return schedule(stages.schedule, number, count, stages.chunks)


def time_schedule(plan: PlanData) -> TimedSchedule:
    """Returns the rows of a plan's schedule in seconds.

    If stages run one loop, each of its turns does the forwards of all stages, then
    their backwards, then the transfers; a stage without work waits.

    Args:
        plan: Plan with stages.

    Raises:
        PlanError: The plan has no stages.
    """
    table, stages = table_of(plan), plan.stages
    assert stages is not None
    if table.turn_ticks:
        rows = tuple(_in_turns(table, stages.paces[0], stages.handed_seconds))
        return TimedSchedule(table=table, rows=rows)
    line = simulate(
        table,
        [pace.forward_seconds for pace in stages.paces],
        [pace.backward_seconds for pace in stages.paces],
        stages.handed_seconds,
        weight_seconds=[pace.weight_seconds for pace in stages.paces]
        if table.splits_backward
        else None,
    )
    rows = tuple(
        Timed(
            row=row,
            start_seconds=end - _seconds(stages.paces[table.key(row)[0]], row.action),
            end_seconds=end,
        )
        for row, end in zip(table.rows, line.ends_seconds, strict=True)
    )
    return TimedSchedule(table=table, rows=rows)


def paced_beside(plan: PlanData) -> list[TimedSchedule]:
    """Returns the rows of parallel pipelines, each with the micro-batches of its share.

    Args:
        plan: Plan with stages; for one pipeline, the list has one item.

    Returns:
        Timed schedule of each pipeline, in node order. Micro-batches have their numbers
        in the step; a pipeline without micro-batches has no rows.

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


def _in_turns(
    table: Schedule, pace: VirtualStagePrediction, handed_seconds: float
) -> Iterator[Timed]:
    """Yields every row of stages in lockstep, whose turns take equally long."""
    turns: dict[int, list[ScheduleRow]] = {}
    for row in table.rows:
        turns.setdefault(table.turn(row), []).append(row)
    now = 0.0
    for rows in turns.values():
        for action in table.actions:
            together = [row for row in rows if row.action == action]
            end = now + (_seconds(pace, action) if together else 0.0)
            for row in together:
                yield Timed(row=row, start_seconds=now, end_seconds=end)
            now = end
        now += handed_seconds
