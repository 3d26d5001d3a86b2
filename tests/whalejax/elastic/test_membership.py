"""Leases, generations, budgets and held-out members, by a clock of the tests' own."""

from __future__ import annotations

import functools
import signal
from typing import Any

import pytest

from tests.whalejax.elastic.driven import Driven
from tests.whalejax.elastic.simulated import Simulated, World
from tests.whalejax.messages import received
from whalejax.elastic.agents.agent_fleet import AgentFleet
from whalejax.elastic.supervisor.event_messages import event_message
from whalejax.membership.dead_members import check_step
from whalejax.membership.events import WriteEvent
from whalejax.membership.exit_status import exit_text
from whalejax.membership.phases import FINISHED
from whalejax.membership.restart_policy import Failure, error_line
from whalejax.membership.settings import SupervisorSettings, least_and_most
from whalejax.meshes.errors import WhaleError


def begun(world: World) -> list[dict[str, object]]:
    return [e.fields for e in world.events if e.event == "begun"]


def test_an_undisturbed_run_has_one_generation() -> None:
    world = World(0)
    world.begin()
    world.run(300)
    assert world.end is not None and world.end.status == 0, world.end
    assert [c.step for c in world.commits] == list(range(1, 61))
    assert len(begun(world)) == 1 and not world.names("lost")


def test_a_killed_member_costs_no_step() -> None:
    world = World(1)
    world.begin()
    world.run(9)
    done = world.commits[-1].step
    world.exit(world.members[world.membership.active[1]], -9)
    world.run(9.5)
    assert begun(world)[-1]["step"] in (done, done + 1)
    assert len(world.membership.active) == 2
    world.run(300)
    assert world.end is not None and world.end.status == 0
    assert [c.step for c in world.commits] == list(range(1, 61))
    # Its successor joined at a boundary.
    assert len(begun(world)[-1]["members"]) == 3  # type: ignore[arg-type]


def test_a_spare_steps_in_at_once() -> None:
    world = World(2, spares=1)
    world.begin()
    world.run(9)
    assert len(world.membership.active) == 3
    world.exit(world.members[world.membership.active[0]], -9)
    world.run(9.5)
    assert len(world.membership.active) == 3
    world.run(300)
    assert world.end is not None and world.end.status == 0


def test_a_frozen_member_is_killed_when_its_lease_is_over() -> None:
    world = World(3, lease_seconds=4.0)
    world.begin()
    world.run(9)
    name = world.membership.active[1]
    world.members[name].frozen = True
    world.run(12)
    assert not world.names("lost")
    world.run(14)
    assert world.names("lost") == [name] and not world.members[name].alive
    world.run(300)
    assert world.end is not None and world.end.status == 0


def test_a_freeze_within_the_lease_loses_nobody() -> None:
    world = World(4, lease_seconds=10.0)
    world.begin()
    world.run(9)
    member = world.members[world.membership.active[1]]
    member.frozen = True
    world.run(12)
    member.frozen = False
    for said in member.late:
        member.hear(said)
    member.computed()
    world.run(300)
    assert world.end is not None and world.end.status == 0
    assert not world.names("lost") and len(begun(world)) == 1


def test_who_beats_and_does_not_move_on_is_given_up() -> None:
    world = World(5, step_seconds=5.0)
    world.begin()
    world.run(9)
    name = world.membership.active[2]
    stuck = world.members[name]
    stuck.computed = lambda: None  # type: ignore[method-assign]
    world.run(30)
    assert world.names("lost") == [name]
    lost = next(e for e in world.events if e.event == "lost")
    assert "did not move on in a step for 5 s" in str(lost.fields["why"])
    world.run(300)
    assert world.end is not None and world.end.status == 0


def test_who_cannot_be_reached_is_given_up() -> None:
    world = World(13)
    world.begin()
    world.run(9)
    one, cut, other = world.membership.active
    exchange, cuts = world.exchange, [cut]

    def reaches(generation: int, step: int) -> None:
        if set(cuts) & set(world.membership.active):
            for name in (one, other):
                said = {"generation": world.membership.generation, "name": cut}
                world.members[name].say("suspect", **said, why="no route")
        else:
            exchange(generation, step)

    world.exchange = reaches  # type: ignore[method-assign]
    world.run(20)
    # Connecting again is tried first.
    assert world.names("lost") == [cut] and len(begun(world)) >= 3
    lost = next(e for e in world.events if e.event == "lost")
    assert lost.fields["why"] == "other members cannot reach it"
    world.run(300)
    assert world.end is not None and world.end.status == 0


