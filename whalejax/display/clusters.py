"""Displays clusters in notebooks: one static block of HTML."""

from __future__ import annotations

from html import escape
from itertools import groupby

from whalejax.display.page import bundle_of, cell, table
from whalejax.meshes.cluster_data import ClusterData
from whalejax.meshes.units import gigabytes
from whalejax.meshes.units import milliseconds as seconds_text


def bundle(cluster: ClusterData) -> dict[str, str]:
    """Returns the cluster as HTML and as text, by MIME type.

    Args:
        cluster: Cluster to show.
    """
    return bundle_of(cluster_html(cluster), str(cluster))


def cluster_html(cluster: ClusterData) -> str:
    """Returns a cluster as HTML without a style sheet."""
    groups = groupby(cluster.nodes, key=lambda node: (node.kind, node.count))
    nodes = []
    for (kind, count), alike in groups:
        peaks = ", ".join(
            f"{dtype} {flops / 1e12:,.4g}" for dtype, flops in kind.flops_per_second
        )
        nodes.append(
            cell(f"{len(list(alike))} × {count}", number=True)
            + cell(kind.display_name())
            + cell(gigabytes(kind.memory_bytes), number=True)
            + cell(f"{gigabytes(kind.memory_bytes_per_second)}/s", number=True)
            + cell(peaks)
        )
    names = "nodes × devices", "kind", "memory", "its bandwidth", "peak TFLOP/s"
    links = (
        cell(level.name)
        + cell(f"{level.size:,}", number=True)
        + cell(f"{gigabytes(level.bandwidth_bytes_per_second)}/s", number=True)
        + cell(seconds_text(level.latency_seconds), number=True)
        for level in cluster.levels
    )
    return (
        f"<h3>{escape(cluster.describe())}</h3>"
        + table(names, nodes)
        + table(("link", "joins", "per device, one way", "latency"), links)
    )
