"""Rebalancing: optimal splits against brute force, and moves only where they pay."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from whalejax.meshes.errors import WhaleError
from whalejax.swarm.stage_assignment import (
    MoveCost,
    PeerLoad,
    PeerMove,
    Rebalancer,
    Rule,
    best_counts,
    best_stages,
    newcomer_stage,
    optimum_move,
    paper_move,
    pipeline_speed,
    stage_speeds,
)


Choose = Callable[[list[PeerLoad], int], PeerMove | None]
CHEAP = MoveCost(state_bytes=10**6, bytes_per_second=1e7)


def alike(counts: tuple[int, ...], queues: tuple[float, ...] = ()) -> list[PeerLoad]:
    """Peers of speed 1 everywhere."""
    return [
        PeerLoad(
            peer=f"{stage}.{number}",
            stage=stage,
            queue_length=queues[stage] if queues else 0.0,
            speeds=(1.0,) * len(counts),
        )
        for stage, count in enumerate(counts)
        for number in range(count)
    ]


def brute_force(speeds: dict[str, tuple[float, ...]], stages: int) -> float:
    return max(
        pipeline_speed(speeds, dict(zip(speeds, placed, strict=True)), stages)
        for placed in itertools.product(range(stages), repeat=len(speeds))
    )


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from((0.5, 1.0, 1.5, 2.0, 3.7)), min_size=1, max_size=4),
    st.integers(0, 5),
)
def test_counts_of_alike_peers_are_the_optimum(seconds: list[float], more: int) -> None:
    stages, peers = len(seconds), len(seconds) + more
    counts = best_counts(peers, seconds)
    assert sum(counts) == peers and min(counts) >= 1
    best = max(
        min(n / s for n, s in zip(split, seconds, strict=True))
        for split in itertools.product(range(1, peers + 1), repeat=stages)
        if sum(split) == peers
    )
    found = min(n / s for n, s in zip(counts, seconds, strict=True))
    assert found == pytest.approx(best)
    speeds = {str(p): tuple(1 / s for s in seconds) for p in range(peers)}
    assert pipeline_speed(speeds, best_stages(speeds, stages), stages) == pytest.approx(
        best
    )


@settings(max_examples=60, deadline=None)
@example([(0.25, 1.0, 0.25), (1.0, 0.25, 1.0), (1.0, 1.0, 0.25)])
@given(
    st.integers(2, 3).flatmap(
        lambda stages: st.lists(
            st.tuples(*[st.sampled_from((0.25, 0.5, 1.0, 2.0))] * stages),
            min_size=stages,
            max_size=6,
        )
    )
)
def test_unlike_peers_are_placed_close_to_the_optimum(
    speeds: list[tuple[float, ...]],
) -> None:
    stages = len(speeds[0])
    peers = {str(number): each for number, each in enumerate(speeds)}
    placed = best_stages(peers, stages)
    assert set(placed.values()) == set(range(stages))
    found, best = pipeline_speed(peers, placed, stages), brute_force(peers, stages)
    assert 0.5 * best - 1e-9 <= found <= best + 1e-9


def test_fast_and_slow_peers_in_every_stage_reach_the_optimum() -> None:
    """40 % and 10 % of a core: each stage gets one of each."""
    peers = {
        f"{kind}{n}": (s,) * 3 for n in range(3) for kind, s in (("f", 4), ("s", 1))
    }
    assert pipeline_speed(peers, best_stages(peers, 3), 3) == 5


@pytest.mark.parametrize(
    "call",
    [lambda: best_counts(2, [1.0, 1.0, 1.0]), lambda: best_stages({"a": (1, 1)}, 2)],
)
def test_too_few_peers_are_an_error(call: Callable[[], object]) -> None:
    with pytest.raises(WhaleError, match="Have more peers, or fewer stages"):
        call()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: best_counts(9, [1.0, 0.0]), r"\[1.0, 0.0\] seconds; expected one num"),
        (
            lambda: best_stages({"a": (1, 0), "b": (1, 1)}, 2),
            r"a has the speeds \[1, 0",
        ),
    ],
)
def test_numbers_that_are_not_above_zero_are_named(
    call: Callable[[], object], text: str
) -> None:
    with pytest.raises(WhaleError, match=text):
        call()


def test_the_rule_of_the_paper() -> None:
    peers = [
        PeerLoad(peer=name, stage=stage, queue_length=queue, speeds=(1.0, 1.0, 1.0))
        for name, stage, queue in (
            ("a", 0, 9.0),
            ("b", 1, 2.0),
            ("c", 1, 1.0),
            ("d", 2, 0.5),
            ("e", 2, 0.25),
        )
    ]
    assert paper_move(peers, 3) == PeerMove(
        peer="e", source=2, target=0, speed_before=1.0, speed_after=1.0
    )


@pytest.mark.parametrize("choose", [paper_move, optimum_move])
def test_the_last_peer_of_a_stage_stays(choose: Choose) -> None:
    assert choose(alike((1, 1, 1), (9.0, 0.0, 0.0)), 3) is None


@pytest.mark.parametrize("choose", [paper_move, optimum_move])
def test_an_empty_stage_comes_first(choose: Choose) -> None:
    move = choose(alike((3, 0, 2), (9.0, 0.0, 1.0)), 3)
    assert move is not None and move.target == 1


def test_stages_that_are_slowest_at_once_are_both_helped() -> None:
    move = optimum_move(alike((4, 4, 7)), 3)
    assert move is not None
    assert (move.source, move.speed_before, move.speed_after) == (2, 4.0, 5.0)
    assert move.moves == 2


def test_newcomers_go_to_the_slowest_stage() -> None:
    assert newcomer_stage(alike((3, 2, 4)), 3) == 1
    assert newcomer_stage(alike((3, 1, 0)), 3) == 2
    assert newcomer_stage([], 3) == 0


def moves(
    rebalancer: Rebalancer, counts: tuple[int, ...], looks: int, cost: MoveCost = CHEAP
) -> list[PeerMove]:
    """What is moved when each move is carried out before the next look."""
    peers = {peer.peer: peer for peer in alike(counts)}
    made = []
    for look in range(looks):
        now = rebalancer.period * (look + 1)
        move = rebalancer.decide([*peers.values()], now, [cost] * len(counts))
        if move is not None:
            made.append(move)
            old = peers[move.peer]
            peers[move.peer] = PeerLoad(
                peer=old.peer, stage=move.target, queue_length=0.0, speeds=old.speeds
            )
            rebalancer.arrived(move.peer)
    speeds = stage_speeds([*peers.values()], len(counts))
    assert max(speeds) - min(speeds) <= 1 or not made
    return made


@pytest.mark.parametrize(
    ("counts", "expected"),
    [((5, 5, 5), 0), ((5, 4, 6), 1), ((4, 4, 7), 2), ((5, 5, 6), 0)],
)
def test_as_many_moves_as_the_optimum_needs(
    counts: tuple[int, ...], expected: int
) -> None:
    assert len(moves(Rebalancer(stages=3), counts, 20)) == expected


def test_nobody_looks_before_the_period_is_over() -> None:
    rebalancer = Rebalancer(stages=3, period=60.0)
    assert rebalancer.decide(alike((5, 5, 5)), 0.0, [CHEAP] * 3) is None
    assert rebalancer.decide(alike((5, 4, 6)), 59.0, [CHEAP] * 3) is None
    assert rebalancer.decide(alike((5, 4, 6)), 60.0, [CHEAP] * 3) is not None


def test_one_moves_at_a_time_and_a_lost_one_is_given_up() -> None:
    rebalancer = Rebalancer(stages=3, period=60.0)
    peers = alike((4, 4, 8))
    move = rebalancer.decide(peers, 0.0, [CHEAP] * 3)
    assert move is not None and rebalancer.moving == move.peer
    rest = [peer for peer in peers if peer.peer != move.peer]
    assert rebalancer.decide(rest, 60.0, [CHEAP] * 3) is None
    assert rebalancer.decide(rest, 61.0, [CHEAP] * 3) is not None


@pytest.mark.parametrize(
    ("cost", "pays"),
    [
        (MoveCost(state_bytes=10**9, bytes_per_second=2.5e7), True),
        (MoveCost(state_bytes=16 * 10**9, bytes_per_second=2.5e7), False),
        (
            MoveCost(state_bytes=10**9, bytes_per_second=2.5e7, compile_seconds=600.0),
            False,
        ),
        (
            MoveCost(state_bytes=10**6, bytes_per_second=2.5e7, compile_seconds=600.0),
            False,
        ),
    ],
)
def test_a_move_must_win_what_it_costs(cost: MoveCost, pays: bool) -> None:
    rebalancer = Rebalancer(stages=3, horizon=600.0)
    assert bool(moves(rebalancer, (5, 4, 6), 1, cost)) is pays


def test_a_gain_below_the_threshold_is_none() -> None:
    assert not moves(Rebalancer(stages=3, threshold=0.3), (5, 4, 6), 5)


@pytest.mark.parametrize("drops", [False, True])
def test_measurements_that_swing_do_not_make_a_peer_swing(drops: bool) -> None:
    """Nor does a peer that serves nothing for the length of a step, each look one."""
    rebalancer = Rebalancer(stages=2, period=1.0, threshold=0.02)
    stages = {"a": 0, "b": 0, "c": 0, "d": 1, "e": 1}
    made = 0
    for look in range(40):
        # Whoever is in the larger stage looks slow: each move seems to be wrong.
        sizes = [[*stages.values()].count(stage) for stage in range(2)]
        speeds = tuple(0.2 if size == max(sizes) else 1.0 for size in sizes)
        peers = [
            PeerLoad(peer=p, stage=s, queue_length=0.0, speeds=speeds[::-1])
            for p, s in stages.items()
        ]
        if drops:
            del peers[look % len(peers)]
        move = rebalancer.decide(peers, float(look), [CHEAP] * 2, [*stages])
        if move is not None:
            made += 1
            stages[move.peer] = move.target
            rebalancer.arrived(move.peer)
    assert made <= len(stages)


def test_no_rule_no_moves() -> None:
    assert not moves(Rebalancer(stages=3, rule=Rule.NONE), (1, 1, 9), 5)


def test_settings_are_checked() -> None:
    with pytest.raises(WhaleError, match="rebalancing: 0 stages, period 60.0 s"):
        Rebalancer(stages=0)


def test_the_earlier_name_of_the_module_still_works() -> None:
    from whalejax.swarm import rebalancing

    with pytest.warns(DeprecationWarning, match=r"is called .*stage_assignment now"):
        assert rebalancing.Rule is Rule
    with pytest.raises(AttributeError):
        rebalancing.Nothing  # noqa: B018
