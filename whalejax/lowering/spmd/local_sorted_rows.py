"""Rows that are sorted across the batch, each device sorting those of its own samples.

Sorted as one array, XLA gathers all rows on every device, and multiplies all of them.
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
"""What gives each device a weight as its own, and what it takes it with."""


def on_own_rows(
    jaxpr: Any,
    values: Sequence[Any],
    rows: BatchRows,
    axes: tuple[str, ...],
    mesh: Mesh,
) -> list[Any]:
    """A program on the rows of each device's own samples.

    Args:
        jaxpr: The program.
        values: Its inputs.
        rows: Positions of sample rows in the program's values.
        axes: Mesh axes that shard the samples; others are left to the compiler.
        mesh: The devices.
    """
    parts = math.prod(mesh.shape[axis] for axis in axes)
    # Weights are given to each device as its own, so that the compiler adds gradients
    # up outside; XLA:CPU ends the process at sums of 16 bits inside.
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
