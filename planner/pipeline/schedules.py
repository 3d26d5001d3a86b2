"""Pipeline schedules as data: the actions of each stage, by tick.

A schedule has rows of (tick, stage, chunk, micro-batch, action), which cost and memory
models, executors and drawings read.

- Whale's PreferForward is GPipe (Huang et al., 2019).
- Its PreferBackward is 1F1B (PipeDream, Narayanan et al., 2019; made synchronous by
  DAPPLE, Fan et al., 2021).
- Its PreferBackwardOptimizer stores one more micro-batch.
- Interleaving is Megatron-LM's (Narayanan et al., 2021).
- ZB-H1 splits the backward pass (Qi et al., "Zero Bubble Pipeline Parallelism", 2024).
- Lockstep schedules are for one program on all stages.

``simulate`` computes the time of a schedule.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from whalejax.meshes.errors import Problems
from whalejax.planner.plan_errors import PlanError


Action = Literal["forward", "backward", "weight"]

NAMES = (
    "gpipe",
    "1f1b",
    "1f1b-ahead",
    "interleaved",
    "zb-h1",
    "gpipe-lockstep",
    "1f1b-lockstep",
)
"""Schedules that ``schedule`` builds."""

SPLIT = frozenset(("zb-h1",))
"""Schedules with a backward pass in two parts."""

TURN_TICKS = {"gpipe-lockstep": 1, "1f1b-lockstep": 2}
"""Number of ticks after which stages synchronise, by lockstep schedule."""

Key = tuple[int, int, Action]
"""(Virtual stage, micro-batch, action), which identifies a row."""


class ScheduleRow(NamedTuple):
    """One action of a stage.

    Attributes:
        tick: Time of the action, if each action takes one tick and transfers none.
        stage: Number of the stage; each stage has its own devices.
        chunk: Index of the part of the model on the stage; 0 if it has one part.
        micro_batch: Number of the micro-batch.
        action: ``forward``, ``backward`` or ``weight``. If a schedule splits the
            backward pass, ``backward`` computes only the gradient of the input, and
            ``weight`` that of the parameters. If not, ``backward`` computes both.
    """

    tick: int
    stage: int
    chunk: int
    micro_batch: int
    action: Action


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Pipeline schedule as a table of rows.

    Attributes:
        name: One of ``NAMES``.
        num_stages, num_micro_batches: Numbers of stages and of micro-batches.
        num_chunks: Number of parts of the model on each stage.
        splits_backward: Whether the gradient of the parameters is a separate action.
        turn_ticks: Number of ticks in a turn, at whose end all stages synchronise; a
            result is read in a later turn. 0 if stages do not synchronise.
        rows: Rows by tick, then by stage.
    """

    name: str
    num_stages: int
    num_micro_batches: int
    num_chunks: int = 1
    splits_backward: bool = False
    turn_ticks: int = 0
    rows: tuple[ScheduleRow, ...] = ()

    @property
    def num_places(self) -> int:
        """Number of virtual stages."""
        return self.num_stages * self.num_chunks

    @property
    def actions(self) -> tuple[Action, ...]:
        """Actions of each virtual stage on each micro-batch, in their order."""
        plain: tuple[Action, ...] = ("forward", "backward")
        return (*plain, "weight") if self.splits_backward else plain

    def key(self, row: ScheduleRow) -> Key:
        """Returns the key of a row, which begins with its virtual stage."""
        return row.chunk * self.num_stages + row.stage, row.micro_batch, row.action

    def needs(self, row: ScheduleRow) -> Key | None:
        """Returns the key of the row whose result a row reads; None for the first
        forward.

        On the last virtual stage, a backward follows the forward of the same
        micro-batch. A gradient of the parameters follows the backward of the same
        micro-batch.
        """
        place, micro_batch, action = self.key(row)
        if action == "weight":
            return place, micro_batch, "backward"
        if action == "forward":
            return None if place == 0 else (place - 1, micro_batch, "forward")
        if place == self.num_places - 1:
            return place, micro_batch, "forward"
        return place + 1, micro_batch, "backward"

    def turn(self, row: ScheduleRow) -> int:
        """Returns the lockstep turn of a row; 0 without lockstep."""
        return row.tick // self.turn_ticks if self.turn_ticks else 0

    def of_stage(self, stage: int) -> tuple[ScheduleRow, ...]:
        """Returns a stage's rows in order."""
        return tuple(row for row in self.rows if row.stage == stage)

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Largest number of a chunk's activations that each stage stores at a time.

        They are stored until the last action that reads them ends, which is the
        gradient of the parameters if that is a separate action.
        """
        last = self.actions[-1]
        held = [0] * self.num_stages
        most = [0] * self.num_stages
        for row in self.rows:
            held[row.stage] += (row.action == "forward") - (row.action == last)
            most[row.stage] = max(most[row.stage], held[row.stage])
        return tuple(most)


def schedule(
    name: str, num_stages: int, num_micro_batches: int, num_chunks: int = 1
) -> Schedule:
    """Returns a schedule.

    Args:
        name: One of ``NAMES``.
        num_stages: Number of stages, 1 or more.
        num_micro_batches: Number of micro-batches, 1 or more; for ``"interleaved"`` a
            multiple of ``num_stages``.
        num_chunks: Number of parts of the model on each stage; above 1 only for
            ``"interleaved"``. Default: 1.

    Raises:
        PlanError: There is no schedule with these numbers; lists all problems.

    >>> [(r.action, r.micro_batch) for r in schedule("1f1b", 2, 2).of_stage(1)]
    [('forward', 0), ('backward', 0), ('forward', 1), ('backward', 1)]
    """
    table, columns = build_columns(name, num_stages, num_micro_batches, num_chunks)
    numbers = (column.tolist() for column in columns[:-1])
    actions = (table.actions[action] for action in columns.action.tolist())
    rows = tuple(map(ScheduleRow._make, zip(*numbers, actions, strict=True)))
    return dataclasses.replace(table, rows=rows)


class Columns(NamedTuple):
    """Rows of a schedule as arrays, by tick, then by stage.

    Attributes:
        tick, stage, chunk, micro_batch: Fields of ``ScheduleRow``, one array each.
        action: Index in ``Schedule.actions``.
    """

    tick: np.ndarray
    stage: np.ndarray
    chunk: np.ndarray
    micro_batch: np.ndarray
    action: np.ndarray


def build_columns(
    name: str, num_stages: int, num_micro_batches: int, num_chunks: int = 1
) -> tuple[Schedule, Columns]:
    """Returns a schedule whose rows are only in columns, which is much faster."""
    _check(name, num_stages, num_micro_batches, num_chunks)
    empty = Schedule(
        name=name,
        num_stages=num_stages,
        num_micro_batches=num_micro_batches,
        num_chunks=num_chunks,
        splits_backward=name in SPLIT,
        turn_ticks=TURN_TICKS.get(name, 0),
    )
    if empty.turn_ticks:
        columns = _in_turns(empty)
    else:
        columns = _earliest(empty, *_order(empty))
    order = np.lexsort((columns.stage, columns.tick))
    return empty, Columns(*(column[order] for column in columns))


def columns_of(table: Schedule) -> Columns:
    """Returns the rows of a schedule as arrays."""
    index = {name: i for i, name in enumerate(table.actions)}
    rows = [(*row[:-1], index[row.action]) for row in table.rows]
    return Columns(*np.array(rows, dtype=np.int64).reshape(-1, 5).T)


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
                f"num_chunks is {chunks}; {name} has 1 on each stage. Leave it out, or "
                "choose the schedule interleaved"
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
    """Returns ``Schedule.in_flight`` of one stage, without building the schedule.

    Args:
        name: One of ``NAMES``.
        num_stages, stage, num_micro_batches, num_chunks: Numbers, or arrays of them.

    >>> int(most_in_flight("1f1b", 4, 0, 8))
    4
    """
    count = num_micro_batches * num_chunks
    ahead = num_stages - stage
    if name in ("gpipe", "gpipe-lockstep"):
        return count
    if name == "interleaved":
        return np.minimum(count, 2 * (ahead - 1) + (num_chunks - 1) * num_stages + 1)
    if name == "zb-h1":
        return np.minimum(count, num_stages)
    if name == "1f1b-lockstep":
        return np.minimum(count, 2 * ahead - 1)
    return np.minimum(count, ahead + (name == "1f1b-ahead"))


def _order(empty: Schedule) -> tuple[np.ndarray, np.ndarray]:
    """Returns every stage's actions and their index within each kind, by position.

    Forwards come first, then actions alternate, then the rest follows. A schedule that
    splits the backward pass begins as 1F1B. A stage then delays as many gradients of
    parameters as there are stages before it. So all stages store equally many
    activations, and the gradients for earlier stages come sooner. The order is fixed
    and suits stages of about equal time, as a stage that waits for a forward does no
    delayed work.
    """
    stages, count = empty.num_stages, empty.num_micro_batches * empty.num_chunks
    name = "1f1b" if empty.splits_backward else empty.name
    stage = np.arange(stages)[:, None]
    sizes = empty.num_micro_batches, empty.num_chunks
    first = most_in_flight(name, stages, stage, *sizes)
    index = np.arange(count)[None] + 0 * stage
    # A backward, a delayed gradient of parameters, and the next forward.
    late = np.where(index < first, index - first, 3 * (index - first) + 2)
    places = {"forward": late, "backward": 3 * index}
    waited = index + stage
    places["weight"] = np.where(waited < count, 3 * waited + 1, 3 * count + index)
    keys = np.concatenate([places[action] for action in empty.actions], axis=1)
    action, which = divmod(np.argsort(keys, axis=1, kind="stable"), count)
    return action, which


def _parts(
    empty: Schedule, action: np.ndarray, index: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns chunk and micro-batch of a stage's action number ``index`` of its kind.

    Chunks alternate after as many micro-batches as there are stages. The order in
    backward passes is the reverse.
    """
    stages, chunks = empty.num_stages, empty.num_chunks
    if chunks == 1:
        return np.zeros_like(index), index
    turn, within = divmod(index, stages)
    lap, chunk = divmod(turn, chunks)
    chunk = np.where(action > 0, chunks - 1 - chunk, chunk)
    return chunk, lap * stages + within