def test_a_zombie_hears_that_it_is_over() -> None:
    world = World(6)
    world.begin()
    world.run(9)
    member = world.members[world.membership.active[1]]
    world.exit(member, -9)
    member.alive = True  # As of another machine, where nobody could end it.
    member.running, member.finished = -1, True
    world.run(12)
    member.say("committed", generation=1, step=50, loss=9.0, seconds=0.1, parts={})
    world.run(13)
    assert not member.alive and world.names("lost") == [member.name]
    assert all(c.loss < 9 for c in world.commits)


def test_below_the_least_members_the_run_waits_and_then_ends() -> None:
    world = World(7, least=3, wait_seconds=20.0)
    world.begin()
    world.run(9)
    world.saved = 10
    world.broken_start = True
    path = "runs/mine/step_000010"
    world.members[world.membership.active[1]].say("saved", step=10, path=path)
    world.run(9.2)
    world.membership.failures.hold = lambda now, slot: 1e6  # type: ignore[method-assign]
    name = world.membership.active[0]
    world.exit(world.members[name], -9)
    world.run(20)
    assert world.end is None and world.membership.phase == "gathering"
    world.run(60)
    assert world.end is not None and world.end.status == 1
    assert world.end.text == (
        "2 of at least 3 members are there, and no other came in 20 s; gone are "
        f"{name}. The last checkpoint is runs/mine/step_000010"
    )


def test_an_error_that_comes_again_ends_the_run_at_once() -> None:
    world = World(8)
    world.broken_start = True
    world.begin()
    world.run(300)
    assert world.end is not None and world.end.status == 1
    assert world.end.text == (
        "the same error ended m1 and then m4, without a new step between them. No "
        "checkpoint was written. The first error: m1: its process ended with status "
        "1:\nits log"
    )
    assert len(world.members) == 6


def test_an_error_that_comes_again_is_known_over_a_restart_of_the_supervisor() -> None:
    world = World(18)
    world.broken_start = True
    world.begin()
    world.run(0.6)
    world.die()
    world.run(300)
    assert world.end is not None and len(world.members) == 9
    # Those of m4 to m6, which ended meanwhile, nobody could know.
    assert "the same error ended m1 and then m7" in world.end.text


def test_members_that_are_killed_together_are_one_failure() -> None:
    world = World(17, least=2, most=8, steps=120)
    world.begin()
    world.run(9)
    for member in [*world.members.values()]:
        world.exit(member, -9)
    world.run(600)
    assert world.end is not None and world.end.status == 0, world.end.text
    assert len(world.names("lost")) == 8 and len(world.members) == 16


def test_processes_that_are_killed_as_they_start_end_the_run_in_time() -> None:
    world = World(19, fruitless=5)
    world.broken_start = True
    exit_ = world.exit
    world.exit = lambda member, status: exit_(member, -9)  # type: ignore[method-assign]
    world.begin()
    world.run(600)
    assert world.end is not None and world.end.status == 1
    # Nothing that a process wrote before it was killed is taken for an error.
    assert world.end.text.startswith("5 failures without a new step between them")
    assert world.end.text.endswith("m1: its process ended by SIGKILL")


def test_an_error_of_one_place_ends_no_run_in_which_others_get_further() -> None:
    world = World(20, steps=600, fruitless=3)
    release = world.release

    def breaks(member: Simulated) -> None:
        slot = world.membership.members[member.name].slot
        if slot == 0:
            member.released = True
            world.later(1.5, lambda: world.exit(member, 1))
        else:
            release(member)

    ready = world.ready

    def ready_later(member: Simulated) -> None:
        world.later(60.0, lambda: ready(member))

    world.release = breaks  # type: ignore[method-assign]
    world.ready = ready_later  # type: ignore[method-assign]
    world.begin()
    world.run(900)
    assert world.end is not None and world.end.status == 0, world.end.text
    assert world.membership.failures.total > 3


def failed(at: float, error: str = "", since: float | None = None) -> Failure:
    since = at - 0.5 if since is None else since
    return Failure(at=at, since=since, name="m1", why="died", error=error)


