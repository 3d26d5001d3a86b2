"""The integer program: chooses ways and ranks together, and bounds the optimum.

Binary variables choose one way, a storage option, for each item. Integers count its
shards in each rank group. The largest load is minimised. Memory of each rank and of its
host, and total shards are limited. If the user fixed no rank, the shards of each rank
are limited too, and interchangeable ranks are sorted by load: without this, the search
would try each division in every order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from whalejax.planner.tables.greedy import Assignment, Scale
from whalejax.planner.tables.ranks import Ranks
from whalejax.planner.tables.storage_options import Item, rank_groups, times_chosen


if TYPE_CHECKING:
    from scipy import optimize


_TOTAL_WEIGHT: Final = 2e-5
"""Weight of the mean load relative to the largest load; it breaks ties."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """Solution of the integer program.

    Attributes:
        assignment: Best assignment, or None if none was found.
        bound: Lower bound on the largest load, in units of the mean.
        is_optimal: Whether the search finished.
    """

    assignment: Assignment | None
    bound: float
    is_optimal: bool


@dataclass(frozen=True, slots=True)
class _Column:
    """A variable: number of times that a way of an item takes a group of ranks."""

    item: int
    way: int
    ranks: tuple[int, ...]


def _totals(
    items: Sequence[Item], ranks: Ranks, scale: Scale, columns: Sequence[_Column]
) -> list[float]:
    """Returns each choice's part of the mean load, which breaks ties."""
    loads = [
        float(np.sum(items[c.item].ways[c.way].loads / scale.mean)) for c in columns
    ]
    return [
        _TOTAL_WEIGHT * load * len(c.ranks) / ranks.count
        for load, c in zip(loads, columns, strict=True)
    ]


class _Rows:
    def __init__(self) -> None:
        self.entries: list[tuple[int, int, float]] = []
        self.lower: list[float] = []
        self.upper: list[float] = []

    def add(
        self, terms: Sequence[tuple[int, float]], lower: float, upper: float
    ) -> None:
        row = len(self.lower)
        self.entries += [(row, column, value) for column, value in terms if value]
        self.lower.append(lower)
        self.upper.append(upper)

    def constraint(self, columns: int) -> optimize.LinearConstraint:
        rows, cols, values = zip(*self.entries, strict=True)
        shape = (len(self.lower), columns)
        from scipy import optimize, sparse  # take a third of a second

        matrix = sparse.csr_array((values, (rows, cols)), shape=shape)
        return optimize.LinearConstraint(matrix, self.lower, self.upper)


def solve(
    items: Sequence[Item],
    ranks: Ranks,
    scale: Scale,
    *,
    most_shards: int,
    at_most: float | None,
    node_limit: int,
    gap: float,
    time_limit: float,
) -> Solution:
    """Solves the placement as an integer program.

    Args:
        items: Items to place.
        ranks: Devices.
        scale: Units of loads.
        most_shards: Largest total number of shards.
        at_most: Upper bound on the largest load, from a known assignment; or None.
        node_limit: Nodes of the search tree after which the search stops.
        gap: Relative gap to the bound at which the search stops.
        time_limit: Seconds after which the search stops.
    """
    ways = [(i, w) for i, item in enumerate(items) for w in range(len(item.ways))]
    columns = [
        _Column(i, w, tuple(group))
        for i, w in ways
        for group in rank_groups(items[i].ways[w], ranks, items[i].rank)
    ]
    count = 1 + len(ways) + len(columns)
    rows = _rows(items, ranks, scale, ways, columns, most_shards)
    most = [times_chosen(items[c.item].ways[c.way]) for c in columns]
    upper = [math.inf if at_most is None else at_most * (1 + 1e-9)]
    lower = [scale.bound * (1 - 1e-9)]
    from scipy import optimize

    bounds = optimize.Bounds(
        [*lower, *[0] * (count - 1)], [*upper, *[1] * len(ways), *most]
    )
    options = {"node_limit": node_limit, "time_limit": time_limit, "mip_rel_gap": gap}
    result = optimize.milp(
        np.array([1.0, *[0.0] * len(ways), *_totals(items, ranks, scale, columns)]),
        integrality=np.array([0, *[1] * (count - 1)]),
        bounds=bounds,
        constraints=rows.constraint(count),
        options=options,
    )
    dual = getattr(result, "mip_dual_bound", None)
    # In every measure, the mean load is at most the largest load.
    slack = 1 + _TOTAL_WEIGHT * len(scale.mean)
    bound = scale.bound if dual is None else max(scale.bound, float(dual) / slack)
    if result.x is None:
        return Solution(assignment=None, bound=bound, is_optimal=False)
    values = np.rint(result.x).astype(int)
    found = _assignment(items, ways, columns, values[1:])
    return Solution(assignment=found, bound=bound, is_optimal=result.status == 0)


