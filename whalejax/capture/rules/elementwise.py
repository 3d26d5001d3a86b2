"""Rules for elementwise primitives: one pass, every dimension passes through.

Most primitives are elementwise, so this is a table of names and the slots that the
backward pass reads. ``"x"`` is the operand and ``"y"`` the result.
"""

from __future__ import annotations

from typing import Final

from whalejax.capture.rules.behaviour import Behaviour, Equation, FactorBuilder, Rule
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
    """Links every dimension of the result with equal ones of the operands.

    Operands may be scalars, or have size 1 where the result has more.
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
    """Returns the behaviour for a derivative of zero, or a non-real result."""
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
    """Returns the behaviour of an operation whose result i is operand i, unchanged."""
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


RULES: Final[dict[str, Rule]] = {
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


SAME_SHAPE: Final = frozenset(RULES) - frozenset(
    (
        "optimization_barrier device_put bitcast_convert_type sharding_constraint "
        "layout_constraint with_memory_space_constraint reshard"
    ).split()
)
"""Primitives with one result whose operands have its shape or are scalars, and whose
parameters refer to no dimension."""
