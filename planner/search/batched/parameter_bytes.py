"""Bytes of parameters as they are stored, for many meshes at once.

Few columns of a case matter to them: into how many parts its layout cuts each leaf, and
the sizes of ``data`` and ``fsdp``. What was worked out for these is kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from whalejax.meshes.topology import CompilerProfile
from whalejax.planner.cost.optimizer_step import has_odd_tiles
from whalejax.planner.model.layer_chain import ENDS, EVERYWHERE, FIRST, LAST, LAYER
from whalejax.planner.search.batched.cells import Column, Columns, StackedLeaves
from whalejax.planner.search.batched.layout_variants import Array
from whalejax.planner.sharding.shard_counts import distinct_columns


HOLDERS = (FIRST, LAYER, LAST, ENDS, EVERYWHERE)
"""Places where parameters lie."""

_MOST_DEVICES = 2**20
"""More than any axis has."""


@dataclass
class Held:
    """Parameters of one place as they are stored; bytes on one device, all layers.

    Pairs (two rows) are without and with ZeRO's shards of it.

    Attributes:
        params: stored.
        gradients, state, moved: gradients, optimizer state, and what the update moves.
        operations: roots and the like that it evaluates.
        gathers, updates: (payload, times) of gathers over ``fsdp`` in a micro-batch and
            over ``data`` after the update.
        copies: casts of what is not gathered.
        gathered, fresh: largest leaf: as gathered, and its gradient.
        reduced: gradients as they are reduced, by how often each is.
        kept: of these, what storage leaves whole.
        scattered, odd: gradients that storage shards, and what of them the compiler
            reduces whole for their tiles.
    """

    params: Array
    gradients: Array
    state: Array
    moved: Array
    operations: Array
    gathers: Array
    updates: Array
    copies: Array
    gathered: Array
    fresh: Array
    reduced: Array
    kept: Array
    scattered: Array
    odd: Array

    @classmethod
    def empty(cls, number: int) -> Held:
        """Nothing is stored."""
        shapes = dict.fromkeys(("params", "copies", "reduced"), (number,))
        return cls(
            **{f.name: np.zeros(shapes.get(f.name, (2, number))) for f in fields(cls)}
        )

    def followed(self, other: Held, order: Array) -> Held:
        """Another behind it, and all of that in some order."""
        found: dict[str, Array] = {}
        for field in fields(Held):
            both = [getattr(self, field.name), getattr(other, field.name)]
            found[field.name] = np.concatenate(both, axis=-1)[..., order]
        return Held(**found)


class HeldAt:
    """``Held`` at some rows; each of its columns is taken once it is read."""

    params: Array
    gradients: Array
    state: Array
    moved: Array
    operations: Array
    gathers: Array
    updates: Array
    copies: Array
    gathered: Array
    fresh: Array
    reduced: Array
    kept: Array
    scattered: Array
    odd: Array

    def __init__(self, held: Held, rows: Array) -> None:
        self._held = held
        self._rows = rows

    def __getattr__(self, name: str) -> Any:
        """A column of what is held, at these rows."""
        if name.startswith("_"):
            raise AttributeError(name)
        found = np.take(getattr(self._held, name), self._rows, axis=-1)
        setattr(self, name, found)
        return found


class Storage:
    """How leaves are stored on every mesh that was asked about.

    Args:
        cells: priced columns, one behind the other.
        leaves: groups of leaves along the chain.
        cast_bytes: bytes of a parameter as computed with, over its stored bytes.
        compiler: in which type it brings parameters to those who compute with them.

    Attributes:
        holders: places where there are leaves.
    """

    def __init__(
        self,
        cells: Columns,
        leaves: Sequence[StackedLeaves],
        cast_bytes: float,
        compiler: CompilerProfile,
    ) -> None:
        self._leaves = leaves
        self._compiler = compiler
        self._cast_bytes = cast_bytes
        self.holders = tuple(p for p in HOLDERS if any(x.place == p for x in leaves))
        whole = np.ones(len(cells[Column("samples")]))
        parts = [
            [
                np.maximum(1.0, cells.get(Column("parts", index, dim), whole))
                for dim in range(len(leaf.group.shape))
            ]
            for index, leaf in enumerate(leaves)
        ]
        columns = [column.astype(np.int64) for leaf in parts for column in leaf]
        first, self._kind = distinct_columns([whole.astype(np.int64), *columns])
        self._parts = [[column[first] for column in leaf] for leaf in parts]
        self._keys = np.zeros(0, dtype=np.int64)
        self._held = {place: Held.empty(0) for place in self.holders}

    def at(self, cell: Array, data: Array, fsdp: Array) -> Mapping[int, HeldAt]:
        """What is stored where.

        Args:
            cell, data, fsdp: of every row.

        Returns:
            For each of ``HOLDERS``, what it holds at every row.
        """
        key = (self._kind[cell] * _MOST_DEVICES + data) * _MOST_DEVICES + fsdp
        rows = self._rows(key)
        if rows is None:
            missing = np.setdiff1d(key, self._keys)
            keys = np.concatenate([self._keys, missing])
            order = np.argsort(keys, kind="stable")
            found = self._worked_out(missing)
            for place in self.holders:
                self._held[place] = self._held[place].followed(found[place], order)
            self._keys = keys[order]
            rows = self._rows(key)
            assert rows is not None
        nothing = HeldAt(Held.empty(1), np.zeros_like(rows))
        some = {place: HeldAt(held, rows) for place, held in self._held.items()}
        return {place: some.get(place, nothing) for place in HOLDERS}

    def _rows(self, key: Array) -> Array | None:
        """Where keys stand among those that are known; None unless all are."""
        rows = np.searchsorted(self._keys, key)
        known = rows < len(self._keys)
        if not known.all() or not (self._keys[rows] == key).all():
            return None
        return rows

    def _worked_out(self, keys: Array) -> dict[int, Held]:
        kind, mesh = np.divmod(keys, _MOST_DEVICES**2)
        data, fsdp = np.divmod(mesh, _MOST_DEVICES)
        found = {place: Held.empty(len(keys)) for place in self.holders}
        for leaf, parts in zip(self._leaves, self._parts, strict=True):
            taken = [column[kind] for column in parts]
            before, (stored, owned) = [*taken], _cut(leaf, taken, (fsdp, data))
            one = np.ones(len(keys))
            whole = math.prod(before, start=one)
            held = found[leaf.place]
            every = [math.prod(cut, start=one) for cut in (stored, owned)]
            self._leaf(held, leaf, whole, *every)
            self._reduced(held, leaf, before, (stored, owned))
        return found

    def _leaf(
        self, held: Held, leaf: StackedLeaves, whole: Array, stored: Array, owned: Array
    ) -> None:
        """Add a group of leaves.

        Args:
            held: what it is added to.
            leaf: the group.
            whole, stored, owned: parts into which a leaf is cut: as computed with, as
                stored, and as owned by ZeRO's ranks.
        """
        cast = self._cast_bytes * leaf.group.narrowed
        count = float(leaf.count)
        nbytes, extra = float(leaf.group.nbytes), float(leaf.group.optimizer_bytes)
        gradient = float(leaf.group.gradient_bytes)
        held.params += count * nbytes / stored
        if not leaf.group.trained:
            owned = stored
        sharded = stored > whole
        one = nbytes / leaf.slices / whole
        for zero, parts in enumerate((stored, owned)):
            held.gradients[zero] += count * gradient / parts
            held.state[zero] += count * extra / parts
            held.moved[zero] += count * leaf.group.updated_bytes / parts
            held.operations[zero] += count * leaf.group.operations / parts
            held.fresh[zero] = np.maximum(held.fresh[zero], gradient / parts)
            most = np.where(sharded, one * cast, 0.0)
            most = np.maximum(most, np.where(parts > whole, one, 0.0))
            held.gathered[zero] = np.maximum(held.gathered[zero], most)
        times = leaf.group.gathers * count * leaf.slices * sharded
        moved = leaf.group.moved_bytes(self._compiler) * cast / leaf.slices / whole
        held.gathers += np.stack([moved * times, times])
        times = count * (owned > stored)
        held.updates += np.stack([nbytes / stored * times, times])
        if cast < 1.0:  # What is quantised is widened where it is read.
            held.copies += np.where(sharded, 0.0, count * nbytes * cast / whole)

    def _reduced(
        self,
        held: Held,
        leaf: StackedLeaves,
        before: Sequence[Array],
        after: Sequence[Sequence[Array]],
    ) -> None:
        """Add how the gradients of a group are reduced.

        Args:
            held: what it is added to.
            leaf: the group.
            before, after: parts into which its dimensions are cut: as computed with;
                and as stored, and as owned by ZeRO's ranks.
        """
        group, whole = leaf.group, math.prod(before, start=1.0)
        nbytes = leaf.count * float(group.gradient_bytes) / whole
        held.reduced += nbytes * group.uses
        for zero, cut in enumerate(after if group.trained else ()):
            scatters = math.prod(cut, start=1.0) > whole
            held.kept[zero] += nbytes * group.uses * ~scatters
            held.scattered[zero] += nbytes * scatters
            if len(cut) > 1:
                odd = has_odd_tiles(
                    group, before[-1], cut[-1], self._compiler, self._cast_bytes
                )
                held.odd[zero] += nbytes * scatters * odd


def _cut(
    leaf: StackedLeaves, taken: Sequence[Array], sizes: Sequence[Array]
) -> list[list[Array]]:
    """Parts into which dimensions of a leaf are cut with each of some more axes.

    Args:
        leaf: a group of leaves.
        taken: parts of each dimension without them.
        sizes: of the axes.
    """
    shape, cut, found = leaf.group.shape, [*taken], []
    for size in sizes:
        left = size > 1
        for dim in leaf.group.order:
            if not left.any():
                break
            fits = left & (shape[dim] % (cut[dim] * size) == 0)
            cut[dim] = np.where(fits, cut[dim] * size, cut[dim])
            left = left & ~fits
        found.append([*cut])
    return found
