"""Pipeline schedules as data: who does what at which tick, and how long it takes.

A schedule is rows of (tick, stage, chunk, micro-batch, action) and nothing else; cost
and memory, executors and pictures read the same rows. Whale's PreferForward is GPipe
(Huang et al., 2019), its PreferBackward is 1F1B (PipeDream, Narayanan et al., 2019,
made synchronous by DAPPLE, Fan et al., 2021), its PreferBackwardOptimizer holds one
micro-batch more; interleaving is Megatron-LM's (Narayanan et al., 2021).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from whalejax.meshes.problems import Problems
from whalejax.planner.plan import PlanError


Action = Literal["forward", "backward"]

NAMES = ("gpipe", "1f1b", "1f1b-ahead", "interleaved")
"""Schedules that ``schedule`` builds."""

Key = tuple[int, int, Action]
"""Place along the whole pipeline, micro-batch and action: what identifies a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One action of a stage.

    Attributes:
        tick: when, if every action took one tick and transfers none.
        stage: which stage acts; stages hold devices of their own.
        chunk: which of the stage's parts of the model, 0 where it has one.
        micro_batch: on which micro-batch.
        action: forward or backward.
    """

    tick: int
    stage: int
    chunk: int
    micro_batch: int
    action: Action


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A table of rows.

    Attributes:
        name: one of ``NAMES``.
        num_stages, num_micro_batches: its size.
        num_chunks: parts of the model on each stage.
        rows: by tick, then stage.
    """

    name: str
    num_stages: int
    num_micro_batches: int
    num_chunks: int = 1
    rows: tuple[Row, ...] = ()

    @property
    def num_places(self) -> int:
        """Parts of the model along the whole pipeline."""
        return self.num_stages * self.num_chunks

    def key(self, row: Row) -> Key:
        """What identifies a row: its place along the pipeline comes first."""
        return row.chunk * self.num_stages + row.stage, row.micro_batch, row.action

    def needs(self, row: Row) -> Key | None:
        """The row whose result a row takes in, or None for the first forward.

        The backward of the last place follows its own forward.
        """
        place, micro_batch, action = self.key(row)
        if action == "forward":
            return None if place == 0 else (place - 1, micro_batch, "forward")
        if place == self.num_places - 1:
            return place, micro_batch, "forward"
        return place + 1, micro_batch, "backward"

    def of_stage(self, stage: int) -> tuple[Row, ...]:
        """A stage's rows in order."""
        return tuple(row for row in self.rows if row.stage == stage)

    @property
    def in_flight(self) -> tuple[int, ...]:
        """For each stage, how many activations of a chunk it holds at most."""
        held = [0] * self.num_stages
        most = [0] * self.num_stages
        for row in self.rows:
            held[row.stage] += 1 if row.action == "forward" else -1
            most[row.stage] = max(most[row.stage], held[row.stage])
        return tuple(most)


def schedule(
    name: str, num_stages: int, num_micro_batches: int, num_chunks: int = 1
) -> Schedule:
    """Build a schedule.

    Args:
        name: one of ``NAMES``.
        num_stages: at least 1.
        num_micro_batches: at least 1; a multiple of the stages where interleaved.
        num_chunks: parts of the model on each stage; above 1 only where interleaved.

    Raises:
        PlanError: the numbers make no such schedule; all problems are listed.

    >>> [(r.action, r.micro_batch) for r in schedule("1f1b", 2, 2).of_stage(1)]
    [('forward', 0), ('backward', 0), ('forward', 1), ('backward', 1)]
    """
    _check(name, num_stages, num_micro_batches, num_chunks)
    empty = Schedule(
        name=name,
        num_stages=num_stages,
        num_micro_batches=num_micro_batches,
        num_chunks=num_chunks,
    )
    rows = [row for stage in range(num_stages) for row in _order(empty, stage)]
    ends = _ends(empty, rows, lambda row: 1.0, lambda row: 0.0)
    timed = (
        dataclasses.replace(row, tick=round(ends[empty.key(row)]) - 1) for row in rows
    )
    ordered = sorted(timed, key=lambda row: (row.tick, row.stage))
    return dataclasses.replace(empty, rows=tuple(ordered))


def _check(name: str, stages: int, micro_batches: int, chunks: int) -> None:
    problems = Problems("pipeline schedule", PlanError)
    if name not in NAMES:
        problems.add(f"schedule is {name!r}; expected one of {', '.join(NAMES)}")
    for what, number in (
        ("num_stages", stages),
        ("num_micro_batches", micro_batches),
        ("num_chunks", chunks),
    ):
        if number < 1:
            problems.add(f"{what} is {number}; expected 1 or more")
    problems.raise_if_any()
    if name != "interleaved":
        if chunks > 1:
            problems.add(
                f"num_chunks is {chunks}; {name} has 1 for each stage. Leave it out, "
                "or take the schedule interleaved"
            )
    elif micro_batches % stages:
        lower = micro_batches - micro_batches % stages
        near = f"{lower} or " if lower else ""
        problems.add(
            f"num_micro_batches is {micro_batches}; interleaved runs them in rounds of "
            f"{stages}, one for each stage. Use {near}{lower + stages}"
        )
    problems.raise_if_any()


