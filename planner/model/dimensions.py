"""Logical dimensions as data: which dimensions of all tensors are one and the same."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from whalejax.planner.model.graph import Op
from whalejax.planner.model.roles import Role as Role


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedTie:
    """A refused tie: an operation sees its operand ``slot`` in another layout.

    Attributes:
        op: Index into ``Graph.ops``.
        slot: Operand or result of the operation.
        dim: Dimension of that tensor.
        nbytes: Size of the tensor, unsharded.
        other_nbytes: Fewest bytes that would have to change layout there instead.
    """

    op: int
    slot: int
    dim: int
    nbytes: int
    other_nbytes: int


Layout = tuple[tuple[int, ...], ...]
"""Roles of each dimension of a tensor, major atom first."""


@functools.lru_cache(maxsize=2**16)
def roles_of(layout: Layout) -> frozenset[int]:
    """Returns the roles of a tensor's layout."""
    return frozenset(role for atoms in layout for role in atoms)


def op_roles(index: int, op: Op, dims: Dimensions) -> frozenset[int]:
    """Returns the roles of an operation.

    Args:
        index: Index of the operation in its graph.
        op: The operation.
        dims: The graph's dimensions.
    """
    slots = op.operands + op.results
    layouts = (dims.seen.get((index, s), dims.layouts[t]) for s, t in enumerate(slots))
    return frozenset[int]().union(*map(roles_of, layouts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimensions:
    """Result of ``analyse``.

    Attributes:
        roles: Logical dimensions.
        layouts: For every tensor, the roles of its dimensions.
        sizes: For every tensor, the sizes of the atoms, in the order of ``layouts``.
        seen: For an (op, slot) that a cut changed, the layout that the operation needs;
            other operations see ``layouts``.
        cuts: Refused ties.
        whole: Entries of ``seen`` whose operation needs all of a sequence that others
            shard.
    """

    roles: tuple[Role, ...]
    layouts: tuple[Layout, ...]
    sizes: tuple[Layout, ...]
    seen: dict[tuple[int, int], Layout]
    cuts: tuple[RefusedTie, ...]
    whole: frozenset[tuple[int, int]] = frozenset()

    def find(self, name: str) -> Role | None:
        """Returns the role with a name or alias, or None."""
        for role in self.roles:
            if name == role.name:
                return role
        return next((role for role in self.roles if name in role.aliases), None)

    @property
    def batch(self) -> tuple[Role, ...]:
        """The batch roles: one, unless no operation ties the batch leaves."""
        return tuple(r for r in self.roles if r.is_batch)
