"""Chooses which tables are in CPU processes, and which on the dense part's devices.

A table in a process takes time there and for messages. A table on the devices of the
dense part takes time of these, and its updates are never late. Let S be the tables in n
processes, and let lookups lack at most s updates. A step then takes

    max(a(S) / n, w(S), d(S), (a(S) / n + w(S) + d(S)) / (s + 1)),

where a, w and d are sums over tables of seconds in processes, for messages and on
devices. So for each n, an integer program finds the best choice. Memory of both
sections is limited.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from whalejax.meshes.units import count_text, gigabytes, milliseconds
from whalejax.planner.plan_errors import NothingFits
from whalejax.planner.tables.place import HOST_SPLITS
from whalejax.planner.tables.sections import (
    ENOUGH,
    SectionTimes,
    process_seconds,
    wire_latency,
)
from whalejax.planner.tables.storage_options import SPLITS, list_ways
from whalejax.planner.tables.table import Ranks, Table


_ON_DEVICES: Final = tuple(split for split in SPLITS if split not in HOST_SPLITS)
_NODES: Final = 200
_GAP: Final = 1e-4
_CHOSEN: Final = "which fits and makes the shorter step"
_UNUSED: Final = "as the dense part does not use all of its devices"
_TOTAL_WEIGHT: Final = 1e-3
"""Weight of the total work relative to the step time; it breaks ties."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableCost:
    """Seconds per step of one table in either section.

    Attributes:
        name: Name of the table.
        in_processes: Whether the table is in CPU processes.
        is_fixed: Whether there is no choice, for instance because the user fixed it.
        sparse_seconds: Seconds of lookups and updates, if one process does all.
        wire_seconds: Seconds of messages with ids, vectors and gradients.
        dense_seconds: Seconds of lookups, exchange and updates on the devices, evenly
            divided; 0 if devices cannot store tables.
        nbytes: Bytes of the table and its optimizer state.
    """

    name: str
    in_processes: bool
    is_fixed: bool
    sparse_seconds: float
    wire_seconds: float
    dense_seconds: float
    nbytes: int

    def __str__(self) -> str:
        times = (
            f"in one process a step takes {milliseconds(self.sparse_seconds)} for it, "
            f"and its messages {milliseconds(self.wire_seconds)}"
        )
        if not self.dense_seconds:
            return f"in processes of CPUs, {_UNUSED}: {times}"
        chosen = "as you fixed it" if self.is_fixed else _CHOSEN
        here = "in processes of CPUs" if self.in_processes else "beside the dense part"
        return (
            f"{here}, {chosen}: {times}, on the devices of the dense part "
            f"{milliseconds(self.dense_seconds)}"
        )


def table_costs(
    tables: Sequence[Table],
    processes: Ranks,
    devices: Ranks | None,
    batch_size: int,
    fixed: Collection[str] | None,
) -> tuple[TableCost, ...]:
    """Returns the predicted seconds of each table in either section.

    Args:
        tables: All tables.
        processes: Processes that compute on CPUs.
        devices: Devices of the dense part; None if they cannot store tables.
        batch_size: Number of samples of a global batch.
        fixed: Names of the tables in processes if the user fixed them, else None.
    """
    found = []
    for table in tables:
        sparse, wire = process_seconds(table, batch_size, processes.read_seconds)
        found.append(
            TableCost(
                name=table.name,
                in_processes=True if fixed is None else table.name in fixed,
                is_fixed=fixed is not None or devices is None,
                sparse_seconds=sparse,
                wire_seconds=wire,
                dense_seconds=_device_seconds(table, devices, batch_size),
                nbytes=table.nbytes,
            )
        )
    return tuple(found)


def _device_seconds(table: Table, devices: Ranks | None, batch_size: int) -> float:
    """Returns the least load of a table over all devices, per device."""
    if devices is None:
        return 0.0
    ways = list_ways(
        table, devices, batch_size=batch_size, objective="time", splits=_ON_DEVICES
    )
    held = (
        way.loads[0] * (devices.count if way.split == "replicate" else way.shards)
        for way in ways
    )
    return min(held) / devices.count


def times_of(
    costs: Sequence[TableCost], dense_seconds: float, batch_seconds: float = 0.0
) -> SectionTimes:
    """Returns the seconds of both sections, with each table where its cost says.

    Args:
        costs: Costs of all tables.
        dense_seconds: Seconds of the dense part without tables.
        batch_seconds: Seconds in which a process makes a batch; default: 0.
    """
    inside = [cost for cost in costs if cost.in_processes]
    beside = [cost for cost in costs if not cost.in_processes]
    return SectionTimes(
        sparse_seconds=sum(cost.sparse_seconds for cost in inside),
        wire_seconds=sum(cost.wire_seconds for cost in inside) + wire_latency(inside),
        dense_seconds=dense_seconds + sum(cost.dense_seconds for cost in beside),
        batch_seconds=batch_seconds,
        tables=tuple(cost.name for cost in inside),
    )


def with_measured(
    costs: Sequence[TableCost], times: SectionTimes
) -> tuple[tuple[TableCost, ...], float]:
    """Scales predicted costs to measured times of both sections.

    The second result is the seconds of the dense part without tables.

    Args:
        costs: Predicted costs of all tables.
        times: Measured times, with the names of the tables that were in processes.
    """
    names = {c.name for c in costs} if times.tables is None else set(times.tables)
    then = [dataclasses.replace(c, in_processes=c.name in names) for c in costs]
    before = times_of(then, 0.0)
    sparse = times.sparse_seconds / max(before.sparse_seconds, 1e-300)
    wire = max(0.0, times.wire_seconds - wire_latency(names))
    wire /= max(before.wire_seconds - wire_latency(names), 1e-300)
    scaled = [
        dataclasses.replace(
            cost,
            sparse_seconds=cost.sparse_seconds * sparse,
            wire_seconds=cost.wire_seconds * wire,
        )
        for cost in costs
    ]
    return tuple(scaled), max(0.0, times.dense_seconds - before.dense_seconds)


