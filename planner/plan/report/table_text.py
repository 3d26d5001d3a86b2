"""What a plan says of its embedding tables."""

from __future__ import annotations

from typing import Any

from whalejax.planner.json_codec import DataError, decode
from whalejax.planner.plan_data import PlanData
from whalejax.planner.tables.cut import TableCost
from whalejax.planner.tables.placement import TablePlacement
from whalejax.planner.tables.record import placement_of
from whalejax.planner.tables.section_text import placed_text, placed_why
from whalejax.planner.tables.sections import Sections


def tables_text(plan: PlanData) -> str:
    """The sections and the placement of a plan's tables, in lines; empty without any.

    Args:
        plan: The plan.
    """
    if plan.tables is None:
        return ""
    document = plan.tables.document
    lines = [placed_text(_sections(document), *_placed(document))]
    lines += [f"no table: {text}" for _, text in document.get("refused", ())]
    return "\n".join(lines)


def _sections(document: dict[str, Any]) -> Sections | None:
    found: Any = document.get("sections")
    try:
        return decode(Sections, found) if found else None
    except DataError:
        return None  # Whoever compiles it is told.


def _placed(
    document: dict[str, Any],
) -> tuple[TablePlacement, TablePlacement | None, tuple[TableCost, ...]]:
    """The placement, that beside the dense part, and what tables take."""
    beside: Any = document.get("beside")
    try:
        cut = decode(tuple[TableCost, ...], document.get("cut", []))
    except DataError:
        cut = ()
    return (
        placement_of(document["placement"]),
        None if beside is None else placement_of(beside),
        cut,
    )


def table_why(plan: PlanData, path: str) -> str | None:
    """Why a table is where it is; None where no table has the path.

    Args:
        plan: A plan with tables.
        path: Dotted path of a parameter, or its beginning.
    """
    assert plan.tables is not None
    placement, beside, cut = _placed(plan.tables.document)
    more = () if beside is None else beside.tables
    for table in (*placement.tables, *more):
        if table.name == path or table.name.startswith(f"{path}."):
            return placed_why(table.name, placement, beside, cut)
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
