"""Layouts of values that the model itself asks for, with ``with_sharding_constraint``.

They name axes of a mesh of the user's, which need not exist in the plan's, and were
written for another division of the work: a plan's program leaves them out, and the plan
says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from whalejax import _compat


CONSTRAINT: Final = "sharding_constraint"
"""Name of the primitive."""


def constraint_notes(jaxpr: Any) -> list[str]:
    """What a user should know of the layouts that a program asks for.

    Args:
        jaxpr: of the loss, as captured.
    """
    found = [*_constraints(jaxpr)]
    if not found:
        return []
    spec, line = found[0].params["sharding"], _compat.line_text(found[0])
    spec = getattr(spec, "spec", spec)
    count = len(found)
    layouts = "1 layout" if count == 1 else f"{count} layouts"
    are = "is" if count == 1 else "are"
    return [
        f"{layouts} of values that the model fixes by with_sharding_constraint (the "
        f"first: {spec} in {line}) {are} left out: this plan lays values out itself. "
        "What an axis is to shard is said by the metadata of parameters, or by "
        "wh.split(axis=...)"
    ]


def _constraints(jaxpr: Any) -> Iterator[Any]:
    for equation in _compat.open_jaxpr(jaxpr)[0].eqns:
        if equation.primitive.name == CONSTRAINT:
            yield equation
        if _compat.recursion(equation) != "opaque":
            for inner in _compat.inner_jaxprs(equation):
                yield from _constraints(inner)
