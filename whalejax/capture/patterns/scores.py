"""Programs of a model's attention scores before the softmax, block by block.

Scores are a product of queries and keys, scaled, capped, masked or shifted by the
user's own equations. Here these become a small program that can compute any block of
rows and columns by itself: positions (``iota``) are counted from the block's first
index, and values from outside are cut. On intervals instead of numbers, the same
program shows which blocks a mask hides completely.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from whalejax import _compat
from whalejax.capture.patterns.blockwise import (
    ScoreNode,
    Tags,
    compute_block,
    operand_tags,
    stops_gradient,
)
from whalejax.capture.patterns.score_bounds import ANY, BOOL, Interval, interval


HIDDEN: Final = -1e9
"""Scores below it are masked: no other score of a row is as low."""

_HALF: Final = -1e4
"""The same for float16, which ends at 65,504."""


class NotScoresError(Exception):
    """The equations before a softmax cannot be computed in blocks."""


@dataclass(slots=True)
class Scores:
    """The program from a product to the scores.

    Attributes:
        nodes: Nodes in computing order; the last makes the scores.
        product: Index of the product's node, whose tags give its dimensions' order.
        outside: Variables that come from outside, each once.
        tags: Sets of tags with which each of those is read.
    """

    nodes: list[ScoreNode] = field(default_factory=list)
    product: int = -1
    outside: list[Any] = field(default_factory=list)

    @property
    def tags(self) -> list[set[Tags]]:
        """Tags with which each value from outside is read."""
        tags: list[set[Tags]] = [set() for _ in self.outside]
        for node in self.nodes:
            if node.outside is not None:
                tags[node.outside].add(node.tags)
        return tags

    def block(
        self,
        product: Any,
        sizes: Mapping[int, int],
        offsets: Mapping[int, Any],
        outside: Callable[[int, Tags], Any],
    ) -> Any:
        """Returns the scores of one block.

        Args:
            product: Products of the block, in the traced order of dimensions.
            sizes: Sizes of the dimensions of the scores in this block.
            offsets: Offset of each dimension; default: 0.
            outside: Returns the part of a value from outside that the block reads.
        """
        values: list[Any] = []
        for number, node in enumerate(self.nodes):
            if number == self.product:
                values.append(product)
            elif node.outside is not None:
                values.append(outside(node.outside, node.tags))
            else:
                shape = tuple(1 if t is None else sizes[t] for t in node.tags)
                values.append(compute_block(node, shape, values, offsets))
        return values[-1]

    def masked_blocks(self, rows: int, columns: int, row: int, column: int) -> Any:
        """Returns which blocks are masked for any values of the product.

        A masked block has only masked scores, and each of its rows has an unmasked
        score elsewhere. If a row may have none, all masked scores have one value, which
        ``filled`` returns.

        Args:
            rows, columns: Number of equal blocks of rows and columns.
            row, column: Dimensions of the scores that are cut into them.

        Returns:
            ``bool[rows, columns]``.
        """
        if len(self.nodes) == 1:
            return np.zeros((rows, columns), bool)
        low, high = self._bounds(rows, columns, row, column)
        masked: Any = high < self._mask_threshold
        ends = np.concatenate([low[masked], high[masked]])
        if np.unique(ends).size <= 1 or self._all_see(row, column):
            return masked
        return np.zeros_like(masked)

    def filled(self, rows: int, columns: int, row: int, column: int) -> float | None:
        """Returns the score in all hidden blocks, if it may have a weight.

        A softmax of equal scores is a mean, so a row whose scores are all masked reads
        hidden blocks too.

        Args:
            rows, columns, row, column: Arguments of ``masked_blocks``, unchanged.

        Returns:
            The score; None if each row is known to have an unmasked score, compared
            with which masked ones are negligible.
        """
        hidden = self.masked_blocks(rows, columns, row, column)
        if not hidden.any() or self._all_see(row, column):
            return None
        low, _ = self._bounds(rows, columns, row, column)
        return float(low[hidden][0])

    @property
    def _mask_threshold(self) -> float:
        aval = self.nodes[-1].equation.outvars[0].aval
        narrow = _compat.dtype_name(aval.dtype) == "float16"
        return _HALF if narrow else HIDDEN

    def _bounds(self, rows: int, columns: int, row: int, column: int) -> Interval:
        shape = self.nodes[-1].equation.outvars[0].aval.shape
        extents = {
            row: _edges(shape[row], rows)[:, :, None],
            column: _edges(shape[column], columns)[:, None, :],
        }
        low, high = self._run(extents, ANY)
        whole = rows, columns
        return np.broadcast_to(low, whole), np.broadcast_to(high, whole)

    def _all_see(self, row: int, column: int) -> bool:
        """Returns whether each row is known to have an unmasked score for any inputs.

        It tries the diagonal, which starts at the first or ends at the last column if
        there are more columns than rows, and both ends of the row.
        """
        shape = self.nodes[-1].equation.outvars[0].aval.shape
        rows, columns = shape[row], shape[column]
        places = np.arange(rows, dtype=np.float64)
        tried = np.stack(
            [places, places + columns - rows, 0 * places, 0 * places + columns - 1]
        )
        tried = np.clip(tried, 0, columns - 1)
        extents = {row: (places, places), column: (tried, tried)}
        low, _ = self._run(extents, _USUAL)
        seen = np.broadcast_to(low > self._mask_threshold / 10, tried.shape)
        return bool(seen.any(axis=0).all())

    def _run(self, extents: Mapping[int, Any], product: Interval) -> Interval:
        """Returns bounds of the scores, given those of the product.

        With ``_USUAL``, results of equations without a rule (a cap) are assumed to be
        usual.
        """
        result: list[Interval] = []
        made: set[int | None] = {self.product}
        for number, node in enumerate(self.nodes):
            if node.outside is not None:
                dtype = self.outside[node.outside].aval.dtype
                result.append(BOOL if np.dtype(dtype).kind == "b" else ANY)
            elif number == self.product:
                result.append(product)
            else:
                bounds = interval(node, result, extents)
                if not made.isdisjoint(node.inputs):
                    made.add(number)
                    if bounds is ANY and product is _USUAL:
                        bounds = self._usual(
                            [result[n] for n in node.inputs if n is not None]
                        )
                result.append(bounds)
        return result[-1]

    def _usual(self, operands: Sequence[Interval]) -> Interval:
        """Returns usual bounds where all operands have usual bounds, else infinite."""
        limit = -self._mask_threshold
        every: Any = True
        for low, high in operands:
            every = every & (np.asarray(low) > -limit) & (np.asarray(high) < limit)
        return np.where(every, -1.0, -math.inf), np.where(every, 1.0, math.inf)


_USUAL: Final[Interval] = (-1.0, 1.0)
"""Usual bounds of a product: scores far below them are masked."""


def _edges(length: int, count: int) -> Any:
    """Returns the first and last index of equal blocks, ``float[2, count]``."""
    first = np.arange(count) * (length // count)
    return np.array([first, first + length // count - 1], dtype=np.float64)


class Reader:
    """Reads the equations before a softmax.

    Args:
        maker: The equation that makes each variable of a jaxpr.
        trained: Variables through which a gradient flows.
    """

    def __init__(self, maker: Mapping[Any, Any], trained: set[Any]) -> None:
        self.maker = maker
        self.trained = trained
        self.scores = Scores()
        self.product: Any = None
        self._known: dict[tuple[Any, Tags], int] = {}

    def read(self, variable: Any) -> Scores:
        """Returns the program that ends in a variable.

        Raises:
            NotScoresError: It cannot be computed in blocks; the text says why.
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
            node = ScoreNode(equation=equation, inputs=(), tags=tags)
        else:
            wanted = None
            if equation is not None and not stops_gradient(equation, self.trained):
                wanted = operand_tags(equation, tags)
            if equation is None or wanted is None:
                node = self._outside(variable, tags)
            else:
                inputs = tuple(
                    None if t is None else self._pull(atom, t)
                    for atom, t in zip(equation.invars, wanted, strict=True)
                )
                node = ScoreNode(equation=equation, inputs=inputs, tags=tags)
        self.scores.nodes.append(node)
        number = len(self.scores.nodes) - 1
        if node.equation is None and node.outside is None:
            self.scores.product = number
        self._known[variable, tags] = number
        return number

    def _product(self, equation: Any, tags: Tags) -> ScoreNode:
        if self.product is not None:
            raise NotScoresError("its scores are made of more than one product")
        self.product = equation
        return ScoreNode(equation=None, inputs=(), tags=tags)

    def _outside(self, variable: Any, tags: Tags) -> ScoreNode:
        if variable in self.trained:
            raise NotScoresError(
                "its scores are shifted or scaled by a trained value, whose gradient "
                "would have to travel round the ring too"
            )
        if variable not in self.scores.outside:
            self.scores.outside.append(variable)
        number = self.scores.outside.index(variable)
        return ScoreNode(equation=None, inputs=(), tags=tags, outside=number)
