"""One table of rules: from a primitive's name to how it treats dimensions.

A primitive that stands in no table is legal: its dimensions all stay whole, and its
name is reported in ``Graph.unknown_primitives``.
"""

from __future__ import annotations

from typing import Final

from whalejax.capture import (
    rules_elementwise,
    rules_matmul,
    rules_reduce,
    rules_shape,
)
from whalejax.capture.behaviour import Behaviour, Equation, Rule, unknown


RULES: Final[dict[str, Rule]] = {
    **rules_elementwise.RULES,
    **rules_shape.RULES,
    **rules_reduce.RULES,
    **rules_matmul.RULES,
}


def behaviour(equation: Equation) -> Behaviour:
    """How an equation treats dimensions; everything whole where no rule is known.

    Args:
        equation: primitive, parameters and shapes.
    """
    return RULES.get(equation.name, unknown)(equation)
