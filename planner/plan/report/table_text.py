"""Renders a plan's embedding tables as text."""

from __future__ import annotations

from typing import Any

from whalejax.planner.json_codec import DataError, decode
from whalejax.planner.plan_data import PlanData
from whalejax.planner.tables.record import placement_of
from whalejax.planner.tables.sections import Sections


def tables_text(plan: PlanData) -> str:
    """The sections and the placement of a plan's tables, in lines; empty without any.

    Args:
        plan: The plan.
    """
    if plan.tables is None:
        return ""
    document = plan.tables.document
    lines = []
    try:
        sections: Any = document.get("sections")
        lines += [str(decode(Sections, sections))] if sections else []
    except DataError:
        pass  # Whoever compiles it is told.
    lines.append(str(placement_of(document["placement"])))
    lines += [f"no table: {text}" for _, text in document.get("refused", ())]
    return "\n".join(lines)


def table_why(plan: PlanData, path: str) -> str | None:
    """Explains a table's placement; None where no table has the path.

    Args:
        plan: A plan with tables.
        path: Dotted path of a parameter, or its beginning.
    """
    assert plan.tables is not None
    placement = placement_of(plan.tables.document["placement"])
    for table in placement.tables:
        if table.name == path or table.name.startswith(f"{path}."):
            return placement.why(table.name)
    return None


def dense_path(plan: PlanData, path: str) -> str:
    """Path in the dense part of a parameter of the model.

    Args:
        plan: A plan with tables.
        path: Dotted path in the model, or its beginning.
    """
    for leaf in plan.leaves:
        name = leaf.path.removeprefix("dense.")
        if name == path or name.startswith(f"{path}."):
            return leaf.path
    return path
