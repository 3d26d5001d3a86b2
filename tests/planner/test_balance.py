"""Shares of unlike devices against brute force."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from whalejax.planner.balance import even_shares, makespan, shares
from whalejax.planner.plan import PlanError


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
        "  2. the devices hold 7 pieces together (3, 4); there are 10. Use smaller "
        "micro-batches, or more devices"
    )
