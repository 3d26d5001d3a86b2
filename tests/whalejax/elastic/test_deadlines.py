"""How long each of what a member does may take, by a clock of the tests' own."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.whalejax.elastic.simulated import Simulated, World
from whalejax.membership import phases
from whalejax.membership.exit_status import Ending
from whalejax.membership.settings import SupervisorSettings


def begun(world: World) -> list[dict[str, Any]]:
    return [e.fields for e in world.events if e.event == "begun"]


def complete(world: World, steps: int = 60) -> None:
    world.run(world.now + 3000)
    assert world.end is not None and world.end.how is Ending.COMPLETE, world.end
    assert [c.step for c in world.commits] == list(range(1, steps + 1))


def at_step(world: World, name: str, step: int, phase: str, seconds: float) -> None:
    """Let a member do something for long, once."""
    member, enter, done = world.members[name], world.members[name].enter, list[int]()

    def later() -> None:
        if member.step == step and not done:
            done.append(step)
            member.phase = phase
            world.later(seconds, enter)
        else:
            enter()

    member.enter = later  # type: ignore[method-assign]


def test_every_phase_has_a_deadline_or_waits_for_others() -> None:
    settings = SupervisorSettings(least=1, most=1)
    for name in phases.DEADLINES.values():
        if name not in (None, phases.STEP):
            assert getattr(settings, name) > 0


@pytest.mark.parametrize("phase", [phases.SAVING, phases.BETWEEN, phases.RESTORING])
def test_what_takes_long_holds_a_step_up_and_nobody_is_lost(phase: str) -> None:
    world = World(31)
    world.begin()
    world.run(8)
    name = world.membership.active[0]
    at_step(world, name, world.members[name].step + 2, phase, 400.0)
    complete(world)
    assert world.now > 400 and not world.names("lost") and len(begun(world)) == 1


def test_an_evaluation_in_all_members_loses_nobody() -> None:
    world = World(32)
    world.begin()
    world.run(8)
    for member in world.members.values():
        member.body = lambda step: 200.0 if step == 30 else 0.0
    complete(world)
    assert not world.names("lost") and len(begun(world)) == 1


def test_what_takes_for_ever_is_given_up() -> None:
    world = World(33, save_seconds=100.0)
    world.begin()
    world.run(8)
    name = world.membership.active[0]
    at_step(world, name, world.members[name].step + 2, phases.SAVING, 1e6)
    world.run(200)
    assert world.names("lost") == [name]
    lost = next(e for e in world.events if e.event == "lost")
    assert lost.fields["why"] == "it did not move on (saving) for 100 s"
    complete(world)


def test_who_is_in_an_evaluation_is_waited_for_by_a_new_generation() -> None:
    world = World(34)
    world.begin()
    world.run(8)
    slow, other, _ = world.membership.active
    at_step(world, slow, world.members[slow].step + 2, phases.BETWEEN, 300.0)
    world.run(12)
    world.exit(world.members[other], -9)
    complete(world)
    assert world.names("lost") == [other] and world.now > 300


def test_who_does_not_stop_for_a_generation_is_given_up() -> None:
    world = World(35, prepare_seconds=20.0)
    world.begin()
    world.run(8)
    stuck, other, _ = world.membership.active
    world.members[stuck].stop = lambda: None  # type: ignore[method-assign]
    world.exit(world.members[other], -9)
    world.run(60)
    assert world.names("lost") == [other, stuck]
    complete(world)


@pytest.mark.parametrize("seconds", [3.0, 9.0, 60.0])
def test_a_supervisor_that_stood_still_gives_nobody_up(seconds: float) -> None:
    world = World(36, lease_seconds=8.0, steps=900)
    world.begin()
    world.run(9)
    tell, tick, held = world.tell, world.tick, list[Any]()

    def frozen(*said: Any) -> None:
        held.append(functools.partial(tell, *said))

    # Messages wait in sockets; the clock of the others goes on.
    world.tell, world.tick = frozen, lambda: None  # type: ignore[method-assign]
    world.run(9 + seconds)
    world.tell, world.tick = tell, tick  # type: ignore[method-assign]
    world.tick()
    for work in held:
        world.later(0.3, work)
    world.run(world.now + 30)
    assert not world.names("lost") and len(begun(world)) == 1


def test_a_second_run_in_a_folder_gathers_all_members() -> None:
    world = World(37)
    # A number is never used again, also by a later run.
    world.membership.generation = 12
    world.compared = 1 << 30
    world.begin()
    world.run(9)
    assert [len(one["members"]) for one in begun(world)] == [3]
    assert begun(world)[0]["generation"] == 13


def test_a_redone_step_may_differ_in_another_generation() -> None:
    world = World(38)
    world.begin()
    world.run(9)
    step = world.commits[-1].step

    def commit(member: Simulated, generation: int, loss: float) -> None:
        member.say(
            "committed",
            generation=generation,
            step=step,
            loss=loss,
            seconds=0.1,
            parts={},
        )
        world.run(world.now + 0.1)

    one, other, _ = (world.members[n] for n in world.membership.active)
    commit(one, 2, 0.25)  # Redone elsewhere, behind a checkpoint.
    assert world.end is None
    again = [c for c in world.commits if c.step == step]
    assert [c.generation for c in again] == [1, 2]
    commit(other, 1, 1.0 / step)  # Repeated late: it counts for nothing.
    assert world.end is None
    assert [c for c in world.commits if c.step == step] == again
    commit(other, 2, 0.5)
    assert world.end is not None and world.end.how is Ending.FAILED
    assert "came to the loss 0.5 in step" in world.end.text
    assert "where others came to 0.25 from the same sums" in world.end.text
