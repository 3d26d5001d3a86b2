"""Whale's virtual devices: the numbers of devices that marked TaskGraphs take.

Devices are assigned in sequence. Each stage has its own devices, one stage after the
other. TaskGraphs outside stages share theirs, so that a replicated backbone and a split
head are on the same devices. All devices over the devices of one model replica give the
degree of the surrounding data parallelism (Jia et al., Whale, USENIX ATC 2022, section
3.2.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from whalejax.meshes.errors import Problems
from whalejax.planner.model.graph import TaskGraph


_Key = tuple[int, ...]
"""Key of a TaskGraph's stage; empty outside stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Places:
    """Numbers of devices within one model replica.

    Attributes:
        needed: Number of devices of one replica.
        has_stages: Whether stages are marked.
        widths: Number of devices of each stage. The empty key has that of TaskGraphs
            outside stages: the full replica, or one stage if no stage is marked.
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
    """Reports device counts of marks that do not fit the devices.

    Args:
        task_graphs: The marked TaskGraphs, in program order.
        num_devices: Physical devices.
        problems: Collector of the errors.
        stages: Number of stages of a pipeline in which no stage is marked, if known.
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
            remedy = f"Mark at most {num_devices} stages, or take {needed} devices"
        problems.add(
            f"the marks ask for {needed} devices ({listing}); there are {num_devices}. "
            f"{remedy}"
        )
    elif num_devices % needed:
        problems.add(
            f"one model replica takes {needed} devices ({listing}), which does not "
            f"divide {num_devices}. Counts that do: {_counts(num_devices)}"
        )
    if around is not None and places.has_stages and around != needed:
        problems.add(
            f"replicate(devices={around}) stands around {stages} stages, and one copy "
            f"of the model takes {needed} devices ({listing}). Give it {needed}, or "
            "leave devices= out in one of the two"
        )
    elif around is not None and around % stages:
        problems.add(
            f"replicate(devices={around}) holds {stages} stages: one copy of the model "
            f"takes {around} devices, which do not divide into {stages} stages. Use "
            f"devices={stages} or a multiple of it"
        )
        return
    for graph in task_graphs:
        key, count = _stage_key(graph), _devices(graph)
        width = places.widths[key]
        if count is not None and width % count:
            cut = stages > 1 and not places.has_stages
            what = "a stage" if key or cut else "a model replica"
            problems.add(
                f"{graph.name} asks for {count} devices inside {what} of {width}; "
                f"{count} does not divide {width}. Counts that do: {_counts(width)}"
            )


def copies(task_graphs: Sequence[TaskGraph], num_devices: int, stages: int = 1) -> int:
    """Returns the least number of copies of the model that the marks allow.

    Args:
        task_graphs: The marked TaskGraphs, which ``check_devices`` accepts.
        num_devices: Physical devices.
        stages: Number of stages of a pipeline in which no stage is marked.

    Returns:
        Number of devices over that of one copy if a mark gives a number; otherwise 1,
        which is no limit.
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
    if not own:  # A pipeline whose stages are not marked cuts all of the model.
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
