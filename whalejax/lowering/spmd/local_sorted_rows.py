"""Programs that sort rows of the batch, on each device for its own samples.

XLA alone would gather all rows on every device, and every device would multiply all of
them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from whalejax import _compat
from whalejax.jaxpr.fewer_rows import BatchRows, RowDims, run_fewer


COPYING = ("broadcast_in_dim", "squeeze")
"""Primitives that copy a weight to each device, and those that read the copy."""


def on_own_rows(
    jaxpr: Any,
    values: Sequence[Any],
    rows: BatchRows,
    axes: tuple[str, ...],
    mesh: Mesh,
) -> list[Any]:
    """Runs a program on the rows of each device's own samples.

    Args:
        jaxpr: Program to run.
        values: Inputs of the program.
        rows: Positions of sample rows in the program's values.
        axes: Mesh axes that shard the samples; the compiler partitions the others.
        mesh: Mesh of the devices.
    """
    parts = math.prod(mesh.shape[axis] for axis in axes)
    # Each device gets its own copy of the weights, so gradients are summed outside.
    # XLA:CPU aborts at 16-bit sums inside.
    copied = [
        dim is None and _compat.is_inexact(value.dtype)
        for value, dim in zip(values, rows.inputs, strict=True)
    ]

    def row_specs(dims: RowDims, flags: Sequence[bool]) -> tuple[P, ...]:
        pairs = zip(dims, flags, strict=True)
        return tuple(P(axes) if own or dim is not None else P() for dim, own in pairs)

    def fewer(*own: Any) -> tuple[Any, ...]:
        pairs = zip(own, copied, strict=True)
        given = [lax.squeeze(x, (0,)) if flag else x for x, flag in pairs]
        return tuple(run_fewer(jaxpr, given, rows, parts))

    run: Any = jax.shard_map(
        fewer,
        mesh=mesh,
        in_specs=row_specs(rows.inputs, copied),
        out_specs=row_specs(rows.outputs, [False] * len(rows.outputs)),
        axis_names={*axes},
        check_vma=False,
    )
    given = [
        jnp.broadcast_to(x[None], (parts, *x.shape)) if flag else x
        for x, flag in zip(values, copied, strict=True)
    ]
    return list(run(*given))
