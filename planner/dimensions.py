"""Logical dimensions: which dimensions of all tensors are one and the same.

The index letters of the operations (``planner.graph.Factor``) tie dimensions of
different tensors together. Following the ties through the whole program leaves a
handful of *classes*: batch, sequence, embed, heads and so on, found and not declared.
Equal layers give equal classes; those fold into one *role*, and a plan speaks of roles.

Three ideas keep the classes from running together:

* a dimension is a list of *atoms*, major first, fine enough that every reshape is the
  identity on the list of atoms;
* atoms of one tensor are pairwise different: a tie that would put one class twice into
  a tensor is refused and becomes a *cut*, a place where a value changes layout;
* ties are made in an order: weights first, then elementwise, then products of two
  activations, each by falling bytes, so that the cheap side of a conflict is cut.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from whalejax.planner.graph import Graph, Op, Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """A logical dimension of the model, folded over equal layers.

    Attributes:
        index: its place in ``Dimensions.roles``.
        name: the Flax logical name where there is one, ``"batch"``, or the first leaf
            that holds it, as in ``"blocks.*.mlp.up.kernel[1]"``.
        size: length, unsharded.
        aliases: every name by which a user may pin it.
        unshardable: why it must stay whole, or empty.
        is_batch: it is the batch dimension.
        of_weights: some parameter holds it.
        copies: how many classes folded into it.
    """

    index: int
    name: str
    size: int
    aliases: tuple[str, ...] = ()
    unshardable: str = ""
    is_batch: bool = False
    of_weights: bool = False
    copies: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A refused tie: operand ``slot`` of an operation is laid out differently there.

    Attributes:
        op: index into ``Graph.ops``.
        slot: operand or result of the operation.
        dim: dimension of that tensor.
        nbytes: size of the tensor, unsharded.
    """

    op: int
    slot: int
    dim: int
    nbytes: int


