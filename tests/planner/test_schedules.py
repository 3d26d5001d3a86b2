"""Schedules: legal, holding what their papers say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whalejax.planner.pipeline.schedules import (
    NAMES,
    Schedule,
    ScheduleRow,
    most_in_flight,
    schedule,
)
from whalejax.planner.plan_errors import PlanError


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


def check_legal(table: Schedule) -> None:
    """Every action once, after what it needs, one a tick of a stage, in order."""
    ticks = {table.key(row): row for row in table.rows}
    assert len(table.rows) == len(ticks)
    assert {*ticks} == {
        (place, micro_batch, action)
        for place in range(table.num_places)
        for micro_batch in range(table.num_micro_batches)
        for action in table.actions
    }
    assert len({(row.stage, row.tick) for row in table.rows}) == len(table.rows)
    assert [row.tick for row in table.rows] == sorted(row.tick for row in table.rows)
    for row in table.rows:
        assert 0 <= row.stage < table.num_stages
        needed = table.needs(row)
        if needed is not None:
            source = ticks[needed]
            assert source.tick < row.tick
            # What comes from another stage was made in a turn before.
            if table.turn_ticks and source.stage != row.stage:
                assert table.turn(source) < table.turn(row)


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
    check_legal(table)
    assert list(table.in_flight) == allowed


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


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("1f1c", 2, 3), "schedule is '1f1c'; expected one of gpipe, 1f1b, 1f1b-ah"),
        (("gpipe", 0, 3), "num_stages is 0; expected 1 or more"),
        (("gpipe", 2, 3, 2), "num_chunks is 2; gpipe has 1 on each stage"),
        (("zb-h1", 2, 3, 2), "num_chunks is 2; zb-h1 has 1 on each stage"),
        (("interleaved", 4, 6, 2), "in rounds of 4, one for each stage. Use 4 or 8"),
    ],
)
def test_what_makes_no_schedule(arguments: tuple[object, ...], problem: str) -> None:
    with pytest.raises(PlanError) as caught:
        schedule(*arguments)  # type: ignore[arg-type]
    assert problem in str(caught.value)
