"""Assigns tables to ranks greedily: the largest shard first, to the emptiest rank.

Each rank takes at most ⌈shards / ranks⌉ shards, since an exchange is padded to the
fullest rank. If only rows counted, one rank would get nearly all small tables. The
largest allowed load of a shard determines how finely tables are divided; several are
tried. Then shards move or swap while the most loaded rank gains.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from whalejax.planner.tables.ranks import Ranks
from whalejax.planner.tables.storage_options import (
    Item,
    StorageOption,
    rank_groups,
    times_chosen,
)


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
    """Way of every item, and the ranks of its shards.

    Attributes:
        ways: Index of the chosen way of each item.
        ranks: Ranks of each item's shards, in order.
    """

    ways: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]


class Scale:
    """Converts loads to units of an even share, so that measures are comparable.

    Attributes:
        mean: Least possible mean load of a rank, by measure.
        bound: Least possible largest load of a rank, in units of ``mean``: the mean
            itself, or the smallest shard of the least divisible table.
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
        """Returns a shard's largest load over the measures, in units of the mean."""
        return float(np.max(np.divide(way.loads, self.mean)))


def holders(way: StorageOption, ranks: Ranks) -> int:
    """Returns the number of shard loads over all ranks."""
    return ranks.count if way.split == "replicate" else way.shards


def slot_limit(ways: Sequence[StorageOption], ranks: Ranks) -> int:
    """Returns the largest number of shards of one rank: ⌈shards / ranks⌉."""
    return math.ceil(sum(way.shards * way.slots for way in ways) / ranks.count)


def largest_load(
    items: Sequence[Item], assignment: Assignment, ranks: Ranks, scale: Scale
) -> float:
    """Returns the load of the most loaded rank in units of the least mean."""
    return float(np.max(rank_loads(items, assignment, ranks, scale)))


def rank_loads(
    items: Sequence[Item], assignment: Assignment, ranks: Ranks, scale: Scale
) -> np.ndarray:
    """Returns the loads ``[ranks, measures]`` in units of the least mean."""
    loads = np.zeros((ranks.count, len(scale.mean)))
    for item, way, held in zip(items, assignment.ways, assignment.ranks, strict=True):
        np.add.at(loads, list(held), item.ways[way].loads / scale.mean)
    return loads


def assign(
    items: Sequence[Item], ranks: Ranks, scale: Scale, most_shards: int
) -> Assignment | None:
    """Returns the best of several greedy assignments, or None if none fits the memory.

    Args:
        items: Items to place, with their possible ways.
        ranks: Devices.
        scale: Units of loads.
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
        """Assigns the shards of some ways; returns whether that is the best so far."""
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
        # With several most loaded ranks, fewer of them are an improvement.
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
    """Returns the cheapest way with shards below a size, or else with the smallest."""

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
        """Assigns every shard; returns the ranks of each item's shards, or None."""
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
        """Moves and swaps shards while the load of the most loaded rank decreases."""
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
        """Returns (shard to move, its new rank, shard in exchange or None)."""
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
