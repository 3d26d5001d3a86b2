"""Rules for matrix products and convolutions, which have most of the FLOPs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from whalejax.capture.rules.behaviour import (
    Behaviour,
    Equation,
    FactorBuilder,
    Rule,
    unknown,
)
from whalejax.capture.rules.elementwise import multiplication
from whalejax.capture.rules.window_geometry import windows_of_convolution


def _product(shape: Sequence[int], dims: Iterable[int]) -> int:
    return math.prod(shape[d] for d in dims)


def _dot_general(equation: Equation) -> Behaviour:
    if () in equation.inputs:
        return multiplication(equation)
    (left_in, right_in), (left_batch, right_batch) = equation.params[
        "dimension_numbers"
    ]
    letters = FactorBuilder(equation)
    left, right = equation.inputs[0], equation.inputs[1]
    result = len(equation.inputs)
    for out, (a, b) in enumerate(zip(left_batch, right_batch, strict=True)):
        letters.link((0, a), (1, b), (result, out))
    for a, b in zip(left_in, right_in, strict=True):
        letters.link((0, a), (1, b))
    rows = [d for d in range(len(left)) if d not in (*left_in, *left_batch)]
    columns = [d for d in range(len(right)) if d not in (*right_in, *right_batch)]
    out = len(left_batch)
    for slot, dims in ((0, rows), (1, columns)):
        for dim in dims:
            letters.link((slot, dim), (result, out))
            out += 1
    m, k = _product(left, rows), _product(left, left_in)
    n, batch = _product(right, columns), _product(left, left_batch)
    return Behaviour(
        factors=letters.factors,
        flops=2 * batch * m * k * n,
        matmul=(m, k, n, batch),
        saves=((1, 0), (0, 1)),
    )


def _ragged_dot(equation: Equation) -> Behaviour:
    """Returns the behaviour for rows sorted by group, each times its group's matrix.

    Only the form with the groups among the left rows is supported: the backward pass's
    forms do not occur in a forward loss.
    """
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (left_in, right_in), (left_batch, _) = numbers.dot_dimension_numbers
    (row,) = numbers.lhs_ragged_dimensions
    left, right = equation.inputs[0], equation.inputs[1]
    groups = tuple(numbers.rhs_group_dimensions)
    if left_batch or row in left_in or len(groups) != 1 or len(left) != 2:
        return unknown(equation)
    letters = FactorBuilder(equation)
    for a, b in zip(left_in, right_in, strict=True):
        letters.link((0, a), (1, b))
    (column,) = (d for d in range(3) if d not in (*groups, *right_in))
    letters.link((1, column), (3, 1))
    letters.require_whole((0, row), (3, 0))
    letters.require_whole((1, groups[0]), (2, 0))
    m, k, n = left[row], _product(left, left_in), right[column]
    return Behaviour(
        factors=letters.factors,
        flops=2 * m * k * n,
        matmul=(m, k, n, 1),
        saves=((1, 0), (0, 1), (2, 0), (2, 1)),
    )


def _conv(equation: Equation) -> Behaviour:
    """Returns the behaviour of a convolution.

    Spatial dimensions with windows of size 1 are like any other dimension.
    """
    params = equation.params
    numbers = params["dimension_numbers"]
    (lhs_n, lhs_c, *lhs_space) = numbers.lhs_spec
    (rhs_o, rhs_i, *rhs_space) = numbers.rhs_spec
    (out_n, out_c, *out_space) = numbers.out_spec
    image, kernel = equation.inputs[0], equation.inputs[1]
    out = equation.outputs[0]
    groups, batch_groups = params["feature_group_count"], params["batch_group_count"]
    letters = FactorBuilder(equation)
    if batch_groups == 1:
        letters.link((0, lhs_n), (2, out_n))
    else:
        letters.each_whole([(0, lhs_n), (2, out_n)])
    if groups == batch_groups == 1:
        letters.link((0, lhs_c), (1, rhs_i))
        letters.link((1, rhs_o), (2, out_c))
    else:
        letters.each_whole([(0, lhs_c), (1, rhs_i), (1, rhs_o), (2, out_c)])
    for number, (before, after) in enumerate(zip(lhs_space, out_space, strict=True)):
        same = image[before] == out[after]
        if same and pointwise(params, number, kernel[rhs_space[number]]):
            letters.link((0, before), (2, after))
        elif same:
            letters.link((0, before), (2, after), kind="halo")
        else:
            letters.link((0, before), kind="halo")
            letters.link((2, after), kind="halo")
    letters.each_whole((1, dim) for dim in rhs_space)
    pixels = out[out_n] * _product(out, out_space)
    taps = kernel[rhs_i] * _product(kernel, rhs_space)
    channels = out[out_c]
    return Behaviour(
        factors=letters.factors,
        flops=2 * pixels * taps * channels,
        matmul=(pixels, taps, channels // groups, groups),
        saves=((1, 0), (0, 1)),
        windows=windows_of_convolution(equation),
    )


def pointwise(params: Mapping[str, Any], number: int, taps: int) -> bool:
    """Returns whether a convolution treats each point of a dimension separately."""
    return bool(
        taps == params["window_strides"][number] == 1
        and params["lhs_dilation"][number] == 1
        and tuple(params["padding"][number]) == (0, 0)
    )


RULES: Final[dict[str, Rule]] = {
    "dot_general": _dot_general,
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _conv,
}
