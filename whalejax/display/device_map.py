"""Maps the shards of a parameter to devices, from the plan alone."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from html import escape

from whalejax.display.page import FILLS, INK, Picture, cell, drawing, table, words
from whalejax.meshes.checks import short_repr
from whalejax.meshes.errors import WhaleError
from whalejax.meshes.units import count_text
from whalejax.planner.plan.report.why import shape_text, spec_text
from whalejax.planner.plan_data import PlanData
from whalejax.planner.plan_entries import LeafPlan
from whalejax.planner.sharding.layout import Spec


LAYOUTS = {
    "params": "param_spec",
    "compute": "compute_spec",
    "gradients": "gradient_spec",
    "optimizer": "optimizer_spec",
}
"""Names of layouts: stored parameter, its use, gradient and optimizer state."""

Part = tuple[tuple[int, int], ...]
"""Half-open index range of each dimension."""

_MOST_CELLS = 16
"""Maximum number of rows and of columns of a shown grid."""

_SHARD, _MARGIN, _TOP, _WIDE = 34.0, 62.0, 20.0, 520.0
_MOST_GRIDS = 8
_MOST_LINES = 32


class DeviceMap(Picture):
    """Map of a parameter's shards to devices.

    Attributes:
        path: Path of the parameter.
        shape: Shape of the global array.
        spec: Mesh axes of each dimension.
        parts: Indices of the devices that hold each part, by the part's index ranges.
            Devices are numbered in the order of the cluster.
    """

    def __init__(
        self,
        leaf: LeafPlan,
        of: str,
        axes: Mapping[str, int],
        firsts: Sequence[int],
        devices: int,
    ) -> None:
        """Computes the map.

        Args:
            leaf: The parameter.
            of: One of ``LAYOUTS``.
            axes: Sizes of the mesh axes of one copy.
            firsts: Index of the first device of each replica or stage with a copy.
            devices: Number of devices of the whole plan.
        """
        self.path, self.shape = leaf.path, leaf.shape
        self.spec: Spec = getattr(leaf, LAYOUTS[of])
        self.parts: dict[Part, list[int]] = {}
        for first in firsts:
            for part, held in parts_of(self.shape, self.spec, axes, first).items():
                self.parts.setdefault(part, []).extend(held)
        said = self._words(of, devices)
        svg = _draw(self, said[0])
        super().__init__(
            html="".join(f"<p>{escape(w)}</p>" for w in said) + svg + _grids(self),
            text="\n".join((*said, *_lines(self))),
            svg=svg,
        )

    def _words(self, of: str, devices: int) -> list[str]:
        counts = {len(held) for held in self.parts.values()}
        part = next(iter(self.parts))
        size = shape_text([end - begin for begin, end in part])
        each = f"each on {max(counts)} of {count_text(devices, 'device')}"
        if max(counts) == devices:
            each = "whole on each device" if devices > 1 else "whole on the only device"
        elif counts == {1}:
            each = f"each on one of {count_text(devices, 'device')}"
        number = f"{len(self.parts):,} parts of {size}, " if len(self.parts) > 1 else ""
        what = "" if of == "params" else f" ({of})"
        return [
            f"{self.path}{what}: {shape_text(self.shape)} as {spec_text(self.spec)}: "
            f"{number}{each}"
        ]


def device_map(plan: PlanData, path: str, of: str = "params") -> DeviceMap:
    """Returns the map of a plan's parameter; see ``Plan.device_map``."""
    if not isinstance(of, str) or of not in LAYOUTS:
        raise WhaleError(
            f"of is {short_repr(of)}; expected one of {', '.join(LAYOUTS)}"
        )
    path = plan.leaf(path).path
    homes = [one.home(path) for one in plan.pipelines or (plan,)]
    firsts, before = [], 0
    for one, home in zip(plan.pipelines or (plan,), homes, strict=True):
        stage = next((i for i, own in enumerate(one.stage_plans) if own is home), 0)
        firsts.append(before + sum(own.num_devices for own in one.stage_plans[:stage]))
        before += one.num_devices
    leaf = homes[0].leaf(path)
    return DeviceMap(leaf, of, homes[0].axis_sizes, firsts, plan.num_devices)


def parts_of(
    shape: Sequence[int], spec: Spec, axes: Mapping[str, int], first: int = 0
) -> dict[Part, list[int]]:
    """Returns the indices of the devices that hold each part of an array.

    Args:
        shape: Shape of the global array.
        spec: Mesh axes of each dimension, outermost first.
        axes: Sizes of all mesh axes, outermost first.
        first: Index of the mesh's first device.

    >>> parts_of((4,), (("tensor",),), {"data": 2, "tensor": 2})
    {((0, 2),): [0, 2], ((2, 4),): [1, 3]}
    """
    found: dict[Part, list[int]] = {}
    for number, place in enumerate(itertools.product(*map(range, axes.values()))):
        at = dict(zip(axes, place, strict=True))
        part = []
        for size, names in zip(shape, spec, strict=True):
            index, count = 0, 1
            for name in names:
                index, count = index * axes[name] + at[name], count * axes[name]
            length = -(-size // count)
            part.append((min(size, index * length), min(size, (index + 1) * length)))
        found.setdefault(tuple(part), []).append(first + number)
    return dict(sorted(found.items()))


def devices_text(numbers: Sequence[int]) -> str:
    """Formats device numbers: as ranges, or as the first and last ones of many.

    >>> devices_text([0, 1, 2, 3, 8]), devices_text([0, 4, 8, 12, 16, 20, 24, 28])
    ('0–3, 8', '0, 4, 8 … 28 (8 devices)')
    """
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1] = runs[-1][0], number
        else:
            runs.append((number, number))
    words = [f"{a}–{b}" if b > a else f"{a}" for a, b in runs]
    if len(words) > 6:
        return (
            f"{', '.join(words[:3])} … {words[-1]} "
            f"({count_text(len(numbers), 'device')})"
        )
    return ", ".join(words)


