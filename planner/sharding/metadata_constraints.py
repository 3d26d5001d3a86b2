"""Constraints of the user: ``split(axis=…)``, axes in metadata, and marked devices.

The first two name a dimension that an axis must shard. They are checked before the
search, and all problems are reported at once: unknown names, dimensions that cannot be
sharded, and contradictory hints.

Marks can give the number of devices of a TaskGraph, Whale's virtual devices (Jia et
al., USENIX ATC 2022, section 3.2.1). Each stage has devices of its own. TaskGraphs
outside stages share devices, for instance a replicated backbone and a split head. The
model is replicated over the remaining devices.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from whalejax.meshes.errors import Problems
from whalejax.meshes.units import count_text
from whalejax.planner.cost_terms import NO_EFFECT
from whalejax.planner.model.dimensions import Dimensions, Role
from whalejax.planner.model.graph import Graph, TaskGraph, Tensor
from whalejax.planner.model.repeated_layers import sliced_params
from whalejax.planner.sharding.layout import SPATIAL_AXES, STAGE


_Key = tuple[int, ...]
"""Key of a TaskGraph's stage; empty outside stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Places:
    """Numbers of devices in one model replica.

    Attributes:
        needed: Number of devices of one replica.
        has_stages: Whether stages are marked.
        widths: Number of devices by stage. The empty key has the number of TaskGraphs
            outside stages: that of the replica, or of one stage if none is marked.
    """

    needed: int
    has_stages: bool
    widths: dict[_Key, int]


def check_devices(
    task_graphs: Sequence[TaskGraph],
    num_devices: int,
    problems: Problems,
    stages: int = 1,
) -> None:
    """Reports marks whose numbers of devices are impossible.

    Args:
        task_graphs: Marked TaskGraphs, in program order.
        num_devices: Number of physical devices.
        problems: Collector of the errors.
        stages: Number of stages of a pipeline without marked stages; default: 1.
    """
    if num_devices == 1 and not _says_devices(task_graphs):
        return  # One device holds all of it.
    places = _places(task_graphs, num_devices, stages)
    needed, around = places.needed, _around(task_graphs)
    if places.has_stages:
        stages = len(places.widths) - 1
    listing = _listing(task_graphs, places, stages)
    if needed > num_devices:
        remedy = "Lower the counts, or leave devices= out to use all"
        if not _says_devices(task_graphs):
            remedy = (
                f"Mark at most {count_text(num_devices, 'stage')}, or take "
                f"{count_text(needed, 'device')}"
            )
        problems.add(
            f"the marks ask for {count_text(needed, 'device')} ({listing}), but there "
            f"are {num_devices}. {remedy}"
        )
    elif num_devices % needed:
        problems.add(
            f"one model replica takes {count_text(needed, 'device')} ({listing}), "
            f"which does not divide {num_devices}. Counts that do: "
            f"{_counts(num_devices)}"
        )
    if around is not None and places.has_stages and around != needed:
        problems.add(
            f"replicate(devices={around}) is around {count_text(stages, 'stage')}, but "
            f"one copy of the model takes {count_text(needed, 'device')} ({listing}). "
            f"Give it {needed}, or leave devices= out in one of the two"
        )
    elif around is not None and around % stages:
        problems.add(
            f"replicate(devices={around}) is around {count_text(stages, 'stage')}, but "
            f"its {around} devices do not divide into {count_text(stages, 'stage')}. "
            f"Use devices={stages} or a multiple of it"
        )
        return
    for graph in task_graphs:
        key, count = _stage_key(graph), _devices(graph)
        width = places.widths[key]
        if count is not None and width % count:
            cut = stages > 1 and not places.has_stages
            what = "a stage" if key or cut else "a model replica"
            problems.add(
                f"{graph.name} asks for {count_text(count, 'device')} inside {what} of "
                f"{width}; {count} does not divide {width}. Counts that do: "
                f"{_counts(width)}"
            )


