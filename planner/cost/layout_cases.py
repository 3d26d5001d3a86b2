"""Layouts of one program as arrays, and the mesh axes that shard each tensor.

Programs of a loss that differ only in remat have the same layouts, so they share one
grid of meshes and tables.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from whalejax.planner.model.dimensions import Layout
from whalejax.planner.sharding.fused_parameters import FusedLayout
from whalejax.planner.sharding.layout import Table
from whalejax.planner.sharding.parameter_layout import LeafFacts, LeafGroup
from whalejax.planner.sharding.shard_counts import (
    LeafShardCounts,
    ShardCounts,
    distinct_columns,
    group_shard_counts,
    table_shard_counts,
)


T = TypeVar("T")

Cuts = tuple[LeafShardCounts, ...]
"""Shard counts of each group of parameters."""

RECENT = 16
"""Largest number of selections that cases remember, as searches repeat them."""


@dataclass(frozen=True, kw_only=True)
class AxisHits:
    """Mesh axes that shard the logical dimensions of an operation, by layout.

    Attributes:
        code: Code of each layout. Equal codes mean that the same axes shard the same
            roles.
        parts: Number of shards of each sharded role, by layout.
        tensor: Whether ``tensor`` shards one of the roles, by layout.
    """

    code: np.ndarray
    parts: Mapping[int, np.ndarray]
    tensor: np.ndarray
    _inverse: dict[frozenset[int], np.ndarray] = field(default_factory=dict, init=False)

    @functools.cached_property
    def shards(self) -> np.ndarray:
        """Code of each layout, equal for equal numbers of shards of every role."""
        columns = [sizes.astype(np.int64) for sizes in self.parts.values()]
        return distinct_columns([np.zeros_like(self.code), *columns])[1]

    def inverse(self, roles: frozenset[int]) -> np.ndarray:
        """Returns 1 / number of shards of a tensor with some roles, by layout.

        Args:
            roles: Logical dimensions of the tensor.
        """
        if roles not in self._inverse:
            shards = [n for role, n in self.parts.items() if role in roles]
            self._inverse[roles] = 1 / math.prod(shards, start=np.ones(len(self.code)))
        return self._inverse[roles]


class LayoutGroups(Generic[T]):
    """Groups of layouts of a grid, with a result per group that is computed on demand.

    Args:
        columns: Codes of the layouts. Layouts with equal codes form a group.
        number: Number of layouts.
    """

    def __init__(self, columns: Sequence[np.ndarray], number: int) -> None:
        self._first, self._group = np.zeros(1, np.int64), np.zeros(number, np.int64)
        if number > 1:
            self._first, self._group = distinct_columns(columns)
        self._numbers = np.full(len(self._first), -1)
        self._results: dict[T, int] = {}

    def of(
        self, layouts: np.ndarray, make: Callable[[int], T]
    ) -> Iterator[tuple[T, np.ndarray]]:
        """Yields the result of each group, with the indices of its layouts.

        Args:
            layouts: Indices of layouts in the grid.
            make: Function from the index of a layout to the result of its group.
        """
        groups = self._group[layouts]
        numbers = self._numbers[groups]
        if (numbers < 0).any():
            for group in np.flatnonzero(np.bincount(groups[numbers < 0])).tolist():
                result = make(int(self._first[group]))
                number = self._results.setdefault(result, len(self._results))
                self._numbers[group] = number
            numbers = self._numbers[groups]
        counts = np.bincount(numbers, minlength=len(self._results)).tolist()
        for (result, number), count in zip(self._results.items(), counts, strict=True):
            if count:
                yield result, np.flatnonzero(numbers == number)


@dataclass(frozen=True, kw_only=True)
class LayoutGrid:
    """Meshes with compute tables; arrays have one element per layout.

    Attributes:
        tables: Distinct compute tables of all TaskGraphs.
        table: Index in ``tables`` of each layout.
        mesh: Sizes of each mesh axis by layout, outermost axis first.
        groups: Groups of layouts with a common result, by the key of that result.
    """

    tables: Sequence[Mapping[int, Table]]
    table: np.ndarray
    mesh: Mapping[str, np.ndarray]
    _hits: dict[object, AxisHits] = field(default_factory=dict, init=False)
    _codes: dict[object, np.ndarray] = field(default_factory=dict, init=False)
    groups: dict[object, LayoutGroups[Any]] = field(default_factory=dict, init=False)
    _homes: dict[int, list[tuple[Table, np.ndarray]]] = field(
        default_factory=dict, init=False
    )

    def __len__(self) -> int:
        return len(self.table)

    def mesh_at(self, index: int) -> dict[str, int]:
        """Returns the axis sizes of one layout."""
        return {axis: int(sizes[index]) for axis, sizes in self.mesh.items()}

    def _of_home(self, home: int) -> list[tuple[Table, np.ndarray]]:
        if home not in self._homes:
            result: dict[object, tuple[Table, list[np.ndarray]]] = {}
            for index, tables in enumerate(self.tables):
                rows = np.flatnonzero(self.table == index)
                if len(rows):
                    key = tuple(sorted(tables[home].items()))
                    result.setdefault(key, (tables[home], []))[1].append(rows)
            self._homes[home] = [(t, np.concatenate(r)) for t, r in result.values()]
        return self._homes[home]

    def hits(
        self, home: int, present: frozenset[int], divisible: Sequence[int]
    ) -> AxisHits:
        """Returns ``operation_cost.hits_of`` for all layouts of the grid.

        Args:
            home: TaskGraph of the operation.
            present: Logical dimensions of the operation.
            divisible: Number that the shard count must divide, by logical dimension.
        """
        key = home, present, tuple([divisible[role] for role in sorted(present)])
        if key not in self._hits:
            self._hits[key] = self._all_hits(home, present, divisible)
        return self._hits[key]

    def _all_hits(
        self, home: int, present: frozenset[int], divisible: Sequence[int]
    ) -> AxisHits:
        code = np.zeros(len(self), dtype=np.int64)
        tensor = np.zeros(len(self), dtype=bool)
        parts: dict[int, np.ndarray] = {}
        number = {role: n for n, role in enumerate(sorted(present), 1)}
        for table, rows in self._of_home(home):
            here: dict[int, Any] = {}
            for place, (axis, sizes) in enumerate(self.mesh.items()):
                role = next((r for r in table.get(axis, ()) if r in present), None)
                if role is None:
                    continue
                size, before = sizes[rows], here.get(role, 1)
                more = before * size
                hit = (size > 1) & (divisible[role] % more == 0)
                here[role] = np.where(hit, more, before)
                code[rows] += hit * (number[role] * (len(number) + 1) ** place)
                if axis == "tensor":
                    tensor[rows] |= hit
            for role, size in here.items():
                if role not in parts:
                    parts[role] = np.ones(len(self))
                parts[role][rows] = size
        parts = {role: sizes for role, sizes in parts.items() if (sizes > 1).any()}
        code = np.unique(code, return_inverse=True)[1]
        return AxisHits(code=code, parts=parts, tensor=tensor)

    def codes(
        self, layout: Layout, sizes: Layout, home: int, fused: FusedLayout | None = None
    ) -> np.ndarray:
        """Returns codes by layout, which are equal if the same axes shard a tensor.

        Args:
            layout: Logical dimensions in each dimension of the tensor, major ones
                first.
            sizes: Sizes of these logical dimensions.
            home: TaskGraph that reads the tensor.
            fused: Storage rule of a fused parameter; None for any other tensor.
        """
        key = layout, sizes, home, fused
        if key not in self._codes:
            code = np.zeros(len(self), dtype=np.int64)
            for table, rows in self._of_home(home):
                mesh = {axis: size[rows] for axis, size in self.mesh.items()}
                cut = table_shard_counts(layout, sizes, table, mesh, fused)
                for place, axis in enumerate(self.mesh):
                    code[rows] += cut.axes.get(axis, 0) * (len(layout) + 1) ** place
            self._codes[key] = np.unique(code, return_inverse=True)[1]
        return self._codes[key]


@dataclass(frozen=True, kw_only=True)
class LayoutCases:
    """Layouts of one program with their step options; arrays have one element per case.

    Attributes:
        grid: Meshes with their compute tables.
        row: Index in the grid of each case's layout.
        zero: ZeRO stage over ``data``.
        count: Number of micro-batches in a step.
    """

    grid: LayoutGrid
    row: np.ndarray
    zero: np.ndarray
    count: np.ndarray
    _cuts: dict[Hashable, list[LeafShardCounts]] = field(default_factory=dict)
    _counts: dict[int, dict[Hashable, ShardCounts]] = field(default_factory=dict)
    _origin: tuple[LayoutCases, np.ndarray] | None = None
    _distinct: dict[Hashable, tuple[np.ndarray, np.ndarray]] = field(
        default_factory=dict, init=False
    )
    _taken: dict[bytes, LayoutCases] = field(default_factory=dict, init=False)
    _places: dict[int, tuple[LayoutCases, list[tuple[int, np.ndarray]]]] = field(
        default_factory=dict, init=False
    )

    def __len__(self) -> int:
        return len(self.row)

    @functools.cached_property
    def table(self) -> np.ndarray:
        """Index in ``grid.tables`` of each case's tables."""
        table: np.ndarray = self.grid.table[self.row]
        return table

    @functools.cached_property
    def mesh(self) -> Mapping[str, np.ndarray]:
        """Array of sizes of each mesh axis, outermost axis first."""
        return {axis: sizes[self.row] for axis, sizes in self.grid.mesh.items()}

    @functools.cached_property
    def devices(self) -> np.ndarray:
        """Number of devices of the mesh, by case."""
        sizes = self.mesh.values()
        return functools.reduce(np.multiply, sizes, np.ones(len(self), dtype=np.int64))

    def tables_at(self, index: int) -> Mapping[int, Table]:
        """Returns the compute tables of one case."""
        return self.grid.tables[int(self.table[index])]

    def mesh_at(self, index: int) -> dict[str, int]:
        """Returns the axis sizes of one case."""
        return self.grid.mesh_at(int(self.row[index]))

    def take(self, rows: np.ndarray) -> LayoutCases:
        """Returns the cases at the given indices; the same object for a recent call."""
        key = rows.tobytes()
        if key not in self._taken:
            if len(self._taken) == RECENT:
                self._taken.clear()
            self._taken[key] = LayoutCases(
                grid=self.grid,
                row=self.row[rows],
                zero=self.zero[rows],
                count=self.count[rows],
                _origin=(self, rows),
            )
        return self._taken[key]

    def with_count(self, count: np.ndarray) -> LayoutCases:
        """Returns the same layouts with other numbers of micro-batches."""
        # Shard counts do not depend on the number of micro-batches.
        return dataclasses.replace(self, count=count)

    def shard_counts(self, batch: int) -> dict[Hashable, ShardCounts]:
        """Returns the known shard counts of tensors in one of ``batches``."""
        return self._counts.setdefault(batch, {})

    def distinct(
        self, home: int, present: frozenset[int], divisible: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Finds the cases with different shards of an operation's dimensions.

        Args:
            home, present, divisible: Arguments of ``LayoutGrid.hits``.

        Returns:
            Index of the first case of each combination of shard counts and number of
            micro-batches, and the combination of each case.
        """
        key = home, present, tuple([divisible[role] for role in sorted(present)])
        if key not in self._distinct:
            hits = self.grid.hits(home, present, divisible)
            self._distinct[key] = distinct_columns([hits.shards[self.row], self.count])
        return self._distinct[key]

    @functools.cached_property
    def batches(self) -> list[tuple[Mapping[int, Table], np.ndarray]]:
        """Distinct tables, with the indices of the cases that have them."""
        order = np.argsort(self.table, kind="stable")
        batches, first = np.unique(self.table[order], return_index=True)
        split = np.split(order, first[1:]) if len(batches) else []
        return [
            (self.grid.tables[index], rows)
            for index, rows in zip(batches.tolist(), split, strict=True)
        ]

    def cuts(self, facts: LeafFacts) -> list[tuple[np.ndarray, Cuts]]:
        """Returns the cases of each of ``batches``, with their shard counts.

        Args:
            facts: Parameters of the model, in groups of equal ones.
        """
        groups = [self._group_cuts(group) for group, _ in facts.groups]
        return [
            (rows, tuple([cuts[place] for cuts in groups]))
            for place, (_, rows) in enumerate(self.batches)
        ]

    def _group_cuts(self, group: LeafGroup) -> list[LeafShardCounts]:
        """Returns the shard counts of one group of parameters in each of ``batches``.

        They are computed once for all groups, of any program, that shard alike.
        """
        key = group.sharding
        if key not in self._cuts:
            origin: LayoutCases | None = self
            while origin is not None and key not in origin._cuts:
                origin = origin._origin and origin._origin[0]
            if origin is not None:
                known, places = origin._cuts[key], self._places_in(origin)
                cuts = [known[batch].take(rows) for batch, rows in places]
            else:
                cuts = [
                    group_shard_counts(group, tables[group.home], mesh, self.zero[rows])
                    for (tables, rows), mesh in zip(
                        self.batches, self._meshes, strict=True
                    )
                ]
            self._cuts[key] = cuts
        return self._cuts[key]

    @functools.cached_property
    def _meshes(self) -> list[dict[str, np.ndarray]]:
        """Mesh sizes of the cases of each of ``batches``."""
        return [
            {axis: sizes[rows] for axis, sizes in self.mesh.items()}
            for _, rows in self.batches
        ]

    @functools.cached_property
    def _batch_places(self) -> tuple[dict[int, int], np.ndarray]:
        """Batch of each table, and the index of each case in its batch."""
        place = np.zeros(len(self), dtype=np.int64)
        of_table = {}
        for number, (_, rows) in enumerate(self.batches):
            place[rows] = np.arange(len(rows))
            of_table[int(self.table[rows[0]])] = number
        return of_table, place

    def _places_in(self, origin: LayoutCases) -> list[tuple[int, np.ndarray]]:
        """Returns, for each of ``batches``, its batch and its indices in ``origin``."""
        if id(origin) not in self._places:
            rows, one = np.arange(len(self)), self
            while one is not origin:
                assert one._origin is not None, "origin is no origin of these cases"
                one, selected = one._origin
                rows = selected[rows]
            of_table, place = origin._batch_places
            places = [
                (of_table[int(self.table[some[0]])], place[rows[some]])
                for _, some in self.batches
            ]
            self._places[id(origin)] = origin, places
        return self._places[id(origin)][1]
