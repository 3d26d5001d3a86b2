"""Values with some dimensions cut into parts, and rules that keep the parts separate.

Each rule receives an equation and its operands, some of which are views. It returns the
results, or None if it cannot keep the parts. Then the equation reads the original
values.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax.numpy as jnp
import numpy as np
from jax import lax

from whalejax import _compat
from whalejax.capture.rules.rule_table import SAME_SHAPE
from whalejax.planner.model.reshape_factors import groups


Shape = tuple[int, ...]
Cuts = Mapping[int, Shape]
"""Sizes of the parts of each cut dimension, major first."""


@dataclass(frozen=True, slots=True)
class View:
    """A value with some of its dimensions cut.

    Attributes:
        value: Array in which each part of a cut dimension is a dimension.
        shape: Shape in the program.
        cuts: Cuts of the dimensions of ``shape``.
    """

    value: Any
    shape: Shape
    cuts: Cuts

    @property
    def flat(self) -> Any:
        """Array in the program's own shape, without cuts."""
        return lax.reshape(self.value, self.shape)

    @property
    def places(self) -> list[Shape]:
        """Dimensions of ``value`` for each dimension of ``shape``."""
        places: list[Shape] = []
        first = 0
        for dim in range(len(self.shape)):
            count = len(self.cuts.get(dim, (1,)))
            places.append(tuple(range(first, first + count)))
            first += count
        return places

    def slice_view(self) -> View:
        """Returns one slice of this stack without a value, as a loop's body sees it."""
        return View(None, self.shape[1:], {d - 1: c for d, c in self.cuts.items()})

    def outside(self, stack: Any) -> View:
        """Returns a stack of such values, one for each iteration of a loop."""
        cuts = {d + 1: c for d, c in self.cuts.items()}
        return View(stack, (stack.shape[0], *self.shape), cuts)


@dataclass(frozen=True, slots=True)
class BroadcastView:
    """A value that is repeated along some dimensions, as one array.

    Attributes:
        value: Array with the repeats.
        operand: Value that is repeated.
        dims: For each dimension of the operand, the dimension of ``value``.
    """

    value: Any
    operand: Any
    dims: Shape

    def cut(self, cuts: Cuts) -> Any:
        """Returns the array with cut dimensions, made by repeating the cut operand."""
        shape = tuple(self.value.shape)
        target = View(None, shape, cuts)
        given = {d: size for d, size in zip(self.dims, self.operand.shape, strict=True)}
        long = {d: c for d, c in cuts.items() if given.get(d, 1) > 1}
        small = {i: long[d] for i, d in enumerate(self.dims) if d in long}
        operand = self.operand
        if small:
            operand = lax.reshape(operand, expanded(operand.shape, small))
        places = [
            place
            for d in self.dims
            for place in (target.places[d] if d in long else target.places[d][:1])
        ]
        return lax.broadcast_in_dim(operand, expanded(shape, cuts), places)


def expanded(shape: Shape, cuts: Cuts) -> Shape:
    """Returns a shape with cut dimensions in parts; a size of 1 becomes parts of 1."""
    result: list[int] = []
    for dim, size in enumerate(shape):
        parts = cuts.get(dim, (size,))
        result += (1,) * len(parts) if size == 1 else parts
    return tuple(result)


def recut(value: Any, shape: Shape, cuts: Cuts) -> View:
    """Returns an array as a view with the given cuts."""
    if isinstance(value, View) and value.cuts == cuts:
        return value
    if isinstance(value, BroadcastView):
        return View(value.cut(cuts), shape, cuts)
    return View(lax.reshape(array_of(value), expanded(shape, cuts)), shape, cuts)


def flat_of(value: Any) -> Any:
    """Returns a value's array in the program's own shape."""
    if isinstance(value, BroadcastView):
        return value.value
    return value.flat if isinstance(value, View) else value


def array_of(value: Any) -> Any:
    """Returns a value's array as stored."""
    return value.value if isinstance(value, View | BroadcastView) else value


def pattern_of(value: Any) -> Any:
    """Returns the cuts of a value in the form that ``like`` reads."""
    if not isinstance(value, View):
        return None
    return View(None, value.shape, value.cuts)


def like(value: Any, pattern: Any) -> Any:
    """Returns an array as a view with the cuts of another value."""
    if not isinstance(pattern, View):
        return value
    return View(value, pattern.shape, pattern.cuts)


Rule = Callable[[Any, list[Any]], "list[Any] | None"]


def _views(operands: Sequence[Any]) -> list[View]:
    return [v for v in operands if isinstance(v, View)]


