"""Table of all rules, by primitive."""

from __future__ import annotations

import enum
from typing import Final

import numpy as np

from whalejax.capture.separability import (
    elementwise_rules,
    indexing_rules,
    product_rules,
    random_rules,
    reduction_rules,
    shape_rules,
)
from whalejax.capture.separability.elementwise_rules import (
    check_sum_dtype,
    check_unsigned_sum,
)
from whalejax.capture.separability.equations import PairedEquation, Rule
from whalejax.capture.separability.values import (
    SIZE,
    CoupledError,
    Dependence,
    Value,
    is_one,
    plain_dim,
)


RULES: Final[dict[str, Rule]] = {
    **elementwise_rules.RULES,
    **shape_rules.RULES,
    **reduction_rules.RULES,
    **product_rules.RULES,
    **indexing_rules.RULES,
    **random_rules.RULES,
}


def apply_rule(equation: PairedEquation) -> list[Value]:
    """Returns facts about an equation's results.

    Raises:
        CoupledError: The equation couples samples, or reads some and has no rule.
    """
    _check_switches(equation)
    rule = RULES.get(equation.name)
    result = _opaque(equation) if rule is None else rule(equation)
    for value, variable in zip(result, equation.part.outvars, strict=True):
        if value.kind is Dependence.SUM:
            check_sum_dtype(variable.aval.dtype)
            check_unsigned_sum(equation)
    return result


def _check_switches(equation: PairedEquation) -> None:
    for name, value in equation.part.params.items():
        kind = isinstance(value, bool | str | enum.Enum | np.dtype)
        if kind and value != equation.whole.params.get(name):
            raise CoupledError(f"{name} {SIZE}")


def _opaque(equation: PairedEquation) -> list[Value]:
    if equation.part.effects:
        raise CoupledError(f"calls {equation.name}, which may keep samples for later")
    if any(
        v.kind is not Dependence.FIXED or not is_one(v.ratio) for v in equation.values
    ):
        raise CoupledError(f"calls {equation.name}, which may do anything with samples")
    if any(a.grows for v in equation.values for dim in v.dims for a in dim):
        raise CoupledError(f"calls {equation.name} with a shape that {SIZE}")
    opaque = []
    for n in range(len(equation.part.outvars)):
        part, whole = equation.shapes(n)
        if part != whole:
            raise CoupledError(f"calls {equation.name} for a shape that {SIZE}")
        dims = tuple(plain_dim(a, b) for a, b in zip(part, whole, strict=True))
        opaque.append(Value(kind=Dependence.FIXED, dims=dims))
    return opaque
