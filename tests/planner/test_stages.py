"""The cut into stages against brute force."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whalejax.planner.pipeline.schedule_bounds import (
    StageSeconds,
    least_divided_seconds,
    least_step_seconds,
)
from whalejax.planner.pipeline.schedules import NAMES, schedule
from whalejax.planner.pipeline.simulate import simulate
from whalejax.planner.pipeline.stage_cuts import Layer, Stage, cut
from whalejax.planner.plan_errors import PlanError


NUMBERS = st.integers(0, 9).map(float)
LAYERS = st.lists(
    st.builds(
        Layer,
        seconds=NUMBERS,
        static_bytes=NUMBERS,
        activation_bytes=NUMBERS,
        transfer_seconds=NUMBERS,
    ),
    min_size=1,
    max_size=12,
)
STAGES = st.lists(
    st.builds(
        Stage,
        speed=st.sampled_from([0.5, 1.0, 2.0]),
        memory_bytes=st.sampled_from([10.0, 30.0, math.inf]),
        in_flight=st.integers(1, 4),
    ),
    min_size=1,
    max_size=4,
)


def brute_force(layers: list[Layer], stages: list[Stage]) -> float:
    """The best pace of all cuts; infinite where none fits."""
    best = math.inf
    inner = range(1, len(layers))
    for inside in itertools.combinations(inner, len(stages) - 1):
        bounds = (0, *inside, len(layers))
        pace = 0.0
        for stage, a, b in zip(stages, bounds, bounds[1:], strict=False):
            part = layers[a:b]
            nbytes = sum(
                layer.static_bytes + stage.in_flight * layer.activation_bytes
                for layer in part
            )
            seconds = sum(layer.seconds for layer in part) / stage.speed
            seconds += layers[a - 1].transfer_seconds if a else 0.0
            pace = max(pace, seconds if nbytes <= stage.memory_bytes else math.inf)
        best = min(best, pace)
    return best


@given(LAYERS, STAGES)
def test_the_cut_equals_brute_force(layers: list[Layer], stages: list[Stage]) -> None:
    best = brute_force(layers, stages)
    if math.isinf(best):
        with pytest.raises(PlanError):
            cut(layers, stages)
        return
    found = cut(layers, stages)
    assert sum(found.counts) == len(layers)
    assert min(found.counts) >= 1
    assert max(found.seconds) == pytest.approx(best)


@given(
    LAYERS,
    st.sampled_from([name for name in NAMES if name != "interleaved"]),
    st.lists(st.sampled_from([20.0, 40.0, 80.0]), min_size=1, max_size=4),
    st.integers(1, 6),
)
def test_a_schedule_fills_the_stages_that_are_cut(
    layers: list[Layer], name: str, memories: list[float], micro_batches: int
) -> None:
    roomy = [Stage(memory_bytes=nbytes) for nbytes in memories]
    table = schedule(name, len(roomy), micro_batches)
    stages = [
        dataclasses.replace(stage, in_flight=held)
        for stage, held in zip(roomy, table.in_flight, strict=True)
    ]
    best = brute_force(layers, stages)
    if math.isinf(best):
        with pytest.raises(PlanError):
            cut(layers, stages)
        return
    found = cut(layers, stages)
    assert max(found.seconds) == pytest.approx(best)
    at = 0
    for stage, count in zip(stages, found.counts, strict=True):
        part = layers[at : at + count]
        held = sum(layer.static_bytes for layer in part)
        held += stage.in_flight * sum(layer.activation_bytes for layer in part)
        assert held <= stage.memory_bytes
        at += count


@pytest.mark.parametrize(
    ("name", "held"),
    [
        ("gpipe", [9, 9, 9]),
        ("1f1b", [3, 2, 1]),
        ("1f1b-ahead", [4, 3, 2]),
        ("zb-h1", [3, 3, 3]),
        ("1f1b-lockstep", [5, 3, 1]),
    ],
)
def test_stages_hold_what_the_schedule_says(name: str, held: list[int]) -> None:
    assert [*schedule(name, 3, 9).in_flight] == held


def test_a_transfer_moves_the_cut_and_is_paid_behind_it() -> None:
    seconds, transfers = (1.0, 1.0, 1.0, 1.0), (0.0, 5.0, 0.25, 0.0)
    layers = [
        Layer(seconds=s, transfer_seconds=t)
        for s, t in zip(seconds, transfers, strict=True)
    ]
    assert cut(layers, [Stage()] * 2).counts in ((1, 3), (3, 1))
    found = cut(layers, [Stage(), Stage(), Stage()])
    assert found.counts == (1, 2, 1)
    assert found.seconds == (1.0, 2.0, 1.25)


def test_a_slow_device_gets_fewer_layers() -> None:
    layers = [Layer(seconds=1.0)] * 12
    assert cut(layers, [Stage(), Stage(speed=0.5)]).counts == (8, 4)


def test_an_early_stage_holds_more_in_flight() -> None:
    layers = [Layer(seconds=1.0, activation_bytes=1.0)] * 8
    stages = [Stage(memory_bytes=6.0, in_flight=n) for n in (2, 1)]
    assert cut(layers, stages).counts == (3, 5)


def test_too_few_layers() -> None:
    with pytest.raises(PlanError, match="2 layers cannot be cut into 3 stages"):
        cut([Layer(seconds=1.0)] * 2, [Stage()] * 3)


def test_a_layer_that_fits_nowhere() -> None:
    layers = [Layer(seconds=1.0), Layer(seconds=1.0, static_bytes=50.0)]
    with pytest.raises(PlanError) as caught:
        cut(layers, [Stage(memory_bytes=20.0), Stage(memory_bytes=40.0)])
    assert str(caught.value) == (
        "no cut into stages fits in memory: 1 problem\n"
        "  1. layer 1 fits in no stage: it lacks 10 bytes on the one with most room. "
        "Shard it over more devices, or checkpoint its activations"
    )


SECONDS = st.floats(0.01, 10.0)


@given(
    st.lists(SECONDS, min_size=2, max_size=6),
    st.integers(1, 8),
    st.floats(1 / 3, 0.6),
    st.floats(0.0, 0.5),
)
def test_no_schedule_is_faster_than_its_bound(
    passes: list[float], count: int, ahead: float, late: float
) -> None:
    """Every schedule that stage programs follow, simulated without transfers."""
    stages = [StageSeconds.of(one, 0.0, recomputes=False) for one in passes]
    bound = least_step_seconds(stages, count)
    divided = least_divided_seconds(StageSeconds.total(stages), len(stages), count)
    assert float(divided) <= bound * (1 + 1e-9)
    for name in ("gpipe", "1f1b", "1f1b-ahead", "zb-h1"):
        table = schedule(name, len(passes), count, 1)
        forward = [ahead * one / count for one in passes]
        back = [(1 - ahead) * one / count for one in passes]
        weight = [late * one for one in back] if table.splits_backward else None
        if weight:
            back = [b - w for b, w in zip(back, weight, strict=True)]
        line = simulate(table, forward, back, 0.0, weight_seconds=weight)
        assert line.step_seconds >= bound * (1 - 1e-9), name


@given(
    st.lists(SECONDS, min_size=4, max_size=8).filter(lambda each: len(each) % 2 == 0),
    st.integers(1, 3),
)
def test_interleaved_parts_are_no_faster_than_their_bound(
    passes: list[float], rounds: int
) -> None:
    """Parts of any length: stage s has the parts s and s + the number of stages."""
    number = len(passes) // 2
    count = rounds * number
    both = [a + b for a, b in zip(passes[:number], passes[number:], strict=True)]
    stages = [StageSeconds.of(one, 0.0, recomputes=False) for one in both]
    bound = least_step_seconds(stages, count, 2)
    divided = least_divided_seconds(StageSeconds.total(stages), number, count)
    table = schedule("interleaved", number, count, 2)
    forward = [one / count / 3 for one in passes]
    back = [2 * one / count / 3 for one in passes]
    line = simulate(table, forward, back, 0.0)
    assert line.step_seconds >= max(bound, float(divided)) * (1 - 1e-9)
