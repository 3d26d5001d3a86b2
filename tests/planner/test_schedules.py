"""Schedules: legal, holding what their papers say; the checker sees what is not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whalejax.planner.errors import PlanError
from whalejax.planner.pipeline.schedules import (
    NAMES,
    Schedule,
    ScheduleRow,
    most_in_flight,
    problems_of,
    schedule,
)


Rows = tuple[ScheduleRow, ...]


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Any schedule of a moderate size."""
    name = draw(st.sampled_from(NAMES))
    stages = draw(st.integers(1, 6))
    if name == "interleaved":
        rounds = draw(st.integers(1, 4))
        return schedule(name, stages, rounds * stages, draw(st.integers(1, 4)))
    return schedule(name, stages, draw(st.integers(1, 12)))


@given(schedules())
def test_every_schedule_is_legal(table: Schedule) -> None:
    allowed = most_in_flight(
        table.name,
        table.num_stages,
        np.arange(table.num_stages),
        table.num_micro_batches,
        table.num_chunks,
    )
    allowed = np.broadcast_to(allowed, table.num_stages).tolist()
    assert problems_of(table, allowed) == []
    assert list(table.in_flight) == allowed


@given(schedules())
def test_a_row_less_is_seen(table: Schedule) -> None:
    for at in {0, len(table.rows) // 2, len(table.rows) - 1}:
        rows = table.rows[:at] + table.rows[at + 1 :]
        found = problems_of(dataclasses.replace(table, rows=rows))
        assert f"{table.key(table.rows[at])} is missing" in found


@pytest.mark.parametrize("stages", [1, 2, 4, 7])
@pytest.mark.parametrize("micro_batches", [1, 3, 8, 20])
def test_activations_in_flight(stages: int, micro_batches: int) -> None:
    def most(name: str) -> list[int]:
        return list(schedule(name, stages, micro_batches).in_flight)

    ahead = [stages - s for s in range(stages)]
    assert most("gpipe") == most("gpipe-lockstep") == [micro_batches] * stages
    assert most("1f1b") == [min(a, micro_batches) for a in ahead]
    assert most("1f1b-ahead") == [min(a + 1, micro_batches) for a in ahead]
    assert most("1f1b-lockstep") == [min(2 * a - 1, micro_batches) for a in ahead]
    # As many as 1F1B's first stage, on every stage.
    assert most("zb-h1") == [min(stages, micro_batches)] * stages


def test_the_last_stage_of_1f1b_takes_turns() -> None:
    actions = [row.action for row in schedule("1f1b", 4, 6).of_stage(3)]
    assert actions == ["forward", "backward"] * 6


def test_later_stages_of_zb_h1_do_weight_gradients_later() -> None:
    table = schedule("zb-h1", 3, 5)
    words = {"forward": "F", "backward": "B", "weight": "W"}
    found = [
        " ".join(f"{words[r.action]}{r.micro_batch}" for r in table.of_stage(s))
        for s in range(3)
    ]
    assert found == [
        "F0 F1 F2 B0 W0 F3 B1 W1 F4 B2 W2 B3 W3 B4 W4",
        "F0 F1 B0 F2 B1 W0 F3 B2 W1 F4 B3 W2 B4 W3 W4",
        "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 F4 B4 W2 W3 W4",
    ]


def test_turns_of_lockstep_1f1b() -> None:
    stages, micro_batches = 4, 9
    table = schedule("1f1b-lockstep", stages, micro_batches)
    turns = {table.key(row): table.turn(row) for row in table.rows}
    for (stage, index, action), turn in turns.items():
        ahead = stage if action == "forward" else 2 * (stages - 1) - stage
        assert turn == index + ahead
    assert max(turns.values()) + 1 == micro_batches + 2 * (stages - 1)


def test_lockstep_gpipe_goes_back_as_it_came() -> None:
    table = schedule("gpipe-lockstep", 3, 4)
    assert table.rows[-1].tick + 1 == 2 * (4 + 3 - 1)
    for row in table.rows:
        if row.action == "forward":
            assert row.tick == row.micro_batch + row.stage
    mirrored = [(11 - r.tick, r.stage, r.micro_batch) for r in table.rows]
    assert sorted(mirrored) == sorted(
        (r.tick, r.stage, r.micro_batch) for r in table.rows
    )


def at_tick(rows: Rows, index: int, tick: int) -> Rows:
    """Rows, one of them at another tick and where it then belongs."""
    moved = rows[index]._replace(tick=tick)
    changed = (*rows[:index], moved, *rows[index + 1 :])
    return tuple(sorted(changed, key=lambda row: (row.tick, row.stage)))


def changed(rows: Rows, index: int, **values: object) -> Rows:
    """Rows with something of one of them changed."""
    other = rows[index]._replace(**values)  # type: ignore[arg-type]
    return (*rows[:index], other, *rows[index + 1 :])


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("1f1b", lambda rows: rows[1:], "(0, 0, 'forward') is missing"),
        ("1f1b", lambda rows: rows[:-1], "(0, 2, 'backward') is missing"),
        ("zb-h1", lambda rows: rows[:-1], "(1, 2, 'weight') is missing"),
        ("1f1b", lambda rows: (*rows, rows[-1]), "stands twice, at ticks 7 and 7"),
        ("1f1b", lambda rows: (*rows, rows[-1]), "stage 0 acts twice at tick 7"),
        (
            "1f1b",
            lambda rows: at_tick(rows, 0, 99),
            "(1, 0, 'forward') at tick 1 comes before (0, 0, 'forward')",
        ),
        (
            "1f1b",
            lambda rows: at_tick(rows, 2, 0),
            "(1, 0, 'forward') at tick 0 comes before (0, 0, 'forward')",
        ),
        (
            "1f1b",
            lambda rows: at_tick(rows, -1, 0),
            "(0, 2, 'backward') at tick 0 comes before (1, 2, 'backward')",
        ),
        (
            "zb-h1",
            lambda rows: at_tick(rows, -1, 1),
            "(1, 2, 'weight') at tick 1 comes before (1, 2, 'backward')",
        ),
        (
            "1f1b",
            lambda rows: rows[::-1],
            "(0, 0, 'forward') at tick 0 stands behind tick 7",
        ),
        (
            "1f1b",
            lambda rows: changed(rows, 0, action="weight"),
            "is none of 2 stages × 1 chunks × 3 micro-batches × forward, backward",
        ),
        ("zb-h1", lambda rows: changed(rows, 0, micro_batch=3), "micro_batch=3, "),
        ("gpipe", lambda rows: changed(rows, 0, stage=2), "stage=2, "),
        ("gpipe", lambda rows: changed(rows, 0, stage=-1), "stage=-1, "),
        ("gpipe", lambda rows: changed(rows, 0, chunk=1), "chunk=1, "),
        (
            "1f1b-lockstep",
            lambda rows: at_tick(rows, 2, 1),
            "(1, 0, 'forward') stands in the same turn as (0, 0, 'forward')",
        ),
    ],
)
def test_the_checker_sees_what_is_wrong(
    name: str, change: Callable[[Rows], Rows], text: str
) -> None:
    table = schedule(name, 2, 3)
    broken = dataclasses.replace(table, rows=change(table.rows))
    found = problems_of(broken)
    assert any(text in problem for problem in found), found


