"""Shares that follow what replicas are measured to take, while a run goes on.

Speeds change: other programs come and go, chips get hot. Every process is told the same
measurements and comes to the same shares, so nothing has to be agreed on. A change is
believed when it lasts, made when it is worth it, and where measurements scatter too
widely to say who is fast, shares are even.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from whalejax.planner.balance import makespan, shares


WINDOW: Final = 16
"""Measurements of a replica that count, the latest."""

LEAST: Final = 4
"""Measurements before anything is concluded; as many in a row show a change."""

WORTH: Final = 0.01
"""By which part a step must get shorter for shares to change."""

CHANGED: Final = 0.15
"""By which part the latest measurements differ when a replica's speed has changed."""

SCATTER: Final = 0.5
"""Distance of the quartiles over the median from which nothing can be concluded."""

PROBE: Final = 64
"""Steps after which a replica that takes nothing is given one micro-batch."""


class Rebalance:
    """Shares of replicas, by what a micro-batch takes on each.

    Attributes:
        shares: micro-batches of each replica, for the next step.
        seconds: of a micro-batch on each replica, as believed; 0 where not known.
    """

    def __init__(self, given: Sequence[int]) -> None:
        """Begin with shares that are given."""
        self.shares = tuple(given)
        self.seconds = (0.0,) * len(given)
        self._total = sum(given)
        self._seen: list[list[float]] = [[] for _ in given]
        self._idle = 0

    def saw(self, seconds: Sequence[float]) -> tuple[int, ...]:
        """Take in one step's measurements.

        Args:
            seconds: of a micro-batch on each replica; 0 where it was not measured.

        Returns:
            The shares of the next step.
        """
        for seen, value in zip(self._seen, seconds, strict=True):
            if value > 0:
                seen.append(float(value))
                del seen[:-WINDOW]
                if _changed(seen):
                    del seen[:-LEAST]
        self.seconds = tuple(float(np.median(s)) if s else 0.0 for s in self._seen)
        self._settle()
        return self.shares

    def _settle(self) -> None:
        if any(len(seen) < LEAST for seen in self._seen):
            # Of those that take nothing there is nothing to measure.
            if all(
                len(seen) >= LEAST or not share
                for seen, share in zip(self._seen, self.shares, strict=True)
            ):
                self._probe()
            return
        wanted = self._wanted()
        before, after = (makespan(s, self.seconds) for s in (self.shares, wanted))
        if before > after * (1 + WORTH):
            self.shares = wanted
        self._probe()

    def _wanted(self) -> tuple[int, ...]:
        if any(_scatter(seen) > SCATTER for seen in self._seen):
            return shares(self._total, [1.0] * len(self.shares))
        return shares(self._total, self.seconds)

    def _probe(self) -> None:
        """Now and then, give one micro-batch to who has none, to see how fast it is."""
        idle = [i for i, share in enumerate(self.shares) if not share]
        self._idle = self._idle + 1 if idle else 0
        if self._idle >= PROBE:
            found = list(self.shares)
            for i in idle:
                found[int(np.argmax(found))] -= 1
                found[i] += 1
            self.shares, self._idle = tuple(found), 0


def _changed(seen: Sequence[float]) -> bool:
    """The latest measurements all lie on one side of those before, and far off."""
    if len(seen) < 2 * LEAST:
        return False
    before, latest = np.median(seen[:-LEAST]), np.array(seen[-LEAST:])
    return bool(
        (latest > before * (1 + CHANGED)).all()
        or (latest < before / (1 + CHANGED)).all()
    )


def _scatter(seen: Sequence[float]) -> float:
    low, middle, high = np.quantile(seen, [0.25, 0.5, 0.75])
    return float((high - low) / middle)
