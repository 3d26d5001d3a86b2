"""Number of shards of each tensor dimension, for one mesh or for arrays of meshes.

Memory and traffic depend only on the number of shards of each dimension and their mesh
axes. For one mesh, these follow from the layout in a plan (``layout.spec_of``). For
arrays of meshes, the same rule uses masks, because each mesh may divide other
dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from whalejax.planner.model.dimensions import Layout
from whalejax.planner.sharding.fused_parameters import FusedLayout
from whalejax.planner.sharding.layout import Spec, Table, major_dims


@dataclass(frozen=True, slots=True)
class ShardCounts:
    """Shards of a tensor's dimensions: numbers for one mesh, or arrays over meshes.

    Attributes:
        per_dim: Number of shards of each dimension.
        axes: One plus the dimension that each mesh axis shards, or 0 if it shards none;
            axes that shard none in any mesh are absent.
    """

    per_dim: tuple[Any, ...]
    axes: Mapping[str, Any]

    @property
    def num_shards(self) -> Any:
        """Number of shards of the full tensor."""
        return math.prod(self.per_dim)

    def shards(self, axis: str) -> Any:
        """Returns whether an axis shards some dimension."""
        return self.axes.get(axis, 0) != 0

    def take(self, rows: np.ndarray) -> ShardCounts:
        """Selects some of the meshes."""
        values = [*self.per_dim, *self.axes.values()]
        some = [v[rows] if isinstance(v, np.ndarray) else v for v in values]
        dims = len(self.per_dim)
        axes = dict(zip(self.axes, some[dims:], strict=True))
        return ShardCounts(tuple(some[:dims]), axes)

    def where(self, mask: Any, other: ShardCounts) -> ShardCounts:
        """Takes these counts where a mask is true, and others elsewhere."""
        if self is other or np.all(mask):
            return self
        if not np.any(mask):
            return other
        pairs = zip(self.per_dim, other.per_dim, strict=True)
        return ShardCounts(
            tuple(np.where(mask, *pair) for pair in pairs),
            {
                axis: np.where(mask, self.axes.get(axis, 0), other.axes.get(axis, 0))
                for axis in {**self.axes, **other.axes}
            },
        )


def added_axes(before: ShardCounts, after: ShardCounts) -> dict[str, Any]:
    """Returns whether each mesh axis shards a dimension only in the second layout.

    Args:
        before: Layout that the axes do not shard.
        after: Layout that they shard.

    Returns:
        Boolean, or an array over meshes, by axis.
    """
    return {
        axis: np.logical_and(after.shards(axis), np.logical_not(before.shards(axis)))
        for axis in after.axes
    }


def axis_sets(
    masks: Mapping[str, Any], number: int
) -> Iterator[tuple[tuple[str, ...], np.ndarray]]:
    """Groups cases by the set of mesh axes whose mask is true.

    Args:
        masks: Boolean, or an array over cases, by axis.
        number: Number of cases.

    Yields:
        Axes, and the indices of their cases.
    """
    axes = [axis for axis, here in masks.items() if np.any(here)]
    bits = np.zeros(number, dtype=np.int64)
    for place, axis in enumerate(axes):
        bits += masks[axis] * 2**place
    for code in np.unique(bits).tolist():
        joined = tuple(axis for place, axis in enumerate(axes) if code >> place & 1)
        yield joined, np.flatnonzero(bits == code)


def distinct_columns(columns: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Finds the cases that differ in some columns.

    Args:
        columns: Arrays of numbers that are not negative, one number for each case.

    Returns:
        Index of the first case of each combination, and by case its combination.
    """
    key, most = np.zeros(len(columns[0]), dtype=np.int64), 1
    for column in columns:
        size = int(column.max(initial=0)) + 1
        if most * size >= 2**62:
            key = np.unique(key, return_inverse=True)[1]
            most = int(key.max(initial=0)) + 1
        key, most = key * size + column, most * size
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    return first, inverse


def spec_shard_counts(spec: Spec, mesh: Mapping[str, Any]) -> ShardCounts:
    """Counts the shards of one layout.

    Args:
        spec: Layout of the tensor.
        mesh: Size of each axis, or arrays of the sizes of meshes with this layout.
    """
    dims = tuple(math.prod(mesh[a] for a in axes) for axes in spec)
    places = {a: dim for dim, axes in enumerate(spec, 1) for a in axes}
    return ShardCounts(dims, places)


def table_shard_counts(
    layout: Layout,
    sizes: Layout,
    table: Table,
    mesh: Mapping[str, Any],
    fused: FusedLayout | None = None,
) -> ShardCounts:
    """Implements ``fused_parameters.lying`` for arrays of meshes.

    Args:
        layout: Roles of each dimension, major atom first.
        sizes: Sizes of the same atoms.
        table: Compute table of the TaskGraph.
        mesh: Array of sizes of each axis, outermost axis first.
        fused: Storage rule of a fused parameter; None for any other tensor.
    """
    counts = _ShardCountsBuilder((1,) * len(layout), {})
    major = major_dims(layout)
    inner = {} if fused is None else dict(fused.inner)
    for axis, size in mesh.items():
        roles = [r for r in table.get(axis, ()) if r in major or r in inner]
        left = size > 1
        for role in roles if roles and left.any() else ():
            lends = fused is not None and role in inner
            may = left & (inner[role] % size == 0) if lends else left
            for other in fused.others if fused is not None and lends else (role,):
                dim = major.get(other)
                if dim is not None:
                    hit = counts.take(axis, dim, sizes[dim][0], size, may)
                    left, may = left & ~hit, may & ~hit
    return counts.cut


def with_storage_axis(
    cut: ShardCounts,
    shape: Sequence[int],
    axis: str,
    mesh: Mapping[str, Any],
    dims: Sequence[int],
) -> ShardCounts:
    """Implements ``layout.extend_spec`` for arrays of meshes.

    Args:
        cut: Shard counts without the axis.
        shape: Shape of the unsharded tensor.
        axis: Mesh axis to add.
        mesh: Array of sizes of each axis.
        dims: Dimensions to try, best first.
    """
    size = mesh[axis]
    left = (size > 1) & np.logical_not(cut.shards(axis))
    if not np.any(left):
        return cut
    storage_axis = _ShardCountsBuilder(cut.per_dim, cut.axes)
    for dim in dims:
        if not left.any():
            break
        left = left & ~storage_axis.take(axis, dim, shape[dim], size, left)
    return storage_axis.cut


class _ShardCountsBuilder:
    def __init__(self, dims: Sequence[Any], axes: Mapping[str, Any]) -> None:
        self.per_dim, self.axes = [*dims], {**axes}

    @property
    def cut(self) -> ShardCounts:
        return ShardCounts(tuple(self.per_dim), self.axes)

    def take(self, axis: str, dim: int, length: int, size: Any, may: Any) -> Any:
        """Shards a dimension by an axis where allowed and divisible; returns where."""
        more = self.per_dim[dim] * size
        hit = may & (length % more == 0)
        if hit.any():
            self.per_dim[dim] = np.where(hit, more, self.per_dim[dim])
            self.axes[axis] = np.where(hit, dim + 1, self.axes.get(axis, 0))
        return hit
