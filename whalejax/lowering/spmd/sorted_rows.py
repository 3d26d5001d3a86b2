"""Rows that are sorted across the batch, each device sorting those of its own samples.

Sorted as one array, XLA gathers all rows on every device, and multiplies all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from whalejax.jaxpr.fewer_rows import RowDims, Rows, run_fewer


def on_own_rows(
    jaxpr: Any, values: Sequence[Any], rows: Rows, axes: tuple[str, ...], mesh: Mesh
) -> list[Any]:
    """A program on the rows of each device's own samples.

    Args:
        jaxpr: the program.
        values: its inputs.
        rows: where rows lie in it.
        axes: that share the samples; others are left to the compiler.
        mesh: the devices.
    """
    parts = math.prod(mesh.shape[axis] for axis in axes)

    def laid(dims: RowDims) -> tuple[P, ...]:
        return tuple(P() if dim is None else P(*[None] * dim, axes) for dim in dims)

    def fewer(*own: Any) -> tuple[Any, ...]:
        return tuple(run_fewer(jaxpr, own, rows, parts))

    run: Any = jax.shard_map(
        fewer,
        mesh=mesh,
        in_specs=laid(rows.inputs),
        out_specs=laid(rows.outputs),
        axis_names={*axes},
        check_vma=False,
    )
    return list(run(*values))
