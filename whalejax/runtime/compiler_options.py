"""XLA options of a step: their checks, and the note about them in a plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from whalejax.meshes.checks import is_number, is_printable, short_repr
from whalejax.meshes.errors import Problems
from whalejax.planner.cost_terms import Chosen
from whalejax.planner.plan.allowed_xla_options import check_options
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan_errors import PlanError


def checked_options(options: Any) -> dict[str, bool | int | float | str]:
    """Returns the checked compiler options, with booleans for "true" and "false".

    Raises:
        PlanError: An option has no valid name or value, or is not allowed in a plan.
    """
    problems = Problems("compiler_options", PlanError)
    if isinstance(options, tuple) and all(
        isinstance(pair, tuple) and len(pair) == 2 for pair in options
    ):
        options = dict(options)  # as stored in a plan
    if not isinstance(options, Mapping | None):
        raise PlanError(
            f"compiler_options is {short_repr(options)}; expected a dict of XLA's "
            "options, "
            'such as {"xla_tpu_enable_async_collective_fusion": True}'
        )
    result: dict[str, bool | int | float | str] = {}
    for name, value in (options or {}).items():
        plain = value.item() if isinstance(value, np.generic) else value
        if not isinstance(name, str) or not name.isidentifier():
            problems.add(
                f"{short_repr(name)} names no option; expected one of XLA's without "
                "dashes, such as xla_tpu_enable_async_collective_fusion"
            )
        elif not (isinstance(plain, bool) or is_number(plain) or is_printable(plain)):
            problems.add(
                f"{name} is {short_repr(value)}; expected a number, a text, True or "
                "False"
            )
        else:
            text = str(plain).lower()
            result[name] = text == "true" if text in ("true", "false") else plain
    check_options(result, problems)
    problems.raise_if_any()
    return result


def option_note(options: Mapping[str, Any]) -> list[str]:
    """Returns the note about a plan's options; empty without options."""
    words = ", ".join(f"{name}={value}" for name, value in options.items())
    return [f"compiled with {words}"] if options else []


def compiled_with(
    plan: Plan, options: Mapping[str, bool | int | float | str], precisions: Chosen
) -> Plan:
    """Returns a plan, and its pipelines, with their compiler options and precisions.

    Args:
        plan: Plan to change.
        options: XLA options of the compiler.
        precisions: (TaskGraph, precision) pairs if only some TaskGraphs compute in 16
            bits.
    """
    each = (compiled_with(pipeline, options, precisions) for pipeline in plan.pipelines)
    return dataclasses.replace(
        plan,
        compiler_options=tuple(sorted(options.items())),
        precisions=precisions,
        pipelines=tuple(each),
    )
