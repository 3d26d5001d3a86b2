"""Schedules: legal, with the bubbles and activations that their papers say."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whalejax.planner.plan import PlanError
from whalejax.planner.schedules import (
    NAMES,
    Row,
    Schedule,
    problems_of,
    schedule,
    simulate,
)


PLAIN = ("gpipe", "1f1b", "1f1b-ahead")


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
    assert problems_of(table, table.in_flight) == []


@given(schedules(), st.data())
def test_the_simulator_keeps_order_and_dependencies(
    table: Schedule, data: st.DataObject
) -> None:
    seconds = st.lists(
        st.floats(0.1, 10.0),
        min_size=table.num_places,
        max_size=table.num_places,
    )
    forward, backward = data.draw(seconds), data.draw(seconds)
    transfer = data.draw(st.floats(0, 2))
    line = simulate(table, forward, backward, transfer)
    ends = {
        table.key(row): end
        for row, end in zip(table.rows, line.ends_seconds, strict=True)
    }
    for row, end in zip(table.rows, line.ends_seconds, strict=True):
        place, _, action = table.key(row)
        start = end - (forward if action == "forward" else backward)[place]
        needed = table.needs(row)
        if needed is not None:
            apart = transfer if needed[0] != place and table.num_stages > 1 else 0.0
            assert start >= ends[needed] + apart - 1e-9
    per_stage = max(
        table.num_micro_batches
        * sum(
            (forward[p] + backward[p])
            for p in range(stage, table.num_places, table.num_stages)
        )
        for stage in range(table.num_stages)
    )
    assert line.step_seconds >= per_stage - 1e-9
    assert 0 <= line.bubble < 1


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("micro_batches", [1, 2, 5, 16, 128])
def test_the_bubble_of_equal_stages(name: str, stages: int, micro_batches: int) -> None:
    table = schedule(name, stages, micro_batches)
    line = simulate(table, [1.0] * stages, [2.0] * stages)
    expected = (stages - 1) / (micro_batches + stages - 1)
    assert line.bubble == pytest.approx(expected)


@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("stages", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("rounds", [1, 2, 8])
def test_the_bubble_of_interleaved_stages(
    stages: int, rounds: int, chunks: int
) -> None:
    table = schedule("interleaved", stages, rounds * stages, chunks)
    line = simulate(table, [1.0] * table.num_places, [2.0] * table.num_places)
    expected = (stages - 1) / (chunks * rounds * stages + stages - 1)
    assert line.bubble == pytest.approx(expected)


@pytest.mark.parametrize("stages", [1, 2, 4, 7])
@pytest.mark.parametrize("micro_batches", [1, 3, 8, 20])
def test_activations_in_flight(stages: int, micro_batches: int) -> None:
    def most(name: str) -> list[int]:
        return list(schedule(name, stages, micro_batches).in_flight)

    ahead = [stages - s for s in range(stages)]
    assert most("gpipe") == [micro_batches] * stages
    assert most("1f1b") == [min(a, micro_batches) for a in ahead]
    assert most("1f1b-ahead") == [min(a + 1, micro_batches) for a in ahead]


def test_the_last_stage_of_1f1b_takes_turns() -> None:
    actions = [row.action for row in schedule("1f1b", 4, 6).of_stage(3)]
    assert actions == ["forward", "backward"] * 6


def test_a_slow_stage_decides() -> None:
    table = schedule("1f1b", 3, 10)
    line = simulate(table, [1.0, 3.0, 1.0], [2.0, 6.0, 2.0])
    # It begins after one forward before it and is followed by one backward.
    assert line.step_seconds == pytest.approx(1 + 10 * (3 + 6) + 2)


def test_transfers_of_1f1b_hide_behind_one_more_in_flight() -> None:
    plain, ahead = (
        simulate(schedule(name, 4, 32), [1.0] * 4, [2.0] * 4, 0.5).step_seconds
        for name in ("1f1b", "1f1b-ahead")
    )
    assert ahead < plain


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda rows: rows[1:], "(0, 0, 'forward') is missing"),
        (lambda rows: (*rows, rows[-1]), "stands twice"),
        (
            lambda rows: (dataclasses.replace(rows[0], tick=99), *rows[1:]),
            "comes before (0, 0, 'forward')",
        ),
    ],
)
def test_the_checker_sees_what_is_wrong(
    change: Callable[[tuple[Row, ...]], tuple[Row, ...]], text: str
) -> None:
    table = schedule("1f1b", 2, 3)
    broken = dataclasses.replace(table, rows=change(table.rows))
    assert any(text in problem for problem in problems_of(broken))


def test_the_checker_sees_too_many_in_flight() -> None:
    assert problems_of(schedule("gpipe", 2, 3), [2, 3]) == [
        "stage 0 holds 3 activations, 2 allowed"
    ]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("1f1c", 2, 3), "schedule is '1f1c'; expected one of gpipe, 1f1b, 1f1b-ah"),
        (("gpipe", 0, 3), "num_stages is 0; expected 1 or more"),
        (("gpipe", 2, 3, 2), "num_chunks is 2; gpipe has 1 for each stage"),
        (("interleaved", 4, 6, 2), "in rounds of 4, one for each stage. Use 4 or 8"),
    ],
)
def test_what_makes_no_schedule(arguments: tuple[object, ...], problem: str) -> None:
    with pytest.raises(PlanError) as caught:
        schedule(*arguments)  # type: ignore[arg-type]
    assert problem in str(caught.value)


def test_times_of_another_number_of_places() -> None:
    with pytest.raises(PlanError, match="forward_seconds has 1 entries; expected 4"):
        simulate(schedule("interleaved", 2, 2, 2), [1.0], [1.0] * 4)
