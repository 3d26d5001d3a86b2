"""Rules of arithmetic primitives, and the table of all rules by the primitive's name.

Most primitives are elementwise: every dimension passes through. A table lists them with
the slots that the backward pass reads; ``"x"`` is the operand and ``"y"`` the result.
The other primitives are matrix products and convolutions, which have most of the FLOPs,
reductions, scans along a dimension, windows and sorting. For a primitive without a
rule, all dimensions stay unsharded, and ``Graph.unknown_primitives`` has its name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, Final

from whalejax.capture.rules.behaviour import (
    Behaviour,
    Equation,
    FactorBuilder,
    Rule,
    pooled,
    unknown,
    windows_of_convolution,
    windows_of_pooling,
)
from whalejax.capture.rules.shape import SHAPE_RULES
from whalejax.planner.model.graph import Factor


_UNARY_LINEAR: Final = (
    "neg convert_element_type copy real imag conj reduce_precision name "
    "sharding_constraint layout_constraint with_memory_space_constraint reshard pvary"
).split()
_UNARY_READING_OPERAND: Final = (
    "log log1p log2 one_minus_square sin cos asin acos atan sinh cosh asinh acosh "
    "atanh erf erfc lgamma digamma abs square bessel_i0e bessel_i1e"
).split()
_UNARY_READING_RESULT: Final = ("exp exp2 expm1 tanh logistic sqrt tan erf_inv").split()
_UNARY_READING_BOTH: Final = "rsqrt cbrt".split()
_NARY_LINEAR: Final = "add sub add_any complex".split()
_NARY_READING_ALL: Final = (
    "max min pow rem atan2 clamp igamma igammac igamma_grad_a polygamma zeta "
    "regularized_incomplete_beta polynomial random_gamma"
).split()
_FLAT: Final = (
    "eq ne lt le gt ge eq_to le_to lt_to and or xor not shift_left "
    "shift_right_logical shift_right_arithmetic population_count clz sign floor ceil "
    "round is_finite nextafter mulhi"
).split()


def pass_through(equation: Equation) -> tuple[Factor, ...]:
    """Returns factors of the result's dimensions and equal ones of the operands.

    An operand may be a scalar, or have size 1 where the result is larger.
    """
    out_slot = len(equation.inputs)
    out = equation.outputs[0]
    factors: list[Factor] = []
    for dim, size in enumerate(out):
        if size == 1:
            continue
        members = [
            (slot, dim)
            for slot, shape in enumerate(equation.inputs)
            if len(shape) == len(out) and shape[dim] == size
        ]
        if members:
            factors.append(Factor(members=(*members, (out_slot, dim))))
    return tuple(factors)


def _unary(*, operand: bool = False, result: bool = False) -> Rule:
    saves = ((0, 0),) * operand + ((1, 0),) * result

    def rule(equation: Equation) -> Behaviour:
        return Behaviour(factors=pass_through(equation), elementwise=True, saves=saves)

    return rule


def _linear(equation: Equation) -> Behaviour:
    return Behaviour(factors=pass_through(equation), elementwise=True)


def _flat(equation: Equation) -> Behaviour:
    """Returns the behaviour of an operation whose result has no gradient."""
    return Behaviour(
        factors=pass_through(equation), elementwise=True, stops_gradient=True
    )


def _reading_all(equation: Equation) -> Behaviour:
    slots = range(len(equation.inputs))
    return Behaviour(
        factors=pass_through(equation),
        elementwise=True,
        saves=tuple((slot, wrt) for slot in slots for wrt in slots),
    )


def multiplication(equation: Equation) -> Behaviour:
    return Behaviour(
        factors=pass_through(equation), elementwise=True, saves=((1, 0), (0, 1))
    )


def _div(equation: Equation) -> Behaviour:
    return Behaviour(
        factors=pass_through(equation),
        elementwise=True,
        saves=((1, 0), (0, 1), (1, 1)),
    )


def _integer_pow(equation: Equation) -> Behaviour:
    saves = () if equation.params["y"] in (0, 1) else ((0, 0),)
    return Behaviour(factors=pass_through(equation), elementwise=True, saves=saves)


def _select(equation: Equation) -> Behaviour:
    cases = range(1, len(equation.inputs))
    return Behaviour(
        factors=pass_through(equation),
        elementwise=True,
        saves=tuple((0, wrt) for wrt in cases),
    )


def _side_by_side(equation: Equation) -> Behaviour:
    letters = FactorBuilder(equation)
    count = len(equation.inputs)
    for slot, shape in enumerate(equation.outputs):
        for dim in range(len(shape)):
            letters.link((slot, dim), (count + slot, dim))
    return Behaviour(factors=letters.factors, elementwise=True)


def _bitcast(equation: Equation) -> Behaviour:
    letters = FactorBuilder(equation)
    for dim in range(min(len(equation.inputs[0]), len(equation.outputs[0]))):
        letters.link((0, dim), (1, dim))
    return Behaviour(factors=letters.factors, elementwise=True, stops_gradient=True)


ELEMENTWISE_RULES: Final[dict[str, Rule]] = {
    **dict.fromkeys(_UNARY_LINEAR, _linear),
    **dict.fromkeys(_UNARY_READING_OPERAND, _unary(operand=True)),
    **dict.fromkeys(_UNARY_READING_RESULT, _unary(result=True)),
    **dict.fromkeys(_UNARY_READING_BOTH, _unary(operand=True, result=True)),
    **dict.fromkeys(_NARY_LINEAR, _linear),
    **dict.fromkeys(_NARY_READING_ALL, _reading_all),
    **dict.fromkeys(_FLAT, _flat),
    "mul": multiplication,
    "div": _div,
    "integer_pow": _integer_pow,
    "select_n": _select,
    "optimization_barrier": _side_by_side,
    "device_put": _side_by_side,
    "bitcast_convert_type": _bitcast,
    "stop_gradient": _flat,
}


SAME_SHAPE: Final = frozenset(ELEMENTWISE_RULES) - frozenset(
    (
        "optimization_barrier device_put bitcast_convert_type sharding_constraint "
        "layout_constraint with_memory_space_constraint reshard"
    ).split()
)
"""Primitives with one result, whose operands are scalars or have the result's shape.
Their parameters refer to no dimension."""


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

    Only the form with groups among the left rows is supported. The other forms occur in
    backward passes alone.
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

    Along a spatial dimension with windows of size 1, each point is separate.
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


PRODUCT_RULES: Final[dict[str, Rule]] = {
    "dot_general": _dot_general,
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _conv,
}


def _reduce(equation: Equation, axes: tuple[int, ...], count: int) -> FactorBuilder:
    letters = FactorBuilder(equation)
    first = len(equation.inputs)
    kept = 0
    for dim in range(len(equation.inputs[0])):
        members = [(slot, dim) for slot in range(count)]
        if dim not in axes:
            members += [(first + slot, kept) for slot in range(len(equation.outputs))]
            kept += 1
        letters.link(*members)
    return letters


def _reduction(*saves: tuple[int, int], flat: bool = False) -> Rule:
    def rule(equation: Equation) -> Behaviour:
        letters = _reduce(equation, tuple(equation.params["axes"]), 1)
        return Behaviour(factors=letters.factors, saves=saves, stops_gradient=flat)

    return rule


def _general_reduce(equation: Equation) -> Behaviour:
    """Returns the behaviour of ``lax.reduce``, which reads start values too."""
    count = len(equation.outputs)
    letters = _reduce(equation, tuple(equation.params["dimensions"]), count)
    slots = range(count)
    return Behaviour(
        factors=letters.factors, saves=tuple((s, w) for s in slots for w in slots)
    )


def _over_places(*saves: tuple[int, int]) -> Rule:
    """Returns the rule for a collective along dimensions, as ``vmap`` makes them.

    Each operand has its own result. A collective over a named axis has no rule.
    """

    def rule(equation: Equation) -> Behaviour:
        axes, count = equation.params["axes"], len(equation.inputs)
        groups = equation.params.get("axis_index_groups")
        if groups is not None or not all(isinstance(a, Integral) for a in axes):
            return unknown(equation)
        letters = FactorBuilder(equation)
        for slot, shape in enumerate(equation.inputs):
            kept = iter(range(len(shape)))
            for dim in range(len(shape)):
                members = [(slot, dim)]
                if dim not in axes:
                    members.append((count + slot, next(kept)))
                letters.link(*members)
        each = tuple((count * side + n, n) for n in range(count) for side, _ in saves)
        return Behaviour(factors=letters.factors, saves=each)

    return rule


def _along(*saves: tuple[int, int]) -> Rule:
    def rule(equation: Equation) -> Behaviour:
        letters = FactorBuilder(equation)
        for dim in range(len(equation.inputs[0])):
            here = dim == equation.params["axis"]
            letters.link((0, dim), (1, dim), kind="unshardable" if here else "linked")
        return Behaviour(factors=letters.factors, saves=saves)

    return rule


def _sort(equation: Equation) -> Behaviour:
    letters = FactorBuilder(equation)
    count = len(equation.inputs)
    slots = range(2 * count)
    for dim in range(len(equation.inputs[0])):
        here = dim == equation.params["dimension"]
        letters.link(
            *((slot, dim) for slot in slots),
            kind="unshardable" if here else "linked",
        )
    return Behaviour(
        factors=letters.factors, saves=tuple((slot, slot) for slot in range(count))
    )


def _top_k(equation: Equation) -> Behaviour:
    letters = FactorBuilder(equation)
    rank = len(equation.inputs[0])
    along = equation.params.get("axis", equation.params.get("reduction_dimension", -1))
    along %= rank
    for dim in range(rank):
        if dim == along:
            letters.require_whole((0, dim))
            letters.link((1, dim), (2, dim))
        else:
            letters.link((0, dim), (1, dim), (2, dim))
    return Behaviour(factors=letters.factors, saves=((2, 0),))


def _reduce_window(equation: Equation) -> Behaviour:
    """Returns the behaviour of pooling; dimensions with windows of size 1 pass."""
    letters = FactorBuilder(equation)
    windows, strides, padding, dilation, _ = pooled(equation)
    result = len(equation.inputs)
    for dim in range(len(equation.inputs[0])):
        unchanged = tuple(padding[dim]) == (0, 0) and dilation[dim] == 1
        if unchanged and windows[dim] == strides[dim] == 1:
            letters.link((0, dim), (result, dim))
        else:
            letters.link((0, dim), kind="halo")
            letters.link((result, dim), kind="halo")
    linear = equation.name == "reduce_window_sum"
    return Behaviour(
        factors=letters.factors,
        saves=() if linear else ((0, 0), (result, 0)),
        windows=windows_of_pooling(equation),
    )


def _batched(last: int) -> Rule:
    """Returns the rule for linear algebra on the last dimensions; others pass."""

    def rule(equation: Equation) -> Behaviour:
        letters = FactorBuilder(equation)
        slots = range(len(equation.inputs) + len(equation.outputs))
        front = len(equation.inputs[0]) - last
        for dim in range(front):
            size = equation.inputs[0][dim]
            letters.link(
                *(
                    (slot, dim)
                    for slot in slots
                    if len(equation.shape(slot)) > dim
                    and equation.shape(slot)[dim] == size
                )
            )
        letters.each_whole(
            (slot, dim)
            for slot in slots
            for dim in range(front, len(equation.shape(slot)))
        )
        return Behaviour(
            factors=letters.factors,
            saves=tuple(
                (slot, w) for slot in slots for w in range(len(equation.inputs))
            ),
        )

    return rule


def _fft(equation: Equation) -> Behaviour:
    rule = _batched(len(equation.params["fft_lengths"]))
    return Behaviour(factors=rule(equation).factors)


REDUCTION_RULES: Final[dict[str, Rule]] = {
    **dict.fromkeys(("reduce_sum", "reduce_xor"), _reduction()),
    **dict.fromkeys(("reduce_max", "reduce_min"), _reduction((0, 0), (1, 0))),
    "reduce_prod": _reduction((0, 0), (1, 0)),
    **dict.fromkeys(
        ("reduce_and", "reduce_or", "argmax", "argmin"), _reduction(flat=True)
    ),
    "psum": _over_places(),
    **dict.fromkeys(("pmax", "pmin"), _over_places((0, 0), (1, 0))),
    "reduce": _general_reduce,
    "cumsum": _along(),
    **dict.fromkeys(
        ("cumprod", "cummax", "cummin", "cumlogsumexp"), _along((0, 0), (1, 0))
    ),
    "sort": _sort,
    **dict.fromkeys(("top_k", "approx_top_k"), _top_k),
    **dict.fromkeys(
        (
            "reduce_window",
            "reduce_window_sum",
            "reduce_window_max",
            "reduce_window_min",
        ),
        _reduce_window,
    ),
    **dict.fromkeys(
        ("cholesky", "qr", "lu", "eigh", "svd", "triangular_solve"), _batched(2)
    ),
    "fft": _fft,
}


RULES: Final[dict[str, Rule]] = {
    **ELEMENTWISE_RULES,
    **SHAPE_RULES,
    **REDUCTION_RULES,
    **PRODUCT_RULES,
}


def behaviour(equation: Equation) -> Behaviour:
    """Returns an equation's behaviour; without a rule, dimensions stay unsharded.

    Args:
        equation: Name and parameters of the primitive, and shapes.
    """
    return RULES.get(equation.name, unknown)(equation)
