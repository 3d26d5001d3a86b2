"""What the user's own words fix: ``split(axis=…)`` and mesh axes in the metadata.

Both name a dimension and ask that an axis shard it. They are read here, before any
choice is made, so that everything wrong with them is known at once: names that stand
for nothing, dimensions that cannot be sharded, hints that contradict each other.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from whalejax.meshes.problems import Problems
from whalejax.planner.dimensions import Dimensions, Role
from whalejax.planner.graph import Graph, Mark, TaskGraph, Tensor


MODEL_AXES = ("expert", "tensor")
"""Mesh axes that shard dimensions of the weights while computing."""

_WRITABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """One dimension that the user asks an axis to shard.

    Attributes:
        role: the logical dimension.
        axis: ``"tensor"`` or ``"expert"`` where metadata names it; None where a mark
            asks for a dimension and leaves the axis open.
        where: who asks, for messages.
    """

    role: int
    axis: str | None
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What pins are judged by.

    Attributes:
        minor: roles that some parameter holds only as a minor atom.
        itself: roles that meet themselves, as the sequence does in attention.
    """

    minor: frozenset[int]
    itself: frozenset[int]

    def obstacle(self, role: Role) -> str:
        """Why a role cannot be sharded by a model axis, or an empty text."""
        if role.is_batch:
            return "it is the batch, which belongs to replicate"
        if role.unshardable:
            return role.unshardable
        if role.index in self.minor:
            return (
                "it is the minor part of a fused dimension, which no PartitionSpec "
                "can name; make it a dimension of its own"
            )
        if role.index in self.itself:
            return (
                "it meets itself, as a sequence does in attention; this version does "
                "not plan that"
            )
        return ""


def mark_pins(
    task_graph: TaskGraph,
    dims: Dimensions,
    present: set[int],
    terms: Terms,
    problems: Problems,
) -> tuple[Pin, ...]:
    """The dimensions that ``split(axis=…)`` asks for.

    Args:
        task_graph: the marked region.
        dims: the logical dimensions.
        present: roles that stand in the region.
        terms: what can be sharded.
        problems: where a name that cannot be obeyed is reported.
    """
    mark = task_graph.strategy
    name = mark.get("axis") if mark else None
    if name is None:
        return ()
    where = f"{task_graph.name}: split(axis={name!r})"
    found = [r for r in sorted(present) if name in names_of(dims.roles[r])]
    if not found:
        found = [r for r in sorted(present) if _ends_in(dims.roles[r], name)]
        if len(found) > 1:
            several = ", ".join(_full_name(dims.roles[r], name) for r in found)
            problems.add(f"{where} may mean {several}. Write more of the path")
            return ()
    if not found:
        problems.add(f"{where} names no dimension of that region. {_near(...)}")
        return ()
    return tuple(_free_of_obstacles(found, where, dims, terms, problems))
