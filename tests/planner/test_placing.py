"""Which devices hold which stages, against every order and every cut."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.test_stages import brute_force
from whalejax.planner.pipeline.heterogeneous_stages import in_order, memory_order, place
from whalejax.planner.pipeline.stage_cuts import Layer, Stage
from whalejax.planner.plan_errors import PlanError


KINDS = (
    Stage(kind="a", speed=2.0, memory_bytes=12.0),
    Stage(kind="b", speed=1.0, memory_bytes=30.0),
    Stage(kind="c", speed=0.5, memory_bytes=math.inf),
)
LAYERS = st.lists(
    st.builds(
        Layer,
        seconds=st.integers(0, 6).map(float),
        static_bytes=st.integers(0, 4).map(float),
        activation_bytes=st.integers(0, 3).map(float),
        transfer_seconds=st.integers(0, 2).map(float),
    ),
    min_size=1,
    max_size=7,
)


@settings(max_examples=60)
@given(LAYERS, st.lists(st.sampled_from(KINDS), min_size=1, max_size=4), st.data())
def test_no_order_and_no_cut_is_faster(
    layers: list[Layer], devices: list[Stage], data: st.DataObject
) -> None:
    count = len(devices)
    held = data.draw(st.sampled_from([range(count, 0, -1), [2] * count, [1] * count]))
    best = math.inf
    for order in itertools.permutations(range(count)):
        stages = [
            replace(devices[i], in_flight=h) for i, h in zip(order, held, strict=True)
        ]
        if count <= len(layers):
            best = min(best, brute_force(layers, stages))
    if best == math.inf:
        with pytest.raises(PlanError):
            place(layers, devices, held)
        return
    found = place(layers, devices, held)
    assert sorted(found.order) == list(range(count))
    assert max(found.cut.seconds) == pytest.approx(best)
    assert [s.kind for s in found.stages] == [devices[i].kind for i in found.order]


def test_a_fast_device_with_little_memory_gets_what_it_holds() -> None:
    layers = [Layer(seconds=1.0, static_bytes=1.0, activation_bytes=1.0)] * 12
    small = Stage(kind="fast", speed=2.0, memory_bytes=12.0)
    large = Stage(kind="slow", speed=1.0, memory_bytes=60.0)
    found = place(layers, [small, large], in_flight=(2, 1))
    # Second it holds six layers of 2 bytes, first four of 3.
    assert found.order == (1, 0) == memory_order([small, large])
    assert found.cut.counts == (6, 6)
    first = in_order(layers, [small, large], (2, 1), (0, 1))
    assert first.cut.counts == (4, 8)


def test_measured_seconds_take_the_place_of_a_speed() -> None:
    layers = [Layer(seconds=1.0)] * 4
    one = Stage(kind="x", seconds=(1.0, 1.0, 1.0, 1.0))
    # Its last layers are slow, whatever its speed is elsewhere.
    other = Stage(kind="y", speed=9.0, seconds=(1.0, 1.0, 5.0, 5.0))
    found = place(layers, [one, other], in_flight=(2, 1))
    assert found.order == (1, 0)
    assert found.cut.counts == (2, 2)
    with pytest.raises(PlanError, match="seconds of 2 layers, but there are 4"):
        place(layers, [replace(one, seconds=(1.0, 1.0)), other], in_flight=(2, 1))
