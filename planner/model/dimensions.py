"""Logical dimensions as data: which dimensions of different tensors are the same.

The analysis puts the heads of each layer into a class of their own, but a plan needs
one name for all heads. So classes at the same positions of equal layers become one
role. Most of these are dimensions of the same weights, with ``*`` instead of the layer
number in the path.

A strided convolution or a pooling shortens a spatial dimension; a transposed
convolution lengthens it. Devices that shard space have the same fraction of the
dimension before and after, so ``spatial`` makes one dimension of both sizes, by the
windows of operations. The dimension analysis joins only dimensions of equal size.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from whalejax.planner.model.graph import Factor, Op, Tensor
from whalejax.planner.model.reshape_factors import Atoms, Union, slots_of
from whalejax.planner.plan_entries import starred


_BEFORE = "cut, join or turn samples before they are given to the step"
_REMEDIES = {
    "pad": 'leave the padding to the convolution: padding="SAME", or pairs of numbers',
    **dict.fromkeys(
        ("concatenate", "slice", "dynamic_slice", "gather", "rev"), _BEFORE
    ),
}
"""Remedies by kind for operations that need a spatial dimension unsharded."""

_SINGLE = (
    "makes a single element of it, or slides along one, of which devices can have no "
    "parts (jnp.mean, jnp.max or jnp.sum over all of it they can share)"
)
_REGROUPED = (
    "a dimension that a reshape splits or joins (poolings, strided convolutions, "
    'jax.image.resize(…, "nearest") and transposed convolutions whose kernel is their '
    "stride change resolutions without a reshape)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spatial:
    """Spatial dimension that has several classes.

    Attributes:
        number: Number of the spatial dimension.
        space: Mesh axis that may shard it.
        unshared: Reason why it cannot be sharded, or empty.
    """

    number: int
    space: str
    unshared: str

    def role(self, role: Any, sizes: Sequence[int]) -> Any:
        """Returns a role with the attributes of this dimension.

        Args:
            role: Role without these attributes.
            sizes: Sizes of the classes.
        """
        return replace(
            role,
            size=max(sizes),
            space="" if self.unshared else self.space,
            common=math.gcd(*sizes),
            unshared=self.unshared,
        )


def spatial(
    atoms: Atoms, classes: Union, holds: Sequence[set[int]]
) -> tuple[dict[int, Spatial], dict[int, str]]:
    """Finds the classes of spatial dimensions.

    Args:
        atoms: Atoms of the graph.
        classes: Union-find that joins the atoms of a class.
        holds: Tensors that contain each class, by the class's representative.

    Returns:
        Two mappings by representatives of classes: their spatial dimension, and, for
        other classes along which convolutions slide, the reason why they cannot be
        sharded.
    """
    windowed = [op for op in atoms.graph.ops if op.windows]
    if not windowed:
        return {}, {}
    chains = _Chains(atoms, classes)
    for op in windowed:
        chains.add(op)
    return chains.spatial_chains(holds)


class _Chains:
    """Classes that windows join, and reasons why they cannot be sharded."""

    def __init__(self, atoms: Atoms, classes: Union) -> None:
        self.atoms = atoms
        self.find = classes.find
        self.union = Union(len(atoms.owners))
        self.members: set[int] = set()
        self.spaces: dict[int, set[str]] = defaultdict(set)
        self.against: dict[int, str] = {}

    def add(self, op: Op) -> None:
        for window in op.windows:
            ends = [
                [self.find(atom) for atom in self.atoms.of(tensor, dim)]
                for tensor, dim in (
                    (op.operands[0], window.dim),
                    (op.results[0], window.out),
                )
            ]
            roots = [root for end in ends for root in end]
            for root in roots:
                self.members.add(root)
                if window.space:
                    self.spaces[root].add(window.space)
                if window.refused:
                    why = f"{_words(op)}: {window.refused}"
                    self.against.setdefault(root, why)
                elif not all(ends):
                    self.against.setdefault(root, f"{_words(op)} {_SINGLE}")
                elif any(len(end) != 1 for end in ends):
                    why = f"{_words(op)} slides along {_REGROUPED}"
                    self.against.setdefault(root, why)
            for root in roots[1:]:
                self.union.join(roots[0], root)

    def spatial_chains(
        self, holds: Sequence[set[int]]
    ) -> tuple[dict[int, Spatial], dict[int, str]]:
        """Returns ``spatial`` of chains with a convolution, which names the axis."""
        self._add_unshardable()
        chains: dict[int, list[int]] = defaultdict(list)
        for root in sorted(self.members):
            chains[self.union.find(root)].append(root)
        spatial_chains, unshared = dict[int, Spatial](), dict[int, str]()
        for number, roots in enumerate(chains.values()):
            spaces = sorted({space for root in roots for space in self.spaces[root]})
            if not spaces:
                continue
            why = next((self.against[r] for r in roots if r in self.against), "")
            if len(spaces) > 1:
                why = why or "convolutions slide along one dimension under both names"
            elif not _disjoint(holds, roots):
                why = why or (
                    "a tensor has this dimension twice, as the matrix of "
                    'jax.image.resize(…, "linear") has'
                )
            else:
                why = f"{spaces[0]}: {why}" if why else ""
                one = Spatial(number=number, space=spaces[0], unshared=why)
                spatial_chains.update(dict.fromkeys(roots, one))
                continue
            why = f"{' and '.join(spaces)}: {why}"
            unshared.update(dict.fromkeys(roots, why))
        return spatial_chains, unshared

    def _add_unshardable(self) -> None:
        for op in self.atoms.graph.ops:
            slots = slots_of(op)
            for factor in op.factors:
                if factor.kind != "unshardable":
                    continue
                for slot, dim in factor.members:
                    for atom in self.atoms.of(slots[slot], dim):
                        root = self.find(atom)
                        if root in self.members:
                            why = f"{_words(op)} needs all of it"
                            if op.kind in _REMEDIES:
                                why += f" ({_REMEDIES[op.kind]})"
                            self.against.setdefault(root, why)


def _disjoint(holds: Sequence[set[int]], roots: Sequence[int]) -> bool:
    seen: set[int] = set()
    for root in roots:
        if not seen.isdisjoint(holds[root]):
            return False
        seen |= holds[root]
    return True


def _words(op: Op) -> str:
    return f"{op.kind} at {op.scope}" if op.scope else op.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """Logical dimension of the model, the same in equal layers.

    Attributes:
        index: Index in ``Dimensions.roles``.
        name: Flax logical name, ``"batch"``, or the first leaf with the dimension, such
            as ``"blocks.*.mlp.up.kernel[1]"``.
        size: Unsharded length.
        aliases: All names by which a user may refer to the role.
        unshardable: Reason why the role must stay unsharded, or empty.
        is_batch: Whether the role is the batch dimension.
        of_weights: Whether some parameter has the role.
        copies: Number of classes that became this role.
        space: Mesh axis of ``SPACES`` that may shard the role although windows slide
            along it, or empty.
        common: Common divisor of the role's sizes at all resolutions of the model if
            windows slide along it, else 0. ``size`` is the largest of the sizes.
        unshared: Reason why no axis of ``SPACES`` can shard the role, or empty. A
            message puts the names of axes before it.
            axis, or several joined by "and"; or empty.
    """

    index: int
    name: str
    size: int
    aliases: tuple[str, ...] = ()
    unshardable: str = ""
    is_batch: bool = False
    of_weights: bool = False
    copies: int = 1
    space: str = ""
    common: int = 0
    unshared: str = ""

    @property
    def divisible(self) -> int:
        """Number that a shard count must divide to shard the role everywhere."""
        return self.common or self.size


def fold(
    atoms: Atoms, classes: Union, holds: Sequence[set[int]]
) -> tuple[dict[int, int], tuple[Role, ...]]:
    """Returns the roles of classes; equal classes of equal layers become one role.

    Args:
        atoms: Atoms of the graph.
        classes: Union-find that joins the atoms of a class.
        holds: Tensors that contain each class, by the class's representative.

    Returns:
        Index of each class's role, by the class's representative; and the roles.
    """
    facts = _Facts(atoms, classes)
    space, unshared = spatial(atoms, classes, holds)
    groups: dict[object, list[int]] = defaultdict(list)
    for root in facts.roots:
        known = space.get(root)
        groups[facts.signature(root) if known is None else known].append(root)
    apart = (
        [group]
        if isinstance(key, Spatial)
        else _separate_coexisting_roots(group, holds)
        for key, group in groups.items()
    )
    role_of: dict[int, int] = {}
    roles: list[Role] = []
    taken: Counter[str] = Counter()
    for roots in itertools.chain.from_iterable(apart):
        index = len(roles)
        role_of.update(dict.fromkeys(roots, index))
        role = facts.role(index, roots, taken)
        known = space.get(roots[0])
        if known is None:
            why = next((unshared[r] for r in roots if r in unshared), "")
            roles.append(replace(role, unshared=why))
        else:
            roles.append(known.role(role, facts.sizes(roots)))
    return role_of, tuple(roles)


def _separate_coexisting_roots(
    roots: list[int], holds: Sequence[set[int]]
) -> list[list[int]]:
    """Separates classes that look equal, if two of them are in one tensor.

    Consecutive square layers have such classes, which alternate between two roles.
    """
    parts: list[tuple[list[int], set[int]]] = []
    for root in roots:
        tensors = holds[root]
        for members, held in parts:
            if held.isdisjoint(tensors):
                members.append(root)
                held |= tensors
                break
        else:
            parts.append(([root], set(tensors)))
    return [members for members, _ in parts]


class _Facts:
    def __init__(self, atoms: Atoms, classes: Union) -> None:
        graph = atoms.graph
        find = classes.find
        self.size: dict[int, int] = {}
        self.weights: dict[int, dict[str, int]] = defaultdict(dict)
        self.names: dict[int, Counter[str]] = defaultdict(Counter)
        self.batch: set[int] = set()
        self.inputs: dict[int, dict[str, int]] = defaultdict(dict)
        self.paths: dict[tuple[int, str], set[str]] = defaultdict(set)
        self.uses: dict[int, set[object]] = defaultdict(set)
        self.blocked: dict[int, str] = {}
        self.roots: list[int] = []
        root_at = [find(atom) for atom in range(len(atoms.owners))]
        for tensor in graph.tensors:
            for dim in range(len(tensor.shape)):
                node = atoms.dim(tensor.id, dim)
                roots = root_at[atoms.first[node] : atoms.first[node + 1]]
                self._note(tensor, dim, roots, atoms.sizes[node])
        for tensor_id, dim in graph.batch_dims:
            self.batch.update(find(atom) for atom in atoms.of(tensor_id, dim)[:1])
        known = self.batch | self.weights.keys() | self.inputs.keys()
        for op in graph.ops:
            slots = slots_of(op)
            for factor in op.factors:
                whole = factor.needs_all
                for slot, dim in factor.members:
                    for k, atom in enumerate(atoms.of(slots[slot], dim)):
                        root = root_at[atom]
                        if root not in known:  # Only the uses of the class identify it.
                            self.uses[root].add((op.kind, slot, dim, k))
                        if whole:
                            self.blocked.setdefault(root, _blame(op, factor))

    def _note(
        self, tensor: Tensor, dim: int, roots: list[int], sizes: tuple[int, ...]
    ) -> None:
        many = len(sizes) > 1
        for k, (root, size) in enumerate(zip(roots, sizes, strict=True)):
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

    def sizes(self, roots: Sequence[int]) -> list[int]:
        return [self.size[root] for root in roots]

    def signature(self, root: int) -> object:
        """Returns a key that the same classes of equal layers share."""
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
        """Returns a role's leaves, largest first; ``*`` if it has several classes."""
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


