"""Time of a collective: latency and bandwidth by level of the topology.

All alpha-beta formulas are in this module. A mesh axis has a size and a stride, which
is the number of devices inside it. An axis that crosses levels of the topology counts
as one axis per level. A collective over several axes is hierarchical: on each axis, its
payload is divided by the sizes of the inner axes. An all-to-all moves its full payload
on each axis.

A payload is in bytes on one device. It is the operand of an all-reduce, reduce-scatter,
all-to-all or collective-permute, or the result of an all-gather.

The compiler may run another collective than the requested one; see ``runs_as``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from whalejax.meshes.cluster import Cluster, Level
from whalejax.planner.plan_entries import CollectiveKind
from whalejax.planner.sharding.shard_counts import axis_sets


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisPart:
    """Part of a mesh axis inside one level of the topology."""

    size: int
    level: Level


def axis_parts(
    axes: tuple[str, ...], mesh: Mapping[str, int], cluster: Cluster
) -> tuple[AxisPart, ...]:
    """Divides mesh axes at the levels of the topology, innermost first.

    Args:
        axes: Mesh axes of the collective.
        mesh: Sizes of all mesh axes, outermost first. Devices are numbered in this
            order, along the last axis fastest.
        cluster: Cluster of the mesh.
    """
    parts: list[AxisPart] = []
    stride = 1
    for axis in reversed(list(mesh)):
        size = mesh[axis]
        if axis in axes and size > 1:
            for part in _cut(stride, size, cluster):
                last = parts[-1] if parts else None
                if last and last.level.needs_whole_level and last.level == part.level:
                    parts[-1] = AxisPart(size=last.size * part.size, level=part.level)
                else:
                    parts.append(part)
        stride *= size
    return tuple(parts)


def _cut(stride: int, size: int, cluster: Cluster) -> list[AxisPart]:
    """Divides an axis into one part per level.

    A level gets the largest factor of the size whose groups fit inside the level. The
    outermost level also gets the rest.
    """
    parts = []
    reach = 1
    for level in cluster.levels:
        reach *= level.size
        inside = math.gcd(size, reach // stride) if reach % stride == 0 else 1
        if inside > 1:
            parts.append(AxisPart(size=inside, level=level))
            stride *= inside
            size //= inside
        if size == 1:
            return parts
    parts.append(AxisPart(size=size, level=cluster.levels[-1]))
    return parts


def ring_seconds(kind: CollectiveKind, payload_bytes: float, part: AxisPart) -> float:
    """Returns the seconds of one collective inside one level.

    On a ring of n devices, an all-gather, reduce-scatter or all-to-all moves (n-1)/n of
    the payload. An all-reduce moves twice as much (Thakur et al., 2005, sections 3-4).
    The time is multiplied by the measured factor of the level. Threads with a common
    memory form no ring; see ``Level``.
    """
    level = part.level
    if kind == "collective-permute":
        return _permute_seconds(payload_bytes, part)
    rounds = 2 if kind == "all-reduce" else 1
    wire = (
        payload_bytes
        * level.payload_fraction(part.size)
        / level.bandwidth_bytes_per_second
    )
    wait = level.latency_seconds * level.waits(part.size)
    return float(rounds * (wait + wire) * level.slowdown_of(kind))


def _permute_seconds(payload_bytes: float, part: AxisPart) -> float:
    per_byte, per_time = _permute_rates(part.size, part.level)
    return float(payload_bytes * per_byte + per_time)


def _permute_rates(size: Any, level: Level) -> tuple[Any, Any]:
    """Returns the seconds per byte and per transfer in one round of a ring.

    On a torus, a round uses one of the two links of an axis. Without a switch, it uses
    one of the links to all peers.
    """
    links = 2 if level.torus else level.detour(2)
    steps = 1 if level.shared else max(1, level.size - 1)
    factor = level.slowdown_of("collective-permute")
    per_byte = factor * links / level.bandwidth_bytes_per_second
    per_time = factor * level.latency_seconds * level.waits(size) / steps
    there = np.asarray(size) > 1
    return per_byte * there, per_time * there


def runs_as(
    kind: CollectiveKind,
    parts: Sequence[AxisPart],
    cluster: Cluster,
    payload_bytes: float = math.inf,
) -> CollectiveKind:
    """Returns the collective that the compiler runs instead of the requested one.

    Args:
        kind: Requested collective.
        parts: Parts of the mesh axes, from ``axis_parts``.
        cluster: Cluster of the mesh, with its compiler.
        payload_bytes: Payload bytes on one device; default: infinite.

    >>> from whalejax.meshes import cluster
    >>> for text in ("v5e:4x4", "v5e:4x8"):
    ...     whole = cluster(text)
    ...     parts = axis_parts(("fsdp",), {"fsdp": whole.num_devices}, whole)
    ...     print(runs_as("reduce-scatter", parts, whole))
    all-reduce
    reduce-scatter
    """
    pieces = [(part.size, part.level) for part in parts]
    turned = _reduces_whole(kind, pieces, cluster, payload_bytes)
    return "all-reduce" if turned else kind


def _reduces_whole(
    kind: CollectiveKind,
    pieces: Sequence[tuple[Any, Level]],
    cluster: Cluster,
    payload_bytes: float = math.inf,
) -> Any:
    compiler = cluster.compiler
    lengths = [x.size for x in cluster.levels if x.torus and x.size > 1]
    chips = math.prod((size for size, level in pieces if level.torus), start=1)
    whole = (chips == math.prod(lengths)) & (chips > 1)
    cubic = len(lengths) == 3
    if kind == "all-gather" and not compiler.gathers_whole_torus:
        flat = len(lengths) == 2 and min(lengths) >= _LONG_FLAT
        small = payload_bytes < _SMALL_GATHER_BYTES
        return whole & (cubic and min(lengths) >= _LONG or flat and small)
    if kind != "reduce-scatter":
        return False
    turned: Any = False
    if not compiler.scatters_whole_torus:
        square = len(lengths) == 2 and lengths[0] == lengths[1] >= _LONG
        turned = whole & (cubic or square)
    if not compiler.scatters_beyond_torus:
        beyond = cluster.levels[-1]
        apart = [size for size, level in pieces if level == beyond and not level.torus]
        turned = turned | ((math.prod(apart, start=1) > 1) & (chips > 1))
    return turned


_LONG, _LONG_FLAT = 4, 8
"""Smallest number of chips on each torus axis for collectives to run as all-reduces.