def _view(value: Any) -> View:
    if isinstance(value, View):
        return value
    return View(flat_of(value), tuple(np.shape(flat_of(value))), {})


def _viewed(value: Any, shape: Shape, cuts: Cuts) -> Any:
    return View(value, shape, cuts) if cuts else value


def _shape_of(value: Any) -> Shape:
    return value.shape if isinstance(value, View) else tuple(np.shape(flat_of(value)))


def _together(operands: Sequence[Any]) -> dict[int, Shape] | None:
    cuts: dict[int, Shape] = {}
    for view in _views(operands):
        if any(cuts.get(d, c) != c for d, c in view.cuts.items()):
            return None
        cuts.update(view.cuts)
    return cuts


def spread(equation: Any, operands: list[Any]) -> list[Any] | None:
    """Evaluates a broadcast, and keeps its operand; None for other equations."""
    if equation.primitive.name != "broadcast_in_dim" or len(operands) != 1:
        return None
    operand = flat_of(operands[0])
    (value,) = _compat.bind(equation, [operand])
    dims = tuple(equation.params["broadcast_dimensions"])
    return [BroadcastView(value, jnp.asarray(operand, value.dtype), dims)]


def merge_dims(equation: Any, operands: list[Any]) -> list[Any] | None:
    """Evaluates a reshape that keeps merged dimensions separate; None for others."""
    if equation.primitive.name not in ("reshape", "squeeze"):
        return None  # Another operation, though capture reads it as part of a reshape.
    return _regrouped(equation, [_view(operands[0])], merges=True)


def _elementwise(equation: Any, operands: list[Any]) -> list[Any] | None:
    out = tuple(equation.outvars[0].aval.shape)
    cuts = _together(operands)
    if cuts is None or any(len(_shape_of(v)) not in (0, len(out)) for v in operands):
        return None
    arrays = [
        recut(value, shape, cuts).value if shape else flat_of(value)
        for value, shape in ((v, _shape_of(v)) for v in operands)
    ]
    (result,) = _compat.bind(equation, arrays)
    return [View(result, out, cuts)]


def _dot_general(equation: Any, operands: list[Any]) -> list[Any] | None:
    inside, batch = equation.params["dimension_numbers"]
    left, right = (_view(v) for v in operands)
    for a, b in (*zip(*inside, strict=True), *zip(*batch, strict=True)):
        cut = left.cuts.get(a) or right.cuts.get(b)
        if cut is not None:
            left = recut(left, left.shape, {**left.cuts, a: cut})
            right = recut(right, right.shape, {**right.cuts, b: cut})
    numbers = tuple(
        tuple(
            tuple(place for d in dims for place in side.places[d])
            for side, dims in zip((left, right), pair, strict=True)
        )
        for pair in (inside, batch)
    )
    (result,) = _compat.bind(
        equation, [left.value, right.value], dimension_numbers=numbers
    )
    free = [
        (side, d)
        for side, *taken in zip((left, right), inside, batch, strict=True)
        for d in range(len(side.shape))
        if d not in itertools.chain(*taken)
    ]
    sources = [*((left, d) for d in batch[0]), *free]
    cuts = {i: s.cuts[d] for i, (s, d) in enumerate(sources) if d in s.cuts}
    return [_viewed(result, tuple(equation.outvars[0].aval.shape), cuts)]


def _broadcast(equation: Any, operands: list[Any]) -> list[Any] | None:
    if len(operands) != 1:
        return None
    (view,) = operands
    shape, onto = equation.params["shape"], equation.params["broadcast_dimensions"]
    cuts = {onto[d]: c for d, c in view.cuts.items()}
    target = View(None, tuple(shape), cuts)
    dims = [place for d in range(len(view.shape)) for place in target.places[onto[d]]]
    value = lax.broadcast_in_dim(view.value, expanded(target.shape, cuts), dims)
    return [View(value, target.shape, cuts)]


def _transpose(equation: Any, operands: list[Any]) -> list[Any]:
    (view,) = operands
    order = equation.params["permutation"]
    places = view.places
    value = lax.transpose(view.value, [p for d in order for p in places[d]])
    shape = tuple(view.shape[d] for d in order)
    cuts = {new: view.cuts[d] for new, d in enumerate(order) if d in view.cuts}
    return [View(value, shape, cuts)]


def _reshape(equation: Any, operands: list[Any]) -> list[Any] | None:
    turned = equation.params.get("dimensions") is not None
    return None if turned else _regrouped(equation, operands)


