"""Number of shards of tensors and parameters, for one mesh or arrays of meshes.

Memory and traffic depend only on the number of shards of each dimension and on the mesh
axes that shard it. For one mesh, both follow from the layout (``layout.spec_of``). For
arrays of meshes, masks apply the same rule, as each mesh may divide other dimensions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from whalejax.planner.model.dimensions import Layout
from whalejax.planner.sharding.fused_parameters import FusedLayout
from whalejax.planner.sharding.layout import Spec, Table, major_dims
from whalejax.planner.sharding.parameter_layout import LeafFacts, LeafGroup


@dataclass(frozen=True)
class ShardCounts:
    """Shards of a tensor's dimensions: numbers for one mesh, or arrays over meshes.

    Attributes:
        per_dim: Number of shards of each dimension.
        axes: One plus the dimension that each mesh axis shards, or 0 if it shards none.
            Axes that shard none in all meshes are absent.
    """

    per_dim: tuple[Any, ...]
    axes: Mapping[str, Any]

    @functools.cached_property
    def num_shards(self) -> Any:
        """Number of shards of the full tensor."""
        return math.prod(self.per_dim)

    def shards(self, axis: str) -> Any:
        """Returns whether an axis shards some dimension."""
        return self.axes.get(axis, 0) != 0

    def take(self, rows: np.ndarray) -> ShardCounts:
        """Returns the counts of some of the meshes."""
        values = [*self.per_dim, *self.axes.values()]
        some = [v[rows] if isinstance(v, np.ndarray) else v for v in values]
        dims = len(self.per_dim)
        axes = dict(zip(self.axes, some[dims:], strict=True))
        return ShardCounts(tuple(some[:dims]), axes)

    def where(self, mask: Any, other: ShardCounts) -> ShardCounts:
        """Returns these counts where a mask is true, and ``other`` elsewhere."""
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
    """Returns whether each mesh axis shards a tensor only in the second of two layouts.

    Args:
        before: First layout.
        after: Second layout.

    Returns:
        Boolean by axis, or an array over meshes by axis.
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
        masks: Boolean by axis, or an array over cases by axis.
        number: Number of cases.

    Yields:
        Mesh axes, and the indices of the cases in which exactly these are true.
    """
    axes = [axis for axis, here in masks.items() if np.any(here)]
    bits = np.zeros(number, dtype=np.int64)
    for place, axis in enumerate(axes):
        bits += masks[axis] * 2**place
    for code in np.unique(bits).tolist():
        joined = tuple(axis for place, axis in enumerate(axes) if code >> place & 1)
        yield joined, np.flatnonzero(bits == code)


def distinct_columns(columns: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Finds the cases with different numbers in some columns.

    Args:
        columns: Arrays of non-negative numbers, one number per case.

    Returns:
        Index of the first case of each combination, and each case's combination.
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
    """Returns the shard counts of one layout.

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
    """Returns the shard counts of ``fused_parameters.lying``, for arrays of meshes.

    Args:
        layout: Roles in each dimension, major role first.
        sizes: Sizes of these roles.
        table: Compute table of the TaskGraph.
        mesh: Array of sizes of each axis, outermost axis first.
        fused: Sharding of a fused parameter; None for any other tensor.
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
    """Returns the shard counts of ``layout.extend_spec``, for arrays of meshes.

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
        """Shards a dimension over an axis where possible, and returns where it did."""
        more = self.per_dim[dim] * size
        hit = may & (length % more == 0)
        if hit.any():
            self.per_dim[dim] = np.where(hit, more, self.per_dim[dim])
            self.axes[axis] = np.where(hit, dim + 1, self.axes.get(axis, 0))
        return hit


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafShardCounts:
    """Shard counts of one group of parameters, for each layout of ``LeafLayout``."""

    compute: ShardCounts
    param: ShardCounts
    gradient: ShardCounts
    optimizer: ShardCounts

    def take(self, rows: np.ndarray) -> LeafShardCounts:
        """Returns the counts of some of the meshes."""
        layouts = self.compute, self.param, self.gradient, self.optimizer
        taken = {
            id(one): one.take(rows) for one in {id(x): x for x in layouts}.values()
        }
        compute, param, gradient, optimizer = (taken[id(one)] for one in layouts)
        return LeafShardCounts(
            compute=compute, param=param, gradient=gradient, optimizer=optimizer
        )

    @property
    def has_sharded_rows(self) -> Any:
        """Whether the rows that lookups read are sharded."""
        return self.compute.per_dim[-2] > 1 if len(self.compute.per_dim) > 1 else False

    @property
    def is_updated_as_stored(self) -> Any:
        """Whether the optimizer updates parameters in their stored shards."""
        return self.param.num_shards == self.optimizer.num_shards


