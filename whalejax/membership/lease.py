"""Leases: the time of each holder's last sign of life, and the overdue holders.

All checks for silence use them: for members and agents of an elastic run, for peers of
a swarm, for processes of a launch and for processes with embedding tables.
"""

from __future__ import annotations

import math
from typing import Generic, TypeVar


K = TypeVar("K")


class Lease(Generic[K]):
    """Times of the last signs of life that this process received.

    A turn is the time between two iterations of this process's loop. A long turn does
    not count as silence of the holders, because this process may have been stopped. Of
    two long turns in a row only the first is left out: then the process is just slow.

    Attributes:
        seconds: Seconds of silence after which a holder is overdue.
        heard_at: Time of the last sign of life of each holder.
    """

    def __init__(self, seconds: float, longest_turn: float = math.inf) -> None:
        """Starts without holders.

        Args:
            seconds: Seconds of silence after which a holder is overdue.
            longest_turn: Seconds above which a turn is long; default: no turn is long.
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
        """Makes a holder overdue at time ``by`` unless it renews its lease."""
        self.heard_at[who] = by - self.seconds

    def forget(self, who: K) -> None:
        """Removes a holder."""
        self.heard_at.pop(who, None)

    def turn(self, now: float) -> float:
        """Begins a turn; returns the seconds of the last one if left out, or else 0.

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
        """Returns the seconds of silence of each holder that is silent for too long.

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
    """Returns ``at`` moved later by ``seconds``, but at most to ``now``.

    A time after ``now`` does not change.

    >>> shifted(1.0, 5.0, 10.0), shifted(8.0, 5.0, 10.0), shifted(12.0, 5.0, 10.0)
    (6.0, 10.0, 12.0)
    """
    return min(at + seconds, max(at, now))
