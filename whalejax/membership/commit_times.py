"""Times of commits: limits for stuck steps, step boundaries, goodput."""

from __future__ import annotations

import statistics
from collections import deque
from typing import Final

from whalejax.membership.settings import SupervisorSettings


_BOUNDARY_SECONDS: Final = 0.5
"""Least time between the choice of a boundary, the step after which all members stop,
and that step: members need it to learn of the boundary."""

_MOST_AHEAD: Final = 1000
_STEPS_REMEMBERED: Final = 50
_FIRST_STEP_SECONDS: Final = 120.0


class CommitTimes:
    """Times at which the steps of a run were committed.

    Attributes:
        step: Newest step that a member has committed; -1 before there is a state.
        at: Time of that commit, or of the start of the generation if that is later.
    """

    def __init__(self, settings: SupervisorSettings) -> None:
        self.step, self.at = -1, 0.0
        self._settings = settings
        self._took: deque[float] = deque(maxlen=_STEPS_REMEMBERED)
        self._counts = False
        self._first: tuple[int, float] | None = None

    def start_generation(self, step: int, now: float) -> None:
        """Records that a generation began with the state of a step."""
        self.step, self.at, self._counts = step, now, False

    def committed(self, step: int, now: float) -> None:
        """Records the commit of a step that is newer than all before."""
        # The first step of a generation is not typical: it may compile.
        if self._counts:
            self._took.append((now - self.at) / (step - self.step))
        self.step, self.at, self._counts = step, now, True
        if self._first is None:
            self._first = step, now

    @property
    def has_committed(self) -> bool:
        """Whether a step was committed in this run."""
        return self._first is not None

    @property
    def moves(self) -> bool:
        """Whether a step was committed in this generation."""
        return self._counts

    @property
    def median(self) -> float:
        """Median seconds of a step; 0 if none was measured."""
        return statistics.median(self._took) if self._took else 0.0

    def limit(self) -> float:
        """Returns the seconds after which a step counts as stuck."""
        settings = self._settings
        if not self._took:
            return settings.compile_seconds
        limit = max(settings.step_seconds, settings.step_factor * self.median)
        # The first step of a generation may also fetch or read a state.
        return limit if self._counts else max(_FIRST_STEP_SECONDS, 3 * limit)

    def boundary(self, newest: int) -> int:
        """Returns a step far enough ahead that all members learn of it in time.

        Args:
            newest: Newest step that a member is known to have reached.
        """
        median = self.median or _BOUNDARY_SECONDS
        ahead = min(int(_BOUNDARY_SECONDS / max(median, 1e-6)), _MOST_AHEAD)
        return max(newest, 0) + 2 + ahead

    def patience(self, after: int) -> float:
        """Returns the longest wait, in seconds, until all have stopped after a step."""
        steps = max(after - self.step, 0) + 3
        most = self._settings.prepare_seconds / 2
        return min(2.0 + 2 * steps * (self.median or 5.0), most)

    def goodput(self, now: float) -> float:
        """Returns the goodput: committed steps times the median step time, over the
        time since the first commit.
        """
        if not self._took or self._first is None:
            return 1.0
        step, began = self._first
        useful = (self.step - step) * self.median
        return min(max(useful / max(now - began, 1e-9), 0.0), 1.0)
