"""Places tables in two sections: in CPU processes, and on devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from whalejax.meshes.checks import Arguments, short_repr
from whalejax.planner.plan_errors import NothingFits, PlanError
from whalejax.planner.tables.cpu_or_device import (
    TableCost,
    choose_cut,
    table_costs,
    times_of,
    with_measured,
)
from whalejax.planner.tables.place import place_tables
from whalejax.planner.tables.placement import TablePlacement
from whalejax.planner.tables.sections import Sections, SectionTimes, choose_sections
from whalejax.planner.tables.table import Ranks, Table


_ROOM: Final = (1.0, 0.9, 0.75, 0.5, 0.0)
"""Fractions of the devices' memory to try, as tables that fit in total may not fit on
single devices.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionsWanted:
    """Settings of the two sections that the user gave.

    Attributes:
        staleness: Number of updates that a lookup may lack.
        times: Measured times of the sections, or None.
        in_processes: Names of the tables in processes; None if the user did not fix
            them.
        splits: Allowed ways to store tables.
        together: Groups of tables that must share one rank.
        pins: Fixed rank or fixed way, by name of the table.
    """

    staleness: int
    times: SectionTimes | None
    in_processes: Collection[str] | None
    splits: Collection[str]
    together: Sequence[Sequence[str]]
    pins: Mapping[str, int | str]

    def place(
        self, tables: Sequence[Table], ranks: Ranks, batch_size: int, *, here: bool
    ) -> TablePlacement | None:
        """Places tables on the ranks of one section; returns None without tables.

        Args:
            tables: Tables of the section.
            ranks: Processes or devices of the section.
            batch_size: Number of samples of a global batch.
            here: Whether the ranks are devices, which can store copies of a table.

        Raises:
            PlanError: The tables do not fit, or the settings contradict each other.
        """
        names = {table.name for table in tables}
        together = [[n for n in group if n in names] for group in self.together]
        if not tables:
            return None
        return place_tables(
            tables,
            ranks,
            batch_size=batch_size,
            splits=[s for s in self.splits if here or s in _OF_PROCESSES],
            together=[group for group in together if group],
            pins={name: pin for name, pin in self.pins.items() if name in names},
        )


_OF_PROCESSES: Final = ("whole", "rows", "columns")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TwoSections:
    """Placements of all tables in both sections.

    Attributes:
        placement: Placement of the tables in processes, or of all tables if none is.
        beside: Placement of the tables on devices; None if all are in one section.
        sections: Number of processes, staleness and queue depth; None if no table is in
            a process.
        cut: Costs of each table in either section.
    """

    placement: TablePlacement
    beside: TablePlacement | None
    sections: Sections | None
    cut: tuple[TableCost, ...]


def place_in_sections(
    tables: Sequence[Table],
    processes: Ranks,
    devices: Ranks | None,
    *,
    batch_size: int,
    dense_seconds: float,
    wanted: SectionsWanted,
) -> TwoSections:
    """Chooses the tables in processes, the number of processes and the queue depth.

    Args:
        tables: All tables.
        processes: CPU processes, of which some may stay unused.
        devices: Devices of the dense part, with the memory that it leaves; None if they
            cannot store tables.
        batch_size: Number of samples of a global batch.
        dense_seconds: Predicted seconds of the dense part without tables.
        wanted: Settings of the two sections.

    Raises:
        PlanError: Nothing fits, or the settings contradict each other.
    """
    fixed = _fixed(tables, devices, wanted)
    costs = table_costs(tables, processes, devices, batch_size, fixed)
    batch_seconds = 0.0
    if wanted.times is not None:
        costs, dense_seconds = with_measured(costs, wanted.times)
        batch_seconds = wanted.times.batch_seconds
    base = SectionTimes(
        sparse_seconds=0.0,
        wire_seconds=0.0,
        dense_seconds=dense_seconds,
        batch_seconds=batch_seconds,
    )
    cut, names, beside = costs, set[str](), None
    for room in _ROOM:
        free = 0.0 if devices is None else devices.count * devices.memory_bytes
        cut = choose_cut(
            _with_fixed_ranks(costs, wanted),
            _groups(tables, wanted.together),
            base,
            most_processes=processes.count,
            staleness=wanted.staleness,
            process_bytes=processes.memory_bytes,
            device_bytes=free * room,
        )
        names = {cost.name for cost in cut if cost.in_processes}
        others = [table for table in tables if table.name not in names]
        try:
            beside = (
                None
                if devices is None
                else wanted.place(others, devices, batch_size, here=True)
            )
            break
        except NothingFits:
            if room == _ROOM[-1] or fixed is not None:
                raise
    if beside is not None and not names:
        return TwoSections(placement=beside, beside=None, sections=None, cut=cut)
    times = times_of(cut, base.dense_seconds, batch_seconds)
    if beside is not None:  # The most loaded device counts, not an even share.
        dense = base.dense_seconds + float(beside.loads.max())
        times = dataclasses.replace(times, dense_seconds=dense)
    return _in_processes(
        [table for table in tables if table.name in names],
        processes,
        batch_size,
        wanted,
        times,
        beside,
        cut,
    )


