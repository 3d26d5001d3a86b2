"""``ClusterData``: the nodes, levels of links and compiler of a cluster.

Plans describe their hardware only by this class. ``cluster.Cluster`` adds parsing,
files, and detection of the running devices.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Self

from whalejax.meshes.checks import Arguments, check_fields, short_repr
from whalejax.meshes.device_kinds import MOST_NUMBER, DeviceKind, Platform, check_name
from whalejax.meshes.dtypes import dtype_name
from whalejax.meshes.errors import Problems, quoted
from whalejax.meshes.topology import COMPILERS as COMPILERS
from whalejax.meshes.topology import CompilerProfile as CompilerProfile
from whalejax.meshes.topology import Level as Level
from whalejax.meshes.topology import Node as Node


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class ClusterData:
    """Devices and their links; ``cluster.Cluster`` documents the fields."""

    nodes: tuple[Node, ...]
    levels: tuple[Level, ...]
    compiler: CompilerProfile
    links: tuple[tuple[float, ...], ...] = ()
    # Computed once, because the search reads these values often.
    _kinds: tuple[DeviceKind, ...] = field(init=False, repr=False, compare=False)
    _slowest: dict[str, DeviceKind] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_fields(self, "cluster")
        problems = Problems("cluster")
        _check_nodes(self.nodes, problems)
        _check_levels(self, problems)
        _check_links(self, problems)
        problems.raise_if_any()
        kinds = tuple({node.kind.name: node.kind for node in self.nodes}.values())
        object.__setattr__(self, "_kinds", kinds)
        object.__setattr__(self, "_slowest", {})

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ClusterData):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[object, ...]:
        return self.nodes, self.levels, self.compiler, self.links

    @property
    def num_devices(self) -> int:
        """Total number of devices."""
        return sum(node.count for node in self.nodes)

    @property
    def kinds(self) -> tuple[DeviceKind, ...]:
        """Distinct kinds of device, in order of first appearance."""
        return self._kinds

    @property
    def is_uniform(self) -> bool:
        """Whether all devices are of one kind."""
        return len(self.kinds) == 1

    @property
    def slowest(self) -> DeviceKind:
        """Slowest kind, by the speed of matrix products in bfloat16."""
        return self.slowest_for("bfloat16")

    def slowest_for(self, dtype: str) -> DeviceKind:
        """Returns the slowest kind for matrix products of a type.

        The order is by FLOP/s of a large product, then by memory bandwidth.

        Args:
            dtype: NumPy name of the operands' type.

        Example:
            >>> from whalejax.meshes import cluster
            >>> mixed = cluster("rtx3090:1+v100-32:1")  # V100 multiplies bf16 in f32
            >>> [mixed.slowest_for(t).name for t in ("float16", "bfloat16")]
            ['rtx3090', 'v100-32']
        """
        slowest = self._slowest.get(dtype) if isinstance(dtype, str) else None
        if slowest is None:
            dtype_name(dtype)  # raises for unknown types
            slowest = min(self._kinds, key=lambda kind: _speed(kind, dtype))
            self._slowest[dtype] = slowest
        return slowest

    @property
    def memory_bytes(self) -> int:
        """Memory of the device with the least memory."""
        return min(kind.memory_bytes for kind in self.kinds)

    @property
    def platform(self) -> Platform:
        """``"cpu"``, ``"gpu"`` or ``"tpu"``."""
        return self.nodes[0].kind.platform

    @property
    def hash(self) -> str:
        """Twelve hexadecimal digits that identify this hardware.

        The hash covers the kind, platform and device count of each node, the sizes of
        the levels, and the compiler. Rates and memory are excluded, because repeated
        measurements of a machine differ slightly.
        """
        identity = {
            "nodes": [
                [key, len(list(group))]
                for key, group in groupby(
                    [n.kind.name, n.kind.platform, n.count] for n in self.nodes
                )
            ],
            "levels": [level.size for level in self.levels],
            "compiler": dataclasses.asdict(self.compiler),
        }
        text = json.dumps(identity, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def price_per_hour(self) -> float | None:
        """Hourly price of all devices, used or not; None if some kind has no price."""
        total = 0.0
        for node in self.nodes:
            if node.kind.price_per_hour is None:
                return None
            total += node.count * node.kind.price_per_hour
        return total

    def with_prices(self, prices: Mapping[str, float]) -> Self:
        """Returns the same cluster with prices.

        Args:
            prices: Hourly price of one device, by name of its kind, all in the same
                currency. Kinds that the cluster lacks are ignored.

        Raises:
            WhaleError: A price is no number above zero.

        Example:
            >>> from whalejax.meshes import cluster
            >>> cluster("h100:4x8").with_prices({"h100": 2.5}).price_per_hour
            80.0
        """

        problems = Arguments("with_prices")
        if problems.of("prices", prices, Mapping, "prices by the name of a kind"):
            for name, price in prices.items():
                problems.number(f"prices[{short_repr(name)}]", price, above=0)
        problems.raise_if_any()

        def with_price(kind: DeviceKind) -> DeviceKind:
            given = prices.get(kind.name, kind.price_per_hour)
            return dataclasses.replace(kind, price_per_hour=given)

        nodes = [dataclasses.replace(n, kind=with_price(n.kind)) for n in self.nodes]
        return dataclasses.replace(self, nodes=tuple(nodes))

    def under(self, options: Mapping[str, Any]) -> Self:
        """Returns the same cluster with the compiler's behaviour under XLA options.

        Args:
            options: XLA options of the compiler; see ``CompilerProfile.under``.
        """
        compiler = self.compiler.under(options)
        return dataclasses.replace(self, compiler=compiler)

    def part(self, num_devices: int, first: int = 0) -> Self:
        """Returns consecutive devices as a cluster.

        Args:
            num_devices: Number of devices; a torus allows only some numbers.
            first: Number of the first device.

        Raises:
            WhaleError: The levels of links have no group of this size.

        Example:
            >>> from whalejax.meshes import cluster
            >>> print(cluster("h100:4x8").part(16))
            16×H100 (2 nodes of 8, nvlink + infiniband)
        """
        problems = Arguments("part")
        if problems.whole("num_devices", num_devices, least=1, most=self.num_devices):
            most = self.num_devices - num_devices
            problems.whole("first", first, most=most)
        problems.raise_if_any()
        left, levels = num_devices, []
        for place, level in enumerate(self.levels):
            size = math.gcd(level.size, left)
            last = all(outer.size == 1 for outer in self.levels[place + 1 :])
            if last and not level.torus:  # any subset is joined in the same way
                size = left
            levels.append(dataclasses.replace(level, size=size))
            left //= size
        nodes, start, end = [], 0, first + num_devices
        for node in self.nodes:
            count = min(start + node.count, end) - max(start, first)
            if count > 0:
                nodes.append(dataclasses.replace(node, count=count))
            start += node.count
        links = tuple(row[first:end] for row in self.links[first:end])
        return dataclasses.replace(
            self, nodes=tuple(nodes), levels=tuple(levels), links=links
        )

    def describe(self) -> str:
        """Describes the devices, the nodes or torus, and the links, in one line."""
        groups = groupby(self.nodes, key=lambda node: node.kind)
        totals = [(kind, sum(n.count for n in nodes)) for kind, nodes in groups]
        devices = " + ".join(f"{n}×{kind.display_name()}" for kind, n in totals)
        return f"{devices} ({', '.join(self._shape_words())})"

    def _shape_words(self) -> list[str]:
        torus = [str(level.size) for level in reversed(self.levels) if level.torus]
        links = " + ".join(level.name for level in self.levels if not level.torus)
        if torus:
            slices = len(self.nodes)
            words = [f"{slices} slices"] if slices > 1 else []
            return [*words, f"torus {'×'.join(torus)}", *([links] if links else [])]
        sizes = sorted({node.count for node in self.nodes})
        noun = "node" if len(self.nodes) == 1 else "nodes"
        return [f"{len(self.nodes)} {noun} of {' and '.join(map(str, sizes))}", links]

    def __str__(self) -> str:
        return self.describe()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.describe()}>"

    def with_memory(self, memory_bytes: int) -> Self:
        """Returns the same cluster with this much memory on every device.

        Example:
            >>> from whalejax.meshes import cluster
            >>> cluster("h100:8").with_memory(4 * 2**30).memory_bytes
            4294967296
        """

        problems = Arguments("with_memory")
        problems.whole("memory_bytes", memory_bytes, least=1)
        problems.raise_if_any()
        return self.with_memory_of({kind.name: memory_bytes for kind in self.kinds})

    def with_memory_of(self, memory_bytes: Mapping[str, int]) -> Self:
        """Returns the same cluster with other memory on devices of some kinds.

        Args:
            memory_bytes: Memory of one device, by name of its kind. Other kinds stay
                unchanged. Kinds that the cluster lacks are ignored.

        Raises:
            WhaleError: A value is not a whole number of 1 or more.

        Example:
            >>> from whalejax.meshes import cluster
            >>> cluster("h100:8").with_memory_of({"h100": 2**30}).memory_bytes
            1073741824
        """
        problems = Arguments("with_memory_of")
        if problems.of("memory_bytes", memory_bytes, Mapping, "bytes by kind"):
            for name, size in memory_bytes.items():
                problems.whole(f"memory_bytes[{short_repr(name)}]", size, least=1)
        problems.raise_if_any()

        def changed(kind: DeviceKind) -> DeviceKind:
            size = memory_bytes.get(kind.name, kind.memory_bytes)
            if size == kind.memory_bytes:
                return kind
            sources = tuple(s for s in kind.sources if s.field != "memory_bytes")
            return dataclasses.replace(kind, memory_bytes=size, sources=sources)

        kinds = {kind.name: changed(kind) for kind in self.kinds}
        nodes = tuple(
            dataclasses.replace(node, kind=kinds[node.kind.name]) for node in self.nodes
        )
        return dataclasses.replace(self, nodes=nodes)


def _speed(kind: DeviceKind, dtype: str) -> tuple[float, float]:
    product = kind.matmul_flops_per_second(dtype, 4096, 4096, 4096)
    return product, kind.memory_bytes_per_second


def _check_nodes(nodes: tuple[Node, ...], problems: Problems) -> None:
    if not nodes:
        problems.add("nodes: got none, expected at least one")
    for i, node in enumerate(nodes):
        if node.count < 1:
            problems.add(f"nodes.{i}.count: got {node.count}, expected at least 1")
    platforms = sorted({node.kind.platform for node in nodes})
    if len(platforms) > 1:
        problems.add(
            f"nodes: got kinds of {' and '.join(platforms)}, expected one platform, as "
            f"one program runs on all devices. Plan for each platform alone"
        )
    by_name: dict[str, DeviceKind] = {}
    for node in nodes:
        if by_name.setdefault(node.kind.name, node.kind) != node.kind:
            problems.add(
                f"nodes: got two different kinds named {node.kind.name!r}. Give one of "
                f"them another name"
            )


def check_level(index: int, level: Level, problems: Problems) -> None:
    """Records errors in one level's numbers.

    Args:
        index: Index of the level, innermost first.
        level: The level.
        problems: Collector of the errors.
    """
    where = f"levels.{index} ({quoted(level.name, str)})"
    check_name(f"levels.{index}.name", level.name, problems)
    if level.size < 1:
        problems.add(f"{where}.size: got {level.size}, expected at least 1")
    speed = level.bandwidth_bytes_per_second
    if not 0 < speed <= MOST_NUMBER:
        problems.add(
            f"{where}.bandwidth_bytes_per_second: got {speed}, expected a number "
            f"above zero{_limit(speed)}"
        )
    wait = level.latency_seconds
    if not 0 <= wait <= MOST_NUMBER:
        problems.add(
            f"{where}.latency_seconds: got {wait}, expected at least zero{_limit(wait)}"
        )
    for collective, factor in level.slowdown:
        check_name(f"levels.{index}.slowdown", collective, problems)
        if not 0 < factor <= MOST_NUMBER:
            problems.add(
                f"{where}.slowdown.{quoted(collective, str)}: got {factor}, expected a "
                f"factor above zero{_limit(factor)}"
            )
    joined_to_all = level.peers >= level.size - 1
    if level.peers and (not joined_to_all or level.torus or level.shared):
        problems.add(
            f"{where}.peers: got {level.peers}, expected at least {level.size - 1} "
            "(direct links to all other members), without torus or shared; leave "
            "peers out if a switch joins the members"
        )


def _limit(number: float) -> str:
    """Returns the end of a message on a number that is too large; else no text."""
    return f" and at most {MOST_NUMBER:g}" if number > MOST_NUMBER else ""


def _check_levels(cluster: ClusterData, problems: Problems) -> None:
    for i, level in enumerate(cluster.levels):
        check_level(i, level, problems)
    product = math.prod(level.size for level in cluster.levels)
    if not cluster.levels or product != cluster.num_devices:
        sizes = " × ".join(str(level.size) for level in cluster.levels) or "none"
        problems.add(
            f"levels: sizes {sizes} make {product if cluster.levels else 0} devices, "
            f"but the nodes have {cluster.num_devices}. The sizes of the levels, "
            f"innermost first, must multiply to the number of devices"
        )


def _check_links(cluster: ClusterData, problems: Problems) -> None:
    links, count = cluster.links, cluster.num_devices
    if not links:
        return
    if len(links) != count or any(len(row) != count for row in links):
        problems.add(f"links: expected {count} rows of {count} numbers, or none")
        return
    for a, row in enumerate(links):
        bad = [b for b, x in enumerate(row) if a != b and not 0 < x <= MOST_NUMBER]
        if bad:
            problems.add(
                f"links.{a}.{bad[0]}: got {row[bad[0]]}, expected bytes per second "
                f"above zero{_limit(row[bad[0]])}"
            )
