"""Counters in the non-trained state: the increment of each in one micro-batch.

Streams of random numbers count their calls. Micro-batch m finds m times the increment
added, whichever device computes it, so stages need not pass counters on.
"""

from __future__ import annotations

from typing import Any

import jax

from whalejax import _compat
from whalejax.adapters.leaves import is_key


_SAME = ("copy", "copy_p", "convert_element_type", "reshape")


def advances(rest: Any, jaxpr: Any, first: int) -> tuple[int | None, ...]:
    """Returns the increment of each non-trainable leaf in one micro-batch.

    Args:
        rest: Non-trainable state.
        jaxpr: The traced loss; the last of its outputs are the new leaves.
        first: Index of the input that is the first leaf.

    Returns:
        The increment of each leaf: 0 where it does not change, as with keys at the end
        of a step; None where the change is not a constant increment.
    """
    leaves = jax.tree.leaves(rest)
    count = len(leaves)
    old = jaxpr.invars[first : first + count]
    new = jaxpr.outvars[len(jaxpr.outvars) - count :]
    result: list[int | None] = []
    for leaf, before, after in zip(leaves, old, new, strict=True):
        if after is before or is_key(leaf):
            result.append(0)
            continue
        way = None if _compat.is_inexact(before.aval.dtype) else _added(jaxpr, after)
        same = way is not None and jaxpr.invars[way[0]] is before
        result.append(way[1] if way is not None and same else None)
    return tuple(result)


def _added(jaxpr: Any, atom: Any) -> tuple[int, int] | None:
    """Returns the input and the increment whose sum a value is, or None."""
    body, _ = _compat.open_jaxpr(jaxpr)
    made = {v: (e, slot) for e in body.eqns for slot, v in enumerate(e.outvars)}
    inputs = {v: place for place, v in enumerate(body.invars)}
    total = 0
    while not _compat.is_literal(atom) and atom not in inputs:
        if atom not in made:
            return None
        step = _before(*made[atom])
        if step is None:
            return None
        atom, more = step
        total += more
    return None if _compat.is_literal(atom) else (inputs[atom], total)


def _before(equation: Any, slot: int) -> tuple[Any, int] | None:
    """Returns the operand and the increment whose sum a result is, or None."""
    name = equation.primitive.name
    if (
        name in _SAME
        and equation.invars[0].aval.shape == equation.outvars[0].aval.shape
    ):
        return equation.invars[0], 0
    if name == "add":
        return _sum(*equation.invars)
    kind = _compat.recursion(equation)
    if kind not in ("inline", "remat", "scan"):
        return None
    (inner,) = _compat.inner_jaxprs(equation)
    way = _added(inner, _compat.open_jaxpr(inner)[0].outvars[slot])
    if way is None:
        return None
    place, more = way
    if kind == "scan":
        parts = _compat.scan_parts(equation)
        if slot < parts.num_carries:
            same = place == parts.num_consts + slot
            return (equation.invars[place], more * parts.length) if same else None
        if place < parts.num_consts + parts.num_carries:
            return None
    return equation.invars[place], more


def _sum(one: Any, other: Any) -> tuple[Any, int] | None:
    if _compat.is_literal(one):
        one, other = other, one
    if _compat.is_literal(one) or not _compat.is_literal(other):
        return None
    return (one, int(other.val)) if not other.aval.shape else None
