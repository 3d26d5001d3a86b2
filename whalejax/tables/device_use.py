"""Predicted memory and traffic of the tables on the devices of the dense part."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import jax.numpy as jnp

from whalejax.planner.cost_terms import MemoryTerms
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan_entries import Collective, CollectiveKind
from whalejax.planner.tables.placement import TablePlacement
from whalejax.tables.layout import BufferKey, TableLayout, make_layout
from whalejax.tables.recognize import Lookup
from whalejax.tables.sparse_optimizers import SparseOptimizer


_ONCE: Final = "update"
"""Phase of collectives that run once per step, for all micro-batches."""

TABLE_CONTENTS: Final = ("ids", "rows", "row gradients")
"""Contents of the collectives of tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """Memory and traffic of tables on each device of the dense part.

    Attributes:
        stored_bytes: Bytes of rows and their optimizer state on a device; all devices
            have as many as the fullest.
        host_bytes: Bytes of rows and their state in host memory, per device.
        vectors_bytes: Bytes of looked-up vectors that one device's dense part reads.
        exchange_bytes: Peak bytes of temporaries of lookups and updates: gradients of
            vectors, exchanged data, and its copies.
        collectives: Collectives of a step that transfer ids, rows and gradients.
    """

    stored_bytes: int = 0
    host_bytes: int = 0
    vectors_bytes: int = 0
    exchange_bytes: int = 0
    collectives: tuple[Collective, ...] = ()

    def added_to(self, plan: Plan) -> Plan:
        """Returns the plan of the dense part with the memory and traffic of tables.

        Lookups come before the dense part and updates after it, so only the larger of
        both parts' temporaries counts.

        Args:
            plan: Plan of the dense part.
        """
        return dataclasses.replace(
            plan,
            memory=self.memory_with(plan.memory),
            collectives=(*plan.collectives, *self.collectives),
        )

    def taken_from(self, plan: Plan) -> Plan:
        """Returns the plan of the dense part, as before ``added_to``.

        Args:
            plan: Plan with the memory and traffic of tables.
        """
        dense = dataclasses.replace(
            plan.memory,
            batch_bytes=plan.memory.batch_bytes + self.vectors_bytes,
            activations_bytes=plan.memory.activations_bytes - self.vectors_bytes,
            tables_bytes=0,
            lookups_bytes=0,
            host_bytes=max(0, plan.memory.host_bytes - self.host_bytes),
        )
        kept = (c for c in plan.collectives if c.what not in TABLE_CONTENTS)
        return dataclasses.replace(plan, memory=dense, collectives=tuple(kept))

    def memory_with(self, dense: MemoryTerms) -> MemoryTerms:
        """Returns the memory of a step, from the memory of the dense part.

        Vectors are in the dense part's batch, but each step computes them. Updates need
        only their gradients.

        Args:
            dense: Memory of the dense part.
        """
        more = self.exchange_bytes - dense.temporary_bytes - self.vectors_bytes
        return dataclasses.replace(
            dense,
            batch_bytes=dense.batch_bytes - self.vectors_bytes,
            activations_bytes=dense.activations_bytes + self.vectors_bytes,
            tables_bytes=self.stored_bytes,
            lookups_bytes=max(0, more),
            host_bytes=dense.host_bytes + self.host_bytes,
        )


