"""Tables of which each rank receives every distinct row once.

A rank requests from every owner the distinct rows that its samples read there, and
takes its vectors from the received rows. In the backward pass it first sums its
gradients by row. The exchange has a fixed capacity in rows. A batch with more distinct
rows runs another program, which exchanges vectors by sample. Sums are made in a fixed
order.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from whalejax.tables.layout import BufferKey, DistinctTable, TableLayout


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["owner", "place", "order", "segment"],
    meta_fields=[],
)
@dataclass(frozen=True, slots=True, kw_only=True)
class RowRequests:
    """Position of each id's row among the rows that a rank requests of one buffer.

    Attributes:
        owner: Rank that stores the row, ``int32[ids]``; the number of ranks if an id
            has no row.
        place: Index of the row among those that are requested from that rank.
        order: Indices that sort the ids by owner and row.
        segment: Index of each sorted id's distinct row.
    """

    owner: Any
    place: Any
    order: Any
    segment: Any


def request_rows(
    layout: TableLayout, names: Sequence[str], ids: Sequence[Any]
) -> tuple[Any, dict[BufferKey, RowRequests]]:
    """Returns the rows that a rank requests, and the positions of ids among them.

    Args:
        layout: Buffers and the capacity for requests.
        names: Name of the table of each lookup.
        ids: This rank's ids of each lookup, ``int32[samples, ids]``.
    """
    sent, found = [], {}
    for key, room in layout.requests.items():
        owner, row = _owners(layout, key, names, ids)
        distinct = _distinct(layout.ranks, owner, row)
        none = layout.widths[key].rows
        asked = jnp.full((layout.ranks, room), none, jnp.int32)
        where = distinct.owner, distinct.place
        sent.append(asked.at[where].set(row, mode="drop"))
        found[key] = distinct
    empty = jnp.zeros((layout.ranks, 0), jnp.int32)
    return jnp.concatenate([empty, *sent], axis=1), found


def most_distinct(layout: TableLayout, names: Sequence[str], ids: Sequence[Any]) -> Any:
    """Returns the largest number of distinct rows between two ranks, over the capacity.

    Above 1, a rank needs more rows from another rank than the exchange can carry.

    Args:
        layout: Buffers and the capacity for requests.
        names: Name of the table of each lookup.
        ids: Ids of each lookup of the global batch, ``int32[samples, ids]``.
    """

    def of_rank(*own: Any) -> Any:
        found = []
        for key, room in layout.requests.items():
            owner, row = _owners(layout, key, names, own)
            place = _distinct(layout.ranks, owner, row).place
            known = jnp.where(owner < layout.ranks, place + 1, 0)
            found.append(known.max() / room)
        return jnp.stack(found).max()

    parts = [one.reshape(layout.ranks, -1, one.shape[1]) for one in ids]
    return jax.vmap(of_rank)(*parts).max()


def asked_of(layout: TableLayout, received: Any) -> dict[BufferKey, Any]:
    """Returns the rows that other ranks request here, ``int32[ranks, rows]`` by buffer.

    Args:
        layout: Buffers and the capacity for requests.
        received: Requests that each rank sent here, from ``request_rows``.
    """
    found, start = {}, 0
    for key, room in layout.requests.items():
        found[key] = received[:, start : start + room]
        start += room
    return found


def asked_rows(
    layout: TableLayout, buffers: Mapping[Any, Any], asked: Mapping[BufferKey, Any]
) -> Any:
    """Returns the values of the requested rows, ``[ranks, elements]``.

    Args:
        layout: Buffers and the capacity for requests.
        buffers: This rank's buffers.
        asked: Result of ``asked_of``.
    """
    dtype = jnp.result_type(*(buffer.dtype for buffer in buffers.values()))
    parts = [
        buffers[key].at[rows].get(mode="fill", fill_value=0).astype(dtype)
        for key, rows in asked.items()
    ]
    empty = jnp.zeros((layout.ranks, 0), dtype)
    flat = (part.reshape(layout.ranks, -1) for part in parts)
    return jnp.concatenate([empty, *flat], axis=1)


def rows_of_ids(
    layout: TableLayout, requests: Mapping[BufferKey, RowRequests], received: Any
) -> dict[BufferKey, Any]:
    """Returns the row of each id by buffer, ``[ids, columns]``; zeros if it has none.

    Args:
        layout: Buffers and the capacity for requests.
        requests: Result of ``request_rows``.
        received: Rows that each rank sent here, from ``asked_rows``.
    """
    found, start = {}, 0
    for key, room in layout.requests.items():
        stop = start + room * key.width
        rows = received[:, start:stop].reshape(layout.ranks, room, key.width)
        where = requests[key].owner, requests[key].place
        found[key] = rows.at[where].get(mode="fill", fill_value=0)
        start = stop
    return found


def sums_of_rows(
    layout: TableLayout,
    requests: Mapping[BufferKey, RowRequests],
    gradients: Mapping[BufferKey, Any],
    dtype: Any,
) -> Any:
    """Returns gradients that are summed by row, ``[ranks, elements]``.

    Args:
        layout: Buffers and the capacity for requests.
        requests: Result of ``request_rows``.
        gradients: Gradient of the row of each id, ``[ids, columns]``.
        dtype: Dtype of the exchange.
    """
    sent = [jnp.zeros((layout.ranks, 0), dtype)]
    for key, room in layout.requests.items():
        asked, given = requests[key], gradients[key].astype(dtype)
        count = len(given)
        sums = jax.ops.segment_sum(
            given[asked.order], asked.segment, count, indices_are_sorted=True
        )
        none = jnp.full((count,), layout.ranks, jnp.int32)
        owner = none.at[asked.segment].set(asked.owner[asked.order])
        place = none.at[asked.segment].set(asked.place[asked.order])
        packed = jnp.zeros((layout.ranks, room, key.width), dtype)
        packed = packed.at[owner, place].set(sums, mode="drop")
        sent.append(packed.reshape(layout.ranks, -1))
    return jnp.concatenate(sent, axis=1)


def asked_gradients(
    layout: TableLayout, asked: Mapping[BufferKey, Any], received: Any
) -> dict[BufferKey, tuple[Any, Any]]:
    """Returns (indices of requested rows, their gradients) by buffer.

    Unused requests have the number of the buffer's rows as index.

    Args:
        layout: Buffers and the capacity for requests.
        asked: Result of ``asked_of``.
        received: Sums that each rank sent here, from ``sums_of_rows``.
    """
    found, start = {}, 0
    for key, room in layout.requests.items():
        stop = start + room * key.width
        part = received[:, start:stop].reshape(-1, key.width)
        found[key] = asked[key].reshape(-1), part
        start = stop
    return found


def lookups_of(
    layout: TableLayout, key: BufferKey, names: Sequence[str]
) -> list[tuple[int, DistinctTable]]:
    """Returns (index of a lookup, columns of its table in a buffer) pairs."""
    return [
        (number, table)
        for number, name in enumerate(names)
        for table in layout.distinct.get(name, ())
        if table.key == key
    ]


def _owners(
    layout: TableLayout, key: BufferKey, names: Sequence[str], ids: Sequence[Any]
) -> tuple[Any, Any]:
    owners, rows = [], []
    for number, table in lookups_of(layout, key, names):
        owner, row = _owner(table, ids[number].reshape(-1), layout.ranks)
        owners.append(owner)
        rows.append(row)
    return jnp.concatenate(owners), jnp.concatenate(rows)


def _owner(table: DistinctTable, ids: Any, ranks: int) -> tuple[Any, Any]:
    known = jnp.where(ids >= 0, ids, 0)
    if table.hashed:
        count = jnp.int32(len(table.ranks))
        part, local = jax.lax.rem(known, count), jax.lax.div(known, count)
    else:
        edges = jnp.asarray(table.firsts)
        part = jnp.searchsorted(edges, known, side="right").astype(jnp.int32) - 1
        local = known - edges[part]
    owner = jnp.where(ids >= 0, jnp.asarray(table.ranks)[part], ranks)
    return owner.astype(jnp.int32), jnp.asarray(table.bases)[part] + local


def _distinct(ranks: int, owner: Any, row: Any) -> RowRequests:
    order = jnp.lexsort((row, owner))
    owners, rows = owner[order], row[order]
    first = jnp.ones((1,), bool)
    is_new = (owners[1:] != owners[:-1]) | (rows[1:] != rows[:-1])
    is_new = jnp.concatenate([first, is_new])
    segment = jnp.cumsum(is_new) - 1
    counts = jax.ops.segment_sum(is_new.astype(jnp.int32), owners, ranks + 1)
    starts = jnp.cumsum(counts) - counts
    place = (
        jnp.zeros_like(row).at[order].set((segment - starts[owners]).astype(row.dtype))
    )
    return RowRequests(
        owner=owner, place=place, order=order, segment=segment.astype(jnp.int32)
    )
