"""Which tables are in processes, against brute force over every cut."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whalejax.planner.plan_errors import NothingFits, PlanError
from whalejax.planner.tables.cpu_or_device import (
    TableCost,
    choose_cut,
    table_costs,
    times_of,
)
from whalejax.planner.tables.sections import SectionTimes
from whalejax.planner.tables.table import Ranks, Table
from whalejax.planner.tables.two_sections import SectionsWanted, place_in_sections


SECONDS = st.floats(0.001, 1.0)
COSTS = st.lists(st.tuples(SECONDS, SECONDS, SECONDS), min_size=1, max_size=6)
PROCESSES = Ranks(count=2, per_node=2, memory_bytes=1e9, read_seconds=1e-9)
DEVICES = Ranks(count=4, per_node=4, memory_bytes=1e9, read_seconds=1e-12)
WANTED = SectionsWanted(
    staleness=1,
    times=None,
    in_processes=None,
    splits=("whole", "rows", "columns", "replicate"),
    together=(),
    pins={},
)


def costs_of(seconds: list[tuple[float, float, float]]) -> list[TableCost]:
    return [
        TableCost(
            name=f"t{n}",
            in_processes=False,
            is_fixed=False,
            sparse_seconds=sparse,
            wire_seconds=wire,
            dense_seconds=dense,
            nbytes=100,
        )
        for n, (sparse, wire, dense) in enumerate(seconds)
    ]


def base_of(dense: float) -> SectionTimes:
    return SectionTimes(sparse_seconds=0.0, wire_seconds=0.0, dense_seconds=dense)


def seconds_of(cut: Any, dense: float, count: int, staleness: int) -> float:
    times = times_of(cut, dense)
    if not any(cost.in_processes for cost in cut):
        return times.dense_seconds
    return times.step_seconds(count, staleness)


@settings(max_examples=30, deadline=None)
@given(COSTS, SECONDS, st.sampled_from([0, 1, 4]), st.integers(0, 6))
def test_no_cut_makes_a_shorter_step(
    seconds: list[tuple[float, float, float]], dense: float, staleness: int, room: int
) -> None:
    costs, best = costs_of(seconds), math.inf
    for inside in itertools.product([False, True], repeat=len(costs)):
        cut = [
            dataclasses.replace(c, in_processes=x)
            for c, x in zip(costs, inside, strict=True)
        ]
        if len(costs) - sum(inside) <= room:
            best = min(best, seconds_of(cut, dense, 3, staleness))
    chosen = choose_cut(
        costs,
        [[n] for n in range(len(costs))],
        base_of(dense),
        most_processes=3,
        staleness=staleness,
        process_bytes=1e9,
        device_bytes=100.0 * room,
    )
    assert sum(not c.in_processes for c in chosen) <= room
    found = min(seconds_of(chosen, dense, count, staleness) for count in (1, 2, 3))
    assert best * (1 - 1e-9) <= found <= best * 1.012


def table(name: str, rows: int, lookups: float) -> Table:
    return Table(name=name, rows=rows, width=64, lookups_per_sample=lookups)


def placed(tables: list[Table], devices: Ranks | None = DEVICES, **changes: Any) -> Any:
    return place_in_sections(
        tables,
        PROCESSES,
        devices,
        batch_size=1024,
        dense_seconds=changes.pop("dense_seconds", 1e-2),
        wanted=dataclasses.replace(WANTED, **changes),
    )


def test_what_devices_cannot_hold_is_in_processes() -> None:
    small, large = table("small", 1000, 50), table("large", 4_000_000, 1)
    devices = dataclasses.replace(DEVICES, memory_bytes=1e8)
    found = placed([small, large], devices)
    assert [t.name for t in found.placement.tables] == ["large"]
    assert [t.name for t in found.beside.tables] == ["small"]
    assert found.sections.processes == 2  # One has no room for it.
    dense = found.sections.times.dense_seconds
    assert dense == pytest.approx(1e-2 + float(found.beside.loads.max()))
    with pytest.raises(NothingFits, match=r"neither section.* 600 MB short"):
        placed([table("huge", 10_000_000, 1)], None)


def test_tables_that_are_read_there_faster_are_beside_the_dense_part() -> None:
    tables = [table("a", 1000, 50), table("b", 1000, 1)]
    found = placed(tables)
    assert found.sections is None and found.beside is None
    assert {t.name for t in found.placement.tables} == {"a", "b"}
    assert not any(cost.in_processes for cost in found.cut)


def test_measured_times_move_tables() -> None:
    """Devices that take long for tables, and processes that do not."""
    tables = [table("a", 1000, 50), table("b", 1000, 50)]
    slow = dataclasses.replace(DEVICES, read_seconds=1e-8, exchange_seconds=1e-8)
    measured = SectionTimes(
        sparse_seconds=1e-3, wire_seconds=1e-3, dense_seconds=1e-3, tables=("a", "b")
    )
    found = placed(tables, slow, times=measured)
    assert found.sections.is_measured and found.beside is None
    assert found.sections.times.sparse_seconds == pytest.approx(1e-3)
    # The wire takes so long that one of both is as much as hides behind the rest.
    measured = dataclasses.replace(measured, wire_seconds=0.2, dense_seconds=0.1)
    found = placed(tables, slow, times=measured)
    assert sum(cost.in_processes for cost in found.cut) < 2


def test_pins_and_groups_are_obeyed() -> None:
    tables = [table(name, 1000, 5) for name in "abcd"]
    found = placed(tables, pins={"a": 1}, together=[("a", "b")])
    assert {t.name for t in found.placement.tables} == {"a", "b"}
    assert {s.rank for s in found.placement.shards} == {1}
    assert {t.name for t in found.beside.tables} == {"c", "d"}
    found = placed(tables, in_processes=["c"], pins={"a": 3})
    assert {s.rank for s in found.beside.shards_of("a")} == {3}
    with pytest.raises(PlanError, match="in_processes has only a; leave one"):
        placed(tables, in_processes=["a"], together=[("a", "b")])
    with pytest.raises(
        PlanError, match="'e' is not a table; the tables are a, b, c, d"
    ):
        placed(tables, in_processes=["e"])
    with pytest.raises(PlanError, match="leaves b, c, d on the devices of the dense"):
        placed(tables, None, in_processes=["a"])
    assert placed(tables, None).beside is None


def test_a_cost_says_who_chose_the_section() -> None:
    (cost,) = costs_of([(2e-3, 1e-3, 4e-3)])
    assert str(cost) == (
        "beside the dense part, which fits and makes the shorter step: in one process "
        "a step takes 2 ms for it, and its messages 1 ms, on the devices of the dense "
        "part 4 ms"
    )
    fixed = dataclasses.replace(cost, is_fixed=True, in_processes=True)
    assert str(fixed).startswith("in processes of CPUs, as you fixed it: in one")


def test_without_devices_for_tables_nobody_fixed_them() -> None:
    tables = [Table(name="a", rows=900, width=32)]
    (cost,) = table_costs(tables, DEVICES, None, 64, {"a"})
    assert str(cost).startswith(
        "in processes of CPUs, as the dense part does not use all of its devices: in "
        "one process a step takes "
    )
    assert "fixed" not in str(cost) and "devices of the dense part" not in str(cost)
