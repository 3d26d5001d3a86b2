"""Assigns layers to stages that they do not divide evenly, and shards their storage.

Lockstep stages wait for the slowest, so its work is made as small as possible. If
nothing inside a stage is sharded, only the last stage computes the operations after the
layers. If something is, all stages do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from whalejax.meshes.cluster import Cluster
from whalejax.planner.cost.operation_cost import CostSetting, row_cost
from whalejax.planner.cost.row_builder import build_rows
from whalejax.planner.model.analysis import analyse_graph
from whalejax.planner.model.graph import Graph
from whalejax.planner.pipeline.layer_stack import STAGE, StackedLayers
from whalejax.planner.plan_data import PlanData
from whalejax.planner.plan_entries import Collective, LeafPlan, itemsize_bytes
from whalejax.planner.sharding.layout import extend_spec, shards


P = TypeVar("P", bound=PlanData)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSplit:
    """Division of layers among stages.

    Attributes:
        length: Total number of layers.
        stages: Number of stages.
        seconds: Seconds of one layer, and of the last stage's work after the layers.
    """

    length: int
    stages: int
    seconds: tuple[float, float] = (1.0, 0.0)

    @property
    def layers(self) -> tuple[int, ...]:
        """Number of layers of each stage."""
        layer, behind = self.seconds
        return layers_of(self.length, self.stages, behind / layer)

    @property
    def equal(self) -> bool:
        """Whether all stages have the same number of layers."""
        return len(set(self.layers)) == 1

    @property
    def spared_seconds(self) -> float:
        """Seconds per turn by which the estimate exceeds the slowest stage.

        The estimate counts the largest number of layers and the operations after the
        layers, which no stage has both.
        """
        layer, behind = self.seconds
        return min(behind, (max(self.layers) - self.layers[-1]) * layer)


def layers_of(length: int, stages: int, behind: float = 0.0) -> tuple[int, ...]:
    """Returns the number of layers of each stage.

    The numbers are equal if possible. If not, the slowest stage has as little work as
    possible, and each stage has at least one layer.

    Args:
        length: Total number of layers.
        stages: Number of stages.
        behind: Time of the operations after the layers, divided by the time of a layer,
            if only the last stage computes them; default: 0.

    >>> layers_of(6, 4)
    (2, 2, 1, 1)
    >>> layers_of(7, 2, behind=2.5)
    (5, 2)
    >>> layers_of(8, 2, behind=2.5)
    (4, 4)
    """
    if length % stages == 0:
        return (length // stages,) * stages
    layers = [1] * stages
    for _ in range(length - stages):
        loads = [*layers[:-1], layers[-1] + behind]
        layers[loads.index(min(loads))] += 1
    return tuple(layers)


def seconds_of(
    graph: Graph, shared: StackedLayers, cluster: Cluster, num_micro_batches: int
) -> tuple[float, float]:
    """Returns the seconds per micro-batch of a layer, and of the work after all layers.

    Args:
        graph: The captured loss.
        shared: Layers of the loss.
        cluster: Devices, each of which computes alone.
        num_micro_batches: Number of micro-batches in a step.

    Returns:
        Seconds of both passes of a layer, and of the work after all layers.
    """
    depth = len(shared.position)
    inside = [op.position[:depth] == shared.position for op in graph.ops]
    end = max(i for i, within in enumerate(inside) if within) + 1
    start = inside.index(True)

    def seconds(first: int, last: int) -> float:
        part = replace(graph, ops=graph.ops[first:last])
        analysed = analyse_graph(part)
        s = CostSetting(
            {},
            num_micro_batches // graph.num_micro_batches,
            cluster,
            analysed.dims,
            frozenset(r.index for r in analysed.dims.batch),
        )
        costs = [row_cost(row, {}, s) for row in build_rows(part, analysed.dims).ops]
        launch = cluster.slowest.launch_seconds
        return float(sum(c.compute_seconds + c.launches * launch for c in costs))

    return seconds(start, end) / shared.length, seconds(end, len(graph.ops))


def parts(shape: Sequence[int], stages: int) -> bool:
    """Returns whether each stage can store a part of every layer of a stack.

    Args:
        shape: Shape of the stack.
        stages: Number of stages.
    """
    return any(size % stages == 0 for size in shape[1:])


def stored_apart(leaf: LeafPlan, mesh: Mapping[str, int]) -> LeafPlan:
    """Returns a stack of layers of which each stage stores a part of every layer.

    Args:
        leaf: Stack of all layers, with the layout of one stage.
        mesh: Axis sizes, including ``stage``.

    Returns:
        The stack with ``stage`` added to its stored layouts, in the dimension that
        other axes shard least. If no dimension is divisible, every stage stores the
        full stack.
    """
    stored = [
        ((), *spec[1:])
        for spec in (leaf.param_spec, leaf.gradient_spec, leaf.optimizer_spec)
    ]

    def cuts(dim: int) -> int:
        counts = [math.prod(mesh[a] for a in spec[dim]) for spec in stored]
        divides = all(leaf.shape[dim] % (mesh[STAGE] * n) == 0 for n in counts)
        return max(counts) if divides else 0

    dims = [dim for dim in range(1, len(leaf.shape)) if cuts(dim)]
    dims.sort(key=lambda dim: (cuts(dim), -leaf.shape[dim]))
    param, gradient, optimizer = (
        extend_spec(spec, leaf.shape, STAGE, mesh, dims) for spec in stored
    )
    return replace(
        leaf,
        compute_spec=((STAGE,), *leaf.compute_spec[1:]),
        param_spec=param,
        gradient_spec=gradient,
        optimizer_spec=optimizer,
    )


def exchanged(leaf: LeafPlan, most: int, mesh: Mapping[str, int]) -> list[Collective]:
    """Returns the exchanges of a stack between stages in a step, with its gradients'.

    Args:
        leaf: Stack in its stored layout.
        most: Largest number of layers of a stage.
        mesh: Axis sizes, including ``stage``.
    """
    size = most * mesh[STAGE] * math.prod(leaf.shape[1:])
    stored = itemsize_bytes(leaf.dtype)
    itemsizes = stored, max(4, stored)  # summed in at least 32 bits
    result = []
    stores = (("parameter", leaf.param_spec), ("gradient", leaf.gradient_spec))
    for (what, spec), itemsize in zip(stores, itemsizes, strict=True):
        apart = any(STAGE in axes for axes in spec)
        if not apart and what == "parameter":
            continue  # Every stage stores all of it.
        if what == "gradient" and not leaf.trained:
            continue
        local = size * itemsize // shards(spec, mesh)
        result.append(
            Collective(
                kind="all-to-all" if apart else "all-gather",
                axes=(STAGE,),
                phase="update",
                what=what,
                payload_bytes=int(local),
                count=1,
                scope=leaf.path,
            )
        )
    return result


def unequal_notes(dealt: LayerSplit, *, alone: bool) -> list[str]:
    """Returns the notes on stages with unequal numbers of layers.

    Args:
        dealt: Assignment of layers to stages.
        alone: Whether a stage is one device.
    """
    if dealt.equal:
        return []
    layers = ", ".join(map(str, dealt.layers))
    notes = [
        f"stages have {layers} layers: each stores a part of every layer, and parts "
        "are exchanged for full layers once in a step, and back for their gradients"
    ]
    if not alone:
        notes.append(
            "stages with fewer layers compute as long as the stage with most, because "
            "the devices of a stage run the same collectives; superfluous results are "
            "dropped"
        )
    return notes


def with_layers(plan: P, layers: tuple[int, ...]) -> P:
    """Returns a plan with other numbers of layers per stage and the same predictions.

    Args:
        plan: Plan whose stages have equal numbers of layers.
        layers: Number of layers of each stage, 1 or more, with the same sum.
    """
    assert plan.stages is not None
    assert sum(layers) == sum(plan.stages.layers)
    return replace(
        plan,
        stages=replace(plan.stages, layers=layers),
        leaves=tuple(
            stored_apart(leaf, plan.axis_sizes)
            if any(STAGE in axes for axes in leaf.param_spec)
            else leaf
            for leaf in plan.leaves
        ),
    )


def stored_bytes(leaf: LeafPlan, mesh: Mapping[str, int]) -> int:
    """Returns the bytes of a parameter on one device."""
    return int(leaf.nbytes // shards(leaf.param_spec, mesh))
