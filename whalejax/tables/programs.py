"""The programs of a step with tables: lookups, the dense part, then updates.

Lookups and updates run in ``shard_map`` over the axes that divide the batch. The dense
part is one global program, which the compiler divides by the plan's shardings. Its
results equal those of one device. In addition to gradients of parameters it returns
gradients of the looked-up vectors.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from whalejax.tables.distinct import (
    RowRequests,
    asked_gradients,
    asked_of,
    asked_rows,
    lookups_of,
    most_distinct,
    request_rows,
    rows_of_ids,
    sums_of_rows,
)
from whalejax.tables.exchange import (
    assemble,
    exchange_ids,
    give_node_vectors,
    give_vectors,
    look_up_replicated,
    replicated_gradient,
    return_gradients,
    return_node_gradients,
    update_buffers,
    update_replicated,
)
from whalejax.tables.gathered import block_gradients, whole_table
from whalejax.tables.layout import BufferKey, TableLayout
from whalejax.tables.recognize import NO_ID, TableProgram
from whalejax.tables.sparse_optimizers import RowState, SparseOptimizer


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["buffers", "states", "replicated", "replicated_states"],
    meta_fields=[],
)
@dataclass(frozen=True, slots=True, kw_only=True)
class TableArrays:
    """All tables and their optimizer state.

    Attributes:
        buffers: Buffers ``[ranks · rows, width]``, with rows divided among the ranks.
        states: State arrays of each buffer, by name.
        replicated: Tables that every rank stores, by name.
        replicated_states: State arrays of these tables, by name.
    """

    buffers: dict[BufferKey, Any]
    states: dict[BufferKey, RowState]
    replicated: dict[str, Any]
    replicated_states: dict[str, RowState]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["taken", "asked", "requests"],
    meta_fields=[],
)
@dataclass(frozen=True, slots=True, kw_only=True)
class TakenIds:
    """Ids and rows that each rank looks up in a step.

    Attributes:
        taken: Ids that each rank looks up for all samples.
        asked: Rows of each rank's buffers that ranks request, also the rank itself.
        requests: For each id of a rank's samples, the position of its row among the
            rows that the rank requests.
    """

    taken: Any
    asked: dict[BufferKey, Any]
    requests: dict[BufferKey, RowRequests]


def _positions(ids: Any, hottest: Any) -> Any:
    rows = jnp.asarray(hottest, ids.dtype)
    before = jnp.searchsorted(rows, ids).astype(ids.dtype)
    is_hot = rows[jnp.minimum(before, len(rows) - 1)] == ids
    place = jnp.where(is_hot, before, len(rows) + ids - before)
    return jnp.where(ids == NO_ID, ids, place)


def _join_updates(
    first: Mapping[BufferKey, tuple[Any, Any]],
    second: Mapping[BufferKey, tuple[Any, Any]],
) -> dict[BufferKey, tuple[Any, Any]]:
    joined = dict(first)
    for key, (rows, gradients) in second.items():
        if key in joined:
            rows = jnp.concatenate([joined[key][0], rows])
            gradients = jnp.concatenate([joined[key][1], gradients])
        joined[key] = rows, gradients
    return joined


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TablePrograms:
    """Programs of a step, each as a function of arrays.

    Attributes:
        program: Loss of the model, cut at its lookups.
        layout: Layout of the buffers.
        names: Name of the table of each lookup.
        rows: Number of rows of the table of each lookup.
        optimizer: Update rule of rows.
        mesh: Mesh of the devices.
        axes: Mesh axes that divide the batch and number the ranks. If nodes store rows
            jointly, they are the axis of nodes and the axis of the ranks of a node.
        clips: Whether ids out of range are replaced by the nearest id.
        by_sample: Layout of the same buffers with vectors by sample, for batches whose
            distinct rows exceed the capacity for requests.
    """

    program: TableProgram
    layout: TableLayout
    names: tuple[str, ...]
    rows: tuple[int, ...]
    optimizer: SparseOptimizer
    mesh: Mesh
    axes: tuple[str, ...]
    clips: bool
    by_sample: TableLayout

    def all_ids(self, batch: Sequence[Any]) -> Any:
        """Returns the ids of all lookups, concatenated, ``int32[samples, ids]``.

        Args:
            batch: Leaves of a global batch.
        """
        return self.join_ids(self.program.ids(batch))

    def join_ids(self, by_lookup: Sequence[Any]) -> Any:
        """Concatenates the ids of all lookups, and clips them if ``clips`` is set.

        Ids of cached tables are renumbered, so that rows on the device come first.

        Args:
            by_lookup: Ids of each lookup.
        """
        found = []
        for ids, rows, name in zip(by_lookup, self.rows, self.names, strict=True):
            if self.clips:
                ids = jnp.where(ids == NO_ID, ids, jnp.clip(ids, 0, rows - 1))
            if name in self.layout.hottest:
                ids = _positions(ids, self.layout.hottest[name])
            found.append(ids)
        return jnp.concatenate(found, axis=1)

    def id_bounds(self, batch: Sequence[Any]) -> Any:
        """Returns (least, largest) id of each lookup, ``int32[lookups, 2]``.

        Masked ids count as 0.

        Args:
            batch: Leaves of a global batch.
        """
        return self.bounds_of(self.program.ids(batch))

    def bounds_of(self, by_lookup: Sequence[Any]) -> Any:
        """Returns (least, largest) of some ids, ``int32[lookups, 2]``.

        Masked ids count as 0.

        Args:
            by_lookup: Ids of each lookup.
        """
        bounds = []
        for ids in by_lookup:
            known = jnp.where(ids == NO_ID, 0, ids)
            bounds.append(jnp.stack([known.min(), known.max()]))
        return jnp.stack(bounds)

    @property
    def plain(self) -> TablePrograms:
        """These programs with vectors that are exchanged by sample."""
        return dataclasses.replace(self, layout=self.by_sample)

    def room_taken(self, batch: Sequence[Any]) -> Any:
        """Returns the largest fill of a rank's requests to another rank.

        It is the number of distinct rows, divided by the capacity.

        Args:
            batch: Leaves of a global batch.
        """
        if not self.layout.requests:
            return jnp.float32(0)
        ids = self._by_lookup(self.all_ids(batch))
        return most_distinct(self.layout, self.names, ids)

    def look_up(self, tables: TableArrays, ids: Any) -> tuple[list[Any], TakenIds]:
        """Returns the vectors of every lookup, and the ids and rows that ranks read.

        Args:
            tables: All tables.
            ids: Result of ``all_ids``.
        """

        layout, axes = self.layout, self.axes

        def run(tables: TableArrays, ids: Any) -> tuple[list[Any], TakenIds]:
            taken = received = jnp.zeros((ids.shape[0], 0), ids.dtype)
            whole, by_node = dict(tables.replicated), None
            own_ids, buffers = self._by_lookup(ids), tables.buffers
            asked: dict[BufferKey, Any] = {}
            requests: dict[BufferKey, RowRequests] = {}
            asked_vectors: dict[int, Any] = {}
            if layout.widths:
                wanted, requests = request_rows(layout, self.names, own_ids)
                taken, wanted = exchange_ids(layout, ids, wanted, axes)
                asked = asked_of(layout, wanted)
                rows = asked_rows(layout, buffers, asked)
                received, blocks, rows = give_vectors(
                    layout, buffers, taken, rows, axes
                )
                asked_vectors = self._asked_vectors(requests, own_ids, rows)
                if layout.node_elements:
                    by_node = give_node_vectors(layout, buffers, taken, axes)
                for name in self.layout.gathered:
                    whole[name] = whole_table(self.layout, name, blocks)
            vectors = []
            for number, own in enumerate(own_ids):
                lookup, name = self.program.lookups[number], self.names[number]
                if name in whole:
                    table = whole[name]
                    vectors.append(look_up_replicated(table, lookup, own))
                elif number in asked_vectors:
                    vectors.append(asked_vectors[number])
                else:
                    parts = self.layout, number, lookup, received, by_node
                    vectors.append(assemble(*parts))
            return vectors, TakenIds(taken=taken, asked=asked, requests=requests)

        shared = PartitionSpec(self.axes)
        mapped = self._mapped(run, (self.specs(tables), shared), shared)
        found: tuple[list[Any], TakenIds] = mapped(tables, ids)
        return found

    def _asked_vectors(
        self, requests: Mapping[BufferKey, RowRequests], ids: list[Any], rows: Any
    ) -> dict[int, Any]:
        parts: dict[int, dict[tuple[int, int], Any]] = {}
        for key, by_id in rows_of_ids(self.layout, requests, rows).items():
            start = 0
            for number, table in lookups_of(self.layout, key, self.names):
                count = ids[number].size
                part = by_id[start : start + count]
                part = part.reshape(*ids[number].shape, key.width)
                pooled = self.program.lookups[number].pooled
                own = parts.setdefault(number, {})
                own[table.columns] = part.sum(1) if pooled else part
                start += count
        found: dict[int, Any] = {}
        for number, own in parts.items():
            lookup = self.program.lookups[number]
            vectors = jnp.concatenate([own[columns] for columns in sorted(own)], -1)
            shape = len(ids[number]), *lookup.vectors_shape[1:]
            found[number] = vectors.reshape(shape).astype(lookup.dtype)
        return found

    def _asked_sums(
        self, taken: TakenIds, ids: Any, gradients: Sequence[Any], dtype: Any
    ) -> Any:
        by_buffer: dict[BufferKey, Any] = {}
        own = self._by_lookup(ids)
        for key in self.layout.requests:
            parts = []
            for number, table in lookups_of(self.layout, key, self.names):
                lookup, (samples, count) = (
                    self.program.lookups[number],
                    own[number].shape,
                )
                vectors = gradients[number].reshape(
                    samples, lookup.num_vectors, lookup.width
                )[:, :, slice(*table.columns)]
                wide = jnp.broadcast_to(vectors, (samples, count, key.width))
                parts.append(wide.reshape(-1, key.width))
            by_buffer[key] = jnp.concatenate(parts)
        return sums_of_rows(self.layout, taken.requests, by_buffer, dtype)

    def update(
        self,
        tables: TableArrays,
        ids: Any,
        taken: TakenIds,
        gradients: Any,
        step: Any,
        applies: Any = None,
    ) -> TableArrays:
        """Returns the tables with the looked-up rows updated.

        Args:
            tables: All tables.
            ids, taken: Results of ``all_ids`` and ``look_up``.
            gradients: Gradient of each lookup's vectors.
            step: Number of steps before this one.
            applies: Boolean scalar, where False changes nothing; default: None for
                True.
        """
        if applies is not None:
            ids = jnp.where(applies, ids, NO_ID)
            taken = self._none_taken(taken, applies)

        def run(
            tables: TableArrays,
            ids: Any,
            taken: TakenIds,
            gradients: list[Any],
            step: Any,
        ) -> TableArrays:
            buffers, states = dict(tables.buffers), dict(tables.states)
            if self.layout.widths:
                given = tables, ids, taken, gradients, step
                buffers, states = self._update_buffers(*given)
            replicated, replicated_states = self._update_replicated(
                tables, ids, gradients, step
            )
            return TableArrays(
                buffers=buffers,
                states=states,
                replicated=replicated,
                replicated_states=replicated_states,
            )

        specs = self.specs(tables)
        shared, whole = PartitionSpec(self.axes), PartitionSpec()
        given = (specs, shared, shared, shared, whole)
        mapped = self._mapped(run, given, specs)
        found: TableArrays = mapped(tables, ids, taken, gradients, step)
        return found

    def _none_taken(self, taken: TakenIds, applies: Any) -> TakenIds:
        rows = {key: each.rows for key, each in self.layout.widths.items()}
        return dataclasses.replace(
            taken,
            taken=jnp.where(applies, taken.taken, NO_ID),
            asked={
                key: jnp.where(applies, asked, rows[key])
                for key, asked in taken.asked.items()
            },
        )

    def _update_buffers(
        self, tables: TableArrays, ids: Any, taken: TakenIds, gradients: Any, step: Any
    ) -> tuple[dict[BufferKey, Any], dict[BufferKey, RowState]]:
        """Returns this rank's buffers and states after updates of rows that it sent."""
        layout, buffers = self.layout, tables.buffers
        dtype = jnp.result_type(*(b.dtype for b in buffers.values()))
        rank = jax.lax.axis_index(self.axes)
        new_buffers: dict[BufferKey, Any] = {}
        new_states: dict[BufferKey, RowState] = {}
        if own := layout.widths_in(nodes=False):
            sums = self._sums(self._gathered_shapes(dtype), ids, gradients)
            asked = self._asked_sums(taken, ids, gradients, dtype)
            returned, packed, asked = return_gradients(
                layout, gradients, sums, asked, self.axes, dtype
            )
            more = _join_updates(
                block_gradients(layout, packed, buffers, rank),
                asked_gradients(layout, taken.asked, asked),
            )
            new_buffers, new_states = update_buffers(
                *(own, self.optimizer, buffers, tables.states, taken.taken),
                *(returned, step, rank, more),
            )
        if layout.node_elements:
            returned = return_node_gradients(layout, gradients, self.axes, dtype)
            of_nodes = update_buffers(
                *(layout.widths_in(nodes=True), self.optimizer, buffers),
                *(tables.states, taken.taken, returned, step, rank),
            )
            new_buffers, new_states = (
                new_buffers | of_nodes[0],
                new_states | of_nodes[1],
            )
        return new_buffers, new_states

    def _update_replicated(
        self, tables: TableArrays, ids: Any, gradients: Sequence[Any], step: Any
    ) -> tuple[dict[str, Any], dict[str, RowState]]:
        sums = self._sums(tables.replicated, ids, gradients)
        sums = jax.lax.psum(sums, self.axes) if sums else sums
        arrays, states = {}, {}
        for name, total in sums.items():
            arrays[name], states[name] = update_replicated(
                self.optimizer,
                tables.replicated[name],
                tables.replicated_states[name],
                total,
                step,
            )
        return arrays, states

    def _sums(
        self, whole: Mapping[str, Any], ids: Any, gradients: Sequence[Any]
    ) -> dict[str, Any]:
        """Returns this rank's gradients by row, for tables that it has in full."""
        sums: dict[str, Any] = {}
        for number, own in enumerate(self._by_lookup(ids)):
            name, lookup = self.names[number], self.program.lookups[number]
            if name in whole:
                one = replicated_gradient(whole[name], lookup, own, gradients[number])
                sums[name] = sums[name] + one if name in sums else one
        return sums

    def _gathered_shapes(self, dtype: Any) -> dict[str, Any]:
        rows = dict(zip(self.names, self.rows, strict=True))
        shards = self.layout.gathered
        return {
            name: jax.ShapeDtypeStruct(
                (rows[name], max(s.stored.shard.columns[1] for s in each)), dtype
            )
            for name, each in shards.items()
        }

    def _by_lookup(self, ids: Any) -> list[Any]:
        found, first = [], 0
        for lookup in self.program.lookups:
            found.append(ids[:, first : first + lookup.num_ids])
            first += lookup.num_ids
        return found

    def specs(self, tables: TableArrays) -> TableArrays:
        """Returns the shardings of tables: buffers by rows, others replicated."""
        shared, whole = PartitionSpec(self.axes, None), PartitionSpec()
        return TableArrays(
            buffers=jax.tree.map(lambda _: shared, tables.buffers),
            states=jax.tree.map(lambda _: shared, tables.states),
            replicated=jax.tree.map(lambda _: whole, tables.replicated),
            replicated_states=jax.tree.map(lambda _: whole, tables.replicated_states),
        )

    def _mapped(self, run: Callable[..., Any], given: Any, result: Any) -> Any:
        return jax.shard_map(
            run, mesh=self.mesh, in_specs=given, out_specs=result, check_vma=False
        )

    def shared_out(self, array: Any) -> Any:
        """Constrains dimension 0 of an array to the sharding of the batch."""
        sharding = NamedSharding(self.mesh, PartitionSpec(self.axes))
        return jax.lax.with_sharding_constraint(array, sharding)
