"""Finds logical dimensions: dimensions of several tensors that are always equal.

The index letters of operations (``planner.model.graph.Factor``) tie dimensions of
different tensors together. All ties of a program leave a few *classes*, such as batch,
sequence, embed and heads, without declarations. Equal classes of equal layers become
one *role*, and a plan refers to roles.

Three rules keep different classes separate:

* A dimension is a list of *atoms*, major first, such that every reshape keeps the list
of atoms of its operand.
* Atoms of one tensor have different classes. A tie that would put one class twice into
a tensor is refused. A *cut* remains, at which a value changes layout.
* Ties are made in an order: weights, then elementwise operations, then products of two
activations; each by decreasing bytes. So a conflict cuts the cheaper side. If a product
is still cut at its expensive side, the opposite order is tried too.

In attention, a sequence occurs twice in a product of two values. A ``context`` axis
shards a sequence; outside products, sequence parallelism does too. Shifts, running sums
and convolutions cannot compute a part of a sequence. Their operands are gathered before
and their results sharded after, and cotangents in reverse, so that other operations can
shard the sequence.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from operator import itemgetter
from typing import NamedTuple

from whalejax.planner.model.dimensions import (
    Dimensions,
    Layout,
    RefusedTie,
    fold,
    roles_of,
)
from whalejax.planner.model.dimensions import Role as Role
from whalejax.planner.model.graph import ATTENTION, LOOPS, Graph, Op, Tensor
from whalejax.planner.model.reshape_factors import Atoms, Union, slots_of


MOST_PLACES = 4
"""Largest number of operations that a note names."""


Place = tuple[int, int, int]
"""(Operation, index of its operand or result, dimension of that tensor)."""


def attended(graph: Graph, dims: Dimensions) -> set[int]:
    """Returns the sequences of blocked attention, which has no tensor of scores."""
    return {
        role
        for op in graph.ops
        if op.kind == ATTENTION
        for role in dims.layouts[op.operands[1]][op.column]
    }


def meeting_in_values(
    graph: Graph, dims: Dimensions, weight: Sequence[bool]
) -> set[int]:
    """Returns the roles that occur twice in a product of two values.

    Args:
        graph: The captured loss.
        dims: Logical dimensions of the loss.
        weight: Whether each tensor depends on parameters alone.
    """
    meeting = attended(graph, dims)
    for cut in dims.cuts:
        op = graph.ops[cut.op]
        if op.matmul is not None and not any(weight[t] for t in op.operands):
            meeting.update(dims.layouts[slots_of(op)[cut.slot]][cut.dim])
    return meeting


def with_whole_operations(graph: Graph, dims: Dimensions) -> Dimensions:
    """Restricts the need for an unsharded sequence to the operations that have it.

    Args:
        graph: The captured loss.
        dims: Logical dimensions, in which one such operation makes the role unshardable
            for all operations.

    Returns:
        Dimensions in which these operations need the sequence unsharded, and others can
        shard it. A role along which a loop runs stays unshardable.
    """
    if not any(role.unshardable for role in dims.roles):
        return dims
    weight = graph.weight_tensors()
    result = meeting_in_values(graph, dims, weight) - {r.index for r in dims.batch}
    result = {r for r in result if dims.roles[r].unshardable}
    for op in graph.ops:
        if op.matmul is not None:
            for t in op.operands:
                if weight[t]:
                    result.difference_update(*dims.layouts[t])
    places = {role: set[Place]() for role in result}
    for index, op in enumerate(graph.ops):
        for role, place in _needed(dims, index, op, result):
            if place is None:
                places.pop(role, None)
            elif role in places:
                places[role].add(place)
    return _seen_whole(dims, graph, places) if places else dims


def _needed(
    dims: Dimensions, index: int, op: Op, roles: Collection[int]
) -> Iterator[tuple[int, Place | None]]:
    """Yields (slot, dimension) where an operation needs a role; None if impossible."""
    slots = slots_of(op)
    for factor in op.factors:
        if not factor.needs_all:
            continue
        for slot, dim in factor.members:
            seen = dims.seen.get((index, slot), dims.layouts[slots[slot]])
            for role in {*seen[dim]}.intersection(roles):
                alone = {*seen[dim]} <= {*roles}
                yield (
                    role,
                    (index, slot, dim) if alone and op.kind not in LOOPS else None,
                )


def _seen_whole(
    dims: Dimensions, graph: Graph, places: dict[int, set[Place]]
) -> Dimensions:
    seen = dict(dims.seen)
    for index, slot, dim in sorted(set[Place]().union(*places.values())):
        old = seen.get((index, slot), dims.layouts[slots_of(graph.ops[index])[slot]])
        seen[index, slot] = (*old[:dim], (), *old[dim + 1 :])
    return dataclasses.replace(
        dims,
        roles=tuple(
            dataclasses.replace(role, unshardable="") if role.index in places else role
            for role in dims.roles
        ),
        seen=seen,
        whole=frozenset(
            (index, slot) for at in places.values() for index, slot, _ in at
        ),
    )


def run_whole(
    graph: Graph, dims: Dimensions, sharded: Collection[int]
) -> dict[int, list[Op]]:
    """Returns the operations that run on all of a sharded sequence, by role.

    Args:
        graph: The captured loss.
        dims: Logical dimensions of the loss.
        sharded: Roles that some mesh axis shards.
    """
    whole: dict[int, dict[int, None]] = defaultdict(dict)
    for index, slot in sorted(dims.whole):
        tensor = slots_of(graph.ops[index])[slot]
        for before, after in _pairs(dims.layouts[tensor], dims.seen[index, slot]):
            for role in {*before}.intersection(sharded).difference(after):
                whole[role][index] = None
    return {role: [graph.ops[i] for i in at] for role, at in whole.items()}


def _pairs(before: Layout, after: Layout) -> Iterator[tuple[tuple[int, ...], ...]]:
    return zip(before, after, strict=True)


def whole_notes(graph: Graph, dims: Dimensions, sharded: Collection[int]) -> list[str]:
    """Returns notes on operations that need all of a sequence that others shard.

    Args:
        graph: The captured loss.
        dims: Logical dimensions of the loss.
        sharded: Roles that some mesh axis shards.
    """
    notes = []
    for role, ops in sorted(run_whole(graph, dims, sharded).items()):
        texts = [f"{op.kind}{f' at {op.scope}' if op.scope else ''}" for op in ops]
        places = [
            f"{count} × {text}" if count > 1 else text
            for text, count in Counter(texts).items()
        ]
        more = f" and {len(places) - MOST_PLACES} more" * (len(places) > MOST_PLACES)
        notes.append(
            f"{dims.roles[role].name} ({dims.roles[role].size}) is needed unsharded by "
            f"{', '.join(places[:MOST_PLACES])}{more}: their operands are gathered "
            "along it, and their results sharded"
        )
    return notes


class _Edge(NamedTuple):
    """Tie between two atoms.

    Attributes:
        order: Sort key; ties are made in increasing order.
        op, slot, dim, part: Operation, index of its operand or result, dimension of
            that tensor and atom in that dimension. They locate the cut if the tie is
            refused.
        wanted: Atom that the operation needs there.
        atom: Atom that the tensor has there.
    """

    order: tuple[int, int, int, int]
    op: int
    slot: int
    dim: int
    part: int
    wanted: int
    atom: int


class _Classes:
    """Classes of tied atoms; atoms of one tensor stay in different classes.

    Attributes:
        union: Union-find that joins the atoms of a class.
        holds: Tensors that contain each class, by the class's representative.
        refused: Ties that would put one class twice into a tensor.
        turned: Whether products of two activations were tied in the opposite order.
    """

    def __init__(self, atoms: Atoms, *, turned: bool = False) -> None:
        self.atoms = atoms
        self.turned = turned
        self.graph = atoms.graph
        self.weight = atoms.graph.weight_tensors()
        self.union = Union(len(atoms.owners))
        self.holds: list[set[int]] = [{t} for t in atoms.owners]
        edges = [*self._factor_edges(), *self._regrouping_edges()]
        edges.sort(key=itemgetter(0))
        self.refused = [e for e in edges if not self._join(e.wanted, e.atom)]

    def _join(self, left: int, right: int) -> bool:
        a, b = self.union.find(left), self.union.find(right)
        if a == b:
            return True
        if len(self.holds[a]) < len(self.holds[b]):
            a, b = b, a
        if not self.holds[a].isdisjoint(self.holds[b]):
            return False
        self.union.join(a, b)
        self.holds[a] |= self.holds[b]
        self.holds[b] = set()
        return True

    def _factor_edges(self) -> Iterator[_Edge]:
        weight, first, dim_of = self.weight, self.atoms.first, self.atoms.dim
        nbytes = [t.nbytes for t in self.graph.tensors]
        for index, op in enumerate(self.graph.ops):
            slots, count = slots_of(op), len(op.operands)
            product = op.matmul is not None and not any(weight[t] for t in op.operands)
            for factor in op.factors:
                if len(factor.members) == 1:
                    continue
                anchor = _anchor(factor.members, slots, count, nbytes)
                other = slots[anchor[0]]
                wanted = first[dim_of(other, anchor[1])]
                # A product's result dimensions come before those that it sums over.
                summed = int(anchor[0] < count)
                for slot, dim in factor.members:
                    if (slot, dim) == anchor:
                        continue
                    tensor = slots[slot]
                    tied = weight[tensor] or weight[other]
                    rank = 0 if tied else (2 if product else 1)
                    small = min(nbytes[tensor], nbytes[other])
                    order = (rank, -small, index, summed)
                    if self.turned and rank == 2:
                        order = (rank, small, -index, summed)
                    node = dim_of(tensor, dim)
                    for k, atom in enumerate(range(first[node], first[node + 1])):
                        yield _Edge(order, index, slot, dim, k, wanted + k, atom)

    def _regrouping_edges(self) -> Iterator[_Edge]:
        for r in self.atoms.regroupings:
            if r in self.atoms.barriers:
                continue
            rank = 0 if self.weight[r.operand] else 1
            order = (rank, -self.graph.tensors[r.operand].nbytes, r.op, 0)
            places = [
                (dim, k, atom)
                for dim in r.ins
                for k, atom in enumerate(self.atoms.of(r.operand, dim))
            ]
            wanted = [atom for dim in r.outs for atom in self.atoms.of(r.result, dim)]
            for (dim, k, atom), other in zip(places, wanted, strict=True):
                yield _Edge(order, r.op, 0, dim, k, other, atom)


def _anchor(
    members: tuple[tuple[int, int], ...],
    slots: tuple[int, ...],
    count: int,
    nbytes: Sequence[int],
) -> tuple[int, int]:
    for slot, dim in members:
        if slot >= count:
            return slot, dim
    return max(members, key=lambda m: nbytes[slots[m[0]]])


def _operand_layouts(
    classes: _Classes, layouts: list[Layout], role_of: dict[int, int]
) -> tuple[dict[tuple[int, int], Layout], tuple[RefusedTie, ...]]:
    """Returns layouts that operations need instead of tensors', and the cuts."""
    graph = classes.graph
    seen: dict[tuple[int, int], Layout] = {}
    cuts: dict[tuple[int, int, int], RefusedTie] = {}
    for edge in classes.refused:
        tensor = graph.tensors[slots_of(graph.ops[edge.op])[edge.slot]]
        key, dim, k = (edge.op, edge.slot), edge.dim, edge.part
        cuts[*key, dim] = RefusedTie(
            op=edge.op,
            slot=edge.slot,
            dim=dim,
            nbytes=tensor.nbytes,
            other_nbytes=_instead(graph, edge, layouts),
        )
        old = seen.get(key, layouts[tensor.id])
        role = role_of[classes.union.find(edge.wanted)]
        atoms = (*old[dim][:k], role, *old[dim][k + 1 :])
        seen[key] = (*old[:dim], atoms, *old[dim + 1 :])
    for r in classes.atoms.regroupings:
        if r in classes.atoms.barriers:
            old = seen.get((r.op, 0), layouts[r.operand])
            seen[r.op, 0] = tuple(
                () if dim in r.ins else atoms for dim, atoms in enumerate(old)
            )
    for key in [*seen]:
        _settle(graph, key, layouts, seen, cuts)
    for key in [*seen]:  # Cuts that replaced others may be in conflict too.
        _settle(graph, key, layouts, seen, cuts, moves=False)
    return seen, tuple(cuts.values())


