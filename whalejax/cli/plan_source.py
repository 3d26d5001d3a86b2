"""Checks the model and its options in a plan file before the model is built.

A plan file records the model and options of ``whalejax plan``, and commands such as
``whalejax verify`` build the model from them. A manipulated file could name a model so
large that it takes all memory or never ends.
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
"""Largest value of an option that is always accepted."""

_NO_SIZE: Final = frozenset(("seed", "warmup_steps"))
"""Options of reference models that do not change the model's size."""


def check_source(plan: Plan, name: str) -> None:
    """Refuses options of a reference model that are larger than the plan's arrays.

    The limit is the largest dimension of the plan's parameters and batch, the number of
    parameters, or ``SMALL``.

    Args:
        plan: Plan from a file.
        name: Name of the plan's file.

    Raises:
        PlanError: Some options are above the limit; lists all.
    """
    shapes = [*(x.shape for x in plan.leaves), *(x.shape for x in plan.batch)]
    sizes = [size for shape in shapes for size in shape]
    most = max([SMALL, len(plan.leaves), *sizes])
    problems = Problems(
        f"{name} is a damaged plan: the options of its model do not match its "
        "parameters. Make it again with whalejax plan, or name the model with --model "
        "and --set",
        PlanError,
    )
    for option, value in named_values(plan.source[1:]).items():
        if option in _NO_SIZE or isinstance(value, str | bool):
            continue
        if not abs(value) <= most:
            problems.add(f"{option}={value}; expected at most {most}")
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
        WhaleError: Options are given without a model. Or ``model`` is None, and the
            plan names no model, a model with impossible options, or a file of code.
    """
    from whalejax.planner.plan.plan import Plan

    if settings and model is None:
        raise WhaleError("--set was given without --model; give both, or neither")
    plan = Plan.load(path)
    source = plan.source if model is None else (model, *settings)
    if not source:
        raise WhaleError(
            f"{path} was made from Python and does not name its model. Name the model "
            "with --model and --set, or call plan.verify(…), wh.check(…) or "
            "step.profile(…) in the Python code"
        )
    if model is None and is_file(source[0]):
        words = " ".join(["--set", *map(shlex.quote, source[1:])] * (len(source) > 1))
        raise WhaleError(
            f"the model of {path} is in {quoted(source[0])}, which does not run only "
            "because a plan file names it. If you trust that file, give "
            f"--model {shlex.quote(source[0])}{words and f' {words}'}"
        )
    if model is None:
        check_source(plan, str(path))
    return find_job(source[0], named_values(source[1:])), plan
