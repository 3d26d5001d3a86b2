"""Attention weights times a number for each head: the values times that number instead.

A mask of heads multiplies what the softmax gives, after which nothing could be computed
in blocks. A factor that is the same for all rows and columns commutes with the product
that follows, and multiplies the values just as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import lax

from whalejax import _compat, rebuild
from whalejax.capture.blocks import Tags, operand_tags
from whalejax.capture.softmax import CASTS, SPREADS, softmax_behind


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scaled:
    """Weights and a factor.

    Attributes:
        weights, factor: variables, the second perhaps a literal.
        order: for each dimension of the scaled weights, which of the weights it is.
        tags: for each dimension of the factor, which of the weights it is.
    """

    weights: Any
    factor: Any
    order: tuple[int, ...]
    tags: Tags


def rescaled(body: Any) -> list[rebuild.Call]:
    """The products of one jaxpr that read scaled weights, with scaled values instead.

    Args:
        body: open, without calls that could be inlined.
    """
    maker = {v: e for e in body.eqns for v in e.outvars}
    found = []
    for equation in body.eqns:
        if equation.primitive.name == "dot_general":
            calls = (_instead(equation, side, maker) for side in (0, 1))
            found += [call for call in calls if call is not None][:1]
    return found


def holds_rescaled(jaxpr: Any) -> bool:
    """Whether a program has any such product."""
    body = _compat.open_jaxpr(jaxpr)[0]
    return bool(rescaled(body)) or any(
        holds_rescaled(inner) for e in body.eqns for inner in _compat.inner_jaxprs(e)
    )


def _instead(product: Any, side: int, maker: Mapping[Any, Any]) -> rebuild.Call | None:
    """A product in which the values are scaled, if the weights are."""
    scaled = _behind(product.invars[side], maker)
    if scaled is None:
        return None
    batch = product.params["dimension_numbers"][1]
    shared = dict(zip(batch[side], batch[1 - side], strict=True))
    places = {dim: shared.get(place) for place, dim in enumerate(scaled.order)}
    where = [None if tag is None else places[tag] for tag in scaled.tags]
    shape = () if _compat.is_literal(scaled.factor) else scaled.factor.aval.shape
    long = [d for d, size in enumerate(shape) if size > 1]
    if any(where[d] is None for d in long):
        return None
    weights, values = product.invars[side], product.invars[1 - side]

    def run(*operands: Any) -> list[Any]:
        raw, other, *rest = operands
        factor = rest[0] if rest else scaled.factor.val
        one = lax.transpose(raw, scaled.order).astype(weights.aval.dtype)
        more = _spread(factor, [(where[d], d) for d in long], other)
        pair = (one, other * more) if side == 0 else (other * more, one)
        return _compat.bind(product, pair)

    given = () if _compat.is_literal(scaled.factor) else (scaled.factor,)
    return rebuild.Call(
        inputs=(scaled.weights, values, *given),
        outputs=tuple(product.outvars),
        function=run,
        equation=product,
    )


def _spread(factor: Any, places: Sequence[tuple[Any, int]], like: Any) -> Any:
    """A factor in the shape of values.

    Args:
        factor: its value.
        places: for each of its dimensions above 1 that of the values, and its own.
        like: the values.
    """
    factor = lax.convert_element_type(factor, like.dtype)
    order = sorted(places)
    sizes = [np.shape(factor)[d] for _, d in places]
    flat = lax.reshape(factor, sizes)
    flat = lax.transpose(flat, [places.index(pair) for pair in order])
    return lax.broadcast_in_dim(flat, like.shape, [place for place, _ in order])


def _behind(variable: Any, maker: Mapping[Any, Any]) -> _Scaled | None:
    """The softmax and the factor behind turned or cast weights."""
    if _compat.is_literal(variable):
        return None
    order = tuple(range(len(variable.aval.shape)))
    equation = maker.get(variable)
    while equation is not None and equation.primitive.name in {*CASTS, "transpose"}:
        if equation.primitive.name == "transpose":
            order = tuple(equation.params["permutation"][d] for d in order)
        (atom,) = equation.invars
        equation = None if _compat.is_literal(atom) else maker.get(atom)
    if equation is None or equation.primitive.name not in ("mul", "dot_general"):
        return None
    for place in (0, 1):
        if _compat.is_literal(equation.invars[place]):
            continue
        found = _factors(equation, place)
        if found is None:
            continue
        own, tags = found
        weights, factor = equation.invars[place], equation.invars[1 - place]
        softmax = softmax_behind(weights, maker)
        if softmax is None or isinstance(softmax, str):
            continue
        factor, tags = _narrowest(factor, tags, maker)
        return _Scaled(
            weights=weights,
            factor=factor,
            order=tuple(own[d] for d in order),
            tags=tags,
        )
    return None


def _factors(equation: Any, place: int) -> tuple[tuple[int, ...], Tags] | None:
    """Of a product element by element: how weights and factor lie in the result.

    Args:
        equation: a multiplication, or a product that sums over nothing.
        place: of the weights among the operands.

    Returns:
        For each dimension of the result which of the weights it is, and for each of the
        factor which of the weights.
    """
    weights, factor = equation.invars[place], equation.invars[1 - place]
    shape = () if _compat.is_literal(factor) else factor.aval.shape
    if equation.primitive.name == "mul":
        if weights.aval.shape != equation.outvars[0].aval.shape:
            return None
        dims = range(len(weights.aval.shape))
        return tuple(dims), tuple(
            None if size == 1 else dim for dim, size in enumerate(shape)
        )
    inside, batch = equation.params["dimension_numbers"]
    mine, theirs = batch[place], batch[1 - place]
    if any(inside) or len(theirs) != len(shape):
        return None
    own = [d for d in range(len(weights.aval.shape)) if d not in mine]
    known = dict(zip(theirs, mine, strict=True))
    return (*mine, *own), tuple(known[d] for d in range(len(shape)))


def _narrowest(atom: Any, tags: Tags, maker: Mapping[Any, Any]) -> tuple[Any, Tags]:
    """What a factor was spread from, with its tags."""
    while not _compat.is_literal(atom):
        equation = maker.get(atom)
        if equation is None or equation.primitive.name not in CASTS | SPREADS:
            break
        found = operand_tags(equation, tags)
        if found is None:
            break
        (atom,) = equation.invars
        tags = found[0] or ()
    return atom, tags
