"""Spatial dimensions: one logical dimension through every resolution of a model.

A strided convolution or a pooling makes a dimension shorter, and a transposed
convolution longer. For devices that shard space it stays the same dimension: each has
the same fraction of it before and after. This module unites such dimensions of
different sizes through the windows of operations; the dimension analysis unites only
dimensions of equal size.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from whalejax.planner.model.graph import Op
from whalejax.planner.model.reshape_factors import Atoms, Union, slots_of


_BEFORE = "cut, join or turn samples before they are given to the step"
_REMEDIES = {
    "pad": 'leave the padding to the convolution: padding="SAME", or pairs of numbers',
    **dict.fromkeys(
        ("concatenate", "slice", "dynamic_slice", "gather", "rev"), _BEFORE
    ),
}
"""Remedies for operations that need a spatial dimension unsharded, by kind."""

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
    """A spatial dimension of several classes.

    Attributes:
        number: Number of the spatial dimension.
        space: Mesh axis that may shard it.
        unshared: Reason why it cannot be sharded, or empty.
    """

    number: int
    space: str
    unshared: str

    def role(self, role: Any, sizes: Sequence[int]) -> Any:
        """Returns a role with the facts of this dimension.

        Args:
            role: Role without these facts.
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
    """Finds the classes that are spatial dimensions.

    Args:
        atoms: Atoms of the graph.
        classes: Union-find of atoms by class.
        holds: Tensors that contain each class, by the class's representative.

    Returns:
        The spatial dimension of each such class, by its representative; for other
        classes along which convolutions slide, the reason why they cannot be sharded.
    """
    windowed = [op for op in atoms.graph.ops if op.windows]
    if not windowed:
        return {}, {}
    chains = _Chains(atoms, classes)
    for op in windowed:
        chains.add(op)
    return chains.spatial_chains(holds)


class _Chains:
    """Classes that windows tie together, and reasons against sharding them."""

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
        """Finds chains with a convolution, which names the axis; see ``spatial``."""
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
                why = why or "a tensor has this dimension twice"
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
