"""Assigns tables to ranks: greedily, and exactly by an integer program.

The greedy assignment puts the largest shard first, on the emptiest rank. Each rank
takes at most ⌈shards / ranks⌉ shards, as an exchange is padded to the fullest rank.
Without this limit, one rank could get nearly all small tables. The largest allowed load
of a shard sets how finely tables are divided; several are tried. Then shards move or
swap while the most loaded rank gains.

In the program, binary variables choose one way to store each item, and integers count
its shards in each group of ranks. The program minimises the largest load. Memory of
each rank and of its host, and the total number of shards are limited. If the user fixed
no rank, the shards of each rank are limited too, and equal ranks are sorted by load.
Without this order, the search would try each division in every order of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from whalejax.planner.tables.storage_options import (
    Item,
    StorageOption,
    rank_groups,
    times_chosen,
)
from whalejax.planner.tables.table import Ranks


if TYPE_CHECKING:
    from scipy import optimize


_LARGEST_SHARDS: Final = (math.inf, 1.0, 0.7, 0.5, 0.35, 0.25, 0.125, 1 / 16)
_FEW_LARGEST_SHARDS: Final = (math.inf, 0.5, 0.25)
_MANY_ITEMS: Final = 200
_MOST_EXCHANGES: Final = 400
_MOST_REFINEMENTS: Final = 24
_MOST_FINER: Final = 6
_POWER: Final = 16
_SAME: Final = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Chosen way of every item, and the ranks of its shards.

    Attributes:
        ways: Index of the chosen way of each item.
        ranks: Ranks of each item's shards, in order.
    """

    ways: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]


class Scale:
    """Converts loads to multiples of an even share, so that measures are comparable.

    Attributes:
        mean: Smallest possible mean load of a rank, by measure.
        bound: Smallest possible largest load of a rank, divided by ``mean``: 1, or the
            smallest shard of the least divisible table.
    """

    def __init__(self, items: Sequence[Item], ranks: Ranks) -> None:
        totals = [
            [np.multiply(way.loads, holders(way, ranks)) for way in item.ways]
            for item in items
        ]
        least = np.sum([np.min(each, axis=0) for each in totals], axis=0)
        self.mean = np.maximum(least / ranks.count, 1e-300)
        smallest = [min(self.largest(way) for way in item.ways) for item in items]
        self.bound = max(1.0, *smallest)

    def largest(self, way: StorageOption) -> float:
        """Returns a shard's largest load over the measures, divided by the mean."""
        return float(np.max(np.divide(way.loads, self.mean)))


def holders(way: StorageOption, ranks: Ranks) -> int:
    """Returns the number of shards over all ranks, with each replica as one."""
    return ranks.count if way.split == "replicate" else way.shards


def slot_limit(ways: Sequence[StorageOption], ranks: Ranks) -> int:
    """Returns the largest number of shards of one rank: ⌈shards / ranks⌉."""
    return math.ceil(sum(way.shards * way.slots for way in ways) / ranks.count)


def largest_load(
    items: Sequence[Item], assignment: Assignment, ranks: Ranks, scale: Scale
) -> float:
    """Returns the load of the most loaded rank, divided by the smallest mean."""
    return float(np.max(rank_loads(items, assignment, ranks, scale)))


def rank_loads(
    items: Sequence[Item], assignment: Assignment, ranks: Ranks, scale: Scale
) -> np.ndarray:
    """Returns the loads ``[ranks, measures]``, divided by the smallest mean."""
    loads = np.zeros((ranks.count, len(scale.mean)))
    for item, way, held in zip(items, assignment.ways, assignment.ranks, strict=True):
        np.add.at(loads, list(held), item.ways[way].loads / scale.mean)
    return loads


def assign(
    items: Sequence[Item], ranks: Ranks, scale: Scale, most_shards: int
) -> Assignment | None:
    """Returns the best of several greedy assignments, or None if none fits in memory.

    Args:
        items: Items to place, with their possible ways.
        ranks: Devices.
        scale: Conversion of loads.
        most_shards: Largest total number of shards.
    """
    search = _Search(items, ranks, scale, most_shards)
    many = len(items) > _MANY_ITEMS
    for largest in _FEW_LARGEST_SHARDS if many else _LARGEST_SHARDS:
        search.attempt(tuple(_way_below(i, largest, ranks, scale) for i in items))
        if search.load <= scale.bound * (1 + 1e-6):
            break
    if not many:
        search.refine()
    return search.best


