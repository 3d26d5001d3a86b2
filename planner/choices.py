"""What each TaskGraph may do with the model axes, before anything is costed.

A mark obliges: ``replicate`` lends every axis to the batch, ``split`` must shard some
logical dimension. What no mark covers is free. Which dimensions can share one axis
falls out of the model: those that never meet in one operation (heads, mlp and
vocabulary do not, which is Megatron's tensor parallelism, found and not declared).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from whalejax.meshes.problems import Problems
from whalejax.planner.dimensions import Dimensions, Role
from whalejax.planner.graph import Graph, TaskGraph
from whalejax.planner.layout import Table
from whalejax.planner.plan import PlanError
from whalejax.planner.regions import expert_roles
from whalejax.planner.rows import Rows


NOTHING_TO_SPLIT = "a split would shard nothing"
"""Reason to refuse a mesh."""

MOST_SETS = 32
"""Independent sets kept for one TaskGraph, those that hold most weight first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What one TaskGraph may do.

    Attributes:
        task_graph: which.
        strategy: ``replicate``, ``split`` or None where it is free.
        devices: how many devices a ``split`` asks for, or None.
        sets: sets of roles that one axis may shard together, best guess first.
        experts: roles that the ``expert`` axis may shard here.
        pinned: a role that ``split(axis=…)`` asks for, or None.
    """

    task_graph: int
    strategy: str | None
    devices: int | None
    sets: tuple[tuple[int, ...], ...]
    experts: frozenset[int]
    pinned: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The choices of every TaskGraph that has operations.

    Attributes:
        choices: by TaskGraph index.
        batch: the batch roles.
        minor: roles that some parameter holds only as a minor atom; no PartitionSpec
            can name them.
    """

    choices: Mapping[int, Choice]
    batch: tuple[int, ...]
    minor: frozenset[int]

    @property
    def order(self) -> tuple[int, ...]:
        """TaskGraphs in index order."""
        return tuple(self.choices)

    def tables(
        self, task_graph: int, mesh: Mapping[str, int], dims: Dimensions
    ) -> list[Table]:
        """Every table that the TaskGraph may have on a mesh."""
        choice = self.choices[task_graph]
        base: dict[str, tuple[int, ...]] = {"data": self.batch, "fsdp": self.batch}
        found: list[Table] = []
        for expert in self._expert(choice, mesh, dims):
            for tensor in self._tensor(choice, mesh, dims, expert):
                found.append({**base, "expert": expert, "tensor": tensor})
        return found

    def _expert(
        self, choice: Choice, mesh: Mapping[str, int], dims: Dimensions
    ) -> list[tuple[int, ...]]:
        size = mesh["expert"]
        if size == 1 or not choice.experts or choice.strategy == "replicate":
            return [self.batch]
        fits = [r for r in sorted(choice.experts) if dims.roles[r].size % size == 0]
        if choice.pinned is not None and choice.pinned in fits:
            return [(choice.pinned,)]
        return [(r,) for r in fits]

    def _tensor(
        self,
        choice: Choice,
        mesh: Mapping[str, int],
        dims: Dimensions,
        expert: tuple[int, ...],
    ) -> list[tuple[int, ...]]:
        size = mesh["tensor"]
        if size == 1 or choice.strategy == "replicate":
            return [self.batch]
        busy = set(expert) if mesh["expert"] > 1 else set()
        found: dict[tuple[int, ...], None] = {}
        for roles in choice.sets:
            fits = tuple(
                r for r in roles if dims.roles[r].size % size == 0 and r not in busy
            )
            if fits and (choice.pinned in (None, *fits) or choice.pinned in busy):
                found[fits] = None
        by_experts = bool(busy) and expert != self.batch
        if choice.strategy is None or by_experts:
            found[self.batch] = None
        return list(found)


def sharded_by_split(options: Options, mesh: Mapping[str, int]) -> str:
    """Why a mesh cannot serve the marks, or an empty text.

    Args:
        options: the choices.
        mesh: axis sizes.
    """
    model = mesh["tensor"] * mesh["expert"]
    uses_tensor = any(c.sets for c in options.choices.values() if _splits(c))
    uses_expert = any(c.experts for c in options.choices.values() if _splits(c))
    if mesh["tensor"] > 1 and not uses_tensor:
        return "no dimension for a tensor axis"
    if mesh["expert"] > 1 and not uses_expert:
        return "no dimension for an expert axis"
    for choice in options.choices.values():
        if choice.strategy != "split":
            continue
        if choice.devices is not None and choice.devices != model:
            return f"a split asks for {choice.devices} devices"
        serves = mesh["tensor"] > 1 or (mesh["expert"] > 1 and choice.experts)
        if not serves and choice.devices != 1 and _several(mesh):
            return NOTHING_TO_SPLIT
    return ""


def _several(mesh: Mapping[str, int]) -> bool:
    return any(size > 1 for size in mesh.values())


def _splits(choice: Choice) -> bool:
    return choice.strategy != "replicate"


