"""Equations whose result can be computed block by block.

A block of the result depends on blocks of the operands. This holds for elementwise
equations, added and transposed dimensions, positions (``iota``), and reductions and
lookups over a dimension that is not cut. A computation in blocks, such as scores of
attention or logits of a loss, is stored as such equations. Every dimension of every
value has a tag: the dimension of the full result that it matches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax.numpy as jnp
from jax import lax

from whalejax import _compat
from whalejax.capture.rules.rule_table import SAME_SHAPE


Tags = tuple[int | None, ...]
"""For every dimension of a value, the dimension of the full result that it matches, or
None for a dimension of size 1."""

REDUCTIONS: Final = frozenset(
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax "
    "argmin".split()
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreNode:
    """A value in the computation of the scores or logits.

    Attributes:
        equation: Equation that makes the value. It is None for values from outside, and
            for the matrix product whose result is computed in blocks.
        inputs: Indices of the nodes that the value depends on; None for a literal.
        tags: Tags of the value's dimensions.
        outside: Index of the value among those from outside, or None.
    """

    equation: Any
    inputs: tuple[int | None, ...]
    tags: Tags
    outside: int | None = None


def operand_tags(equation: Any, tags: Tags) -> list[Tags | None] | None:
    """Returns the tags of an equation's operands, given the tags of its result.

    The caller handles ``iota``, which has no operands.

    Returns:
        Tags of each operand, None for a literal. None in place of the list if no rule
        shows that the equation can be computed block by block.
    """
    name = equation.primitive.name
    if len(equation.outvars) != 1:
        return None
    if name in SAME_SHAPE:
        return [
            None if _compat.is_literal(a) else _where_above_one(a.aval.shape, tags)
            for a in equation.invars
        ]
    (source, *rest) = equation.invars
    if rest or _compat.is_literal(source):
        return [None] if name == "broadcast_in_dim" and not rest else None
    shape = source.aval.shape
    if name == "transpose":
        values: list[int | None] = [None] * len(shape)
        for place, dim in enumerate(equation.params["permutation"]):
            values[dim] = tags[place]
        return [tuple(values)]
    if name == "broadcast_in_dim":
        places = equation.params["broadcast_dimensions"]
        pairs = zip(shape, places, strict=True)
        return [tuple(None if n == 1 else tags[place] for n, place in pairs)]
    if name in ("reshape", "squeeze", "expand_dims"):
        result = equation.outvars[0].aval.shape
        if [n for n in shape if n > 1] == [n for n in result if n > 1]:
            kept = iter([t for t, n in zip(tags, result, strict=True) if n > 1])
            return [tuple(None if n == 1 else next(kept) for n in shape)]
    return None


def stops_gradient(equation: Any, trained: set[Any]) -> bool:
    """Returns whether some operand of an equation has a gradient, but no result has.

    Args:
        equation: Equation such as a comparison.
        trained: Variables through which a gradient flows.
    """
    atoms = (a for a in equation.invars if not _compat.is_literal(a))
    return trained.isdisjoint(equation.outvars) and any(a in trained for a in atoms)


def _where_above_one(shape: Sequence[int], tags: Tags) -> Tags:
    return tuple(
        None if size == 1 else tag for size, tag in zip(shape, tags, strict=False)
    )


def compute_block(
    node: ScoreNode,
    shape: tuple[int, ...],
    values: Sequence[Any],
    offsets: Mapping[int, Any],
) -> Any:
    """Evaluates the equation of a node for one block.

    Args:
        node: Node with an equation.
        shape: Shape of the block.
        values: Blocks of all earlier nodes.
        offsets: First index of the block, by dimension of the full result; default 0.
    """
    equation = node.equation
    operands = [
        atom.val if number is None else values[number]
        for atom, number in zip(equation.invars, node.inputs, strict=True)
    ]
    name, params = equation.primitive.name, equation.params
    if name == "iota":
        dim = params["dimension"]
        places = lax.broadcasted_iota(jnp.int32, shape, dim)
        tag = node.tags[dim]
        start = 0 if tag is None else offsets.get(tag, 0)
        # Positions are computed in int32, as a narrow type would round twice.
        return (places + jnp.asarray(start, jnp.int32)).astype(params["dtype"])
    if name == "broadcast_in_dim":
        places = params["broadcast_dimensions"]
        return lax.broadcast_in_dim(operands[0], shape, places)
    if name in ("reshape", "squeeze", "expand_dims"):
        return lax.reshape(operands[0], shape)
    return _compat.bind(equation, operands)[0]


def reduced_tags(equation: Any, tags: Tags, whole: int) -> list[Tags | None] | None:
    """Returns the operand tags of a reduction or lookup over an uncut dimension.

    Args:
        equation: Equation whose result has tags.
        tags: Tags of the result.
        whole: Tag of the dimension over which the equation may reduce or look up.

    Returns:
        Tags of each operand. None for other equations, and for those that reduce over
        several dimensions with more than one element. The caller must check that the
        reduced dimension is ``whole``.
    """
    name, params = equation.primitive.name, equation.params
    shape = equation.invars[0].aval.shape
    if name in REDUCTIONS:
        kept = iter(tags)
        axes = {axis % len(shape) for axis in params["axes"]}
        inside = tuple(
            (whole if size > 1 else None) if dim in axes else next(kept)
            for dim, size in enumerate(shape)
        )
        return [inside] if inside.count(whole) == 1 else None
    if name == "gather":
        return _looked_up(equation, tags, whole)
    return None


def _looked_up(equation: Any, tags: Tags, whole: int) -> list[Tags | None] | None:
    numbers = equation.params["dimension_numbers"]
    table, indices = (atom.aval.shape for atom in equation.invars)
    batch = tuple(numbers.operand_batching_dims)
    single = tuple(numbers.collapsed_slice_dims)
    if len(single) != 1 or single != tuple(numbers.start_index_map):
        return None
    window = [d for d in range(len(table)) if d not in (*batch, *single)]
    if indices[-1] != 1 or any(table[dim] != 1 for dim in window):
        return None
    given = tuple(tags[dim] for dim in looked_up_dims(equation))
    places = dict(zip(batch, numbers.start_indices_batching_dims, strict=True))
    inside = tuple(
        whole if dim == single[0] else given[places[dim]] if size > 1 else None
        for dim, size in enumerate(table)
    )
    return [inside, (*given, None)]


def looked_up_dims(equation: Any) -> tuple[int, ...]:
    """Returns the dimensions of a gather's result that its indices give, in order."""
    offsets = equation.params["dimension_numbers"].offset_dims
    dims = range(len(equation.outvars[0].aval.shape))
    return tuple(dim for dim in dims if dim not in offsets)
