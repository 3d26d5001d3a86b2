"""Grouped convolutions, on each device for its own samples.

With several mesh axes, XLA's partitioner gathers all samples for such a convolution. It
then sums the gradient of the kernel over all devices, even those with the same samples.
The gradient becomes a multiple of the correct one. So this module partitions these
operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from whalejax import _compat
from whalejax.capture.rules.rule_table import pointwise
from whalejax.lowering.spmd.gather_scatter import OperationParts, on_each
from whalejax.planner.model.graph import CONVOLUTION
from whalejax.planner.sharding.layout import Spec


def is_grouped(equation: Any) -> bool:
    """Returns whether an equation is a grouped convolution."""
    counts = ("feature_group_count", "batch_group_count")
    return equation.primitive.name == CONVOLUTION and any(
        equation.params[name] > 1 for name in counts
    )


def grouped(
    equation: Any, values: Sequence[Any], specs: Sequence[Spec], mesh: Any
) -> list[Any]:
    """Returns the result of a grouped convolution.

    Args:
        equation: Grouped convolution.
        values: Image and kernel.
        specs: Specs of the operands, the image first; empty ones are unsharded.
        mesh: Mesh of the devices.
    """
    numbers = equation.params["dimension_numbers"]
    rank, passed = len(equation.invars[0].aval.shape), _passed(equation)
    given = tuple(
        specs[0][dim] if specs[0] and dim in passed else () for dim in range(rank)
    )
    source = dict(zip(numbers.out_spec, numbers.lhs_spec, strict=True))
    return on_each(
        OperationParts(
            given=(given, ((),) * rank),
            out=(tuple(given[source[dim]] for dim in range(rank)),),
            run=lambda *operands: _compat.bind(equation, operands),
        ),
        values,
        mesh,
        linear=False,
    )


def _passed(equation: Any) -> set[int]:
    params = equation.params
    samples, _, *space = params["dimension_numbers"].lhs_spec
    _, _, *taps = params["dimension_numbers"].rhs_spec
    kernel = equation.invars[1].aval.shape
    result = {
        dim for n, dim in enumerate(space) if pointwise(params, n, kernel[taps[n]])
    }
    return result if params["batch_group_count"] > 1 else {samples, *result}
