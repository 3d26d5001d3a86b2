"""Roles: classes of dimensions, merged over equal layers and named.

The analysis gives a separate class for the heads of each layer; a plan needs one name
for all of them. So classes at the same places of equal layers are merged into one role:
mostly those of the same weights, once ``*`` replaces the layer numbers in their paths.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from whalejax.planner.model.graph import Factor, Op, Tensor
from whalejax.planner.model.reshape_factors import Atoms, Union, slots_of
from whalejax.planner.model.space import Spatial, spatial
from whalejax.planner.plan_entries import starred


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """A logical dimension of the model, merged over equal layers.

    Attributes:
        index: Index in ``Dimensions.roles``.
        name: Flax logical name if there is one, ``"batch"``, or the first leaf that has
            the dimension, as in ``"blocks.*.mlp.up.kernel[1]"``.
        size: Unsharded length.
        aliases: Every name by which a user may refer to it.
        unshardable: Reason why it must stay unsharded, or empty.
        is_batch: Whether it is the batch dimension.
        of_weights: Whether some parameter has it.
        copies: Number of merged classes.
        space: Mesh axis that may shard it although windows slide along it: one of
            ``SPACES``, or empty.
        common: Common divisor of its sizes at all resolutions of the model if windows
            slide along it; ``size`` is then the largest of them. Else 0.
        unshared: Reason why no axis of ``SPACES`` can shard it, after the name of the
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
        """Number that a device count must divide to shard the role everywhere."""
        return self.common or self.size


def fold(
    atoms: Atoms, classes: Union, holds: Sequence[set[int]]
) -> tuple[dict[int, int], tuple[Role, ...]]:
    """Merges classes into roles.

    Args:
        atoms: Atoms of the graph.
        classes: Union-find of atoms by class.
        holds: For each class, by its representative, the tensors with it.

    Returns:
        Index of the role of each class, by the class's representative; and the roles.
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
    """Splits classes that look equal if two of them are in one tensor.

    Consecutive square layers give such classes; they alternate between two roles.
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
                        if root not in known:  # Only its uses identify it.
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
        """Returns a key that is equal for the same classes of equal layers."""
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
        """Returns a role's leaves, largest first; starred if several are merged."""
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
    # A scope has a mark's arguments in brackets; users write parentheses.
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
