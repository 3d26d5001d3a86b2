"""Combines separately measured device kinds in one cluster.

``whalejax calibrate`` describes the devices of one host. A cluster of several kinds
combines several such descriptions: each has its kind under a unique name. Their network
is given here, because no host can measure it alone.
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
        beside: Contents of the file, if they stay.

    Raises:
        WhaleError: The name is malformed, or another kind has it.
    """
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise WhaleError(
            f"--kind is {name!r}; expected a name of letters, digits, - and _, such as "
            "slow-cpu"
        )
    there = [] if beside is None else [kind.name for kind in beside.kinds]
    if name in there:
        raise WhaleError(
            f"the file holds a kind {name!r} already (it has {', '.join(there)}). Give "
            "this one another name with --kind, or take another file"
        )


def check_replaced(name: str, there: ClusterData) -> None:
    """Refuses to replace a file that describes other kinds by one kind.

    Args:
        name: Name of the kind.
        there: Contents of the file.

    Raises:
        WhaleError: The file has kinds of other names.
    """
    if {kind.name for kind in there.kinds} - {name}:
        raise WhaleError(
            f"the file describes {there.describe()}, and {name} alone would be written "
            "over it. Give --append to add to it, or another --output; or remove it "
            "first"
        )


def renamed(cluster: ClusterData, name: str) -> ClusterData:
    """Returns the same devices, all of one kind, under another name and label.

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
    """Refuses clusters that cannot be joined by devices of a platform.

    Args:
        first: The cluster.
        platform: Platform of the other devices.

    Raises:
        WhaleError: The cluster has a torus or links between single devices, which a
            network does not join, or another platform.
    """
    if first.links or any(level.torus for level in first.levels):
        raise WhaleError(
            f"{first.describe()} is a torus, or has a rate for each two devices; "
            "clusters of nodes can be joined. Describe all of it in one file"
        )
    if first.platform != platform:
        raise WhaleError(
            f"{first.describe()} is of the platform {first.platform}, and the others "
            f"of {platform}; expected one platform. Write another file"
        )


def merge_clusters(
    first: ClusterData, second: ClusterData, network: Link | None = None
) -> ClusterData:
    """Returns the devices of two clusters, in this order, as nodes of one cluster.

    Inside a node the slower link counts. Between nodes it is the slowest known network
    of either; if none is known, the slower link of the nodes.

    Args:
        first, second: Clusters of nodes, and of one platform.
        network: Network between hosts like those of the second cluster, if known.

    Raises:
        WhaleError: A cluster has a torus or links between single devices, which a
            network does not join, or the platforms differ.

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
    """Returns the level of the network, for any number of nodes."""
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