def _rows(
    items: Sequence[Item],
    ranks: Ranks,
    scale: Scale,
    ways: Sequence[tuple[int, int]],
    columns: Sequence[_Column],
    most_shards: int,
) -> _Rows:
    first_way, first = 1, 1 + len(ways)
    index = {pair: first_way + n for n, pair in enumerate(ways)}
    rows = _Rows()
    for i, item in enumerate(items):
        rows.add([(index[i, w], 1.0) for w in range(len(item.ways))], 1, 1)
    by_way: dict[tuple[int, int], list[int]] = {pair: [] for pair in ways}
    at: list[list[tuple[int, _Column]]] = [[] for _ in range(ranks.count)]
    for n, column in enumerate(columns, first):
        by_way[column.item, column.way].append(n)
        for rank in column.ranks:
            at[rank].append((n, column))
    for (i, w), members in by_way.items():
        times = times_chosen(items[i].ways[w])
        rows.add([(index[i, w], -times), *[(n, 1.0) for n in members]], 0, 0)
    slots = [(index[i, w], float(_slots(items[i], w))) for i, w in ways]
    rows.add(slots, 0, most_shards)
    for rank, held in enumerate(at):
        chosen = [(n, items[c.item].ways[c.way], items[c.item].rank) for n, c in held]
        for k, mean in enumerate(scale.mean):
            loads = [(n, way.loads[k] / mean) for n, way, _ in chosen]
            rows.add([(0, -1.0), *loads], -math.inf, 0)
        room = max(ranks.memory_bytes, 1.0)
        rows.add([(n, w.memory_bytes / room) for n, w, _ in chosen], 0, 1)
        host = max(ranks.host_bytes, 1.0)
        rows.add([(n, w.host_bytes / host) for n, w, _ in chosen], 0, 1)
        if any(item.rank is not None for item in items):
            continue  # fixed ranks may exceed the limit, and are not interchangeable
        count = [(n, float(ranks.count * w.slots)) for n, w, _ in chosen]
        rows.add(
            [*count, *[(n, -slot) for n, slot in slots]], -math.inf, ranks.count - 1
        )
        if rank + 1 < ranks.count and ranks.per_node in (1, ranks.count):
            ahead = [(n, w.loads[0] / scale.mean[0]) for n, w, _ in chosen]
            behind = [
                (n, -items[c.item].ways[c.way].loads[0] / scale.mean[0])
                for n, c in at[rank + 1]
            ]
            rows.add([*ahead, *behind], 0, math.inf)
    return rows


def _slots(item: Item, way: int) -> int:
    return item.ways[way].shards * item.ways[way].slots


def _assignment(
    items: Sequence[Item],
    ways: Sequence[tuple[int, int]],
    columns: Sequence[_Column],
    values: np.ndarray,
) -> Assignment:
    chosen = {
        i: w for (i, w), value in zip(ways, values[: len(ways)], strict=True) if value
    }
    held: list[list[int]] = [[] for _ in items]
    for column, value in zip(columns, values[len(ways) :], strict=True):
        for _ in range(int(value)):
            held[column.item] += column.ranks
    return Assignment(
        ways=tuple(chosen[i] for i in range(len(items))),
        ranks=tuple(tuple(each) for each in held),
    )
