"""Finds attention in a traced program, and computes its scores block by block.

Attention is two products with a softmax between them. The first multiplies queries and
keys, the second the softmax's result and values. Neither names nor sizes are matched,
so any function that computes attention this way is found: Flax's, ``jax.nn``'s, the
user's own.

Scores are a product of queries and keys that the user's equations scale, cap, mask or
shift. Here these equations become a small program that computes any block of rows and
columns by itself. Positions (``iota``) are counted from the block's first index, and
values from outside are cut to the block. Run on intervals instead of numbers, the
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
from whalejax.capture.patterns.softmax import Softmax, softmax_behind


HIDDEN: Final = -1e9
"""Scores below this number are masked."""

_HALF: Final = -1e4
"""Scores below this number are masked in float16, whose least number is -65,504."""


class NotScoresError(Exception):
    """The equations before a softmax cannot be computed in blocks."""


@dataclass(slots=True)
class Scores:
    """The program from the product of queries and keys to the scores.

    Attributes:
        nodes: Nodes in computing order; the last makes the scores.
        product: Index of the product's node, whose tags give the order of the
            product's dimensions.
        outside: Variables that come from outside, each once.
        tags: For each variable in ``outside``, the sets of tags with which it is read.
    """

    nodes: list[ScoreNode] = field(default_factory=list)
    product: int = -1
    outside: list[Any] = field(default_factory=list)

    @property
    def tags(self) -> list[set[Tags]]:
        """For each variable in ``outside``, the sets of tags with which it is read."""
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
            product: The block of the product, in the traced order of dimensions.
            sizes: Size of the block, by dimension of the scores.
            offsets: First index of the block, by dimension of the scores; default: 0.
            outside: Function from the index of a variable in ``outside`` and its tags
                to the part of it that the block reads.
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
        """Returns which blocks are masked whatever the values of the product are.

        A masked block has only masked scores. Blocks count as masked if each row has an
        unmasked score elsewhere, or if all masked scores are equal; see ``filled``.

        Args:
            rows: Number of equal blocks of rows.
            columns: Number of equal blocks of columns.
            row: Dimension of the scores that is cut into ``rows`` blocks.
            column: Dimension of the scores that is cut into ``columns`` blocks.

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
        """Returns the one score in all masked blocks, if they affect a result.

        They do if all scores of a row may be masked. The softmax of equal scores is a
        mean, so such a row reads the values of masked blocks too.

        Args:
            rows: Number of equal blocks of rows.
            columns: Number of equal blocks of columns.
            row: Dimension of the scores that is cut into ``rows`` blocks.
            column: Dimension of the scores that is cut into ``columns`` blocks.

        Returns:
            The score; None if each row has an unmasked score, beside which masked ones
            are negligible.
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
        """Returns whether each row has an unmasked score, for any inputs.

        It looks at both ends of the row and at the diagonal. If there are more columns
        than rows, diagonals from the first and to the last column are tried.
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
        """Returns bounds of the scores, given bounds of the product.

        With ``_USUAL``, a result of an equation without a rule (a cap) is assumed to
        have usual bounds if its operands do.
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
        """Returns usual bounds where all operands are unmasked, else infinite ones."""
        limit = -self._mask_threshold
        every: Any = True
        for low, high in operands:
            every = every & (np.asarray(low) > -limit) & (np.asarray(high) < limit)
        return np.where(every, -1.0, -math.inf), np.where(every, 1.0, math.inf)


_USUAL: Final[Interval] = (-1.0, 1.0)
"""Usual bounds of a product; masked scores are far below them."""


def _edges(length: int, count: int) -> Any:
    first = np.arange(count) * (length // count)
    return np.array([first, first + length // count - 1], dtype=np.float64)


class Reader:
    """Reads the equations before a softmax.

    Args:
        maker: Equation that makes each variable of a jaxpr.
        trained: Variables through which a gradient flows.
    """

    def __init__(self, maker: Mapping[Any, Any], trained: set[Any]) -> None:
        self.maker = maker
        self.trained = trained
        self.scores = Scores()
        self.product: Any = None
        self._known: dict[tuple[Any, Tags], int] = {}

    def read(self, variable: Any) -> Scores:
        """Returns the program that computes the scores.

        Raises:
            NotScoresError: The scores cannot be computed in blocks; its text says why.
        """
        shape = variable.aval.shape
        self._pull(variable, tuple(None if n == 1 else i for i, n in enumerate(shape)))
        if self.product is None:
            raise NotScoresError("no product of queries and keys precedes its softmax")
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
                "would have to be sent round the ring too"
            )
        if variable not in self.scores.outside:
            self.scores.outside.append(variable)
        number = self.scores.outside.index(variable)
        return ScoreNode(equation=None, inputs=(), tags=tags, outside=number)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPattern:
    """One attention, as equations of a jaxpr.

    Dimensions are those of the traced values. Queries, keys and values share the
    ``batch`` dimensions; queries alone have the ``rows``.

    Attributes:
        query: Variable of the queries.
        key: Variable of the keys.
        value: Variable of the values.
        outside: Other variables that the scores depend on.
        first: Product of queries and keys.
        second: Product of the softmax and the values.
        scores: Program from the first product to the softmax's operand.
        batch: For each shared dimension, its index in query, key and value, and its
            index in the scores.
        rows: For each row dimension, its index in the query and in the scores.
        depth: Contracted dimensions of query and key.
        column: Index of the keys' own dimension in key and value, and in the scores.
        width: Indices of the value's own dimensions.
        weights_dtype: Dtype in which the second product reads the softmax.
        weights: Dimension of the scores for each dimension of the softmax.
        turned: Whether the value is the left operand of the second product.
        keys_first: Whether the key is the left operand of the first product.
    """

    query: Any
    key: Any
    value: Any
    outside: tuple[Any, ...]
    first: Any
    second: Any
    scores: Scores
    batch: tuple[tuple[int, int, int, int], ...]
    rows: tuple[tuple[int, int], ...]
    depth: tuple[tuple[int, int], ...]
    column: tuple[int, int, int]
    width: tuple[int, ...]
    weights_dtype: Any
    weights: tuple[int, ...]
    turned: bool
    keys_first: bool

    @property
    def output(self) -> Any:
        """Variable of the attention's result."""
        return self.second.outvars[0]

    @property
    def inputs(self) -> tuple[Any, ...]:
        """Query, key, value and the other inputs."""
        return (self.query, self.key, self.value, *self.outside)

    @property
    def output_dims(self) -> tuple[tuple[str, int], ...]:
        """Kind and index of each dimension of the output.

        ``("scores", n)`` is dimension ``n`` of the scores, ``("width", n)`` dimension
        ``n`` of the value.
        """
        (left, right), (left_batch, right_batch) = _numbers(self.second)
        inside, batch = (right, right_batch) if self.turned else (left, left_batch)
        kept = [
            ("scores", tag)
            for place, tag in enumerate(self.weights)
            if place not in (*inside, *batch)
        ]
        shared = [("scores", self.weights[place]) for place in batch]
        own = [("width", place) for place in self.width]
        return (*shared, *((own + kept) if self.turned else (kept + own)))


