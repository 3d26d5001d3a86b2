"""Whale's virtual devices: which physical devices each TaskGraph gets.

Devices are taken in sequence. Stages stand on devices of their own, one after the
other; TaskGraphs outside stages share theirs, so that a replicated backbone and a split
head live on the same devices. What is left over multiplies: K devices over the sum
that one model replica needs gives the degree of the surrounding data parallelism
(Jia et al., Whale, USENIX ATC 2022, section 3.2.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from whalejax.meshes.problems import Problems
from whalejax.planner.graph import TaskGraph
from whalejax.planner.plan import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualDevice:
    """The devices of one TaskGraph.

    Attributes:
        task_graph: its name.
        replicas: for each replica of the model, the physical device numbers.
    """

    task_graph: str
    replicas: tuple[tuple[int, ...], ...]


def virtual_devices(
    task_graphs: Sequence[TaskGraph], num_devices: int
) -> tuple[VirtualDevice, ...]:
    """Assign devices to TaskGraphs in sequence.

    Args:
        task_graphs: the marked TaskGraphs, in program order.
        num_devices: physical devices.

    Returns:
        One entry for each TaskGraph, in the same order.

    Raises:
        PlanError: more devices asked than there are, or a count that does not divide
            them; every problem is listed.
    """
    problems = Problems()
    stages: dict[tuple[int, ...], list[TaskGraph]] = {}
    for graph in task_graphs:
        key = _stage_key(graph)
        stages.setdefault(key, []).append(graph)
    staged = [key for key in stages if key]
    whole = 1 if staged else num_devices
    widths = {
        key: max((_devices(g) or whole for g in graphs), default=whole)
        for key, graphs in stages.items()
    }
    _check_colocated(stages, widths, problems)
    needed = sum(widths[key] for key in staged) if staged else widths.get((), 1)
    if needed > num_devices:
        problems.add(
            f"the marks ask for {needed} devices ({_listing(task_graphs)}); there are "
            f"{num_devices}. Lower the counts, or leave devices= out to use all"
        )
    elif num_devices % needed:
        problems.add(
            f"one model replica takes {needed} devices ({_listing(task_graphs)}), "
            f"which does not divide {num_devices}. Counts that do: "
            f"{', '.join(str(d) for d in _divisors(num_devices))}"
        )
    problems.raise_if_any(PlanError, title="the marks do not fit the devices")
    return _assign(task_graphs, stages, widths, needed, num_devices)


def _assign(
    task_graphs: Sequence[TaskGraph],
    stages: dict[tuple[int, ...], list[TaskGraph]],
    widths: dict[tuple[int, ...], int],
    needed: int,
    num_devices: int,
) -> tuple[VirtualDevice, ...]:
    start: dict[tuple[int, ...], int] = {}
    offset = 0
    for key in stages:
        start[key] = offset if key else 0
        offset += widths[key] if key else 0
    found = []
    for graph in task_graphs:
        key = _stage_key(graph)
        first, count = start[key], _devices(graph) or widths[key]
        replicas = tuple(
            tuple(range(base + first, base + first + count))
            for base in range(0, num_devices, needed)
        )
        found.append(VirtualDevice(task_graph=graph.name, replicas=replicas))
    return tuple(found)


def _stage_key(graph: TaskGraph) -> tuple[int, ...]:
    """Identifies the stage a TaskGraph stands in; empty outside stages."""
    for depth, mark in enumerate(graph.marks):
        if mark.kind == "stage":
            return (*graph.path[:depth], int(mark.get("i") or 0), depth)
    return ()


def _devices(graph: TaskGraph) -> int | None:
    """The count asked for by the innermost mark that asks."""
    for mark in reversed(graph.marks):
        if mark.kind != "pipeline" and mark.devices is not None:
            return mark.devices
    return None


def _check_colocated(
    stages: dict[tuple[int, ...], list[TaskGraph]],
    widths: dict[tuple[int, ...], int],
    problems: Problems,
) -> None:
    for key, graphs in stages.items():
        for graph in graphs:
            count = _devices(graph)
            if count is not None and widths[key] % count:
                problems.add(
                    f"{graph.name} asks for {count} devices and shares them with a "
                    f"TaskGraph on {widths[key]}; {count} does not divide {widths[key]}"
                )


def _listing(task_graphs: Sequence[TaskGraph]) -> str:
    return ", ".join(
        f"{g.name}: {_devices(g)}" for g in task_graphs if _devices(g) is not None
    )


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