Layout = tuple[tuple[int, ...], ...]
"""Roles of each dimension of a tensor, major atom first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimensions:
    """What ``analyse`` finds.

    Attributes:
        roles: the logical dimensions.
        layouts: for every tensor, the roles of its dimensions.
        sizes: for every tensor, the sizes of the atoms, in the same places.
        seen: for (op, slot) where a cut changed it, the layout as that operation
            needs it; elsewhere the operation sees ``layouts``.
        cuts: the refused ties.
    """

    roles: tuple[Role, ...]
    layouts: tuple[Layout, ...]
    sizes: tuple[Layout, ...]
    seen: dict[tuple[int, int], Layout]
    cuts: tuple[Cut, ...]

    def find(self, name: str) -> Role | None:
        """The role that bears a name or alias, or None."""
        for role in self.roles:
            if name == role.name:
                return role
        return next((role for role in self.roles if name in role.aliases), None)

    @property
    def batch(self) -> tuple[Role, ...]:
        """The batch roles (one, unless the batch leaves never meet)."""
        return tuple(r for r in self.roles if r.is_batch)


class _Union:
    """Union-find over integers with path halving."""

    def __init__(self, count: int) -> None:
        self.parent = list(range(count))

    def find(self, node: int) -> int:
        parent = self.parent
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    def join(self, a: int, b: int) -> int:
        a, b = self.find(a), self.find(b)
        if a != b:
            self.parent[b] = a
        return a


def _slots(op: Op) -> tuple[int, ...]:
    return op.operands + op.results


@dataclass(frozen=True, slots=True, kw_only=True)
class _Edge:
    """A tie between two atoms.

    Attributes:
        order: sort key; ties are made in rising order.
        op, slot, place: operation, operand or result of it, and (dimension, atom)
            there: what is cut if the tie is refused.
        wanted: the atom that the operation needs in that place.
        atom: the atom that stands there.
    """

    order: tuple[int, int, int]
    op: int
    slot: int
    place: tuple[int, int]
    wanted: int
    atom: int


def starred(path: str) -> str:
    """A path with the numbers of repeated layers replaced by ``*``.

    >>> starred("blocks.3.up.kernel"), starred("layer_11.conv2d.kernel")
    ('blocks.*.up.kernel', 'layer_*.conv2d.kernel')
    """
    return re.sub(r"\d+(?=\.|$)", "*", path)


def _groups(
    before: tuple[int, ...], after: tuple[int, ...]
) -> Iterator[tuple[list[int], list[int]]]:
    """Pairs of runs of dimensions with equal products, size-1 dimensions left out."""
    left = [d for d, size in enumerate(before) if size != 1]
    right = [d for d, size in enumerate(after) if size != 1]
    i = j = 0
    while i < len(left) and j < len(right):
        ins, outs = [left[i]], [right[j]]
        a, b = before[left[i]], after[right[j]]
        i, j = i + 1, j + 1
        while a != b:
            if a < b and i < len(left):
                a *= before[left[i]]
                ins.append(left[i])
                i += 1
            elif b < a and j < len(right):
                b *= after[right[j]]
                outs.append(right[j])
                j += 1
            else:
                return
        yield ins, outs


class _Analysis:
    """The two passes over one graph; ``run`` gives the result."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.base: list[int] = []
        count = 0
        for tensor in graph.tensors:
            self.base.append(count)
            count += len(tensor.shape)
        self.dims = _Union(count)
        self.size_of = [size for t in graph.tensors for size in t.shape]
        self.points: dict[int, set[int]] = defaultdict(set)
        self.barriers: set[tuple[int, int]] = set()

    def dim(self, tensor: int, dim: int) -> int:
        return self.base[tensor] + dim

    # Pass A: cut points of dimensions, so that reshapes become identities.

    def refine(self) -> None:
        for op in self.graph.ops:
            slots = _slots(op)
            for factor in op.factors:
                nodes = [self.dim(slots[s], d) for s, d in factor.members]
                for node in nodes[1:]:
                    self.dims.join(nodes[0], node)
        regroupings = list(self._regroupings())
        changed = True
        while changed:
            changed = False
            for key, ins, outs in regroupings:
                if key not in self.barriers:
                    changed |= self._push(key, ins, outs)
        for root in list(self.points):
            self._make_chain(root)

    def _regroupings(
        self,
    ) -> Iterator[tuple[tuple[int, int], list[int], list[int]]]:
        tensors = self.graph.tensors
        for index, op in enumerate(self.graph.ops):
            if not op.reshape:
                continue
            a, b = op.operands[0], op.results[0]
            pairs = _groups(tensors[a].shape, tensors[b].shape)
            for number, (ins, outs) in enumerate(pairs):
                key = (index, number)
                if len(ins) == len(outs) == 1:
                    self.dims.join(self.dim(a, ins[0]), self.dim(b, outs[0]))
                yield (
                    key,
                    [self.dim(a, d) for d in ins],
                    [self.dim(b, d) for d in outs],
                )

    def _push(self, key: tuple[int, int], ins: list[int], outs: list[int]) -> bool:
        bounds: set[int] = set()
        for side in (ins, outs):
            low = 1
            for node in reversed(side):
                bounds.add(low)
                bounds.update(low * p for p in self.points[self.dims.find(node)])
                low *= self.size_of[node]
        fresh: list[tuple[int, set[int]]] = []
        for side in (ins, outs):
            low = 1
            for node in reversed(side):
                high = low * self.size_of[node]
                inside = [b for b in bounds if low < b < high]
                if any(b % low or high % b for b in inside):
                    self.barriers.add(key)
                    return False
                fresh.append((self.dims.find(node), {b // low for b in inside}))
                low = high
        changed = False
        for root, points in fresh:
            changed |= not points <= self.points[root]
            self.points[root] |= points
        return changed

    def _make_chain(self, root: int) -> None:
        chain: list[int] = []
        for point in sorted(self.points[root]):
            if not chain or point % chain[-1] == 0:
                chain.append(point)
        self.points[root] = set(chain)

    def atom_sizes(self, node: int) -> tuple[int, ...]:
        """Sizes of a dimension's atoms, major first."""
        size = self.size_of[node]
        if size == 1:
            return ()
        chain = [1, *sorted(self.points.get(self.dims.find(node), ())), size]
        return tuple(b // a for a, b in itertools.pairwise(chain))[::-1]

    # Pass B: ties between atoms, under disequality.

    def tie(self) -> None:
        self.first: list[int] = []
        owner: list[int] = []
        self.atoms: list[tuple[int, ...]] = []
        count = 0
        for tensor in self.graph.tensors:
            for dim in range(len(tensor.shape)):
                sizes = self.atom_sizes(self.dim(tensor.id, dim))
                self.first.append(count)
                self.atoms.append(sizes)
                owner.extend([tensor.id] * len(sizes))
                count += len(sizes)
        self.classes = _Union(count)
        self.holds: list[set[int]] = [{t} for t in owner]
        self.refused: list[_Edge] = []
        edges = [*self._factor_edges(), *self._regrouping_edges()]
        for edge in sorted(edges, key=lambda e: e.order):
            if not self._join(edge.wanted, edge.atom):
                self.refused.append(edge)

    def _join(self, left: int, right: int) -> bool:
        a, b = self.classes.find(left), self.classes.find(right)
        if a == b:
            return True
        if len(self.holds[a]) < len(self.holds[b]):
            a, b = b, a
        if not self.holds[a].isdisjoint(self.holds[b]):
            return False
        self.classes.parent[b] = a
        self.holds[a] |= self.holds[b]
        self.holds[b] = set()
        return True

    def _factor_edges(self) -> Iterator[_Edge]:
        tensors = self.graph.tensors
        weight = self.graph.weight_tensors()
        for index, op in enumerate(self.graph.ops):
            slots = _slots(op)
            product = op.matmul is not None and not any(weight[t] for t in op.operands)
            for factor in op.factors:
                anchor = _anchor(op, factor.members, tensors)
                other = slots[anchor[0]]
                wanted = self.dim(other, anchor[1])
                for slot, dim in factor.members:
                    if (slot, dim) == anchor:
                        continue
                    tensor = slots[slot]
                    tied = weight[tensor] or weight[other]
                    rank = 0 if tied else (2 if product else 1)
                    small = min(tensors[tensor].nbytes, tensors[other].nbytes)
                    node = self.dim(tensor, dim)
                    for k in range(len(self.atoms[node])):
                        yield _Edge(
                            order=(rank, -small, index),
                            op=index,
                            slot=slot,
                            place=(dim, k),
                            wanted=self.first[wanted] + k,
                            atom=self.first[node] + k,
                        )

    def _regrouping_edges(self) -> Iterator[_Edge]:
        weight = self.graph.weight_tensors()
        for key, ins, outs in self._regroupings():
            if key in self.barriers:
                continue
            index = key[0]
            operand = self.graph.ops[index].operands[0]
            order = (
                0 if weight[operand] else 1,
                -self.graph.tensors[operand].nbytes,
                index,
            )
            places = [(n, k) for n in ins for k in range(len(self.atoms[n]))]
            wanted = [
                self.first[n] + k for n in outs for k in range(len(self.atoms[n]))
            ]
            for (node, k), other in zip(places, wanted, strict=True):
                yield _Edge(
                    order=order,
                    op=index,
                    slot=0,
                    place=(node - self.base[operand], k),
                    wanted=other,
                    atom=self.first[node] + k,
                )

    # Roles: classes folded over equal layers, and named.

    def fold(self) -> tuple[dict[int, int], tuple[Role, ...]]:
        facts = _ClassFacts(self)
        groups: dict[object, list[int]] = defaultdict(list)
        for root in facts.roots:
            groups[facts.signature(root)].append(root)
        role_of: dict[int, int] = {}
        roles: list[Role] = []
        taken: Counter[str] = Counter()
        for roots in itertools.chain.from_iterable(
            self._apart(group) for group in groups.values()
        ):
            index = len(roles)
            role_of.update(dict.fromkeys(roots, index))
            roles.append(facts.role(index, roots, taken))
        return role_of, tuple(roles)

    def _apart(self, roots: list[int]) -> list[list[int]]:
        """Classes that look alike, parted where two of them stand in one tensor.

        Square layers in a row give such classes; they alternate between two roles.
        """
        parts: list[tuple[list[int], set[int]]] = []
        for root in roots:
            tensors = self.holds[root]
            for members, held in parts:
                if held.isdisjoint(tensors):
                    members.append(root)
                    held |= tensors
                    break
            else:
                parts.append(([root], set(tensors)))
        return [members for members, _ in parts]

    def run(self) -> Dimensions:
        self.refine()
        self.tie()
        role_of, roles = self.fold()
        layouts: list[Layout] = []
        sizes: list[Layout] = []
        for tensor in self.graph.tensors:
            nodes = range(
                self.base[tensor.id], self.base[tensor.id] + len(tensor.shape)
            )
            layouts.append(tuple(self._roles_of(n, role_of) for n in nodes))
            sizes.append(tuple(self.atoms[n] for n in nodes))
        seen, cuts = self._seen(layouts, role_of)
        return Dimensions(
            roles=roles,
            layouts=tuple(layouts),
            sizes=tuple(sizes),
            seen=seen,
            cuts=cuts,
        )

    def _roles_of(self, node: int, role_of: dict[int, int]) -> tuple[int, ...]:
        start = self.first[node]
        return tuple(
            role_of[self.classes.find(start + k)] for k in range(len(self.atoms[node]))
        )

    def _seen(
        self, layouts: list[Layout], role_of: dict[int, int]
    ) -> tuple[dict[tuple[int, int], Layout], tuple[Cut, ...]]:
        seen: dict[tuple[int, int], Layout] = {}
        cuts: dict[tuple[int, int, int], Cut] = {}
        for edge in self.refused:
            tensor = self._tensor(edge.op, edge.slot)
            key, (dim, k) = (edge.op, edge.slot), edge.place
            cuts[*key, dim] = Cut(
                op=edge.op, slot=edge.slot, dim=dim, nbytes=tensor.nbytes
            )
            old = seen.get(key, layouts[tensor.id])
            role = role_of[self.classes.find(edge.wanted)]
            atoms = (*old[dim][:k], role, *old[dim][k + 1 :])
            seen[key] = (*old[:dim], atoms, *old[dim + 1 :])
        for key, ins, _ in self._regroupings():
            if key in self.barriers:
                tensor = self._tensor(key[0], 0)
                whole = {node - self.base[tensor.id] for node in ins}
                old = seen.get((key[0], 0), layouts[tensor.id])
                seen[key[0], 0] = tuple(
                    () if dim in whole else atoms for dim, atoms in enumerate(old)
                )
        return seen, tuple(cuts.values())

    def _tensor(self, op: int, slot: int) -> Tensor:
        return self.graph.tensors[_slots(self.graph.ops[op])[slot]]


def _anchor(
    op: Op, members: tuple[tuple[int, int], ...], tensors: tuple[Tensor, ...]
) -> tuple[int, int]:
    """The member that the others are tied to: a result, else the largest operand."""
    slots = _slots(op)
    for slot, dim in members:
        if slot >= len(op.operands):
            return slot, dim
    return max(members, key=lambda m: tensors[slots[m[0]]].nbytes)


class _ClassFacts:
    """What folding and naming need to know of each class."""

    def __init__(self, analysis: _Analysis) -> None:
        graph = analysis.graph
        find = analysis.classes.find
        self.size: dict[int, int] = {}
        self.weights: dict[int, dict[str, int]] = defaultdict(dict)
        self.names: dict[int, Counter[str]] = defaultdict(Counter)
        self.batch: set[int] = set()
        self.inputs: dict[int, dict[str, int]] = defaultdict(dict)
        self.paths: dict[tuple[int, str], set[str]] = defaultdict(set)
        self.uses: dict[int, set[object]] = defaultdict(set)
        self.blocked: dict[int, str] = {}
        self.roots: list[int] = []
        for tensor in graph.tensors:
            for dim in range(len(tensor.shape)):
                node = analysis.dim(tensor.id, dim)
                self._note(analysis, tensor, dim, node)
        for tensor_id, dim in graph.batch_dims:
            node = analysis.dim(tensor_id, dim)
            if analysis.atoms[node]:
                self.batch.add(find(analysis.first[node]))
        for op in graph.ops:
            slots = _slots(op)
            for factor in op.factors:
                for slot, dim in factor.members:
                    node = analysis.dim(slots[slot], dim)
                    for k in range(len(analysis.atoms[node])):
                        root = find(analysis.first[node] + k)
                        self.uses[root].add((op.kind, slot, dim, k))
                        if factor.kind == "unshardable":
                            self.blocked.setdefault(root, _blame(op))

    def _note(self, analysis: _Analysis, tensor: Tensor, dim: int, node: int) -> None:
        many = len(analysis.atoms[node]) > 1
        for k, size in enumerate(analysis.atoms[node]):
            root = analysis.classes.find(analysis.first[node] + k)
            if root not in self.size:
                self.size[root] = size
                self.roots.append(root)
            if not tensor.path:
                continue
            suffix = f"[{dim}.{k}]" if many else f"[{dim}]"
            layered = tensor.kind in ("param", "state")
            folded = (starred(tensor.path) if layered else tensor.path) + suffix
            target = self.weights if tensor.kind == "param" else self.inputs
            target[root][folded] = max(tensor.nbytes, target[root].get(folded, 0))
            self.paths[root, folded].add(tensor.path + suffix)
            name = tensor.names[dim] if dim < len(tensor.names) else None
            if name and not many:
                self.names[root][name] += 1

    def signature(self, root: int) -> object:
        if root in self.batch:
            return ("batch", self.size[root], frozenset(self.inputs[root]))
        if self.weights[root]:
            return (self.size[root], frozenset(self.weights[root]))
        if self.inputs[root]:
            return (self.size[root], "input", frozenset(self.inputs[root]))
        return (self.size[root], "use", frozenset(self.uses[root]))

    def role(self, index: int, roots: list[int], taken: Counter[str]) -> Role:
        logical = Counter[str]()
        for root in roots:
            logical += self.names[root]
        weights = self._leaf_names(roots, self.weights)
        inputs = self._leaf_names(roots, self.inputs)
        is_batch = any(root in self.batch for root in roots)
        if is_batch:
            name = "batch"
        elif logical:
            name = logical.most_common(1)[0][0]
        elif weights or inputs:
            name = (weights or inputs)[0]
        else:
            name = f"dim{self.size[roots[0]]}"
        taken[name] += 1
        unique = name if taken[name] == 1 else f"{name}#{taken[name]}"
        blocked = next((self.blocked[r] for r in roots if r in self.blocked), "")
        return Role(
            index=index,
            name=unique,
            size=self.size[roots[0]],
            aliases=tuple(dict.fromkeys([*logical, *weights, *inputs])),
            unshardable=blocked,
            is_batch=is_batch,
            of_weights=bool(weights),
            copies=len(roots),
        )

    def _leaf_names(
        self, roots: list[int], found: Mapping[int, dict[str, int]]
    ) -> list[str]:
        """Leaves of a role, the largest first; starred where several fold into one."""
        sizes: dict[str, int] = {}
        paths: dict[str, set[str]] = defaultdict(set)
        for root in roots:
            for name, nbytes in found[root].items():
                sizes[name] = max(nbytes, sizes.get(name, 0))
                paths[name] |= self.paths[root, name]
        ordered = sorted(sizes, key=lambda name: (-sizes[name], name))
        return [
            next(iter(paths[name])) if len(paths[name]) == 1 else name
            for name in ordered
        ]


def _blame(op: Op) -> str:
    place = f" at {op.scope}" if op.scope else ""
    if op.unknown:
        return f"no rule for the primitive {op.kind!r}{place}"
    return f"{op.kind}{place} needs it whole"


def analyse(graph: Graph) -> Dimensions:
    """Find the logical dimensions of a captured loss.

    Args:
        graph: the captured forward loss.

    Returns:
        Roles, the layout of every tensor in roles, and the cuts. The cost is about
        linear in the number of operations.
    """
    return _Analysis(graph).run()