def attention_of(jaxpr: Any) -> AttentionPattern:
    """Returns the attention in the body of an attention call.

    Args:
        jaxpr: The call's one inner jaxpr.
    """
    body = _compat.open_jaxpr(jaxpr)[0]
    maker = {v: e for e in body.eqns for v in e.outvars}
    second = maker[body.outvars[0]]
    attention = _recognised(second, maker, trained_in(body, [True] * 3))
    assert isinstance(attention, AttentionPattern)  # Such a call contains attention.
    return attention


def trained_in(body: Any, flags: Sequence[bool]) -> set[Any]:
    """Returns variables of a jaxpr through which a gradient flows from some inputs."""
    result = {v for v, flag in zip(body.invars, flags, strict=False) if flag}
    for equation in body.eqns:
        if equation.primitive.name == "stop_gradient":
            continue
        if any(not _compat.is_literal(a) and a in result for a in equation.invars):
            result.update(v for v in equation.outvars if _inexact(v))
    return result


def trained_in_scan(scan: Any, flags: Sequence[bool]) -> list[bool]:
    """Returns which inputs of a scan's body have gradients, after all iterations."""
    body = _compat.open_jaxpr(_compat.inner_jaxprs(scan)[0])[0]
    parts, result = _compat.scan_parts(scan), list(flags)
    while True:
        trained = trained_in(body, result)
        before = list(result)
        for place, out in enumerate(body.outvars[: parts.num_carries]):
            if not _compat.is_literal(out) and out in trained:
                result[parts.num_consts + place] = True
        if result == before:
            return result


