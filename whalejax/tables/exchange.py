"""Lookups and updates of rows on the ranks that store them.

Each function runs on one rank, inside ``shard_map``. For any number of tables, a step
has one all-to-all of ids, one of vectors and one of their gradients. Rows that a node
stores jointly are first summed inside the node. A second all-to-all between nodes sends
the sums to their samples. Only the buffers and their state have the size of a table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from whalejax.tables.gathered import block_rows, pack_sums
from whalejax.tables.host_rows import read_rows, write_rows
from whalejax.tables.layout import TableLayout, WidthLayout
from whalejax.tables.recognize import NO_ID, Lookup
from whalejax.tables.sparse_optimizers import RowState, SparseOptimizer


def exchange_ids(
    layout: TableLayout, ids: Any, asked: Any, axes: tuple[str, ...]
) -> tuple[Any, Any]:
    """Sends the ids of this rank's samples to the ranks that store their rows.

    Args:
        layout: Layout of the buffers.
        ids: Ids of all lookups, concatenated, ``int32[samples / ranks, ids]``.
        asked: Rows that are requested from each rank, ``int32[ranks, rows]``.
        axes: Mesh axes along which the ranks are numbered.

    Returns:
        Ids that this rank looks up for all samples, ``int32[samples, columns]``, and
        rows that each rank requests from it, ``int32[ranks, rows]``.
    """
    if not layout.id_columns and not asked.shape[1]:
        return jnp.zeros((ids.shape[0] * layout.ranks, 0), ids.dtype), asked
    none = jnp.full((ids.shape[0], 1), NO_ID, ids.dtype)
    padded = jnp.concatenate([ids, none], axis=1)
    parts = [each.source for each in layout.widths.values()]
    source = jnp.concatenate([jnp.asarray(part) for part in parts], axis=1)
    sent = jnp.moveaxis(padded[:, source], 1, 0)  # [ranks, samples / ranks, columns]
    flat = jnp.concatenate([sent.reshape(layout.ranks, -1), asked], axis=1)
    received = _all_to_all(flat[:, None], layout.ranks, axes)
    count = len(ids) * layout.id_columns
    taken = received[:, :count].reshape(layout.ranks * len(ids), layout.id_columns)
    return taken, received[:, count:]


def give_vectors(
    layout: TableLayout,
    buffers: Mapping[Any, Any],
    ids: Any,
    asked: Any,
    axes: tuple[str, ...],
) -> tuple[Any, Any, Any]:
    """Looks up rows, and sends the vectors to the samples that need them.

    Args:
        layout: Layout of the buffers.
        buffers: This rank's buffers.
        ids: Result of ``exchange_ids``.
        asked: Values of the rows that each rank requested, ``[ranks, elements]``.
        axes: Mesh axes along which the ranks are numbered.

    Returns:
        Three arrays: vectors from each rank for this rank's samples, ``[ranks, samples
        / ranks, elements]``; rows of shards that each rank sent in full, ``[ranks,
        elements]``; and rows that this rank requested, ``[ranks, elements]``.
    """
    rank, ranks = jax.lax.axis_index(axes), layout.ranks
    own = layout.widths_in(nodes=False)
    if not own:
        none = jnp.zeros((ranks, len(ids) // ranks, 0), _dtype(buffers))
        return none, none[:, 0], asked
    vectors = look_up_rows(own, buffers, ids, rank)
    whole = block_rows(layout, buffers, rank)
    sent = vectors.reshape(ranks, -1), asked, jnp.tile(whole, (ranks, 1))
    received = _all_to_all(jnp.concatenate(sent, axis=1)[:, None], ranks, axes)
    count = len(ids) // ranks * layout.vector_elements
    stop = count + asked.shape[1]
    shape = ranks, len(ids) // ranks, layout.vector_elements
    parts = received[:, :count], received[:, stop:], received[:, count:stop]
    return parts[0].reshape(shape), *parts[1:]


def give_node_vectors(
    layout: TableLayout, buffers: Mapping[Any, Any], ids: Any, axes: tuple[str, ...]
) -> Any:
    """Returns this rank's vectors from rows that nodes store jointly.

    Args:
        layout: Layout of the buffers.
        buffers: This rank's buffers.
        ids: Result of ``exchange_ids``.
        axes: Two mesh axes: over nodes, and over the ranks of a node.

    Returns:
        Vectors from each node, ``[nodes, samples / ranks, elements]``.
    """
    rank, own = jax.lax.axis_index(axes), layout.widths_in(nodes=True)
    parts = look_up_rows(own, buffers, ids, rank)
    nodes = layout.ranks // layout.per_node
    parts = parts.reshape(nodes, layout.per_node, -1, layout.node_elements)
    sums = jax.lax.psum_scatter(parts, axes[1], scatter_dimension=1)
    return jax.lax.all_to_all(sums, axes[0], 0, 0)


def return_node_gradients(
    layout: TableLayout, gradients: Sequence[Any], axes: tuple[str, ...], dtype: Any
) -> Any:
    """Sends the gradients of nodes' vectors to their ranks, ``[samples, elements]``.

    Args:
        layout: Layout of the buffers.
        gradients: Gradient of each lookup's vectors, for this rank's samples.
        axes: Two mesh axes: over nodes, and over the ranks of a node.
        dtype: Dtype of the exchange.
    """
    sent = pack_gradients(layout, gradients, dtype, by_node=True)
    received = jax.lax.all_to_all(sent, axes[0], 0, 0)
    whole = jax.lax.all_gather(received, axes[1], axis=1)
    return whole.reshape(-1, layout.node_elements)


def _dtype(buffers: Mapping[Any, Any]) -> Any:
    return jnp.result_type(*(buffer.dtype for buffer in buffers.values()))


def look_up_rows(
    widths: Mapping[Any, WidthLayout], buffers: Mapping[Any, Any], ids: Any, rank: Any
) -> Any:
    """Returns the vectors of one rank for some samples, ``[samples, elements]``.

    Args:
        widths: Layout of each buffer.
        buffers: The rank's buffers.
        ids: Ids that the rank looks up, ``int32[samples, columns]``.
        rank: Index of the rank in the layouts.
    """
    dtype, given = _dtype(buffers), []
    for key, each in widths.items():
        place, slot = _places(each, ids, rank)
        rows = read_rows(buffers[key], place, on_host=each.memory == "host")
        sums = _sum_columns(rows, slot, each.slots)
        given.append(sums.reshape(len(ids), each.slots * each.width).astype(dtype))
    return jnp.concatenate(given, axis=1)


def assemble(
    layout: TableLayout,
    number: int,
    lookup: Lookup,
    received: Any,
    by_node: Any = None,
) -> Any:
    """Returns the vectors of one lookup for this rank's samples.

    Args:
        layout: Layout of the buffers.
        number: Index of the lookup.
        lookup: The lookup.
        received: Result of ``give_vectors``.
        by_node: Result of ``give_node_vectors``; default: None.
    """
    samples = received.shape[1]
    parts: dict[tuple[int, int], Any] = {}
    for each in layout.received[number]:
        width = each.columns[1] - each.columns[0]
        stop = each.start + each.count * width
        given = by_node if each.by_node else received
        part = given[each.rank, :, each.start : stop]
        part = part.reshape(samples, each.count, width)
        held = parts.get(each.columns)
        parts[each.columns] = part if held is None else held + part
    whole = jnp.concatenate([parts[columns] for columns in sorted(parts)], axis=2)
    return whole.reshape(samples, *lookup.vectors_shape[1:]).astype(lookup.dtype)


def return_gradients(
    layout: TableLayout,
    gradients: Sequence[Any],
    sums: Mapping[str, Any],
    asked: Any,
    axes: tuple[str, ...],
    dtype: Any,
) -> tuple[Any, Any, Any]:
    """Sends the gradients of vectors to the ranks that store their rows.

    Args:
        layout: Layout of the buffers.
        gradients: Gradient of each lookup's vectors, for this rank's samples.
        sums: Sums of each table that was sent in full, as for ``pack_sums``.
        asked: Gradients of the rows that this rank requested, ``[ranks, elements]``.
        axes: Mesh axes along which the ranks are numbered.
        dtype: Dtype of the exchange.

    Returns:
        Three arrays of gradients: of the vectors that this rank sent, ``[samples,
        elements]``; of the rows of shards that it sent in full, ``[ranks, elements]``;
        and of the rows that were requested from it, ``[ranks, elements]``.
    """
    packed, ranks = pack_gradients(layout, gradients, dtype), layout.ranks
    samples = packed.shape[1]
    sent = packed.reshape(ranks, -1), asked, pack_sums(layout, sums, dtype)
    received = _all_to_all(jnp.concatenate(sent, axis=1)[:, None], ranks, axes)
    count = samples * layout.vector_elements
    stop = count + asked.shape[1]
    shape = ranks * samples, layout.vector_elements
    parts = received[:, :count], received[:, stop:], received[:, count:stop]
    return parts[0].reshape(shape), *parts[1:]


def pack_gradients(
    layout: TableLayout, gradients: Sequence[Any], dtype: Any, *, by_node: bool = False
) -> jax.Array:
    """Packs gradients of vectors by the rank or node that receives them.

    Args:
        layout: Layout of the buffers.
        gradients: Gradient of each lookup's vectors, for some samples.
        dtype: Dtype of the exchange.
        by_node: Whether to pack gradients for nodes instead of ranks; default: False.

    Returns:
        Gradients, ``[ranks or nodes, samples, elements]``.
    """
    samples = gradients[0].shape[0]
    count = layout.ranks // layout.per_node if by_node else layout.ranks
    length = layout.node_elements if by_node else layout.vector_elements
    pieces: list[list[tuple[int, Any]]] = [[] for _ in range(count)]
    for places, gradient in zip(layout.received, gradients, strict=True):
        for each in places:
            if each.by_node != by_node:
                continue
            vectors = gradient.reshape(samples, each.count, -1)
            part = vectors[:, :, slice(*each.columns)].reshape(samples, -1)
            pieces[each.rank].append((each.start, part.astype(dtype)))
    return jnp.stack([_join_pieces(each, samples, length, dtype) for each in pieces])


def _join_pieces(
    pieces: Sequence[tuple[int, Any]], samples: int, length: int, dtype: Any
) -> Any:
    row, end = [], 0
    for start, part in sorted(pieces, key=lambda piece: piece[0]):
        row += [jnp.zeros((samples, start - end), dtype), part]
        end = start + part.shape[1]
    row.append(jnp.zeros((samples, length - end), dtype))
    return jnp.concatenate(row, axis=1)


def update_buffers(
    widths: Mapping[Any, WidthLayout],
    optimizer: SparseOptimizer,
    buffers: Mapping[Any, Any],
    states: Mapping[Any, RowState],
    ids: Any,
    gradients: Any,
    step: Any,
    rank: Any,
    more: Mapping[Any, tuple[Any, Any]] = {},
) -> tuple[dict[Any, Any], dict[Any, RowState]]:
    """Updates the rows of one rank that were looked up.

    Args:
        widths: Layout of each buffer.
        optimizer: Update rule of rows.
        buffers, states: The rank's buffers and their state.
        ids: Ids that the rank looked up, ``int32[samples, columns]``.
        gradients: Gradients of the vectors that the rank sent, ``[samples, elements]``.
        step: Number of steps before this one.
        rank: Index of the rank in the layouts.
        more: (Indices, gradients) of further rows by buffer; default: none.
    """
    new_buffers: dict[Any, Any] = {}
    new_states: dict[Any, RowState] = {}
    for key, each in widths.items():
        width = each.width
        place, slot = _places(each, ids, rank)
        stop = each.offset + each.slots * width
        vectors = gradients[:, each.offset : stop]
        vectors = vectors.reshape(len(ids), each.slots, width)
        by_column = vectors[:, slot].reshape(-1, width).astype(buffers[key].dtype)
        places = place.reshape(-1)
        if key in more:
            places = jnp.concatenate([places, more[key][0].astype(places.dtype)])
            by_column = jnp.concatenate([by_column, more[key][1]])
        given = buffers[key], states[key], places, by_column, step
        new_buffers[key], new_states[key] = update_rows(
            optimizer, *given, on_host=each.memory == "host"
        )
    return new_buffers, new_states


def update_rows(
    optimizer: SparseOptimizer,
    table: Any,
    state: RowState,
    places: Any,
    gradients: Any,
    step: Any,
    *,
    on_host: bool = False,
) -> tuple[Any, RowState]:
    """Updates rows of one array; a repeated row is updated once.

    Gradients of a row are summed in the given order.

    Args:
        optimizer: Update rule of rows.
        table: Array of rows, ``[rows, width]``.
        state: State arrays of as many rows.
        places: Row index of each gradient; the number of rows stands for none.
        gradients: Gradients of rows, ``[gradients, width]``.
        step: Number of steps before this one.
        on_host: Whether the table and its state are in host memory; default: False.
    """
    rows = table.shape[0]
    order = jnp.argsort(places, stable=True)
    sorted_places = places[order]
    before = jnp.concatenate([jnp.full((1,), -1, places.dtype), sorted_places[:-1]])
    segment = jnp.cumsum(sorted_places != before) - 1
    count = places.shape[0]
    sums = jax.ops.segment_sum(
        gradients[order], segment, num_segments=count, indices_are_sorted=True
    )
    touched = jnp.full((count,), rows, places.dtype).at[segment].set(sorted_places)
    held = read_rows(table, touched, on_host=on_host)
    held_state = {
        name: read_rows(array, touched, on_host=on_host)
        for name, array in state.items()
    }
    new, new_state = optimizer.update(held, held_state, sums, step)
    table = write_rows(table, touched, new, on_host=on_host)
    written = {
        name: write_rows(array, touched, new_state[name], on_host=on_host)
        for name, array in state.items()
    }
    return table, written


def look_up_replicated(table: Any, lookup: Lookup, ids: Any) -> Any:
    """Returns the vectors of this rank's samples from a replicated table.

    Args:
        table: The table.
        lookup: The lookup.
        ids: Ids of this rank's samples, ``int32[samples / ranks, ids]``.
    """
    place = jnp.where(ids >= 0, ids, table.shape[0])
    rows = table.at[place].get(mode="fill", fill_value=0)
    vectors = rows.sum(1) if lookup.pooled else rows
    return vectors.reshape(len(ids), *lookup.vectors_shape[1:]).astype(lookup.dtype)


def replicated_gradient(table: Any, lookup: Lookup, ids: Any, gradient: Any) -> Any:
    """Returns this rank's gradients summed by row, and the number of lookups per row.

    Args:
        table: The table.
        lookup: The lookup.
        ids: Ids of this rank's samples, ``int32[samples / ranks, ids]``.
        gradient: Gradient of the vectors.

    Returns:
        Sums ``[rows, width + 1]``; the last column has the numbers of lookups.
    """
    rows, width = table.shape
    vectors = gradient.reshape(len(ids), lookup.num_vectors, width).astype(table.dtype)
    by_id = jnp.broadcast_to(vectors, (len(ids), lookup.num_ids, width))
    ones = jnp.ones((len(ids), lookup.num_ids, 1), table.dtype)
    given = jnp.concatenate([by_id, ones], axis=2).reshape(-1, width + 1)
    place = jnp.where(ids >= 0, ids, rows).reshape(-1)
    return jnp.zeros((rows, width + 1), table.dtype).at[place].add(given, mode="drop")


def update_replicated(
    optimizer: SparseOptimizer, table: Any, state: RowState, sums: Any, step: Any
) -> tuple[Any, RowState]:
    """Updates the rows of a replicated table that were looked up on any rank.

    Args:
        optimizer: Update rule of rows.
        table, state: Table and its state.
        sums: Result of ``replicated_gradient``, summed over lookups and ranks.
        step: Number of steps before this one.
    """
    touched = sums[:, -1:] > 0
    new, new_state = optimizer.update(table, state, sums[:, :-1], step)
    table = jnp.where(touched, new, table).astype(table.dtype)
    return table, {
        name: jnp.where(touched, new_state[name], array).astype(array.dtype)
        for name, array in state.items()
    }


def _places(each: WidthLayout, ids: Any, rank: Any) -> tuple[Any, Any]:
    """Returns each id's row (the number of rows for none), and its slot."""

    def mine(array: Any) -> Any:
        return jax.lax.dynamic_index_in_dim(jnp.asarray(array), rank, keepdims=True)

    own = ids[:, each.first_id : each.first_id + each.num_ids]
    low, high = mine(each.low), mine(each.high)
    modulus = mine(each.modulus)
    modulus = jnp.broadcast_to(modulus, own.shape)
    residue = jax.lax.rem(own, modulus)  # Not used for negative ids.
    inside = (own >= low) & (own < high) & (residue == mine(each.residue))
    place = mine(each.base) + jax.lax.div(own, modulus)
    return jnp.where(inside, place, each.rows), mine(each.slot)[0]


def _sum_columns(rows: Any, slot: Any, slots: int) -> Any:
    by_column = jnp.moveaxis(rows, 1, 0)
    sums = jax.ops.segment_sum(by_column, slot, num_segments=slots)
    return jnp.moveaxis(sums, 0, 1)


def _all_to_all(sent: Any, ranks: int, axes: tuple[str, ...]) -> Any:
    if ranks > 1:
        sent = jax.lax.all_to_all(sent, axes, 0, 0)
    return sent.reshape(-1, sent.shape[-1])
