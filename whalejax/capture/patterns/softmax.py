"""Finds a softmax by its equations, and moves factors of its result past a product.

Implementations of softmax differ in where they subtract the maximum, cast and
transpose. All divide an exponential by its sum. A mask of heads multiplies the result
of the softmax, so that attention could not be computed in blocks. But a factor that is
equal for all keys commutes with the sum over keys. It can multiply the output of the
product instead. The same holds for several factors, and for divisors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from jax import lax

from whalejax import _compat
from whalejax.capture.patterns.blockwise import Tags, operand_tags
from whalejax.jaxpr import rebuild


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
        maker: Equation that makes each variable.

    Returns:
        The softmax; a text that says why its result is read only after changes; or None
        without a softmax.
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
            "by different factors for different keys"
            if changed
            else None
        )
    return Softmax(
        source=behind[0], axis=behind[1], tags=tags, dtype=weights.aval.dtype
    )


def _changed(equation: Any, maker: Mapping[Any, Any]) -> bool:
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
    """Returns operand and dimension of the softmax that a division ends, or None."""
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
    """Whether a value is equal for a whole row, as the maximum of the row is.

    Subtracting such a value from the scores does not change the softmax.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Factor:
    atom: Any
    tags: Tags
    divides: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _ScaledWeights:
    """Attention weights and their factors.

    Attributes:
        weights: Variable of the weights.
        factors: Factors in order of use.
        order: For each dimension of the scaled weights, the dimension of the weights.
    """

    weights: Any
    factors: tuple[_Factor, ...]
    order: tuple[int, ...]


def rescaled(body: Any) -> list[rebuild.EquationReplacement]:
    """Returns replacements of products that read scaled weights.

    Each reads the unscaled weights, and scales its output instead.

    Args:
        body: Open jaxpr, without calls that could be inlined.
    """
    chains = _Chains({v: e for e in body.eqns for v in e.outvars})
    result = []
    for equation in body.eqns:
        if equation.primitive.name == "dot_general":
            calls = (_instead(equation, side, chains) for side in (0, 1))
            result += [call for call in calls if call is not None][:1]
    return result


def holds_rescaled(jaxpr: Any) -> bool:
    """Returns whether any product of a program reads scaled weights."""
    body = _compat.open_jaxpr(jaxpr)[0]
    return bool(rescaled(body)) or any(
        holds_rescaled(inner) for e in body.eqns for inner in _compat.inner_jaxprs(e)
    )


def _instead(
    product: Any, side: int, chains: _Chains
) -> rebuild.EquationReplacement | None:
    scaled = chains.behind(product.invars[side])
    if scaled is None or not scaled.factors:
        return None
    places = dict(zip(scaled.order, _output_places(product, side), strict=True))
    wheres = [
        [
            (places[tag], dim)
            for dim, (tag, size) in enumerate(zip(f.tags, _shape(f.atom), strict=True))
            if tag is not None and size > 1
        ]
        for f in scaled.factors
    ]
    if any(place is None for where in wheres for place, _ in where):
        return None
    weights, values = product.invars[side], product.invars[1 - side]
    given = [f.atom for f in scaled.factors if not _compat.is_literal(f.atom)]

    def run(*operands: Any) -> list[Any]:
        raw, other, *rest = operands
        one = lax.transpose(raw, scaled.order).astype(weights.aval.dtype)
        pair = (one, other) if side == 0 else (other, one)
        (result,) = _compat.bind(product, pair)
        read = iter(rest)
        for factor, where in zip(scaled.factors, wheres, strict=True):
            atom = factor.atom
            value = atom.val if _compat.is_literal(atom) else next(read)
            more = _spread(value, where, result)
            result = result / more if factor.divides else result * more
        return [result]

    return rebuild.EquationReplacement(
        inputs=(scaled.weights, values, *given),
        outputs=tuple(product.outvars),
        function=run,
        equation=product,
    )


def _shape(atom: Any) -> tuple[int, ...]:
    return () if _compat.is_literal(atom) else tuple(atom.aval.shape)