def _inexact(variable: Any) -> bool:
    return _compat.is_inexact(variable.aval.dtype)


def _numbers(
    product: Any,
) -> tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]:
    inside, batch = product.params["dimension_numbers"]
    return inside, batch


def recognised(
    body: Any, trained: set[Any]
) -> tuple[list[AttentionPattern], list[str]]:
    """Returns the attentions of one jaxpr, and why others cannot run in blocks.

    Args:
        body: Open jaxpr, without calls that could be inlined.
        trained: Variables of the jaxpr through which a gradient flows.
    """
    maker = {v: e for e in body.eqns for v in e.outvars}
    result: list[AttentionPattern] = []
    reasons: list[str] = []
    leaks = _Leaks(body, maker)
    for equation in body.eqns:
        if equation.primitive.name == "dot_general":
            one = _recognised(equation, maker, trained)
            why = leaks.of(one) if isinstance(one, AttentionPattern) else one
            if isinstance(one, AttentionPattern) and not why:
                result.append(one)
            elif why:
                place = _compat.scope_text(equation)
                reasons.append(f"attention in {place or 'the loss'}: {why}")
    return result, reasons


def _recognised(
    second: Any,
    maker: Mapping[Any, Any],
    trained: set[Any],
) -> AttentionPattern | str:
    """Returns the attention that a product ends, or why it cannot run in blocks.

    The text is empty if the product ends no attention.
    """
    for side in (0, 1):
        weights = second.invars[side]
        softmax = softmax_behind(weights, maker)
        if softmax is None or _numbers(second)[0] == ((), ()):
            continue
        if isinstance(softmax, str):
            return softmax
        reader = Reader(maker, trained)
        try:
            scores = reader.read(softmax.source)
            return _assembled(second, side, softmax, reader.product, scores)
        except NotScoresError as error:
            return str(error)
    return ""


