"""Gathers, once before a loop, the weights that every iteration reads.

A loop over time uses the same weights in every iteration. With constraints inside the
loop, every iteration would gather them and scatter their gradients, as compilers leave
most collectives in the loop. Values that the body computes from such weights alone,
such as casts and concatenated kernels, are computed before the loop too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from whalejax import _compat
from whalejax.lowering.spmd.constraints import Constraints, Position


Place = tuple[Position, int]
"""The position of an equation, and the number of one of its operands."""

Made = Callable[[], Any]
"""Function that returns a loop-invariant value."""

_Known = dict[Any, Made]


def loop_weights(
    equation: Any, values: Sequence[Any], constraints: Constraints, position: Position
) -> dict[Place, Made]:
    """Returns the weights that a scan would gather in every iteration, by reader.

    Args:
        equation: Scan as traced.
        values: Operands of the scan.
        constraints: Constraints, which name the gathered weights.
        position: Position of the scan's body.

    Returns:
        For each reader, a function that returns the weight before the gather.
    """
    if not any(place[: len(position)] == position for place, _ in constraints.gathers):
        return {}
    count = _compat.scan_parts(equation).num_consts
    known = [_wrap_value(v) if i < count else None for i, v in enumerate(values)]
    weights: dict[Place, Made] = {}
    body = _compat.inner_jaxprs(equation)[0]
    _walk(body, known, position, constraints.gathers, weights)
    return weights


def _wrap_value(value: Any) -> Made:
    return lambda: value


def _walk(
    jaxpr: Any,
    inputs: Sequence[Made | None],
    position: Position,
    gathers: Mapping[Place, Any],
    found: dict[Place, Made],
) -> list[Made | None]:
    """Collects the reads of loop-invariant values; returns functions for the outputs.

    Each function computes an output. An input or output that changes with every
    iteration has none. ``found`` receives the reads.
    """
    body, constants = _compat.open_jaxpr(jaxpr)
    known: _Known = {
        v: _wrap_value(c) for v, c in zip(body.constvars, constants, strict=True)
    }
    known.update((v, made) for v, made in zip(body.invars, inputs, strict=True) if made)
    for index, equation in enumerate(body.eqns):
        place = (*position, index)
        operands = [_of(atom, known) for atom in equation.invars]
        slots = operand_slots(equation)
        for slot, made in zip(slots, operands, strict=True):
            read = place, -1 if slot is None else slot
            if made is not None and read in gathers:
                found[read] = made
        results = _results(equation, operands, place, gathers, found)
        known.update(
            (v, made) for v, made in zip(equation.outvars, results, strict=True) if made
        )
    return [_of(atom, known) for atom in body.outvars]


def _of(atom: Any, known: _Known) -> Made | None:
    return _wrap_value(atom.val) if _compat.is_literal(atom) else known.get(atom)


def _results(
    equation: Any,
    operands: Sequence[Made | None],
    place: Position,
    gathers: Mapping[Place, Any],
    found: dict[Place, Made],
) -> list[Made | None]:
    """Returns functions that compute the results; None for results that vary."""
    kind = _compat.recursion(equation)
    inner = _compat.inner_jaxprs(equation)
    unknown: list[Made | None] = [None] * len(equation.outvars)
    if kind in ("inline", "remat"):
        return _walk(inner[0], operands, (*place, 0), gathers, found)
    if kind == "scan":
        count = _compat.scan_parts(equation).num_consts
        same = [made if i < count else None for i, made in enumerate(operands)]
        _walk(inner[0], same, (*place, 0), gathers, found)
        return unknown
    given = [made for made in operands if made is not None]
    if kind is not None or len(given) < len(operands) or equation.effects:
        return unknown

    @functools.cache
    def compute_results() -> list[Any]:
        values = [value() for value in given]
        with _compat.equation_context(equation):
            return _compat.bind(equation, values)

    return [
        functools.partial(_slot, compute_results, slot) for slot in range(len(unknown))
    ]


def _slot(made: Callable[[], list[Any]], slot: int) -> Any:
    return made()[slot]


def operand_slots(equation: Any) -> list[int | None]:
    """Returns the operand number in capture of each input; None for scalar literals."""
    count = 0
    slots: list[int | None] = []
    for atom in equation.invars:
        if _compat.is_literal(atom) and not atom.aval.shape:
            slots.append(None)
        else:
            slots.append(count)
            count += 1
    return slots


def recomputes(jaxpr: Any) -> bool:
    """Returns whether a body has checkpointed regions of the user."""
    body, _ = _compat.open_jaxpr(jaxpr)
    return any(
        _compat.recursion(equation) == "remat"
        or any(map(recomputes, _compat.inner_jaxprs(equation)))
        for equation in body.eqns
    )
