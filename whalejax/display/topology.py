"""Picture of a plan's cluster: nodes, links, and the mesh axes that use each link.

Devices are in the order of the mesh. If there are many nodes or devices, only the first
ones are drawn, with the total number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from html import escape
from typing import Final

from whalejax.display.page import FILLS, INK, Picture, drawing, words
from whalejax.meshes.cluster_data import ClusterData
from whalejax.meshes.topology import Level
from whalejax.meshes.units import gigabytes
from whalejax.planner.cost.collectives import axis_parts
from whalejax.planner.plan.report.plan_traffic import mesh_of
from whalejax.planner.plan_data import PlanData


_NODES: Final = 4
_DEVICES: Final = 16
_COLUMNS: Final = 8
_SIDE: Final = 30.0
_PAD: Final = 12.0
_ROW: Final = 24.0
_LETTER: Final = 6.4


class TopologyMap(Picture):
    """Picture of nodes with their devices, and of links with their speeds and axes.

    Attributes:
        links: Mesh axes that cross each link, by name of the link, innermost link
            first. Each axis has the number of groups of devices that it connects there.
    """

    def __init__(self, plan: PlanData) -> None:
        cluster = plan.cluster
        self.links = crossed_links(plan)
        lines = [_link_text(level, self.links[level.name]) for level in cluster.levels]
        title = f"{cluster.describe()}"
        svg = _draw(cluster, self.links, title)
        super().__init__(
            html=f"<h3>{escape(title)}</h3>{svg}",
            text="\n".join([title, *lines]),
            svg=svg,
        )


def crossed_links(plan: PlanData) -> dict[str, list[tuple[str, int]]]:
    """Returns the mesh axes that cross each link, by name of the link.

    Args:
        plan: The plan. Axes of stages with separate layouts count too.

    Returns:
        Name of each axis, and the number of groups of devices that it connects there.
    """
    found: dict[str, list[tuple[str, int]]] = {x.name: [] for x in plan.cluster.levels}
    meshes = [(mesh_of(plan), plan.cluster)]
    for one in plan.pipelines or (plan,):
        meshes += [(own.axis_sizes, own.cluster) for own in one.stage_plans]
    for mesh, cluster in meshes:
        for axis in mesh:
            sizes: dict[str, int] = defaultdict(lambda: 1)
            for part in axis_parts((axis,), mesh, cluster):
                sizes[part.level.name] *= part.size
            for name, size in sizes.items():
                if (axis, size) not in found.setdefault(name, []) and axis:
                    found[name].append((axis, size))
    return found


def _link_text(level: Level, axes: list[tuple[str, int]]) -> str:
    speed = f"{gigabytes(level.bandwidth_bytes_per_second)}/s"
    crossed = ", ".join(f"{axis} {size}" for axis, size in axes) or "no axis"
    return f"{level.name}, {level.size:,} joined at {speed} a device: {crossed}"


def _draw(
    cluster: ClusterData, links: dict[str, list[tuple[str, int]]], title: str
) -> str:
    shown = cluster.nodes[:_NODES]
    inner, first, left, bottom = [], 0, _PAD, 0.0
    for number, node in enumerate(shown):
        html, width, height = _node(number, node.kind.display_name(), node.count, first)
        inner.append(f'<g transform="translate({left:g} {_PAD:g})">{html}</g>')
        first, left = first + node.count, left + width + _PAD
        bottom = max(bottom, _PAD + height)
    if len(cluster.nodes) > _NODES:
        text = f"… {len(cluster.nodes)} nodes"
        inner.append(words(left, _PAD + 40, text))
        left += len(text) * _LETTER + _PAD
    y, right = bottom + _PAD, left
    names = [*dict.fromkeys(axis for axes in links.values() for axis, _ in axes)]
    fills = {axis: FILLS[n % len(FILLS)] for n, axis in enumerate(names)}
    chips = max(len(_speed_text(level)) for level in cluster.levels) * _LETTER
    for level in cluster.levels:
        html, width = _link(level, links.get(level.name, []), fills, y, chips)
        inner.append(html)
        right, y = max(right, width), y + _ROW
    return drawing(right + _PAD, y + _PAD / 2, title, "".join(inner))


def _node(number: int, kind: str, count: int, first: int) -> tuple[str, float, float]:
    """Returns a drawing of a node with its devices, its width and its height."""
    shown = min(count, _DEVICES)
    columns = min(shown, _COLUMNS)
    rows = -(-shown // columns)
    name = f"node {number}: {count} × {kind}" + ", some shown" * (shown < count)
    width = max(columns * (_SIDE + 4) + 12, len(name) * _LETTER + 12)
    height = rows * (_SIDE + 4) + 28
    inner = [
        f'<rect width="{width:g}" height="{height:g}" rx="4" fill="none" '
        'stroke="currentColor"/>',
        words(8, 15, name),
    ]
    for place in range(shown):
        x = 8 + place % columns * (_SIDE + 4)
        y = 22 + place // columns * (_SIDE + 4)
        inner.append(
            f'<rect x="{x:g}" y="{y:g}" width="{_SIDE:g}" height="{_SIDE:g}" rx="3" '
            f'fill="{FILLS[7]}"/>'
            + words(x + _SIDE / 2, y + 19, str(first + place), anchor="middle", ink=INK)
        )
    return "".join(inner), width, height


def _speed_text(level: Level) -> str:
    speed = gigabytes(level.bandwidth_bytes_per_second)
    return f"{level.name}: {level.size:,} × at {speed}/s a device"


def _link(
    level: Level,
    axes: list[tuple[str, int]],
    fills: Mapping[str, str],
    y: float,
    chips: float,
) -> tuple[str, float]:
    """Draws a link with its speed and a chip for each axis that crosses it."""
    inner = [
        f'<line x1="{_PAD:g}" y1="{y + 9:g}" x2="{_PAD + 26:g}" y2="{y + 9:g}" '
        'stroke="currentColor" stroke-width="3"/>',
        words(_PAD + 34, y + 13, _speed_text(level)),
    ]
    x = _PAD + 34 + chips + 12
    for axis, size in axes:
        label = f"{axis} {size}"
        width = len(label) * _LETTER + 16
        inner.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="18" rx="9" '
            f'fill="{fills[axis]}"/>'
            + words(x + width / 2, y + 13, label, anchor="middle", ink=INK)
        )
        x += width + 8
    if not axes:
        text = "no axis crosses it"
        inner.append(words(x, y + 13, text))
        x += len(text) * _LETTER
    return "".join(inner), x


def topology(plan: PlanData) -> TopologyMap:
    """Returns the map of a plan's devices; see ``Plan.topology``."""
    return TopologyMap(plan)
