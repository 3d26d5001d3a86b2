"""What the fields of a plan may hold, checked whenever a plan is made.

Apart from ``plan`` because it says what each number may be, and ``plan`` what it means.
"""

from __future__ import annotations

from typing import Any

from whalejax.meshes.checks import Arguments, check_fields, is_number
from whalejax.planner.errors import PlanError


def check_plan(plan: Any) -> None:
    """Refuse a plan with fields of other types, or numbers that none can have.

    Args:
        plan: a ``Plan``.

    Raises:
        PlanError: every such field.
    """
    check_fields(plan, "plan", PlanError)
    problems = Arguments("plan", PlanError)
    for name in ("version", "num_micro_batches", "loss_chunks"):
        problems.whole(name, getattr(plan, name), least=1)
    problems.whole("zero", plan.zero, most=2)
    for name in ("product_flops", "optimizer_bytes"):
        value = getattr(plan, name)
        if value is not None and not (is_number(value) and value >= 0):
            problems.refuse(name, value, "0 or more")
    if plan.precision not in ("f32", "bf16", "f16"):
        problems.refuse("precision", plan.precision, "f32, bf16 or f16")
    problems.raise_if_any()
