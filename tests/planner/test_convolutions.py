"""Convolutions: slower than products of their sizes, their kernels copied."""

from __future__ import annotations

import dataclasses
import functools
import math

import pytest

from tests.planner.test_captured_dimensions import captured
from whalejax.meshes import Cluster, cluster
from whalejax.planner.cost.operation_cost import CostSetting, row_seconds
from whalejax.planner.cost.row_builder import build_rows
from whalejax.planner.memory.saved_tensors import kept_bytes, residents
from whalejax.planner.model.dimensions import Dimensions
from whalejax.planner.model.graph import CONVOLUTION, Graph
from whalejax.planner.sharding.layout import Table


MESH = {"data": 1, "fsdp": 1, "expert": 1, "context": 1, "tensor": 1}


@functools.cache
def resnet() -> tuple[Graph, Dimensions]:
    """The test-size ResNet."""
    return captured("resnet-test")


def setting(machine: Cluster) -> CostSetting:
    """One device, one micro-batch."""
    return CostSetting(MESH, 1, machine, resnet()[1])


def seconds(machine: Cluster) -> tuple[float, float]:
    """All convolutions on one device: forward, backward."""
    s, rows = setting(machine), build_rows(*resnet())
    convolutions = [row for row in rows.ops if row.kind == CONVOLUTION]
    assert len(convolutions) > 3
    pairs = [
        (row.count * ahead, row.count * behind)
        for row in convolutions
        for ahead, behind, _ in [row_seconds(row, {}, s, machine.slowest)]
    ]
    return math.fsum(a for a, _ in pairs), math.fsum(b for _, b in pairs)


def with_share(machine: Cluster, share: float) -> Cluster:
    """The same machine with slower convolutions."""
    kind = dataclasses.replace(machine.slowest, convolution_share=share)
    nodes = tuple(dataclasses.replace(node, kind=kind) for node in machine.nodes)
    return dataclasses.replace(machine, nodes=nodes)


def test_a_measured_share_slows_convolutions_down() -> None:
    machine = cluster("h100:1")
    ahead, behind = seconds(machine)
    slow_ahead, slow_behind = seconds(with_share(machine, 1e-4))
    # At such a rate no convolution hides behind its memory traffic.
    assert slow_ahead > 10 * ahead
    assert slow_behind > 10 * behind


def kernels() -> list[int]:
    """Bytes of the kernels whose input needs a gradient: all but the first."""
    graph, _ = resnet()
    return [
        graph.tensors[op.operands[1]].nbytes
        for op in graph.ops
        if op.kind == CONVOLUTION and graph.tensors[op.operands[0]].differentiable
    ]


def test_the_cpu_turns_kernels_once_and_twice_for_their_inputs() -> None:
    machine = cluster("cpu:1")
    assert machine.compiler.copies_kernels
    profile = dataclasses.replace(machine.compiler, copies_kernels=False)
    plain = dataclasses.replace(machine, compiler=profile)
    (ahead, behind), (plain_ahead, plain_behind) = seconds(machine), seconds(plain)
    graph, _ = resnet()
    first, images = 0, 0
    for op in graph.ops:
        if op.kind == CONVOLUTION:
            image, kernel = (graph.tensors[t] for t in op.operands)
            first += 0 if image.differentiable else kernel.nbytes
            images += image.nbytes + graph.tensors[op.results[0]].nbytes
    assert first
    turn = machine.slowest.turned_seconds
    assert ahead - plain_ahead == pytest.approx(turn(sum(kernels()) + first))
    assert behind - plain_behind == pytest.approx(turn(2 * (sum(kernels()) + images)))


def test_what_is_turned_takes_as_long_as_measured() -> None:
    machine = cluster("cpu:1")
    kind = dataclasses.replace(machine.slowest, turned_bytes_per_second=1e3)
    nodes = tuple(dataclasses.replace(node, kind=kind) for node in machine.nodes)
    slow = seconds(dataclasses.replace(machine, nodes=nodes))
    assert slow[0] == pytest.approx((sum(kernels())) / 1e3, rel=0.05)
    assert slow[1] > 2 * slow[0]


def test_turned_kernels_stay_in_memory() -> None:
    graph, dims = resnet()
    weight = graph.weight_tensors()
    tables: dict[int, Table] = {t.index: {} for t in graph.task_graphs}
    found = [
        math.fsum(kept_bytes(r.saved, tables, setting(cluster("cpu:1"))))
        for r in (
            residents(graph, dims, weight, copies_kernels=True),
            residents(graph, dims, weight, copies_kernels=False),
        )
    ]
    assert found[0] - found[1] == sum(kernels())
