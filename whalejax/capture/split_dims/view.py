"""A value some of whose dimensions are kept in parts, and access to it.

It is separate from the runner and the rules because both make and read views.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jax import lax


Shape = tuple[int, ...]
Cuts = Mapping[int, Shape]
"""Sizes of the parts of each cut dimension, major first."""


@dataclass(frozen=True, slots=True)
class View:
    """A value with some of its dimensions cut.

    Attributes:
        value: Array, with one dimension for each part of a cut one.
        shape: Shape in the program.
        cuts: Cuts of the dimensions of ``shape``.
    """

    value: Any
    shape: Shape
    cuts: Cuts

    @property
    def flat(self) -> Any:
        """Array in the program's own shape."""
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
        """Returns this stack as a loop's body sees one slice; its value is unused."""
        return View(None, self.shape[1:], {d - 1: c for d, c in self.cuts.items()})

    def outside(self, stack: Any) -> View:
        """Returns a stack of such values, one for each turn of a loop."""
        cuts = {d + 1: c for d, c in self.cuts.items()}
        return View(stack, (stack.shape[0], *self.shape), cuts)


@dataclass(frozen=True, slots=True)
class BroadcastView:
    """A value that is repeated along some dimensions, as one array.

    Attributes:
        value: Array with the repeats.
        operand: Value that is repeated.
        dims: For each of its dimensions, that of ``value``.
    """

    value: Any
    operand: Any
    dims: Shape

    def cut(self, cuts: Cuts) -> Any:
        """Returns the array with cut dimensions; repeats the operand by parts."""
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
    """Returns a shape with cut dimensions in parts; size 1 becomes ones."""
    result: list[int] = []
    for dim, size in enumerate(shape):
        parts = cuts.get(dim, (size,))
        result += (1,) * len(parts) if size == 1 else parts
    return tuple(result)


def recut(value: Any, shape: Shape, cuts: Cuts) -> View:
    """Returns an array as a view with these cuts."""
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
    """Returns the pattern of a value for ``like``."""
    if not isinstance(value, View):
        return None
    return View(None, value.shape, value.cuts)


def like(value: Any, pattern: Any) -> Any:
    """Returns an array as a view with a pattern's cuts."""
    if not isinstance(pattern, View):
        return value
    return View(value, pattern.shape, pattern.cuts)
