"""Collectives of Adasum over the ranks of ``data``.

Adasum(a, b) = (1 − a·b / 2‖a‖²) a + (1 − a·b / 2‖b‖²) b for each parameter (Maleki et
al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021, section 3),
applied to pairs of ranks, then to pairs of pairs. Every rank takes a part of every
parameter from all ranks in one all-to-all, combines these parts through all levels, of
which each needs only the dot products of all parts, and gives its part of the result to
all in one all-gather. So any number of ranks moves 2 (n − 1) / n of the gradients, as
an all-reduce does, and of the levels only numbers are exchanged.

What is here says how many bytes that are; ``lowering.spmd.adasum`` lays its buffers out
by it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from whalejax.meshes.cluster import Cluster
from whalejax.planner.cost.collectives import axis_parts
from whalejax.planner.plan_entries import Collective, CollectiveKind
from whalejax.planner.sharding.layout import Spec, shards


COLUMN: Final = 64
"""Numbers that are added up one after the other; a part of a parameter is a multiple of
so many."""

DOT_NUMBERS: Final = 8
"""Numbers that a device sends of a pair of tensors: a dot product and two squared
norms, each as the sum of two floats, and two exponents."""

DATA: Final = "data"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Part of one parameter on one device of a rank.

    Attributes:
        slices: Layers that the parameter stacks along its first dimension, each a
            tensor of its own; 1 where it stacks none.
        here: Number of its tensors that the device holds.
        numbers: Elements of one of them on the device.
        columns: Into which its part of one is laid out, each of ``COLUMN`` numbers.
    """

    slices: int
    here: int
    numbers: int
    columns: int

    @classmethod
    def of(
        cls, shape: Sequence[int], spec: Spec, slices: int, mesh: Mapping[str, int]
    ) -> Part:
        """The part of a parameter.

        Args:
            shape: Shape of the parameter.
            spec: Its layout on the axes beside ``data``.
            slices: Layers that it stacks.
            mesh: Axis sizes.
        """
        stacked = slices > 1
        here = slices // shards(spec[:1], mesh) if stacked else 1
        numbers = math.prod(shape) // shards(spec, mesh) // max(1, here)
        ranks = mesh.get(DATA, 1)
        columns = math.ceil(numbers / (ranks * COLUMN))
        return cls(slices=slices, here=here, numbers=numbers, columns=columns)

    @property
    def width(self) -> int:
        """Columns of all slices that the device holds."""
        return self.here * self.columns


def node_size(mesh: Mapping[str, int], cluster: Cluster, combine: str) -> int:
    """Ranks of ``data`` that are averaged first, under a way to combine.

    Args:
        mesh: Axis sizes, outermost first.
        cluster: The machine.
        combine: The way.
    """
    if combine != "adasum_nodes":
        return 1
    pieces = axis_parts((DATA,), mesh, cluster)
    return mesh[DATA] // pieces[-1].size if len(pieces) > 1 else 1


def levels(groups: int) -> Iterator[int]:
    """Yields the number of pairs that each level combines, of so many groups of ranks.

    One that has no partner goes on as it is, which is what padding with zeros gives.

    >>> [*levels(8)], [*levels(5)]
    ([4, 2, 1], [2, 1, 1])
    """
    while groups > 1:
        yield groups // 2
        groups -= groups // 2


def combining(
    parts: Sequence[Part],
    mesh: Mapping[str, int],
    *,
    node: int = 1,
    itemsize_bytes: int = 4,
) -> list[Collective]:
    """The collectives of one step's Adasum, on one device.

    Args:
        parts: Parts of all trained parameters.
        mesh: Axis sizes.
        node: Ranks that are averaged first.
        itemsize_bytes: Bytes of a combined element.
    """
    ranks = mesh[DATA]
    every = tuple(axis for axis, size in mesh.items() if size > 1)
    width = sum(part.width for part in parts)
    tensors = sum(part.slices for part in parts)
    column = ranks * COLUMN * itemsize_bytes
    dots = DOT_NUMBERS * tensors * math.prod(mesh.values()) * itemsize_bytes
    result = [_update_collective("all-to-all", (DATA,), column * (width + 1))]
    for pairs in levels(ranks // node):
        result.append(_update_collective("all-gather", every, dots * pairs))
    result.append(_update_collective("all-gather", (DATA,), column * width))
    return result


def within_ranks(collectives: Sequence[Collective]) -> list[Collective]:
    """Collectives of a loss and its gradient, on the devices of one rank of ``data``.

    Args:
        collectives: Collectives of the global batch, over all axes that shard it.
    """
    inside = (
        dataclasses.replace(c, axes=tuple(a for a in c.axes if a != DATA))
        for c in collectives
    )
    return [c for c in inside if c.axes]


def _update_collective(
    kind: CollectiveKind, axes: tuple[str, ...], nbytes: int
) -> Collective:
    return Collective(
        kind=kind,
        axes=axes,
        phase="update",
        what="gradient",
        payload_bytes=nbytes,
        count=1,
    )
