"""Bounds of the values in a program of scores, for many blocks at once.

The hidden blocks of a mask are found without computing the mask. Every equation runs on
the least and the greatest values of its operands. Equations that pass values through (a
selection, a broadcast) keep bounds exactly, so a constant has equal bounds. Values from
arithmetic are rounded, and their bounds are widened accordingly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax.numpy as jnp
import numpy as np

from whalejax.capture.patterns.blockwise import ScoreNode


Interval = tuple[Any, Any]
"""Lower and upper bounds of a value, each an array over many blocks."""

ANY: Final[Interval] = (-math.inf, math.inf)

BOOL: Final[Interval] = (0.0, 1.0)


def interval(
    node: ScoreNode, known: Sequence[Interval], extents: Mapping[int, Any]
) -> Interval:
    """Returns bounds of the result of a node's equation.

    Args:
        node: Node with an equation.
        known: Bounds of the earlier nodes.
        extents: First and last index of each block, by dimension that is cut.

    Returns:
        The bounds. Without a rule for the equation they are the object ``ANY``, or
        ``BOOL`` if the result is logical.
    """
    equation = node.equation
    if equation.primitive.name == "iota":
        tag = node.tags[equation.params["dimension"]]
        extent = None if tag is None else extents.get(tag)
        return equation_interval(equation, (), extent)
    operands = [
        _bounds(atom.val) if number is None else known[number]
        for atom, number in zip(equation.invars, node.inputs, strict=True)
    ]
    return equation_interval(equation, operands)


def equation_interval(
    equation: Any, operands: Sequence[Interval], extent: Any = None
) -> Interval:
    """Returns bounds of an equation's result.

    Args:
        equation: Equation with one result.
        operands: Bounds of its operands.
        extent: First and last position of an ``iota``; None for all positions.

    Returns:
        The bounds. Without a rule for the equation they are the object ``ANY``, or
        ``BOOL`` if the result is logical.
    """
    name = equation.primitive.name
    dtype = np.dtype(equation.outvars[0].aval.dtype)
    logical = dtype.kind == "b"
    if name == "iota":
        last = equation.params["shape"][equation.params["dimension"]] - 1.0
        return _rounded((0.0, last) if extent is None else extent, dtype, exact=True)
    rule = _INTERVALS.get(name)
    turned = logical and name == "convert_element_type"
    if rule is None or turned or (name == "not" and not logical):
        return BOOL if logical else ANY
    low, high = rule(*operands)
    if name == "convert_element_type" and dtype.kind in "iu":
        low, high = np.trunc(_f(low)), np.trunc(_f(high))
    return _rounded((low, high), dtype, exact=name in _EXACT)


def _rounded(bounds: Interval, dtype: Any, *, exact: bool) -> Interval:
    """Returns bounds of numbers after they are stored in a dtype.

    Integers outside the dtype's range wrap, and floating-point numbers are rounded.
    With ``exact``, no arithmetic made the numbers, so bounds in the range stay.
    """
    low, high = _f(bounds[0]), _f(bounds[1])
    sure = ~(np.isnan(low) | np.isnan(high))
    if dtype.kind == "b":
        return np.where(sure, np.clip(low, 0, 1), 0.0), np.where(
            sure, np.clip(high, 0, 1), 1.0
        )
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        sure &= (limits.min <= low) & (high <= limits.max)
    else:
        slack = 4 * float(jnp.finfo(dtype).eps)  # type: ignore[no-untyped-call]
        with np.errstate(invalid="ignore", over="ignore"):
            kept = [
                ~np.isfinite(x) | (exact & (x.astype(dtype).astype(np.float64) == x))
                for x in (low, high)
            ]
            low = np.where(kept[0], low, low - slack * abs(low))
            high = np.where(kept[1], high, high + slack * abs(high))
    return np.where(sure, low, -math.inf), np.where(sure, high, math.inf)


def _bounds(value: Any) -> Interval:
    array = np.asarray(value)
    if array.dtype.kind not in "biufV":
        return ANY
    numbers = array.astype(np.float64)
    return float(numbers.min()), float(numbers.max())


def _products(a: Interval, b: Interval) -> Interval:
    with np.errstate(invalid="ignore"):
        ends = np.stack(np.broadcast_arrays(*(x * y for x in map(_f, a) for y in b)))
    return ends.min(axis=0), ends.max(axis=0)


def _f(number: Any) -> Any:
    return np.asarray(number, np.float64)


def _absolute(a: Interval) -> Interval:
    low, high = _f(a[0]), _f(a[1])
    across = (low <= 0) & (high >= 0)
    ends = np.minimum(abs(low), abs(high)), np.maximum(abs(low), abs(high))
    return np.where(across, 0.0, ends[0]), ends[1]


def _chosen(which: Interval, *cases: Interval) -> Interval:
    low: Any = math.inf
    high: Any = -math.inf
    for number, case in enumerate(cases):
        possible = (_f(which[0]) <= number) & (number <= _f(which[1]))
        low = np.minimum(low, np.where(possible, case[0], math.inf))
        high = np.maximum(high, np.where(possible, case[1], -math.inf))
    return low, high


def _comparison_rule(
    certain: Callable[[Interval, Interval], Any],
    possible: Callable[[Interval, Interval], Any],
) -> Callable[[Interval, Interval], Interval]:
    def rule(a: Interval, b: Interval) -> Interval:
        a, b = (_f(a[0]), _f(a[1])), (_f(b[0]), _f(b[1]))
        return _f(certain(a, b)), _f(possible(a, b))

    return rule


def _of_bits(rule: Callable[[Any, Any], Any]) -> Callable[[Interval, Interval], Any]:
    """Returns a rule for logical values; for numbers it gives infinite bounds."""

    def either(a: Interval, b: Interval) -> Interval:
        bits = [(_f(x[0]) >= 0) & (_f(x[1]) <= 1) for x in (a, b)]
        sure = bits[0] & bits[1]
        low, high = rule(_f(a[0]), _f(b[0])), rule(_f(a[1]), _f(b[1]))
        return np.where(sure, low, -math.inf), np.where(sure, high, math.inf)

    return either


_EXACT: Final = frozenset(
    "broadcast_in_dim reshape squeeze expand_dims transpose copy stop_gradient "
    "convert_element_type name select_n max min neg abs".split()
)
"""Equations whose results are elements of their operands, perhaps with another sign."""

_INTERVALS: Final[Mapping[str, Callable[..., Interval]]] = {
    **dict.fromkeys(
        "broadcast_in_dim reshape squeeze expand_dims transpose copy stop_gradient "
        "convert_element_type name".split(),
        lambda a: a,
    ),
    "add": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "sub": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "neg": lambda a: (-_f(a[1]), -_f(a[0])),
    "mul": _products,
    "max": lambda a, b: (np.maximum(a[0], b[0]), np.maximum(a[1], b[1])),
    "min": lambda a, b: (np.minimum(a[0], b[0]), np.minimum(a[1], b[1])),
    "ge": _comparison_rule(lambda a, b: a[0] >= b[1], lambda a, b: a[1] >= b[0]),
    "gt": _comparison_rule(lambda a, b: a[0] > b[1], lambda a, b: a[1] > b[0]),
    "le": _comparison_rule(lambda a, b: a[1] <= b[0], lambda a, b: a[0] <= b[1]),
    "lt": _comparison_rule(lambda a, b: a[1] < b[0], lambda a, b: a[0] < b[1]),
    "eq": _comparison_rule(
        lambda a, b: (a[0] == a[1]) & (b[0] == b[1]) & (a[0] == b[0]),
        lambda a, b: (a[0] <= b[1]) & (b[0] <= a[1]),
    ),
    "ne": _comparison_rule(
        lambda a, b: (a[1] < b[0]) | (b[1] < a[0]),
        lambda a, b: ~((a[0] == a[1]) & (b[0] == b[1]) & (a[0] == b[0])),
    ),
    "not": lambda a: (1.0 - _f(a[1]), 1.0 - _f(a[0])),
    "abs": _absolute,
    "and": _of_bits(np.minimum),
    "or": _of_bits(np.maximum),
    "select_n": _chosen,
}
