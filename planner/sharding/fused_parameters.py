"""Fused parameters, of which a dimension is split by their readers.

A kernel ``[embed, 3 · heads]`` is read as ``[embed, 3, heads]``. An axis that shards
the heads cannot shard the stored kernel along them, because they are the minor part of
a dimension. So the axis shards another dimension of the stored kernel. One exchange
converts between the two layouts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Final

from whalejax.planner.model.dimensions import Dimensions, Layout, roles_of
from whalejax.planner.model.graph import LOOPS, Graph, Op, Tensor
from whalejax.planner.model.logical_dimensions import analyse
from whalejax.planner.model.reshape_factors import groups
from whalejax.planner.sharding.layout import Spec, Table, spec_of


_PICKING: Final = frozenset({"split", "slice", "unstack", "dynamic_slice"})
"""Operations that select a part of a dimension."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedLayout:
    """Sharding of a fused parameter.

    Attributes:
        inner: Sizes of the roles that are dimensions only in readers, by role.
        others: Roles of the dimensions that are not fused, in the order of
            ``ParameterForms.storage``.
    """

    inner: tuple[tuple[int, int], ...]
    others: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterForms:
    """Forms in which operations read the parameters.

    Attributes:
        weight: Whether each tensor depends on parameters alone.
        fused: Sharding of each fused parameter and of its forms, by tensor id. A value
            computed from several parameters is a form of the largest.
        minor: Roles that are only the minor part of a dimension for some reader.
        storage: Shardable roles of the parameters; those with most bytes come first.
    """

    weight: tuple[bool, ...]
    fused: Mapping[int, FusedLayout]
    minor: frozenset[int]
    storage: tuple[int, ...]


def reading(graph: Graph, dims: Dimensions) -> ParameterForms:
    """Returns the forms in which operations read the parameters.

    Args:
        graph: Captured loss.
        dims: Logical dimensions of the loss.
    """
    weight = graph.weight_tensors()
    source, read = _forms(graph, weight)
    storage = _storage_order(graph.params, dims)
    minor: set[int] = set()
    inner: dict[int, dict[int, int]] = {}
    for t in read:
        leaf = source[t]
        seen = _majors(dims.layouts[t], dims.sizes[t])
        minor |= _minors(dims.layouts[t])
        for role in _minors(dims.layouts[leaf]) & set(seen):
            inner.setdefault(leaf, {})[role] = seen[role]
    of_leaf = {
        leaf: FusedLayout(
            inner=tuple(sorted(roles.items())),
            others=_others(dims.layouts[leaf], storage),
        )
        for leaf, roles in inner.items()
    }
    return ParameterForms(
        weight=weight,
        fused={t: of_leaf[leaf] for t, leaf in source.items() if leaf in of_leaf},
        minor=frozenset(minor),
        storage=storage,
    )


def picks(graph: Graph) -> bool:
    """Returns whether any operation selects a part of a dimension."""
    return any(op.kind in _PICKING for op in graph.ops)


def fused_dimensions(graph: Graph) -> dict[int, dict[int, int]]:
    """Returns the fused dimensions at which parameters may be split.

    A dimension is fused if its major part is an index of components, such as query, key
    and value. Readers select from the index, and no product sums over it. Parameters
    that are split before every reader are left out.

    Args:
        graph: Captured loss.

    Returns:
        Number of parts by dimension, for each parameter by its tensor id.
    """
    dims = analyse(graph)
    chosen = _picked(graph, dims)
    source, read = _forms(graph, graph.weight_tensors())
    as_it_is = {source[t] for t in read if _cuts(dims, t, chosen)}
    return {
        tensor.id: _cuts(dims, tensor.id, chosen)
        for tensor in graph.params
        if tensor.id in as_it_is
    }


def merging_reshapes(graph: Graph) -> tuple[frozenset[tuple[int, ...]], int]:
    """Finds reshapes of values that make a dimension the minor part of another.

    A reshape of ``[batch, heads, ...]`` to ``[batch · heads, ...]`` hides the heads. A
    reshape of ``[time, batch, ...]`` to ``[time · batch, ...]`` hides the batch.
    Readers cannot be sharded along a hidden dimension.

    Args:
        graph: Captured loss.

    Returns:
        Positions of the reshapes, and the number of operations that have a shardable
        dimension only as a minor part.
    """
    weight = graph.weight_tensors()
    made = (op for op in graph.ops if op.reshape and op.operands)
    ops = [op for op in made if not weight[op.operands[0]]]
    shapes = (
        tuple(graph.tensors[t].shape for t in (op.operands[0], op.results[0]))
        for op in ops
    )
    if not any(
        len(ins) > 1 == len(outs) for pair in shapes for ins, outs in groups(*pair)
    ):
        return frozenset(), 0
    dims = analyse(graph)
    hidden = _minor_only_roles(dims, weight)
    positions = frozenset(
        op.position
        for op in ops
        if hidden[op.results[0]].intersection(
            atoms[0] for atoms in dims.layouts[op.operands[0]] if atoms
        )
    )
    return positions, sum(1 for _ in _hiding(graph, hidden))