class _Search:
    def __init__(
        self, items: Sequence[Item], ranks: Ranks, scale: Scale, most_shards: int
    ) -> None:
        self.items, self.ranks, self.scale = items, ranks, scale
        self.most_shards = most_shards
        self.tried: set[tuple[int, ...]] = set()
        self.best: Assignment | None = None
        self.load = math.inf
        self.quality = (math.inf, math.inf, 0)

    def attempt(self, ways: tuple[int, ...]) -> bool:
        """Assigns the shards of some ways; returns whether that is the best."""
        chosen = [item.ways[way] for item, way in zip(self.items, ways, strict=True)]
        shards = sum(way.shards * way.slots for way in chosen)
        if ways in self.tried or shards > self.most_shards:
            return False
        self.tried.add(ways)
        for by_memory in (False, True):
            filled = _Filling(self.items, chosen, self.ranks, self.scale).run(by_memory)
            if filled is not None:
                break
        if filled is None:
            return False
        found = Assignment(ways=ways, ranks=filled)
        loads = rank_loads(self.items, found, self.ranks, self.scale).max(1)
        load = float(loads.max())
        # If several ranks have the largest load, fewer such ranks are better.
        others = float(np.mean((loads / load) ** _POWER))
        quality = (round(load, 6), round(others, 6), shards)
        if quality >= self.quality:
            return False
        self.best, self.load, self.quality = found, load, quality
        return True

    def refine(self) -> None:
        """Divides tables of the most loaded rank further while that rank gains."""
        for _ in range(_MOST_REFINEMENTS):
            if self.best is None or self.load <= self.scale.bound * (1 + 1e-6):
                return
            ways = self.best.ways
            if not any(
                self.attempt((*ways[:number], way, *ways[number + 1 :]))
                for number, way in self._finer(self.best)
            ):
                return

    def _finer(self, best: Assignment) -> list[tuple[int, int]]:
        """Returns (item, next finer way) for the most loaded rank's largest shards."""
        loads = rank_loads(self.items, best, self.ranks, self.scale)
        rank, measure = np.unravel_index(np.argmax(loads), loads.shape)
        finer = []
        for number, held in enumerate(best.ranks):
            item, now = self.items[number], self.items[number].ways[best.ways[number]]
            smaller = [
                (w, way)
                for w, way in enumerate(item.ways)
                if way.loads[measure] < now.loads[measure] * (1 - 1e-9)
            ]
            if int(rank) in held and smaller:
                size = now.loads[measure] / self.scale.mean[measure]

                def total(pair: tuple[int, StorageOption]) -> tuple[float, int]:
                    each = np.sum(np.divide(pair[1].loads, self.scale.mean))
                    count = holders(pair[1], self.ranks)
                    return round(float(each) * count, 9), pair[1].shards

                finer += [(-size, number, w) for w, _ in sorted(smaller, key=total)[:2]]
        return [(number, way) for _, number, way in sorted(finer)[:_MOST_FINER]]


def _way_below(item: Item, largest: float, ranks: Ranks, scale: Scale) -> int:
    """Returns the cheapest way with shards below a load, or else with the smallest."""

    def rank(number: int) -> tuple[float, float, float, int]:
        way = item.ways[number]
        load = scale.largest(way)
        total = float(np.sum(np.divide(way.loads, scale.mean))) * holders(way, ranks)
        room = max(0.0, way.memory_bytes - ranks.memory_bytes)
        over = 0.0 if load <= largest * (1 + _SAME) else load
        return room, over, round(total, 9), way.shards * way.slots

    return min(range(len(item.ways)), key=rank)


