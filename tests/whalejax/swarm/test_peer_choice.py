"""Wiring: shares follow speed, failures are charged, bans end, newcomers are tried."""

from __future__ import annotations

import heapq
import itertools

import pytest

from whalejax.meshes.errors import WhaleError
from whalejax.swarm.peer_choice import StageWiring


def wired(*peers: str, expires: float = 1e9, seed: int = 0) -> StageWiring:
    wiring = StageWiring(seed=seed)
    for peer in peers:
        wiring.announce(peer, 1, now=0.0, expires=expires)
    return wiring


def shares(
    wiring: StageWiring,
    speeds: dict[str, float],
    calls: int,
    in_flight: int,
    now: float = 0.0,
) -> dict[str, float]:
    """The part of the calls that each peer is given; peers compute one at a time."""
    counts = dict.fromkeys(speeds, 0)
    free_at = dict.fromkeys(speeds, now)
    running: list[tuple[float, int, str, float]] = []
    order = itertools.count()
    for _ in range(calls):
        if len(running) == in_flight:
            now, _, done, began = heapq.heappop(running)
            wiring.completed(done, 1.0, now - began, now)
        peer = wiring.choose(now)
        assert peer is not None
        counts[peer] += 1
        free_at[peer] = max(now, free_at[peer]) + 1 / speeds[peer]
        heapq.heappush(running, (free_at[peer], next(order), peer, now))
    return {peer: count / calls for peer, count in counts.items()}


@pytest.mark.parametrize("in_flight", [1, 4, 16])
def test_shares_follow_speed(in_flight: int) -> None:
    speeds = {"a": 4.0, "b": 2.0, "c": 1.0, "d": 1.0}
    found = shares(wired(*speeds), speeds, 8000, in_flight)
    for peer, speed in speeds.items():
        assert found[peer] == pytest.approx(speed / 8, abs=0.004), found


def test_equal_peers_are_ordered_by_the_seed_alone() -> None:
    first = [wired("a", "b", "c", seed=seed).choose(0.0) for seed in range(20)]
    assert first == [wired("a", "b", "c", seed=seed).choose(0.0) for seed in range(20)]
    assert set(first) == {"a", "b", "c"}


def test_a_newcomer_is_tried_at_once_and_has_no_credit() -> None:
    speeds = {"a": 1.0, "b": 1.0}
    wiring = wired(*speeds)
    shares(wiring, speeds, 200, 1)
    wiring.announce("new", 1, now=200.0, expires=1e9)
    assert "new" in {wiring.choose(200.0) for _ in range(3)}
    found = shares(wiring, {**speeds, "new": 1.0}, 300, 1, now=200.0)
    assert found["new"] == pytest.approx(1 / 3, abs=0.02)


def test_a_newcomer_is_expected_to_be_as_fast_as_its_mates() -> None:
    """A guess of a second among peers of 10 ms would starve it for 100 calls."""
    speeds = {"a": 100.0, "b": 100.0}
    wiring = wired(*speeds)
    shares(wiring, speeds, 50, 1)
    wiring.announce("new", 1, now=1.0, expires=1e9)
    chosen = [wiring.choose(1.0) for _ in range(12)]
    assert 3 <= chosen.count("new") <= 5


def test_first_guesses_are_put_right_by_the_first_measurement() -> None:
    wiring = wired("fast", "slow")
    for _ in range(2):
        wiring.choose(0.0)  # each is charged the guess of one second
    wiring.completed("fast", 1.0, 0.01, now=0.01)
    wiring.completed("slow", 1.0, 1.0, now=1.0)
    assert {wiring.choose(1.0) for _ in range(50)} == {"fast"}


def test_a_time_out_is_charged_its_deadline() -> None:
    wiring = wired("good", "silent")
    for _ in range(2):
        wiring.choose(0.0)
    wiring.completed("good", 1.0, 0.1, now=0.1)
    wiring.failed("silent", 30.0, ban=False)
    assert wiring.seconds_per_task("silent") == 30.0
    assert {wiring.choose(30.0) for _ in range(250)} == {"good"}


def test_a_peer_that_always_times_out_is_given_ever_less() -> None:
    wiring = wired("good", "silent")
    counts, now = {"good": 0, "silent": 0}, 0.0
    for _ in range(600):
        peer = wiring.choose(now)
        assert peer is not None
        counts[peer] += 1
        if peer == "good":
            now += 0.1
            wiring.completed(peer, 1.0, 0.1, now)
        else:
            now += 10.0
            wiring.failed(peer, 10.0, ban=False)
    assert counts["silent"] == pytest.approx(600 * 0.1 / 10, abs=3)


def test_a_refusal_at_once_makes_nobody_look_fast() -> None:
    wiring = wired("a", "refuses")
    for _ in range(2):
        wiring.choose(0.0)
    wiring.completed("a", 1.0, 1.0, now=1.0)
    wiring.failed("refuses", 0.001, ban=False)
    assert wiring.seconds_per_task("refuses") is None


