"""One table of rules: from a primitive's name to how it treats dimensions.

A primitive that stands in no table is legal: its dimensions all stay whole, and its
name is reported in ``Graph.unknown_primitives``.
"""

from __future__ import annotations

from typing import Final

from whalejax.capture.rules import elementwise, matmul, reduce, shape
from whalejax.capture.rules.behaviour import Behaviour, Equation, Rule, unknown


RULES: Final[dict[str, Rule]] = {
    **elementwise.RULES,
    **shape.RULES,
    **reduce.RULES,
    **matmul.RULES,
}


def behaviour(equation: Equation) -> Behaviour:
    """Returns the behaviour of an equation; dimensions stay whole where no rule is
    known.

    Args:
        equation: Primitive, parameters and shapes.
    """
    return RULES.get(equation.name, unknown)(equation)
