"""What displays say of a plan, as rows of words and numbers.

Terminals and notebooks read the same rows, so that no number is formatted twice. It
needs neither rich nor HTML.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from whalejax.planner.collectives import axis_parts
from whalejax.planner.layout import shards
from whalejax.planner.plan import LeafPlan, Plan
from whalejax.planner.roles import starred


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


def terms(value: object, suffix: str) -> list[tuple[str, float]]:
    """Non-zero fields of a dataclass, largest first, with the unit off their names.

    >>> from whalejax.planner.terms import TimeTerms
    >>> terms(TimeTerms(compute_seconds=1.0, update_seconds=2.0), "_seconds")
    [('update', 2.0), ('compute', 1.0)]
    """
    assert dataclasses.is_dataclass(value)
    pairs = [
        (f.name.removesuffix(suffix), float(getattr(value, f.name)))
        for f in dataclasses.fields(value)
    ]
    return sorted((pair for pair in pairs if pair[1] > 0), key=lambda pair: -pair[1])


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


def seconds_text(seconds: float) -> str:
    """A time with three digits: in milliseconds below a second.

    >>> seconds_text(0.4123), seconds_text(3.207)
    ('412 ms', '3.21 s')
    """
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"


# The parameters.


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterRow:
    """Parameters that are alike but for the number of their layer.

    Attributes:
        label: their path, with ``[4]`` where four layers were folded.
        count: how many they are.
        leaf: the first of them.
        device_bytes: of all of them together, on one device.
    """

    label: str
    count: int
    leaf: LeafPlan
    device_bytes: int


def parameter_rows(plan: Plan) -> list[ParameterRow]:
    """A plan's parameters, repeated layers folded, in the model's order."""
    groups: dict[tuple[object, ...], list[LeafPlan]] = {}
    for leaf in plan.leaves:
        specs = (leaf.compute_spec, leaf.param_spec)
        alike = (leaf.shape, leaf.dtype, *specs, leaf.hosted)
        groups.setdefault((starred(leaf.path), *alike), []).append(leaf)
    rows = []
    for leaves in groups.values():
        leaf = leaves[0]
        whole = math.prod(leaf.shape) * _itemsize_bytes(leaf.dtype)
        local = whole // shards(leaf.param_spec, plan.home(leaf.path).axis_sizes)
        rows.append(
            ParameterRow(
                label=_folded_label(leaf.path, len(leaves)),
                count=len(leaves),
                leaf=leaf,
                device_bytes=local * len(leaves),
            )
        )
    return rows


def _folded_label(path: str, count: int) -> str:
    return path if count == 1 else f"{starred(path)} ×{count}"


def _itemsize_bytes(dtype: str) -> int:
    import ml_dtypes
    import numpy as np

    return np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize
