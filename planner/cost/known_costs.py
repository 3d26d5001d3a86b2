"""Costs of operations and values that the searches of one loss share.

Programs of a loss differ in remat, attention, chunks and TaskGraphs, but most of their
operations and values are equal. Each is evaluated once for every mesh, number of
micro-batches and compute table.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from whalejax.planner.cost.layout_cases import LayoutCases


MOST_CASES: Final = 4096
"""Largest number of cases at once whose costs are stored."""

MOST_BYTES: Final = 64 * 2**20
"""Bytes of stored costs above which all of them are discarded."""

Sums = Mapping[Any, np.ndarray]
"""Costs by name, each with one value for each case."""

Groups = Sequence[tuple[tuple[int, ...], Any]]
"""Numbers of compute tables, with the indices of the cases that use them."""


class KnownCosts:
    """Stored costs of operations and values."""

    def __init__(self) -> None:
        """Initialises the store, without costs."""
        self._numbers: dict[Hashable, int] = {}
        self._cases: dict[tuple[int, ...], int] = {}
        self._costs: dict[Hashable, _StoredCosts] = {}
        self._size = 0

    def number(self, content: Hashable) -> int:
        """Returns a number of some content; equal content has an equal number."""
        return self._numbers.setdefault(content, len(self._numbers))

    def cases(self, cases: LayoutCases) -> np.ndarray:
        """Returns a number of the mesh and number of micro-batches of each case.

        Args:
            cases: Layouts with their micro-batches.
        """
        sizes = [*cases.mesh.values(), cases.count]
        known = self._cases
        rows = zip(*(size.tolist() for size in sizes), strict=True)
        numbers = [known.setdefault(row, len(known)) for row in rows]
        return np.array(numbers, dtype=np.int64)

    def sums(
        self,
        key: Hashable,
        groups: Groups,
        cases: np.ndarray,
        evaluate: Callable[[np.ndarray], Sums],
    ) -> Sums:
        """Returns the costs of an operation or a value in some cases.

        Args:
            key: Content of the operation or value.
            groups: Numbers of its compute tables, with the indices in ``cases`` that
                use them.
            cases: Number of each case.
            evaluate: Function from indices in ``cases`` to their costs; it is called
                for those that are not stored.
        """
        if self._size > MOST_BYTES:
            self._costs, self._size = {}, 0
        stored = self._costs.setdefault(key, _StoredCosts())
        place = stored.find(groups, cases)
        missing = np.flatnonzero(place < 0)
        if len(missing):
            before = stored.nbytes
            stored.append(evaluate(missing), len(missing))
            place[missing] = stored.count + np.arange(-len(missing), 0)
            stored.remember(groups, cases, place)
            self._size += stored.nbytes - before
        return {name: values[place] for name, values in stored.arrays.items()}


class _StoredCosts:
    """Costs of one operation or value.

    Attributes:
        places: By numbers of compute tables, the index in ``arrays`` of each case; -1
            for cases without costs.
        arrays: Costs by name; a missing name stands for zeros.
        count: Number of costs.
    """

    def __init__(self) -> None:
        self.places: dict[tuple[int, ...], np.ndarray] = {}
        self.arrays: dict[Any, np.ndarray] = {}
        self.count = 0

    @property
    def nbytes(self) -> int:
        every = (*self.places.values(), *self.arrays.values())
        return sum(one.nbytes for one in every)

    def find(self, groups: Groups, cases: np.ndarray) -> np.ndarray:
        result = np.full(len(cases), -1, dtype=np.int32)
        for tables, rows in groups:
            known = self.places.get(tables)
            if known is not None:
                numbers = cases[rows]
                found = known.take(numbers, mode="clip")
                result[rows] = np.where(numbers < len(known), found, -1)
        return result

    def remember(self, groups: Groups, cases: np.ndarray, place: np.ndarray) -> None:
        for tables, rows in groups:
            known = self.places.get(tables, np.zeros(0, dtype=np.int32))
            more = int(cases[rows].max()) + 1 - len(known)
            if more > 0:
                known = np.append(known, np.full(more, -1, dtype=np.int32))
            known[cases[rows]] = place[rows]
            self.places[tables] = known

    def append(self, sums: Sums, number: int) -> None:
        for name, values in sums.items():
            if name not in self.arrays and values.any():
                self.arrays[name] = np.zeros(self.count)
        for name, before in self.arrays.items():
            values = sums.get(name, np.zeros(number))
            self.arrays[name] = np.append(before, values)
        self.count += number