The first value is for gathers on three axes and for reduce-scatters on a square. The
second is for small gathers on two axes.
"""

_SMALL_GATHER_BYTES = 2**25
"""Payload below which gathers over a large torus of two axes run as all-reduces.
Gathers of 16 MiB did, gathers of 32 MiB did not.
"""


def collective_seconds(
    kind: CollectiveKind,
    payload_bytes: float,
    parts: tuple[AxisPart, ...],
) -> float:
    """Returns the seconds of a hierarchical collective over several levels.

    Args:
        kind: Kind of collective.
        payload_bytes: Payload bytes on one device.
        parts: Parts of the mesh axes, from ``axis_parts``, innermost first.
    """
    if kind == "collective-permute":
        # All devices send at once, so the slowest link and the largest latency count.
        rates = [_permute_rates(part.size, part.level) for part in parts]
        per_byte = max((byte for byte, _ in rates), default=0.0)
        per_time = max((once for _, once in rates), default=0.0)
        return float(payload_bytes * per_byte + per_time)
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


Spans = list[tuple[np.ndarray, Level]]
"""Parts of mesh axes, innermost first, for many meshes at once."""


def spans_of(
    axes: tuple[str, ...],
    ordered: Sequence[tuple[np.ndarray, np.ndarray]],
    names: Sequence[str],
    cluster: Cluster,
) -> Spans:
    """Returns ``axis_parts`` for many meshes, with size 1 for parts that a mesh lacks.

    Args:
        axes: Mesh axes of the collective.
        ordered: Axes by position, innermost first. A position has two arrays over
            meshes: the index of its axis in ``names``, and the size of the axis.
        names: Names of the axes.
        cluster: Cluster of the meshes.
    """
    wanted = np.array([name in axes for name in names])
    spans: Spans = []
    stride = np.ones(len(ordered[0][0]), dtype=np.int64)
    for which, size in ordered:
        here = wanted[which] & (size > 1)
        if here.any():
            for size_of, level in _spans(stride, np.where(here, size, 1), cluster):
                if spans and level.needs_whole_level and spans[-1][1] == level:
                    spans[-1] = spans[-1][0] * size_of, level
                else:
                    spans.append((size_of, level))
        stride = stride * size
    return spans or [(np.ones(len(stride)), cluster.levels[0])]


def may_reduce_whole(cluster: Cluster) -> bool:
    """Returns whether ``runs_as`` replaces some reduce-scatters by all-reduces."""
    whole: list[tuple[Any, Level]] = [(level.size, level) for level in cluster.levels]
    torus = [(size, level) for size, level in whole if level.torus]
    return any(
        _reduces_whole("reduce-scatter", some, cluster) for some in (whole, torus)
    )


def torus_reduces_whole(
    added: Mapping[str, Any], mesh: Mapping[str, np.ndarray], cluster: Cluster
) -> np.ndarray:
    """Returns whether ``runs_as`` replaces a reduce-scatter by an all-reduce, by mesh.

    Args:
        added: Whether each axis scatters, by mesh.
        mesh: Array of sizes of each mesh axis, outermost axis first.
        cluster: Cluster with its links and compiler.
    """
    names = list(mesh)
    columns = dict(zip(names, np.broadcast_arrays(*mesh.values()), strict=True))
    whole = np.zeros(len(columns[names[0]]), bool)
    for joined, rows in axis_sets(added, len(whole)):
        ordered = [
            (np.full(len(rows), names.index(axis)), columns[axis][rows])
            for axis in reversed(names)
        ]
        spans = spans_of(joined, ordered, names, cluster)
        whole[rows] = _reduces_whole("reduce-scatter", spans, cluster)
    return whole


def _spans(stride: np.ndarray, size: np.ndarray, cluster: Cluster) -> Spans:
    spans: Spans = []
    reach = 1
    for level in cluster.levels:
        reach *= level.size
        inside = np.where(reach % stride == 0, np.gcd(size, reach // stride), 1)
        if (inside > 1).any():
            spans.append((inside.astype(float), level))
            stride, size = stride * inside, size // inside
    if (size > 1).any():
        spans.append((size.astype(float), cluster.levels[-1]))
    return spans


class CollectiveRates:
    """Time of one kind of collective over some axes of many meshes.

    Args:
        kind: Requested collective.
        spans: Parts of the mesh axes, from ``spans_of``.
        cluster: Cluster of the meshes; its compiler may run another collective.
    """

    def __init__(self, kind: CollectiveKind, spans: Spans, cluster: Cluster) -> None:
        self._asked = _span_rates(kind, spans)
        self._whole = _span_rates("all-reduce", spans)
        number = len(spans[0][0])
        self._small, self._large = (
            np.zeros(number, bool) | _reduces_whole(kind, spans, cluster, nbytes)
            for nbytes in (0.0, math.inf)
        )

    def seconds(
        self, payload: np.ndarray, meshes: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the seconds of one collective, and whether it runs as an all-reduce.

        Args:
            payload: Bytes on one device, by case.
            meshes: Index of the mesh of each case.
        """
        per_byte, per_time = (rate[meshes] for rate in self._asked)
        small = payload < _SMALL_GATHER_BYTES
        turned = np.where(small, self._small[meshes], self._large[meshes])
        if turned.any():
            whole_byte, whole_time = (rate[meshes] for rate in self._whole)
            per_byte = np.where(turned, whole_byte, per_byte)
            per_time = np.where(turned, whole_time, per_time)
        return payload * per_byte + per_time, turned


def _span_rates(kind: CollectiveKind, spans: Spans) -> tuple[np.ndarray, np.ndarray]:
    count = len(spans[0][0])
    per_byte, per_time = np.zeros(count), np.zeros(count)
    if kind == "collective-permute":
        # The formula is that of ``collective_seconds``.
        for size, level in spans:
            byte, once = _permute_rates(size, level)
            per_byte, per_time = np.maximum(per_byte, byte), np.maximum(per_time, once)
        return per_byte, per_time
    remaining = np.ones(count)
    inner = np.zeros(count, dtype=bool)
    outer = []
    for size, _ in reversed(spans):
        outer.append(inner)
        inner = inner | (size > 1)
    for (size, level), behind in zip(spans, reversed(outer), strict=True):
        factor: Any = level.slowdown_of(kind)
        if kind == "all-reduce":
            halves = [level.slowdown_of(k) for k in ("reduce-scatter", "all-gather")]
            factor = np.where(behind, sum(halves), 2.0 * factor)
        share = level.payload_fraction(size) / level.bandwidth_bytes_per_second
        per_byte += remaining * share * factor
        per_time += level.waits(size) * level.latency_seconds * factor
        if kind != "all-to-all":
            remaining = remaining / size
    return per_byte, per_time
