"""What a model does to attention scores before the softmax, block by block.

Scores are a product of queries and keys, scaled, capped, masked or shifted by
equations of the user's own. Here these become a small program of which any block of
rows and columns can be computed alone: positions (``iota``) are counted from where the
block begins, and what comes from outside is cut. Run on intervals instead of numbers,
the same program says which blocks a mask hides whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import jax.numpy as jnp
import numpy as np

from whalejax import _compat
from whalejax.capture.blocks import Node, Tags, computed, operand_tags


HIDDEN: Final = -1e9
"""Scores below it are masked: no other score of a row is as low."""

_HALF: Final = -1e4
"""The same where numbers end at 65,504."""


class NotScoresError(Exception):
    """The equations before a softmax are none that blocks can be computed of."""


@dataclass(slots=True)
class Scores:
    """The program from a product to the scores.

    Attributes:
        nodes: in an order in which they can be computed; the last is the scores.
        product: the node that is the product, whose tags say how its dimensions lie.
        outside: variables that come from outside, each once.
        tags: of those, one for each way in which they are read.
    """

    nodes: list[Node] = field(default_factory=list)
    product: int = -1
    outside: list[Any] = field(default_factory=list)

    @property
    def tags(self) -> list[set[Tags]]:
        """How each value from outside is read."""
        found: list[set[Tags]] = [set() for _ in self.outside]
        for node in self.nodes:
            if node.outside is not None:
                found[node.outside].add(node.tags)
        return found

    def block(
        self,
        product: Any,
        sizes: Mapping[int, int],
        offsets: Mapping[int, Any],
        outside: Callable[[int, Tags], Any],
    ) -> Any:
        """The scores of one block.

        Args:
            product: its products, laid out as the traced product is.
            sizes: of the dimensions of the scores in this block.
            offsets: where each of them begins; what is absent begins at 0.
            outside: the part of a value from outside that the block reads.
        """
        values: list[Any] = []
        for number, node in enumerate(self.nodes):
            if number == self.product:
                values.append(product)
            elif node.outside is not None:
                values.append(outside(node.outside, node.tags))
            else:
                shape = tuple(1 if t is None else sizes[t] for t in node.tags)
                values.append(computed(node, shape, values, offsets))
        return values[-1]

    def hidden(self, rows: int, columns: int, row: int, column: int) -> Any:
        """Which blocks hold masked scores alone, whatever is in the product.

        Args:
            rows, columns: how many equal blocks there are of each.
            row, column: dimensions of the scores that are cut into them.

        Returns:
            ``bool[rows, columns]``.
        """
        shape = self.nodes[-1].equation.outvars[0].aval if len(self.nodes) > 1 else None
        if shape is None:
            return np.zeros((rows, columns), bool)
        extents = {
            row: _edges(shape.shape[row], rows)[:, :, None],
            column: _edges(shape.shape[column], columns)[:, None, :],
        }
        found: list[Interval] = []
        for number, node in enumerate(self.nodes):
            if node.outside is not None:
                dtype = self.outside[node.outside].aval.dtype
                found.append(_BOOL if np.dtype(dtype).kind == "b" else ANY)
            elif number == self.product:
                found.append(ANY)
            else:
                found.append(_interval(node, found, extents))
        narrow = _compat.dtype_name(shape.dtype) == "float16"
        highest = found[-1][1] <= (_HALF if narrow else HIDDEN)
        return np.broadcast_to(highest, (rows, columns))


def _edges(length: int, count: int) -> Any:
    """First and last place of equal blocks, ``float[2, count]``."""
    first = np.arange(count) * (length // count)
    return np.array([first, first + length // count - 1], dtype=np.float64)


class Reader:
    """Reads the equations before a softmax.

    Args:
        maker: the equation that makes each variable of a jaxpr.
        trained: variables through which a gradient flows.
    """

    def __init__(self, maker: Mapping[Any, Any], trained: set[Any]) -> None:
        self.maker = maker
        self.trained = trained
        self.scores = Scores()
        self.product: Any = None
        self._known: dict[tuple[Any, Tags], int] = {}

    def read(self, variable: Any) -> Scores:
        """The program that ends in a variable.

        Raises:
            NotScoresError: it cannot be computed in blocks; the text says why.
        """
        shape = variable.aval.shape
        self._pull(variable, tuple(None if n == 1 else i for i, n in enumerate(shape)))
        if self.product is None:
            raise NotScoresError("no product of queries and keys stands before it")
        return self.scores

    def _pull(self, variable: Any, tags: Tags) -> int:
        known = self._known.get((variable, tags))
        if known is not None:
            return known
        equation: Any = self.maker.get(variable)
        name = "" if equation is None else equation.primitive.name
        if name == "dot_general" and variable in self.trained:
            node = self._product(equation, tags)
        elif equation is not None and name == "iota":
            node = Node(equation=equation, inputs=(), tags=tags)
        else:
            wanted = None
            if equation is not None and not self._stops(equation, variable):
                wanted = operand_tags(equation, tags)
            if equation is None or wanted is None:
                node = self._outside(variable, tags)
            else:
                inputs = tuple(
                    None if t is None else self._pull(atom, t)
                    for atom, t in zip(equation.invars, wanted, strict=True)
                )
                node = Node(equation=equation, inputs=inputs, tags=tags)
        self.scores.nodes.append(node)
        number = len(self.scores.nodes) - 1
        if node.equation is None and node.outside is None:
            self.scores.product = number
        self._known[variable, tags] = number
        return number

    def _stops(self, equation: Any, variable: Any) -> bool:
        """A gradient goes into an equation, and none through its result."""
        atoms = (a for a in equation.invars if not _compat.is_literal(a))
        return variable not in self.trained and any(a in self.trained for a in atoms)

    def _product(self, equation: Any, tags: Tags) -> Node:
        if self.product is not None:
            raise NotScoresError("its scores are made of more than one product")
        self.product = equation
        return Node(equation=None, inputs=(), tags=tags)

    def _outside(self, variable: Any, tags: Tags) -> Node:
        if variable in self.trained:
            raise NotScoresError(
                "its scores are shifted or scaled by a trained value, whose gradient "
                "would have to travel round the ring too"
            )
        if variable not in self.scores.outside:
            self.scores.outside.append(variable)
        number = self.scores.outside.index(variable)
        return Node(equation=None, inputs=(), tags=tags, outside=number)


Interval = tuple[Any, Any]
"""The least and the most that a value can be, for many blocks at once."""

ANY: Final[Interval] = (-math.inf, math.inf)

_BOOL: Final[Interval] = (0.0, 1.0)


def _interval(
    node: Node, known: Sequence[Interval], extents: Mapping[int, Any]
) -> Interval:
    equation = node.equation
    name = equation.primitive.name
    dtype = np.dtype(equation.outvars[0].aval.dtype)
    logical = dtype.kind == "b"
    if name == "iota":
        dim = equation.params["dimension"]
        tag, last = node.tags[dim], equation.params["shape"][dim] - 1.0
        first, last = (0.0, last) if tag is None else extents.get(tag, (0.0, last))
        return _rounded((first, last), dtype)
    operands = [
        _bounds(atom.val) if number is None else known[number]
        for atom, number in zip(equation.invars, node.inputs, strict=True)
    ]
    rule = _INTERVALS.get(name)
    turned = logical and name == "convert_element_type"
    if rule is None or turned or (name == "not" and not logical):
        return _BOOL if logical else ANY
    low, high = rule(*operands)
    if name == "convert_element_type" and dtype.kind in "iu":
        low, high = np.trunc(_f(low)), np.trunc(_f(high))
    return _rounded((low, high), dtype)


def _rounded(bounds: Interval, dtype: Any) -> Interval:
    """Bounds of what a type holds of numbers within bounds.

    Integers beyond their type wrap, and floating point rounds.
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
        with np.errstate(invalid="ignore"):
            low = np.where(np.isfinite(low), low - slack * abs(low), low)
            high = np.where(np.isfinite(high), high + slack * abs(high), high)
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


