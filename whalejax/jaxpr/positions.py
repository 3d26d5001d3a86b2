"""Equations of a program by position, through nested programs."""

from __future__ import annotations

from typing import Any

from whalejax import _compat


Position = tuple[int, ...]
"""Indices of an equation, of a program inside it, of an equation in that program, and
so on."""


def program_at(program: Any, position: Position) -> Any:
    """Returns the open jaxpr that contains an equation.

    Args:
        program: Complete program, closed or open.
        position: Position of the equation.
    """
    body, _ = _compat.open_jaxpr(program)
    for number, place in zip(position[:-1:2], position[1::2], strict=False):
        body, _ = _compat.open_jaxpr(_compat.inner_jaxprs(body.eqns[number])[place])
    return body


def equation_at(program: Any, position: Position) -> Any:
    """Returns the equation at a position of a program."""
    return program_at(program, position).eqns[position[-1]]
