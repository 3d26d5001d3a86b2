"""Texts about tables in two sections: the place of each, and the sections' times."""

from __future__ import annotations

from collections.abc import Sequence

from whalejax.planner.tables.cpu_or_device import TableCost
from whalejax.planner.tables.placement import TablePlacement
from whalejax.planner.tables.sections import Sections


_MOST_NAMES = 6


def placed_text(
    sections: Sections | None,
    placement: TablePlacement,
    beside: TablePlacement | None,
    cut: Sequence[TableCost],
) -> str:
    """Describes the sections, and the load of each of their ranks.

    Args:
        sections, placement, beside, cut: Attributes of a ``TablesPlan``.
    """
    lines = []
    if cut:
        inside = [cost.name for cost in cut if cost.in_processes]
        others = [cost.name for cost in cut if not cost.in_processes]
        lines.append(
            f"in processes of CPUs: {_names(inside)}; beside the dense part, whose "
            f"updates are never late: {_names(others)}"
        )
    if sections is not None:
        lines.append(str(sections))
    lines.append(str(placement))
    if beside is not None:
        lines.append(f"beside the dense part: {beside}")
    return "\n".join(lines)


def placed_why(
    name: str,
    placement: TablePlacement,
    beside: TablePlacement | None,
    cut: Sequence[TableCost],
) -> str:
    """Returns the reason for a table's section.

    Args:
        name: Name of the table.
        placement, beside, cut: Attributes of a ``TablesPlan``.
    """
    own = placement
    if beside is not None and any(table.name == name for table in beside.tables):
        own = beside
    costs = [str(cost) for cost in cut if cost.name == name]
    return "\n".join([*costs, own.why(name)])


def _names(names: Sequence[str]) -> str:
    more = f" + {len(names) - _MOST_NAMES}" if names[_MOST_NAMES:] else ""
    return (", ".join(names[:_MOST_NAMES]) or "none") + more