def _compared(
    certain: Callable[[Interval, Interval], Any],
    possible: Callable[[Interval, Interval], Any],
) -> Callable[[Interval, Interval], Interval]:
    def rule(a: Interval, b: Interval) -> Interval:
        a, b = (_f(a[0]), _f(a[1])), (_f(b[0]), _f(b[1]))
        return _f(certain(a, b)), _f(possible(a, b))

    return rule


def _of_bits(rule: Callable[[Any, Any], Any]) -> Callable[[Interval, Interval], Any]:
    """A rule for what is 0 or 1; of other numbers it says nothing."""

    def either(a: Interval, b: Interval) -> Interval:
        bits = [(_f(x[0]) >= 0) & (_f(x[1]) <= 1) for x in (a, b)]
        sure = bits[0] & bits[1]
        low, high = rule(_f(a[0]), _f(b[0])), rule(_f(a[1]), _f(b[1]))
        return np.where(sure, low, -math.inf), np.where(sure, high, math.inf)

    return either


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
    "ge": _compared(lambda a, b: a[0] >= b[1], lambda a, b: a[1] >= b[0]),
    "gt": _compared(lambda a, b: a[0] > b[1], lambda a, b: a[1] > b[0]),
    "le": _compared(lambda a, b: a[1] <= b[0], lambda a, b: a[0] <= b[1]),
    "lt": _compared(lambda a, b: a[1] < b[0], lambda a, b: a[0] < b[1]),
    "eq": _compared(
        lambda a, b: (a[0] == a[1]) & (b[0] == b[1]) & (a[0] == b[0]),
        lambda a, b: (a[0] <= b[1]) & (b[0] <= a[1]),
    ),
    "ne": _compared(
        lambda a, b: (a[1] < b[0]) | (b[1] < a[0]),
        lambda a, b: ~((a[0] == a[1]) & (b[0] == b[1]) & (a[0] == b[0])),
    ),
    "not": lambda a: (1.0 - _f(a[1]), 1.0 - _f(a[0])),
    "abs": _absolute,
    "and": _of_bits(np.minimum),
    "or": _of_bits(np.maximum),
    "select_n": _chosen,
}