def _blame(op: Op, factor: Factor) -> str:
    # Scopes write a mark's arguments in brackets, users in parentheses.
    scope = re.sub(r"wh\.(\w+)\[([^\]/]*)\]", r"\1(\2)", op.scope)
    place = f" at {scope}" if scope else ""
    if op.unknown:
        return f"no rule for the primitive {op.kind!r}{place}"
    if factor.kind == "halo":
        return (
            f"windows of {op.kind}{place} reach over the edges of a shard, which "
            "only the axes depth, height and width exchange (a halo)"
        )
    return f"{op.kind}{place} needs it whole"


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedTie:
    """Refused tie: an operation needs another layout of its operand or result.

    Attributes:
        op: Index in ``Graph.ops``.
        slot: Index among the operands and results of the operation.
        dim: Dimension of that tensor.
        nbytes: Bytes of the unsharded tensor.
        other_nbytes: Bytes that would change layout instead if another tie were
            refused.
    """

    op: int
    slot: int
    dim: int
    nbytes: int
    other_nbytes: int


Layout = tuple[tuple[int, ...], ...]
"""Roles in each dimension of a tensor, major role first."""


@functools.lru_cache(maxsize=2**16)
def roles_of(layout: Layout) -> frozenset[int]:
    """Returns the roles of a tensor's layout."""
    return frozenset(role for atoms in layout for role in atoms)


