"""The simulator: order and dependencies kept, and the closed forms of equal stages."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planner.test_schedules import schedules
from whalejax.planner.pipeline.schedules import (
    TURN_TICKS,
    Schedule,
    build_columns,
    schedule,
)
from whalejax.planner.pipeline.simulate import (
    ScheduleTimeline,
    compiled,
    simulate,
)
from whalejax.planner.plan_errors import PlanError


PLAIN = ("gpipe", "1f1b", "1f1b-ahead", "gpipe-lockstep", "1f1b-lockstep")
STAGES = (1, 2, 3, 4, 5, 7, 8, 16)
PARTS = (0, 1, 2, 5, 17, 64)
"""Micro-batches beyond as many as there are stages."""


def equal(
    table: Schedule, forward: float = 1.0, backward: float = 1.0, weight: float = 1.0
) -> ScheduleTimeline:
    """Every place takes as long; what is not split takes backward and weight."""
    places = table.num_places
    if table.splits_backward:
        return simulate(
            table,
            [forward] * places,
            [backward] * places,
            weight_seconds=[weight] * places,
        )
    return simulate(table, [forward] * places, [backward + weight] * places)


# Order and dependencies.


@given(schedules(), st.data())
def test_the_simulator_keeps_order_and_dependencies(
    table: Schedule, data: st.DataObject
) -> None:
    seconds = st.lists(
        st.floats(0.1, 10.0), min_size=table.num_places, max_size=table.num_places
    )
    given = {action: data.draw(seconds) for action in table.actions}
    transfer = data.draw(st.floats(0, 2))
    line = simulate(
        table,
        given["forward"],
        given["backward"],
        transfer,
        weight_seconds=given.get("weight"),
    )
    rows = list(zip(table.rows, line.ends_seconds, strict=True))
    ends = {table.key(row): end for row, end in rows}
    free = [0.0] * table.num_stages
    for row, end in rows:
        place, _, action = table.key(row)
        start = end - given[action][place]
        bounds = [free[row.stage]]
        needed = table.needs(row)
        if needed is not None:
            apart = needed[0] != place and table.num_stages > 1 and not table.turn_ticks
            bounds.append(ends[needed] + transfer * apart)
        apart = transfer if table.num_stages > 1 else 0.0
        before = [e + apart for r, e in rows if table.turn(r) < table.turn(row)]
        # As early as it can: one of what it waits for decides.
        assert start == pytest.approx(max([*bounds, *before]))
        free[row.stage] = end
    busy = [
        table.num_micro_batches
        * sum(sum(times[stage :: table.num_stages]) for times in given.values())
        for stage in range(table.num_stages)
    ]
    assert line.busy_seconds == pytest.approx(busy)
    assert line.step_seconds == max(line.ends_seconds)
    assert -1e-12 <= line.bubble < 1


@given(schedules(), st.integers(0, 2**32 - 1))
def test_many_at_once_are_one_each(table: Schedule, seed: int) -> None:
    random = np.random.default_rng(seed)
    many = random.random((len(table.actions), table.num_places, 3))
    transfer = random.random(3)
    weight = many[2] if table.splits_backward else None
    found = compiled(table).step_seconds(many[0], many[1], transfer, weight=weight)
    sizes = table.num_stages, table.num_micro_batches, table.num_chunks
    steps = compiled(*build_columns(table.name, *sizes))  # without its rows
    again = steps.step_seconds(many[0], many[1], transfer, weight=weight)
    assert (found == again).all()
    for case in range(3):
        forward, backward, *rest = (times[:, case].tolist() for times in many)
        one = simulate(
            table,
            forward,
            backward,
            transfer[case],
            weight_seconds=rest[0] if rest else None,
        )
        assert found[case] == pytest.approx(one.step_seconds)


# Closed forms.


@pytest.mark.sampled(30)
@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("micro_batches", [1, 2, 5, 16, 128])
def test_the_bubble_of_equal_stages(name: str, stages: int, micro_batches: int) -> None:
    line = equal(schedule(name, stages, micro_batches))
    assert line.step_seconds == 3 * (micro_batches + stages - 1)
    expected = (stages - 1) / (micro_batches + stages - 1)
    assert line.bubble == pytest.approx(expected)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("stages", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("rounds", [1, 2, 8])
def test_the_bubble_of_interleaved_stages(
    stages: int, rounds: int, chunks: int
) -> None:
    line = equal(schedule("interleaved", stages, rounds * stages, chunks))
    expected = (stages - 1) / (chunks * rounds * stages + stages - 1)
    assert line.bubble == pytest.approx(expected)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("more", PARTS)
def test_the_bubble_of_zb_h1(stages: int, more: int) -> None:
    parts = stages + more
    table = schedule("zb-h1", stages, parts)
    line = equal(table)
    assert line.step_seconds == 3 * parts + stages - 1
    assert line.bubble == pytest.approx((stages - 1) / (3 * parts + stages - 1))
    assert table.rows[-1].tick + 1 == line.step_seconds


@pytest.mark.sampled(12)
@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize(
    "times", [(1, 1, 1), (2, 3, 2), (1, 1.5, 0.25), (1, 2, 0), (1, 1, 3), (3, 1, 2)]
)
def test_zb_h1_gains_the_weight_gradient(
    stages: int, times: tuple[float, float, float]
) -> None:
    forward, backward, weight = times
    for parts in (stages, stages + 3, 3 * stages):
        found = equal(schedule("zb-h1", stages, parts), *times).step_seconds
        # The first stage waits for a backward, the last for a forward, whatever W is.
        each = max(forward + backward - weight, forward, backward)
        assert found == pytest.approx(parts * sum(times) + (stages - 1) * each)


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("times", [(1, 1, 1), (2, 3, 2), (1, 1, 3), (3, 1, 2)])
def test_zb_h1_of_few_micro_batches_is_never_worse(
    stages: int, times: tuple[float, float, float]
) -> None:
    for parts in range(1, stages):
        found = equal(schedule("zb-h1", stages, parts), *times).step_seconds
        assert found <= equal(schedule("1f1b", stages, parts), *times).step_seconds
        forward, backward, weight = times
        if weight <= min(forward, backward):
            # Forward and back along the stages, and the last gradient of parameters.
            whole = (parts + stages - 1) * (forward + backward) + weight
            assert found == pytest.approx(whole)


# Unlike stages, transfers, turns.


def test_a_slow_stage_decides() -> None:
    line = simulate(schedule("1f1b", 3, 10), [1.0, 3.0, 1.0], [2.0, 6.0, 2.0])
    # It begins after one forward before it and is followed by one backward.
    assert line.step_seconds == pytest.approx(1 + 10 * (3 + 6) + 2)


def test_transfers_of_1f1b_hide_behind_one_more_in_flight() -> None:
    plain, ahead = (
        simulate(schedule(name, 4, 32), [1.0] * 4, [2.0] * 4, 0.5).step_seconds
        for name in ("1f1b", "1f1b-ahead")
    )
    assert ahead < plain


def test_a_weight_gradient_waits_for_no_transfer() -> None:
    line = simulate(
        schedule("zb-h1", 2, 1), [1.0] * 2, [1.0] * 2, 10.0, weight_seconds=[1.0] * 2
    )
    assert line.ends_seconds == (1, 12, 13, 24, 14, 25)


@pytest.mark.parametrize("stages", [1, 2, 5])
@pytest.mark.parametrize("micro_batches", [1, 4, 20])
@pytest.mark.parametrize("name", TURN_TICKS)
def test_stages_in_lockstep_exchange_results_after_each_turn(
    name: str, stages: int, micro_batches: int
) -> None:
    table = schedule(name, stages, micro_batches)
    line = simulate(table, [1.0] * stages, [2.0] * stages, 0.5)
    turns = 1 + max(map(table.turn, table.rows))
    whole = 3 * (micro_batches + stages - 1) + (turns - 1) * 0.5 * (stages > 1)
    assert line.step_seconds == pytest.approx(whole)


def test_zb_h1_puts_off_too_much_where_stages_are_very_unlike() -> None:
    forward, backward, weight = [10.0, 0.1], [0.1, 0.1], [0.1, 5.0]
    both = [0.2, 5.1]
    plain = simulate(schedule("1f1b", 2, 8), forward, both).step_seconds
    split = schedule("zb-h1", 2, 8)
    found = simulate(split, forward, backward, weight_seconds=weight).step_seconds
    assert found > plain


def test_a_turn_lasts_as_long_as_its_slowest_stage() -> None:
    forward, backward = [1.0, 3.0], [5.0, 2.0]
    table = schedule("1f1b-lockstep", 2, 3)
    # In each turn: forward and backward of the first stage, and of the second.
    turns = [1, max(1, 3 + 2), max(1 + 5, 3 + 2), max(5, 3 + 2), 5]
    assert simulate(table, forward, backward).step_seconds == sum(turns)
    free = simulate(schedule("1f1b", 2, 3), forward, backward).step_seconds
    assert free <= sum(turns)


# What is refused.


def test_times_of_another_number_of_places() -> None:
    with pytest.raises(PlanError, match="forward_seconds has 1 entry; expected 4"):
        simulate(schedule("interleaved", 2, 2, 2), [1.0], [1.0] * 4)


def test_times_of_a_backward_that_is_not_split() -> None:
    one = [1.0] * 2
    with pytest.raises(PlanError) as caught:
        simulate(schedule("1f1b", 2, 2), one, one[:1], weight_seconds=one)
    assert str(caught.value) == (
        "times of 1f1b: 2 problems\n"
        "  1. backward_seconds has 1 entry; expected 2: 1 chunk on each of 2 "
        "stages\n"
        "  2. weight_seconds is given, but 1f1b does not split the backward pass. Add "
        "it to backward_seconds, or choose the schedule zb-h1"
    )


def test_times_of_a_split_backward_are_all_needed() -> None:
    one = np.ones((2, 1))
    with pytest.raises(PlanError) as caught:
        compiled(schedule("zb-h1", 2, 2)).step_seconds(one, one, np.zeros(1))
    assert (
        "weight_seconds is missing; zb-h1 splits the backward pass. Give the seconds "
        "of the gradients of parameters on each of 2 virtual stages"
    ) in str(caught.value)