class _Filling:
    def __init__(
        self,
        items: Sequence[Item],
        ways: Sequence[StorageOption],
        ranks: Ranks,
        scale: Scale,
    ) -> None:
        self.items, self.ways, self.ranks = items, ways, ranks
        self.limit = slot_limit(ways, ranks)
        self.loads = np.zeros((ranks.count, len(scale.mean)))
        self.slots = np.zeros(ranks.count, int)
        self.memory = np.zeros(ranks.count)
        self.hosts = np.zeros(ranks.count)
        self.shard_loads = [np.divide(way.loads, scale.mean) for way in ways]
        self.held: list[list[int]] = [[] for _ in items]

    def run(self, by_memory: bool) -> tuple[tuple[int, ...], ...] | None:
        """Returns the ranks of each item's shards, or None if the shards do not fit."""
        room = self.ranks.memory_bytes or 1.0

        def rank(number: int) -> tuple[bool, float, int]:
            way = self.ways[number]
            alone = times_chosen(way) == 1 and way.shards > 1
            largest = float(np.max(self.shard_loads[number]))
            size = way.memory_bytes / room if by_memory else largest
            return not alone, -size, number

        for number in sorted(range(len(self.items)), key=rank):
            if not self._place(number):
                return None
        self._improve()
        return tuple(tuple(held) for held in self.held)

    def _place(self, number: int) -> bool:
        way, fixed = self.ways[number], self.items[number].rank
        groups = np.array([list(g) for g in rank_groups(way, self.ranks, fixed)])
        for _ in range(times_chosen(way)):
            loads = (self.loads + self.shard_loads[number]).max(1)[groups].max(1)
            total = self.loads.sum(1)[groups].sum(1)
            full = (self.slots[groups] + way.slots > self.limit).any(1)
            over = self.memory[groups] + way.memory_bytes > self.ranks.memory_bytes
            hosted = self.hosts[groups] + way.host_bytes > self.ranks.host_bytes
            bad = over.any(1) | (hosted.any(1) if way.host_bytes else False)
            if fixed is None:
                bad |= full
            if bad.all():
                return False
            order = np.lexsort((total, np.where(bad, np.inf, loads)))
            for rank in groups[order[0]]:
                self._add(number, int(rank), 1)
        return True

    def _add(self, number: int, rank: int, sign: int) -> None:
        way = self.ways[number]
        self.loads[rank] += sign * self.shard_loads[number]
        self.slots[rank] += sign * way.slots
        self.memory[rank] += sign * way.memory_bytes
        self.hosts[rank] += sign * way.host_bytes
        if sign > 0:
            self.held[number].append(rank)
        else:
            self.held[number].remove(rank)

    def _improve(self) -> None:
        movable = [
            number
            for number, (item, way) in enumerate(
                zip(self.items, self.ways, strict=True)
            )
            if item.rank is None and way.split not in ("replicate", "node_rows")
        ]
        for _ in range(_MOST_EXCHANGES):
            busiest = int(np.argmax(self.loads.max(1)))
            change = self._best_change(busiest, movable)
            if change is None:
                return
            number, other, back = change
            self._add(number, busiest, -1)
            if back is not None:
                self._add(back, other, -1)
                self._add(back, busiest, 1)
            self._add(number, other, 1)

    def _best_change(
        self, busiest: int, movable: Sequence[int]
    ) -> tuple[int, int, int | None] | None:
        """Returns (shard to move, its new rank, shard to move back or None)."""
        here = [n for n in movable if busiest in self.held[n]]
        there = [(n, r) for n in movable for r in set(self.held[n]) if r != busiest]
        free = [(None, r) for r in range(self.ranks.count) if r != busiest]
        if not here or not free:
            return None
        partners: list[tuple[int | None, int]] = [*free, *there]
        ranks = np.array([r for _, r in partners])
        none = np.zeros(self.loads.shape[1])
        come = np.array(
            [none if n is None else self.shard_loads[n] for n, _ in partners]
        )
        sizes = np.array([_sizes(n, self.ways) for n, _ in partners])
        before = self.loads[busiest].max()
        best: tuple[float, tuple[int, int, int | None]] | None = None
        for number in here:
            goes, size = self.shard_loads[number], _sizes(number, self.ways)
            at_other = (self.loads[ranks] + goes - come).max(1)
            at_busiest = (self.loads[busiest] - goes + come).max(1)
            worst = np.maximum(at_other, at_busiest)
            grown = size - sizes  # slots, memory, host memory
            state = np.stack([self.slots, self.memory, self.hosts], 1)
            most = (self.limit, self.ranks.memory_bytes, self.ranks.host_bytes)
            over = (state[ranks] + grown > np.maximum(most, state[ranks])).any(1)
            over |= (state[busiest] - grown > np.maximum(most, state[busiest])).any(1)
            worst = np.where(over, np.inf, worst)
            index = int(np.argmin(worst))
            least = before - 1e-9 if best is None else best[0]
            if worst[index] < least:
                back, other = partners[index]
                best = float(worst[index]), (number, other, back)
        return None if best is None else best[1]


def _sizes(number: int | None, ways: Sequence[StorageOption]) -> np.ndarray:
    if number is None:
        return np.zeros(3)
    way = ways[number]
    return np.array([way.slots, way.memory_bytes, way.host_bytes])


_TOTAL_WEIGHT: Final = 2e-5
"""Weight of the mean load relative to the largest load; it breaks ties."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """Result of the integer program.

    Attributes:
        assignment: Best assignment, or None if none was found.
        bound: Lower bound on the largest load, divided by the mean.
        is_optimal: Whether the search finished, so that no assignment is better.
    """

    assignment: Assignment | None
    bound: float
    is_optimal: bool


@dataclass(frozen=True, slots=True)
class _Column:
    """Variable of the program: how often a way of an item uses a group of ranks."""

    item: int
    way: int
    ranks: tuple[int, ...]


def _totals(
    items: Sequence[Item], ranks: Ranks, scale: Scale, columns: Sequence[_Column]
) -> list[float]:
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
        from scipy import optimize, sparse  # The import takes a third of a second.

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
    """Finds the best assignment by an integer program.

    Args:
        items: Items to place, with their possible ways.
        ranks: Devices.
        scale: Conversion of loads.
        most_shards: Largest total number of shards.
        at_most: Upper bound on the largest load from a known assignment, or None.
        node_limit: Number of nodes of the search tree after which the search stops.
        gap: Gap to the bound, as a fraction, at which the search stops.
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
            continue  # Fixed ranks may exceed the limit and are not equal to others.
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
