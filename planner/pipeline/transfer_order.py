"""Orders the rows of a schedule and their transfers for execution.

All stages share one list. Every process goes through the list in order, runs the rows
of its own stages and takes part in their transfers. So processes never wait for each
other in a cycle.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from whalejax.planner.pipeline.schedules import Action, Key, Schedule, ScheduleRow


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class ScheduledTransfer:
    """Transfer of a micro-batch from one part of the model to another.

    Attributes:
        micro_batch: Number of the micro-batch.
        source, target: Numbers of the sending and the receiving virtual stage.
        action: ``forward`` transfers values, ``backward`` their cotangents.
    """

    micro_batch: int
    source: int
    target: int
    action: Action


def words_of(event: ScheduleRow | ScheduledTransfer) -> str:
    """Returns a row or a transfer as text.

    >>> words_of(ScheduledTransfer(micro_batch=3, source=0, target=1, action="forward"))
    'what part 0 hands part 1 of micro-batch 3, forward'
    """
    if isinstance(event, ScheduleRow):
        return (
            f"{event.action} of micro-batch {event.micro_batch} in stage {event.stage}"
        )
    return (
        f"what part {event.source} hands part {event.target} of micro-batch "
        f"{event.micro_batch}, {event.action}"
    )


def issue_order(
    table: Schedule,
    ahead: Iterable[tuple[int, int]],
    back: Iterable[tuple[int, int]],
    seconds: Mapping[Action, Sequence[float]],
) -> tuple[ScheduleRow | ScheduledTransfer, ...]:
    """Returns all rows and their transfers in a possible order of execution.

    A transfer is where both stages have time for it, if every row takes the given time.
    Elsewhere, devices that run programs in order would wait in the middle of a row. Of
    events that could begin at the same time, transfers come first.

    Args:
        table: Pipeline schedule.
        ahead: Pairs of virtual stages, of which the first sends values to the second.
        back: Pairs of virtual stages, of which the first sends cotangents to the
            second.
        seconds: Seconds of each action on each virtual stage.

    Raises:
        ValueError: Rows and transfers wait for each other in a cycle.
    """
    return _Order(table, ahead, back, seconds).issued()


class _Order:
    def __init__(
        self,
        table: Schedule,
        ahead: Iterable[tuple[int, int]],
        back: Iterable[tuple[int, int]],
        seconds: Mapping[Action, Sequence[float]],
    ) -> None:
        self.table = table
        self.seconds = seconds
        self.targets: dict[tuple[int, Action], list[int]] = defaultdict(list)
        self.awaited: Counter[tuple[int, Action]] = Counter()
        pairs: tuple[tuple[Action, Iterable[tuple[int, int]]], ...] = (
            ("forward", ahead),
            ("backward", back),
        )
        for action, several in pairs:
            for source, target in sorted(set(several)):
                self.targets[source, action].append(target)
                self.awaited[target, action] += 1
        self.rows = [table.of_stage(stage) for stage in range(table.num_stages)]
        self.at = [0] * table.num_stages
        self.free = [0.0] * table.num_stages
        self.arrived: Counter[Key] = Counter()
        self.arrival: dict[Key, float] = defaultdict(float)
        self.pending: list[tuple[float, ScheduledTransfer]] = []
        self.found: list[ScheduleRow | ScheduledTransfer] = []

    def issued(self) -> tuple[ScheduleRow | ScheduledTransfer, ...]:
        while self.pending or any(map(self._next, range(self.table.num_stages))):
            handing = min(self._handings(), default=None)
            row = min(self._rows(), default=None)
            if handing is not None and (row is None or handing[0] <= row[0]):
                self._hand(*handing)
            elif row is not None:
                self._do(*row)
            else:
                raise ValueError("the stages wait for each other in a cycle")
        return tuple(self.found)

    def _next(self, stage: int) -> ScheduleRow | None:
        rows, at = self.rows[stage], self.at[stage]
        return rows[at] if at < len(rows) else None

    def _handings(self) -> list[tuple[float, float, ScheduledTransfer]]:
        stages = self.table.num_stages
        return [
            (
                max(ready, self.free[h.source % stages], self.free[h.target % stages]),
                ready,
                h,
            )
            for ready, h in self.pending
        ]

    def _rows(self) -> list[tuple[float, int]]:
        """Returns the earliest start of each stage's next row with arrived inputs."""
        rows = []
        for stage in range(self.table.num_stages):
            row = self._next(stage)
            if row is None:
                continue
            key = self.table.key(row)
            if self.arrived[key] == self.awaited[key[0], row.action]:
                rows.append((max(self.free[stage], self.arrival[key]), stage))
        return rows

    def _do(self, start: float, stage: int) -> None:
        row = self.rows[stage][self.at[stage]]
        place, micro_batch, action = self.table.key(row)
        self.found.append(row)
        self.at[stage] += 1
        self.free[stage] = end = start + self.seconds[action][place]
        for target in self.targets.get((place, action), ()):
            handing = ScheduledTransfer(
                micro_batch=micro_batch, source=place, target=target, action=action
            )
            if target % self.table.num_stages == stage:
                self._arrive(end, handing)
            else:
                self.pending.append((end, handing))

    def _hand(self, start: float, ready: float, handing: ScheduledTransfer) -> None:
        self.pending.remove((ready, handing))
        for place in (handing.source, handing.target):
            stage = place % self.table.num_stages
            self.free[stage] = max(self.free[stage], start)
        self._arrive(start, handing)

    def _arrive(self, time: float, handing: ScheduledTransfer) -> None:
        self.found.append(handing)
        key = handing.target, handing.micro_batch, handing.action
        self.arrived[key] += 1
        self.arrival[key] = max(self.arrival[key], time)
