"""Failure traces: reads CSV files of node failures and returns, and replays them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from whalejax.meshes.errors import Problems, WhaleError
from whalejax.meshes.read_file import numbered_rows, open_trace


COLUMNS: Final = ("time", "node", "event")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Failure or return of a node; ``time`` is in seconds since the trace began."""

    time: float
    node: str
    is_down: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Costs of a failure; all times are seconds.

    Attributes:
        nodes: Number of nodes of the run.
        step_seconds: Duration of an undisturbed step.
        interval: Seconds of work between snapshots, for the policy ``"restart"``.
        snapshot: Seconds that a snapshot takes.
        restart: Seconds from a process's start to its first step.
        recovery: Seconds that all nodes of an elastic run lose when one fails or joins.
        speeds: Relative step speed by number of running nodes, from 0; 1 if all run.
    """

    nodes: int
    step_seconds: float
    interval: float
    snapshot: float
    restart: float
    recovery: float
    speeds: tuple[float, ...]


def read_trace(path: Path) -> list[Event]:
    """Returns the events of a CSV file, ordered by time.

    Args:
        path: Path of a file with the columns ``time`` (seconds), ``node`` and ``event``
            (``down`` or ``up``).

    Raises:
        WhaleError: The file cannot be read; lists every wrong line.
    """
    reader = open_trace(path)
    missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise WhaleError(
            f"trace {path} has no column {', '.join(missing)}; expected "
            f"{', '.join(COLUMNS)} in its first line"
        )
    trace: list[Event] = []
    down: set[str] = set()
    with Problems(f"trace {path}") as problems:
        for number, row in numbered_rows(reader, problems):
            event = _event(row, number, problems)
            if event is None:
                continue
            if trace and event.time < trace[-1].time:
                problems.add(f"line {number}: time {event.time:g} is before the last")
            if event.is_down == (event.node in down):
                word = "down" if event.is_down else "up"
                problems.add(f"line {number}: node {event.node!r} is {word} already")
            (down.add if event.is_down else down.discard)(event.node)
            trace.append(event)
        if not trace and not problems:
            problems.add("it holds no event")
    return trace


def _event(row: dict[str, str | None], number: int, problems: Problems) -> Event | None:
    node, what = row["node"] or "", row["event"] or ""
    try:
        time = float(row["time"] or "")
    except ValueError:
        time = math.nan
    if not 0 <= time < 1e12:
        problems.add(
            f"line {number}: time is {str(row['time'])[:40]!r}; expected seconds"
        )
    elif what not in ("down", "up"):
        problems.add(f"line {number}: event is {what[:40]!r}; expected down or up")
    elif not node:
        problems.add(f"line {number}: node is empty; expected a name")
    else:
        return Event(time=time, node=node, is_down=what == "down")
    return None


def nodes_of(events: Sequence[Event]) -> list[str]:
    """Returns the names of a trace's nodes in natural order ("n2" before "n10").

    >>> names = ["n10", "n2", "n10"]
    >>> nodes_of([Event(time=0.0, node=n, is_down=True) for n in names])
    ['n2', 'n10']
    """

    def key(name: str) -> list[tuple[int, str]]:
        parts = re.findall(r"[0-9]{1,18}|[^0-9]+|[0-9]+", name)
        return [(int(p), "") if p.isascii() and p.isdigit() else (-1, p) for p in parts]

    return sorted({event.node for event in events}, key=key)


def simulated(
    policy: Policy, events: Sequence[Event], seconds: float, *, how: str, spares: int
) -> float:
    """Returns the goodput over a trace: useful time divided by wall time.

    Args:
        policy: Costs of failures.
        events: Events ordered by time; nodes without events never fail.
        seconds: Length of the trace in seconds.
        how: Recovery policy, ``"restart"`` or ``"elastic"``.
        spares: Number of spare nodes in addition to the nodes of the run.
    """
    if seconds <= 0:
        return 1.0
    changes = _changes(policy, events, seconds)
    if how == "restart":
        spans = _spans(changes, seconds, policy.nodes + spares)
        return _restarted(policy, spans) / seconds
    names = nodes_of(events)
    return _elastic(policy, changes, seconds, names, spares) / seconds


def _changes(
    policy: Policy, events: Sequence[Event], seconds: float
) -> list[tuple[float, int, str]]:
    """Returns failures and restarts by time, as (seconds, −1 or 1, node)."""
    changes: list[tuple[float, int, str]] = []
    back: dict[str, tuple[float, int, str]] = {}
    for event in events:
        if event.is_down:
            planned = back.pop(event.node, None)
            if planned is not None and planned[0] > event.time:
                changes.remove(planned)  # The node failed again before its restart.
                continue
            changes.append((event.time, -1, event.node))
        else:
            back[event.node] = (event.time + policy.restart, 1, event.node)
            changes.append(back[event.node])
    return sorted(change for change in changes if change[0] <= seconds)


def _spans(
    changes: Sequence[tuple[float, int, str]], seconds: float, everyone: int
) -> list[tuple[float, float, int]]:
    spans, now, count = [], 0.0, everyone
    for time, change, _ in changes:
        if time > now:
            spans.append((now, time, count))
        now, count = time, count + change
    if seconds > now:
        spans.append((now, seconds, count))
    return spans


def _restarted(policy: Policy, spans: Sequence[tuple[float, float, int]]) -> float:
    useful, cycle = 0.0, policy.interval + policy.snapshot
    merged: list[list[float]] = []
    for begin, end, count in spans:
        if count < policy.nodes:
            continue
        if merged and merged[-1][1] == begin:
            merged[-1][1] = end
        else:
            merged.append([begin, end])
    last = spans[-1][1] if spans else 0.0
    for begin, end in merged:
        whole, rest = divmod(end - begin, cycle)
        useful += whole * policy.interval
        if end == last:  # The trace ends, so the last interval is not lost.
            useful += min(rest, policy.interval)
    return useful


def _elastic(
    policy: Policy,
    changes: Sequence[tuple[float, int, str]],
    seconds: float,
    names: Sequence[str],
    spares: int,
) -> float:
    """Returns the useful seconds if other nodes continue without a failed one."""
    takes_part, count = set(names[: policy.nodes]), policy.nodes
    standing_by = [*names[policy.nodes :]]
    standing_by += [""] * (spares - len(standing_by))
    useful = now = stall = 0.0
    for time, change, node in [*changes, (seconds, 0, "")]:
        stalled = min(stall, time - now)
        useful += (time - now - stalled) * policy.speeds[count]
        stall, now = stall - stalled, time
        if change > 0 and count < policy.nodes:
            takes_part.add(node)
            count, stall = count + 1, stall + policy.recovery
        elif change > 0:
            standing_by.append(node)
        elif change < 0 and node in standing_by:
            standing_by.remove(node)
        elif change < 0:
            takes_part.remove(node)
            stall += policy.recovery
            if standing_by:
                takes_part.add(standing_by.pop(0))
            else:
                count -= 1
    return useful
