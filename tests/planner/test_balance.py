"""Shares of unlike devices against brute force."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
import scipy.optimize
from hypothesis import assume, given
from hypothesis import strategies as st

from whalejax.planner.balance.shares import (
    Device,
    balance,
    check_pieces,
    even_shares,
    largest_remainder,
    makespan,
    shares,
    speed_bound,
    water_fill,
)
from whalejax.planner.balance.whale_algorithm1 import (
    algorithm_1,
    formula_1,
    uneven_shards,
)
from whalejax.planner.plan_errors import PlanError


SECONDS = st.floats(0.1, 10.0)


@given(st.integers(0, 9), st.lists(SECONDS, min_size=1, max_size=3), st.data())
def test_shares_equal_brute_force(
    total: int, seconds: list[float], data: st.DataObject
) -> None:
    bounds = data.draw(
        st.none()
        | st.lists(st.integers(0, 9), min_size=len(seconds), max_size=len(seconds))
    )
    assume(bounds is None or sum(bounds) >= total)
    found = shares(total, seconds, bounds)
    assert sum(found) == total
    allowed = bounds or [total] * len(seconds)
    assert all(0 <= k <= b for k, b in zip(found, allowed, strict=True))
    ways = itertools.product(*(range(b + 1) for b in allowed))
    best = min(makespan(way, seconds) for way in ways if sum(way) == total)
    assert makespan(found, seconds) == pytest.approx(best)


@given(st.integers(1, 5000), st.lists(SECONDS, min_size=1, max_size=40))
def test_shares_come_near_the_ideal(total: int, seconds: list[float]) -> None:
    found = shares(total, seconds)
    assert sum(found) == total
    ideal = total / math.fsum(1 / t for t in seconds)
    assert ideal <= makespan(found, seconds) * (1 + 1e-9)
    assert makespan(found, seconds) <= ideal + max(seconds)
    even = even_shares(total, len(seconds))
    assert makespan(found, seconds) <= makespan(even, seconds) * (1 + 1e-9)


def test_whales_example_with_a_memory_bound() -> None:
    # 2:1 in speed, 8 and 16 GB, 18 GB for the whole batch of 12: 5.33 fit on the first.
    assert shares(12, [1.0, 2.0]) == (8, 4)
    assert shares(12, [1.0, 2.0], most=[int(8 / 18 * 12), 12]) == (5, 7)


@pytest.mark.parametrize(
    ("total", "count", "expected"), [(8, 2, (4, 4)), (7, 3, (3, 2, 2)), (0, 2, (0, 0))]
)
def test_even_shares(total: int, count: int, expected: tuple[int, ...]) -> None:
    assert even_shares(total, count) == expected


def test_what_cannot_be_shared() -> None:
    with pytest.raises(PlanError) as caught:
        shares(10, [1.0, 0.0], most=[3, 4])
    assert str(caught.value) == (
        "shares: 2 problems\n"
        "  1. seconds[1] is 0.0; expected a number above 0\n"
        "  2. the devices hold 7 pieces together (3, 4), but there are 10. Use "
        "smaller micro-batches, or more devices"
    )


DEVICES = st.lists(
    st.builds(
        Device,
        seconds=st.sampled_from([0.5, 1.0, 1.6, 3.0]),
        memory_bytes=st.sampled_from([6.0, 10.0, 30.0]),
        static_bytes=st.sampled_from([0.0, 2.0]),
        piece_bytes=st.sampled_from([0.0, 1.0, 1.5]),
    ),
    min_size=1,
    max_size=4,
)


@given(
    st.lists(
        st.tuples(st.floats(0.2, 5.0), st.floats(0.05, 1.0)), min_size=1, max_size=5
    )
)
def test_water_filling_solves_formula_1(pairs: list[tuple[float, float]]) -> None:
    weights, most = zip(*pairs, strict=True)
    assume(math.fsum(most) >= 1.0)
    found = water_fill(weights, most)
    assert math.fsum(found) == pytest.approx(1.0)
    assert all(0 <= x <= m * (1 + 1e-12) for x, m in zip(found, most, strict=True))
    # Formula 1 as a linear program: loads, then what they are off at most.
    count, even = len(weights), np.array(weights) / math.fsum(weights)
    eye = np.eye(count)
    best = scipy.optimize.linprog(
        np.r_[np.zeros(count), np.ones(count)],
        A_ub=np.block([[eye, -eye], [-eye, -eye]]),
        b_ub=np.r_[even, -even],
        A_eq=np.r_[np.ones(count), np.zeros(count)][None],
        b_eq=[1.0],
        bounds=[*((0, m) for m in most), *[(0, None)] * count],
    )
    assert formula_1(found, weights) == pytest.approx(best.fun, abs=1e-7)
    # And nothing is done earlier: who is not full is as late as the last.
    ends = [x / w for x, w in zip(found, weights, strict=True)]
    for end, x, m in zip(ends, found, most, strict=True):
        assert end == pytest.approx(max(ends)) or x == pytest.approx(m)


@given(st.integers(1, 12), DEVICES)
def test_algorithm_1_fits_and_never_beats_the_optimum(
    total: int, devices: list[Device]
) -> None:
    most = [d.most(total) for d in devices]
    assume(sum(most) >= total and min(most) >= 1)
    printed, best = algorithm_1(total, devices), balance(total, devices)
    seconds = [d.seconds for d in devices]
    for pieces in (printed, best.pieces, best.even):
        assert sum(pieces) == total
        check_pieces(pieces, total, devices)
    assert best.seconds <= makespan(printed, seconds) * (1 + 1e-12)
    assert best.seconds <= best.even_seconds * (1 + 1e-12)
    rounded = largest_remainder(total, [1 / t for t in seconds])
    if all(k <= m for k, m in zip(rounded, most, strict=True)):
        assert printed == rounded


def test_whales_example_by_its_own_algorithm() -> None:
    devices = [
        Device(seconds=0.5, memory_bytes=8e9, piece_bytes=1.5e9),
        Device(seconds=1.0, memory_bytes=16e9, piece_bytes=1.5e9),
    ]
    found = algorithm_1(12, devices)
    assert found == balance(12, devices).pieces == (5, 7)
    held = [d.needs(k) / 1e9 for d, k in zip(devices, found, strict=True)]
    assert held == [7.5, 10.5]
    roomy = [Device(seconds=d.seconds) for d in devices]
    assert algorithm_1(12, roomy) == balance(12, roomy).pieces == (8, 4)


def test_a_peak_goes_on_where_one_valley_is_not_enough() -> None:
    peak = Device(seconds=0.25, memory_bytes=2.0, piece_bytes=1.0)
    valley = Device(seconds=1.0, memory_bytes=5.0, piece_bytes=1.0)
    assert algorithm_1(12, [peak, valley, valley]) == (2, 5, 5)


def test_static_memory_does_not_grow_with_the_share() -> None:
    fast = Device(seconds=1.0, memory_bytes=10.0, static_bytes=6.0, piece_bytes=0.5)
    slow = Device(seconds=2.0, memory_bytes=10.0, static_bytes=6.0, piece_bytes=0.5)
    # As share × everything, 12 pieces of 1 byte would bound the first by 10 of 12.
    assert balance(12, [fast, slow]).pieces == (8, 4)


@given(st.lists(SECONDS, min_size=1, max_size=6), st.integers(1, 60))
def test_no_shares_gain_more_than_the_bound(seconds: list[float], total: int) -> None:
    devices = [Device(seconds=t) for t in seconds]
    # What integers cost even shares is no part of the bound: whole rounds only.
    found = balance(total * len(seconds), devices)
    assert found.bound == speed_bound(seconds)
    assert 1 - 1e-12 <= found.gain <= found.bound * (1 + 1e-9)


def test_uneven_shards_are_stored_padded() -> None:
    found = uneven_shards(1024, [1.0, 1.0, 2.0], multiple=64)
    assert sum(found.sizes) == 1024
    assert found.padded == max(found.sizes)
    with pytest.raises(PlanError, match="a dimension of 10 cannot be divided into"):
        uneven_shards(10, [1.0, 2.0], multiple=4)


def test_devices_that_are_too_small() -> None:
    small = Device(name="t4", seconds=1.0, memory_bytes=5.0, static_bytes=4.5)
    small = dataclasses.replace(small, piece_bytes=1.0)
    large = dataclasses.replace(small, name="h100", memory_bytes=6.5)
    with pytest.raises(PlanError) as caught:
        balance(4, [small, large])
    assert (
        "device 0 (t4) has no memory for one piece: it needs 6 bytes and has 5"
        in str(caught.value)
    )
    with pytest.raises(PlanError) as caught:
        balance(8, [large, large])
    assert "4 pieces fit, but there are 8, 4 bytes short" in str(caught.value)


def test_shares_asked_by_hand() -> None:
    device = Device(name="t4", seconds=1.0, memory_bytes=4.0, piece_bytes=1.0)
    check_pieces((4, 2), 6, [device, device])
    with pytest.raises(PlanError) as caught:
        check_pieces((5, 2), 6, [device, device])
    assert str(caught.value) == (
        "shares: 2 problems\n"
        "  1. got 5, 2, together 7; expected numbers of at least 0 that add up to 6\n"
        "  2. device 0 (t4) got 5 pieces, but only 4 fit, 1 bytes short. Give it "
        "at most 4"
    )
