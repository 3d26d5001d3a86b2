"""The rule for attention as one operation: its dimensions and its work.

It is separate from the other rules because it reads the equations inside a call.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, Final

from whalejax import _compat
from whalejax.capture.patterns.attention_pattern import AttentionPattern, attention_of
from whalejax.capture.rules.behaviour import Behaviour, Member
from whalejax.planner.model.graph import Factor, FactorKind
from whalejax.planner.model.score_mask import ScoreMask


def attention_behaviour(jaxpr: Any) -> Behaviour:
    """Returns the behaviour of an attention as one operation.

    Queries, keys and values are sharded alike along the sequence. Keys and values are
    sent round a ring of devices.

    Args:
        jaxpr: Body of the call, whose inputs are the operands.
    """
    one = attention_of(jaxpr)
    places = {v: n for n, v in enumerate(_compat.open_jaxpr(jaxpr)[0].invars)}
    # One variable of the body may be key and value; the call has two operands for it.
    slots = [0, 1, 2, *(places[v] for v in one.outside)]
    result = len(slots)
    shapes = [v.aval.shape for v in (*one.inputs, one.output)]
    out = {what: place for place, what in enumerate(one.output_dims)}
    factors: list[Factor] = []

    def link(*members: Member, kind: FactorKind = "linked") -> None:
        kept = tuple(
            (result if slot == result else slots[slot], dim)
            for slot, dim in members
            if shapes[slot][dim] > 1
        )
        if kept:
            factors.append(Factor(members=kept, kind=kind))

    read = _outside_members(one)
    for q, k, v, tag in one.batch:
        link((0, q), (1, k), (2, v), *read.get(tag, ()), (result, out["scores", tag]))
    for q, tag in one.rows:
        link((0, q), *read.get(tag, ()), (result, out["scores", tag]))
    link((1, one.column[0]), (2, one.column[1]))
    for v in one.width:
        link((2, v), (result, out["width", v]), kind="unshardable")
    for q, k in one.depth:
        link((0, q), (1, k), kind="unshardable")
    for member in read.get(None, ()):
        link(member, kind="unshardable")
    rows, depth, columns, count = _sizes(one)
    width = math.prod(shapes[2][v] for v in one.width)
    return Behaviour(
        factors=tuple(factors),
        flops=2 * count * rows * columns * (depth + width),
        matmul=(rows, depth, columns, count),
        # The operation that reads the output next saves it.
        saves=tuple((slot, slots[wrt]) for slot in slots[:3] for wrt in range(3)),
        mask=_mask(one, rows, columns),
    )


_PARTS: Final = 64
"""Maximum number of parts into which a sequence is cut to find masked blocks."""


def _mask(one: AttentionPattern, rows: int, columns: int) -> ScoreMask | None:
    tag = next(t for q, t in one.rows if one.query.aval.shape[q] == rows)
    both = math.gcd(rows, columns)
    parts = max(n for n in range(1, _PARTS + 1) if both % n == 0)
    hidden = one.scores.masked_blocks(parts, parts, tag, one.column[2])
    return ScoreMask.of(hidden, square=rows == columns) if hidden.any() else None


def _outside_members(one: AttentionPattern) -> dict[int | None, list[Member]]:
    """Returns dimensions of values from outside, by their dimension in the scores.

    Dimensions that every device needs unsharded have the key None. These are columns,
    and dimensions that are read in two ways.
    """
    outside_members: dict[int | None, list[Member]] = {}
    for number, ways in enumerate(one.scores.tags):
        for dim, tags in enumerate(zip(*ways, strict=True)):
            single = tags[0] if len(set(tags)) == 1 else None
            key = None if single == one.column[2] else single
            outside_members.setdefault(key, []).append((3 + number, dim))
    return outside_members


def _sizes(one: AttentionPattern) -> tuple[int, int, int, int]:
    """Returns rows, depth and columns of the first product, and the number of products.

    The rows are the longest dimension that queries alone have.
    """
    query, key = one.query.aval.shape, one.key.aval.shape
    rows = [query[place] for place, _ in one.rows]
    longest = max(rows, default=1)
    depth = math.prod(query[place] for place, _ in one.depth)
    count = math.prod(itertools.chain(rows, (query[q] for q, *_ in one.batch)))
    return longest, depth, key[one.column[0]], count // longest