def group_shard_counts(
    group: LeafGroup, table: Table, mesh: Mapping[str, Any], zero: Any
) -> LeafShardCounts:
    """Returns the shard counts of a group of parameters, for arrays of meshes.

    Args:
        group: Group of equal parameters; its ``sharding`` decides.
        table: Compute table of the TaskGraph that first computes with them.
        mesh: Array of sizes of each axis, outermost axis first.
        zero: ZeRO stage over ``data`` in each mesh.
    """
    compute = table_shard_counts(group.layout, group.sizes, table, mesh, group.fused)
    param = compute
    for dim, axis in group.held:
        param = with_storage_axis(param, group.shape, axis, mesh, (dim,))
    param = with_storage_axis(param, group.shape, "fsdp", mesh, group.order)
    owned = param
    if group.trained:
        owned = with_storage_axis(param, group.shape, "data", mesh, group.order)
    return LeafShardCounts(
        compute=compute,
        param=param,
        gradient=owned.where(zero >= 2, param),
        optimizer=owned.where(zero >= 1, param),
    )


def ignores_pins(facts: LeafFacts, cuts: Sequence[LeafShardCounts]) -> Any:
    """Returns whether ``fsdp`` shards another dimension of a leaf than metadata fixes.

    Args:
        facts: Parameters of the model, in groups of equal ones.
        cuts: Shard counts of each group of parameters.

    Returns:
        Boolean, or an array over meshes; valid if the size of ``fsdp`` is above 1.
    """
    ignores: Any = False
    for (group, _), cut in zip(facts.groups, cuts, strict=True):
        if group.pinned is not None:
            there = np.asarray(cut.param.axes.get("fsdp", 0)) == group.pinned + 1
            ignores = ignores | np.logical_not(there)
    return ignores


def sharded_shares(facts: LeafFacts, cuts: Sequence[LeafShardCounts], axis: str) -> Any:
    """Returns the fraction of parameter bytes that a storage axis shards, by mesh.

    For ``data``, only trained parameters count, as the axis shards no others.

    Args:
        facts: Parameters of the model, in groups of equal ones.
        cuts: Shard counts of each group of parameters.
        axis: ``"fsdp"`` or ``"data"``.
    """
    total = 0
    sharded: Any = 0
    for (group, count), cut in zip(facts.groups, cuts, strict=True):
        if axis == "data" and not group.trained:
            continue
        total += group.nbytes * count
        sharded = sharded + group.nbytes * count * cut.optimizer.shards(axis)
    return sharded / max(1, total)


def reduces_gradient(
    group: LeafGroup,
    compute: ShardCounts,
    table: Table,
    mesh: Mapping[str, Any],
    common: frozenset[int],
) -> Any:
    """Returns whether ``parameter_layout.summed_over`` returns any axis, by mesh.

    Args:
        group: Group of equal parameters.
        compute: Shard counts of one parameter in its compute layout.
        table: Compute table of the first TaskGraph that reads the parameter.
        mesh: Sizes of the mesh axes, as numbers or arrays.
        common: Roles of the batch and of sequences, which parameters do not have.
    """
    others = common - {role for atoms in group.layout for role in atoms}
    reduces: Any = False
    for axis, size in mesh.items() if group.trained else ():
        if others.intersection(table.get(axis, ())):
            reduces = reduces | ((size > 1) & np.logical_not(compute.shards(axis)))
    return reduces
