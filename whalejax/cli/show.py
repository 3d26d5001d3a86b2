"""Prints plans on a terminal in colour, with rich.

It prints the lines of ``print(plan)``, which needs no rich. This module imports no JAX,
so that ``whalejax show`` starts at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.style import Style

from whalejax.meshes.units import milliseconds as seconds_text
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan.report.parameter_table import ParameterRow as ParameterRow
from whalejax.planner.plan.report.parameter_table import (
    parameter_rows as parameter_rows,
)
from whalejax.planner.plan.report.plan_page import plan_lines
from whalejax.planner.plan.report.text_layout import Line


__all__ = ["Lines", "plan_table", "print_plan", "seconds_text"]

_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red", "white")
_STYLES = {
    "": Style(),
    "name": Style(bold=True),
    "head": Style(bold=True),
    **{
        f"bar {number}": Style(color=_COLOURS[number % len(_COLOURS)])
        for number in range(16)
    },
}


@dataclass(frozen=True, slots=True)
class Lines:
    """Lines of a plan for the width of the console, which rich colours and prints."""

    of_width: Callable[[int], list[Line]]

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> RenderResult:
        for line in self.of_width(options.max_width):
            for text, style in line:
                yield Segment(text, _STYLES[style])
            yield Segment.line()


def print_plan(plan: Plan, console: Console, *, all_rows: bool = False) -> None:
    """Prints ``plan_table`` to a console."""
    console.print(plan_table(plan, all_rows=all_rows))


def plan_table(plan: Plan, *, all_rows: bool = False) -> RenderableType:
    """Formats a plan with its time, memory, parameters, traffic and reasons.

    Args:
        plan: The plan.
        all_rows: Whether to show all parameters, traffic and reasons, not only the
            largest.

    Returns:
        An object that ``rich`` prints.

    >>> import jax, jax.numpy as jnp
    >>> import whalejax as wh
    >>> net = {"w": jax.ShapeDtypeStruct((512, 512), jnp.float32)}
    >>> x = jax.ShapeDtypeStruct((64, 512), jnp.float32)
    >>> plan = wh.plan(lambda net, x: (x @ net["w"]).mean(), net, x, cluster="h100:8")
    >>> table = plan_table(plan)
    """
    return Lines(lambda width: plan_lines(plan, width, all_rows=all_rows))