def choices(graph: Graph, dims: Dimensions, rows: Rows, default: str | None) -> Options:
    """Work out what each TaskGraph may do.

    Args:
        graph: the captured loss.
        dims: its logical dimensions.
        rows: its cost rows.
        default: strategy of unmarked operations, or None.

    Raises:
        PlanError: a ``split`` names a dimension that does not exist there, or hints
            contradict each other; every problem is listed.
    """
    problems = Problems()
    minor = _minor_roles(graph, dims)
    experts = expert_roles(graph, dims)
    meeting_itself = _cut_roles(graph, dims)
    found: dict[int, Choice] = {}
    for task_graph in graph.task_graphs:
        present, meet, weighed = _meetings(rows, task_graph.index)
        if not present and task_graph.index:
            continue
        allowed = [
            r
            for r in sorted(weighed)
            if not dims.roles[r].unshardable
            and not dims.roles[r].is_batch
            and r not in minor
            and r not in meeting_itself
        ]
        mark = task_graph.strategy
        strategy = mark.kind if mark else default
        pinned = _pinned(task_graph, dims, present, problems)
        found[task_graph.index] = Choice(
            task_graph=task_graph.index,
            strategy=None if task_graph.name == "experts" and not mark else strategy,
            devices=mark.devices if mark and mark.kind == "split" else None,
            sets=_independent(allowed, meet, dims, pinned),
            experts=experts & present if _may_hold_experts(task_graph) else frozenset(),
            pinned=pinned,
        )
    _check_pins(graph, dims, found, problems)
    problems.raise_if_any(PlanError, title="the hints cannot be obeyed")
    batch = tuple(r.index for r in dims.batch)
    return Options(choices=found, batch=batch, minor=minor)


def _may_hold_experts(task_graph: TaskGraph) -> bool:
    mark = task_graph.strategy
    return task_graph.name == "experts" or (mark is not None and mark.kind == "split")


def _meetings(
    rows: Rows, task_graph: int
) -> tuple[set[int], dict[int, set[int]], set[int]]:
    """Roles of a TaskGraph: all, which meet in one operation, and those of weights."""
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


def _cut_roles(graph: Graph, dims: Dimensions) -> frozenset[int]:
    """Roles that meet themselves, as the sequence does in attention: context's own."""
    found: set[int] = set()
    for cut in dims.cuts:
        op = graph.ops[cut.op]
        layout = dims.layouts[(op.operands + op.results)[cut.slot]]
        found.update(layout[cut.dim] if cut.dim >= 0 else ())
    return frozenset(found)


def _minor_roles(graph: Graph, dims: Dimensions) -> frozenset[int]:
    return frozenset(
        role for t in graph.params for atoms in dims.layouts[t.id] for role in atoms[1:]
    )


def _independent(
    allowed: list[int],
    meet: Mapping[int, set[int]],
    dims: Dimensions,
    pinned: int | None,
) -> tuple[tuple[int, ...], ...]:
    """Maximal sets of roles that never meet, and every role alone."""
    free = [r for r in allowed if pinned is None or r not in meet.get(pinned, ())]
    if pinned is not None and pinned not in free:
        free.append(pinned)
    sets = {tuple(sorted(s)): None for s in _maximal(free, meet)}
    sets.update({(r,): None for r in free})
    if pinned is not None:
        sets = {s: None for s in sets if pinned in s}
    order = sorted(sets, key=lambda s: -sum(dims.roles[r].copies for r in s))
    return tuple(order[:MOST_SETS])


def _maximal(roles: list[int], meet: Mapping[int, set[int]]) -> Iterator[set[int]]:
    """Bron and Kerbosch (1973) on the complement of the meeting graph."""

    def grow(chosen: set[int], open_: set[int], done: set[int]) -> Iterator[set[int]]:
        if not open_ and not done:
            yield chosen
        for role in sorted(open_):
            away = meet.get(role, set()) | {role}
            yield from grow(chosen | {role}, open_ - away, done - away)
            open_ = open_ - {role}
            done = done | {role}

    if roles:
        yield from grow(set(), set(roles), set())


def _pinned(
    task_graph: TaskGraph, dims: Dimensions, present: set[int], problems: Problems
) -> int | None:
    mark = task_graph.strategy
    name = mark.get("axis") if mark else None
    if name is None:
        return None
    role = dims.find(name) or _by_suffix(dims, name, present)
    if role is None or role.index not in present:
        names = [n for r in present for n in _names(dims.roles[r])]
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.3) or names[:6]
        problems.add(
            f"{task_graph.name}: split(axis={name!r}) names no dimension of that "
            f"region. Nearest: {', '.join(near) or 'none'}"
        )
        return None
    if role.is_batch or role.unshardable:
        why = "the batch belongs to replicate" if role.is_batch else role.unshardable
        problems.add(
            f"{task_graph.name}: split(axis={name!r}) cannot be sharded ({why}). "
            "Name another dimension or leave axis= out"
        )
        return None
    return role.index


def _names(role: Role) -> tuple[str, ...]:
    return (role.name, *role.aliases)


def _by_suffix(dims: Dimensions, name: str, present: set[int]) -> Role | None:
    """A role whose name ends in the given one, if just one does."""
    found = {
        r: None
        for r in sorted(present)
        if any(n.endswith("." + name) for n in _names(dims.roles[r]))
    }
    return dims.roles[next(iter(found))] if len(found) == 1 else None


def _check_pins(
    graph: Graph, dims: Dimensions, found: Mapping[int, Choice], problems: Problems
) -> None:
    """Mesh axes fixed in the model's own metadata against the marks."""
    homes: dict[int, int] = {}
    for op in graph.ops:
        for t in op.operands:
            homes.setdefault(t, op.task_graph)
    for tensor in graph.params:
        axes = [a for a in tensor.pinned if a is not None]
        twice = sorted({a for a in axes if axes.count(a) > 1})
        if twice:
            problems.add(
                f"{tensor.path}: its metadata puts axis {', '.join(twice)} on two "
                "dimensions; one axis can shard one dimension of a tensor"
            )
        home = found.get(homes.get(tensor.id, 0))
        if home is not None and home.strategy == "replicate" and "tensor" in axes:
            name = graph.task_graphs[home.task_graph].name
            problems.add(
                f"{tensor.path}: its metadata shards it over tensor, and {name} "
                "replicates it. Drop one of the two hints"
            )