def most_in_flight(
    name: str, num_stages: Any, stage: Any, num_micro_batches: Any, num_chunks: Any = 1
) -> Any:
    """How many activations of a chunk a stage holds at most; ``Schedule.in_flight``.

    Args:
        name: one of ``NAMES``.
        num_stages, stage, num_micro_batches, num_chunks: numbers, or arrays of them.

    >>> int(most_in_flight("1f1b", 4, 0, 8))
    4
    """
    count = num_micro_batches * num_chunks
    ahead = num_stages - stage
    if name == "gpipe":
        return count
    if name == "interleaved":
        return np.minimum(count, 2 * (ahead - 1) + (num_chunks - 1) * num_stages + 1)
    return np.minimum(count, ahead + (name == "1f1b-ahead"))


def _order(empty: Schedule, stage: int) -> list[Row]:
    """A stage's actions: some forwards first, then in turn, then what is left."""
    count = empty.num_micro_batches * empty.num_chunks
    first = int(
        most_in_flight(
            empty.name,
            empty.num_stages,
            stage,
            empty.num_micro_batches,
            empty.num_chunks,
        )
    )
    forwards = [_row(empty, stage, index, "forward") for index in range(count)]
    backwards = [_row(empty, stage, index, "backward") for index in range(count)]
    rows = forwards[:first]
    for index, backward in enumerate(backwards):
        rows.append(backward)
        rows += forwards[first + index : first + index + 1]
    return rows


def _row(empty: Schedule, stage: int, index: int, action: Action) -> Row:
    """The stage's forward or backward number ``index``.

    Chunks take turns, each with as many micro-batches as there are stages; backward
    they come in reverse.
    """
    stages, chunks = empty.num_stages, empty.num_chunks
    if chunks == 1:
        chunk, micro_batch = 0, index
    else:
        turn, within = divmod(index, stages)
        lap, chunk = divmod(turn, chunks)
        micro_batch = lap * stages + within
    if action == "backward":
        chunk = chunks - 1 - chunk
    return Row(tick=0, stage=stage, chunk=chunk, micro_batch=micro_batch, action=action)


def _ends(
    table: Schedule,
    rows: Sequence[Row],
    duration: Callable[[Row], float],
    transfer: Callable[[Row], float],
) -> dict[Key, float]:
    """When each row ends if every stage acts in its own order, as early as it can.

    Args:
        table: whose keys and dependencies to use.
        rows: each stage's in its order; stages in any.
        duration: of a row.
        transfer: from the row that it needs, before a row can begin.

    Raises:
        ValueError: the orders wait for each other in a circle.
    """
    queues: list[list[Row]] = [[] for _ in range(table.num_stages)]
    for row in rows:
        queues[row.stage].append(row)
    at = [0] * table.num_stages
    free = [0.0] * table.num_stages
    ends: dict[Key, float] = {}
    waiting: dict[Key, int] = {}
    ready = list(range(table.num_stages))
    while ready:
        stage = ready.pop()
        while at[stage] < len(queues[stage]):
            row = queues[stage][at[stage]]
            needed = table.needs(row)
            if needed is not None and needed not in ends:
                waiting[needed] = stage
                break
            arrival = 0.0 if needed is None else ends[needed] + transfer(row)
            free[stage] = max(free[stage], arrival) + duration(row)
            key = table.key(row)
            ends[key] = free[stage]
            at[stage] += 1
            if key in waiting:
                ready.append(waiting.pop(key))
    if len(ends) != len(rows):
        raise ValueError("the stages wait for each other in a circle")
    return ends


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A schedule in seconds.

    Attributes:
        step_seconds: until the last action ends.
        ends_seconds: when each row ends, in the schedule's order.
        busy_seconds: work of each stage.
    """

    step_seconds: float
    ends_seconds: tuple[float, ...]
    busy_seconds: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """Part of all stages' time in which they wait."""
        whole = self.step_seconds * len(self.busy_seconds)
        return 1.0 - sum(self.busy_seconds) / whole if whole else 0.0


