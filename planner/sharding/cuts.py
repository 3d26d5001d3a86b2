"""Into how many parts layouts cut tensors: of one mesh, or of many as arrays.

A cut is what memory and traffic ask of a layout: how many parts each dimension has, and
which axes make them. That of one mesh is read off the layout that a plan writes
(``layout.spec_of``); for arrays of meshes the same rule runs with masks, since which
axis divides which dimension differs from mesh to mesh.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from whalejax.planner.model.dimensions import Layout
from whalejax.planner.sharding.fused_parameters import Fused
from whalejax.planner.sharding.layout import Spec, Table


@dataclass(frozen=True, slots=True)
class Cut:
    """How a tensor is cut; numbers of one mesh, or arrays over meshes.

    Attributes:
        dims: for each dimension, into how many parts.
        axes: for each axis that shards some dimension in some mesh, whether it does.
    """

    dims: tuple[Any, ...]
    axes: Mapping[str, Any]

    @property
    def parts(self) -> Any:
        """Into how many parts, of all dimensions."""
        return math.prod(self.dims)

    def shards(self, axis: str) -> Any:
        """Whether an axis shards some dimension."""
        return self.axes.get(axis, False)

    def take(self, rows: np.ndarray) -> Cut:
        """Some of the meshes."""

        def some(value: Any) -> Any:
            return value[rows] if isinstance(value, np.ndarray) else value

        axes = {axis: some(here) for axis, here in self.axes.items()}
        return Cut(tuple(map(some, self.dims)), axes)

    def where(self, mask: Any, other: Cut) -> Cut:
        """This cut where a mask says so, and another one elsewhere."""
        pairs = zip(self.dims, other.dims, strict=True)
        return Cut(
            tuple(np.where(mask, *pair) for pair in pairs),
            {
                axis: np.where(mask, self.shards(axis), other.shards(axis))
                for axis in {**self.axes, **other.axes}
            },
        )


def cut_by(spec: Spec, mesh: Mapping[str, Any]) -> Cut:
    """The cut of one layout.

    Args:
        spec: the layout.
        mesh: sizes of the axes; arrays of meshes that all have this layout, too.
    """
    dims = tuple(math.prod(mesh[a] for a in axes) for axes in spec)
    return Cut(dims, {a: True for axes in spec for a in axes})


def cuts_of(
    layout: Layout,
    sizes: Layout,
    table: Table,
    mesh: Mapping[str, Any],
    fused: Fused | None = None,
) -> Cut:
    """``fused_parameters.lying`` for arrays of meshes.

    Args:
        layout, sizes: atoms of each dimension.
        table: the TaskGraph's table.
        mesh: sizes of the axes, outermost first, as arrays.
        fused: how a fused parameter lies, or None where its own dimensions serve.
    """
    found = _Growing((1,) * len(layout), {})
    major = {atoms[0]: dim for dim, atoms in reversed(list(enumerate(layout))) if atoms}
    inner = {} if fused is None else dict(fused.inner)
    for axis, size in mesh.items():
        left = size > 1
        for role in table.get(axis, ()) if left.any() else ():
            lends = fused is not None and role in inner
            may = left & (inner[role] % size == 0) if lends else left
            for other in fused.others if fused is not None and lends else (role,):
                dim = major.get(other)
                if dim is not None:
                    hit = found.take(axis, dim, sizes[dim][0], size, may)
                    left, may = left & ~hit, may & ~hit
    return found.cut


def extended(
    cut: Cut,
    shape: Sequence[int],
    axis: str,
    mesh: Mapping[str, Any],
    dims: Sequence[int],
) -> Cut:
    """``layout.extend_spec`` for arrays of meshes.

    Args:
        cut: so far.
        shape: the whole tensor's.
        axis: the mesh axis to add.
        mesh: sizes of the axes, as arrays.
        dims: dimensions to try, best first.
    """
    size = mesh[axis]
    left = (size > 1) & np.logical_not(cut.shards(axis))
    found = _Growing(cut.dims, cut.axes)
    for dim in dims:
        if not left.any():
            break
        left = left & ~found.take(axis, dim, shape[dim], size, left)
    return found.cut


class _Growing:
    """A cut that axes are added to."""

    def __init__(self, dims: Sequence[Any], axes: Mapping[str, Any]) -> None:
        self.dims, self.axes = [*dims], {**axes}

    @property
    def cut(self) -> Cut:
        return Cut(tuple(self.dims), self.axes)

    def take(self, axis: str, dim: int, length: int, size: Any, may: Any) -> Any:
        """Let an axis shard a dimension where it may and divides it; where that is."""
        more = self.dims[dim] * size
        hit = may & (length % more == 0)
        if hit.any():
            self.dims[dim] = np.where(hit, more, self.dims[dim])
            self.axes[axis] = self.axes.get(axis, False) | hit
        return hit
