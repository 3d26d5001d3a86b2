"""Requests to a process for a batch: ids by sample, or each distinct row once.

If each vector of a buffer is a single row, a batch may need fewer distinct rows than
vectors. Then each row is requested and sent once. The gradients of a row are summed
here, in the same order as in the process, so that results are bitwise equal.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax
import numpy as np

from whalejax.tables.layout import TableLayout, WidthLayout


_WORTH: Final = 0.8
"""Maximum ratio of distinct rows to vectors at which distinct rows are requested."""

_LEAST_PIECE: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProcessRequest:
    """Request to one process.

    Attributes:
        arrays: Ids ``int32[samples, columns]`` for each buffer, or its distinct rows
            ``int32[rows]``.
        places: Index of each vector's row among the distinct rows of each buffer,
            ``int32[samples · slots]``; None for a buffer with ids.
    """

    arrays: tuple[np.ndarray, ...]
    places: tuple[np.ndarray | None, ...]


class ProcessRequests:
    """Makes requests to the processes of a layout, and reads their answers."""

    def __init__(self, layout: TableLayout) -> None:
        """Finds the buffers whose vectors are single rows.

        Args:
            layout: Layout of buffers and columns.
        """
        self._layout = layout
        self._columns = [
            [_columns_of_slots(each, rank) for each in layout.widths.values()]
            for rank in range(layout.ranks)
        ]

    def requests(self, ids: Sequence[np.ndarray]) -> list[ProcessRequest]:
        """Returns the request to each process.

        Args:
            ids: Ids for each process, ``int32[samples, columns]``.
        """
        return [self._request(rank, own) for rank, own in enumerate(ids)]

    def _request(self, rank: int, ids: np.ndarray) -> ProcessRequest:
        arrays, places = [], []
        widths = zip(self._layout.widths.values(), self._columns[rank], strict=True)
        for each, columns in widths:
            own = ids[:, each.first_id : each.first_id + each.num_ids]
            rows, place = _distinct_rows(each, rank, own, columns)
            arrays.append(np.ascontiguousarray(own) if place is None else rows)
            places.append(place)
        return ProcessRequest(arrays=tuple(arrays), places=tuple(places))

    def vectors(
        self, request: ProcessRequest, answers: Sequence[np.ndarray]
    ) -> np.ndarray:
        """Returns the vectors of a process, ``[samples, elements]``.

        Args:
            request: Request to the process.
            answers: Answer of the process, by buffer.
        """
        parts = []
        given = self._layout.widths.values(), request.places, answers
        for each, places, rows in zip(*given, strict=True):
            if places is not None:
                rows = rows[places].reshape(-1, each.slots * each.width)
            parts.append(rows)
        return np.concatenate(parts, axis=1)

    def gradients(
        self, request: ProcessRequest, packed: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        """Returns the gradients of a process's vectors or distinct rows, by buffer.

        Args:
            request: Request to the process.
            packed: Gradients of all vectors, ``[samples, elements]``.
        """
        parts = []
        given = self._layout.widths.values(), request.arrays, request.places
        for each, rows, places in zip(*given, strict=True):
            part = packed[:, each.offset : each.offset + each.slots * each.width]
            if places is not None:
                part = _sum_by_row(part.reshape(-1, each.width), places, len(rows))
            parts.append(np.ascontiguousarray(part))
        return tuple(parts)


def _columns_of_slots(each: WidthLayout, rank: int) -> np.ndarray | None:
    """Returns the column of each slot, or -1 for a slot without a column.

    It returns None if a slot sums several columns, or there are no slots.
    """
    used = np.flatnonzero(each.low[rank] < each.high[rank])
    slots = each.slot[rank][used]
    if len(np.unique(slots)) < len(slots) or not len(used):
        return None
    columns = np.full(each.slots, -1)
    columns[slots] = used
    return columns


def _distinct_rows(
    each: WidthLayout, rank: int, ids: np.ndarray, columns: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns the distinct rows, and each vector's index among them.

    If ids move fewer bytes, it returns the ids and None.
    """
    if columns is None:
        return ids, None
    place = _rows_of_ids(each, rank, ids)
    none = np.full((len(ids), 1), each.rows, np.int32)
    by_slot = np.concatenate([place, none], axis=1)[:, columns]
    rows, places = np.unique(by_slot, return_inverse=True)
    piece = max(_LEAST_PIECE, 1 << max(0, len(rows).bit_length() - 3))
    count = -(-len(rows) // piece) * piece
    if count > _WORTH * by_slot.size:
        return ids, None
    padded = np.full(count, each.rows, np.int32)
    padded[: len(rows)] = rows
    return padded, places.reshape(-1).astype(np.int32)


def _rows_of_ids(each: WidthLayout, rank: int, ids: np.ndarray) -> np.ndarray:
    """Returns each id's row in the buffer, or the number of rows if it has none."""
    low, high, modulus = each.low[rank], each.high[rank], each.modulus[rank]
    inside = (ids >= low) & (ids < high) & (ids % modulus == each.residue[rank])
    return np.where(inside, each.base[rank] + ids // modulus, each.rows).astype(
        np.int32
    )


def _sum_by_row(gradients: np.ndarray, places: np.ndarray, count: int) -> np.ndarray:
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        return np.asarray(_segment_sum(gradients, places, count))


@functools.partial(jax.jit, static_argnums=2)
def _segment_sum(gradients: Any, places: Any, count: int) -> Any:
    return jax.ops.segment_sum(gradients, places, num_segments=count)