def _range(bounds: tuple[int, int]) -> str:
    return f"{bounds[0]:,}:{bounds[1]:,}"


def _lines(found: DeviceMap) -> list[str]:
    parts = [*found.parts.items()]
    lines = [
        f"  [{', '.join(map(_range, part))}]  device{'s' * (len(held) > 1)} "
        f"{devices_text(held)}"
        for part, held in parts[:_MOST_LINES]
    ]
    if len(parts) > _MOST_LINES:
        lines.append(f"  … and {len(parts) - _MOST_LINES:,} more parts")
    return lines


# The drawing: the array with its shards in colour, and device numbers.


def _sides(found: DeviceMap) -> tuple[list[list[tuple[int, int]]], list[int]]:
    """Returns the ranges of each dimension, and the two dimensions with most ranges."""
    bounds = [
        sorted({part[dim] for part in found.parts}) for dim in range(len(found.shape))
    ]
    cut = [dim for dim, ranges in enumerate(bounds) if len(ranges) > 1]
    return bounds, sorted(sorted(cut, key=lambda dim: -len(bounds[dim]))[:2])


def _draw(found: DeviceMap, title: str) -> str:
    """Draws the shards along two dimensions, at the first part of the others."""
    bounds, sides = _sides(found)
    rank = len(found.shape)
    if not rank or any(len(bounds[dim]) > _MOST_CELLS for dim in sides):
        return ""
    pair = [*sides, *(d for d in reversed(range(rank)) if d not in sides)][:2]
    if len(pair) == 1:
        return ""
    down, across = sorted(pair)
    rows, columns = bounds[down], bounds[across]
    height = max(_SHARD * len(rows), 60.0)
    inner = [words(_MARGIN, 12, f"dim {across}: {found.shape[across]:,} →")]
    inner += [words(4, _TOP + 14, f"dim {down}:"), words(4, _TOP + 28, "↓")]
    inner.append(words(4, _TOP + 42, f"{found.shape[down]:,}"))
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            part = tuple(
                row if d == down else column if d == across else ranges[0]
                for d, ranges in enumerate(bounds)
            )
            x, y = _MARGIN + j * _WIDE / len(columns), _TOP + i * height / len(rows)
            w, h = _WIDE / len(columns), height / len(rows)
            text = devices_text(found.parts[part])
            short = text if len(text) * 6.2 < w - 4 else ""
            inner.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" '
                f'fill="{FILLS[(i * len(columns) + j) % len(FILLS)]}" '
                f'stroke="{INK}" stroke-width=".7"><title>'
                f"[{', '.join(map(_range, part))}] devices {escape(text)}"
                "</title></rect>"
                + words(x + w / 2, y + h / 2 + 4, short, anchor="middle", ink=INK)
            )
    return drawing(_MARGIN + _WIDE + 4, _TOP + height + 6, title, "".join(inner))


# The tables: two dimensions as rows and columns, and a table for each part of others.


def _grids(found: DeviceMap) -> str:
    bounds, sides = _sides(found)
    cut = [dim for dim, ranges in enumerate(bounds) if len(ranges) > 1]
    others = [dim for dim in cut if dim not in sides]
    places = [*itertools.product(*(bounds[dim] for dim in others))]
    html = []
    for place in places[:_MOST_GRIDS]:
        fixed = dict(zip(others, place, strict=True))
        caption = ", ".join(f"dim {dim}: {_range(b)}" for dim, b in fixed.items())
        html.append(_grid(found, bounds, sides, fixed, caption))
    if len(places) > _MOST_GRIDS:
        html.append(f"<p>… and {len(places) - _MOST_GRIDS:,} more such tables.</p>")
    return "".join(html)


def _grid(
    found: DeviceMap,
    bounds: Sequence[Sequence[tuple[int, int]]],
    sides: Sequence[int],
    fixed: Mapping[int, tuple[int, int]],
    caption: str,
) -> str:
    down = bounds[sides[0]] if sides else [None]
    across = bounds[sides[1]] if len(sides) > 1 else [None]
    corner = [f"dim {dim} {way}" for dim, way in zip(sides, "↓→", strict=False)]
    names = [" ".join(corner) or "part"]
    names += ["devices" if b is None else _range(b) for b in across[:_MOST_CELLS]]
    names += ["…"] * (len(across) > _MOST_CELLS)
    rows = []
    for row in down[:_MOST_CELLS]:
        cells = [f'<th scope="row">{"all" if row is None else _range(row)}</th>']
        for column in across[:_MOST_CELLS]:
            at = dict(fixed)
            if row is not None:
                at[sides[0]] = row
            if column is not None:
                at[sides[1]] = column
            part = tuple(at.get(d, ranges[0]) for d, ranges in enumerate(bounds))
            cells.append(cell(devices_text(found.parts[part])))
        cells += [cell("…")] * (len(across) > _MOST_CELLS)
        rows.append("".join(cells))
    if len(down) > _MOST_CELLS:
        rows.append(
            cell(f"… {len(down) - _MOST_CELLS:,} more") + cell("") * (len(names) - 1)
        )
    return table(names, rows, caption=caption, kind="map")
