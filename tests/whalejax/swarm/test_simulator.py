"""The simulator: known throughputs, deaths of each kind, and rare orders of events."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whalejax.meshes.errors import WhaleError
from whalejax.swarm.churn import (
    Churn,
    ChurnEvent,
    PeerEventKind,
    PeerLink,
    draw,
    read_csv,
    to_csv,
)
from whalejax.swarm.simulator import (
    Setting,
    StageCost,
    peer_speed,
    simulate,
)
from whalejax.swarm.stage_assignment import Rule


FIRST: Final = StageCost(forward_seconds=1.0, backward_seconds=3.0)
LAST: Final = StageCost(forward_seconds=0.0, backward_seconds=4.0)
UNBOUND: Final = PeerLink()
LINK: Final = PeerLink(
    up_bytes_per_second=1e6, down_bytes_per_second=1e6, latency_seconds=0.01
)


def here(count: int, *, link: PeerLink = UNBOUND) -> list[ChurnEvent]:
    return [
        ChurnEvent(time=0.0, event=PeerEventKind.JOIN, peer=f"p{n}", link=link)
        for n in range(count)
    ]


def at(time: float, event: PeerEventKind, peer: str, speed: float = 1.0) -> ChurnEvent:
    return ChurnEvent(time=time, event=event, peer=peer, speed=speed)


SETTING: Final = Setting(stages=(FIRST, FIRST, LAST), micro_batches=24)


def test_a_full_pipeline_is_as_fast_as_its_slowest_stage() -> None:
    setting = dataclasses.replace(SETTING, micro_batches=400)
    found = simulate(setting, here(6), 900.0)
    # Two peers a stage of 4 s: one micro-batch in 2 s, and the fill of a step.
    assert found.step_seconds[0] == pytest.approx(400 * 2, rel=0.02)
    assert found.of_max_flow > 0.95 and found.utilization > 0.95


def test_links_bound_peers() -> None:
    slow = dataclasses.replace(FIRST, forward_bytes=(8_000_000, 0))
    assert peer_speed(slow, 1.0, LINK) == pytest.approx(1 / 8)
    setting = dataclasses.replace(SETTING, stages=(slow, FIRST, LAST), micro_batches=60)
    found = simulate(setting, here(3, link=LINK), 600.0)
    assert found.step_seconds[0] == pytest.approx(60 * 8, rel=0.15)


def test_a_tensor_goes_over_both_links_at_once() -> None:
    """One micro-batch: five calls, four tensors of 8 s, four latencies a call."""
    border = 8_000_000
    stages = (
        dataclasses.replace(
            FIRST, forward_bytes=(0, border), backward_bytes=(border, 0)
        ),
        dataclasses.replace(
            FIRST, forward_bytes=(border, border), backward_bytes=(border, border)
        ),
        dataclasses.replace(LAST, backward_bytes=(border, border)),
    )
    setting = Setting(stages=stages, micro_batches=1)
    found = simulate(setting, here(3, link=LINK), 100.0)
    latencies = 4 * 4 + 2
    assert found.step_seconds[0] == pytest.approx(12.0 + 4 * 8.0 + latencies * 0.01)


def test_the_slowest_peer_of_a_stage_applies_last() -> None:
    costs = [dataclasses.replace(c, update_seconds=0.5) for c in SETTING.stages]
    trace = [*here(3), *(at(0.0, PeerEventKind.JOIN, f"s{n}", 0.25) for n in range(3))]
    plain = simulate(SETTING, trace, 400.0).step_seconds[0]
    setting = dataclasses.replace(SETTING, stages=tuple(costs))
    found = simulate(setting, trace, 400.0).step_seconds[0]
    assert found - plain == pytest.approx(2.0)


@pytest.mark.parametrize("part", [0.25, 3.0])
def test_delayed_updates_take_the_longer_of_two_times(part: float) -> None:
    plain = simulate(SETTING, here(3), 4000.0).step_seconds[1]
    costs = [
        dataclasses.replace(c, update_seconds=part * plain) for c in SETTING.stages
    ]
    setting = dataclasses.replace(SETTING, stages=tuple(costs))
    after = simulate(setting, here(3), 4000.0).step_seconds
    assert after[1] == pytest.approx((1 + part) * plain)
    setting = dataclasses.replace(setting, delayed_updates=True)
    beside = simulate(setting, here(3), 4000.0).step_seconds
    # Nothing is applied before the first step.
    assert beside[0] == pytest.approx(plain)
    for seconds in beside[1:4]:
        assert seconds == pytest.approx(max(1.0, part) * plain)


def test_fast_peers_are_given_more() -> None:
    setting = Setting(stages=(LAST,), micro_batches=100, in_flight=4)
    trace = [*here(1), at(0.0, PeerEventKind.JOIN, "fast", 3.0)]
    found = simulate(setting, trace, 400.0)
    # Together they compute one micro-batch a second.
    assert found.step_seconds[1] == pytest.approx(100, rel=0.05)
    # A peer waits for the other at the end of a step.
    assert found.busy_seconds["fast"] == pytest.approx(
        found.busy_seconds["p0"], rel=0.1
    )


def test_gradients_are_added_up_over_links() -> None:
    costs = [
        dataclasses.replace(cost, gradient_bytes=3_000_000, update_seconds=0.5)
        for cost in SETTING.stages
    ]
    setting = dataclasses.replace(SETTING, stages=tuple(costs))
    plain = simulate(SETTING, here(6, link=LINK), 200.0).step_seconds[0]
    found = simulate(setting, here(6, link=LINK), 200.0).step_seconds[0]
    assert found - plain == pytest.approx(3.0 + 0.5)


@pytest.mark.parametrize(
    "how", [PeerEventKind.KILL, PeerEventKind.STOP, PeerEventKind.LEAVE]
)
def test_a_death_costs_what_it_held_and_nothing_is_lost(how: PeerEventKind) -> None:
    found = simulate(SETTING, [*here(6), at(30.0, how, "p0")], 600.0)
    assert found.changes == 1 and len(found.step_seconds) >= 5
    recomputed = 0 if how is PeerEventKind.LEAVE else 1
    assert (found.recomputed > 0) == bool(recomputed)
    assert found.empty_seconds == 0


def test_a_death_during_the_sum_opens_the_step_again() -> None:
    costs = [dataclasses.replace(c, gradient_bytes=20_000_000) for c in SETTING.stages]
    setting = dataclasses.replace(SETTING, stages=tuple(costs))
    quiet = simulate(setting, here(6, link=LINK), 300.0)
    began = quiet.step_seconds[0] - 10.0  # while 20 s of sums are under way
    found = simulate(
        setting, [*here(6, link=LINK), at(began, PeerEventKind.KILL, "p0")], 300.0
    )
    assert found.recomputed > 0
    assert found.step_seconds[0] > quiet.step_seconds[0]


def test_a_stage_that_lost_its_last_peer_is_given_another() -> None:
    """Two peers are in the first stage, and one in each other."""
    trace = [*here(4), at(30.0, PeerEventKind.KILL, "p1")]
    found = simulate(SETTING, trace, 1200.0)
    assert found.moves == 1 and found.micro_batches > 200
    # Its announcement holds for 10 s; 10 s later somebody is sent, and 30 s are lost.
    assert found.empty_seconds == pytest.approx(10 + 10) and found.went_back == 1
    alone = simulate(dataclasses.replace(SETTING, rule=Rule.NONE), trace, 1200.0)
    assert alone.micro_batches < 24 and alone.empty_seconds == 1170


def test_a_swarm_without_enough_peers_waits_and_goes_on() -> None:
    trace = [
        *here(4),
        at(30.0, PeerEventKind.KILL, "p1"),
        at(31.0, PeerEventKind.KILL, "p2"),
        at(400.0, PeerEventKind.JOIN, "new"),
    ]
    waits = simulate(SETTING, trace, 399.0)
    assert waits.micro_batches < 24 and waits.empty_seconds > 300
    found = simulate(SETTING, trace, 1200.0)
    assert found.micro_batches > 100 and found.empty_seconds < 500


@pytest.mark.parametrize("size", [10_000_000, 150_000_000])
def test_a_newcomer_takes_the_state_beside_a_step(size: int) -> None:
    """A step of 104 s is summed once a newcomer has it, whose link takes 10 or 150."""
    costs = [dataclasses.replace(c, state_bytes=size) for c in SETTING.stages]
    setting = dataclasses.replace(SETTING, stages=tuple(costs))
    quiet = simulate(setting, here(3, link=LINK), 1000.0).step_seconds
    joins = dataclasses.replace(at(5.0, PeerEventKind.JOIN, "new"), link=LINK)
    # In the first step there is nothing to take: each peer makes its state.
    later = dataclasses.replace(joins, time=quiet[0] + 5.0)
    found = simulate(setting, [*here(3, link=LINK), later], 1000.0)
    assert found.step_seconds[0] == quiet[0]
    waited = max(0.0, 5.0 + size / 1e6 - quiet[1])
    assert found.step_seconds[1] == pytest.approx(quiet[1] + waited, abs=0.1)
    assert found.busy_seconds["new"] > 0 and found.recomputed == 0


def test_many_wait_for_one_once_it_has_lost_as_much() -> None:
    """Thirty would wait for 45 s, which are 1,350; it is worth 600 at first."""
    costs = [dataclasses.replace(c, state_bytes=150_000_000) for c in SETTING.stages]
    setting = dataclasses.replace(SETTING, stages=tuple(costs), micro_batches=240)
    quiet = simulate(setting, here(30, link=LINK), 1500.0).step_seconds
    joins = dataclasses.replace(at(105.0, PeerEventKind.JOIN, "new"), link=LINK)
    found = simulate(setting, [*here(30, link=LINK), joins], 1500.0)
    assert found.step_seconds[:7] == pytest.approx(quiet[:7])
    assert max(found.step_seconds) == pytest.approx(150.0, rel=0.01)
    assert found.busy_seconds["new"] > 0


@pytest.mark.parametrize("every", [2, 100])
def test_all_go_back_where_a_stage_lost_its_last_peer(every: int) -> None:
    """It is the fourth step; the newest snapshot is of step 2, or of none."""
    joins = at(400.0, PeerEventKind.JOIN, "new")
    trace = [*here(3), at(330.0, PeerEventKind.KILL, "p1"), joins]
    setting = dataclasses.replace(SETTING, snapshot_every=every)
    found = simulate(setting, trace, 500.0)
    assert found.went_back == 1
    before, after = (done for t, done in found.timeline if 300.0 < t < 400.0)
    assert before == 3 * 24 and after == (2 * 24 if every == 2 else 0)


@pytest.mark.parametrize("size", [0, 1_000_000])
def test_a_step_with_delayed_updates_begins_once_after_a_snapshot(size: int) -> None:
    costs = [dataclasses.replace(c, state_bytes=size) for c in SETTING.stages]
    setting = dataclasses.replace(
        SETTING, stages=tuple(costs), snapshot_every=2, delayed_updates=True
    )
    plain = dataclasses.replace(setting, snapshot_every=100)
    found, quiet = (simulate(s, here(3, link=LINK), 1000.0) for s in (setting, plain))
    assert found.late == 0 and found.recomputed == 0
    # Three stages' states are sent one after the other, before every other step.
    waited = [0.0, 0.0, 3 * size / 1e6, 0.0]
    for one, other, more in zip(
        found.step_seconds, quiet.step_seconds, waited, strict=False
    ):
        assert one == pytest.approx(other + more, abs=0.1)
    assert found.busy_seconds["p0"] <= quiet.busy_seconds["p0"]


def test_a_peer_may_come_back_under_its_name() -> None:
    trace = [
        *here(6),
        at(30.0, PeerEventKind.KILL, "p0"),
        at(40.0, PeerEventKind.JOIN, "p0"),
        at(41.0, PeerEventKind.JOIN, "p1"),  # it is there already
        at(90.0, PeerEventKind.STOP, "p0"),
        at(90.0, PeerEventKind.LEAVE, "nobody"),
    ]
    found = simulate(SETTING, trace, 900.0)
    assert found.present_seconds["p0"] == pytest.approx(30 + 50)


def test_a_peer_that_slows_down_is_given_less() -> None:
    trace = [*here(6), at(1.0, PeerEventKind.SPEED, "p0", 0.25)]
    setting = dataclasses.replace(SETTING, micro_batches=96, rule=Rule.NONE)
    found = simulate(setting, trace, 3000.0)
    # 1.25 of 2 peers are left of its stage; an equal share would take 4 / 2 as long.
    quiet = simulate(setting, here(6), 3000.0)
    assert found.step_seconds[-1] / quiet.step_seconds[-1] < 1.9


def test_several_trainers_share_the_peers() -> None:
    setting = dataclasses.replace(SETTING, micro_batches=96)
    alone = simulate(setting, here(9), 600.0)
    shared = simulate(dataclasses.replace(setting, trainers=3), here(9), 600.0)
    assert shared.micro_batches > 0.9 * alone.micro_batches


def test_hundreds_of_peers_are_simulated() -> None:
    setting = dataclasses.replace(SETTING, micro_batches=800)
    found = simulate(setting, here(200), 80.0)
    assert found.of_max_flow > 0.7 and len(found.busy_seconds) == 200


CHURN: Final = Churn(
    peers=24,
    lifetime_seconds=3000.0,
    join_seconds=math.inf,
    seconds=3600.0,
    silent=0.5,
    link=LINK,
)


@pytest.mark.parametrize("seed", [0])
def test_rebalancing_comes_close_to_the_optimum_under_churn(seed: int) -> None:
    costs = [dataclasses.replace(c, state_bytes=5_000_000) for c in SETTING.stages]
    setting = dataclasses.replace(SETTING, stages=tuple(costs), micro_batches=48)
    trace = draw(CHURN, seed)
    best = simulate(dataclasses.replace(setting, oracle=True), trace, 3600.0)
    none = simulate(dataclasses.replace(setting, rule=Rule.NONE), trace, 3600.0)
    found = simulate(setting, trace, 3600.0)
    assert found.micro_batches > 0.92 * best.micro_batches
    assert found.micro_batches > 0.95 * none.micro_batches
    assert found.emptied_by_moves == 0 and found.moves <= found.changes


def test_the_same_seed_gives_the_same_run() -> None:
    trace = draw(CHURN, 3)
    assert simulate(SETTING, trace, 900.0) == simulate(SETTING, trace, 900.0)


HAPPENINGS = st.lists(
    st.tuples(
        st.floats(0.1, 150.0),
        st.sampled_from(list(PeerEventKind)),
        st.sampled_from([f"p{n}" for n in range(7)]),
        st.sampled_from((0.2, 1.0, 3.0)),
    ),
    max_size=12,
)


@settings(max_examples=25, deadline=None)
@given(HAPPENINGS, st.sampled_from(list(Rule)), st.integers(1, 2))
def test_any_order_of_events_keeps_the_ledger_whole(
    events: list[tuple[float, PeerEventKind, str, float]], rule: Rule, trainers: int
) -> None:
    """Each commit checks its partition; and with peers in all stages it goes on."""
    trace = [*here(5, link=LINK), *(at(*event) for event in events)]
    setting = dataclasses.replace(
        SETTING, micro_batches=8, rule=rule, trainers=trainers, period=20.0
    )
    found = simulate(setting, trace, 1500.0)
    assert found.emptied_by_moves == 0
    late = [t for t, _ in found.timeline if t > 700.0]
    alive = set[str]()
    for event in sorted(trace, key=lambda event: event.time):
        if event.event is PeerEventKind.JOIN:
            alive.add(event.peer)
        elif event.event is not PeerEventKind.SPEED:
            alive.discard(event.peer)
    if rule is not Rule.NONE and len(alive) >= 3:
        assert late, found


def test_a_newcomer_that_waits_for_the_step_fills_a_stage_that_stops_it() -> None:
    """It comes back while it leaves, and then a stage loses its only peer."""
    gone = [at(1.0, PeerEventKind.LEAVE, "p0"), at(1.0, PeerEventKind.JOIN, "p0")]
    gone += [at(1.0, PeerEventKind.LEAVE, name) for name in ("p1", "p2")]
    for rule in (Rule.PAPER, Rule.OPTIMUM):
        setting = dataclasses.replace(SETTING, micro_batches=8, rule=rule, period=20.0)
        found = simulate(setting, [*here(5, link=LINK), *gone], 300.0)
        assert found.micro_batches > 0 and found.empty_seconds < 60.0


def test_traces_are_written_down_and_read_back(tmp_path: Path) -> None:
    trace = draw(dataclasses.replace(CHURN, join_seconds=300.0), 5)
    path = tmp_path / "trace.csv"
    path.write_text(to_csv(trace))
    assert read_csv(path) == trace
    path.write_text("time,event,peer\n0,join,a\n5.5,kill,a\n")
    assert read_csv(path) == (
        at(0.0, PeerEventKind.JOIN, "a"),
        at(5.5, PeerEventKind.KILL, "a"),
    )


def test_every_wrong_line_of_a_trace_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "time,event,peer,speed\nsoon,join,a,1\n1,dies,a,1\n2,join,,1\n3,join,a,0\n"
    )
    with pytest.raises(WhaleError) as caught:
        read_csv(path)
    text = str(caught.value)
    assert "line 2: time is 'soon'; expected a number of at least 0" in text
    assert "line 3: event is 'dies'; expected join, leave, kill, stop, speed" in text
    assert "line 4: peer is empty" in text
    assert "line 5: speed is '0'; expected a number above 0" in text
    path.write_text(f"time,event,peer\n\n0,join,{'a' * 200_000}\n")
    with pytest.raises(WhaleError, match="line 3: it is no row of a CSV file"):
        read_csv(path)
    path.write_text("when,event\n")
    with pytest.raises(WhaleError, match="lacks time, peer and has the unknown when"):
        read_csv(path)
    with pytest.raises(WhaleError, match="cannot be read"):
        read_csv(tmp_path / "none.csv")


def test_settings_are_checked_together() -> None:
    wrong = Setting(
        stages=(dataclasses.replace(FIRST, backward_seconds=0.0),),
        micro_batches=0,
        period=0.0,
    )
    with pytest.raises(WhaleError) as caught:
        simulate(wrong, [], 10.0)
    text = str(caught.value)
    assert "stages[0].backward_seconds is 0.0; expected more than 0" in text
    assert "micro_batches is 0; expected at least 1" in text
    assert "nobody joins" in text
    with pytest.raises(WhaleError, match="2 peers join at time 0, and there are 3"):
        simulate(SETTING, here(2), 10.0)