def _instead(graph: Graph, edge: _Edge, layouts: list[Layout]) -> int:
    slots = slots_of(graph.ops[edge.op])
    here = slots[edge.slot]
    role = layouts[here][edge.dim][edge.part]
    return min(
        (
            graph.tensors[t].nbytes
            for slot, t in enumerate(slots)
            if slot != edge.slot and (role in roles_of(layouts[t]) or t == here)
        ),
        default=graph.tensors[here].nbytes,
    )


def _settle(
    graph: Graph,
    key: tuple[int, int],
    layouts: list[Layout],
    seen: dict[tuple[int, int], Layout],
    cuts: dict[tuple[int, int, int], RefusedTie],
    *,
    moves: bool = True,
) -> None:
    """Ensures that no class is in two dimensions of an operand.

    A cut may give a dimension the class of another one, as in a product with a triangle
    that counts rows. Then the other dimension is unsharded there, or the tie that was
    made instead is cut, whichever moves fewer bytes.
    """
    index, slot = key
    op, slots = graph.ops[index], slots_of(graph.ops[index])
    before, view = layouts[slots[slot]], seen[key]
    changed = {d for d, atoms in enumerate(view) if atoms and atoms != before[d]}
    wanted = {role for d in changed for role in view[d]}
    twice = {d for d, a in enumerate(view) if d not in changed and wanted & {*a}}
    if not twice:
        return
    kept, cut = ([*_linked_members(op, slot, dims)] for dims in (twice, changed))
    kept_bytes, cut_bytes = (
        sum(graph.tensors[slots[other]].nbytes for _, (other, _) in members)
        for members in (kept, cut)
    )
    own = graph.tensors[slots[slot]]
    stays = op.reshape or not moves
    if stays or cut_bytes > kept_bytes + own.nbytes * own.differentiable:
        for _, (other, dim) in (*kept, *((d, (slot, d)) for d in twice)):
            _replace(seen, layouts, slots, (index, other), dim, ())
        return
    del seen[key]
    for d in changed:
        cuts.pop((index, slot, d), None)
    for d, (other, dim) in cut:
        _replace(seen, layouts, slots, (index, other), dim, before[d])
        moved, instead = graph.tensors[slots[other]].nbytes, own.nbytes + kept_bytes
        cuts[index, other, dim] = RefusedTie(
            op=index, slot=other, dim=dim, nbytes=moved, other_nbytes=instead
        )


