"""Finds a softmax by its equations.

Functions called softmax differ in where they subtract the maximum, cast and transpose;
all divide an exponential by its sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from whalejax import _compat
from whalejax.capture.patterns.blockwise import Tags, operand_tags


@dataclass(frozen=True, slots=True, kw_only=True)
class Softmax:
    """A softmax: its operand, its axis, and the order of the result's dimensions."""

    source: Any
    axis: int
    tags: tuple[int, ...]
    dtype: Any


def softmax_behind(weights: Any, maker: Mapping[Any, Any]) -> Softmax | str | None:
    """Returns the softmax whose result a product reads, perhaps transposed or cast.

    Args:
        weights: Operand of the product.
        maker: The equation that makes each variable.

    Returns:
        The softmax; why its result is not read unchanged; or None for no softmax.
    """
    if _compat.is_literal(weights):
        return None
    tags = tuple(range(len(weights.aval.shape)))
    equation = _cast_from(weights, maker)
    while equation is not None and equation.primitive.name == "transpose":
        order = equation.params["permutation"]
        tags = tuple(order[t] for t in tags)
        equation = _cast_from(equation.invars[0], maker)
    if equation is None:
        return None
    behind = _softmax(equation, maker)
    if behind is None:
        changed = _changed(equation, maker)
        return (
            "its weights are changed after the softmax (dropout, or a second mask), "
            "differently from key to key"
            if changed
            else None
        )
    return Softmax(
        source=behind[0], axis=behind[1], tags=tags, dtype=weights.aval.dtype
    )


def _changed(equation: Any, maker: Mapping[Any, Any]) -> bool:
    """Whether a softmax is behind factors and selections alone."""
    waiting, met = [equation], set[int]()
    while waiting:
        equation = waiting.pop()
        if equation is None or id(equation) in met:
            continue
        met.add(id(equation))
        if _softmax(equation, maker):
            return True
        if equation.primitive.name in {"select_n", "mul", "div", "transpose"}:
            waiting += (_cast_from(a, maker) for a in equation.invars)
    return False


def _cast_from(atom: Any, maker: Mapping[Any, Any]) -> Any:
    """Returns the equation before casts; None if no equation makes the value."""
    while not _compat.is_literal(atom):
        equation = maker.get(atom)
        if equation is None or equation.primitive.name not in CASTS:
            return equation
        (atom,) = equation.invars
    return None


CASTS: Final = frozenset({"convert_element_type", "copy", "name"})
"""Equations that change at most the type of a value."""


def _softmax(equation: Any, maker: Mapping[Any, Any]) -> tuple[Any, int] | None:
    """Returns the operand and dimension of the softmax that a division ends, if any."""
    if equation is None or equation.primitive.name != "div":
        return None
    above, below = equation.invars
    raised = _cast_from(above, maker)
    if raised is None or raised.primitive.name != "exp":
        return None
    dims = tuple(range(len(above.aval.shape)))
    total, rows = _spread_from(below, dims, maker)
    if total is None or total.primitive.name != "reduce_sum":
        return None
    axes = tuple(total.params["axes"])
    if len(axes) != 1 or _cast_from(total.invars[0], maker) is not raised:
        return None
    # Each row must be divided by its own sum.
    shape, own = above.aval.shape, [d for d in dims if d != axes[0]]
    if [r for r, d in zip(rows, own, strict=True) if shape[d] > 1] != [
        d for d in own if shape[d] > 1
    ]:
        return None
    shifted = _cast_from(raised.invars[0], maker)
    if shifted is None or shifted.primitive.name != "sub":
        return None
    source, most = shifted.invars
    level = _is_level(most, int(axes[0]), maker)
    return (source, int(axes[0])) if level else None


def _spread_from(atom: Any, tags: Tags, maker: Mapping[Any, Any]) -> tuple[Any, Tags]:
    """Returns the equation before added dimensions and casts, and its tags."""
    while not _compat.is_literal(atom):
        equation = maker.get(atom)
        name = "" if equation is None else equation.primitive.name
        if equation is None or name not in CASTS | SPREADS:
            return equation, tags
        result = operand_tags(equation, tags)
        if result is None or result[0] is None:
            return None, tags
        tags = result[0]
        (atom,) = equation.invars
    return None, tags


SPREADS: Final = frozenset("broadcast_in_dim reshape squeeze expand_dims".split())
"""Equations that add dimensions with equal elements, or remove them."""


def _is_level(atom: Any, axis: int, maker: Mapping[Any, Any]) -> bool:
    """Whether a value is one number for a whole row, as its maximum is.

    A softmax is the same whatever is subtracted from all scores of a row.
    """
    while not _compat.is_literal(atom):
        shape = atom.aval.shape
        if not shape or shape[axis] == 1:
            return True
        equation = maker.get(atom)
        if equation is None:
            return False
        if equation.primitive.name == "broadcast_in_dim":
            places = list(equation.params["broadcast_dimensions"])
            if axis not in places:
                return True
            before = equation.invars[0]
            return bool(before.aval.shape[places.index(axis)] == 1)
        if equation.primitive.name not in CASTS | {"stop_gradient"}:
            return False
        (atom,) = equation.invars
    return True