def _assembled(
    second: Any, side: int, softmax: Softmax, first: Any, scores: Scores
) -> AttentionPattern:
    (left_in, right_in), (left_batch, right_batch) = _numbers(first)
    inside, batch = _numbers(second)
    tags = _product_tags(first, scores, [softmax.tags[p] for p in batch[side]])
    column = softmax.axis
    if [softmax.tags[place] for place in inside[side]] != [column]:
        raise NotScoresError("its weights are not summed over the softmax's dimension")
    place = tags.index(column)
    num_batch = len(left_batch)
    shapes = [a.aval.shape for a in first.invars]
    free = [
        [d for d in range(len(shapes[0])) if d not in (*left_in, *left_batch)],
        [d for d in range(len(shapes[1])) if d not in (*right_in, *right_batch)],
    ]
    ends = num_batch + len(free[0])
    if place < num_batch:
        raise NotScoresError("its softmax is over a dimension that queries have too")
    keys = 0 if place < ends else 1
    if len(free[keys]) != 1:
        raise NotScoresError("its keys have more than one dimension of their own")
    if shapes[keys][free[keys][0]] == 1:
        raise NotScoresError("it has a single key")
    if not free[1 - keys]:
        raise NotScoresError("its queries have no dimension of their own")
    query_side = 1 - keys
    own = tags[num_batch:ends] if query_side == 0 else tags[ends:]
    ways = ((left_batch, right_batch), (right_batch, left_batch))[query_side]
    depth = ((left_in, right_in), (right_in, left_in))[query_side]
    shared = (softmax.tags[p] for p in batch[side])
    values = dict(zip(shared, batch[1 - side], strict=True))
    if set(values) != set(tags[:num_batch]):
        raise NotScoresError("keys and values do not share the same dimensions")
    value = second.invars[1 - side]
    (value_column,) = inside[1 - side]
    taken = (*values.values(), value_column)
    return AttentionPattern(
        query=first.invars[query_side],
        key=first.invars[keys],
        value=value,
        outside=tuple(scores.outside),
        first=first,
        second=second,
        scores=scores,
        batch=tuple(
            (q, k, values[tag], tag)
            for q, k, tag in zip(*ways, tags[:num_batch], strict=True)
        ),
        rows=tuple(zip(free[query_side], own, strict=True)),
        depth=tuple(zip(*depth, strict=True)),
        column=(free[keys][0], value_column, column),
        width=tuple(d for d in range(len(value.aval.shape)) if d not in taken),
        weights_dtype=softmax.dtype,
        weights=softmax.tags,
        turned=side == 1,
        keys_first=keys == 0,
    )


def product_tags(one: AttentionPattern) -> list[int]:
    """Returns the index in the scores of each dimension of the first product."""
    shared, own = [t for *_, t in one.batch], [t for _, t in one.rows]
    column = [one.column[2]]
    return [*shared, *(column + own if one.keys_first else own + column)]


def _product_tags(first: Any, scores: Scores, shared: Sequence[int]) -> list[int]:
    """Returns the tags of a product; dimensions of size 1 get tags that are left."""
    tags = scores.nodes[scores.product].tags
    shape = first.outvars[0].aval.shape
    absent = sorted(set(range(len(shape))) - {tag for tag in tags if tag is not None})
    absent.sort(key=lambda tag: tag not in shared)
    rest = iter(absent)
    result = [next(rest) if tag is None else tag for tag in tags]
    if sorted(result) != list(range(len(shape))):
        raise NotScoresError("its scores have dimensions that the product lacks")
    return result


class _Leaks:
    """Finds whether other equations read an attention's inner values."""

    def __init__(self, body: Any, maker: Mapping[Any, Any]) -> None:
        self.maker = maker
        self.ends = {v for v in body.outvars if not _compat.is_literal(v)}
        self.readers: dict[Any, list[Any]] = {}
        for equation in body.eqns:
            for atom in equation.invars:
                if not _compat.is_literal(atom):
                    self.readers.setdefault(atom, []).append(equation)

    def of(self, one: AttentionPattern) -> str:
        """Returns why an attention cannot become one call; empty if it can."""
        inside = equations_of(one, self.maker)
        numbers = {id(equation) for equation in inside}
        made = {one.first.outvars[0]}
        for equation in inside:
            if any(not _compat.is_literal(a) and a in made for a in equation.invars):
                made.update(equation.outvars)
        scores = (v for e in inside for v in e.outvars if v is not one.output)
        for variable in made.intersection(scores):
            readers = self.readers.get(variable, ())
            if variable in self.ends or any(id(e) not in numbers for e in readers):
                return "its scores or weights are used elsewhere too"
        return ""


def equations_of(one: AttentionPattern, maker: Mapping[Any, Any]) -> list[Any]:
    """Returns the equations of an attention, in an order in which they can run."""
    order: dict[int, Any] = {}
    done = set(one.inputs)

    def visit(variable: Any) -> None:
        if variable in done:
            return
        done.add(variable)
        equation = maker.get(variable)
        if equation is None:
            return
        for atom in equation.invars:
            if not _compat.is_literal(atom):
                visit(atom)
        order.setdefault(id(equation), equation)

    visit(one.output)
    return [*order.values()]
