"""Operations that a stage computes in a way of its own.

Inside ``shard_map`` over the stages other axes are left to the compiler, which cannot
cut every operation there; and a stage has fewer layers than were traced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from whalejax.lowering.lookups import in_parts
from whalejax.planner.layout import Spec


def in_stages(
    equation: Any, values: Sequence[Any], specs: Sequence[Spec], mesh: Any
) -> list[Any] | None:
    """The results of an operation, or None where it is computed as it was traced.

    Args:
        equation: the operation.
        values: its operands.
        specs: layouts of these, where it looks something up.
        mesh: the devices.
    """
    before = equation.invars[0].aval.shape if values else ()
    if equation.primitive.name == "reshape" and values[0].shape != before:
        (layers, *_), (_, *form) = values[0].shape, equation.outvars[0].aval.shape
        return [jnp.reshape(values[0], (layers, *form))]
    return in_parts(equation, values, specs, mesh)
