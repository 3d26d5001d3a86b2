"""Checks the words in a plan file from which the command line makes its model.

A plan records the words of the command line with which it was made, and ``whalejax
verify`` makes the model from them again. Anybody can write such words; a model that is
larger than the plan's parameters could take all memory, or run for ever.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from whalejax.api.named_jobs import find_job, is_file, named_values
from whalejax.meshes.errors import Problems, WhaleError, quoted
from whalejax.planner.plan_errors import PlanError


if TYPE_CHECKING:
    from whalejax.planner.plan.plan import Plan
    from whalejax.user_code.losses import Job


SMALL: Final = 1024
"""Value that any option may have, for any parameters."""

_NO_SIZE: Final = frozenset(("seed", "warmup_steps"))
"""Options of reference models that do not enlarge the model."""


def check_source(plan: Plan, name: str) -> None:
    """Refuses options of a reference model that are larger than the plan's model.

    Args:
        plan: Plan from a file.
        name: Name of the plan's file.

    Raises:
        PlanError: Options do not match a model of these parameters; lists all.
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


def planned_job(
    path: Path, model: str | None, settings: Sequence[str]
) -> tuple[Job, Plan]:
    """Returns the job of a plan file, and the plan.

    Args:
        path: Path of the file.
        model: Model of ``--model``, or None for the model that the plan names.
        settings: Options of that model.

    Raises:
        WhaleError: Settings are given without a model; or the plan names no model, one
            with impossible options, or a file of code, which only the user may choose
            to run.
    """
    from whalejax.planner.plan.plan import Plan

    if settings and model is None:
        raise WhaleError("--set changes --model; give both, or neither")
    plan = Plan.load(path)
    source = plan.source if model is None else (model, *settings)
    if not source:
        raise WhaleError(
            f"{path} does not say which model it is for, because it was made from "
            "Python. Name the model with --model (and --set), or call plan.verify(…), "
            "wh.check(…) or step.profile(…) where the plan is made"
        )
    if model is None and is_file(source[0]):
        words = " ".join(["--set", *map(shlex.quote, source[1:])] * (len(source) > 1))
        raise WhaleError(
            f"{path} says that its model is made by {quoted(source[0])}. A plan file "
            "does not choose which code runs: if that file is yours, name it, with "
            f"--model {shlex.quote(source[0])}{words and f' {words}'}"
        )
    if model is None:
        check_source(plan, str(path))
    return find_job(source[0], named_values(source[1:])), plan