def test_the_first_error_is_told_and_not_what_was_killed_before_it() -> None:
    failures = World(21, fruitless=3).membership.failures
    failures.count(failed(1.0), "a.py:3: DeprecationWarning: old")
    failures.record_error("m1", "no data")
    failures.count(failed(2.0, "no data"))
    failures.count(failed(3.0, "another"))
    text = failures.exceeded(3.0)
    assert text.endswith("The first error: m1: died:\nno data")


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("Traceback (most recent call last):\n  x\nKeyError: 1\nbye", "KeyError: 1"),
        ("Traceback (most recent call last):\n  x\na.b.Odd: 2\n\n", "a.b.Odd: 2"),
        (
            "Traceback (most recent call last):\n  x\na.Odd: 1 problem\n  1. no\nbye",
            "a.Odd: 1 problem 1. no",
        ),
        ("a.py:3: DeprecationWarning: old\n  x()\n", "  x()"),
        ("", ""),
    ],
)
def test_the_line_of_a_log_that_names_the_error(log: str, line: str) -> None:
    assert error_line(log) == line


def test_a_member_that_flaps_is_held_out_for_longer_each_time() -> None:
    world = World(9, hold_seconds=2.0, most_hold_seconds=30.0)
    times = []
    for again in range(7):
        times.append(world.membership.failures.hold(100.0 + again, 1))
    assert times == [0.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert world.membership.failures.hold(1000.0, 1) == 0.0
    assert world.membership.failures.hold(1000.0, 2) == 0.0


def test_restarts_in_a_window_have_a_budget() -> None:
    failures = World(10, restarts=3, window_seconds=100.0).membership.failures
    for now in (0.0, 50.0, 120.0, 130.0):
        failures.count(failed(now))
        failures.progressed()
        assert not failures.exceeded(now)
    failures.count(failed(140.0))
    assert "4 failures in 100 s, more than the 3 allowed" in failures.exceeded(140.0)


def test_without_restarts_the_first_failure_ends_the_run() -> None:
    failures = World(11, restarts=0).membership.failures
    assert not failures.exceeded(0.0)
    failures.count(failed(1.0, "no data"))
    text = failures.exceeded(1.0)
    assert text.startswith("a process failed, and none is restarted. The first error")


def test_steps_that_are_done_again_are_no_progress() -> None:
    failures = World(12, fruitless=3).membership.failures
    for now in (1.0, 2.0):
        failures.count(failed(now))
        failures.progressed(10)
        assert not failures.exceeded(now)
        failures.progressed(9)
    for now in (3.0, 4.0):
        failures.count(failed(now))
        failures.progressed(10)
    assert "3 failures without a new step between them. The first error: m1: died" in (
        failures.exceeded(4.0)
    )
    failures.progressed(11)
    assert not failures.exceeded(4.0)


def test_a_run_that_is_told_to_end_drains() -> None:
    world = World(11)
    world.begin()
    world.run(9)
    world.membership.terminate(world.now)
    world.do()
    world.run(30)
    assert world.end is not None and world.end.status == 143
    newest = world.commits[-1].step
    assert world.end.text == f"the run was asked to end, after step {newest}"


def test_a_member_that_leaves_takes_no_step_with_it() -> None:
    world = World(12, steps=100)
    world.begin()
    world.run(9)
    member = world.members[world.membership.active[0]]
    member.say("leaving", why="SIGTERM")
    world.run(15)
    assert not member.alive and not world.names("lost")
    world.run(300)
    assert world.end is not None and world.end.status == 0
    assert [c.step for c in world.commits] == list(range(1, 101))


@pytest.mark.sampled(16)
@pytest.mark.parametrize("seed", range(40))
def test_random_faults_end_in_a_whole_run(seed: int) -> None:
    world = World(seed, steps=120, spares=seed % 2, lease_seconds=3.0, fruitless=99)
    world.begin()
    for _ in range(12):
        world.run(world.now + world.drawn.uniform(0.2, 5.0))
        if world.end:
            break
        there = [m for m in world.members.values() if m.alive]
        if not there:
            continue
        member = world.drawn.choice(there)
        if world.drawn.random() < 0.6:
            world.exit(member, -9)
        elif world.drawn.random() < 0.5:
            member.frozen = True
        else:
            member.say("leaving", why="SIGTERM")
    world.run(world.now + 600)
    assert world.end is not None, (world.membership.phase, world.events[-20:])
    # All that were there may have been told to leave: then the run has drained.
    assert world.end.how in ("complete", "drained", "interrupted"), world.end.text
    assert (world.end.how == "complete") != bool(world.names("draining"))
    # The last commit of every step is what counts; none is left out.
    steps = {c.step for c in world.commits}
    assert steps == set(range(1, len(steps) + 1))
    assert len(steps) == 120 or world.end.how != "complete"


@pytest.mark.sampled(12)
@pytest.mark.parametrize("seed", range(40))
def test_members_that_fail_and_end_later_hold_nobody_up(seed: int) -> None:
    world = World(seed, steps=150, spares=seed % 2, fruitless=99)
    world.begin()
    for number in range(8):
        world.run(world.now + world.drawn.uniform(0.2, 5.0))
        there = [m for m in world.members.values() if m.alive and m.is_ready]
        if world.end or not there:
            continue
        member = world.drawn.choice(there)
        if world.drawn.random() < 0.3:
            world.exit(member, -9)
            continue
        member.running, member.phase, member.finished = -1, FINISHED, True
        member.say("failed", why=f"error {number}")
        seconds = world.drawn.uniform(0.0, 20.0)
        world.later(seconds, functools.partial(world.exit, member, 1))
        if world.drawn.random() < 0.3 and not world.down:
            world.die()
    world.run(world.now + 600)
    assert world.end is not None, (world.membership.phase, world.events[-20:])
    assert world.end.how == "complete", world.end.text
    assert {c.step for c in world.commits} == set(range(1, 151))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("4:2", "MIN is 4 and MAX is 2; expected MIN:MAX with MIN at most MAX"),
        ("0:2", "MIN is 0; expected at least 1 process"),
        ("a", "it is 'a'; expected MIN:MAX, such as 2:4, or one number"),
        ("2:", "expected MIN:MAX"),
        ("1:2:3", "expected MIN:MAX"),
    ],
)
def test_wrong_numbers_of_processes_are_refused(text: str, said: str) -> None:
    with pytest.raises(WhaleError, match=said):
        least, most = least_and_most(text)
        SupervisorSettings(least=least, most=most)