def numbered(table: Schedule, columns: Columns) -> tuple[np.ndarray, np.ndarray]:
    """Returns the number of each row, and of the row that it needs.

    Returns:
        Numbers in the order of actions, virtual stages and micro-batches; -1 if a row
        needs none.
    """
    places, count = table.num_places, table.num_micro_batches
    place = columns.chunk * table.num_stages + columns.stage
    key = (columns.action * places + place) * count + columns.micro_batch
    step = places * count
    back = np.where(place == places - 1, key - step, key + count)
    ahead = np.where(place == 0, -1, key - count)
    needs = np.where(columns.action == 0, ahead, back)
    return key, np.where(columns.action == 2, key - step, needs)


def _earliest(empty: Schedule, action: np.ndarray, index: np.ndarray) -> Columns:
    """Places each stage's rows, in the given order, at their earliest ticks.

    Raises ``ValueError`` if orders wait for each other in a cycle.
    """
    stages, number = action.shape
    everyone = np.arange(stages)
    stage = everyone[:, None] + 0 * action
    rows = Columns(
        np.full_like(action, -1), stage, *_parts(empty, action, index), action
    )
    key, needs = numbered(empty, rows)
    # The last entries are for rows without dependencies, and for stages that have
    # ended.
    done = np.append(np.full(key.size, key.size), [key.size, -1])
    needs = np.concatenate([needs, np.full((stages, 1), key.size)], axis=1)
    at = np.zeros(stages, dtype=np.int64)
    for tick in range(key.size):
        ready = np.flatnonzero(done[needs[everyone, at]] < tick)
        if not len(ready):
            break
        here = at[ready]
        rows.tick[ready, here] = tick
        done[key[ready, here]] = tick
        at[ready] += 1
    if (at < number).any():
        raise ValueError("the stages wait for each other in a cycle")
    return Columns(*(column.ravel() for column in rows))


def _in_turns(empty: Schedule) -> Columns:
    """Returns the rows of a program whose stages all run one loop.

    GPipe's backward mirrors its forward, as in a differentiated loop. In a turn of
    1F1B, a stage computes a forward and then a backward, if it has one of each: forward
    ``m`` in turn ``m + stage``, backward ``m`` in turn ``m + 2 (stages - 1) - stage``.
    """
    stages, count = empty.num_stages, empty.num_micro_batches
    grid = np.indices((2, stages, count)).reshape(3, -1)
    action, stage, index = grid
    if empty.name == "gpipe-lockstep":
        forward = index + stage
        backward = 2 * (count + stages - 1) - 1 - forward
    else:
        forward = 2 * (index + stage)
        backward = 2 * (index + 2 * (stages - 1) - stage) + 1
    tick = np.where(action == 0, forward, backward)
    return Columns(tick, stage, *_parts(empty, action, index), action)
