"""Costs of a model's rows under one table after another, each worked out once.

It stands between the cost model, which knows one row under one table, and the search,
which weighs many tables on a mesh: most of them differ in what shards a few rows, and
what shards a row is all that its cost depends on there. On other meshes an operation
costs the same where its dimensions are cut into as many parts by the same axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from whalejax.planner.cost.operation_cost import (
    RowCost,
    Setting,
    flow_cost,
    hits_of,
    row_cost,
)
from whalejax.planner.sharding.layout import Table
from whalejax.planner.sharding.operation_rows import Flow, Row, Rows


Place = tuple[int, frozenset[int]]
"""A TaskGraph, and roles that stand in something there."""

T = TypeVar("T")


class _Known:
    """What is known of kinds of rows.

    Attributes:
        operations: costs by what shards them, and into how many parts.
        roles: of kinds of rows.
    """

    def __init__(self) -> None:
        self.mesh: tuple[int, ...] = ()
        self.operations: dict[tuple[Any, ...], RowCost] = {}
        self._flows: dict[tuple[Any, ...], RowCost] = {}
        self.roles: dict[int, frozenset[int]] = {}

    def flows(self, mesh: Mapping[str, int]) -> dict[tuple[Any, ...], RowCost]:
        """Costs of flows on a mesh, by what shards them; of others it is forgotten."""
        sizes = tuple(mesh.values())
        if sizes != self.mesh:
            self.mesh, self._flows = sizes, {}
        return self._flows


class Prices:
    """What the rows of a model cost in one micro-batch.

    Args:
        rows: the model's.
        beside: prices of rows of the same views, which share what is known.
    """

    def __init__(self, rows: Rows, beside: Prices | None = None) -> None:
        self.rows = rows
        self.known: _Known = _Known() if beside is None else beside.known
        self._ops = [
            (row.task_graph, self._roles(kind, row, _present))
            for row, kind in zip(rows.ops, rows.op_kinds, strict=True)
        ]
        self._flows = [
            _places(flow, self._roles(kind, flow, _deciding))
            for flow, kind in zip(rows.flows, rows.flow_kinds, strict=True)
        ]

    def _roles(
        self, kind: int, one: T, roles_of: Callable[[T], frozenset[int]]
    ) -> frozenset[int]:
        known = self.known.roles
        if kind not in known:
            known[kind] = roles_of(one)
        return known[kind]

    def of(self, tables: Mapping[int, Table], s: Setting) -> tuple[RowCost, ...]:
        """The cost of every operation, then of every flow.

        Args:
            tables: compute table of each TaskGraph.
            s: mesh and micro-batches.
        """
        return (*self._of_ops(tables, s), *self._of_flows(tables, s))

    def _of_ops(self, tables: Mapping[int, Table], s: Setting) -> list[RowCost]:
        known, count = self.known.operations, s.num_micro_batches
        hits = {
            place: tuple(hits_of(place[1], tables[place[0]], s).items())
            for place in dict.fromkeys(self._ops)
        }
        parts = {place: _parts(hit, s.mesh) for place, hit in hits.items()}
        found = []
        rows = zip(self.rows.ops, self.rows.op_kinds, self._ops, strict=True)
        for row, kind, place in rows:
            key = kind, count, hits[place], parts[place]
            if key not in known:
                known[key] = row_cost(row, dict(hits[place]), s)
            found.append(known[key])
        return found

    def _of_flows(self, tables: Mapping[int, Table], s: Setting) -> list[RowCost]:
        known, count = self.known.flows(s.mesh), s.num_micro_batches
        axes = [axis for axis, size in s.mesh.items() if size > 1]
        told: dict[Place, tuple[tuple[int, ...], ...]] = {}
        for home, roles in dict.fromkeys(p for places in self._flows for p in places):
            told[home, roles] = tuple(
                tuple(role for role in tables[home].get(axis, ()) if role in roles)
                for axis in axes
            )
        found = []
        rows = zip(self.rows.flows, self.rows.flow_kinds, self._flows, strict=True)
        for flow, kind, places in rows:
            key = kind, count, *(told[place] for place in places)
            if key not in known:
                collectives = flow_cost(flow, tables, s)
                known[key] = RowCost(compute_seconds=0.0, collectives=collectives)
            found.append(known[key])
        return found


def _parts(
    hits: tuple[tuple[str, int], ...], mesh: Mapping[str, int]
) -> tuple[int, ...]:
    """Into how many parts each role is cut, in order of their first axes."""
    roles = dict.fromkeys(role for _, role in hits)
    return tuple(math.prod(mesh[a] for a, r in hits if r == role) for role in roles)


def _present(row: Row) -> frozenset[int]:
    return frozenset[int]().union(*(slot.roles for slot in row.slots))


def _deciding(flow: Flow) -> frozenset[int]:
    """All roles that decide how a value lies where it is made and read."""
    roles = flow.present | flow.source.roles
    for use in flow.uses:
        roles |= use.present | use.view.roles
    if flow.fused is not None:
        roles |= {role for role, _ in flow.fused.inner}
    return roles


def _places(flow: Flow, roles: frozenset[int]) -> list[Place]:
    homes = (flow.task_graph, *(use.task_graph for use in flow.uses))
    return [(home, roles) for home in homes]
