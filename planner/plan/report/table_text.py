"""Writes a plan's embedding tables and sections as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from whalejax.meshes.units import milliseconds
from whalejax.planner.json_codec import DataError, decode
from whalejax.planner.plan_data import PlanData
from whalejax.planner.tables.cpu_or_device import TableCost
from whalejax.planner.tables.placement import TablePlacement, placement_of
from whalejax.planner.tables.sections import Sections


_MOST_NAMES = 6


def placed_text(
    sections: Sections | None,
    placement: TablePlacement,
    beside: TablePlacement | None,
    cut: Sequence[TableCost],
) -> str:
    """Returns the text on the sections, and on the load of each of their ranks.

    Args:
        sections, placement, beside, cut: Attributes of a ``TablesPlan``.
    """
    lines = []
    if cut:
        inside = [cost.name for cost in cut if cost.in_processes]
        others = [cost.name for cost in cut if not cost.in_processes]
        lines.append(
            f"in processes of CPUs: {_names(inside)}; on the devices of the dense "
            f"part, with updates that are never late: {_names(others)}"
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
    """Returns the reason why a table is in its section.

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


_SPARSE_CORES: Final = frozenset(("v4", "v5p", "v6e", "v7x"))
"""TPU kinds that have SparseCores."""


def whole_seconds(plan: PlanData) -> float:
    """Returns the seconds of a step, including the embedding tables.

    Two sections run in parallel, and their times may be measured. With one section, the
    tables and the dense part run one after the other. The tables then take the time of
    the most loaded device.

    Args:
        plan: The plan.
    """
    dense = plan.time.step_seconds
    if plan.tables is None:
        return dense
    document = plan.tables.document
    sections = _sections(document)
    if sections is not None:
        return sections.step_seconds
    return dense + _table_seconds(_placement_and_cut(document)[0])


def _table_seconds(placement: TablePlacement) -> float:
    return float(placement.loads.max()) if placement.objective == "time" else 0.0


def tables_text(plan: PlanData) -> str:
    """Returns the text on a plan's sections and tables; empty without tables.

    The first line has the seconds of a step and their parts.

    Args:
        plan: The plan.
    """
    if plan.tables is None:
        return ""
    document = plan.tables.document
    sections, found = _sections(document), _placement_and_cut(document)
    lines = [_whole_text(plan.time.step_seconds, sections, found[0]), *_not_used(plan)]
    lines += [placed_text(sections, *found)]
    lines += [f"no table: {text}" for _, text in document.get("refused", ())]
    return "\n".join(lines)


def _whole_text(
    dense: float, sections: Sections | None, placement: TablePlacement
) -> str:
    if sections is not None:
        how = "measured" if sections.is_measured else "predicted"
        loads = sections.times.loads(sections.processes)
        slowest = max(loads, key=lambda name: loads[name])
        busy = ", ".join(f"{name} {milliseconds(x)}" for name, x in loads.items())
        return (
            f"a step takes {milliseconds(sections.step_seconds)} as {how}, of {busy}; "
            f"{slowest} takes longest"
        )
    tables = _table_seconds(placement)
    return (
        f"a step takes {milliseconds(dense + tables)} as predicted: "
        f"{milliseconds(dense)} of the dense part, {milliseconds(tables)} of lookups, "
        "exchange and updates on the most loaded device"
    )


def _not_used(plan: PlanData) -> list[str]:
    kinds = {kind.name for kind in plan.cluster.kinds}
    if not kinds & _SPARSE_CORES:
        return []
    return [
        "SparseCore is not used: the rates of its lookups are unknown here, so it has "
        "no predicted cost, and steps run on TensorCores alone"
    ]


def _sections(document: dict[str, Any]) -> Sections | None:
    found: Any = document.get("sections")
    try:
        return decode(Sections, found) if found else None
    except DataError:
        return None  # Compilation raises the error.


def _placement_and_cut(
    document: dict[str, Any],
) -> tuple[TablePlacement, TablePlacement | None, tuple[TableCost, ...]]:
    """Returns the table processes' placement, the devices' placement, and the costs.

    The second may be None. The costs are those of the tables in both sections.
    """
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
    """Returns the reason for a table's placement, or None if no table has the path.

    Args:
        plan: A plan with tables.
        path: Dotted path of a parameter, or a prefix of it.
    """
    assert plan.tables is not None
    placement, beside, cut = _placement_and_cut(plan.tables.document)
    more = () if beside is None else beside.tables
    for table in (*placement.tables, *more):
        if table.name == path or table.name.startswith(f"{path}."):
            return placed_why(table.name, placement, beside, cut)
    return None


def dense_path(plan: PlanData, path: str) -> str:
    """Returns the path of a parameter in the dense part, or else the given path.

    Args:
        plan: A plan with tables.
        path: Dotted path in the model, or a prefix of it.
    """
    for leaf in plan.leaves:
        name = leaf.path.removeprefix("dense.")
        if name == path or name.startswith(f"{path}."):
            return leaf.path
    return path
