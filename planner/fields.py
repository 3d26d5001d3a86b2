"""Checks of a plan's fields, and of what its methods are given.

Apart from ``plan_data``, which says what each field means.
"""

from __future__ import annotations

from typing import Any

from whalejax.meshes.checks import Arguments, check_fields, is_number
from whalejax.meshes.dtypes import PRECISIONS
from whalejax.planner.entries import Collective
from whalejax.planner.errors import PlanError
from whalejax.planner.step_options import COMBINATIONS, option_counts


_COUNTS = ("version", "num_micro_batches", "group_size")


def check_plan(plan: Any) -> None:
    """Refuse a plan with fields of other types, or numbers that none can have.

    Args:
        plan: a ``Plan``.

    Raises:
        PlanError: every such field.
    """
    check_fields(plan, "plan", PlanError)
    problems = Arguments("plan", PlanError)
    counts = {name: getattr(plan, name) for name in _COUNTS}
    for name, count in (counts | option_counts(plan)).items():
        problems.whole(name, count, least=1)
    problems.whole("zero", plan.zero, most=2)
    problems.choice("combine", plan.combine, COMBINATIONS)
    for name in ("product_flops", "optimizer_bytes"):
        value = getattr(plan, name)
        if value is not None and not (is_number(value) and value >= 0):
            problems.refuse(name, value, "0 or more")
    if plan.precision not in PRECISIONS:
        problems.refuse("precision", plan.precision, "f32, bf16 or f16")
    problems.raise_if_any()


def check_path(title: str, path: object) -> None:
    """Refuse what is no path of a plan file.

    Args:
        title: the method that was given it.
        path: what it was given.

    Raises:
        PlanError: it is none.
    """
    problems = Arguments(title, PlanError)
    problems.path("path", path, "the path of a plan file")
    problems.raise_if_any()


def check_document(document: object, name: object) -> None:
    """Refuse what ``Plan.document`` did not give.

    Args:
        document: to be read.
        name: what errors are to call it.

    Raises:
        PlanError: they are no such thing.
    """
    problems = Arguments("Plan.from_document", PlanError)
    problems.of("document", document, dict, "what Plan.document gave")
    problems.words("name", name)
    problems.raise_if_any()


def check_collective(collective: object) -> None:
    """Refuse what is no collective of a plan.

    Args:
        collective: what was given as one.

    Raises:
        PlanError: it is none.
    """
    problems = Arguments("Plan.times", PlanError)
    problems.of("collective", collective, Collective, "one of plan.collectives")
    problems.raise_if_any()
