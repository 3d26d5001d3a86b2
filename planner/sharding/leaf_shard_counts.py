"""Shard counts of parameters, for one mesh or for arrays of meshes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from whalejax.planner.sharding.layout import Table
from whalejax.planner.sharding.parameter_layout import (
    LeafFacts,
    LeafGroup,
)
from whalejax.planner.sharding.shard_counts import (
    ShardCounts,
    table_shard_counts,
    with_storage_axis,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafShardCounts:
    """Shard counts of one parameter group, one for each layout of ``LeafLayout``."""

    compute: ShardCounts
    param: ShardCounts
    gradient: ShardCounts
    optimizer: ShardCounts

    def take(self, rows: np.ndarray) -> LeafShardCounts:
        """Selects some of the meshes."""
        layouts = self.compute, self.param, self.gradient, self.optimizer
        taken = {
            id(one): one.take(rows) for one in {id(x): x for x in layouts}.values()
        }
        compute, param, gradient, optimizer = (taken[id(one)] for one in layouts)
        return LeafShardCounts(
            compute=compute, param=param, gradient=gradient, optimizer=optimizer
        )

    @property
    def is_gathered(self) -> Any:
        """Whether parameters are gathered before they are used."""
        return self.compute.num_shards != self.param.num_shards

    @property
    def has_sharded_rows(self) -> Any:
        """Whether lookups read rows that are sharded."""
        return self.compute.per_dim[-2] > 1 if len(self.compute.per_dim) > 1 else False

    @property
    def is_updated_as_stored(self) -> Any:
        """Whether the optimizer updates the shards that are stored."""
        return self.param.num_shards == self.optimizer.num_shards


def leaf_shard_counts(
    facts: LeafFacts,
    tables: Mapping[int, Table],
    mesh: Mapping[str, Any],
    zero: Any,
) -> tuple[LeafShardCounts, ...]:
    """Implements ``lay_out`` for arrays of meshes.

    Args:
        facts: Parameters of the model, in groups of equal ones.
        tables: Compute table of each TaskGraph, the same in all meshes.
        mesh: Array of sizes of each axis, outermost axis first.
        zero: ZeRO level over ``data`` in each mesh.
    """
    return tuple(
        _group_shard_counts(group, tables[group.home], mesh, zero)
        for group, _ in facts.groups
    )


def _group_shard_counts(
    group: LeafGroup, table: Table, mesh: Mapping[str, Any], zero: Any
) -> LeafShardCounts:
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
    """Returns whether ``fsdp`` shards another dimension than some leaf's metadata.

    Args:
        facts: Parameters of the model, in groups of equal ones.
        cuts: Shard counts of each group.

    Returns:
        Boolean, or an array over meshes; valid for meshes whose ``fsdp`` is above 1.
    """
    ignores: Any = False
    for (group, _), cut in zip(facts.groups, cuts, strict=True):
        if group.pinned is not None:
            there = np.asarray(cut.param.axes.get("fsdp", 0)) == group.pinned + 1
            ignores = ignores | np.logical_not(there)
    return ignores


def sharded_shares(facts: LeafFacts, cuts: Sequence[LeafShardCounts], axis: str) -> Any:
    """Returns the fraction of parameter bytes that a storage axis shards, by mesh.

    ``data`` shards only trained parameters; others do not count for it.

    Args:
        facts: Parameters of the model, in groups of equal ones.
        cuts: Shard counts of each group.
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
    """Returns whether ``parameter_layout.summed_over`` names any axis, by mesh.

    Args:
        group: Group of equal parameters.
        compute: Shard counts of one parameter in its compute layout.
        table: Compute table of the TaskGraph that reads it first.
        mesh: Sizes of the axes, numbers or arrays.
        common: Roles of the batch and of the sequence, which parameters lack.
    """
    others = common - {role for atoms in group.layout for role in atoms}
    reduces: Any = False
    for axis, size in mesh.items() if group.trained else ():
        if others.intersection(table.get(axis, ())):
            reduces = reduces | ((size > 1) & np.logical_not(compute.shards(axis)))
    return reduces
