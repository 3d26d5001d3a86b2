"""Step time of a layout: compute, collectives and update, row by row.

One rule covers all operations. Forward: the roles that operands hold and results do
not are summed, so where a mesh axis shards one of them the result is reduced over that
axis. Backward: the cotangent of an operand is summed over every role of the operation
that the operand lacks. Megatron's all-reduces, the data-parallel gradient reduction,
synchronised batch statistics and the vocabulary-parallel loss are all instances.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from whalejax.meshes.cluster import Cluster
from whalejax.planner.collectives import (
    CollectiveKind,
    axis_parts,
    collective_seconds,
)
from whalejax.planner.dimensions import Dimensions
from whalejax.planner.layout import Spec, Table, axis_roles, shards, spec_of
from whalejax.planner.rows import Move, Product, Row, Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """A collective of the step, folded.

    Attributes:
        kind: all-reduce, all-gather, reduce-scatter or all-to-all.
        axes: mesh axes it runs over.
        phase: forward, backward or update.
        what: gradient, activation, parameter or border.
        payload_bytes: bytes on one device, each time.
        count: how often in one micro-batch (in one step for the update).
        scope: one place of the model.
    """

    kind: CollectiveKind
    axes: tuple[str, ...]
    phase: str
    what: str
    payload_bytes: int
    count: int
    scope: str = ""

    def times(self, num_micro_batches: int) -> int:
        """How often it runs in one step."""
        return self.count * (1 if self.phase == "update" else num_micro_batches)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCost:
    """What one row costs in one micro-batch, forward and backward.

    Attributes:
        compute_seconds: matrix products and memory traffic.
        collectives: what it communicates.
        launches: how many separate kernels it is, for the fixed cost of launching.
    """

    compute_seconds: float
    collectives: tuple[Collective, ...] = ()
    launches: float = 0.0


@dataclass(frozen=True, slots=True)
class Setting:
    """What a row is evaluated under: a mesh and the number of micro-batches."""

    mesh: Mapping[str, int]
    num_micro_batches: int
    cluster: Cluster
    dims: Dimensions
    batch_roles: frozenset[int] = field(default=frozenset())


def _parts(roles: frozenset[int], hits: Mapping[str, int], s: Setting) -> int:
    """Into how many parts the mesh cuts these roles."""
    return math.prod(s.mesh[axis] for axis, role in hits.items() if role in roles)


def local_bytes(slot: Slot, hits: Mapping[str, int], s: Setting) -> float:
    """Bytes of a slot on one device in one micro-batch."""
    roles = slot.roles
    nbytes = slot.nbytes / _parts(roles, hits, s)
    if roles & s.batch_roles:
        nbytes /= s.num_micro_batches
    return nbytes


def row_hits(row: Row, table: Table, s: Setting) -> dict[str, int]:
    """Mesh axis to the role of this operation that it shards."""
    present = frozenset[int]().union(*(slot.roles for slot in row.slots))
    hits: dict[str, int] = {}
    taken: dict[int, int] = {}
    for axis, role in axis_roles(present, table, s.mesh).items():
        parts = taken.get(role, 1) * s.mesh[axis]
        if s.dims.roles[role].size % parts == 0:
            hits[axis] = role
            taken[role] = parts
    return hits


def row_cost(row: Row, hits: Mapping[str, int], s: Setting) -> RowCost:
    """Cost of one row under the axes that hit it."""
    kind = s.cluster.slowest
    forward, backward = _memory_bytes(row, hits, s)
    if row.product is not None:
        one = _product_seconds(row.product, hits, s)
        twice = row.product.left_gradient + row.product.right_gradient
        ahead = max(one, kind.elementwise_seconds(forward))
        behind = twice * max(one, kind.elementwise_seconds(backward / max(1, twice)))
        launches = 1.0 + twice
    else:
        ahead = kind.elementwise_seconds(forward, _transcendentals(row, hits, s))
        behind = kind.elementwise_seconds(backward)
        launches = float(bool(row.writes)) * (2 if backward else 1)
    if row.remat:
        behind += ahead
    collectives = (*_forward(row, hits, s), *_backward(row, hits, s))
    return RowCost(
        compute_seconds=(ahead + behind) * row.count,
        collectives=collectives,
        launches=launches * row.count,
    )


def _memory_bytes(row: Row, hits: Mapping[str, int], s: Setting) -> tuple[float, float]:
    slots = row.slots
    forward = sum(local_bytes(slots[i], hits, s) for i in (*row.reads, *row.writes))
    if not any(slot.differentiable for slot in row.results):
        return forward, 0.0
    # The backward pass reads what the forward read and the cotangents of what it
    # wrote, and writes the cotangents of what it read.
    extra = sum(
        local_bytes(slots[i], hits, s) for i in row.reads if slots[i].differentiable
    )
    return forward, forward + extra


def _transcendentals(row: Row, hits: Mapping[str, int], s: Setting) -> float:
    """Elements on one device whose result costs an exp, tanh or the like."""
    if not row.transcendental:
        return 0.0
    slot = row.results[0]
    return local_bytes(slot, hits, s) / slot.itemsize_bytes


def _product_seconds(p: Product, hits: Mapping[str, int], s: Setting) -> float:
    def local(size: int, roles: frozenset[int]) -> float:
        scale = s.num_micro_batches if roles & s.batch_roles else 1
        return max(1.0, size / _parts(roles, hits, s) / scale)

    return s.cluster.slowest.matmul_seconds(
        p.dtype,
        local(p.m, p.m_roles),
        local(p.k, p.k_roles),
        local(p.n, p.n_roles),
        count=local(p.batch, p.batch_roles),
    )


def _axes_on(roles: frozenset[int], hits: Mapping[str, int]) -> tuple[str, ...]:
    return tuple(axis for axis, role in hits.items() if role in roles)


def _forward(row: Row, hits: Mapping[str, int], s: Setting) -> list[Collective]:
    axes = _axes_on(row.reduced, hits)
    if not axes:
        return []
    weight = all(slot.weight for slot in row.operands)
    return [
        Collective(
            kind="all-reduce",
            axes=axes,
            phase="forward",
            what="parameter" if weight else "activation",
            payload_bytes=int(local_bytes(result, hits, s)),
            count=row.count * (2 if row.remat else 1),
            scope=row.scope,
        )
        for result in row.results
    ]


def _backward(row: Row, hits: Mapping[str, int], s: Setting) -> list[Collective]:
    if not any(slot.differentiable for slot in row.results):
        return []
    present = frozenset[int]().union(*(slot.roles for slot in row.slots))
    found = []
    for operand in row.operands:
        axes = _axes_on(present - operand.roles, hits)
        if operand.differentiable and axes:
            found.append(
                Collective(
                    kind="all-reduce",
                    axes=axes,
                    phase="backward",
                    what="gradient" if operand.weight else "activation",
                    payload_bytes=int(local_bytes(operand, hits, s)),
                    count=row.count,
                    scope=row.scope,
                )
            )
    return found


def move_cost(move: Move, source: Spec, target: Spec, s: Setting) -> RowCost:
    """Cost of bringing a value from one layout to another, there and back."""
    nbytes = float(move.source.nbytes)
    if (move.source.roles | move.target.roles) & s.batch_roles:
        nbytes /= s.num_micro_batches
    found = list(_reshard(move, source, target, nbytes, "forward", s))
    if move.source.differentiable:
        found += _reshard(move, target, source, nbytes, "backward", s)
    return RowCost(compute_seconds=0.0, collectives=tuple(found))


def _reshard(
    move: Move, before: Spec, after: Spec, nbytes: float, phase: str, s: Setting
) -> list[Collective]:
    old = {axis: d for d, axes in enumerate(before) for axis in axes}
    new = {axis: d for d, axes in enumerate(after) for axis in axes}
    gathered = tuple(a for a in s.mesh if a in old and a not in new)
    exchanged = tuple(a for a in s.mesh if a in old and a in new and old[a] != new[a])
    count = move.count * (2 if move.remat and phase == "forward" else 1)
    kept = [a for a in old if a not in gathered]
    found = []
    for kind, axes in (("all-to-all", exchanged), ("all-gather", gathered)):
        if axes:
            found.append(
                Collective(
                    kind="all-to-all" if kind == "all-to-all" else "all-gather",
                    axes=axes,
                    phase=phase,
                    what="border",
                    payload_bytes=int(nbytes / math.prod(s.mesh[a] for a in kept)),
                    count=count,
                    scope=move.scope,
                )
            )
    return found


def move_specs(
    move: Move, tables: Mapping[int, Table], s: Setting
) -> tuple[Spec, Spec]:
    """The two layouts between which a value moves."""
    return (
        spec_of(
            move.source.layout, move.source.sizes, tables[move.source_graph], s.mesh
        ),
        spec_of(
            move.target.layout, move.target.sizes, tables[move.target_graph], s.mesh
        ),
    )


def seconds_of(collective: Collective, s: Setting) -> float:
    """Time of a folded collective in one micro-batch (all its repetitions)."""
    parts = axis_parts(collective.axes, s.mesh, s.cluster)
    once = collective_seconds(collective.kind, collective.payload_bytes, parts)
    return once * collective.count


def spec_shards(spec: Spec, s: Setting) -> int:
    """Into how many parts a layout cuts a tensor."""
    return shards(spec, s.mesh)