def test_seconds_are_those_of_a_forward_pass() -> None:
    wiring = wired("a")
    wiring.choose(40.0, task=2.5)
    wiring.completed("a", 2.5, 0.5, now=40.5)
    assert wiring.seconds_per_task("a") == pytest.approx(0.2)
    assert wiring.in_flight("a") == 0


def test_the_average_is_corrected_for_its_start() -> None:
    wiring, now = wired("a"), 0.0
    for seconds in (1.0, 1.0, 3.0):
        wiring.choose(now)
        now += seconds
        wiring.completed("a", 1.0, seconds, now)
    weights = [0.1 * 0.9**2, 0.1 * 0.9, 0.1]
    expected = (weights[0] + weights[1] + 3 * weights[2]) / sum(weights)
    assert wiring.seconds_per_task("a") == pytest.approx(expected)


def test_waiting_behind_own_calls_makes_nobody_look_slow() -> None:
    wiring = wired("a")
    for _ in range(8):
        wiring.choose(0.0)
    for number in range(8):
        wiring.completed("a", 1.0, number + 1.0, now=number + 1.0)
    assert wiring.seconds_per_task("a") == pytest.approx(1.0)


def test_waiting_behind_the_calls_of_others_counts() -> None:
    wiring = wired("a")
    for number in range(3):  # one of two calls at the peer is another trainer's
        wiring.choose(2.0 * number)
        wiring.completed("a", 1.0, 2.0, now=2.0 * number + 2.0)
    assert wiring.seconds_per_task("a") == pytest.approx(2.0)


def test_a_ban_lasts_until_a_newer_announcement() -> None:
    wiring = wired("a", expires=60.0)
    wiring.choose(0.0)
    wiring.failed("a", 0.1, ban=True)
    assert wiring.choose(1.0) is None and wiring.peers(1.0) == ()
    wiring.announce("a", 1, now=2.0, expires=60.0)  # the registry's old record
    assert wiring.peers(2.0) == ()
    wiring.announce("a", 1, now=30.0, expires=90.0)
    assert wiring.choose(30.0) == "a"


def test_a_ban_ends_with_a_restart() -> None:
    wiring = wired("a", expires=60.0)
    wiring.failed("a", 0.1, ban=True)
    wiring.announce("a", 2, now=2.0, expires=60.0)
    assert wiring.choose(2.0) == "a" and wiring.incarnation("a") == 2
    wiring.announce("a", 1, now=3.0, expires=99.0)
    assert wiring.incarnation("a") == 2


def test_late_failures_of_a_dead_process_do_not_ban_the_new_one() -> None:
    wiring = wired("a", expires=60.0)
    wiring.choose(0.0)
    wiring.announce("a", 2, now=2.0, expires=62.0)
    wiring.failed("a", 30.0, ban=True, incarnation=1)
    wiring.completed("a", 1.0, 30.0, now=30.0, incarnation=1)
    assert wiring.peers(30.0) == ("a",) and wiring.seconds_per_task("a") is None


def test_expired_peers_are_forgotten() -> None:
    wiring = wired("a", expires=60.0)
    wiring.choose(0.0)
    wiring.completed("a", 1.0, 5.0, now=5.0)
    assert wiring.choose(60.0) is None
    wiring.announce("a", 1, now=61.0, expires=60.0)
    assert wiring.peers(61.0) == ()
    wiring.announce("a", 1, now=61.0, expires=120.0)
    assert wiring.choose(61.0) == "a" and wiring.seconds_per_task("a") is None


def test_who_has_left_is_not_brought_back_by_an_old_record() -> None:
    wiring = wired("a", "b", expires=60.0)
    wiring.leave("a")
    wiring.announce("a", 1, now=1.0, expires=60.0)
    assert wiring.peers(1.0) == ("b",)
    wiring.announce("a", 1, now=40.0, expires=100.0)
    assert wiring.peers(40.0) == ("a", "b")


def test_queues_of_other_trainers_count_and_own_calls_do_not() -> None:
    wiring = wired("busy", "idle")
    for _ in range(2):
        wiring.choose(0.0)
    for peer in ("busy", "idle"):
        wiring.completed(peer, 1.0, 1.0, now=1.0)
    wiring.reported("busy", 3)
    first = [wiring.choose(1.0) for _ in range(3)]
    assert first == ["idle"] * 3
    wiring.reported("idle", 3)  # the three of this trainer
    wiring.reported("busy", 0)
    assert [wiring.choose(1.0) for _ in range(3)] == ["busy"] * 3


def test_avoided_peers_are_a_last_resort() -> None:
    wiring = wired("a", "b")
    assert {wiring.choose(0.0, avoid=("a",)) for _ in range(5)} == {"b"}
    assert wiring.choose(0.0, avoid=("a", "b")) is not None
    assert wiring.choose(0.0) == "a"


@pytest.mark.parametrize(
    "settings", [{"alpha": 0.0}, {"alpha": 1.5}, {"initial_seconds": 0.0}]
)
def test_settings_are_checked(settings: dict[str, float]) -> None:
    with pytest.raises(WhaleError, match="alpha must be above 0 and at most 1"):
        StageWiring(seed=0, **settings)
