"""A supervisor that is killed behind any event goes on as if it had not been."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from tests.whalejax.elastic.driven import written
from tests.whalejax.elastic.simulated import World
from tests.whalejax.messages import received
from whalejax.membership.elastic_run import ElasticRun
from whalejax.membership.events import StartEffect, WriteEvent
from whalejax.membership.exit_status import Ending
from whalejax.membership.history import replay_events


def begun(world: World) -> list[dict[str, Any]]:
    return [e.fields for e in world.events if e.event == "begun"]


def killed(world: World) -> None:
    """Kill the supervisor, and wait until its members are back."""
    world.die()
    world.run(world.now + 5.0)


def complete(world: World, steps: int = 60) -> None:
    world.run(world.now + 600)
    assert world.end is not None and world.end.how is Ending.COMPLETE, world.end
    assert [c.step for c in world.commits] == list(range(1, steps + 1))


def test_twice_without_a_generation_between_all_take_part_still() -> None:
    world = World(21, steps=300)
    world.begin()
    world.run(9)
    active = [*world.membership.active]
    for _ in range(2):
        killed(world)
        statuses = {n: world.membership.members[n].status for n in active}
        assert set(statuses.values()) == {"active"}, statuses
    assert len(begun(world)) == 1
    complete(world, 300)
    assert len(begun(world)) == 1 and not world.names("lost")


@pytest.mark.parametrize("kind", ["ready", "leaving", "finished", "left"])
def test_what_was_said_to_it_last_is_said_again(kind: str) -> None:
    world = World(22, spares=1, steps=60)
    world.breaks_at = 40 if kind == "left" else 1 << 30
    world.begin()
    if kind == "leaving":
        world.run(9)
        world.members[world.membership.active[0]].say("leaving", why="SIGTERM")
    # It has heard it, and is killed before it is written down.
    heard, there = list[str](), world.membership
    take = there.heard

    def dies(now: float, name: str, message: Any) -> None:
        take(now, name, message)
        if message.kind == kind:
            heard.append(name)
            there.effects()
            world.die()

    there.heard = dies  # type: ignore[method-assign]
    world.run(world.now + 600)
    assert len(heard) == 1 and world.deaths == 1
    assert world.end is not None and world.end.how is Ending.COMPLETE
    assert heard[0] in world.names(kind)
    assert not world.names("lost")


def test_commits_that_it_did_not_hear_of_are_told_again() -> None:
    world = World(23, steps=100)
    world.begin()
    world.run(9)
    world.die()
    world.run(10.9)
    there = [world.members[name] for name in world.membership.active]
    assert all(len(m.reports) > 5 for m in there), "steps went on meanwhile"
    complete(world, 100)
    world.run(world.now + 5, on=True)
    assert not any(m.reports for m in there)


def test_behind_the_end_it_ends_what_is_left() -> None:
    world = World(24)
    world.begin()
    end = world.do_one

    def dies(effect: Any) -> None:
        end(effect)
        if getattr(effect, "event", "") == "ending":
            world.die()

    world.do_one = dies  # type: ignore[method-assign]
    world.run(300)
    assert world.deaths == 1 and world.end is not None
    assert world.end.how is Ending.COMPLETE
    assert [c.step for c in world.commits] == list(range(1, 61))
    # Those that had not heard of it did when they came back.
    world.run(world.now + 30, on=True)
    assert not any(m.alive for m in world.members.values())
    assert not world.names("lost")


@pytest.mark.parametrize("effects", [1, 2, 5])
def test_a_run_that_was_told_to_end_still_drains(effects: int) -> None:
    world = World(25)
    world.begin()
    world.run(9)
    world.dies_in = effects
    world.membership.terminate(world.now)
    world.do()
    world.run(world.now + 5)
    assert world.deaths == 1
    world.run(60)
    assert world.end is not None and world.end.how is Ending.DRAINED
    assert world.commits[-1].step < 60


def test_a_process_that_was_not_written_down_never_runs() -> None:
    world = World(26)
    do = world.do_one

    def dies(effect: Any) -> None:
        if getattr(effect, "event", "") == "started" and not world.deaths:
            world.die()
        else:
            do(effect)

    world.do_one = dies  # type: ignore[method-assign]
    world.begin()
    assert world.deaths == 1 and not any(m.alive for m in world.members.values())
    complete(world)
    assert not world.names("lost")


@pytest.mark.sampled(16)
@pytest.mark.parametrize("seed", range(40))
def test_behind_any_event(seed: int) -> None:
    """Killed at drawn effects, while members are killed too."""
    world = World(seed + 100, steps=60, spares=seed % 2, fruitless=99)
    world.begin()
    for _ in range(8):
        world.dies_in = world.drawn.randrange(12)
        world.run(world.now + world.drawn.uniform(0.2, 6.0))
        there = [m for m in world.members.values() if m.alive]
        if world.end:
            break
        if there and world.drawn.random() < 0.5:
            world.exit(world.drawn.choice(there), -9)
    world.dies_in = -1
    world.run(world.now + 600)
    assert world.end is not None, (world.membership.phase, world.events[-20:])
    assert world.end.how is Ending.COMPLETE, world.end.text
    steps = [c.step for c in world.commits]
    assert set(steps) == set(range(1, 61))
    generations = [(c.generation, c.step) for c in world.commits]
    assert len(generations) == len(set(generations))


def test_the_journal_is_one_function_of_its_events() -> None:
    world = World(28, spares=1)
    world.begin()
    world.run(9)
    world.exit(world.members[world.membership.active[0]], -9)
    complete(world)
    lines = [{"event": e.event, **e.fields} for e in world.events]

    def told(events: list[dict[str, Any]]) -> dict[str, Any]:
        return written(replay_events(world.settings, events))

    assert told([]) == written(ElasticRun(settings=world.settings))
    assert told(lines) == world.membership.written()
    for number in range(len(lines)):
        # Nothing but the events counts, and they are kept as they are.
        before = [dict(line) for line in lines[:number]]
        assert told(lines[:number]) == told(before)
        assert lines[:number] == before


def script_events(*names: str) -> list[dict[str, Any]]:
    """Events of a script with collectives, whose members have begun."""
    facts = {"mode": "collectives in generations", "steps": "0", "micro-batches": "0"}
    told: list[dict[str, Any]] = [{"event": "facts", **facts}]
    for slot, name in enumerate(names):
        started = {"event": "started", "slot": slot, "pid": slot + 1, "began": "1"}
        told += [
            {**started, "name": name},
            {"event": "registered", "name": name, "token": f"x{slot}"},
            {"event": "ready", "name": name},
        ]
    begun = {"event": "begun", "members": [*names], "step": -1, "generation": 1}
    return [*told, begun]


TRACEBACK = "Traceback (most recent call last):\n  x\n"


@pytest.mark.parametrize(
    ("status", "log", "follows"),
    [
        (1, f"{TRACEBACK}ValueError: 7 is no id\n", False),
        (1, f"{TRACEBACK}OSError: connection reset\n", True),
        (1, "", True),
        (-signal.SIGABRT, "epoch 3\n", True),
    ],
)
def test_what_may_follow_from_another_loss(
    status: int, log: str, follows: bool
) -> None:
    world = World(31, most=2)
    world.membership.go_on(0.0, script_events("m1", "m2"), {})
    world.membership.exited(1.0, "m1", status, log)
    written_down = (e for e in world.membership.effects() if isinstance(e, WriteEvent))
    (lost,) = (e for e in written_down if e.event == "lost")
    assert ("may follow" in str(lost.fields["why"])) == follows


def test_scripts_stay_scripts() -> None:
    told = script_events("m1")
    world = World(29, most=1)
    world.membership.go_on(0.0, told, {})
    assert world.membership.restarts
    world.membership.exited(1.0, "m1", -9)
    world.membership.tick(2.0)
    effects = world.membership.effects()
    assert [e.slot for e in effects if isinstance(e, StartEffect)] == [0]
    # One whose status nobody can know has said that it was done.
    world = World(30, most=1)
    world.membership.go_on(0.0, told, {})
    said = received("finished", {"number": 1, "step": -1})
    world.membership.heard(1.0, "m1", said)
    world.membership.exited(1.5, "m1", None)
    assert world.membership.over is not None
    assert world.membership.over.how is Ending.COMPLETE
