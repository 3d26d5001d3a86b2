"""Combines separately measured nodes of several kinds in one cluster.

``whalejax calibrate --append`` adds the measured devices of a host to a description. A
host cannot measure the network between hosts, so the network is chosen here.
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import replace

from whalejax.meshes.catalogue import Link
from whalejax.meshes.cluster_data import ClusterData, Level
from whalejax.meshes.errors import WhaleError


def check_kind(name: str, beside: ClusterData | None) -> None:
    """Refuses a name that is invalid for a kind in a file.

    Args:
        name: Name of the kind.
        beside: Contents of the file if they stay, else None.

    Raises:
        WhaleError: The name is malformed, or another kind in the file has it.
    """
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise WhaleError(
            f"--kind is {name!r}; expected a name of letters, digits, - and _, such as "
            "slow-cpu"
        )
    there = [] if beside is None else [kind.name for kind in beside.kinds]
    if name in there:
        raise WhaleError(
            f"the file already has a kind {name!r} (its kinds: {', '.join(there)}). "
            "Give another name with --kind, or another file"
        )


def check_replaced(name: str, there: ClusterData) -> None:
    """Refuses to overwrite a file that describes other kinds.

    Args:
        name: Name of the kind to write.
        there: Contents of the file.

    Raises:
        WhaleError: The file has kinds of other names.
    """
    if {kind.name for kind in there.kinds} - {name}:
        raise WhaleError(
            f"the file describes {there.describe()}, and would be replaced by {name} "
            "alone. Give --append to add to the file, give another --output, or remove "
            "the file first"
        )


def renamed(cluster: ClusterData, name: str) -> ClusterData:
    """Returns a cluster of one kind with another name and label of the kind.

    Args:
        cluster: Cluster of one kind.
        name: New name of the kind.

    Example:
        >>> from whalejax.meshes import cluster
        >>> renamed(cluster("h100:8"), "rack-2").describe()
        '8×rack-2 (1 node of 8, nvlink)'
    """
    nodes = [
        replace(node, kind=replace(node.kind, name=name, label=name))
        for node in cluster.nodes
    ]
    return replace(cluster, nodes=tuple(nodes))


def check_joined(first: ClusterData, platform: str) -> None:
    """Refuses a cluster to which devices of a platform cannot be added.

    Args:
        first: The cluster.
        platform: Platform of the devices to add.

    Raises:
        WhaleError: The cluster is a torus, has rates for pairs of devices, or is of
            another platform.
    """
    if first.links or any(level.torus for level in first.levels):
        raise WhaleError(
            f"{first.describe()} is a torus, or has rates for pairs of devices; only "
            "clusters of nodes can be joined. Describe the whole cluster in one file"
        )
    if first.platform != platform:
        raise WhaleError(
            f"{first.describe()} is of the platform {first.platform}, and the devices "
            f"to add are of {platform}; expected one platform. Write another file"
        )


def merge_clusters(
    first: ClusterData, second: ClusterData, network: Link | None = None
) -> ClusterData:
    """Returns the devices of two clusters, in this order, as nodes of one cluster.

    The level inside nodes has the slower link of the two clusters. The level between
    nodes has the slowest known network, or that same link if no network is known.

    Args:
        first, second: Clusters of nodes, and of one platform.
        network: Network between hosts like those of the second cluster, if known.

    Raises:
        WhaleError: A cluster is a torus or has rates for pairs of devices, or the
            platforms differ.

    Example:
        >>> from whalejax.meshes import cluster
        >>> merge_clusters(cluster("v100-32:4"), cluster("p100-16:2x8")).describe()
        '4×V100-32 + 16×P100-16 (3 nodes of 4 and 8, nvlink + infiniband)'
    """
    for one, other in ((first, second), (second, first)):
        check_joined(one, other.platform)
    counts = [node.count for node in (*first.nodes, *second.nodes)]
    inner, total = math.gcd(*counts), sum(counts)
    inside = [c.levels[0] for c in (first, second) if c.nodes[0].count > 1]
    within = functools.reduce(_slower, inside or [first.levels[0]])
    levels = [replace(within, size=inner)] if inner > 1 else []
    levels.append(
        replace(_between(first, second, network, within), size=total // inner)
    )
    nodes = (*first.nodes, *second.nodes)
    return replace(first, nodes=nodes, levels=tuple(levels))


def _slower(one: Level, other: Level) -> Level:
    slower = min(one, other, key=lambda level: level.bandwidth_bytes_per_second)
    latency = max(one.latency_seconds, other.latency_seconds)
    return replace(slower, latency_seconds=latency)


def _between(
    first: ClusterData, second: ClusterData, network: Link | None, within: Level
) -> Level:
    """Returns the level between nodes; its size is set by the caller."""
    known = [one.levels[-1] for one in (first, second) if len(one.nodes) > 1]
    if network is not None:
        known.append(
            Level(
                name=network.name,
                size=1,
                bandwidth_bytes_per_second=network.bandwidth_bytes_per_second,
                latency_seconds=network.base_seconds + network.hop_seconds,
            )
        )
    return functools.reduce(_slower, known) if known else within