def _output_places(product: Any, side: int) -> list[int | None]:
    """Returns the output dimension of each operand dimension; None if summed over."""
    inside, batch = product.params["dimension_numbers"]
    ranks = [len(atom.aval.shape) for atom in product.invars]
    own = [
        [d for d in range(rank) if d not in (*inside[n], *batch[n])]
        for n, rank in enumerate(ranks)
    ]
    before = len(batch[0]) + (len(own[0]) if side == 1 else 0)
    output_places: list[int | None] = [None] * ranks[side]
    for place, dim in enumerate(batch[side]):
        output_places[dim] = place
    for place, dim in enumerate(own[side]):
        output_places[dim] = before + place
    return output_places


def _spread(factor: Any, places: Sequence[tuple[Any, int]], like: Any) -> Any:
    """Broadcasts a factor; ``places`` pairs output dimensions with the factor's own."""
    factor = lax.convert_element_type(factor, like.dtype)
    order = sorted(places)
    sizes = [np.shape(factor)[d] for _, d in places]
    flat = lax.reshape(factor, sizes)
    flat = lax.transpose(flat, [places.index(pair) for pair in order])
    return lax.broadcast_in_dim(flat, like.shape, [place for place, _ in order])


class _Chains:
    def __init__(self, maker: Mapping[Any, Any]) -> None:
        self.maker = maker
        self._known: dict[Any, _ScaledWeights | None] = {}

    def behind(self, atom: Any) -> _ScaledWeights | None:
        """Returns the weights and factors behind a value's transposes and casts."""
        if _compat.is_literal(atom):
            return None
        if atom not in self._known:
            self._known[atom] = self._behind(atom)
        return self._known[atom]

    def _behind(self, variable: Any) -> _ScaledWeights | None:
        if isinstance(softmax_behind(variable, self.maker), Softmax):
            dims = range(len(variable.aval.shape))
            return _ScaledWeights(weights=variable, factors=(), order=tuple(dims))
        equation = self.maker.get(variable)
        if equation is None:
            return None
        name = equation.primitive.name
        if name in {*CASTS, "transpose"}:
            behind = self.behind(equation.invars[0])
            if behind is None or name != "transpose":
                return behind
            turned = equation.params["permutation"]
            return replace(behind, order=tuple(behind.order[d] for d in turned))
        places = {"mul": (0, 1), "dot_general": (0, 1), "div": (0,)}.get(name, ())
        either = (self._scale_through(equation, place) for place in places)
        return next((behind for behind in either if behind is not None), None)

    def _scale_through(self, equation: Any, place: int) -> _ScaledWeights | None:
        """Returns the weights of an operand, with the other operand as a factor."""
        lying = _factors(equation, place)
        result = None if lying is None else self.behind(equation.invars[place])
        if lying is None or result is None:
            return None
        own, tags = lying
        atom, tags = _narrowest(equation.invars[1 - place], tags, self.maker)
        factor = _Factor(
            atom=atom,
            tags=tuple(None if t is None else result.order[t] for t in tags),
            divides=equation.primitive.name == "div",
        )
        return _ScaledWeights(
            weights=result.weights,
            factors=(*result.factors, factor),
            order=tuple(result.order[d] for d in own),
        )


def _factors(equation: Any, place: int) -> tuple[tuple[int, ...], Tags] | None:
    """Returns how an elementwise product combines the dimensions of weights and factor.

    The first tuple has the weights' dimension of each result dimension, the second that
    of each factor dimension. Returns None for other equations.
    """
    weights, factor = equation.invars[place], equation.invars[1 - place]
    if _compat.is_literal(weights):
        return None
    shape = _shape(factor)
    if equation.primitive.name in ("mul", "div"):
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
    while not _compat.is_literal(atom):
        equation = maker.get(atom)
        if equation is None or equation.primitive.name not in CASTS | SPREADS:
            break
        result = operand_tags(equation, tags)
        if result is None:
            break
        (atom,) = equation.invars
        tags = result[0] or ()
    return atom, tags
