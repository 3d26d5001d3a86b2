"""The devices that store tables: memory, and seconds per byte of each transfer."""

from __future__ import annotations

from dataclasses import dataclass

from whalejax.meshes.checks import Arguments
from whalejax.meshes.cluster import Cluster
from whalejax.planner.cost.collectives import (
    AxisPart,
    axis_parts,
    collective_seconds,
)
from whalejax.planner.plan_entries import CollectiveKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Equal ranks, each a device that stores tables and computes a part of the batch.

    Attributes:
        count: Number of ranks.
        per_node: Ranks of one node; it divides ``count``.
        memory_bytes: Bytes for tables on each rank.
        host_bytes: Bytes of host memory for tables of each rank; 0 for none.
        read_seconds: Seconds to read or write one byte of device memory.
        host_seconds: Seconds to move one byte between host memory and device.
        exchange_seconds: Seconds per byte that a rank sends in an all-to-all.
        reduce_seconds: Seconds per byte of an all-reduce over all ranks.
        node_reduce_seconds: Seconds per byte of a reduce-scatter within a node.
        cross_seconds: Seconds per byte of an all-to-all only between nodes.
    """

    count: int
    per_node: int
    memory_bytes: float
    host_bytes: float = 0.0
    read_seconds: float = 1e-12
    host_seconds: float = 1e-11
    exchange_seconds: float = 1e-11
    reduce_seconds: float = 2e-11
    node_reduce_seconds: float = 1e-11
    cross_seconds: float = 1e-11

    def __post_init__(self) -> None:
        problems = Arguments("Ranks")
        both = [
            problems.whole("count", self.count, least=1),
            problems.whole("per_node", self.per_node, least=1),
        ]
        if all(both) and self.count % self.per_node:
            problems.add(
                f"per_node is {self.per_node} and does not divide count {self.count}"
            )
        problems.raise_if_any()

    @classmethod
    def of(cls, cluster: Cluster, *, used_bytes: float = 0.0) -> Ranks:
        """Returns the ranks of a cluster, all as fast as its slowest device.

        Args:
            cluster: Devices and links.
            used_bytes: Memory of a device that is already in use.
        """
        kinds, count = cluster.kinds, cluster.num_devices
        counts = {node.count for node in cluster.nodes}
        per_node = counts.pop() if len(counts) == 1 else 1
        whole = axis_parts(("data",), {"data": count}, cluster)
        mesh = {"node": count // per_node, "data": per_node}
        inside = axis_parts(("data",), mesh, cluster)
        across = axis_parts(("node",), mesh, cluster)
        hosted = all(
            k.host_memory_bytes and k.host_link_bytes_per_second for k in kinds
        )
        links = [k.host_link_bytes_per_second or 1.0 for k in kinds]
        return cls(
            count=count,
            per_node=per_node,
            memory_bytes=max(0.0, cluster.memory_bytes - used_bytes),
            host_bytes=min(k.host_memory_bytes or 0 for k in kinds) if hosted else 0.0,
            read_seconds=1.0 / min(k.memory_bytes_per_second for k in kinds),
            host_seconds=1.0 / min(links) if hosted else 1.0,
            exchange_seconds=_seconds_per_byte("all-to-all", whole),
            reduce_seconds=_seconds_per_byte("all-reduce", whole),
            node_reduce_seconds=_seconds_per_byte("reduce-scatter", inside),
            cross_seconds=_seconds_per_byte("all-to-all", across),
        )


def _seconds_per_byte(kind: CollectiveKind, parts: tuple[AxisPart, ...]) -> float:
    many = 1e9
    base = collective_seconds(kind, 0.0, parts)
    return (collective_seconds(kind, many, parts) - base) / many