def choose_cut(
    costs: Sequence[TableCost],
    groups: Sequence[Sequence[int]],
    base: SectionTimes,
    *,
    most_processes: int,
    staleness: int,
    process_bytes: float,
    device_bytes: float,
) -> tuple[TableCost, ...]:
    """Chooses the section of each table that makes the step shortest.

    Among equally short steps, it chooses the fewest processes.

    Args:
        costs: Costs of all tables; fixed tables stay in their section.
        groups: Indices of tables that must be in one section; every table once.
        base: Times of the sections without tables.
        most_processes: Number of available processes.
        staleness: Number of updates that a lookup may lack.
        process_bytes: Memory of one process.
        device_bytes: Total memory for tables on the devices of the dense part.

    Raises:
        NothingFits: Both sections together lack memory for the tables.
    """
    found: dict[int, tuple[float, tuple[TableCost, ...]]] = {}
    size = sum(cost.nbytes for cost in costs)
    for count in range(most_processes + 1):
        rooms = count * process_bytes, device_bytes
        inside = _solve(costs, groups, base, count, staleness, rooms)
        if inside is None:
            continue
        chosen = tuple(
            dataclasses.replace(cost, in_processes=bool(x))
            for cost, x in zip(costs, inside, strict=True)
        )
        times = times_of(chosen, base.dense_seconds, base.batch_seconds)
        # Without processes, the parts of a step run one after the other.
        seconds = (
            times.step_seconds(count, staleness)
            if count
            else times.batch_seconds + times.dense_seconds
        )
        if not count or any(inside):
            found[count] = seconds, chosen
    if not found:
        room = most_processes * process_bytes + device_bytes
        short = size - room
        lack = f"{gigabytes(short)} short" if short > 0 else "no division of them fits"
        raise NothingFits(
            f"{count_text(len(costs), 'table')} of {gigabytes(size)} with optimizer "
            f"state fit into neither section: CPU processes ({most_processes}) and "
            f"the devices of the dense part have {gigabytes(room)} for them: {lack}. "
            "Use more of either, or fix fewer tables by in_processes",
            lacks_bytes=int(max(0, short)),
            of_bytes=int(room),
            nearest="tables in two sections",
        )
    best = min(seconds for seconds, _ in found.values())
    return next(
        chosen for seconds, chosen in found.values() if seconds <= best * ENOUGH
    )


def _solve(
    costs: Sequence[TableCost],
    groups: Sequence[Sequence[int]],
    base: SectionTimes,
    count: int,
    staleness: int,
    rooms: tuple[float, float],
) -> np.ndarray | None:
    """Returns whether each table is in one of the processes; None if nothing fits."""
    if not count:
        is_held = not any(cost.in_processes and cost.is_fixed for cost in costs)
        fits = sum(cost.nbytes for cost in costs) <= rooms[1]
        return np.zeros(len(costs), bool) if is_held and fits else None
    from scipy import optimize  # The import takes a third of a second.

    names = ("sparse_seconds", "wire_seconds", "dense_seconds", "nbytes")
    each = np.array([[getattr(cost, name) for name in names] for cost in costs], float)
    sums = np.array([each[list(group)].sum(0) for group in groups])
    sparse, wire, dense, size = sums.T
    fixed = [[costs[n] for n in group if costs[n].is_fixed] for group in groups]
    lower = [float(any(c.in_processes for c in held)) for held in fixed]
    upper = [float(all(c.in_processes for c in held)) for held in fixed]
    if any(least > most for least, most in zip(lower, upper, strict=True)):
        return None
    scale = max(base.dense_seconds + dense.sum(), sparse.sum() / count, wire.sum())
    scale = max(scale, 1e-300)
    # The variables are the step time, then for each group whether it is in processes.
    constant = np.array(
        [
            base.batch_seconds / count,
            base.wire_seconds,
            base.dense_seconds + dense.sum(),
        ]
    )
    rows = np.array([sparse / count, wire, -dense])
    rows = np.vstack([rows, rows.sum(0)]) / scale
    constant = np.append(constant, constant.sum()) / scale
    step = np.array([1.0, 1.0, 1.0, staleness + 1.0])
    limits = optimize.LinearConstraint(
        np.column_stack([-step, rows]), -np.inf, -constant
    )
    memory = optimize.LinearConstraint(
        np.concatenate([[0.0], size])[None] / max(size.sum(), 1.0),
        (size.sum() - rooms[1]) / max(size.sum(), 1.0),
        rooms[0] / max(size.sum(), 1.0),
    )
    result = optimize.milp(
        np.concatenate([[1.0], _TOTAL_WEIGHT * rows[3]]),
        integrality=np.array([0, *[1] * len(groups)]),
        bounds=optimize.Bounds([0.0, *lower], [np.inf, *upper]),
        constraints=[limits, memory],
        options={"node_limit": _NODES, "mip_rel_gap": _GAP},
    )
    if result.x is None:
        return None
    inside = np.zeros(len(costs), bool)
    for group, value in zip(groups, result.x[1:], strict=True):
        inside[list(group)] = value > 0.5
    return inside
