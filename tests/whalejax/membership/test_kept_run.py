"""What is killed is started again, by rules alone."""

from __future__ import annotations

from typing import Final

from whalejax.membership import events as ev
from whalejax.membership.exit_status import Ending
from whalejax.membership.kept_run import KeptRun


ERROR: Final = "Traceback (most recent call last):\n  x\nValueError: {}\n"


def react(run: KeptRun, now: float, event: ev.Event) -> list[ev.Effect]:
    return [*run.react(now, event)]


def run_of(*names: str, **options: bool) -> KeptRun:
    run = KeptRun(names, **options)
    starts = react(run, 0.0, ev.StartsAllowedEvent())
    assert starts == [ev.StartEffect(slot) for slot in range(len(names))]
    return run


def starts_at(run: KeptRun, now: float) -> list[int]:
    found = react(run, now, ev.Tick())
    return [effect.slot for effect in found if isinstance(effect, ev.StartEffect)]


def test_the_leader_is_asked_first_and_its_end_is_that_of_the_run() -> None:
    run = run_of("leader", "peer")
    terminate = ev.Terminate(at_once=False)
    assert react(run, 1.0, terminate) == [ev.TerminateEffect("leader")]
    (end,) = react(run, 2.0, ev.ProcessExitEvent("leader", -9))
    assert isinstance(end, ev.End) and (end.how, end.status) == (Ending.FAILED, 137)
    run = run_of("leader", "peer")
    (end,) = react(run, 1.0, ev.Terminate(at_once=True))
    assert isinstance(end, ev.End)
    assert (end.how, end.status) == (Ending.INTERRUPTED, 143)


def test_one_that_fails_otherwise_each_time_is_started_later_each_time() -> None:
    run, now, delays = run_of("leader", "peer"), 1.0, []
    for number in range(4):
        exit_event = ev.ProcessExitEvent("peer", 1, ERROR.format(number))
        (said,) = react(run, now, exit_event)
        assert isinstance(said, ev.SayEffect) and f"ValueError: {number}" in said.text
        delay = next(d for d in (0.0, 1.0, 2.0, 4.0) if starts_at(run, now + d))
        delays.append(delay)
        now += delay + 1.0
    assert delays == [0.0, 1.0, 2.0, 4.0]


def test_without_a_leader_every_end_is_a_failure_and_served_ones_are_not_held() -> None:
    run, now = run_of("a", "b", leads=False), 1.0
    for _ in range(5):
        run.useful.add("b")
        (said,) = react(run, now, ev.ProcessExitEvent("b", 0))
        assert isinstance(said, ev.SayEffect) and "with status 0" in said.text
        assert starts_at(run, now) == [1]
        run.failures.progressed(int(now))
        now += 1.0
    failed = ev.ProcessExitEvent("a", 1, ERROR.format("no"))
    react(run, now, failed)
    starts_at(run, now + 0.5)
    (end,) = react(run, now + 1.0, failed)
    assert isinstance(end, ev.End) and "the same error ended a and then a" in end.text


def test_one_that_cannot_be_started_or_stands_still_is_started_again() -> None:
    run = run_of("leader", "peer")
    (said,) = react(run, 1.0, ev.NotStarted(1, "no memory"))
    text = "peer cannot be started (no memory); it is started again"
    assert said == ev.SayEffect(text) and starts_at(run, 1.0) == [1]
    said, kill = react(run, 70.0, ev.Tick(silent={"peer": 61.0}))
    assert kill == ev.KillEffect("peer", 0)
    assert said == ev.SayEffect("peer stands still: no beat for 61 s. It is killed")
