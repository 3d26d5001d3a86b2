"""Plans of hand-written models, for tests that need one and not how it is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.planner.graphs import Sizes, gpt
from whalejax.meshes import Cluster, cluster
from whalejax.planner.model.graph import Graph
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan.spmd_plan import decide
from whalejax.planner.plan_entries import BatchLeaf
from whalejax.planner.search.layout_search import Search
from whalejax.planner.search.request import Request
from whalejax.planner.sharding.parameter_layout import OptimizerBytes


WIDE = Sizes(
    batch=64, seq=128, embed=512, heads=16, key=32, value=64, mlp=2048, vocab=4096
)
"""A GPT that fits anywhere; its sizes divide by many numbers of devices."""

HUGE = Sizes(
    batch=64, seq=512, embed=8192, heads=64, key=128, value=160, mlp=28672, vocab=32768
)
"""A GPT whose layers have 0.8 billion parameters each."""


def adam(graph: Graph) -> OptimizerBytes:
    """Two moments for every parameter, and a counter."""
    return OptimizerBytes(
        by_path={t.path: 2 * t.nbytes for t in graph.params},
        other_bytes=4,
        operations=4.0,
    )


def request(
    graph: Graph,
    num_devices: int,
    *,
    mesh: Mapping[str, int] | None = None,
    **options: Any,
) -> Request:
    """What to plan for, with Adam."""
    return Request(optimizer=adam(graph), num_devices=num_devices, mesh=mesh, **options)


def batch_leaves(graph: Graph) -> tuple[BatchLeaf, ...]:
    """The batch of a graph, layouts left open."""
    return tuple(
        BatchLeaf(path=f"['{t.path}']", shape=t.shape, dtype=t.dtype, spec=((),) * 2)
        for t in graph.tensors
        if t.kind == "batch"
    )


def plan_of(graph: Graph, machine: Cluster | str = "h100:8", **options: Any) -> Plan:
    """The plan that is chosen."""
    found = cluster(machine) if isinstance(machine, str) else machine
    return decide(
        graph,
        found,
        request(graph, found.num_devices, **options),
        batch=batch_leaves(graph),
    )


def search_of(
    graph: Graph, dims: Any, machine: Cluster | str = "h100:8", **options: Any
) -> Search:
    """A search that has not run yet."""
    found = cluster(machine) if isinstance(machine, str) else machine
    return Search(graph, dims, found, request(graph, found.num_devices, **options))


def example(**options: Any) -> Plan:
    """A plan with shards of every sort: fsdp × tensor, ZeRO over data."""
    mesh = {"data": 2, "fsdp": 2, "tensor": 2}
    options = {"zero": 1, "sequence_parallel": False, **options}
    return plan_of(gpt(2, WIDE), mesh=mesh, **options)
