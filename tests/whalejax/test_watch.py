"""Steps of several processes are watched: how long each may take, and after errors."""

from __future__ import annotations

import pytest

import whalejax as wh
from whalejax.lowering.multihost import watchdog
from whalejax.lowering.multihost.watchdog import FIRST_SECONDS, LEAST_SECONDS, Watch


class Clock:
    """A time that is set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(watchdog.time, "monotonic", found)
    # Looked at by hand.
    monkeypatch.setattr(Watch, "_look_on", lambda self: None)
    return found


def _run(watching: Watch, clock: Clock, kind: str, seconds: float) -> None:
    with watching.step(kind):
        clock.now += seconds
    watching.issued([])


def test_the_first_of_a_kind_may_compile(clock: Clock) -> None:
    watching = Watch(alone=False)
    for _ in range(2):
        _run(watching, clock, "a step", 1.0)
    watching.begin("an evaluation")
    clock.now += 2 * LEAST_SECONDS
    assert watching._overdue() is None
    clock.now += FIRST_SECONDS
    assert watching._overdue() == ("an evaluation", FIRST_SECONDS + 600, 0.0)


def test_later_ones_may_take_ten_times_the_longest(clock: Clock) -> None:
    watching = Watch(alone=False)
    for seconds in (500.0, 100.0, 40.0):  # the first compiles
        _run(watching, clock, "a step", seconds)
    watching.begin("a step")
    clock.now += 999.0
    assert watching._overdue() is None
    clock.now += 2.0
    assert watching._overdue() == ("a step", 1001.0, 100.0)


def test_after_an_error_nothing_is_sent_any_more(clock: Clock) -> None:
    watching = Watch(alone=False)
    with pytest.raises(KeyError), watching.step():
        raise KeyError("a user's")
    with pytest.raises(wh.WhaleError, match="a step failed before in this process"):
        _run(watching, clock, "an evaluation", 1.0)


def test_one_process_may_try_again(clock: Clock) -> None:
    watching = Watch(alone=True)
    with pytest.raises(KeyError), watching.step():
        raise KeyError("a user's")
    _run(watching, clock, "a step", 1.0)
