"""What storage costs: gathering sharded parameters, and the optimizer's pass.

Separate from the rows of the model because it is about leaves, once for each of them,
and because part of it happens once a step and not once a micro-batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from whalejax.meshes.cluster import Cluster
from whalejax.planner.cost import Collective, Setting
from whalejax.planner.layout import Spec, shards
from whalejax.planner.leaves import LeafFacts
from whalejax.planner.memory import OptimizerBytes
from whalejax.planner.plan import LeafPlan


GATHERS = 2
"""Times a sharded parameter is gathered in a micro-batch: forward and backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageCollectives:
    """Collectives that sharded storage causes.

    Attributes:
        in_micro_batch: repeated in every micro-batch.
        in_update: once in a step.
    """

    in_micro_batch: tuple[Collective, ...]
    in_update: tuple[Collective, ...]


def storage_collectives(
    leaves: Sequence[LeafPlan], facts: LeafFacts, s: Setting, cast_bytes: float
) -> StorageCollectives:
    """Gathers of parameters that storage shards beyond the computation.

    Args:
        leaves: the layouts.
        facts: the parameters.
        s: mesh and micro-batches.
        cast_bytes: bytes of a parameter as computed with, over its stored bytes.
    """
    during: Counter[tuple[tuple[str, ...], int]] = Counter()
    update: Counter[tuple[tuple[str, ...], int]] = Counter()
    for leaf, nbytes in zip(leaves, facts.nbytes, strict=True):
        axes = _added(leaf.compute_spec, leaf.param_spec)
        if axes:
            payload = int(nbytes * cast_bytes / shards(leaf.compute_spec, s.mesh))
            during[axes, payload] += GATHERS
        axes = _added(leaf.param_spec, leaf.optimizer_spec)
        if axes:
            update[axes, int(nbytes / shards(leaf.param_spec, s.mesh))] += 1
    return StorageCollectives(
        in_micro_batch=tuple(_gather(a, n, c, "forward") for (a, n), c in during.items()),
        in_update=tuple(_gather(a, n, c, "update") for (a, n), c in update.items()),
    )


def _added(before: Spec, after: Spec) -> tuple[str, ...]:
    old = {axis for axes in before for axis in axes}
    return tuple(axis for axes in after for axis in axes if axis not in old)


def _gather(
    axes: tuple[str, ...], payload_bytes: int, count: int, phase: str
) -> Collective:
    return Collective(
        kind="all-gather",
        axes=axes,
        phase=phase,
        what="parameter",
        payload_bytes=payload_bytes,
        count=count,
    )


def update_seconds(
    leaves: Sequence[LeafPlan],
    facts: LeafFacts,
    optimizer: OptimizerBytes,
    cluster: Cluster,
    s: Setting,
) -> float:
    """Time of the optimizer: it reads the gradient, reads and writes the rest."""
    moved = 0.0
    for leaf, nbytes in zip(leaves, facts.nbytes, strict=True):
        state = optimizer.by_path.get(leaf.path, 0)
        parts = shards(leaf.optimizer_spec, s.mesh)
        moved += (3 * nbytes + 2 * state) / parts
    return cluster.slowest.elementwise_seconds(moved)
