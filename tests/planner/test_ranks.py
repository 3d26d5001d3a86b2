"""Ranks on devices: nothing is cheaper, among few devices and by exchanges of many."""

from __future__ import annotations

from itertools import combinations, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whalejax.meshes.errors import WhaleError
from whalejax.planner.sharding.device_order import _exchanged, _gains, cost, place


def matrices(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    traffic = rng.integers(0, 9, (count, count)) * rng.integers(0, 2, (count, count))
    return traffic.astype(float), rng.uniform(0.1, 1, (count, count))


@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 6), seed=st.integers(0, 10**6))
def test_few_devices_are_placed_as_by_brute_force(count: int, seed: int) -> None:
    traffic, seconds = matrices(count, seed)
    least = min(
        sum(
            traffic[i, j] * seconds[order[i], order[j]]
            for i in range(count)
            for j in range(count)
            if i != j
        )
        for order in permutations(range(count))
    )
    found = place(traffic, seconds)
    assert sorted(found) == list(range(count))
    assert cost(found, traffic, seconds) == pytest.approx(least, rel=1e-12, abs=1e-12)


@settings(max_examples=20, deadline=None)
@given(count=st.sampled_from([7, 8]), seed=st.integers(0, 10**6))
def test_eight_devices_are_placed_as_by_brute_force(count: int, seed: int) -> None:
    traffic, seconds = matrices(count, seed)
    np.fill_diagonal(traffic, 0)
    orders = np.array(list(permutations(range(count))))
    links = seconds[orders[:, :, None], orders[:, None, :]]
    least = float(np.einsum("ij,nij->n", traffic, links).min())
    assert cost(place(traffic, seconds), traffic, seconds) == pytest.approx(least)


@settings(max_examples=20, deadline=None)
@given(count=st.integers(9, 16), seed=st.integers(0, 10**6))
def test_of_many_no_exchange_helps(count: int, seed: int) -> None:
    traffic, seconds = matrices(count, seed)
    found = list(place(traffic, seconds))
    assert sorted(found) == list(range(count))
    least = cost(found, traffic, seconds)
    assert least <= cost(range(count), traffic, seconds) * (1 + 1e-9)
    for one, other in combinations(range(count), 2):
        tried = found.copy()
        tried[one], tried[other] = tried[other], tried[one]
        assert cost(tried, traffic, seconds) >= least * (1 - 1e-9)


def test_gains_are_what_an_exchange_saves() -> None:
    traffic, links = matrices(9, 3)
    np.fill_diagonal(traffic, 0)
    np.fill_diagonal(links, 0)
    gains = _gains(traffic, links)
    for one, other in combinations(range(9), 2):
        order = np.arange(9)
        order[[one, other]] = other, one
        saved = cost(range(9), traffic, links) - cost(order, traffic, links)
        assert gains[one, other] == pytest.approx(saved)


def test_groups_are_found_across_two_nodes() -> None:
    node = np.arange(16) // 8
    seconds = np.where(node[:, None] == node[None, :], 0.1, 1.0)
    group = np.arange(16) % 2  # those that speak to each other stand apart
    traffic = (group[:, None] == group[None, :]).astype(float)
    found = np.array(place(traffic, seconds))
    assert len(set(node[found[group == 0]])) == 1
    # Exchanges alone find them too, from the order that is given.
    assert cost(_exchanged(np.arange(16), traffic, seconds), traffic, seconds) >= cost(
        found, traffic, seconds
    )


def test_what_is_no_matrix_is_refused() -> None:
    with pytest.raises(WhaleError, match=r"traffic_bytes has shape \(2, 1\)"):
        place([[1], [2]], [[0, 1], [1, 0]])
    with pytest.raises(WhaleError, match="2 ranks, seconds_per_byte for 1 device"):
        place([[0, 1], [1, 0]], [[0]])
    with pytest.raises(WhaleError, match="seconds_per_byte has negative or non-finite"):
        place([[0]], [[-1.0]])