def test_wrong_times_are_refused_all_at_once() -> None:
    with pytest.raises(WhaleError, match=r"(?s)2 problems.*lease_sec.*wait_sec"):
        SupervisorSettings(
            least=1, most=1, lease_seconds=0.0, wait_seconds=float("nan")
        )


@pytest.mark.parametrize(
    ("status", "how", "said"),
    [
        (1, "failed", "no ?[1mdata"),
        (-signal.SIGABRT, "failed", "no ?[1mdata"),
        (-signal.SIGKILL, "lost", ""),
        (None, "lost", ""),
    ],
)
def test_an_error_of_its_own_is_told_from_a_loss(
    status: int | None, how: str, said: str
) -> None:
    there = Driven(SupervisorSettings(least=1, most=1))
    there.begin(0.0)
    there.started(1.0, "m1", 0, 7)
    there.effects()
    there.exited(2.0, "m1", status, "Traceback\nno \x1b[1mdata\n")
    (lost,) = (
        e.fields
        for e in there.effects()
        if isinstance(e, WriteEvent) and e.event == "lost"
    )
    assert (lost["how"], lost["said"]) == (how, said)
    word = "failed" if how == "failed" else "is lost"
    end = f"; its log ends: {said}" if said else ""
    why = f"its process ended {exit_text(status)}{end}"
    assert event_message("lost", lost) == f"m1 {word}: {why}"


def exchange_breaks(world: World, between: set[str]) -> None:
    """While both of these take part, neither hears the other, and each says so."""
    exchange = world.exchange

    def breaks(generation: int, step: int) -> None:
        if not between <= set(world.membership.active):
            exchange(generation, step)
            return
        for name, other in (sorted(between), sorted(between, reverse=True)):
            said = {"generation": world.membership.generation, "name": other}
            world.members[name].say("suspect", **said, why="its connection ended")

    world.exchange = breaks  # type: ignore[method-assign]


def with_one_state(seed: int) -> tuple[World, str, str]:
    """A run of which one member has the state: it, and the spare that fetches it.

    The first rank was lost, and the spare takes that.
    """
    world = World(seed, most=2, spares=2, steps=400)
    world.begin()
    world.run(9)
    first, second = world.membership.active
    members = world.membership.members.values()
    spare = next(m.name for m in members if m.status == "ready")
    world.exit(world.members[first], -9)
    return world, second, spare


