"""What displays say of a plan, as rows of words and numbers.

Terminals and notebooks read the same rows. It needs neither rich nor HTML.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from whalejax.planner.collectives import axis_parts
from whalejax.planner.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisRow:
    """A mesh axis: its name, size, and the links that it crosses, innermost first."""

    name: str
    size: int
    links: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficRow:
    """Collectives of one sort: how often in a step, and what they move in all."""

    kind: str
    axes: str
    what: str
    times: int
    nbytes: int


def axis_rows(plan: Plan) -> list[AxisRow]:
    """The mesh axes of a plan, outermost first."""
    mesh = plan.axis_sizes
    rows = []
    for axis, size in mesh.items():
        parts = axis_parts((axis,), mesh, plan.cluster)
        names = dict.fromkeys(part.level.name for part in parts)
        rows.append(AxisRow(name=axis, size=size, links=tuple(names)))
    return rows


def traffic_rows(plan: Plan) -> list[TrafficRow]:
    """What a plan communicates in one step, most bytes first."""
    nbytes: Counter[tuple[str, str, str]] = Counter()
    times: Counter[tuple[str, str, str]] = Counter()
    for c in plan.collectives:
        count = plan.times(c)
        key = c.kind, "+".join(c.axes), c.what
        nbytes[key] += c.payload_bytes * count
        times[key] += count
    return [
        TrafficRow(kind=k[0], axes=k[1], what=k[2], times=times[k], nbytes=size)
        for k, size in nbytes.most_common()
    ]


def shape_text(shape: Sequence[int]) -> str:
    """A shape as people write it.

    >>> shape_text((4096, 512)), shape_text(())
    ('4096×512', 'scalar')
    """
    return "×".join(map(str, shape)) or "scalar"