def op_roles(index: int, op: Op, dims: Dimensions) -> frozenset[int]:
    """Returns the roles of an operation's operands and results.

    Args:
        index: Index of the operation in its graph.
        op: The operation.
        dims: Logical dimensions of the graph.
    """
    slots = op.operands + op.results
    layouts = (dims.seen.get((index, s), dims.layouts[t]) for s, t in enumerate(slots))
    return frozenset[int]().union(*map(roles_of, layouts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimensions:
    """Logical dimensions of a graph, and the layouts of its tensors.

    Attributes:
        roles: Logical dimensions.
        layouts: Roles in each dimension, by tensor.
        sizes: Sizes of these roles in each dimension, by tensor.
        seen: Layout that an operation needs instead of ``layouts`` because of a refused
            tie, by (operation, slot).
        cuts: Refused ties.
        whole: Keys of ``seen`` whose operation needs all of a sequence that others
            shard.
    """

    roles: tuple[Role, ...]
    layouts: tuple[Layout, ...]
    sizes: tuple[Layout, ...]
    seen: dict[tuple[int, int], Layout]
    cuts: tuple[RefusedTie, ...]
    whole: frozenset[tuple[int, int]] = frozenset()

    def find(self, name: str) -> Role | None:
        """Returns the role with a given name or alias, or None."""
        for role in self.roles:
            if name == role.name:
                return role
        return next((role for role in self.roles if name in role.aliases), None)

    @property
    def batch(self) -> tuple[Role, ...]:
        """Roles of the batch: one, unless no operation ties the batch leaves."""
        return tuple(r for r in self.roles if r.is_batch)
