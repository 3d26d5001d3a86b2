"""Number of shards of each tensor dimension, for one mesh or for arrays of meshes.

Memory and traffic need no more of a layout than how many shards each dimension has and
which mesh axes make them. For one mesh that is read off the layout that a plan writes
(``layout.spec_of``); for arrays of meshes the same rule runs with masks, since which
axis divides which dimension differs from mesh to mesh.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from whalejax.planner.model.dimensions import Layout
from whalejax.planner.sharding.fused_parameters import Fused
from whalejax.planner.sharding.layout import Spec, Table


@dataclass(frozen=True, slots=True)
class ShardCounts:
    """Shards of a tensor's dimensions; numbers of one mesh, or arrays over meshes.

    Attributes:
        per_dim: Number of shards of each dimension.
        axes: Whether each mesh axis shards some dimension; axes that never do are
            absent.
    """

    per_dim: tuple[Any, ...]
    axes: Mapping[str, Any]

    @property
    def num_shards(self) -> Any:
        """Number of shards of the whole tensor."""
        return math.prod(self.per_dim)

    def shards(self, axis: str) -> Any:
        """Whether an axis shards some dimension."""
        return self.axes.get(axis, False)

    def take(self, rows: np.ndarray) -> ShardCounts:
        """Select some of the meshes."""

        def some(value: Any) -> Any:
            return value[rows] if isinstance(value, np.ndarray) else value

        axes = {axis: some(here) for axis, here in self.axes.items()}
        return ShardCounts(tuple(map(some, self.per_dim)), axes)

    def where(self, mask: Any, other: ShardCounts) -> ShardCounts:
        """Take these counts where a mask is true, and others elsewhere."""
        pairs = zip(self.per_dim, other.per_dim, strict=True)
        return ShardCounts(
            tuple(np.where(mask, *pair) for pair in pairs),
            {
                axis: np.where(mask, self.shards(axis), other.shards(axis))
                for axis in {**self.axes, **other.axes}
            },
        )


def spec_shard_counts(spec: Spec, mesh: Mapping[str, Any]) -> ShardCounts:
    """Count the shards of one layout.

    Args:
        spec: Layout of the tensor.
        mesh: Size of each axis, or arrays of the sizes of meshes with this layout.
    """
    dims = tuple(math.prod(mesh[a] for a in axes) for axes in spec)
    return ShardCounts(dims, {a: True for axes in spec for a in axes})


def table_shard_counts(
    layout: Layout,
    sizes: Layout,
    table: Table,
    mesh: Mapping[str, Any],
    fused: Fused | None = None,
) -> ShardCounts:
    """``fused_parameters.lying`` for arrays of meshes.

    Args:
        layout: Roles of each dimension, major atom first.
        sizes: Sizes of the same atoms.
        table: Compute table of the TaskGraph.
        mesh: Array of sizes of each axis, outermost axis first.
        fused: Storage rule of a fused parameter; None for any other tensor.
    """
    found = _ShardCountsBuilder((1,) * len(layout), {})
    major = {atoms[0]: dim for dim, atoms in reversed(list(enumerate(layout))) if atoms}
    inner = {} if fused is None else dict(fused.inner)
    for axis, size in mesh.items():
        left = size > 1
        for role in table.get(axis, ()) if left.any() else ():
            lends = fused is not None and role in inner
            may = left & (inner[role] % size == 0) if lends else left
            for other in fused.others if fused is not None and lends else (role,):
                dim = major.get(other)
                if dim is not None:
                    hit = found.take(axis, dim, sizes[dim][0], size, may)
                    left, may = left & ~hit, may & ~hit
    return found.cut


def with_storage_axis(
    cut: ShardCounts,
    shape: Sequence[int],
    axis: str,
    mesh: Mapping[str, Any],
    dims: Sequence[int],
) -> ShardCounts:
    """``layout.extend_spec`` for arrays of meshes.

    Args:
        cut: Shard counts without the axis.
        shape: Shape of the unsharded tensor.
        axis: Mesh axis to add.
        mesh: Array of sizes of each axis.
        dims: Dimensions to try, best first.
    """
    size = mesh[axis]
    left = (size > 1) & np.logical_not(cut.shards(axis))
    found = _ShardCountsBuilder(cut.per_dim, cut.axes)
    for dim in dims:
        if not left.any():
            break
        left = left & ~found.take(axis, dim, shape[dim], size, left)
    return found.cut


class _ShardCountsBuilder:
    """Shard counts to which axes are added."""

    def __init__(self, dims: Sequence[Any], axes: Mapping[str, Any]) -> None:
        self.per_dim, self.axes = [*dims], {**axes}

    @property
    def cut(self) -> ShardCounts:
        return ShardCounts(tuple(self.per_dim), self.axes)

    def take(self, axis: str, dim: int, length: int, size: Any, may: Any) -> Any:
        """Shard a dimension by an axis where allowed and divisible; return where."""
        more = self.per_dim[dim] * size
        hit = may & (length % more == 0)
        if hit.any():
            self.per_dim[dim] = np.where(hit, more, self.per_dim[dim])
            self.axes[axis] = self.axes.get(axis, False) | hit
        return hit
