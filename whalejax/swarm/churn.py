"""Churn traces: lists of peers that join a swarm, leave it, die or change speed.

A trace has events with times in seconds. It is stored as CSV, or drawn from a seed.
Simulations and live runs can repeat it.
"""

from __future__ import annotations

import csv
import io
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from whalejax.meshes.errors import Problems, WhaleError
from whalejax.meshes.read_file import numbered_rows, open_trace


COLUMNS: Final = (
    "time",
    "event",
    "peer",
    "speed",
    "up_bytes_per_second",
    "down_bytes_per_second",
    "latency_seconds",
)


class PeerEventKind(StrEnum):
    """Kinds of events of a peer.

    - ``JOIN``: It joins.
    - ``LEAVE``: It finishes its calls, and leaves.
    - ``KILL``: It dies, and its connections break.
    - ``STOP``: It becomes silent, and its calls time out.
    - ``SPEED``: Its speed changes.
    """

    JOIN = "join"
    LEAVE = "leave"
    KILL = "kill"
    STOP = "stop"
    SPEED = "speed"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLink:
    """Link between a peer and all others.

    Attributes:
        up_bytes_per_second: Maximum rate of sending.
        down_bytes_per_second: Maximum rate of receiving.
        latency_seconds: One-way latency.
    """

    up_bytes_per_second: float = math.inf
    down_bytes_per_second: float = math.inf
    latency_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChurnEvent:
    """Event of one peer.

    Attributes:
        time: Seconds from the start of the trace.
        event: Kind of the event.
        peer: Name of the peer.
        speed: Speed after a join or change of speed, relative to the peer for which the
            stages' seconds are given.
        link: Link of a joining peer.
    """

    time: float
    event: PeerEventKind
    peer: str
    speed: float = 1.0
    link: PeerLink = PeerLink()


@dataclass(frozen=True, slots=True, kw_only=True)
class Churn:
    """Random distribution of traces, with exponential lifetimes and gaps of joins.

    Attributes:
        peers: Number of peers at the start.
        lifetime_seconds: Mean lifetime of a peer.
        join_seconds: Mean time between joins; infinite without joins.
        seconds: Length of the trace.
        speeds: Speeds of peers, drawn with equal probability.
        silent: Fraction of deaths that are silent; other deaths break connections.
        link: Link of every peer.
    """

    peers: int
    lifetime_seconds: float
    join_seconds: float
    seconds: float
    speeds: tuple[float, ...] = (1.0,)
    silent: float = 0.0
    link: PeerLink = PeerLink()


def draw(churn: Churn, seed: int) -> tuple[ChurnEvent, ...]:
    """Draws a trace; equal seeds give equal traces.

    Args:
        churn: Distribution to draw from.
        seed: Seed of the random numbers.

    Example:
        >>> churn = Churn(peers=2, lifetime_seconds=50.0, join_seconds=40.0,
        ...               seconds=12.0)
        >>> [(round(e.time), str(e.event), e.peer) for e in draw(churn, seed=1)]
        [(0, 'join', 'p0'), (0, 'join', 'p1'), (6, 'join', 'p2'), (11, 'kill', 'p2')]
    """
    random_numbers = random.Random(seed)
    births = [0.0] * churn.peers
    if math.isfinite(churn.join_seconds):
        now = random_numbers.expovariate(1 / churn.join_seconds)
        while now < churn.seconds:
            births.append(now)
            now += random_numbers.expovariate(1 / churn.join_seconds)
    events = []
    for number, born in enumerate(births):
        peer, speed = f"p{number}", random_numbers.choice(churn.speeds)
        events.append(
            ChurnEvent(
                time=born,
                event=PeerEventKind.JOIN,
                peer=peer,
                speed=speed,
                link=churn.link,
            )
        )
        died = born + random_numbers.expovariate(1 / churn.lifetime_seconds)
        is_silent = random_numbers.random() < churn.silent
        if died < churn.seconds:
            how = PeerEventKind.STOP if is_silent else PeerEventKind.KILL
            events.append(ChurnEvent(time=died, event=how, peer=peer))
    return tuple(sorted(events, key=lambda event: event.time))


def to_csv(events: Iterable[ChurnEvent]) -> str:
    """Returns a trace as CSV, with ``COLUMNS`` as the first line."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for event in events:
        link = event.link
        writer.writerow(
            (
                repr(event.time),
                str(event.event),
                event.peer,
                repr(event.speed),
                repr(link.up_bytes_per_second),
                repr(link.down_bytes_per_second),
                repr(link.latency_seconds),
            )
        )
    return text.getvalue()


def read_csv(path: Path) -> tuple[ChurnEvent, ...]:
    """Returns the trace in a CSV file, in order of time.

    Args:
        path: Path of a file with the columns ``time``, ``event`` and ``peer``. Other
            columns of ``COLUMNS`` may be missing or empty.

    Raises:
        WhaleError: The file cannot be read, or has wrong lines.
    """
    reader = open_trace(path)
    names = reader.fieldnames or ()
    missing = [name for name in COLUMNS[:3] if name not in names]
    unknown = [name for name in names if name not in COLUMNS]
    wrong = [f"lacks {', '.join(missing)}"] if missing else []
    wrong += [f"has the unknown {', '.join(unknown)}"] if unknown else []
    if wrong:
        raise WhaleError(
            f"trace {path}: its first line {' and '.join(wrong)}; expected "
            f"{', '.join(COLUMNS)}, of which the first three must be there"
        )
    events = []
    with Problems(f"trace {path}") as problems:
        for line, row in numbered_rows(reader, problems):
            try:
                events.append(_event(row))
            except (TypeError, ValueError) as error:
                problems.add(f"line {line}: {error}")
    return tuple(sorted(events, key=lambda event: event.time))


def _event(row: dict[str, str | None]) -> ChurnEvent:
    kinds = [str(kind) for kind in PeerEventKind]
    if row["event"] not in kinds:
        raise ValueError(f"event is {row['event']!r}; expected {', '.join(kinds)}")
    if not row["peer"]:
        raise ValueError("peer is empty; give its name")
    return ChurnEvent(
        time=_number(row, "time", 0.0, finite=True),
        event=PeerEventKind(row["event"]),
        peer=row["peer"],
        speed=_number(row, "speed", 1.0, positive=True, finite=True),
        link=PeerLink(
            up_bytes_per_second=_number(
                row, "up_bytes_per_second", math.inf, positive=True
            ),
            down_bytes_per_second=_number(
                row, "down_bytes_per_second", math.inf, positive=True
            ),
            latency_seconds=_number(row, "latency_seconds", 0.0, finite=True),
        ),
    )


def _number(
    row: dict[str, str | None],
    name: str,
    default: float,
    *,
    positive: bool = False,
    finite: bool = False,
) -> float:
    text = row.get(name)
    if not text and name != "time":
        return default
    least = "above 0" if positive else "of at least 0"
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    is_small = value <= 0 if positive else value < 0
    if math.isnan(value) or is_small or (finite and math.isinf(value)):
        raise ValueError(f"{name} is {text!r}; expected a number {least}")
    return value
