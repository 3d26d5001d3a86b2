"""Rules for elementwise operations.

The rules find how a result grows with its operands. A sum over the samples stays a sum
only under linear operations. A value that is proportional to a power of the number of
samples stays so only under homogeneous operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from whalejax import _compat
from whalejax.capture.separability.alignment import align_dims
from whalejax.capture.separability.values import (
    SIZE,
    CoupledError,
    Dependence,
    Dims,
    Narrow,
    OneHot,
    PairedEquation,
    Rule,
    Value,
    combined_kind,
    is_one,
    number,
    product_ratio,
    same_ratio,
)


_LINEAR: Final = (
    "add add_any sub neg copy copy_p name real imag conj complex "
    "sharding_constraint layout_constraint with_memory_space_constraint reshard pvary "
    "stop_gradient"
).split()
_DEGREES: Final[dict[str, float]] = {
    "abs": 1,
    "max": 1,
    "min": 1,
    "clamp": 1,
    "sqrt": 0.5,
    "rsqrt": -0.5,
    "cbrt": 1 / 3,
    "square": 2,
    "sign": 0,
    "eq": 0,
    "ne": 0,
    "lt": 0,
    "le": 0,
    "gt": 0,
    "ge": 0,
    "atan2": 0,
}
"""Degree d of homogeneity: operands multiplied by f > 0 multiply the result by f**d."""

_OTHERS: Final = (
    "log log1p log2 one_minus_square sin cos tan asin acos atan sinh cosh tanh asinh "
    "acosh atanh erf erfc erf_inv lgamma digamma bessel_i0e bessel_i1e exp exp2 expm1 "
    "logistic pow rem igamma igammac igamma_grad_a random_gamma_grad polygamma zeta "
    "regularized_incomplete_beta eq_to le_to lt_to and or xor not shift_left "
    "shift_right_logical shift_right_arithmetic population_count clz floor ceil round "
    "is_finite nextafter mulhi bitcast_convert_type"
).split()


def result_dims(equation: PairedEquation, values: Sequence[Value]) -> Dims:
    """Returns the dimensions of an elementwise result; operands may be scalars."""
    rank = len(equation.shapes()[0])
    dims = [v.dims for v in values if len(v.dims) == rank]
    return align_dims(dims) if dims else ()


def _result(
    equation: PairedEquation,
    ratio: float | None,
    values: Sequence[Value] | None = None,
) -> list[Value]:
    values = equation.values if values is None else values
    kind, within = combined_kind(values)
    dims = result_dims(equation, values)
    return [Value(kind=kind, dims=dims, ratio=ratio, within=within)]


def _check_params(equation: PairedEquation) -> None:
    for name, value in equation.params.items():
        other = equation.whole.params[name]
        if value is not other and not callable(value) and str(value) != str(other):
            raise CoupledError(f"{name} {SIZE}")


def _linear(equation: PairedEquation) -> list[Value]:
    folded = _fold_constants(equation)
    if folded:
        return folded
    try:
        ratio = same_ratio(equation.values)
    except CoupledError:
        if _compat.is_inexact(equation.result_dtype):
            raise
        raise CoupledError(PLACE) from None
    return _result(equation, ratio)


PLACE: Final = "computes with whole numbers that count samples, or their places"


def _check_no_sums(equation: PairedEquation) -> None:
    if any(v.kind is Dependence.SUM for v in equation.values):
        raise CoupledError(f"applies {equation.name} to a sum over the samples")


def _homogeneous(equation: PairedEquation) -> list[Value]:
    folded = _fold_constants(equation)
    if folded:
        return folded
    _check_params(equation)
    _check_no_sums(equation)
    return _result(
        equation, _power(same_ratio(equation.values), _DEGREES[equation.name])
    )


def _power(ratio: float | None, degree: float) -> float | None:
    if ratio is None:
        return None if degree > 0 else 1.0
    if not ratio > 0:
        raise CoupledError(SIZE)
    return math.pow(ratio, degree)


def _integer_pow(equation: PairedEquation) -> list[Value]:
    (degree,) = equation.equal_params("y")
    if degree == 1:
        return _linear(equation)
    folded = _fold_constants(equation)
    if folded:
        return folded
    _check_no_sums(equation)
    return _result(equation, _power(equation.values[0].ratio, degree))


def _generic_rule(equation: PairedEquation) -> list[Value]:
    folded = _fold_constants(equation)
    if folded:
        return folded
    _check_params(equation)
    _check_no_sums(equation)
    if not all(is_one(v.ratio) for v in equation.values):
        raise CoupledError(f"applies {equation.name} to a value that {SIZE}")
    return _result(equation, 1.0)


def _mul(equation: PairedEquation) -> list[Value]:
    folded = _fold_constants(equation)
    if folded:
        return folded
    values = equation.values
    if sum(v.kind is Dependence.SUM for v in values) > 1:
        raise CoupledError("multiplies sums over the samples")
    return _result(equation, product_ratio(values))


def _div(equation: PairedEquation) -> list[Value]:
    folded = _fold_constants(equation)
    if folded:
        return folded
    over, under = equation.values
    if under.kind is Dependence.SUM:
        raise CoupledError("divides by a sum over the samples")
    ratio = None if over.ratio is None else over.ratio / (under.ratio or 1.0)
    if not _compat.is_inexact(equation.result_dtype):
        if over.kind is Dependence.SUM or not (is_one(ratio) and is_one(under.ratio)):
            raise CoupledError(f"rounds a quotient that {SIZE}")
    return _result(equation, ratio)


FINEST: Final = 7
"""Mantissa bits of bfloat16. A cast to fewer bits does not count as linear."""


def _convert(equation: PairedEquation) -> list[Value]:
    folded = _fold_constants(equation)
    if folded:
        return folded
    before, after = equation.dtype(0), equation.result_dtype
    exact = _compat.is_inexact(after) or not _compat.is_inexact(before)
    truth = np.dtype(after) == np.dtype(bool) != np.dtype(before)
    linear = exact and not truth and not _is_coarse(after)
    (result,) = _linear(equation) if linear else _generic_rule(equation)
    return [replace(result, fact=Narrow() if _is_widened(before, after) else None)]


def _is_coarse(dtype: Any) -> bool:
    return _compat.is_inexact(dtype) and _compat.mantissa_bits(dtype) < FINEST


def _is_unsigned(dtype: Any) -> bool:
    return not _compat.is_inexact(dtype) and np.dtype(dtype).kind == "u"


def _is_widened(before: Any, after: Any) -> bool:
    narrow = np.dtype(before) == np.bool_ or (
        _is_unsigned(before) and np.dtype(before).itemsize < 4
    )
    return narrow and _is_unsigned(after) and np.dtype(after).itemsize >= 4


def check_sum_dtype(dtype: Any) -> None:
    """Refuses sums over the samples in a dtype that cannot represent them.

    Raises:
        CoupledError: The dtype is boolean, a narrow integer, or floating-point with few
            bits, where each addition rounds.
    """
    narrow = not _compat.is_inexact(dtype) and np.dtype(dtype).itemsize < 4
    if narrow or np.dtype(dtype) == np.bool_ or _is_coarse(dtype):
        raise CoupledError(f"adds samples up in {dtype}, which holds no sum of many")


def check_unsigned_sum(equation: PairedEquation) -> None:
    """Refuses sums over the samples in unsigned dtypes if a number may wrap.

    A negative value becomes a large number, and a sum of such numbers may wrap for the
    full batch but not for a part of it.

    Raises:
        CoupledError: Numbers may wrap.
    """
    dtype = equation.result_dtype
    if not _is_unsigned(dtype):
        return
    sums = [i for i, v in enumerate(equation.values) if v.kind is Dependence.SUM]
    if equation.name in ("sub", "neg"):
        raise CoupledError(f"subtracts sums over the samples in {dtype}")
    if any(not _is_unsigned(equation.dtype(i)) for i in sums):
        raise CoupledError(f"casts a sum over the samples to {dtype}")
    added = [v for v in equation.values if v.kind is not Dependence.SUM]
    if sums or all(v.numbers or isinstance(v.fact, Narrow | OneHot) for v in added):
        return
    raise CoupledError(f"adds samples up in {dtype}, where what is below zero wraps")


def _reduce_precision(equation: PairedEquation) -> list[Value]:
    (bits,) = equation.equal_params("mantissa_bits")
    return _generic_rule(equation) if bits < FINEST else _linear(equation)


def _select(equation: PairedEquation) -> list[Value]:
    which, *cases = equation.values
    if which.kind is Dependence.SUM or not is_one(which.ratio):
        raise CoupledError("chooses by a sum over the samples")
    return _result(equation, same_ratio(cases))


def _side_by_side(equation: PairedEquation) -> list[Value]:
    return [v.plain for v in equation.values]


_FOLDS: Final[dict[str, Callable[..., Any]]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "neg": np.negative,
    "sqrt": np.sqrt,
    "log": np.log,
    "exp": np.exp,
    "pow": np.power,
    "square": np.square,
    "copy": np.asarray,
}


def _fold_constants(equation: PairedEquation) -> list[Value] | None:
    numbers = [v.numbers for v in equation.values]
    if None in numbers or not numbers:
        return None
    with np.errstate(all="ignore"):
        return _evaluate_numbers(equation, numbers)


def _evaluate_numbers(
    equation: PairedEquation, numbers: Sequence[Any]
) -> list[Value] | None:
    name, results = equation.name, []
    for trace, one in enumerate((equation.part, equation.whole)):
        given = [
            np.asarray(pair[trace]).astype(atom.aval.dtype)
            for pair, atom in zip(numbers, one.invars, strict=True)
            if pair is not None
        ]
        if name == "div" and 0 in given[1:]:
            return None
        if any(not np.issubdtype(x.dtype, np.number) for x in given):
            return None
        if name == "convert_element_type":
            dtype = one.outvars[0].aval.dtype
            results.append(given[0].astype(dtype))
        elif name == "div":
            whole = all(np.issubdtype(x.dtype, np.integer) for x in given)
            quotient = given[0] / given[1]
            results.append(
                np.trunc(quotient).astype(given[0].dtype) if whole else quotient
            )
        elif name == "integer_pow":
            results.append(np.power(given[0].astype(np.float64), one.params["y"]))
        elif name == "rsqrt":
            results.append(1 / np.sqrt(given[0]))
        elif name in _FOLDS:
            results.append(_FOLDS[name](*given))
        else:
            return None
        results[-1] = np.asarray(results[-1]).astype(one.outvars[0].aval.dtype)
    return [number(*results)]


RULES: Final[dict[str, Rule]] = {
    **dict.fromkeys(_LINEAR, _linear),
    **dict.fromkeys(_DEGREES, _homogeneous),
    **dict.fromkeys(_OTHERS, _generic_rule),
    "integer_pow": _integer_pow,
    "mul": _mul,
    "div": _div,
    "convert_element_type": _convert,
    "reduce_precision": _reduce_precision,
    "select_n": _select,
    "optimization_barrier": _side_by_side,
    "device_put": _side_by_side,
}
