"""Collectives of Adasum over the ranks of ``data``.

For each parameter, Adasum(a, b) = (1 − a·b / 2‖a‖²) a + (1 − a·b / 2‖b‖²) b (Maleki et
al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021, section 3). It
is applied to pairs of ranks, then to pairs of pairs, and so on.

One all-to-all gives every rank a part of every parameter from all ranks. The rank
combines these parts through all levels of pairs, which exchange only dot products. One
all-gather then sends each rank's part of the result to all. So any number n of ranks
moves 2 (n − 1) / n of the gradients' bytes, as an all-reduce does.

This module computes the bytes of the buffers that ``lowering.spmd.adasum`` lays out.
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
"""Number of elements that are summed sequentially. A part's elements per tensor are
padded to a multiple of this number.
"""

DOT_NUMBERS: Final = 8
"""Numbers that a device sends for a pair of tensors. Two are exponents. The other six
are a dot product and two squared norms, each as a sum of two floats.
"""

DATA: Final = "data"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Part of one parameter on one device of a rank.

    Attributes:
        slices: Number of layers that the parameter stacks along its first dimension,
            each a separate tensor; 1 if it stacks none.
        here: Number of the parameter's tensors on the device.
        numbers: Number of elements of one tensor on the device.
        columns: Number of columns of the device's part of one tensor; a column has
            ``COLUMN`` elements.
    """

    slices: int
    here: int
    numbers: int
    columns: int

    @classmethod
    def of(
        cls, shape: Sequence[int], spec: Spec, slices: int, mesh: Mapping[str, int]
    ) -> Part:
        """Returns the part of a parameter on one device.

        Args:
            shape: Shape of the parameter.
            spec: Layout of the parameter on the axes other than ``data``.
            slices: Number of layers that the parameter stacks.
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
        """Number of columns of all tensors on the device."""
        return self.here * self.columns


def node_size(mesh: Mapping[str, int], cluster: Cluster, combine: str) -> int:
    """Returns how many ranks of ``data`` are averaged before Adasum.

    Args:
        mesh: Axis sizes, outermost first.
        cluster: Cluster of the mesh.
        combine: Combination: ``mean`` or a form of Adasum.
    """
    if combine != "adasum_nodes":
        return 1
    pieces = axis_parts((DATA,), mesh, cluster)
    return mesh[DATA] // pieces[-1].size if len(pieces) > 1 else 1


def levels(groups: int) -> Iterator[int]:
    """Yields the number of pairs that each level combines.

    A group without a partner stays unchanged, as it would with a partner of zeros.

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
    """Returns the collectives of one step's Adasum, on one device.

    Args:
        parts: Parts of all trained parameters.
        mesh: Axis sizes.
        node: Number of ranks that are averaged before Adasum; default: 1.
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
    """Returns the collectives of the loss and gradients inside one rank of ``data``.

    Args:
        collectives: Collectives for the global batch, over all axes that shard it.
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
