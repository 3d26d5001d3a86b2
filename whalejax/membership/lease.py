"""Leases: the time at which each holder was last seen, and the overdue holders.

All checks for silence use it: those for members and agents of an elastic run, for peers
of a swarm, for processes of a launch and for processes with embedding tables.
``dead_members`` uses it to give up members of an elastic run.
"""

from __future__ import annotations

import math
from typing import Generic, TypeVar


K = TypeVar("K")


class Lease(Generic[K]):
    """Times of the last signs of life that this process received.

    While this process is stopped, it receives nothing. So a long turn, the time between
    two iterations of its loop, does not count as silence of others. A long turn that
    follows one that was left out counts: if all turns are long, the process is slow,
    not stopped.

    Attributes:
        seconds: Seconds of silence after which a holder is overdue.
        heard_at: Time of the last sign of life of each holder.
    """

    def __init__(self, seconds: float, longest_turn: float = math.inf) -> None:
        """Starts without holders.

        Args:
            seconds: Seconds of silence after which a holder is overdue.
            longest_turn: Seconds of a turn after which this process counts as stopped;
                default: never.
        """
        self.seconds = seconds
        self.heard_at: dict[K, float] = {}
        self._longest_turn = longest_turn
        self._turn_at: float | None = None
        self._forgave = False

    def renew(self, who: K, now: float) -> None:
        """Records a sign of life."""
        self.heard_at[who] = now

    def expect(self, who: K, by: float) -> None:
        """Gives a holder a lease that ends at the time ``by``."""
        self.heard_at[who] = by - self.seconds

    def forget(self, who: K) -> None:
        """Removes a holder."""
        self.heard_at.pop(who, None)

    def turn(self, now: float) -> float:
        """Begins a turn; returns the seconds since the last one if they do not count,
        or 0.

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
        """Returns the seconds since the last sign of life; infinity if unknown."""
        return now - self.heard_at.get(who, -math.inf)

    def overdue(self, now: float, seconds: float | None = None) -> dict[K, float]:
        """Returns the holders that have been silent for too long, with the seconds.

        Args:
            now: The time, in seconds.
            seconds: Seconds of silence that are too long; default: ``self.seconds``.

        >>> lease = Lease(10.0)
        >>> lease.renew("m1", 0.0), lease.renew("m2", 5.0)
        (None, None)
        >>> lease.overdue(12.0)
        {'m1': 12.0}
        """
        limit = self.seconds if seconds is None else seconds
        return {who: now - at for who, at in self.heard_at.items() if now - at > limit}


def shifted(at: float, seconds: float, now: float) -> float:
    """Returns a time moved later by seconds that do not count, at most to ``now``.

    A time after ``now`` stays.

    >>> shifted(1.0, 5.0, 10.0), shifted(8.0, 5.0, 10.0), shifted(12.0, 5.0, 10.0)
    (6.0, 10.0, 12.0)
    """
    return min(at + seconds, max(at, now))
