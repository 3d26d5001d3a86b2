"""Checks the command-line words that a plan file keeps of how its model is made.

A plan remembers the words of the command line that it was made with, and ``whalejax
verify`` makes the model from them again. Anybody can write such words; those that no
model of the plan's parameters has would take all memory, or for ever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from whalejax.cli.options import named_values
from whalejax.meshes.errors import Problems
from whalejax.planner.errors import PlanError


if TYPE_CHECKING:
    from whalejax.planner.plan.plan import Plan


SMALL: Final = 1024
"""What any option may be, whatever parameters there are."""

_NO_SIZE: Final = frozenset(("seed", "warmup_steps"))
"""Options of reference models that make nothing larger."""


def check_source(plan: Plan, name: str) -> None:
    """Refuse options of a reference model that are larger than the plan's model.

    Args:
        plan: what was read.
        name: of its file.

    Raises:
        PlanError: every option that no model of these parameters has.
    """
    shapes = [*(x.shape for x in plan.leaves), *(x.shape for x in plan.batch)]
    sizes = [size for shape in shapes for size in shape]
    most = max([SMALL, len(plan.leaves), *sizes])
    problems = Problems(
        f"{name} is a damaged plan: its model is made with options that its parameters "
        "do not have. Make it again with whalejax plan, or name the model with --model "
        "and --set",
        PlanError,
    )
    for option, value in named_values(plan.source[1:]).items():
        if option in _NO_SIZE or isinstance(value, str | bool):
            continue
        if not abs(value) <= most:
            problems.add(f"{option}={value}; its largest size is {most}")
    problems.raise_if_any()