def computed_whole(
    graph: Graph, dims: Dimensions, sharded: Set[int]
) -> dict[int, tuple[Op, int]]:
    """Returns operations that have a sharded dimension only as a minor part.

    Args:
        graph: Captured loss.
        dims: Logical dimensions of the loss.
        sharded: Roles that some mesh axis shards.

    Returns:
        (First such operation, number of them), by role.
    """
    whole: dict[int, tuple[Op, int]] = {}
    for op, roles in _hiding(graph, _minor_only_roles(dims, graph.weight_tensors())):
        for role in roles & sharded:
            first, count = whole.get(role, (op, 0))
            whole[role] = first, count + 1
    return whole


def _minor_only_roles(dims: Dimensions, weight: Sequence[bool]) -> list[frozenset[int]]:
    return [
        frozenset()
        if weight[t]
        else frozenset(r for r in _minors(layout) if not dims.roles[r].unshardable)
        for t, layout in enumerate(dims.layouts)
    ]


def _hiding(
    graph: Graph, hidden: Sequence[frozenset[int]]
) -> Iterator[tuple[Op, frozenset[int]]]:
    for op in graph.ops:
        roles = frozenset[int]().union(*(hidden[t] for t in op.results))
        if roles and not op.reshape and op.kind not in LOOPS:
            yield op, roles


def _cuts(dims: Dimensions, tensor: int, chosen: frozenset[int]) -> dict[int, int]:
    pairs = zip(dims.layouts[tensor], dims.sizes[tensor], strict=True)
    return {
        dim: sizes[0]
        for dim, (atoms, sizes) in enumerate(pairs)
        if len(atoms) > 1 and atoms[0] in chosen
    }


def _picked(graph: Graph, dims: Dimensions) -> frozenset[int]:
    picked: set[int] = set()
    shared: set[int] = set()
    for index, op in enumerate(graph.ops):
        seen = [
            roles_of(dims.seen.get((index, slot), dims.layouts[t]))
            for slot, t in enumerate(op.operands)
        ]
        if op.matmul is not None:
            shared |= seen[0] & seen[1]
        elif op.kind in _PICKING and seen:
            results = (roles_of(dims.layouts[t]) for t in op.results)
            picked |= seen[0].difference(*results)
    return frozenset(picked - shared)


def _forms(graph: Graph, weight: Sequence[bool]) -> tuple[dict[int, int], set[int]]:
    """Returns the parameter of each form, and the forms that other values read."""
    source = {t.id: t.id for t in graph.params}
    read: set[int] = set()
    for op in graph.ops:
        mine = [t for t in op.operands if t in source]
        made = [t for t in op.results if weight[t]]
        if mine and made:
            largest = max(mine, key=lambda t: graph.tensors[t].nbytes)
            source.update(dict.fromkeys(made, source[largest]))
        tie = op.kind in LOOPS and not op.results
        if not tie and (len(made) < len(op.results) or not op.results):
            read.update(mine)
    return source, read


def _majors(layout: Layout, sizes: Layout) -> dict[int, int]:
    return {
        atoms[0]: size[0] for atoms, size in zip(layout, sizes, strict=True) if atoms
    }


def _minors(layout: Layout) -> frozenset[int]:
    major = {atoms[0] for atoms in layout if atoms}
    return roles_of(layout) - major


def _others(layout: Layout, storage: Sequence[int]) -> tuple[int, ...]:
    alone = {atoms[0] for atoms in layout if len(atoms) == 1}
    return tuple(role for role in storage if role in alone)


def _storage_order(tensors: Sequence[Tensor], dims: Dimensions) -> tuple[int, ...]:
    covered: Counter[int] = Counter()
    for t in tensors:
        for role in roles_of(dims.layouts[t.id]):
            if not dims.roles[role].unshardable:
                covered[role] += t.nbytes
    return tuple(role for role, _ in covered.most_common())


def lying(
    layout: Layout,
    sizes: Layout,
    fused: FusedLayout | None,
    table: Table,
    mesh: Mapping[str, int],
) -> Spec:
    """Returns the layout in which a parameter can be stored for a compute table.

    Args:
        layout: Roles in each dimension, major role first.
        sizes: Sizes of these roles.
        fused: Sharding of the fused parameter; None if it is not fused.
        table: Table of the TaskGraph.
        mesh: Sizes of the mesh axes.

    Returns:
        Layout under the table. In a fused parameter, an axis that shards an inner role
        shards another dimension instead if that is divisible.
    """
    if fused is None:
        return spec_of(layout, sizes, table, mesh)
    inner, others = dict(fused.inner), fused.others

    def instead(role: int, size: int) -> tuple[int, ...]:
        if role not in inner:
            return (role,)
        return others if inner[role] % size == 0 else ()

    lent = {
        axis: tuple(r for role in roles for r in instead(role, mesh.get(axis, 1)))
        for axis, roles in table.items()
    }
    return spec_of(layout, sizes, lent, mesh)
