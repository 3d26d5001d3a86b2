"""How layouts cut the parameters: of one mesh, or of many as arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from whalejax.planner.sharding.cuts import Cut, cut_by, cuts_of, extended
from whalejax.planner.sharding.layout import Table
from whalejax.planner.sharding.parameter_layout import (
    LeafFacts,
    LeafGroup,
    LeafLayout,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafCuts:
    """Cuts of the parameters of one group, where ``LeafLayout`` has layouts."""

    compute: Cut
    param: Cut
    gradient: Cut
    optimizer: Cut

    def take(self, rows: np.ndarray) -> LeafCuts:
        """Some of the meshes."""
        return LeafCuts(
            compute=self.compute.take(rows),
            param=self.param.take(rows),
            gradient=self.gradient.take(rows),
            optimizer=self.optimizer.take(rows),
        )

    @property
    def gathered(self) -> Any:
        """Whether they are put together for what computes with them."""
        return self.compute.parts != self.param.parts

    @property
    def selected(self) -> Any:
        """Whether the rows that are taken of them lie in shards."""
        return self.compute.dims[-2] > 1 if len(self.compute.dims) > 1 else False

    @property
    def updated_as_stored(self) -> Any:
        """Whether the optimizer updates the shards in which they are stored."""
        return self.param.parts == self.optimizer.parts


def leaf_cuts(
    layouts: Sequence[LeafLayout], mesh: Mapping[str, int]
) -> tuple[LeafCuts, ...]:
    """The cuts of layouts.

    Args:
        layouts: of each group, from ``lay_out``.
        mesh: sizes of the axes.
    """
    found = []
    for one in layouts:
        known = {spec: cut_by(spec, mesh) for spec in (one.compute, one.param)}
        known |= {
            spec: cut_by(spec, mesh)
            for spec in (one.gradient, one.optimizer)
            if spec not in known
        }
        found.append(
            LeafCuts(
                compute=known[one.compute],
                param=known[one.param],
                gradient=known[one.gradient],
                optimizer=known[one.optimizer],
            )
        )
    return tuple(found)


def cut_leaves(
    facts: LeafFacts,
    tables: Mapping[int, Table],
    mesh: Mapping[str, Any],
    zero: Any,
) -> tuple[LeafCuts, ...]:
    """``lay_out`` for arrays of meshes.

    Args:
        facts: the parameters.
        tables: compute table of each TaskGraph, the same in all meshes.
        mesh: sizes of the axes, outermost first.
        zero: level over ``data`` in each.
    """
    return tuple(
        _cut_group(group, tables[group.home], mesh, zero) for group, _ in facts.groups
    )


def _cut_group(
    group: LeafGroup, table: Table, mesh: Mapping[str, Any], zero: Any
) -> LeafCuts:
    compute = cuts_of(group.layout, group.sizes, table, mesh, group.fused)
    param = compute
    for dim, axis in group.held:
        param = extended(param, group.shape, axis, mesh, (dim,))
    param = extended(param, group.shape, "fsdp", mesh, group.order)
    owned = param
    if group.trained:
        owned = extended(param, group.shape, "data", mesh, group.order)
    return LeafCuts(
        compute=compute,
        param=param,
        gradient=owned.where(zero >= 2, param),
        optimizer=owned.where(zero >= 1, param),
    )


def reduces_gradient(
    group: LeafGroup,
    compute: Cut,
    table: Table,
    mesh: Mapping[str, Any],
    common: frozenset[int],
) -> Any:
    """Whether ``parameter_layout.summed_over`` names any axis, of one mesh or of each.

    Args:
        group: Equal parameters.
        compute: Cut of one of them where it is computed with.
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
