"""Table of all rules, by the primitive's name.

A primitive without a rule is allowed: its dimensions all stay unsharded, and its name
is reported in ``Graph.unknown_primitives``.
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
    """Returns an equation's behaviour; without a rule, dimensions stay unsharded.

    Args:
        equation: Primitive, parameters and shapes.
    """
    return RULES.get(equation.name, unknown)(equation)