def test_members_that_fail_as_they_fetch_cost_who_has_the_state_nothing() -> None:
    world, holder, _ = with_one_state(14)
    fails: list[str] = []

    def fail(member: Simulated) -> None:
        """Its error is told, its connections end, and its process some time later."""
        member.running, member.phase = -1, FINISHED
        generation = world.membership.generation
        member.say("failed", why="the state that was sent was changed on the way")
        said = {"generation": generation, "name": member.name, "why": "ended"}
        world.members[holder].say("suspect", **said)
        world.later(5.0, lambda: world.exit(member, 1))

    join = Simulated.join

    def joins(member: Simulated) -> None:
        if member.name != holder and len(fails) < 2:
            fails.append(member.name)
            fail(member)
        else:
            join(member)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Simulated, "join", joins)
        world.run(300)
    assert len(fails) == 2 and holder not in world.names("lost")
    assert world.end is not None and world.end.status == 0
    # Each step was committed once: nothing went back to a checkpoint.
    assert [c.step for c in world.commits] == list(range(1, 401))


def test_of_two_that_cannot_reach_each_other_who_has_the_state_stays() -> None:
    world, holder, spare = with_one_state(15)
    exchange_breaks(world, {holder, spare})
    world.members[spare].join = lambda: world.exchange(0, 0)  # type: ignore[method-assign]
    world.run(300)
    assert spare in world.names("lost") and holder not in world.names("lost")
    assert world.end is not None and world.end.status == 0
    assert [c.step for c in world.commits] == list(range(1, 401))


def test_each_new_link_that_breaks_is_tried_again_before_anybody_is_given_up() -> None:
    there = World(16, steps=0).membership
    there.phase, there.generation, there.active = "running", 4, ["m1", "m2", "m3"]
    for name in there.active:
        there.started(0.0, name, 0, 7)
        there.members[name].status = "active"
        there.members[name].connected = True
    for at, one, other in ((1.0, "m1", "m2"), (9.0, "m1", "m3"), (19.0, "m2", "m3")):
        there.phase = "running"
        said = {"generation": there.generation, "name": other, "why": "ended"}
        there.heard(at, one, received("suspect", said))
        check_step(there, at + 2)
    assert [m.status for m in there.members.values()] == ["active"] * 3


@pytest.mark.parametrize("turn", [0.9, 1.1, 3.0])
def test_a_supervisor_whose_turns_are_long_loses_who_is_silent(turn: float) -> None:
    there = Driven(SupervisorSettings(least=1, most=1))
    there.started(0.0, "m1", 0, 7)
    there.members["m1"].becomes("active", 0.0)
    turns = 0
    while there.members["m1"].is_there and turns < 100:
        turns += 1
        there.tick(turn * turns)
    # Its lease of 10 s, of which every other turn may have been a standstill.
    assert 10.0 < turn * turns < 2 * 10.0 + 3 * turn


def test_an_agent_is_lost_by_a_supervisor_whose_turns_are_long() -> None:
    there = Driven(SupervisorSettings(least=1, most=1))
    fleet = AgentFleet[str](
        there, there.take, lambda link, said: None, lambda link: None
    )
    there.started(0.0, "m1", 0, 7, agent="a")
    fleet.expect(0.0)
    turns = 0
    while there.members["m1"].is_there and turns < 100:
        turns += 1
        fleet.tick(1.1 * turns)
    assert 1.1 * turns < 60.0


def test_what_a_step_took_from_whom_is_written_though_nobody_tells_it() -> None:
    world = World(22)
    told: dict[tuple[int, int], object] = {}
    tell = world.tell

    def untold(name: str, message: Any, epoch: int) -> None:
        if message.kind == "committed":
            told[message.generation, message.step] = message.parts
            message = received("committed", {**message.fields, "parts": {}})
        tell(name, message, epoch)

    world.tell = untold  # type: ignore[method-assign]
    world.begin()
    world.run(9)
    world.exit(world.members[world.membership.active[1]], -9)
    world.run(300)
    assert world.end is not None and world.end.status == 0 and len(begun(world)) > 1
    for commit in world.commits:
        assert commit.parts == told[commit.generation, commit.step]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", range(20))
def test_a_loop_that_is_busy_settles_later_and_loses_nothing(seed: int) -> None:
    """What comes is settled with the next tick, however much it is."""
    world = World(seed, steps=120, spares=seed % 2, lease_seconds=3.0, fruitless=99)
    world.membership.batched = True
    world.begin()
    for _ in range(8):
        world.run(world.now + world.drawn.uniform(0.2, 4.0))
        there = [m for m in world.members.values() if m.alive and m.is_ready]
        if world.end or not there:
            continue
        world.exit(world.drawn.choice(there), -9)
    world.run(world.now + 600)
    assert world.end is not None, (world.membership.phase, world.events[-20:])
    assert world.end.how == "complete", world.end.text
    assert {c.step for c in world.commits} == set(range(1, 121))