def _in_processes(
    inside: Sequence[Table],
    processes: Ranks,
    batch_size: int,
    wanted: SectionsWanted,
    times: SectionTimes,
    beside: TablePlacement | None,
    cut: tuple[TableCost, ...],
) -> TwoSections:
    """Places the tables on the fewest processes that keep up with the dense part."""
    names = {table.name for table in inside}
    ranks = [p for n, p in wanted.pins.items() if n in names and not isinstance(p, str)]
    size = sum(table.nbytes for table in inside)
    sections = choose_sections(
        times,
        processes.count,
        wanted.staleness,
        is_measured=wanted.times is not None,
        least_processes=min(
            processes.count,
            max(1 + max([0, *ranks]), -int(-size // max(processes.memory_bytes, 1))),
        ),
    )
    count = sections.processes
    placement = wanted.place(
        inside,
        dataclasses.replace(processes, count=count, per_node=count),
        batch_size,
        here=False,
    )
    assert placement is not None
    return TwoSections(placement=placement, beside=beside, sections=sections, cut=cut)


def _fixed(
    tables: Sequence[Table], devices: Ranks | None, wanted: SectionsWanted
) -> Collection[str] | None:
    """Returns the names of the tables in processes; None if there is a choice."""
    names, given = {table.name for table in tables}, wanted.in_processes
    problems = Arguments("wh.plan", PlanError)
    for name in (
        *(given or ()),
        *wanted.pins,
        *(n for g in wanted.together for n in g),
    ):
        if name not in names:
            problems.add(
                f"{short_repr(name)} is not a table; the tables are "
                f"{', '.join(table.name for table in tables[:8])}"
            )
    for name in given or ():
        pin = wanted.pins.get(name, 0)
        if isinstance(pin, str) and pin not in _OF_PROCESSES:
            problems.add(
                f"pins stores {short_repr(name)} as {pin}, but in_processes puts it "
                "into processes, which store a table as one of "
                f"{', '.join(_OF_PROCESSES)}; leave one of these out"
            )
    if given is not None:
        for group in wanted.together:
            inside = [name for name in group if name in given]
            if inside and len(inside) < len(group):
                problems.add(
                    f"together puts {', '.join(group)} on one rank, but in_processes "
                    f"has only {', '.join(inside)}; leave one of these out"
                )
        if devices is None and names - set(given):
            problems.add(
                f"in_processes leaves {', '.join(sorted(names - set(given))[:8])} on "
                "the devices of the dense part, which does not use all of its "
                "devices. Use a batch size that is divisible by their number"
            )
    problems.raise_if_any()
    return names if devices is None else given


def _with_fixed_ranks(
    costs: Sequence[TableCost], wanted: SectionsWanted
) -> tuple[TableCost, ...]:
    """Fixes the sections of tables with pins, unless the user fixed the sections.

    A pinned rank is a process. A split that processes do not support means devices.
    """
    if wanted.in_processes is not None:
        return tuple(costs)
    pins = wanted.pins
    ranked = {name for name, pin in pins.items() if not isinstance(pin, str)}
    only = {name for name, pin in pins.items() if pin not in _OF_PROCESSES} - ranked
    return tuple(
        dataclasses.replace(cost, in_processes=cost.name in ranked, is_fixed=True)
        if cost.name in ranked | only
        else cost
        for cost in costs
    )


def _groups(
    tables: Sequence[Table], together: Sequence[Sequence[str]]
) -> list[list[int]]:
    number = {table.name: n for n, table in enumerate(tables)}
    group = list(range(len(tables)))
    for names in together:
        wanted = {group[number[name]] for name in names}
        group = [min(wanted) if g in wanted else g for g in group]
    return [[n for n, g in enumerate(group) if g == one] for one in sorted(set(group))]
