"""Chooses reduced sizes of a model's logical dimensions.

Each shard of a dimension keeps a few elements, so that it has inner elements and
neighbours. An axis divides the reduced size if and only if it divides the full one.
Small differences between sizes stay, such as that of tokens and of targets, which lack
the first token.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from whalejax.equality.mesh_reduction import MeshReduction
from whalejax.planner.model.analysis import GraphAnalysis
from whalejax.planner.model.dimensions import Dimensions
from whalejax.planner.model.graph import Graph
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan_entries import RegionTable


SMALL: Final = 8
"""Largest size of unsharded dimensions that are not reduced."""

_EDGE: Final = 4
_EDGES: Final = ("slice", "pad", "concatenate", "dynamic_slice")


@dataclass(slots=True)
class _Divisors:
    """Numbers of devices that shard a role: pairs of the plan's and the reduced one."""

    pairs: set[tuple[int, int]] = field(default_factory=set)

    def needed(self, whole: int) -> int:
        """Returns the least size that all numbers divide that divide the full size."""
        return math.lcm(*(now for full, now in self.pairs if whole % full == 0), 1)

    def like(self, size: int, whole: int) -> bool:
        return all((size % now == 0) == (whole % full == 0) for full, now in self.pairs)


def reduced_sizes(
    plan: Plan, analysed: GraphAnalysis, mesh: MeshReduction, multiple: int
) -> dict[int, int]:
    """Returns the reduced sizes of roles, by index.

    Args:
        plan: A runnable plan.
        analysed: Logical dimensions of the loss at the plan's sizes.
        mesh: Reduced mesh axes.
        multiple: Number of elements per device along a sharded dimension.
    """
    graph, dims = analysed.graph, analysed.dims
    divisors = _divisors(plan, analysed, mesh)
    layers = layer_roles(graph, dims)
    result: dict[int, int] = {}
    for role in dims.roles:
        if role.index in layers:
            result[role.index] = sum(mesh.stage_layers) or min(role.size, multiple)
            continue
        whole = role.divisible
        few = _size(divisors[role.index], whole, multiple, batch=role.is_batch)
        result[role.index] = few * (role.size // whole)
    _keep_edges(graph, dims, divisors, multiple, result)
    sizes = {role.index: role.size for role in dims.roles}
    return {index: size for index, size in result.items() if 0 < size < sizes[index]}


def _size(divisors: _Divisors, whole: int, multiple: int, *, batch: bool) -> int:
    needed = divisors.needed(whole)
    if needed == 1:
        if whole <= SMALL and not batch:
            return whole
        size = min(whole, 6 - multiple)  # 4, or 3 for odd extents
    else:
        size = min(whole, needed * min(multiple, max(1, whole // needed)))
    while size < whole and not divisors.like(size, whole):
        size += needed
    return min(size, whole)


def _divisors(
    plan: Plan, analysed: GraphAnalysis, mesh: MeshReduction
) -> dict[int, _Divisors]:
    divisors: dict[int, _Divisors] = defaultdict(_Divisors)
    if plan.group_size > 1:
        for batch in analysed.dims.batch:
            divisors[batch.index].pairs.add((plan.group_size, plan.group_size))
    for part in _parts(plan):
        full = part.axis_sizes
        now = dict(mesh.axes(part.axes))
        for role, axes in _tables(part, analysed.dims):
            pair = (math.prod(full[a] for a in axes), math.prod(now[a] for a in axes))
            divisors[role].pairs.add(pair)
            if "context" in axes:  # zig-zag order needs two blocks per device
                divisors[role].pairs.add((2 * pair[0], 2 * pair[1]))
        for role, axes in _specs(part, analysed):
            pair = (
                math.prod(full.get(a, 1) for a in axes),
                math.prod(now.get(a, 1) for a in axes),
            )
            divisors[role].pairs.add(pair)
    return divisors


def _parts(plan: Plan) -> Iterator[Plan]:
    yield plan
    for part in (*plan.stage_plans, *plan.pipelines):
        yield from _parts(part)


def _tables(plan: Plan, dims: Dimensions) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yields (role, axes) of all dimensions that the tables of a plan shard."""
    storage = RegionTable(task_graph="", marks=(), axes=plan.storage)
    for table in (*plan.compute, storage):
        axes_of: dict[int, list[str]] = defaultdict(list)
        roles_of = dict(table.axes)
        for axis, _ in plan.axes:
            for name in roles_of.get(axis, ()):
                role = dims.find(name)
                if role is not None:
                    axes_of[role.index].append(axis)
        for index, axes in axes_of.items():
            for count in range(1, len(axes) + 1):
                yield index, tuple(axes[:count])
                yield index, (axes[count - 1],)


def _specs(
    plan: Plan, analysed: GraphAnalysis
) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yields (role, axes) for the sharded dimensions of parameters and of the batch."""
    dims, graph = analysed.dims, analysed.graph
    by_path = {t.path: t.id for t in graph.tensors if t.path and t.kind == "param"}
    for leaf in plan.leaves:
        tensor = by_path.get(leaf.path)
        if tensor is None:
            continue
        for spec in (leaf.param_spec, leaf.gradient_spec, leaf.optimizer_spec):
            for atoms, axes in zip(dims.layouts[tensor], spec, strict=False):
                if atoms and axes:
                    yield atoms[0], axes
    inputs = [t.id for t in graph.tensors if t.kind == "batch"]
    for tensor, part in zip(inputs, plan.batch, strict=False):
        for atoms, axes in zip(dims.layouts[tensor], part.spec, strict=False):
            if atoms and axes:
                yield atoms[0], axes


def layer_roles(graph: Graph, dims: Dimensions) -> frozenset[int]:
    """Returns the roles of layers: leading dimensions of a scan's weights.

    Args:
        graph: Graph of the loss.
        dims: Logical dimensions of the loss.
    """
    weight, roles = graph.weight_tensors(), set[int]()
    for op in graph.ops:
        if op.kind == "scan" and not op.results:
            for tensor in op.operands:
                # A scan along a sequence has no layers.
                if weight[tensor] and dims.layouts[tensor]:
                    roles.update(dims.layouts[tensor][0])
    return frozenset(roles)


# Roles whose sizes differ by a few elements.


def _keep_edges(
    graph: Graph,
    dims: Dimensions,
    divisors: Mapping[int, _Divisors],
    multiple: int,
    found: dict[int, int],
) -> None:
    """Changes reduced sizes so that roles in a group differ by as much as before."""
    sizes = {role.index: role.size for role in dims.roles}
    for group in tied_roles(graph, dims):
        alike: dict[int, list[int]] = defaultdict(list)
        for role, difference in group.items():
            alike[difference].append(role)
        shared = {
            difference: _Divisors(set().union(*(divisors[r].pairs for r in roles)))
            for difference, roles in alike.items()
        }

        def needed(difference: int, shared: Mapping[int, _Divisors] = shared) -> int:
            whole = sizes[alike[difference][0]]  # noqa: B023
            return shared[difference].needed(whole)

        base = max(alike, key=lambda d: (needed(d), -d))
        first = alike[base][0]
        whole, batch = sizes[first], any(dims.roles[r].is_batch for r in alike[base])
        size = _size(shared[base], whole, multiple, batch=batch)
        if any(dims.roles[r].space for r in group):
            size = max(found[r] for r in alike[base])
        moved = {r: size + group[r] - base for r in group}
        whole_ones = any(n >= sizes[r] or n < 1 for r, n in moved.items())
        found.update({r: sizes[r] for r in group} if whole_ones else moved)


def tied_roles(graph: Graph, dims: Dimensions) -> Iterator[dict[int, int]]:
    """Yields groups of roles whose sizes differ by at most a few elements.

    Args:
        graph: Graph of the loss.
        dims: Logical dimensions of the loss.

    Yields:
        Difference in size of each role of a group from the first role.
    """
    larger: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for one, other, difference in {*_edges(graph, dims), *_cuts(graph, dims)}:
        larger[one].append((other, difference))
        larger[other].append((one, -difference))
    left = set(larger)
    while left:
        group = _connected(left, larger)
        left -= group.keys()
        yield group


def _cuts(graph: Graph, dims: Dimensions) -> Iterator[tuple[int, int, int]]:
    """Yields (role, role, 0) for roles of one dimension that may be sharded separately.

    For instance, the sequence of self-attention has a role in queries and one in keys.
    """
    for (index, slot), layout in dims.seen.items():
        op = graph.ops[index]
        tensor = (*op.operands, *op.results)[slot]
        for atoms, others in zip(layout, dims.layouts[tensor], strict=True):
            if len(atoms) == len(others):
                for one, other in zip(atoms, others, strict=True):
                    a, b = (dims.roles[role].size for role in (one, other))
                    if one != other and a == b:
                        yield one, other, 0


def _edges(graph: Graph, dims: Dimensions) -> Iterator[tuple[int, int, int]]:
    for op in graph.ops:
        if op.kind not in _EDGES:
            continue
        for operand in op.operands:
            for result in op.results:
                pairs = zip(dims.layouts[operand], dims.layouts[result], strict=False)
                for one, other in pairs:
                    if len(one) != 1 or len(other) != 1 or one == other:
                        continue
                    a, b = (dims.roles[atoms[0]].size for atoms in (one, other))
                    if 0 < abs(a - b) <= _EDGE and min(a, b) > SMALL:
                        yield one[0], other[0], a - b


def _connected(
    left: set[int], larger: Mapping[int, Sequence[tuple[int, int]]]
) -> dict[int, int]:
    """Returns a group of connected roles, with differences in size from the first."""
    first = min(left)
    group, waiting = {first: 0}, [first]
    while waiting:
        one = waiting.pop()
        for other, difference in larger[one]:
            if other not in group:
                group[other] = group[one] - difference
                waiting.append(other)
    return group
