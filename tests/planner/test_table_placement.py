"""Placement of embedding tables against brute force, and what it refuses."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import whalejax as wh
from whalejax.meshes.errors import WhaleError
from whalejax.planner.plan_errors import NothingFits, PlanError
from whalejax.planner.tables.place import place_tables
from whalejax.planner.tables.placement import (
    TablePlacement,
    placement_data,
    placement_of,
)
from whalejax.planner.tables.rank_assignment import Scale, slot_limit
from whalejax.planner.tables.storage_options import (
    Item,
    Objective,
    StorageOption,
    rank_groups,
    times_chosen,
)
from whalejax.planner.tables.table import Ranks, Table, range_edges


RANKS = Ranks(count=3, per_node=3, memory_bytes=1e9)
OBJECTIVES: tuple[Objective, ...] = ("time", "rows", "lookups", "both")

TABLES = st.lists(
    st.tuples(
        st.integers(1, 60), st.sampled_from([16, 32]), st.integers(1, 5), st.booleans()
    ),
    min_size=1,
    max_size=4,
)


def tables_of(sizes: list[tuple[int, int, int, bool]]) -> list[Table]:
    return [
        Table(name=f"t{i}", rows=r, width=w, lookups_per_sample=n, pooled=pooled)
        for i, (r, w, n, pooled) in enumerate(sizes)
    ]


def least_load(items: tuple[Item, ...], ranks: Ranks, most_shards: int) -> float:
    """The least largest load over every way and every assignment, in means."""
    scale = Scale(items, ranks)
    best = math.inf
    for ways in itertools.product(*(item.ways for item in items)):
        if sum(way.shards * way.slots for way in ways) > most_shards:
            continue
        limit = slot_limit(ways, ranks)
        for placed in itertools.product(
            *(
                itertools.combinations_with_replacement(
                    rank_groups(way, ranks, item.rank), times_chosen(way)
                )
                for item, way in zip(items, ways, strict=True)
            )
        ):
            best = min(best, load_of(ways, placed, ranks, scale, limit))
    return best


def load_of(
    ways: tuple[StorageOption, ...],
    placed: object,
    ranks: Ranks,
    scale: Scale,
    limit: int,
) -> float:
    loads = np.zeros((ranks.count, len(scale.mean)))
    slots, memory = np.zeros(ranks.count), np.zeros(ranks.count)
    for way, groups in zip(ways, placed, strict=True):  # type: ignore[call-overload]
        for rank in itertools.chain(*groups):
            loads[rank] += way.loads
            slots[rank] += way.slots
            memory[rank] += way.memory_bytes
    if slots.max() > limit or memory.max() > ranks.memory_bytes:
        return math.inf
    return float(np.max(loads / scale.mean))


def load_in_means(placement: TablePlacement) -> float:
    return float(np.max(placement.loads / placement.mean))


@settings(max_examples=25, deadline=None)
@given(TABLES, st.sampled_from(OBJECTIVES))
def test_no_placement_is_better(
    sizes: list[tuple[int, int, int, bool]], objective: Objective
) -> None:
    placement = place_tables(
        tables_of(sizes),
        RANKS,
        batch_size=60,
        objective=objective,
        splits=("whole", "columns", "replicate"),
        most_shards=max(6, len(sizes)),
        seconds=60,
    )
    best = least_load(placement.items, RANKS, max(6, len(sizes)))
    assert placement.is_optimal
    assert load_in_means(placement) == pytest.approx(best, rel=1e-4)
    assert placement.bound <= best * (1 + 1e-6)


@settings(max_examples=10, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 99), st.integers(1, 9)), min_size=8, max_size=8)
)
def test_no_placement_of_eight_whole_tables_is_better(
    sizes: list[tuple[int, int]],
) -> None:
    tables = [
        Table(name=f"t{i}", rows=r, width=4, lookups_per_sample=n)
        for i, (r, n) in enumerate(sizes)
    ]
    room = replace(RANKS, memory_bytes=sum(t.nbytes for t in tables) / 2)
    ways = {"batch_size": 60, "objective": "both", "splits": ("whole",), "seconds": 60}
    roomy = place_tables(tables, RANKS, **ways)  # type: ignore[arg-type]
    best = least_load(roomy.items, room, 8)
    if best == math.inf:
        with pytest.raises(NothingFits):
            place_tables(tables, room, **ways)  # type: ignore[arg-type]
        return
    placement = place_tables(tables, room, **ways)  # type: ignore[arg-type]
    assert load_in_means(placement) == pytest.approx(best, rel=1e-4)
    assert placement.memory_bytes.max() <= room.memory_bytes


@settings(max_examples=30, deadline=None)
@given(TABLES, st.sampled_from(OBJECTIVES), st.integers(1, 8))
def test_shards_hold_every_element_once(
    sizes: list[tuple[int, int, int, bool]], objective: Objective, ranks: int
) -> None:
    tables = tables_of(sizes)
    given_ranks = Ranks(count=ranks, per_node=ranks, memory_bytes=1e9)
    placement = place_tables(
        tables, given_ranks, batch_size=64, objective=objective, seconds=0.05
    )
    for table in tables:
        seen = np.zeros((table.rows, table.width), int)
        shards = placement.shards_of(table.name)
        for shard in shards:
            rows = (
                slice(shard.index, None, shard.shards)
                if shard.hashed
                else slice(*shard.rows)
            )
            part = seen[rows, slice(*shard.columns)]
            assert len(part) == shard.num_rows
            part += 1
        copies = ranks if shards[-1].split == "replicate" else 1
        assert (seen == copies).all()
    held = sum(placement.slots)
    assert max(placement.slots) <= math.ceil(held / ranks)


def test_whole_tables_reach_the_largest_of_them() -> None:
    tables = [
        Table(name=f"t{i}", rows=r, width=8) for i, r in enumerate((90, 30, 9, 1))
    ]
    placement = place_tables(
        tables, RANKS, batch_size=64, objective="rows", splits=("whole",)
    )
    assert placement.loads.max() == 90 * 8
    assert placement.is_optimal
    split = place_tables(tables, RANKS, batch_size=64, objective="rows")
    assert split.imbalance < 1.1 < placement.imbalance


def test_a_table_larger_than_a_device_is_divided() -> None:
    small = replace(RANKS, memory_bytes=700.0)
    table = Table(name="big", rows=100, width=2, optimizer_bytes_per_row=4)
    placement = place_tables([table], small, batch_size=64)
    assert len(placement.shards) >= 2
    assert placement.memory_bytes.max() <= 700
    with pytest.raises(NothingFits, match=r"'big' takes 1.2 kB .*500 B short"):
        place_tables([table], small, batch_size=64, splits=("whole",))
    hosted = place_tables(
        [table],
        replace(small, host_bytes=2000.0),
        batch_size=64,
        splits=("whole", "host"),
    )
    assert hosted.shards[0].split == "host" and hosted.host_bytes.max() == 1200
    for pin in ("host", "cached:0.5"):
        with pytest.raises(
            PlanError, match="as [a-z]+: the cluster has no host memory"
        ):
            place_tables([table], "cpu:4", batch_size=64, pins={"big": pin})


def test_tables_that_do_not_fit_together_are_refused() -> None:
    tables = [Table(name=f"t{i}", rows=100, width=4) for i in range(4)]
    with pytest.raises(NothingFits, match=r"4 tables take 8 kB .* 3 ranks have 6 kB"):
        place_tables(tables, replace(RANKS, memory_bytes=2000.0), batch_size=9)


def test_pins_are_obeyed() -> None:
    rows = {"a": 9, "b": 80, "c": 70, "d": 60}
    tables = [Table(name=n, rows=r, width=32) for n, r in rows.items()]
    placement = place_tables(
        tables,
        RANKS,
        batch_size=6,
        together=[("a", "b"), ("b", "c")],
        pins={"d": "columns", "c": 2},
    )
    assert {s.rank for s in placement.shards if s.table in "abc"} == {2}
    assert placement.shards_of("d")[0].split == "columns"
    said = placement.why("a")
    assert "together with b, c, as you fixed it" in said and "on rank 2" in said


def test_contradictory_pins_are_refused() -> None:
    tables = [Table(name=n, rows=9, width=32) for n in "abc"]
    with pytest.raises(wh.WhaleError) as error:
        place_tables(
            tables,
            RANKS,
            batch_size=6,
            together=[("a", "b", "c")],
            pins={"a": 0, "b": 1, "c": "columns"},
        )
    assert (
        "together puts 'a', 'b', 'c' on one rank, but pins puts them on ranks 0, 1"
        in str(error.value)
    )
    assert "pins divides one of them by columns" in str(error.value)
    with pytest.raises(wh.WhaleError, match="on rank 7, but there are 3 ranks, from 0"):
        place_tables(tables, RANKS, batch_size=6, pins={"a": 7})
    with pytest.raises(wh.WhaleError, match="pins names 'x', which is not a table"):
        place_tables(tables, RANKS, batch_size=6, pins={"x": 0})


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (["a", "b"], "are <U1; expected numbers"),
        ([None, 1], "are object; expected numbers"),
        ([float("nan"), 1.0], "are nan to nan; expected finite numbers"),
        ([float("inf"), 1.0], "are 1.0 to inf; expected finite numbers"),
        ([-1, 2], "are -1 to 2; expected finite numbers, 0 or more"),
    ],
)
def test_counts_that_are_no_numbers_are_refused(counts: Any, message: str) -> None:
    with pytest.raises(PlanError, match=f"counts of table 'a' {message}"):
        Table(name="a", rows=2, width=4, counts=counts)


def test_counts_of_another_table_are_refused() -> None:
    with pytest.raises(PlanError, match=r"'a' have shape \(4,\), but .* 5 rows"):
        Table(name="a", rows=5, width=2, counts=[1, 2, 3, 4])


def test_ranges_are_taken_only_where_they_are_even() -> None:
    even = Table(name="even", rows=300, width=4, counts=[5] * 300)
    skewed = Table(name="skewed", rows=300, width=4, counts=range(300))
    unknown = Table(name="unknown", rows=300, width=4)
    placement = place_tables(
        [even, skewed, unknown],
        RANKS,
        batch_size=3,
        pins=dict.fromkeys(("even", "skewed", "unknown"), "rows"),
    )
    hashed = {shard.table: shard.hashed for shard in placement.shards}
    assert hashed == {"even": False, "skewed": True, "unknown": True}
    assert range_edges(10, 3) == (0, 4, 7, 10)


def test_small_tables_are_replicated_where_their_gradient_is_cheaper() -> None:
    tables = [
        Table(name="tiny", rows=10, width=64),
        Table(name="big", rows=9**6, width=64),
        Table(name="large", rows=9**6, width=64),
    ]
    placement = place_tables(tables, "h100:8", batch_size=65_536)
    assert {s.split for s in placement.shards_of("tiny")} == {"replicate"}
    assert "gradient is so small" in placement.why("tiny")
    assert {s.split for s in placement.shards_of("big")} != {"replicate"}


def test_a_placement_explains_itself() -> None:
    tables = [Table(name="a", rows=900, width=32), Table(name="b", rows=800, width=32)]
    placement = place_tables(tables, RANKS, batch_size=6, objective="rows")
    said = str(placement)
    assert said.startswith("2 tables in ") and said.count("elements stored") == 3
    assert "← chosen" in placement.why("b")
    with pytest.raises(PlanError, match="no table is named 'c'; there are a, b"):
        placement.why("c")


def test_wrong_ranks_are_refused_at_once() -> None:
    with pytest.raises(WhaleError) as error:
        Ranks(count=4, per_node=0, memory_bytes=1.0)
    assert "per_node is 0; expected a whole number, 1 or more" in str(error.value)
    with pytest.raises(WhaleError) as error:
        Ranks(count=0, per_node=0, memory_bytes=1.0)
    assert "2 problems" in str(error.value)
    with pytest.raises(WhaleError, match="3, which does not divide count 4"):
        Ranks(count=4, per_node=3, memory_bytes=1.0)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda d: d["loads"][1].append(1.0), "2 loads on rank 1, and means of 1"),
        (lambda d: d["loads"].clear(), "loads of 0 ranks, of 3"),
        (lambda d: d["memory_bytes"].pop(), "memory_bytes of 2 ranks, of 3"),
        (lambda d: d["exchange_bytes"].append(1.0), "exchange_bytes of 4 ranks, of 3"),
        (lambda d: d["mean"].clear(), "0 means of the loads of 6 samples"),
        (lambda d: d.update(batch_size=0), "1 means of the loads of 0 samples"),
        (lambda d: d["ranks"].update(per_node=0), "per_node is 0; expected"),
    ],
)
def test_numbers_of_other_ranks_are_refused(
    change: Callable[[Any], Any], text: str
) -> None:
    tables = [Table(name="a", rows=900, width=32), Table(name="b", rows=800, width=32)]
    data = placement_data(place_tables(tables, RANKS, batch_size=6))
    data = json.loads(json.dumps(data))
    assert len(str(placement_of(data)).splitlines()) == 5
    change(data)
    with pytest.raises(PlanError, match=text):
        placement_of(data)


def test_rows_within_a_node_stay_in_one() -> None:
    ranks = Ranks(count=4, per_node=2, memory_bytes=1e9)
    table = Table(name="a", rows=900, width=8)
    placement = place_tables(
        [table], ranks, batch_size=64, pins={"a": "node_rows"}, objective="rows"
    )
    assert {s.rank for s in placement.shards} in ({0, 1}, {2, 3})