def predict_device_use(
    placement: TablePlacement,
    lookups: Sequence[Lookup],
    names: Sequence[str],
    optimizer: SparseOptimizer,
    dense: Plan,
) -> DeviceUse:
    """Predicts the memory and traffic of a placement's tables.

    Args:
        placement: Placement of tables on the devices of the dense part.
        lookups: All lookups of the loss.
        names: Name of the table of each lookup.
        optimizer: Update rule of rows.
        dense: Plan of the dense part, whose mesh divides the lookups.
    """
    tables = {table.name: table for table in placement.tables}
    every, held = lookups, [n for n, name in enumerate(names) if name in tables]
    lookups, names = [lookups[n] for n in held], [names[n] for n in held]
    samples = lookups[0].shape[0]
    layout = make_layout(placement, lookups, names, samples // placement.ranks.count)
    element_bytes = placement.tables[0].element_bytes
    stored = {"device": 0, "host": 0, "node": 0}
    for key, each in layout.widths.items():
        row = key.width * element_bytes
        row += optimizer.state_bytes_per_row(key.width, element_bytes)
        stored[key.memory] += each.rows * row
    whole = [(tables[name].rows, tables[name].width) for name in layout.replicated]
    read = [_read_vectors(dense, n - len(every)) for n in held]
    mesh = {name: size for name, size in dense.axis_sizes.items() if size > 1}
    copies = sum(
        rows
        * (width * element_bytes + optimizer.state_bytes_per_row(width, element_bytes))
        for rows, width in whole
    )
    return DeviceUse(
        stored_bytes=stored["device"] + stored["node"] + copies,
        host_bytes=stored["host"],
        vectors_bytes=min(sum(n for n, _ in read), dense.memory.batch_bytes),
        exchange_bytes=_peak_elements(layout, lookups, optimizer) * element_bytes,
        collectives=(
            *_collectives(layout, samples, whole, element_bytes, mesh),
            *_gathers(read),
        ),
    )


def _read_vectors(dense: Plan, number: int) -> tuple[int, tuple[str, ...]]:
    """Returns (bytes of a lookup's vectors on a device, axes that do not divide them).

    ``number`` is the index of the vectors in the dense part's batch.
    """
    leaf, sizes = dense.batch[number], dense.axis_sizes
    divided = {axis for axes in leaf.spec for axis in axes}
    size = math.prod(leaf.shape) // math.prod(sizes.get(a, 1) for a in divided)
    same = tuple(axis for axis, n in sizes.items() if n > 1 and axis not in divided)
    return size * jnp.dtype(leaf.dtype).itemsize, same


def _gathers(read: Sequence[tuple[int, tuple[str, ...]]]) -> Iterator[Collective]:
    for (nbytes, axes), count in Counter(read).items():
        if axes:
            yield Collective(
                kind="all-gather",
                axes=axes,
                phase=_ONCE,
                what="rows",
                payload_bytes=nbytes,
                count=count,
            )


def _own_vectors(layout: TableLayout, lookups: Sequence[Lookup]) -> int:
    own = lookups[0].shape[0] // layout.ranks
    return sum(own * one.num_vectors * one.width for one in lookups)


def _peak_elements(
    layout: TableLayout, lookups: Sequence[Lookup], optimizer: SparseOptimizer
) -> int:
    """Returns the largest number of vector elements that a lookup or an update needs.

    An update needs the gradient of each received row, its sum, and the old and new
    values of the row's state.
    """
    samples = lookups[0].shape[0]
    own = samples // layout.ranks
    exchanged = samples * layout.vector_elements
    exchanged += layout.ranks * (layout.block_elements(1) + layout.request_elements)
    # A node exchanges vectors of all its samples inside it, and sums with other nodes.
    exchanged += (samples + samples // layout.per_node) * layout.node_elements
    by_id = sum(own * one.num_ids * one.width for one in lookups)
    looked_up = 2 * exchanged + sum(
        samples * each.num_ids * key.width for key, each in layout.widths.items()
    )
    returned = 2 * exchanged + (by_id if layout.requests else 0)
    updated = exchanged
    for key, count in _rows_updated(layout, samples).items():
        widths = (optimizer.state_width(n, key.width) for n in optimizer.state_names)
        updated += 2 * count * (key.width + sum(widths))
    return _own_vectors(layout, lookups) + max(looked_up, returned, updated)


def _rows_updated(layout: TableLayout, samples: int) -> dict[BufferKey, int]:
    rows = {key: samples * each.num_ids for key, each in layout.widths.items()}
    for key, room in layout.requests.items():
        rows[key] += layout.ranks * room
    for key, places in layout.blocks.items():
        rows[key] += places.shape[1]
    return rows


def _collectives(
    layout: TableLayout,
    samples: int,
    whole: Sequence[tuple[int, int]],
    element_bytes: int,
    mesh: Mapping[str, int],
) -> Iterator[Collective]:
    """Yields the collectives of a step that exchange ids, rows and gradients.

    ``whole`` has (rows, columns) of each replicated table. ``mesh`` has the tables'
    axes, outermost first.
    """
    if layout.ranks == 1:
        return
    axes = tuple(mesh)
    others = layout.ranks - 1
    ids = layout.id_bytes(samples) // others
    sent = layout.exchanged_bytes(samples, element_bytes) // others
    back = layout.exchanged_bytes(samples, element_bytes, backward=True) // others
    sums = sum(rows * (width + 1) for rows, width in whole) * element_bytes
    inner = _inner_axes(mesh, layout.per_node)
    outer = tuple(axis for axis in axes if axis not in inner) or axes
    inner = inner or axes
    node = samples * layout.node_elements * element_bytes
    between = node // layout.per_node
    moved: tuple[tuple[CollectiveKind, str, int, tuple[str, ...]], ...] = (
        ("all-to-all", "ids", ids, axes),
        ("all-to-all", "rows", sent, axes),
        ("all-to-all", "row gradients", back, axes),
        ("all-reduce", "row gradients", sums, axes),
        ("reduce-scatter", "rows", node, inner),
        ("all-to-all", "rows", between, outer),
        ("all-to-all", "row gradients", between, outer),
        ("all-gather", "row gradients", node, inner),
    )
    for kind, what, nbytes, over in moved:
        if nbytes:
            yield Collective(
                kind=kind,
                axes=over,
                phase=_ONCE,
                what=what,
                payload_bytes=nbytes,
                count=1,
            )


def _inner_axes(mesh: Mapping[str, int], per_node: int) -> tuple[str, ...]:
    size, found = 1, list[str]()
    for axis in reversed(tuple(mesh)):
        if size >= per_node:
            break
        size *= mesh[axis]
        found.insert(0, axis)
    return tuple(found) if size == per_node else ()
