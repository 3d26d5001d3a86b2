"""Kinds that were measured apart, in one cluster."""

from __future__ import annotations

import dataclasses

import pytest

from whalejax.meshes import WhaleError, cluster
from whalejax.meshes.catalogue import entries
from whalejax.meshes.cluster_data import ClusterData
from whalejax.meshes.merge_kinds import merge_clusters, renamed


def sizes(found: ClusterData) -> list[tuple[str, int]]:
    return [(level.name, level.size) for level in found.levels]


def test_nodes_of_unlike_size_share_what_both_have() -> None:
    """As the text of a cluster has it, where the network is known."""
    network = entries()["p100-16"].network
    found = merge_clusters(
        cluster("v100-32:4"), renamed(cluster("p100-16:8"), "old"), network
    )
    assert sizes(found) == sizes(cluster("v100-32:4+p100-16:8"))
    slower = min(cluster(t).levels[0].bandwidth_bytes_per_second for t in _TEXTS)
    assert found.levels[0].bandwidth_bytes_per_second == slower


_TEXTS = "v100-32:4", "p100-16:8"


def test_a_third_kind_takes_the_network_that_is_there() -> None:
    two = cluster("v100-32:4+p100-16:8")
    fast = dataclasses.replace(two.levels[-1], bandwidth_bytes_per_second=7e10)
    two = dataclasses.replace(two, levels=(*two.levels[:-1], fast))
    three = merge_clusters(two, renamed(cluster("v100-32:2"), "others"))
    assert three.num_devices == 14 and three.levels[0].size == 2
    assert three.levels[-1].bandwidth_bytes_per_second == 7e10
    assert (
        merge_clusters(renamed(cluster("cpu:3"), "a"), cluster("cpu:2")).num_devices
        == 5
    )


def test_a_name_says_nothing_of_the_network() -> None:
    host = renamed(cluster("cpu:2"), "h100")
    found = merge_clusters(host, renamed(host, "other"))
    assert found.levels[-1].name == cluster("cpu:2").levels[0].name
    hosts = merge_clusters(cluster("h100:2x1"), renamed(cluster("h100:4"), "b"))
    nvlink = cluster("h100:4").levels[0]
    assert (
        hosts.levels[0].bandwidth_bytes_per_second < nvlink.bandwidth_bytes_per_second
    )
    two = merge_clusters(cluster("h100:2"), renamed(cluster("h100:2"), "b"))
    assert [level.name for level in two.levels] == ["nvlink", "nvlink"]


def test_what_no_network_joins_is_refused() -> None:
    with pytest.raises(WhaleError, match="torus 4×4.*Describe the whole cluster"):
        merge_clusters(cluster("v5e:4x4"), renamed(cluster("v5e:4x4"), "b"))
    with pytest.raises(WhaleError, match="expected one platform"):
        merge_clusters(cluster("cpu:2"), cluster("h100:2"))
