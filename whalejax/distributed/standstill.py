"""What a process that watches over others forgives them: that it stood still itself."""

from __future__ import annotations


class Standstill:
    """Time in which this process was stopped and could not hear of anybody.

    A turn that takes long is one only behind a turn that did not: of a process whose
    turns are all long, others are silent for no other reason than their own.
    """

    def __init__(self, longest_turn: float) -> None:
        """No turn was taken yet.

        Args:
            longest_turn: seconds; in a longer one it was stopped.
        """
        self._longest_turn = longest_turn
        self._at: float | None = None
        self._stood = False

    def forgiven(self, now: float) -> float:
        """Seconds since the turn before that count for nothing; 0 where they count.

        Args:
            now: the time of this turn.

        >>> stood = Standstill(1.0)
        >>> [stood.forgiven(now) for now in (0.0, 0.5, 30.5, 32.5, 32.6, 35.6)]
        [0.0, 0.0, 30.0, 0.0, 0.0, 3.0]
        """
        before, self._at = self._at, now
        seconds = 0.0 if before is None else now - before
        self._stood = seconds > self._longest_turn and not self._stood
        return seconds if self._stood else 0.0