def simulate(
    table: Schedule,
    forward_seconds: Sequence[float],
    backward_seconds: Sequence[float],
    transfer_seconds: float = 0.0,
) -> Timeline:
    """Run a schedule in time.

    Args:
        table: the schedule.
        forward_seconds, backward_seconds: of one micro-batch at each place along the
            pipeline (stages × chunks, in the model's order).
        transfer_seconds: from one place to the next, where that is another stage;
            sending does not keep a stage from its next action.

    >>> from whalejax.planner.schedules import schedule
    >>> simulate(schedule("gpipe", 2, 3), [1.0, 1.0], [2.0, 2.0]).step_seconds
    12.0
    """
    places = table.num_places
    for name, values in (("forward", forward_seconds), ("backward", backward_seconds)):
        if len(values) != places:
            raise PlanError(
                f"{name}_seconds has {len(values)} entries; expected {places}: "
                f"{table.num_chunks} chunks on each of {table.num_stages} stages"
            )

    def duration(row: Row) -> float:
        place, _, action = table.key(row)
        return (forward_seconds if action == "forward" else backward_seconds)[place]

    def transfer(row: Row) -> float:
        needed = table.needs(row)
        other = needed is not None and needed[0] != table.key(row)[0]
        return transfer_seconds if other and table.num_stages > 1 else 0.0

    ends = _ends(table, table.rows, duration, transfer)
    busy = [0.0] * table.num_stages
    for row in table.rows:
        busy[row.stage] += duration(row)
    return Timeline(
        step_seconds=max(ends.values()),
        ends_seconds=tuple(ends[table.key(row)] for row in table.rows),
        busy_seconds=tuple(busy),
    )


def simulate_many(
    table: Schedule, forward: np.ndarray, backward: np.ndarray, transfer: np.ndarray
) -> np.ndarray:
    """``simulate`` for many times at once, the step time alone.

    Args:
        table: the schedule.
        forward, backward: seconds at each place along the pipeline, (place, case).
        transfer: seconds from one place to the next, (case,).

    Returns:
        Step time of every case.
    """
    cases = forward.shape[1]
    free = np.zeros((table.num_stages, cases))
    ends: dict[Key, np.ndarray] = {}
    # By tick, every stage's rows are in its order and behind what they need.
    for row in table.rows:
        place, micro_batch, action = table.key(row)
        needed = table.needs(row)
        start = free[row.stage]
        if needed is not None:
            # What one reads alone is forgotten once it is read.
            arrival = ends.pop(needed)
            if needed[0] != place and table.num_stages > 1:
                arrival = arrival + transfer
            start = np.maximum(start, arrival)
        seconds = (forward if action == "forward" else backward)[place]
        free[row.stage] = ends[place, micro_batch, action] = start + seconds
    found: np.ndarray = free.max(axis=0)
    return found


def any_cut_share(
    num_micro_batches: np.ndarray, num_stages: np.ndarray, num_chunks: np.ndarray
) -> np.ndarray:
    """The least time of a pipeline however its work is cut into stages.

    A stage begins after those before it have done a part: with ``B`` their time for a
    micro-batch, ``B / chunks + micro_batches * own <= step``. All of them equal gives
    the least step.

    Args:
        num_micro_batches, num_stages, num_chunks: arrays that are alike.

    Returns:
        Shares of the time that one micro-batch takes on all stages together.
    """
    laps = num_micro_batches * num_chunks
    found: np.ndarray = 1.0 / (num_chunks * (1.0 - (1.0 - 1.0 / laps) ** num_stages))
    return found


def problems_of(
    table: Schedule, most_in_flight: Sequence[int] | None = None
) -> list[str]:
    """What makes a table illegal; empty where nothing does.

    Every place does every micro-batch forward and backward once, after what it needs,
    one action a tick, holding no more activations than allowed.

    Args:
        table: the schedule.
        most_in_flight: bound for each stage, or None for no bound.
    """
    found = []
    ticks: dict[Key, int] = {}
    taken: set[tuple[int, int]] = set()
    for row in table.rows:
        key = table.key(row)
        if key in ticks:
            found.append(f"{key} stands twice, at ticks {ticks[key]} and {row.tick}")
        if (row.stage, row.tick) in taken:
            found.append(f"stage {row.stage} acts twice at tick {row.tick}")
        taken.add((row.stage, row.tick))
        ticks[key] = row.tick
    for place in range(table.num_places):
        for micro_batch in range(table.num_micro_batches):
            keys: tuple[Key, ...] = (
                (place, micro_batch, "forward"),
                (place, micro_batch, "backward"),
            )
            found += [f"{key} is missing" for key in keys if key not in ticks]
    for row in table.rows:
        needed = table.needs(row)
        if needed is not None and ticks.get(needed, row.tick) >= row.tick:
            found.append(f"{table.key(row)} at tick {row.tick} comes before {needed}")
    for stage, held in enumerate(table.in_flight):
        allowed = held if most_in_flight is None else most_in_flight[stage]
        if held > allowed:
            found.append(f"stage {stage} holds {held} activations, {allowed} allowed")
    return found
