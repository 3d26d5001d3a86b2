"""Finds a softmax by the equations that it is made of.

Functions called softmax differ in where they subtract the maximum, change the type and
turn dimensions; what is common to them is a division of an exponential by its sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from whalejax import _compat


@dataclass(frozen=True, slots=True, kw_only=True)
class Softmax:
    """A softmax: what it is given, over which dimension, and how the result lies."""

    source: Any
    axis: int
    tags: tuple[int, ...]
    dtype: Any


def softmax_behind(weights: Any, maker: Mapping[Any, Any]) -> Softmax | str | None:
    """The softmax whose result a product reads, perhaps turned or in another type."""
    if _compat.is_literal(weights):
        return None
    tags = tuple(range(len(weights.aval.shape)))
    variable = weights
    while True:
        equation: Any = None if _compat.is_literal(variable) else maker.get(variable)
        if equation is None:
            break
        name = equation.primitive.name
        if name in ("convert_element_type", "copy", "name"):
            variable = equation.invars[0]
        elif name == "transpose":
            order = equation.params["permutation"]
            tags = tuple(order[t] for t in tags)
            variable = equation.invars[0]
        elif name in ("select_n", "mul") and any(
            _softmax(maker.get(a), maker)
            for a in equation.invars
            if not _compat.is_literal(a)
        ):
            return (
                "its weights are changed after the softmax (dropout, or a second "
                "mask), differently for each row and column"
            )
        else:
            break
    found = _softmax(equation, maker)
    if found is None:
        return None
    return Softmax(source=found[0], axis=found[1], tags=tags, dtype=weights.aval.dtype)


_PASSES: Final = frozenset(
    "convert_element_type copy stop_gradient broadcast_in_dim reshape transpose "
    "squeeze expand_dims".split()
)


def _behind(variable: Any, maker: Mapping[Any, Any]) -> Any:
    """The equation behind changes of type and added dimensions."""
    while not _compat.is_literal(variable):
        equation = maker.get(variable)
        if equation is None:
            return None
        name = equation.primitive.name
        bounded = name == "max" and any(map(_compat.is_literal, equation.invars))
        if name not in _PASSES and not bounded:
            return equation
        others = [a for a in equation.invars if not _compat.is_literal(a)]
        if len(others) != 1:
            return equation
        (variable,) = others
    return None


def _softmax(equation: Any, maker: Mapping[Any, Any]) -> tuple[Any, int] | None:
    """What a softmax is given and over which dimension, if a division ends one."""
    if equation is None or equation.primitive.name != "div":
        return None
    above, below = equation.invars
    total = _behind(below, maker)
    raised = _behind(above, maker)
    if total is None or total.primitive.name != "reduce_sum":
        return None
    if raised is None or raised.primitive.name != "exp":
        return None
    if _behind(total.invars[0], maker) is not raised:
        return None
    axes = tuple(total.params["axes"])
    shifted = _behind(raised.invars[0], maker)
    if len(axes) != 1 or shifted is None or shifted.primitive.name != "sub":
        return None
    source, most = shifted.invars
    peak = _behind(most, maker)
    if peak is None or peak.primitive.name != "reduce_max":
        return None
    (base, order), (other, turned) = (
        _turned(v, maker) for v in (source, peak.invars[0])
    )
    ways = {order[axes[0]]}, {turned[axis] for axis in peak.params["axes"]}
    return (source, int(axes[0])) if base is other and ways[0] == ways[1] else None


def _turned(variable: Any, maker: Mapping[Any, Any]) -> tuple[Any, list[int]]:
    """The variable behind transposes, and which of its dimensions each one is."""
    order = list(range(len(variable.aval.shape)))
    while not _compat.is_literal(variable):
        equation = maker.get(variable)
        if equation is None or equation.primitive.name != "transpose":
            break
        order = [equation.params["permutation"][dim] for dim in order]
        (variable,) = equation.invars
    return variable, order