def test_the_checker_sees_a_stage_that_is_none() -> None:
    table = schedule("interleaved", 2, 2, 2)
    # Along the pipeline this is the place of stage 0's second part.
    rows = changed(table.rows, 0, stage=2)
    (found,) = problems_of(dataclasses.replace(table, rows=rows))
    assert "stage=2, chunk=0" in found and "is none of 2 stages × 2 chunks" in found


def test_the_checker_sees_too_many_in_flight() -> None:
    assert problems_of(schedule("gpipe", 2, 3), [2, 3]) == [
        "stage 0 holds 3 activations, 2 allowed"
    ]
    # A backward is done before the second forward, its gradient of parameters is not.
    assert problems_of(schedule("zb-h1", 2, 3), [2, 1]) == [
        "stage 1 holds 2 activations, 1 allowed"
    ]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("1f1c", 2, 3), "schedule is '1f1c'; expected one of gpipe, 1f1b, 1f1b-ah"),
        (("gpipe", 0, 3), "num_stages is 0; expected 1 or more"),
        (("gpipe", 2, 3, 2), "num_chunks is 2; gpipe has 1 for each stage"),
        (("zb-h1", 2, 3, 2), "num_chunks is 2; zb-h1 has 1 for each stage"),
        (("interleaved", 4, 6, 2), "in rounds of 4, one for each stage. Use 4 or 8"),
    ],
)
def test_what_makes_no_schedule(arguments: tuple[object, ...], problem: str) -> None:
    with pytest.raises(PlanError) as caught:
        schedule(*arguments)  # type: ignore[arg-type]
    assert problem in str(caught.value)
