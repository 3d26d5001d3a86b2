"""Time of a collective: latency and bandwidth by level of the topology.

The one home of the alpha-beta formulas. A mesh axis has a stride (the devices inside
it) and a size; where it crosses a level of the topology it is treated as two axes, and
collectives over several axes are hierarchical: the inner ones move whole payloads, the
outer ones what the inner ones have reduced or not yet gathered.

Payloads are bytes on one device: what an all-reduce reduces, what an all-gather
yields, what a reduce-scatter takes, what an all-to-all exchanges.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from whalejax.meshes.cluster import Cluster, Level


CollectiveKind = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The piece of a mesh axis that lies in one level of the topology."""

    size: int
    level: Level


def axis_parts(
    axes: tuple[str, ...], mesh: Mapping[str, int], cluster: Cluster
) -> tuple[Part, ...]:
    """Cut mesh axes at the levels of the topology, innermost first.

    Args:
        axes: the axes a collective runs over.
        mesh: sizes of all mesh axes, outermost first; the devices are numbered in
            this order, the last axis fastest.
        cluster: the machine.
    """
    parts: list[Part] = []
    stride = 1
    for axis in reversed(list(mesh)):
        size = mesh[axis]
        if axis in axes and size > 1:
            parts.extend(_cut(stride, size, cluster))
        stride *= size
    return tuple(parts)


def _cut(stride: int, size: int, cluster: Cluster) -> list[Part]:
    """An axis by levels; only what lies inside a level in every group counts there."""
    parts = []
    reach = 1
    for level in cluster.levels:
        reach *= level.size
        inside = math.gcd(size, reach // stride) if reach % stride == 0 else 1
        if inside > 1:
            parts.append(Part(size=inside, level=level))
            stride *= inside
            size //= inside
        if size == 1:
            return parts
    parts.append(Part(size=size, level=cluster.levels[-1]))
    return parts


def ring_seconds(kind: CollectiveKind, payload_bytes: float, part: Part) -> float:
    """One collective inside one level.

    The ring bounds: an all-gather or reduce-scatter moves (n-1)/n of the payload, an
    all-reduce twice that, an all-to-all (n-1)/n (Thakur et al., 2005, sections 3-4);
    times the factor by which the level was measured to differ.
    """
    share = (part.size - 1) / part.size
    rounds = 2 if kind == "all-reduce" else 1
    wire = payload_bytes * share / part.level.bandwidth_bytes_per_second
    measured = part.level.slowdown_of(kind)
    return rounds * (part.level.latency_seconds + wire) * measured


def collective_seconds(
    kind: CollectiveKind,
    payload_bytes: float,
    parts: tuple[Part, ...],
) -> float:
    """A collective over several levels, hierarchically.

    Args:
        kind: the collective.
        payload_bytes: bytes on one device (see the module).
        parts: from ``axis_parts``, innermost first.
    """
    if kind == "all-to-all":
        return sum(ring_seconds(kind, payload_bytes, part) for part in parts)
    total = 0.0
    remaining = payload_bytes
    for index, part in enumerate(parts):
        outermost = index == len(parts) - 1
        if kind == "all-reduce" and not outermost:
            total += ring_seconds("reduce-scatter", remaining, part)
            total += ring_seconds("all-gather", remaining, part)
        else:
            total += ring_seconds(kind, remaining, part)
        remaining /= part.size
    return total
