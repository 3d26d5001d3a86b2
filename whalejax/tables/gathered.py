"""Tables whose shards are sent in full, as a batch needs more vectors than rows.

Unpooled lookups of long histories read the same rows many times. A rank's samples may
need more vectors from a shard than the shard has rows. Then each row is sent once,
without ids, and the rank itself takes its vectors from the rows. In the backward pass
it first sums its gradients by row, and sends the sums with the number of lookups of
each row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from whalejax.tables.layout import BufferKey, TableLayout


def block_rows(layout: TableLayout, buffers: Mapping[Any, Any], rank: Any) -> Any:
    """Returns the rows of shards that a rank sends in full, ``[elements]``.

    Args:
        layout: Layout of the buffers.
        buffers: The rank's buffers.
        rank: Index of the rank.
    """
    dtype = jnp.result_type(*(buffer.dtype for buffer in buffers.values()))
    parts = [
        buffers[key].at[_mine(places, rank)].get(mode="fill", fill_value=0)
        for key, places in layout.blocks.items()
    ]
    empty = jnp.zeros((0,), dtype)
    return jnp.concatenate([empty, *(part.reshape(-1).astype(dtype) for part in parts)])


def whole_table(layout: TableLayout, name: str, blocks: Any) -> Any:
    """Assembles a table whose shards were sent in full.

    Args:
        layout: Layout of the buffers.
        name: Name of the table.
        blocks: Rows of each rank's shards, from ``block_rows``, ``[ranks, elements]``.
    """
    shards = [each.stored.shard for each in layout.gathered[name]]
    size = max(s.rows[1] for s in shards), max(s.columns[1] for s in shards)
    table = jnp.zeros(size, blocks.dtype)
    starts = _starts(layout, 0)
    for each in layout.gathered[name]:
        shard, width = each.stored.shard, each.stored.width
        start = starts[each.stored.key] + each.first * width
        part = blocks[shard.rank, start : start + shard.num_rows * width]
        rows, columns = each.stored.row_numbers, slice(*shard.columns)
        table = table.at[rows, columns].set(part.reshape(-1, width))
    return table


def pack_sums(layout: TableLayout, sums: Mapping[str, Any], dtype: Any) -> Any:
    """Packs sums of gradients by the rank that receives them, ``[ranks, elements]``.

    Args:
        layout: Layout of the buffers.
        sums: Sums ``[rows, width + 1]`` by table; the last column has the numbers of
            lookups.
        dtype: Dtype of the exchange.
    """
    packed = jnp.zeros((layout.ranks, layout.block_elements(1)), dtype)
    starts = _starts(layout, 1)
    for name, total in sums.items():
        for each in layout.gathered[name]:
            shard, width = each.stored.shard, each.stored.width
            own = total[each.stored.row_numbers]
            part = jnp.concatenate([own[:, slice(*shard.columns)], own[:, -1:]], axis=1)
            start = starts[each.stored.key] + each.first * (width + 1)
            stop = start + shard.num_rows * (width + 1)
            flat = part.astype(dtype).reshape(-1)
            packed = packed.at[shard.rank, start:stop].set(flat)
    return packed


def block_gradients(
    layout: TableLayout, packed: Any, buffers: Mapping[Any, Any], rank: Any
) -> dict[Any, tuple[Any, Any]]:
    """Returns (indices of the rank's rows, their gradients) by buffer.

    The number of the buffer's rows stands for no row.

    Args:
        layout: Layout of the buffers.
        packed: Packed sums that all ranks sent, ``[ranks, elements]``.
        buffers: The rank's buffers.
        rank: Index of the rank.
    """
    total, found = packed.sum(0), {}
    starts = _starts(layout, 1)
    for key, places in layout.blocks.items():
        count, width = places.shape[1], key.width
        start = starts[key]
        own = total[start : start + count * (width + 1)].reshape(count, width + 1)
        place = jnp.where(own[:, -1] > 0, _mine(places, rank), buffers[key].shape[0])
        found[key] = place, own[:, :-1].astype(buffers[key].dtype)
    return found


def _starts(layout: TableLayout, beside: int) -> dict[BufferKey, int]:
    found, start = {}, 0
    for key, places in layout.blocks.items():
        found[key] = start
        start += places.shape[1] * (key.width + beside)
    return found


def _mine(places: Any, rank: Any) -> Any:
    return jax.lax.dynamic_index_in_dim(jnp.asarray(places), rank, keepdims=False)
