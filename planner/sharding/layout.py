"""Converts tables to layouts: the mesh axes that shard each dimension of a tensor.

A plan has a table for each TaskGraph, in which ``table[axis]`` is an ordered list of
roles. The cost model, the parameter specs and the lowering all use this module, so they
agree on the layout of a tensor.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from whalejax.planner.model.dimensions import Layout
from whalejax.planner.model.windows import SPACES
from whalejax.planner.plan_entries import Spec as Spec


SPATIAL_AXES = SPACES
"""Names of the mesh axes that shard the space of a sample, outermost first."""

MESH_AXES = ("stage", "data", "fsdp", "expert", "context", *SPATIAL_AXES, "tensor")
"""Names of the mesh axes, outermost first."""

GRID_AXES = tuple(axis for axis in MESH_AXES if axis not in SPATIAL_AXES)
"""Mesh axes whose sizes the search sets as arrays."""

STAGE = MESH_AXES[0]
"""Mesh axis of pipeline stages, which divides only layers."""

Table = Mapping[str, tuple[int, ...]]
"""Roles that each mesh axis may shard, in order of preference."""


@functools.lru_cache(maxsize=4096)
def _divisors(number: int) -> tuple[int, ...]:
    """Returns the divisors from the prime factors, as numbers may be large."""
    result, left, prime = [1], number, 2
    while left > 1:
        if prime * prime > left:
            prime = left
        count = 0
        while left % prime == 0:
            left, count = left // prime, count + 1
        result += [d * prime**n for d in result for n in range(1, count + 1)]
        prime += 1 if prime == 2 else 2
    return tuple(sorted(result))


def divisors(number: int) -> list[int]:
    """Returns all divisors of a number in ascending order.

    >>> divisors(12), divisors(0)
    ([1, 2, 3, 4, 6, 12], [])
    """
    return list(_divisors(number)) if number > 0 else []


def largest_divisor(number: int, most: int) -> int:
    """Returns the largest divisor of a number that is at most ``most``.

    >>> largest_divisor(96, 10)
    8
    """
    return max((d for d in divisors(number) if d <= most), default=1)


def replicas(mesh: Mapping[str, int]) -> int:
    """Returns the number of devices with the same shards of computed parameters.

    The mesh must have all axes but the spatial ones.

    >>> replicas({"data": 2, "fsdp": 4, "expert": 1, "context": 1, "tensor": 8})
    8
    """
    spatial = math.prod(mesh.get(axis, 1) for axis in SPATIAL_AXES)
    return mesh["data"] * mesh["fsdp"] * mesh["context"] * spatial


def axis_roles(
    present: set[int] | frozenset[int], table: Table, mesh: Mapping[str, int]
) -> dict[str, int]:
    """Returns the role that each mesh axis shards in a tensor or an operation.

    Args:
        present: Roles of the tensor or the operation.
        table: Table of the TaskGraph.
        mesh: Sizes of the mesh axes, outermost first.

    Returns:
        Role by axis, for axes of size above 1 that shard a role.
    """
    roles: dict[str, int] = {}
    for axis, size in mesh.items():
        for role in table.get(axis, ()) if size > 1 else ():
            if role in present:
                roles[axis] = role
                break
    return roles


@functools.lru_cache(maxsize=2**12)
def major_dims(layout: Layout) -> Mapping[int, int]:
    """Returns the first dimension in which each role is the major one, by role.

    Args:
        layout: Roles in each dimension, major role first.
    """
    places = reversed(list(enumerate(layout)))
    return {atoms[0]: dim for dim, atoms in places if atoms}


def spec_of(
    layout: Layout, sizes: Layout, table: Table, mesh: Mapping[str, int]
) -> Spec:
    """Returns the layout of a tensor under a table.

    An axis shards the first of its roles that is divisible and the major role of a
    dimension. A PartitionSpec cannot name a minor role.

    Args:
        layout: Roles in each dimension, major role first.
        sizes: Sizes of these roles.
        table: Table of the TaskGraph.
        mesh: Sizes of the mesh axes, outermost first.
    """
    spec: list[tuple[str, ...]] = [()] * len(layout)
    major = major_dims(layout)
    for axis, size in mesh.items():
        if size == 1:
            continue
        for role in table.get(axis, ()):
            dim = major.get(role)
            if dim is None:
                continue
            taken = math.prod(mesh[a] for a in spec[dim])
            if sizes[dim][0] % (taken * size) == 0:
                spec[dim] = (*spec[dim], axis)
                break
    return tuple(spec)


def shards(spec: Spec, mesh: Mapping[str, Any]) -> Any:
    """Returns the number of shards of a tensor; an array if axis sizes are arrays."""
    parts: Any = 1
    for axes in spec:
        for axis in axes:
            parts = parts * mesh[axis]
    return parts


def local_bytes(nbytes: int, spec: Spec, mesh: Mapping[str, int]) -> int:
    """Returns the bytes of a tensor on one device."""
    parts: int = shards(spec, mesh)
    return nbytes // parts


def extend_spec(
    spec: Spec,
    shape: Sequence[int],
    axis: str,
    mesh: Mapping[str, int],
    dims: Sequence[int],
) -> Spec:
    """Adds a storage axis to the first dimension whose length it divides.

    Args:
        spec: Layout without the axis.
        shape: Shape of the unsharded tensor.
        axis: Mesh axis to add.
        mesh: Sizes of the mesh axes.
        dims: Dimensions to try, best first.

    Returns:
        Layout with the axis last in that dimension; unchanged if it divides none.
    """
    if mesh.get(axis, 1) == 1 or any(axis in axes for axes in spec):
        return spec
    for dim in dims:
        parts = math.prod(mesh[a] for a in spec[dim]) * mesh[axis]
        if shape[dim] % parts == 0:
            return (*spec[:dim], (*spec[dim], axis), *spec[dim + 1 :])
    return spec
