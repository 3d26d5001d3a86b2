"""How a run and its members end: each way has one meaning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.whalejax.elastic.driven import Driven
from tests.whalejax.elastic.simulated import World
from tests.whalejax.elastic.test_restarting import register
from tests.whalejax.messages import received
from whalejax.elastic.supervisor import supervisor as loop
from whalejax.elastic.supervisor.supervisor import Supervised, Supervisor
from whalejax.membership.events import End
from whalejax.membership.exit_status import STATUS, Ending
from whalejax.membership.phases import FINISHED, SAVING
from whalejax.membership.run_ends import end, saves_last
from whalejax.membership.settings import SupervisorSettings


def begun(world: World) -> list[dict[str, Any]]:
    return [e.fields for e in world.events if e.event == "begun"]


def ended(world: World) -> dict[str, str]:
    """How each member ended, by name."""
    world.run(world.now + 60, on=True)
    return {
        str(e.fields["name"]): str(e.fields["how"])
        for e in world.events
        if e.event == "ended"
    }


def terminated(world: World) -> None:
    world.membership.terminate(world.now)
    world.do()
    world.run(world.now + 30)


def test_every_ending_has_a_status() -> None:
    assert STATUS.keys() == set(Ending)
    assert STATUS[Ending.COMPLETE] == 0 and 0 not in [
        STATUS[how] for how in Ending if how is not Ending.COMPLETE
    ]


# Told to end.


@pytest.mark.parametrize("seconds", [0.5, 2.0, 4.0])
def test_before_the_first_step_the_run_ends_at_once(seconds: float) -> None:
    world = World(41, spares=1)
    world.begin()
    world.run(seconds)
    terminated(world)
    assert world.end is not None and world.end.how is Ending.INTERRUPTED
    assert world.end.status == 143
    assert not begun(world) and "before its first step" in world.end.text
    assert len(ended(world)) == 4 and not world.names("lost")
    assert not any(m.alive for m in world.members.values())


def test_with_a_spare_and_one_that_compiles_the_run_ends_at_once() -> None:
    world = World(42, spares=1, steps=500)
    world.begin()
    world.run(9)
    world.exit(world.members[world.membership.active[0]], -9)
    world.run(11.9)
    there = [m for m in world.membership.members.values() if m.is_there]
    assert "registered" in [m.status for m in there], "one compiles"
    terminated(world)
    assert world.end is not None and world.end.how is Ending.DRAINED
    assert world.end.text.startswith("the run was asked to end, after step ")
    # Of the others none is taken for lost.
    assert len(world.names("lost")) == 1
    assert set(ended(world).values()) == {"drained"}
    assert not any(m.alive for m in world.members.values())


def test_who_is_silent_behind_the_end_is_not_lost() -> None:
    world = World(43, lease_seconds=4.0)
    world.begin()
    world.run(3.5)
    for member in world.members.values():
        # The script goes on for longer than a lease, and beats end with the loop.
        member.hear = lambda said, m=member, hear=member.hear: (  # type: ignore[method-assign]
            world.later(20.0, lambda: world.exit(m, 0))
            if said.kind == "done"
            else hear(said)
        )
    world.run(100)
    assert world.end is not None and world.end.how is Ending.COMPLETE
    for _ in range(150):
        world.membership.tick(world.now)
        world.run(world.now + 0.1, on=True)
    world.do()
    assert set(ended(world).values()) == {"complete"} and not world.names("lost")


def test_members_that_fail_with_the_run_are_not_lost() -> None:
    world = World(44)
    world.begin()
    world.run(9)
    end(world.membership, world.now, Ending.FAILED, "a bug")
    world.membership.tick(world.now)
    world.do()
    assert set(ended(world).values()) == {"drained"} and not world.names("lost")


# Loops that are left.


def test_loops_that_are_left_at_one_step_complete_the_run() -> None:
    world = World(45, spares=1)
    world.breaks_at = 20
    world.begin()
    world.run(100)
    assert world.end is not None and world.end.how is Ending.COMPLETE
    assert [c.step for c in world.commits] == list(range(1, 21))
    assert len(world.names("started")) == 4 and not world.names("lost")
    assert set(ended(world).values()) == {"complete"}


def test_an_error_in_the_body_of_the_loop_completes_nothing() -> None:
    """It leaves the loop too, in all members at one step."""
    world = World(52)
    world.breaks_at, world.after_break = 19, (0.5, 1)
    world.begin()
    world.run(600)
    assert world.end is not None and world.end.how is Ending.FAILED
    # One member saw its error first; another came to the same in a later try.
    assert "the same error ended m" in world.end.text
    assert "its process ended with status 1:\nits log" in world.end.text
    assert {c.step for c in world.commits} == set(range(1, 20))


def test_processes_that_end_at_different_times_complete_a_run() -> None:
    world = World(53)
    world.breaks_at, world.after_break = 20, (0.5, 0)
    world.begin()
    world.run(600)
    assert world.end is not None and world.end.how is Ending.COMPLETE
    assert not world.names("lost") and len(world.names("started")) == 3
    # One that does not end is not waited for without end.
    world = World(54, finish_seconds=50.0)
    world.breaks_at, world.after_break = 20, (1e6, 0)
    world.begin()
    world.run(600)
    assert world.end is not None and world.end.how is Ending.COMPLETE


def test_who_leaves_its_loop_while_the_run_is_told_to_end_is_not_waited_for() -> None:
    world = World(55, steps=500)
    world.begin()
    world.run(9)
    world.breaks_at = world.commits[-1].step + 1
    world.membership.terminate(world.now)
    world.do()
    world.run(world.now + 10)
    assert world.end is not None and world.end.how is Ending.DRAINED
    assert not world.names("lost")


@pytest.mark.parametrize("seconds", [0.5, 20.0])
def test_a_loop_that_is_left_alone_is_a_failure(seconds: float) -> None:
    world = World(46, fruitless=20, steps=90)
    world.after_break = seconds, 0
    world.begin()
    world.run(8)
    member = world.members[world.membership.active[1]]
    commit = member.commit

    def leaves(step: int, parts: Any) -> None:
        if step == 29:
            world.breaks_at = 30
        commit(step, parts)
        world.breaks_at = 1 << 30

    member.commit = leaves  # type: ignore[method-assign]
    world.run(300)
    assert world.end is not None and world.end.how is Ending.COMPLETE
    assert world.membership.failures.total == 1
    if seconds > 10:
        assert world.names("lost") == [member.name]
        lost = next(e for e in world.events if e.event == "lost")
        assert lost.fields["why"] == "its loop was left at step 30, where others go on"
    # Another takes its place.
    assert len(world.names("started")) == 4 and len(begun(world)[-1]["members"]) == 3
    assert [c.step for c in world.commits] == list(range(1, 91))


# Notices.


def last_one(world: World) -> str:
    """Kill one of two; the other, which is left."""
    world.begin()
    world.run(8)
    first, second = world.membership.active
    world.exit(world.members[first], -9)
    world.run(8.5)
    assert world.membership.active == [second]
    return second


def test_the_last_one_leaves_when_another_has_its_state() -> None:
    world = World(56, most=2, steps=200)
    name = last_one(world)
    done = world.commits[-1].step
    world.members[name].say("leaving", why="SIGTERM")
    world.run(9)
    # The other's replacement still starts; steps go on meanwhile.
    assert world.membership.phase == "running" and world.commits[-1].step > done
    world.run(300)
    assert world.end is not None and world.end.how is Ending.COMPLETE, world.end
    assert ended(world)[name] == "drained"
    assert [c.step for c in world.commits] == list(range(1, 201))


@pytest.mark.parametrize("status", [-15, 143])
def test_where_those_that_start_are_told_to_end_too_the_run_ends(status: int) -> None:
    world = World(57, most=2, steps=200)
    name = last_one(world)
    world.members[name].say("leaving", why="SIGTERM")
    world.exit(world.members["m3"], status)
    world.run(300)
    assert world.end is not None and world.end.how is Ending.DRAINED, world.end
    assert world.membership.failures.total == 1 and len(world.members) == 3


def test_one_of_the_least_members_leaves_and_another_takes_its_place() -> None:
    world = World(47, least=2, most=2, steps=200)
    world.begin()
    world.run(8)
    name = world.membership.active[0]
    world.members[name].say("leaving", why="SIGTERM")
    world.run(25)
    assert not world.members[name].alive
    assert len(begun(world)[-1]["members"]) == 2
    assert name not in begun(world)[-1]["members"]
    world.run(300)
    assert world.end is not None and world.end.how is Ending.COMPLETE
    assert not world.names("lost") and ended(world)[name] == "drained"
    assert [c.step for c in world.commits] == list(range(1, 201))


def test_who_leaves_while_another_is_lost_is_let_go() -> None:
    world = World(48, steps=200)
    world.begin()
    world.run(8)
    one, other, _ = world.membership.active
    world.members[one].say("leaving", why="SIGTERM")
    world.run(world.now + 0.06)
    world.exit(world.members[other], -9)
    world.run(20)
    assert not world.members[one].alive and world.names("lost") == [other]
    world.run(300)
    assert world.end is not None and world.end.how is Ending.COMPLETE
    assert [c.step for c in world.commits] == list(range(1, 201))


def test_where_all_leave_the_run_drains() -> None:
    world = World(49, steps=200)
    world.begin()
    world.run(8)
    for name in world.membership.active:
        world.members[name].say("leaving", why="SIGTERM")
    world.run(20)
    assert world.end is not None and world.end.how is Ending.DRAINED
    over = world.membership.over
    assert over is not None and over.saver in world.membership.active
    newest = world.commits[-1].step
    assert world.end.text == f"the run was asked to end, after step {newest}"
    assert set(ended(world).values()) == {"drained"} and not world.names("lost")


def test_the_last_one_hands_the_state_to_a_spare_before_it_leaves() -> None:
    world = World(50, most=1, spares=1, steps=200)
    world.begin()
    world.run(8)
    (one,) = world.membership.active
    world.members[one].say("leaving", why="SIGTERM")
    world.run(20)
    assert not world.members[one].alive
    world.run(300)
    assert world.end is not None and world.end.how is Ending.COMPLETE
    # Nothing was done again, as it would be behind a checkpoint.
    assert [c.step for c in world.commits] == list(range(1, 201))


def test_who_does_not_go_when_it_was_let_go_is_ended() -> None:
    world = World(51, steps=2000, finish_seconds=30.0)
    world.begin()
    world.run(8)
    name = world.membership.active[0]
    hear = world.members[name].hear
    world.members[name].hear = lambda said: (  # type: ignore[method-assign]
        None if said.kind == "over" else hear(said)
    )
    world.members[name].say("leaving", why="SIGTERM")
    world.run(60)
    assert world.names("lost") == [name] and not world.members[name].alive
    lost = next(e for e in world.events if e.event == "lost")
    assert lost.fields["why"] == "it did not end in 30 s after it was let go"


# Refused before it began.


def test_what_cannot_be_run_is_not_started_again() -> None:
    world = World(52, spares=1)
    world.begin()
    world.membership.refused(world.now, "m1", "the job cannot be planned")
    world.do()
    assert world.end is not None and world.end.how is Ending.REFUSED
    assert (world.end.status, world.end.text) == (2, "the job cannot be planned")
    ends = ended(world)
    assert len(ends) == len(world.members) == 4 and ends["m1"] == "failed"


def test_who_is_refused_where_others_have_joined_fails_alone() -> None:
    world = World(53)
    world.begin()
    world.run(9)
    there = world.membership.active[0]
    world.exit(world.members[there], -9)
    world.run(9.2)
    started = [m.name for m in world.membership.members.values() if not m.token]
    world.membership.refused(world.now, started[-1], "its disk is full")
    world.do()
    assert world.end is None
    world.exit(world.members[started[-1]], 2)
    world.run(300)
    assert world.end is not None and world.end.how is Ending.COMPLETE


# The last checkpoint.


def draining(world: World) -> str:
    """A run that was asked to end, and who writes its last checkpoint."""
    world.save = "runs/mine"
    world.begin()
    world.run(8)
    world.membership.terminate(world.now)
    world.do()
    while world.end is None:
        world.run(world.now + 0.1)
    assert world.membership.over is not None
    return world.membership.over.saver


def beat(world: World, name: str, now: float, phase: str) -> None:
    fields = {"phase": phase, "step": 20, "done": 0}
    world.membership.heard(now, name, received("beat", fields))


def test_who_writes_the_last_checkpoint_has_as_long_as_any_other_may_take() -> None:
    world = World(60)
    saver = draining(world)
    there, began = world.membership, world.now
    for seconds in range(900):
        beat(world, saver, began + seconds, SAVING)
        assert saves_last(there, began + seconds, saver)
    beat(world, saver, began + 902, SAVING)
    assert not saves_last(there, began + 902, saver)
    other = next(name for name in there.active if name != saver)
    beat(world, other, began + 902, SAVING)
    assert not saves_last(there, began + 902, other)


def test_who_is_silent_as_it_writes_the_last_checkpoint_is_not_waited_for() -> None:
    world = World(61)
    saver = draining(world)
    beat(world, saver, world.now, SAVING)
    assert saves_last(world.membership, world.now + 9, saver)
    assert not saves_last(world.membership, world.now + 11, saver)


@pytest.mark.parametrize("told", ["saved", "not_saved", ""])
def test_a_last_checkpoint_that_was_not_written_is_said(told: str) -> None:
    world = World(62)
    saver = draining(world)
    if told:
        fields = {"path": "p"} if told == "saved" else {"why": "no space"}
        fields["number"] = 1 << 20  # type: ignore[assignment]
        said = received(told, {"step": 20, **fields})
        world.membership.heard(world.now, saver, said)
    world.membership.exited(world.now, saver, -9)
    world.do()
    why = [e.fields["why"] for e in world.events if e.event == "not_saved"]
    expected = f"{saver} ended by SIGKILL before it was written"
    assert why == {"": [expected], "saved": [], "not_saved": ["no space"]}[told]


def test_processes_that_do_not_end_are_killed_but_who_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Supervised(
        command=(), folder=tmp_path, settings=SupervisorSettings(least=1, most=2)
    )
    supervisor, killed = Supervisor(run), list[str]()

    class Two:
        names = ("m1", "m2")
        kill = killed.append

    supervisor._processes = Two()  # type: ignore[assignment]
    supervisor._end, supervisor._ends_at = End(how=Ending.DRAINED, text=""), 0.0
    saving = ["m1"]
    monkeypatch.setattr(loop, "saves_last", lambda run, now, name: name in saving)
    assert not supervisor._is_over() and killed == ["m2"]
    saving.clear()
    assert not supervisor._is_over() and killed == ["m2", "m1", "m2"]
    supervisor._held.close()


def test_a_run_that_is_ended_at_once_in_a_long_body_ends_so() -> None:
    world = World(63)
    world.begin()
    world.run(8)
    world.membership.terminate(world.now)
    world.membership.end_at_once(world.now)
    world.do()
    assert world.end is not None and world.end.how is Ending.INTERRUPTED
    assert world.membership.over is not None and not world.membership.over.saver
    assert "the run was ended at once" in world.end.text


def test_who_finishes_as_it_leaves_completes_the_run_though_others_are_lost() -> None:
    world = World(64, most=2)
    world.begin()
    world.run(8)
    last, other = (world.members[name] for name in world.membership.active)
    last.running, last.phase, last.finished = -1, FINISHED, True
    last.step = world.steps
    last.say("leaving", why="SIGTERM")
    last.say("finished", step=world.steps)
    world.later(0.2, lambda: world.exit(other, -9))
    world.run(300)
    assert world.end is not None and world.end.how is Ending.COMPLETE
    assert world.names("lost") == [other.name]


def test_where_all_leave_that_were_asked_others_are_waited_for() -> None:
    there = Driven(SupervisorSettings(least=1, most=2, spares=1, gather_seconds=1.0))
    there.begin(0.0)
    for slot in range(3):
        there.started(0.0, f"m{slot}", slot, 7)

    def say(now: float, name: str, kind: str, **fields: Any) -> None:
        there.heard(now, name, received(kind, fields))

    def prepared(now: float, name: str) -> None:
        say(now, name, "prepared", generation=there.generation, step=-1, held=[])

    for slot in range(2):
        there.register(0.1, register(1 + slot, "messages"), f"m{slot}", slot)
    say(0.2, "m0", "ready")
    there.tick(0.9)
    there.tick(1.8)
    prepared(2.1, "m0")
    assert there.active == ["m0"] and there.phase == "running"
    say(2.2, "m0", "leaving", why="SIGTERM")
    say(2.3, "m1", "ready")
    assert there.phase == "preparing" and sorted(there.target) == ["m0", "m1"]
    say(2.4, "m1", "leaving", why="SIGTERM")
    prepared(2.5, "m0")
    prepared(2.6, "m1")
    assert there.phase == "gathering" and there.over is None
    for name in ("m0", "m1"):
        there.exited(2.7, name, 0)
    there.register(3.0, register(3, "messages"), "m2", 2)
    say(3.1, "m2", "ready")
    for now in (3.2, 4.1, 5.0):
        there.tick(now)
    prepared(5.1, "m2")
    assert there.active == ["m2"] and there.phase == "running"
