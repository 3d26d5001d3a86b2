"""Runs that get another number of members, by a clock of the tests' own."""

from __future__ import annotations

import random

import pytest

from tests.whalejax.elastic.simulated import World
from tests.whalejax.elastic.test_restarting import Scripts
from tests.whalejax.elastic.test_spread import commit
from whalejax.membership.elastic_run import AT_STEPS
from whalejax.membership.events import ResizeEvent
from whalejax.membership.resizing import resize_refusal
from whalejax.membership.settings import SupervisorSettings
from whalejax.meshes.errors import WhaleError


def resize(world: World, size: int, *devices: str) -> None:
    world.membership.take(world.now, ResizeEvent(size, devices or None))
    world.do()


def steps(world: World) -> list[int]:
    return [c.step for c in world.commits]


def test_a_run_begins_with_fewer_than_the_most() -> None:
    world = World(0, steps=200, first=1)
    world.begin()
    world.run(9)
    assert len(world.membership.active) == 1 and len(world.members) == 1
    resize(world, 3, "4", "5", "6")
    world.run(20)
    assert len(world.membership.active) == 3
    assert world.membership.devices == ("4", "5", "6")
    world.run(300)
    assert world.end is not None and world.end.status == 0
    assert steps(world) == [*range(1, 201)]


def test_members_of_the_last_slots_leave_behind_a_step() -> None:
    world = World(1, most=4)
    world.begin()
    world.run(9)
    done = steps(world)[-1]
    resize(world, 2)
    world.run(15)
    there = world.membership.present_members()
    assert {m.slot for m in there} == {0, 1}, there
    assert sorted(world.membership.active) == sorted(m.name for m in there)
    assert steps(world)[-1] > done and not world.names("lost")
    assert not world.membership.failures.total
    world.run(300)
    assert world.end is not None and world.end.status == 0
    assert steps(world) == [*range(1, 61)]
    assert len(world.members) == 4  # None was started in their places.


def test_who_still_compiles_is_ended_at_once() -> None:
    world = World(2, most=3)
    world.begin()
    world.run(0.5)
    resize(world, 1)
    assert [m.slot for m in world.membership.present_members()] == [0]
    world.run(300)
    assert world.end is not None and world.end.status == 0 and not world.names("lost")


def test_the_only_holder_of_the_state_stays_until_another_has_it() -> None:
    world = World(3, steps=200, most=2)
    world.begin()
    world.run(9)
    first = next(m for m in world.membership.present_members() if m.slot == 0)
    world.exit(world.members[first.name], -9)
    resize(world, 1)  # The other one leaves, and holds the state.
    world.run(300)
    assert world.end is not None and world.end.status == 0, world.end
    assert steps(world) == [*range(1, 201)]
    begun = [e.fields for e in world.events if e.event == "begun"]
    assert begun[-1]["step"] > 0 and len(begun[-1]["members"]) == 1  # type: ignore[operator,arg-type]


def test_no_member_ends_the_run_behind_a_step() -> None:
    world = World(4)
    world.begin()
    world.run(9)
    resize(world, 0)
    assert "draining" in [e.event for e in world.events]
    assert "resized" not in [e.event for e in world.events]
    assert resize_refusal(world.membership, 2) == "the run ends"
    world.run(60, on=True)
    assert world.end is not None and world.end.status == 143


def test_a_size_that_the_run_was_not_started_for_is_refused() -> None:
    world = World(5, least=2, most=3)
    world.begin()
    for size in (1, 4):
        why = resize_refusal(world.membership, size)
        assert f"{size} members were asked for; expected 2 to 3" in why
        resize(world, size)
    assert world.membership.size == 3
    with pytest.raises(WhaleError, match="first is 5; expected 1 to 4"):
        SupervisorSettings(least=1, most=4, first=5)


def test_a_world_of_collectives_stops_at_a_step_for_another_size() -> None:
    there = Scripts(1, 3, mode=AT_STEPS)
    there.join(1.0, "m1", "m2", "m3")
    assert there.begun == [["m1", "m2", "m3"]]
    commit(there, 2.0, 1)
    turns(there, 3.0, ResizeEvent(2))
    assert sorted(there.kills) == ["m1", "m2", "m3"]  # Their state is saved.
    assert sorted(there.started()) == ["m4", "m5"]
    there.join(5.0, "m4", "m5")
    turns(there, 6.0)
    assert sorted(there.begun[1]) == ["m4", "m5"]
    commit(there, 7.0, 2)
    turns(there, 8.0, ResizeEvent(3))
    assert there.started() == ["m6"]
    there.join(10.0, "m6")
    turns(there, 10.0)
    there.join(12.0, *there.started())
    turns(there, 12.0)
    assert len(there.begun[2]) == 3 and there.end is None
    assert not there.membership.failures.total


def test_scripts_that_do_not_stop_are_not_resized() -> None:
    there = Scripts(1, 3)
    there.join(1.0, "m1", "m2", "m3")
    why = resize_refusal(there.membership, 2)
    assert "cannot be stopped at a step" in why


def turns(there: Scripts, now: float, *events: ResizeEvent) -> None:
    for event in events:
        there.membership.take(now, event)
    there.do(now)
    for tick in range(10):
        there.membership.tick(now + 0.15 * tick)
        there.do(now + 0.15 * tick)


@pytest.mark.parametrize("seed", range(60))
def test_no_step_is_lost_however_often_a_run_is_resized(seed: int) -> None:
    """With kills of members and of the supervisor between."""
    drawn = random.Random(seed)
    world = World(seed, steps=120, most=4, first=drawn.randint(1, 4))
    world.begin()
    at = 0.0
    while at < 40 and world.end is None:
        at += drawn.expovariate(0.5)
        world.run(at)
        if world.end is not None or world.down:
            continue
        match drawn.randrange(4):
            case 0:
                # Not the only one that has the state.
                there = [world.members[n] for n in world.membership.active]
                there = [m for m in there if m.alive and m.running >= 0]
                if len(there) > 1:
                    world.exit(drawn.choice(there), -9)
            case 1:
                world.dies_in = drawn.randrange(4)
            case _:
                resize(world, drawn.randint(1, 4))
    last = drawn.randint(1, 4)
    while world.down:
        world.run(world.now + 1)
    if world.end is None:
        world.dies_in = -1
        resize(world, last)
    world.run(2000)
    assert world.end is not None and world.end.status == 0, world.end
    done = {c.step for c in world.commits}
    assert done == {*range(1, 121)}