def copies(task_graphs: Sequence[TaskGraph], num_devices: int, stages: int = 1) -> int:
    """Returns the smallest number of model copies that the marks allow.

    Args:
        task_graphs: Marked TaskGraphs, which ``check_devices`` accepts.
        num_devices: Number of physical devices.
        stages: Number of stages of a pipeline without marked stages; default: 1.

    Returns:
        Number of devices over that of one copy, or 1 if no mark gives a number.
    """
    if not _says_devices(task_graphs):
        return 1
    return num_devices // _places(task_graphs, num_devices, stages).needed


def _places(
    task_graphs: Sequence[TaskGraph], num_devices: int, stages: int = 1
) -> _Places:
    own: dict[_Key, int | None] = {}
    inside: list[int] = []
    outside: list[int] = []
    around = _around(task_graphs)
    for graph in task_graphs:
        key, count = _stage_key(graph), _devices(graph)
        if key:
            own[key] = own.get(key) or _stage_devices(graph)
        if count is not None:
            (inside if key else outside).append(count)
    if not own:  # A pipeline without marked stages divides all of the model.
        needed = around or stages * max(outside, default=0) or num_devices
        return _Places(needed=needed, has_stages=False, widths={(): needed // stages})
    shared = max([n for n in (*own.values(), *inside) if n is not None], default=1)
    if around is not None and around % len(own) == 0:
        shared = max(shared, around // len(own))
    widths = {key: width or shared for key, width in own.items()}
    needed = sum(widths.values())
    return _Places(needed=needed, has_stages=True, widths={**widths, (): needed})


def _stage_key(graph: TaskGraph) -> _Key:
    for depth, mark in enumerate(graph.marks):
        if mark.kind == "stage":
            return (*graph.path[:depth], int(mark.get("i") or 0), depth)
    return ()


def _stage_devices(graph: TaskGraph) -> int | None:
    return next((m.devices for m in graph.marks if m.kind == "stage"), None)


def _devices(graph: TaskGraph) -> int | None:
    """Returns the device count of the innermost mark that gives one, or None.

    Marks around the innermost pipeline do not count.
    """
    for mark in reversed(graph.marks):
        if mark.kind == "pipeline":
            return None
        if mark.devices is not None:
            return mark.devices
    return None


def _around(task_graphs: Sequence[TaskGraph]) -> int | None:
    for graph in task_graphs:
        kinds = [mark.kind for mark in graph.marks]
        outer = graph.marks[: kinds.index("pipeline")] if "pipeline" in kinds else ()
        counts = [mark.devices for mark in outer if mark.devices is not None]
        if counts:
            return counts[-1]
    return None


def _says_devices(task_graphs: Sequence[TaskGraph]) -> bool:
    return any(m.devices is not None for graph in task_graphs for m in graph.marks)


def _listing(task_graphs: Sequence[TaskGraph], places: _Places, stages: int) -> str:
    named = {
        f"{graph.name}: {_devices(graph) or places.widths[_stage_key(graph)]}": None
        for graph in task_graphs
        if _devices(graph) is not None or _stage_key(graph)
    }
    around = _around(task_graphs)
    if around is not None:
        named = {f"around them: {around}": None, **named}
    where = (
        f", in each of {stages} stages" if stages > 1 and not places.has_stages else ""
    )
    return ", ".join(named) + where


def _counts(number: int) -> str:
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)


MODEL_AXES = ("expert", "tensor")
"""Mesh axes that shard dimensions of the weights while computing."""

NO_WEIGHTS = {
    "data": (
        "which shards the batch and, with ZeRO, optimizer state. To store the weight "
        "in "
        "shards, map that name: axis_names={{{name!r}: 'fsdp'}}"
    ),
    "context": "which shards the sequence of activations. Drop that name",
    **dict.fromkeys(
        SPATIAL_AXES, "which shards the space of activations. Drop that name"
    ),
}
"""Effect and remedy of mesh axes that metadata cannot fix for a weight, by axis.
``name`` is the model's own name of the axis.
"""

NO_LAYERS = (
    "which divides only layers, the first dimension of parameters that a scan slices. "
    "Drop that name there"
)

_WRITABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisConstraint:
    """Dimension that the user asks an axis to shard.

    Attributes:
        role: Index of the logical dimension.
        axis: ``"tensor"`` or ``"expert"`` if metadata names it; None if a mark names
            the dimension and leaves the axis open.
        where: Origin of the user's request, for messages.
    """

    role: int
    axis: str | None
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedAxes:
    """Dimensions for which metadata fixes the mesh axis.

    Attributes:
        computed: Dimensions that are sharded in the computation, by TaskGraph.
        stored: (Dimension, mesh axis) pairs that shard only the storage of a tensor, by
            tensor id. Readers gather the tensor.
    """

    computed: Mapping[int, tuple[AxisConstraint, ...]]
    stored: Mapping[int, tuple[tuple[int, str], ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Roles that no model axis can shard, other than the batch and unshardable ones.

    Attributes:
        minor: Roles that are only the minor part of a dimension for some reader.
        itself: Roles that occur twice in a product, as the sequence in attention.
    """

    minor: frozenset[int]
    itself: frozenset[int]

    def obstacle(self, role: Role) -> str:
        """Returns the reason why a model axis cannot shard a role, or an empty text."""
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
            return "it occurs twice in an operation, as a sequence does in attention"
        return ""


def mark_pins(
    task_graph: TaskGraph,
    graph: Graph,
    dims: Dimensions,
    present: Collection[int],
    limits: Limits,
    problems: Problems,
) -> tuple[AxisConstraint, ...]:
    """Returns the dimensions that ``split(axis=…)`` asks to shard.

    Args:
        task_graph: Marked region.
        graph: Captured loss.
        dims: Logical dimensions of the loss.
        present: Roles that occur in the region.
        limits: Roles that cannot be sharded.
        problems: Collector of the names that cannot be obeyed.
    """
    mark = task_graph.strategy
    name = mark.get("axis") if mark else None
    if name is None:
        return ()
    where = f"{task_graph.name}: split(axis={name!r})"
    roles = [dims.roles[r] for r in sorted(present)]
    matches = [r for r in roles if name in (r.name, *r.aliases)]
    matches = matches or [
        r for r in roles if r.index == _of_leaf(name, graph, dims, limits)
    ]
    if not matches:
        matches = [r for r in roles if _ends_in(r, name)]
        if len(matches) > 1:
            several = ", ".join(role_names(r)[0] for r in matches)
            problems.add(f"{where} may mean {several}. Write the whole path of a leaf")
            return ()
    if not matches:
        problems.add(f"{where} names no dimension of that region. {_near(name, roles)}")
    free = []
    for role in matches:
        obstacle = limits.obstacle(role)
        if obstacle:
            problems.add(
                f"{where} cannot be sharded: {obstacle}. Name another dimension, or "
                "leave axis= out"
            )
        else:
            free.append(AxisConstraint(role=role.index, axis=None, where=where))
    return tuple(free)


def role_names(role: Role) -> list[str]:
    """Returns the names that a user may write for a role: logical names, then leaves.

    A leaf's dimension is written as path and index, such as ``head.kernel.1``. In
    repeated layers, the part up to the number of the layer may be omitted.
    """
    names = []
    for alias in dict.fromkeys((*role.aliases, role.name)):
        dotted = alias.replace("[", ".").rstrip("]")
        dotted = dotted.rpartition("*.")[2]
        if _WRITABLE.fullmatch(dotted):
            names.append(dotted)
    return list(dict.fromkeys(names))


def _of_leaf(name: str, graph: Graph, dims: Dimensions, limits: Limits) -> int | None:
    """Returns the role of a leaf's dimension, given as full path and index, or None."""
    path, _, number = name.rpartition(".")
    for tensor in graph.params:
        if tensor.path == path and number.isdecimal():
            layout = dims.layouts[tensor.id]
            atoms = layout[int(number)] if int(number) < len(layout) else ()
            return _role_to_shard(atoms, dims, limits).index if atoms else None
    return None


def _role_to_shard(atoms: tuple[int, ...], dims: Dimensions, limits: Limits) -> Role:
    roles = [dims.roles[role] for role in atoms]
    return next((r for r in roles if not limits.obstacle(r)), roles[0])


def _ends_in(role: Role, name: str) -> bool:
    asked = name.split(".")
    for alias in role.aliases:
        parts = alias.replace("[", ".").rstrip("]").split(".")
        ends = parts[max(0, len(parts) - len(asked)) :]
        if len(ends) == len(asked) and all(map(_matches_component, ends, asked)):
            return True
    return False


def _matches_component(pattern: str, component: str) -> bool:
    return (
        re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), component) is not None
    )


def _near(name: str, roles: Collection[Role]) -> str:
    names = list(dict.fromkeys(n for role in roles for n in role_names(role)))
    if not names:
        return (
            "No dimension there has a name: give the model's parameters logical names "
            "(nn.with_partitioning, nnx.with_partitioning), or leave axis= out"
        )
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.3) or names[:6]
    return f"Nearest: {', '.join(near)}"


def metadata_pins(
    graph: Graph,
    dims: Dimensions,
    homes: Mapping[int, int],
    limits: Limits,
    meet: Mapping[int, Mapping[int, set[int]]],
    problems: Problems,
) -> FixedAxes:
    """Returns the dimensions for which metadata fixes the axis.

    If metadata fixes one axis for two dimensions of an operation, the computation
    shards the one with more bytes.

    Args:
        graph: Captured loss.
        dims: Logical dimensions of the loss.
        homes: TaskGraph that computes with each parameter, by tensor id.
        limits: Roles that cannot be sharded.
        meet: Roles that occur with each role in one operation, by TaskGraph and role.
        problems: Collector of contradictions.
    """
    asked: dict[int, dict[AxisConstraint, list[tuple[int, int, str]]]] = {}
    stored: dict[int, list[tuple[int, str]]] = {}
    sliced = sliced_params(graph)
    for tensor in graph.params:
        home = graph.task_graphs[homes.get(tensor.id, 0)]
        twice = _check_twice(tensor, problems)
        for dim, axis in pins_of(tensor):
            where = f"{tensor.path} dim {dim}: its metadata shards it over {axis}"
            if axis in NO_WEIGHTS:
                instead = NO_WEIGHTS[axis].format(name=_called(tensor, dim, axis))
                problems.add(f"{where}, {instead}")
            if axis == STAGE and (dim or tensor.id not in sliced):
                problems.add(f"{where}, {NO_LAYERS}")
            if axis in (*NO_WEIGHTS, STAGE) or axis in twice:
                continue
            mark = home.strategy
            if axis != "fsdp" and mark is not None and mark.kind == "replicate":
                problems.add(
                    f"{where}, but {home.name} replicates it. Drop one of the two hints"
                )
                continue
            atoms = dims.layouts[tensor.id][dim]
            if not atoms:
                continue  # Nothing is divided; ``unplanned_pins`` reports it.
            obstacle = dims.roles[atoms[0]].unshardable if axis == "fsdp" else ""
            if obstacle:
                problems.add(
                    f"{where}, which is impossible: {obstacle}. Drop that name"
                )
            if obstacle or axis == "fsdp":
                continue
            role = _role_to_shard(atoms, dims, limits)
            if limits.obstacle(role):
                stored.setdefault(tensor.id, []).append((dim, axis))
                continue
            pin = AxisConstraint(role=role.index, axis=axis, where="")
            places = asked.setdefault(home.index, {}).setdefault(pin, [])
            places.append((tensor.id, dim, where))
    computed: dict[int, tuple[AxisConstraint, ...]] = {}
    for index, places_of in asked.items():
        computed[index] = _kept_pins(graph, places_of, meet.get(index, {}), stored)
    return FixedAxes(computed=computed, stored={t: tuple(v) for t, v in stored.items()})


def _kept_pins(
    graph: Graph,
    places_of: Mapping[AxisConstraint, list[tuple[int, int, str]]],
    meet: Mapping[int, set[int]],
    stored: dict[int, list[tuple[int, str]]],
) -> tuple[AxisConstraint, ...]:
    """Returns the constraints of a TaskGraph that one layout can obey.

    Other constraints apply only to storage, and are added to ``stored``. ``places_of``
    has (tensor id, dimension, origin of the request) tuples by constraint.
    """

    def nbytes(pin: AxisConstraint) -> int:
        return sum(graph.tensors[t].nbytes for t, _, _ in places_of[pin])

    kept: list[AxisConstraint] = []
    for pin in sorted(places_of, key=lambda pin: -nbytes(pin)):
        others = {one.role for one in kept if one.axis == pin.axis}
        if others.isdisjoint(meet.get(pin.role, ())):
            kept.append(pin)
            continue
        for tensor, dim, _ in places_of[pin]:
            stored.setdefault(tensor, []).append((dim, str(pin.axis)))
    return tuple(replace(pin, where=places_of[pin][0][2]) for pin in kept)


def pins_of(tensor: Tensor) -> Iterator[tuple[int, str]]:
    """Yields (dimension, mesh axis) of each axis that metadata fixes."""
    for dim, text in enumerate(tensor.pinned):
        for axis in (text or "").split("+"):
            if axis:
                yield dim, axis


def _called(tensor: Tensor, dim: int, axis: str) -> str:
    axes = (tensor.pinned[dim] or "").split("+")
    names = (tensor.called[dim] or "").split("+") if tensor.called else axes
    return dict(zip(axes, names, strict=False)).get(axis, axis)


def _check_twice(tensor: Tensor, problems: Problems) -> set[str]:
    """Reports and returns axes that metadata fixes for several dimensions of a leaf."""
    places: dict[str, list[int]] = {}
    for dim, axis in pins_of(tensor):
        places.setdefault(axis, []).append(dim)
    for axis, held in places.items():
        if len(held) > 1:
            listed = " and ".join(f"dim {d} ({tensor.shape[d]})" for d in held)
            problems.add(
                f"{tensor.path}: its metadata puts the axis {axis} on {listed}, but "
                "one axis can shard only one dimension of a tensor. Keep one of them"
            )
    return {axis for axis, held in places.items() if len(held) > 1}


def check_together(
    pins: tuple[AxisConstraint, ...], meet: Mapping[int, set[int]], problems: Problems
) -> None:
    """Reports constraints of one region that no layout can obey together.

    Args:
        pins: All constraints of the region.
        meet: Roles that occur with each role in one operation.
        problems: Collector of contradictions.
    """
    for i, one in enumerate(pins):
        for other in pins[i + 1 :]:
            clash = one.role in meet.get(other.role, ())
            same = one.axis == other.axis or None in (one.axis, other.axis)
            if clash and same:
                problems.add(
                    f"{one.where}, and {other.where}: both dimensions are in one "
                    "operation, which an axis can shard along only one. Drop one of "
                    "the two"
                )


def pinned_axes(graph: Graph) -> frozenset[str]:
    """Returns the mesh axes that the metadata of the parameters fixes."""
    return frozenset(axis for tensor in graph.params for _, axis in pins_of(tensor))


def unplanned_pins(
    graph: Graph, mesh: Mapping[str, int], *, stages: bool = False
) -> list[str]:
    """Returns notes on metadata without an effect: its axis or dimension has size 1.

    Args:
        graph: Captured loss.
        mesh: Axis sizes.
        stages: Whether to check only the axis ``stage``, instead of all others.
    """
    idle: dict[str, list[str]] = {}
    single: dict[str, list[str]] = {}
    for tensor in graph.params:
        for dim, axis in pins_of(tensor):
            if (axis == STAGE) != stages:
                continue
            if mesh.get(axis, 1) == 1:
                idle.setdefault(axis, []).append(tensor.path)
            elif tensor.shape[dim] == 1:
                single.setdefault(axis, []).append(f"{tensor.path} dim {dim}")
    ones = [
        f"the metadata names the mesh axis {axis} for dimensions of size 1, where that "
        "name "
        f"{NO_EFFECT}: {places[0]}" + f" and {len(places) - 1} more" * (len(places) > 1)
        for axis, places in single.items()
    ]
    return ones + [
        f"{_naming(paths, axis)}, which has size 1 in this plan: the name {NO_EFFECT}"
        for axis, paths in idle.items()
    ]


def _naming(paths: Sequence[str], axis: str) -> str:
    if len(paths) == 1:
        return f"1 leaf names the mesh axis {axis} ({paths[0]})"
    return f"{len(paths)} leaves name the mesh axis {axis} ({paths[0]} first)"