def _linked_members(
    op: Op, slot: int, dims: set[int]
) -> Iterator[tuple[int, tuple[int, int]]]:
    for factor in op.factors:
        for d in dims:
            if (slot, d) in factor.members:
                yield from ((d, m) for m in factor.members if m[0] != slot)


def _replace(
    seen: dict[tuple[int, int], Layout],
    layouts: list[Layout],
    slots: tuple[int, ...],
    key: tuple[int, int],
    dim: int,
    atoms: tuple[int, ...],
) -> None:
    old = seen.get(key, layouts[slots[key[1]]])
    seen[key] = (*old[:dim], atoms, *old[dim + 1 :])


def analyse(graph: Graph) -> Dimensions:
    """Returns the logical dimensions of a captured loss.

    Args:
        graph: The captured forward loss.

    Returns:
        Roles, the layout of every tensor in roles, and the cuts. The time is about
        linear in the number of operations. Results for the last few graphs are cached.
    """
    return _analyse_graph(_IdentityKeyedGraph(graph))


class _IdentityKeyedGraph:
    """Graph that equals all graphs with the same dimensions."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _IdentityKeyedGraph):
            return False
        a, b = self.graph, other.graph
        return a is b or (
            a.batch_dims == b.batch_dims
            and (a.tensors is b.tensors or a.tensors == b.tensors)
            and len(a.ops) == len(b.ops)
            and (a.ops is b.ops or all(map(_ties_alike, a.ops, b.ops)))
        )

    def __hash__(self) -> int:
        return hash((len(self.graph.tensors), len(self.graph.ops)))


def _ties_alike(a: Op, b: Op) -> bool:
    return (
        a.kind == b.kind
        and a.operands == b.operands
        and a.results == b.results
        and a.factors == b.factors
        and a.matmul == b.matmul
        and a.trip == b.trip
        and (a.reshape, a.unknown) == (b.reshape, b.unknown)
        and (a.scope == b.scope or not any(factor.needs_all for factor in a.factors))
    )


@functools.lru_cache(maxsize=16)
def _analyse_graph(same: _IdentityKeyedGraph) -> Dimensions:
    graph = same.graph
    atoms = Atoms(graph)
    result = _dimensions(_Classes(atoms))
    if _dear(graph, result):
        other = _dimensions(_Classes(atoms, turned=True))
        result = min(result, other, key=lambda dims: _moved_bytes(graph, dims))
    return with_whole_operations(graph, result)


def _moved_bytes(graph: Graph, dims: Dimensions) -> int:
    """Returns the bytes that change layout; results, as partial sums, count twice."""
    return sum(
        graph.ops[op].trip
        * graph.tensors[slots_of(graph.ops[op])[slot]].nbytes
        * (1 + (slot >= len(graph.ops[op].operands)))
        for op, slot in dims.seen
    )


def _dear(graph: Graph, dims: Dimensions) -> bool:
    """Returns whether a product's cut may move more bytes than a cut elsewhere."""
    return any(
        graph.ops[cut.op].matmul is not None
        and (
            cut.nbytes > cut.other_nbytes or cut.slot >= len(graph.ops[cut.op].operands)
        )
        for cut in dims.cuts
    )


def _dimensions(classes: _Classes) -> Dimensions:
    graph, atoms = classes.graph, classes.atoms
    role_of, roles = fold(atoms, classes.union, classes.holds)
    find = classes.union.find
    role_at = [role_of[find(atom)] for atom in range(len(atoms.owners))]
    first = atoms.first
    dims = [
        tuple(role_at[start:end]) for start, end in zip(first, first[1:], strict=False)
    ]

    def by_dimension(tensor: Tensor, each: Sequence[tuple[int, ...]]) -> Layout:
        start = atoms.dim(tensor.id, 0)
        return tuple(each[start : start + len(tensor.shape)])

    layouts = [by_dimension(tensor, dims) for tensor in graph.tensors]
    seen, cuts = _operand_layouts(classes, layouts, role_of)
    return Dimensions(
        roles=roles,
        layouts=tuple(layouts),
        sizes=tuple(by_dimension(tensor, atoms.sizes) for tensor in graph.tensors),
        seen=seen,
        cuts=cuts,
    )