def _regrouped(
    equation: Any, operands: list[Any], *, merges: bool = False
) -> list[Any]:
    """Evaluates any reshape; a dimension that was cut stays in parts.

    With ``merges``, merged dimensions stay separate too.
    """
    (view,) = operands
    shape = tuple(equation.outvars[0].aval.shape)
    owner = [d for d, places in enumerate(view.places) for _ in places]
    before = tuple(view.value.shape)
    cuts = {}
    for ins, outs in groups(before, shape):
        one = len({owner[i] for i in ins}) == 1
        if len(outs) == 1 and len(ins) > 1 and (one or merges):
            cuts[outs[0]] = tuple(before[i] for i in ins)
    value = lax.reshape(view.value, expanded(shape, cuts))
    return [_viewed(value, shape, cuts)]


def _split(equation: Any, operands: list[Any]) -> list[Any] | None:
    (view,) = operands
    axis, sizes = equation.params["axis"], equation.params["sizes"]
    place = view.places[axis][0]
    if axis not in view.cuts:
        values = lax.split(view.value, sizes, axis=place)
        shapes = [_with(view.shape, axis, size) for size in sizes]
        return [View(v, s, view.cuts) for v, s in zip(values, shapes, strict=True)]
    count, *rest = view.cuts[axis]
    if len(sizes) != count or len(set(sizes)) > 1:
        return None
    values = lax.split(view.value, (1,) * count, axis=place)
    cuts = {d: c for d, c in view.cuts.items() if d != axis}
    if len(rest) > 1:
        cuts[axis] = tuple(rest)
    shape = _with(view.shape, axis, sizes[0])
    return [_viewed(lax.squeeze(v, (place,)), shape, cuts) for v in values]


def _slice(equation: Any, operands: list[Any]) -> list[Any] | None:
    (view,) = operands
    if any(step != 1 for step in equation.params["strides"] or ()):
        return None
    starts: list[int] = []
    limits: list[int] = []
    cuts: dict[int, Shape] = {}
    bounds = zip(
        equation.params["start_indices"], equation.params["limit_indices"], strict=True
    )
    for dim, (start, limit) in enumerate(bounds):
        _, *rest = view.cuts.get(dim, (1,))
        part = math.prod(rest)
        if start % part or limit % part:
            return None
        starts += [start // part, *(0 for _ in rest)]
        limits += [limit // part, *rest]
        left = ((limit - start) // part, *rest)
        left = left[1:] if left[0] == 1 else left
        if dim in view.cuts and len(left) > 1:
            cuts[dim] = left
    value = lax.slice(view.value, starts, limits)
    shape = tuple(equation.outvars[0].aval.shape)
    return [_viewed(lax.reshape(value, expanded(shape, cuts)), shape, cuts)]


def _reduce(equation: Any, operands: list[Any]) -> list[Any] | None:
    (view,) = operands
    axes = tuple(equation.params["axes"])
    arg = equation.primitive.name.startswith("arg")
    if arg and any(d in view.cuts for d in axes):
        return None
    places = tuple(place for d in axes for place in view.places[d])
    (result,) = _compat.bind(equation, [view.value], axes=places)
    kept = [d for d in range(len(view.shape)) if d not in axes]
    cuts = {i: view.cuts[d] for i, d in enumerate(kept) if d in view.cuts}
    return [_viewed(result, tuple(equation.outvars[0].aval.shape), cuts)]


def _along(name: str) -> Rule:
    def rule(equation: Any, operands: list[Any]) -> list[Any] | None:
        cuts = _together(operands)
        along = equation.params[name]
        if cuts is None or along in cuts:
            return None
        views = [recut(v, _shape_of(v), cuts) for v in operands]
        place = views[0].places[along][0]
        results = _compat.bind(equation, [v.value for v in views], **{name: place})
        shapes = [tuple(v.aval.shape) for v in equation.outvars]
        return [View(r, s, cuts) for r, s in zip(results, shapes, strict=True)]

    return rule


def _with(shape: Shape, dim: int, size: int) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])


RULES: Final[dict[str, Rule]] = {
    **dict.fromkeys(SAME_SHAPE, _elementwise),
    "dot_general": _dot_general,
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "reshape": _reshape,
    "squeeze": _regrouped,
    "slice": _slice,
    "split": _split,
    **dict.fromkeys(
        "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax "
        "argmin".split(),
        _reduce,
    ),
    **dict.fromkeys(
        "cumsum cumprod cummax cummin cumlogsumexp".split(), _along("axis")
    ),
    "sort": _along("dimension"),
    "concatenate": _along("dimension"),
}
