"""Values that lose their last tokens, computed at full length.

A language model's loss compares ``logits[:, :-1]`` with ``tokens[:, 1:]``. After that
cut, the logits are one token shorter than the sharded sequence, and would have to be
gathered. Here the cut is postponed, so later operations compute all tokens. Where
tokens are missing, zeros stand in for them, and sums over tokens leave them out. An
operation without such a rule reads the cut value, as it was traced.

No number of the extra tokens reaches a result or a gradient. Reductions replace the
numbers. A selection stops their cotangent, even a NaN, at two places: where the value
begins, and where it meets values that all tokens share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax.numpy as jnp
import numpy as np
from jax import lax

from whalejax import _compat
from whalejax.capture.rules.behaviour import Position
from whalejax.capture.rules.rule_table import SAME_SHAPE
from whalejax.capture.sorted_rows import sorts_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class FullLengthValue:
    """A value at full length.

    Attributes:
        whole: Array with the tokens that were cut off.
        dim: Dimension of the tokens.
        length: Number of leading tokens that belong to the cut value.
    """

    whole: Any
    dim: int
    length: int

    def cut(self) -> Any:
        """Returns the value as it was traced, without the extra tokens."""
        return lax.slice_in_dim(self.whole, 0, self.length, axis=self.dim)

    def filled(self, number: Any) -> Any:
        """Returns the value with a number in place of the extra tokens."""
        shape = self.whole.shape
        own = lax.iota(jnp.int32, shape[self.dim]) < jnp.int32(self.length)
        own = lax.broadcast_in_dim(own, shape, (self.dim,))
        return lax.select(own, self.whole, lax.full(shape, number, self.whole.dtype))

    def like(self, other: Any) -> Any:
        """Returns another operand of an elementwise operation at full length."""
        if isinstance(other, FullLengthValue):
            if (other.dim, other.length) == (self.dim, self.length):
                return other.whole
            other = other.cut()
        shape = jnp.shape(other)
        if len(shape) != self.whole.ndim or shape[self.dim] != self.length:
            return other
        return self.lengthen(other, self.dim)

    def lengthen(self, value: Any, dim: int) -> Any:
        """Returns a value of the cut length, padded with zeros to the full length."""
        more = self.whole.shape[self.dim] - self.length
        config = [(0, more * (d == dim), 0) for d in range(value.ndim)]
        return lax.pad(value, jnp.zeros((), value.dtype), config)

    def now(self, whole: Any, dim: int) -> FullLengthValue:
        """Returns a result that was computed at full length, with its cut length."""
        return FullLengthValue(whole=whole, dim=dim, length=self.length)


def lengthened(jaxpr: Any, cuts: frozenset[Position]) -> Any:
    """Returns a program in which some cuts are postponed.

    Args:
        jaxpr: Closed jaxpr, as traced.
        cuts: Positions of slices.
    """
    runner = _Runner(cuts, _lengths(jaxpr, cuts))
    avals = [v.aval for v in _compat.open_jaxpr(jaxpr)[0].invars]

    def program(*leaves: Any) -> list[Any]:
        return [_cut(v) for v in runner.run(jaxpr, leaves, ())]

    return _compat.pruned(_compat.trace(program, avals))


def _cut(value: Any) -> Any:
    return value.cut() if isinstance(value, FullLengthValue) else value


_CUTS = frozenset(("slice", "dynamic_slice"))


def _one_cut(equation: Any) -> tuple[int, int, int, int] | None:
    """Returns a slice's only cut dimension, both lengths and the start, or None."""
    if equation.primitive.name not in _CUTS:
        return None
    before, after = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    changed = [d for d, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    if len(changed) != 1:
        return None
    (dim,) = changed
    start = _start(equation, dim, before[dim] - after[dim])
    return None if start is None else (dim, before[dim], after[dim], start)


def _start(equation: Any, dim: int, last: int) -> int | None:
    """Returns the constant start of a slice if it is at most ``last``, else None."""
    if equation.primitive.name == "slice":
        strides = equation.params["strides"] or ()
        even = all(stride == 1 for stride in strides)
        return equation.params["start_indices"][dim] if even else None
    starts = equation.invars[1:]
    if not all(map(_compat.is_literal, starts)):
        return None
    return min(max(int(starts[dim].val), 0), last)


def _lengths(jaxpr: Any, cuts: frozenset[Position]) -> frozenset[tuple[int, int]]:
    lengths: set[tuple[int, int]] = set()

    def visit(jaxpr: Any, prefix: Position) -> None:
        for index, equation in enumerate(_compat.open_jaxpr(jaxpr)[0].eqns):
            here = (*prefix, index)
            one = _one_cut(equation) if here in cuts else None
            if one is not None:
                lengths.add(one[1:3])
            for number, inner in enumerate(_compat.inner_jaxprs(equation)):
                visit(inner, (*here, number))

    visit(jaxpr, ())
    return frozenset(lengths)


@dataclass(frozen=True, slots=True)
class _Runner:
    """Evaluates a program with some values at full length.

    ``lengths`` has the lengths before and after each cut. Integers that are cut from
    and to the same lengths, such as labels, are padded to the full length.
    """

    cuts: frozenset[Position]
    lengths: frozenset[tuple[int, int]]

    def run(self, jaxpr: Any, values: Sequence[Any], prefix: Position) -> list[Any]:
        body, constants = _compat.open_jaxpr(jaxpr)
        env: dict[Any, Any] = dict(zip(body.constvars, constants, strict=True))
        env.update(zip(body.invars, values, strict=True))
        for index, equation in enumerate(body.eqns):
            operands = [
                a.val if _compat.is_literal(a) else env[a] for a in equation.invars
            ]
            with _compat.equation_context(equation):
                results = self._equation(equation, operands, (*prefix, index))
            env.update(zip(equation.outvars, results, strict=True))
        return [a.val if _compat.is_literal(a) else env[a] for a in body.outvars]

    def _equation(
        self, equation: Any, operands: Sequence[Any], position: Position
    ) -> Sequence[Any]:
        if _compat.recursion(equation) == "inline" and not sorts_rows(equation):
            inner = _compat.inner_jaxprs(equation)[0]
            within = any(p[: len(position)] == position for p in self.cuts)
            if within or any(isinstance(x, FullLengthValue) for x in operands):
                return self.run(inner, operands, (*position, 0))
        if any(isinstance(x, FullLengthValue) for x in operands):
            result = _of_long(equation, operands)
            if result is not None:
                return [result]
            operands = [_cut(x) for x in operands]
        begun = self._postpone_cut(equation, operands, position)
        return _compat.bind(equation, operands) if begun is None else [begun]

    def _postpone_cut(
        self, equation: Any, operands: Sequence[Any], position: Position
    ) -> FullLengthValue | None:
        one = _one_cut(equation)
        if one is None or one[1:3] not in self.lengths:
            return None
        dim, _, after, start = one
        value = operands[0]
        if position in self.cuts and start == 0:
            zero = jnp.zeros((), value.dtype)
            long = FullLengthValue(whole=value, dim=dim, length=after)
            return long.now(long.filled(zero), dim)
        if _compat.is_inexact(value.dtype):
            return None
        long = FullLengthValue(whole=value, dim=dim, length=after)
        (short,) = _compat.bind(equation, operands)
        return long.now(long.lengthen(short, dim), dim)


Rule = Callable[[Any, Sequence[Any]], Any]
"""Function of an equation and its operands, some of them at full length. It may return
None."""


def _of_long(equation: Any, operands: Sequence[Any]) -> Any:
    name = equation.primitive.name
    rule = _elementwise if name in SAME_SHAPE else _RULES.get(name)
    return None if rule is None else rule(equation, operands)


def _first(operands: Sequence[Any]) -> FullLengthValue:
    return next(x for x in operands if isinstance(x, FullLengthValue))


def _elementwise(equation: Any, operands: Sequence[Any]) -> Any:
    long = _first(operands)
    alike = [long.like(x) for x in operands]
    (whole,) = _compat.bind(equation, alike)
    result = long.now(whole, long.dim)
    pairs = zip(equation.invars, alike, strict=True)
    shared = any(
        not _compat.is_literal(a) and _is_shared_by_tokens(x, long) for a, x in pairs
    )
    return result.now(result.filled(0), long.dim) if shared else result


def _is_shared_by_tokens(operand: Any, long: FullLengthValue) -> bool:
    """Returns whether all tokens read the same values, so that gradients are summed."""
    shape = jnp.shape(operand)
    same = len(shape) != long.whole.ndim or shape[long.dim] == 1
    return same and _compat.is_inexact(operand.dtype)


def _broadcast(equation: Any, operands: Sequence[Any]) -> Any:
    long = _first(operands)
    shape = [*equation.params["shape"]]
    dim = equation.params["broadcast_dimensions"][long.dim]
    shape[dim] = long.whole.shape[long.dim]
    (whole,) = _compat.bind(equation, [long.whole], shape=tuple(shape))
    return long.now(whole, dim)


def _transpose(equation: Any, operands: Sequence[Any]) -> Any:
    long = _first(operands)
    (whole,) = _compat.bind(equation, [long.whole])
    return long.now(whole, equation.params["permutation"].index(long.dim))


def _reshape(equation: Any, operands: Sequence[Any]) -> Any:
    long = _first(operands)
    before, after = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    left, right = ([d for d, n in enumerate(s) if n != 1] for s in (before, after))
    if [before[d] for d in left] != [after[d] for d in right] or long.length == 1:
        return None
    dim = right[left.index(long.dim)]
    shape = [*after]
    shape[dim] = long.whole.shape[long.dim]
    return long.now(lax.reshape(long.whole, shape), dim)


def _concatenate(equation: Any, operands: Sequence[Any]) -> Any:
    long = _first(operands)
    return (
        None
        if equation.params["dimension"] == long.dim
        else _elementwise(equation, operands)
    )


def _reduction(identity: Callable[[Any], Any]) -> Rule:
    def rule(equation: Any, operands: Sequence[Any]) -> Any:
        long = _first(operands)
        axes = equation.params["axes"]
        if long.dim in axes:
            return _compat.bind(equation, [long.filled(identity(long.whole.dtype))])[0]
        (whole,) = _compat.bind(equation, [long.whole])
        return long.now(whole, long.dim - sum(a < long.dim for a in axes))

    return rule


def _least(dtype: Any) -> Any:
    if dtype == jnp.bool_:
        return False
    return -jnp.inf if _compat.is_inexact(dtype) else np.iinfo(dtype).min


def _most(dtype: Any) -> Any:
    if dtype == jnp.bool_:
        return True
    return jnp.inf if _compat.is_inexact(dtype) else np.iinfo(dtype).max


def _product(equation: Any, operands: Sequence[Any]) -> Any:
    (left_in, right_in), (left_batch, right_batch) = equation.params[
        "dimension_numbers"
    ]
    insides, batches = (left_in, right_in), (left_batch, right_batch)
    side = 0 if isinstance(operands[0], FullLengthValue) else 1
    long, other = operands[side], operands[1 - side]
    if long.dim in insides[side]:
        return None
    if long.dim in batches[side]:
        place = batches[side].index(long.dim)
        theirs = batches[1 - side][place]
        if isinstance(other, FullLengthValue) and other.dim == theirs:
            other = other.whole
        elif isinstance(other, FullLengthValue):
            return None
        else:
            other = long.lengthen(other, theirs)
    else:
        other = _cut(other)
        ranks = [len(atom.aval.shape) for atom in equation.invars]
        free = [
            [d for d in range(ranks[s]) if d not in (*insides[s], *batches[s])]
            for s in (0, 1)
        ]
        place = len(left_batch) + len(free[0]) * side + free[side].index(long.dim)
    pair = [long.whole, other] if side == 0 else [other, long.whole]
    result = long.now(_compat.bind(equation, pair)[0], place)
    # The other operand has no tokens, and must get no cotangent of the extra tokens.
    return result.now(result.filled(0), place)


def _gather(equation: Any, operands: Sequence[Any]) -> Any:
    operand, indices = operands
    numbers = equation.params["dimension_numbers"]
    if (
        not isinstance(indices, FullLengthValue)
        or indices.dim == indices.whole.ndim - 1
    ):
        return None
    shared = dict(
        zip(
            numbers.start_indices_batching_dims,
            numbers.operand_batching_dims,
            strict=True,
        )
    )
    if indices.dim in shared:
        theirs = shared[indices.dim]
        if isinstance(operand, FullLengthValue) and operand.dim == theirs:
            operand = operand.whole
        elif isinstance(operand, FullLengthValue):
            return None
        else:
            operand = indices.lengthen(operand, theirs)
    else:
        operand = _cut(operand)
    rank = len(equation.outvars[0].aval.shape)
    rows = [d for d in range(rank) if d not in numbers.offset_dims]
    (whole,) = _compat.bind(
        equation,
        [operand, indices.whole],
        unique_indices=False,
        indices_are_sorted=False,
    )
    return indices.now(whole, rows[indices.dim])


_RULES: Final[Mapping[str, Rule]] = {
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    **dict.fromkeys(("reshape", "squeeze", "expand_dims"), _reshape),
    "concatenate": _concatenate,
    "reduce_sum": _reduction(lambda dtype: 0),
    "reduce_prod": _reduction(lambda dtype: 1),
    "reduce_max": _reduction(_least),
    "reduce_min": _reduction(_most),
    "reduce_and": _reduction(lambda dtype: True),
    "reduce_or": _reduction(lambda dtype: False),
    "dot_general": _product,
    "gather": _gather,
}
