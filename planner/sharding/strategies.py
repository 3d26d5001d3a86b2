"""Sets of dimensions that each TaskGraph may shard over the model axes.

Marks restrict them: ``replicate`` uses every axis for the batch, and ``split`` must
shard some logical dimension. Dimensions can share an axis if they never occur in one
operation. Heads, mlp and vocabulary never do, which gives Megatron's tensor parallelism
without a declaration.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from whalejax.meshes.errors import Problems
from whalejax.meshes.units import count_text
from whalejax.planner.cost_terms import NO_EFFECT
from whalejax.planner.model.analysis import expert_roles, weight_homes
from whalejax.planner.model.dimensions import Dimensions, roles_of
from whalejax.planner.model.graph import Graph, Mark, TaskGraph
from whalejax.planner.model.logical_dimensions import attended, meeting_in_values
from whalejax.planner.plan_errors import PlanError
from whalejax.planner.sharding.layout import SPATIAL_AXES, Table
from whalejax.planner.sharding.metadata_constraints import (
    AxisConstraint,
    Limits,
    check_together,
    mark_pins,
    metadata_pins,
)
from whalejax.planner.sharding.operation_rows import OperationRows


NOTHING_TO_SPLIT = "no dimension of a split region divides by the axis"
NEEDS_AN_AXIS = "a split region needs a tensor or an expert axis"
NO_TENSOR = "no dimension for a tensor axis"
NO_EXPERTS = "no dimension for an expert axis"
"""Reasons to refuse a mesh."""

MOST_SETS = 32
"""Largest number of independent sets to keep for a TaskGraph, by bytes of weights."""

MOST_TRIED = 4096
"""Largest number of independent sets to try for a TaskGraph. Models with very many
different layers have more sets. The greedy set by bytes of weights is always tried.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Roles that one TaskGraph may shard.

    Attributes:
        task_graph: Index of the TaskGraph.
        strategy: ``replicate`` or ``split``; None without a mark.
        devices: Number of devices that a ``split`` asks for, or None.
        sets: Sets of roles that one axis may shard together, the best guess first.
        experts: Roles that the ``expert`` axis may shard.
        pins: Dimensions that the user asks to shard.
    """

    task_graph: int
    strategy: str | None
    devices: int | None
    sets: tuple[tuple[int, ...], ...]
    experts: frozenset[int]
    pins: tuple[AxisConstraint, ...]

    @property
    def obliged(self) -> bool:
        """Whether the strategy is ``split`` and some dimension can be sharded."""
        return self.strategy == "split" and bool(self.sets or self.experts)

    def pinned_to(self, axis: str) -> frozenset[int]:
        """Returns the roles that the user's metadata fixes to a mesh axis."""
        return frozenset(p.role for p in self.pins if p.axis == axis)

    @property
    def named_roles(self) -> frozenset[int]:
        """Roles that the mark names."""
        return frozenset(p.role for p in self.pins if p.axis is None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Choices of every TaskGraph that has operations.

    Attributes:
        choices: Choices by the index of the TaskGraph.
        batch: Roles of the batch.
        sequence: Roles that the ``context`` axis shards, such as attention's sequence.
        space: Roles that each spatial axis may shard.
        minor: Roles that are only the minor part of a dimension for some reader of a
            parameter, where no PartitionSpec can name them.
        sizes: Sizes of all roles, by index.
        homes: TaskGraph that computes with each parameter, by tensor id.
        stored: (Dimension, mesh axis) pairs that shard only a tensor's storage, by
            tensor id.
    """

    choices: Mapping[int, Choice]
    batch: tuple[int, ...]
    sequence: tuple[int, ...]
    space: Mapping[str, tuple[int, ...]]
    minor: frozenset[int]
    sizes: tuple[int, ...]
    homes: Mapping[int, int]
    stored: Mapping[int, tuple[tuple[int, str], ...]]

    @property
    def order(self) -> tuple[int, ...]:
        """TaskGraphs in index order."""
        return tuple(self.choices)

    def tables(self, task_graph: int, mesh: Mapping[str, int]) -> list[Table]:
        """Returns every table that a TaskGraph may have on a mesh."""
        choice = self.choices[task_graph]
        base: dict[str, tuple[int, ...]] = {
            "data": self.batch,
            "fsdp": self.batch,
            "context": self.sequence,
            **{a: self.space[a] for a in SPATIAL_AXES if mesh.get(a, 1) > 1},
        }
        tables: list[Table] = []
        for expert in self._expert(choice, mesh):
            for tensor in self._tensor(choice, mesh, expert):
                tables.append({**base, "expert": expert, "tensor": tensor})
        return tables

    def batch_parts(self, table: Table, mesh: Mapping[str, int]) -> int:
        """Returns the number of devices that divide the batch under a table.

        ``context`` and spatial axes never divide the batch, nor does an axis that the
        table lacks. The number also holds for a batch of one sample, which has no batch
        dimension.
        """
        never = ("context", *SPATIAL_AXES)
        lent = (a for a in mesh if a not in never and self._lends(table, a))
        return math.prod(mesh[axis] for axis in lent)

    def _lends(self, table: Table, axis: str) -> bool:
        return axis in table and set(table[axis]) <= set(self.batch)

    def that_divide(
        self, tables: Mapping[int, Table], mesh: Mapping[str, int], batch: int
    ) -> dict[int, Table] | None:
        """Returns tables under which a batch divides evenly.

        If a model axis would divide samples unevenly, TaskGraphs without a strategy do
        not use it: all devices of the axis compute the same samples.

        Args:
            tables: Compute table of each TaskGraph.
            mesh: Axis sizes.
            batch: Number of samples in a micro-batch.

        Returns:
            The tables, or None if no tables divide the batch.
        """
        that_divide = dict(tables)
        for index, table in tables.items():
            choice = self.choices.get(index)
            free = choice is not None and choice.strategy is None
            for axis in ("tensor", "expert") if free else ():
                if batch % self.batch_parts(that_divide[index], mesh) == 0:
                    break
                if mesh[axis] > 1 and self._lends(table, axis):
                    that_divide[index] = {
                        a: r for a, r in that_divide[index].items() if a != axis
                    }
            if batch % self.batch_parts(that_divide[index], mesh):
                return None
        return that_divide

    def _expert(self, choice: Choice, mesh: Mapping[str, int]) -> list[tuple[int, ...]]:
        size = mesh["expert"]
        pinned = choice.pinned_to("expert")
        if size == 1 or choice.strategy == "replicate":
            return [self.batch]
        if pinned:
            fits = all(self.sizes[r] % size == 0 for r in pinned)
            return [tuple(sorted(pinned))] if fits else []
        if not choice.experts:
            return [self.batch]
        fitting = [r for r in sorted(choice.experts) if self.sizes[r] % size == 0]
        asked = [r for r in fitting if r in choice.named_roles]
        return [(r,) for r in asked or fitting]

    def _tensor(
        self, choice: Choice, mesh: Mapping[str, int], expert: tuple[int, ...]
    ) -> list[tuple[int, ...]]:
        size = mesh["tensor"]
        busy = set(expert) - set(self.batch) if mesh["expert"] > 1 else set[int]()
        wanted = choice.pinned_to("tensor")
        asked = choice.named_roles - busy
        if size == 1 or choice.strategy == "replicate":
            return [self.batch]
        tensor: dict[tuple[int, ...], None] = {}
        for roles in choice.sets:
            fits = tuple(r for r in roles if self._fits(r, size) and r not in busy)
            if fits and {*wanted, *asked} <= set(fits):
                tensor[fits] = None
        if not wanted and not asked and (not choice.obliged or busy):
            tensor[self.batch] = None
        return list(tensor)

    def _fits(self, role: int, size: int) -> bool:
        return self.sizes[role] % size == 0


def sharded_by_split(options: Options, mesh: Mapping[str, int]) -> str:
    """Returns the reason why a mesh cannot obey the marks, or an empty text.

    Args:
        options: Choices of the TaskGraphs.
        mesh: Axis sizes.
    """
    model = mesh["tensor"] * mesh["expert"]
    free = [c for c in options.choices.values() if c.strategy != "replicate"]
    if mesh["tensor"] > 1 and not any(c.sets for c in free):
        return NO_TENSOR
    if mesh["expert"] > 1 and not any(c.experts or c.pinned_to("expert") for c in free):
        return NO_EXPERTS
    for choice in options.choices.values():
        if not choice.obliged:
            continue
        if choice.devices is not None and choice.devices != model:
            return f"a split asks for {count_text(choice.devices, 'device')}"
        by_experts = mesh["expert"] > 1 and choice.experts >= choice.named_roles
        serves = mesh["tensor"] > 1 or (by_experts and choice.experts)
        if not serves and choice.devices != 1 and any(n > 1 for n in mesh.values()):
            return NEEDS_AN_AXIS
    return ""


def choices(
    graph: Graph, dims: Dimensions, rows: OperationRows, default: str | None
) -> Options:
    """Returns the choices of each TaskGraph.

    Args:
        graph: Captured loss.
        dims: Logical dimensions of the loss.
        rows: Cost rows of the loss.
        default: Strategy of unmarked operations, or None.

    Raises:
        PlanError: A ``split`` names a dimension that does not exist there, or hints
            contradict each other; lists every problem.
    """
    problems = Problems("the hints cannot be obeyed", PlanError)
    limits = Limits(minor=rows.reading.minor, itself=cut_roles(graph, dims))
    experts = expert_roles(graph, dims)
    homes = weight_homes(graph, rows.weight)
    weight = _weight_bytes(graph, dims)
    result: dict[int, Choice] = {}
    used = {0, *(op.task_graph for op in graph.ops)}
    meetings = {index: _meetings(rows, index) for index in used}
    fixed = metadata_pins(
        graph, dims, homes, limits, {i: m[1] for i, m in meetings.items()}, problems
    )
    for task_graph in graph.task_graphs:
        index = task_graph.index
        if index not in used:
            continue
        present, meet, weighed = meetings[index]
        asked = mark_pins(task_graph, graph, dims, present, limits, problems)
        pins = (*asked, *fixed.computed.get(index, ()))
        check_together(pins, meet, problems)
        roles = weighed | {p.role for p in pins}
        usable = [r for r in roles if not limits.obstacle(dims.roles[r])]
        mark = task_graph.strategy
        if not usable and mark is not None and mark.kind == "split":
            usable = [r for r in present if not limits.obstacle(dims.roles[r])]
        result[index] = Choice(
            task_graph=index,
            strategy=mark.kind if mark else default,
            devices=_split_devices(task_graph),
            sets=_independent(sorted(usable), meet, weight, pins),
            experts=experts & present if _may_hold_experts(task_graph) else frozenset(),
            pins=pins,
        )
    _check_widths(graph, result, problems)
    problems.raise_if_any()
    return Options(
        choices=result,
        batch=tuple(r.index for r in dims.batch),
        sequence=_sequence(graph, dims, rows),
        space={
            axis: tuple(r.index for r in dims.roles if r.space == axis)
            for axis in SPATIAL_AXES
        },
        minor=limits.minor,
        sizes=tuple(r.size for r in dims.roles),
        homes=homes,
        stored=fixed.stored,
    )


def idle_marks(graph: Graph, options: Options) -> list[str]:
    """Returns notes on marks without an effect."""
    notes = []
    for choice in options.choices.values():
        mark = graph.task_graphs[choice.task_graph].strategy
        if mark is not None and mark.kind == "split" and not choice.obliged:
            notes.append(
                f"{graph.task_graphs[choice.task_graph].name}: {mark} {NO_EFFECT}: "
                "it covers no dimension that can be sharded"
            )
    return notes


def _may_hold_experts(task_graph: TaskGraph) -> bool:
    mark = task_graph.strategy
    return task_graph.name == "experts" or (mark is not None and mark.kind == "split")


def _split_devices(task_graph: TaskGraph) -> int | None:
    splits: list[Mark] = [m for m in task_graph.marks if m.kind == "split"]
    return next((m.devices for m in reversed(splits) if m.devices is not None), None)


def _check_widths(
    graph: Graph, found: Mapping[int, Choice], problems: Problems
) -> None:
    asked = {
        graph.task_graphs[c.task_graph].name: c.devices
        for c in found.values()
        if c.devices is not None and c.obliged
    }
    if len(set(asked.values())) > 1:
        listed = ", ".join(f"{name} over {n}" for name, n in asked.items())
        problems.add(
            f"the split regions ask for different numbers of devices ({listed}), but "
            "they share one mesh. Give them one number, or leave devices= out"
        )


def _meetings(
    rows: OperationRows, task_graph: int
) -> tuple[set[int], dict[int, set[int]], set[int]]:
    """Returns a TaskGraph's roles, those that meet each one, and those of weights."""
    present: set[int] = set()
    weighed: set[int] = set()
    meet: dict[int, set[int]] = {}
    for row in rows.ops:
        if row.task_graph != task_graph:
            continue
        here = frozenset[int]().union(*(slot.roles for slot in row.slots))
        present |= here
        if not all(slot.weight for slot in row.results):
            for slot in row.operands:
                weighed |= slot.roles if slot.weight else frozenset()
        for role in here:
            meet.setdefault(role, set()).update(here - {role})
    return present, meet, weighed


def cut_roles(graph: Graph, dims: Dimensions) -> frozenset[int]:
    """Returns the roles that occur twice in an operation, as attention's sequence."""
    roles = attended(graph, dims)
    for cut in dims.cuts:
        op = graph.ops[cut.op]
        roles.update(dims.layouts[(op.operands + op.results)[cut.slot]][cut.dim])
    return frozenset(roles)


def _sequence(graph: Graph, dims: Dimensions, rows: OperationRows) -> tuple[int, ...]:
    """Returns the roles that occur twice in an operation, as attention's sequence.

    Roles of weights that products read are excluded. If two sequences occur in one
    operation, as those of an encoder and a decoder, only the longer one is returned.
    """
    batch = {r.index for r in dims.batch}
    meeting = meeting_in_values(graph, dims, rows.weight)
    met: dict[int, set[int]] = {}
    for row in rows.ops:
        roles = frozenset[int]().union(*(slot.roles for slot in row.slots))
        for role in roles & meeting:
            met.setdefault(role, set()).update(roles)
        if row.product is not None:
            for slot in row.operands:
                meeting -= slot.roles if slot.weight else frozenset()
    # A role that only a frozen weight has may occur in no row.
    inside = (meeting & met.keys()) - batch
    usable = [r for r in inside if not dims.roles[r].unshardable]
    chosen: list[int] = []
    for role in sorted(usable, key=lambda r: (-dims.roles[r].size, r)):
        if met[role].isdisjoint(chosen):
            chosen.append(role)
    return tuple(sorted(chosen))


def _weight_bytes(graph: Graph, dims: Dimensions) -> Counter[int]:
    weight_bytes: Counter[int] = Counter()
    for t in graph.params:
        for role in roles_of(dims.layouts[t.id]):
            weight_bytes[role] += t.nbytes
    return weight_bytes


def _independent(
    usable: Sequence[int],
    meet: Mapping[int, set[int]],
    weight: Mapping[int, int],
    pins: Sequence[AxisConstraint],
) -> tuple[tuple[int, ...], ...]:
    """Returns sets of roles that never occur together: maximal ones, and single roles.

    Every set includes the dimensions that the user names for ``tensor`` or any axis.
    """
    asked = {p.role for p in pins if p.axis in (None, "tensor")}
    elsewhere = {p.role for p in pins if p.axis == "expert"}
    apart = [
        r
        for r in usable
        if r not in elsewhere and not any(r in meet.get(a, ()) for a in asked)
    ]
    by_weight = sorted(apart, key=lambda r: (-weight.get(r, 0), r))
    greedy: set[int] = set()
    for role in by_weight:
        if greedy.isdisjoint(meet.get(role, ())):
            greedy.add(role)
    maximal = itertools.islice(_maximal(apart, meet), MOST_TRIED)
    sets = {tuple(sorted(s)): None for s in (greedy, *maximal) if s}
    sets.update({(r,): None for r in apart})
    fitting = [s for s in sets if asked <= set(s)]

    def rank(roles: tuple[int, ...]) -> tuple[int, int]:
        return -sum(weight.get(r, 0) for r in roles), len(roles)

    return tuple(sorted(fitting, key=rank)[:MOST_SETS])


def _maximal(roles: list[int], meet: Mapping[int, set[int]]) -> Iterator[set[int]]:
    """Yields maximal sets of roles that never meet (Bron and Kerbosch, 1973)."""
    everything = set(roles)
    apart = {r: everything - meet.get(r, set()) - {r} for r in roles}

    def grow(chosen: set[int], open_: set[int], done: set[int]) -> Iterator[set[int]]:
        if not open_ and not done:
            yield chosen
            return
        pivot = max(open_ | done, key=lambda r: (len(open_ & apart[r]), -r))
        for role in sorted(open_ - apart[pivot]):
            yield from grow(chosen | {role}, open_ & apart[role], done & apart[role])
            open_ = open_ - {role}
            done = done | {role}

    if roles:
        yield from grow(set(), everything, set())
