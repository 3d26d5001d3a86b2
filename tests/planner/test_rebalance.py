"""Shares follow lasting changes of speed, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from whalejax.planner.balance.measured_shares import Rebalance
from whalejax.planner.balance.shares import makespan, shares


def run(
    balance: Rebalance,
    steps: int,
    seconds: Callable[[int], Sequence[float]],
    noise: float,
) -> list[tuple[int, ...]]:
    """Shares after each step, of replicas whose measurements scatter."""
    rng = np.random.default_rng(0)
    return [
        balance.saw([s * rng.lognormal(0.0, noise) for s in seconds(step)])
        for step in range(steps)
    ]


def test_shares_reach_those_of_the_true_speeds() -> None:
    balance = Rebalance([16, 16])
    found = run(balance, 30, lambda step: [1.0, 3.0], 0.02)
    assert found[1] == (16, 16)  # too little was seen
    assert found[-1] == shares(32, [1.0, 3.0]) == (24, 8)
    assert len(set(found[5:])) == 1


def test_a_lasting_change_is_followed_within_few_steps() -> None:
    balance = Rebalance([16, 16])
    run(balance, 40, lambda step: [1.0, 3.0], 0.03)
    found = run(balance, 12, lambda step: [3.0, 1.0], 0.03)
    assert found[8] == (8, 24)


def test_what_costs_much_is_believed_sooner() -> None:
    """Steps until shares move, by how much slower one of two equal replicas gets."""

    def steps(slower: float) -> int:
        balance = Rebalance([16, 16])
        run(balance, 20, lambda step: [1.0, 1.0], 0.0)
        found = run(balance, 12, lambda step: [1.0, slower], 0.0)
        return next(i for i, s in enumerate(found, 1) if s != (16, 16))

    waited = {slower: steps(slower) for slower in (4.0, 2.0, 1.5, 1.2)}
    assert waited[4.0] == 3  # as few as can show a change
    for slower, count in waited.items():
        # Until two steps are lost, or half of the window has seen it.
        now = [1.0, slower]
        lost = makespan([16, 16], now) / makespan(shares(32, now), now) - 1
        assert count == max(3, min(8, math.ceil(2 / lost)))
    assert sorted(waited.values()) == list(waited.values())


def test_loads_that_soon_end_are_not_followed() -> None:
    balance = Rebalance([16, 16])
    run(balance, 20, lambda step: [1.0, 2.0], 0.02)
    before = balance.shares
    found = run(balance, 20, lambda step: [1.3 if step < 4 else 1.0, 2.0], 0.02)
    assert set(found) == {before}


def test_one_late_step_changes_nothing() -> None:
    balance = Rebalance([16, 16])
    run(balance, 20, lambda step: [1.0, 2.0], 0.02)
    before = balance.shares
    found = run(balance, 12, lambda step: [9.0 if step == 2 else 1.0, 2.0], 0.02)
    assert set(found) == {before}


def test_what_scatters_widely_is_shared_evenly() -> None:
    balance = Rebalance([28, 4])
    found = run(balance, 60, lambda step: [1.0, 4.0 if step % 2 else 0.5], 0.05)
    assert found[-1] == (16, 16)


def test_a_small_gain_is_not_worth_it() -> None:
    balance = Rebalance([16, 16])
    assert set(run(balance, 40, lambda step: [1.0, 1.05], 0.0)) == {(16, 16)}


def test_who_takes_nothing_is_asked_again() -> None:
    """A replica so slow that it gets nothing is measured now and then."""
    balance = Rebalance([6, 2])
    speed = {"slow": 50.0}

    def seen() -> list[float]:
        return [1.0, speed["slow"] if balance.shares[1] else 0.0]

    for _ in range(20):
        balance.saw(seen())
    assert balance.shares == (8, 0)
    speed["slow"] = 1.0
    for _ in range(600):
        balance.saw(seen())
    assert balance.shares == (4, 4)


def test_equal_measurements_give_equal_shares() -> None:
    """Every process comes to the same: what was seen says all."""
    one, other = Rebalance([4, 4, 8]), Rebalance([4, 4, 8])
    for balance in (one, other):
        run(balance, 25, lambda step: [1.0, 2.0, 0.7], 0.1)
    assert one.shares == other.shares and one.seconds == other.seconds
