"""Tables that are looked up, as a compiler writes them where memory has lanes.

A row is taken and added to where it lies in memory as one, so that the columns of what
is gathered and of the gradient fill whole lanes, however few there are. Lookups wait
for nothing, nor does what follows their gradients: compilers have all tables there at
once. Tables as they are stored lie with their rows in lanes, and grow by nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from whalejax.planner.cost.operation_cost import Setting
from whalejax.planner.sharding.layout import Spec
from whalejax.planner.sharding.parameter_layout import LeafFacts, LeafGroup, LeafLayout


_SUBLANES = 8
"""The other side of a tile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """Bytes on one device of the tables that are looked up.

    Attributes:
        groups: for each group of parameters, whether it holds such tables that stand
            unsharded after their gradients are made.
        gathered: of all that are put together for their lookups, as they come and with
            their columns in lanes.
        largest: of the largest gradient of those that storage shards, as it is made.
        gradients: of all gradients of the others.
        updated: of the tables and their state while the optimizer updates them, where
            it does that in the form of the gradients.
    """

    groups: np.ndarray
    gathered: float = 0.0
    largest: float = 0.0
    gradients: float = 0.0
    updated: float = 0.0


def tables_of(
    facts: LeafFacts,
    layouts: Sequence[LeafLayout],
    counts: np.ndarray,
    gathered: np.ndarray,
    whole: np.ndarray,
    s: Setting,
) -> Tables:
    """Find the tables.

    Args:
        facts: the parameters.
        layouts: of each of their groups.
        counts: for each group, how many lie on a device.
        gathered: for each group, of one that is put together; 0 where none is.
        whole: for each group, of one gradient as it is made.
        s: mesh and compiler.
    """
    groups = np.zeros(len(layouts), bool)
    taken = largest = gradients = updated = largest_update = 0.0
    lanes = s.cluster.compiler.lanes
    looked_up = np.array([g.looked_up and g.trained for g, _ in facts.groups], bool)
    for place, ((group, _), layout) in enumerate(
        zip(facts.groups, layouts, strict=True)
    ):
        if lanes == 1 or not looked_up[place]:
            continue
        sizes = _local_sizes(group.shape, layout.compute, s)
        padding = _padding(sizes, lanes)
        taken += counts[place] * gathered[place] * (padding + (padding > 1.0))
        unsharded = layout.compute == layout.param
        gradient = whole[place] * _forms(sizes, lanes, copied=not unsharded)
        if unsharded:
            groups[place] = True
            gradients += counts[place] * gradient
            if layout.optimizer == layout.compute and counts[place]:
                alone = counts.sum(where=looked_up) == 1.0
                there, passing = _updated(group, sizes, whole[place], lanes)
                if alone and len(sizes) == 2 and not sizes[0] % lanes:
                    # Rows are added up where they lie: no other form is needed.
                    there = passing = 0.0
                updated += counts[place] * there
                largest_update = max(largest_update, passing)
        elif counts[place]:
            largest = max(largest, gradient)
    return Tables(
        groups=groups,
        gathered=taken,
        largest=largest,
        gradients=gradients,
        updated=updated + largest_update,
    )


def _updated(
    group: LeafGroup, sizes: Sequence[int], gradient: float, lanes: int
) -> tuple[float, float]:
    """What an update holds beside a table and its state as they are stored.

    It is made in the form in which rows were added up, and copied back. Tables that lie
    apart are updated one by one, and all wait to be copied; what stacked tables and
    their state become takes the place of the gradient, if that is no narrower.

    Args:
        group: of equal parameters.
        sizes: of one of them on a device.
        gradient: bytes of its gradient there.
        lanes: of the compiler.

    Returns:
        Bytes for each table, and bytes for one at a time.
    """
    part = math.prod(sizes) / math.prod(group.shape)
    table, state = group.nbytes * part, group.optimizer_bytes * part
    if len(sizes) == 2:
        padding = _padding(sizes, lanes)
        if padding == 1.0:
            return 0.0, 0.0
        return padding * table, padding * (state + gradient)
    if not sizes[-2] % lanes:
        return 0.0, 0.0
    wide = group.gradient_bytes * part if gradient < table else 0.0
    return _tiled(sizes[0]) * (table + state + wide), 0.0


def _local_sizes(shape: Sequence[int], spec: Spec, s: Setting) -> list[int]:
    """Each dimension on one device."""
    parts = [int(np.prod([s.mesh[a] for a in axes], initial=1)) for axes in spec]
    return [-(-size // count) for size, count in zip(shape, parts, strict=True)]


def _padding(sizes: Sequence[int], lanes: int) -> float:
    """By how much a table grows with its columns in lanes."""
    return -(-sizes[-1] // lanes) * lanes / max(1, sizes[-1])


def _forms(sizes: Sequence[int], lanes: int, *, copied: bool) -> float:
    """How often a gradient is there: added up, and of stacked tables once more.

    These are one long table when rows are added to it. Where the rows of each fill
    whole tiles, that is what the array is with rows in lanes; it is copied back all the
    same, with the tables in the other side of a tile, where storage cuts it or the
    table that it is added to lies otherwise.
    """
    padding = _padding(sizes, lanes)
    if len(sizes) == 2 or (padding == 1.0 and not copied):
        return padding
    return _tiled(sizes[0]) + (padding if sizes[-2] % lanes else 1.0)


def _tiled(tables: int) -> float:
    """By how much stacked tables grow in the other side of a tile."""
    if tables <= _SUBLANES:
        return 1.0
    return -(-tables // _SUBLANES) * _SUBLANES / tables
