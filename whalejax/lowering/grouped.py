"""Convolutions in groups of channels, each device on its own samples.

XLA's partitioner gathers all samples for one where several mesh axes are in play, and
sums the gradient of its kernel over all devices, those included that have the same
samples: it comes out as many times too large. So each device is told what to do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from whalejax import _compat
from whalejax.lowering.lookups import Parts, on_each
from whalejax.planner.graph import CONVOLUTION
from whalejax.planner.layout import Spec


def is_grouped(equation: Any) -> bool:
    """Whether an equation is such a convolution."""
    counts = ("feature_group_count", "batch_group_count")
    return equation.primitive.name == CONVOLUTION and any(
        equation.params[name] > 1 for name in counts
    )


def grouped(
    equation: Any, values: Sequence[Any], specs: Sequence[Spec], mesh: Any
) -> list[Any]:
    """The result of such a convolution.

    Args:
        equation: the convolution.
        values: image and kernel.
        specs: the layout of the image first; empty ones are whole.
        mesh: the devices.
    """
    numbers = equation.params["dimension_numbers"]
    samples, image = numbers.lhs_spec[0], equation.invars[0].aval.shape
    axes: tuple[str, ...] = specs[0][samples] if specs and specs[0] else ()
    parts = math.prod(mesh.shape[a] for a in axes)
    if equation.params["batch_group_count"] > 1 or image[samples] % parts:
        axes = ()
    rank = len(image)
    given = tuple(axes if d == samples else () for d in range(rank))
    first = numbers.out_spec[0]
    return on_each(
        Parts(
            given=(given, ((),) * rank),
            out=(tuple(axes if d == first else () for d in range(rank)),),
            run=lambda *operands: _compat.bind(equation, operands),
        ),
        values,
        mesh,
        linear=False,
    )
