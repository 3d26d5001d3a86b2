"""Leases: the time at which each holder was last heard from, and those that are
overdue.

It is the one place that says so: of the members and agents of an elastic run, of the
peers and trainers of a swarm, and of the processes of a launch.
"""

from __future__ import annotations

import math
from typing import Generic, TypeVar


K = TypeVar("K")


class Lease(Generic[K]):
    """Last signs of life, as one process that watches over others heard them.

    A process that was stopped could not hear of anybody, so the time of a turn that
    takes long does not count, once: never of two such turns in a row, because of a
    process whose turns are all long, others are silent for no other reason than their
    own.

    Attributes:
        seconds: Silence after which somebody is overdue.
        heard_at: Time of the last sign of life, by whom it was of.
    """

    def __init__(self, seconds: float, longest_turn: float = math.inf) -> None:
        """Starts without holders.

        Args:
            seconds: Silence after which somebody is overdue.
            longest_turn: Seconds; in a longer turn this process was stopped. It never
                was if left out.
        """
        self.seconds = seconds
        self.heard_at: dict[K, float] = {}
        self._longest_turn = longest_turn
        self._turn_at: float | None = None
        self._forgave = False

    def renew(self, who: K, now: float) -> None:
        """Takes a sign of life."""
        self.heard_at[who] = now

    def expect(self, who: K, by: float) -> None:
        """Waits for somebody until a time, as an earlier watcher had heard of it."""
        self.heard_at[who] = by - self.seconds

    def forget(self, who: K) -> None:
        """Watches over somebody no more."""
        self.heard_at.pop(who, None)

    def turn(self, now: float) -> float:
        """Begins a turn; the seconds since the one before, where they do not count.

        Args:
            now: The time, in seconds.

        >>> lease = Lease(10.0, longest_turn=1.0)
        >>> [lease.turn(now) for now in (0.0, 0.5, 30.5, 32.5, 32.6, 35.6)]
        [0.0, 0.0, 30.0, 0.0, 0.0, 3.0]
        """
        before, self._turn_at = self._turn_at, now
        seconds = 0.0 if before is None else now - before
        self._forgave = seconds > self._longest_turn and not self._forgave
        if not self._forgave:
            return 0.0
        self.heard_at = {
            who: shifted(at, seconds, now) for who, at in self.heard_at.items()
        }
        return seconds

    def silent(self, who: K, now: float) -> float:
        """Seconds since a sign of life; none was ever heard of who is not watched."""
        return now - self.heard_at.get(who, -math.inf)

    def overdue(self, now: float, seconds: float | None = None) -> dict[K, float]:
        """Returns the holders that have been silent for too long, with the seconds.

        Args:
            now: The time, in seconds.
            seconds: Silence that is too long; as made if left out.

        >>> lease = Lease(10.0)
        >>> lease.renew("m1", 0.0), lease.renew("m2", 5.0)
        (None, None)
        >>> lease.overdue(12.0)
        {'m1': 12.0}
        """
        limit = self.seconds if seconds is None else seconds
        return {who: now - at for who, at in self.heard_at.items() if now - at > limit}


def shifted(at: float, seconds: float, now: float) -> float:
    """A time, later by seconds that do not count; what is to come stays.

    >>> shifted(1.0, 5.0, 10.0), shifted(8.0, 5.0, 10.0), shifted(12.0, 5.0, 10.0)
    (6.0, 10.0, 12.0)
    """
    return min(at + seconds, max(at, now))
