"""Decides shares that follow the measured speed of replicas, while a run goes on.

Speeds change: other programs come and go, chips get hot. Every process is told the same
measurements and comes to the same shares, so nothing has to be agreed on. A change is
believed when it lasts, sooner the more it costs; shares change when it is worth it, and
where measurements scatter too widely to say who is fast, they are even.

How long to wait is a question of two costs: shares that ignore a change lose something
in every step, and shares that follow one which does not last lose as much until they
are back. Who waits until the loss is as large as following could cost is never far from
the best that could be done without knowing what comes.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Final

from whalejax.planner.balance.shares import makespan, shares


WINDOW: Final = 16
"""Measurements of a replica that count, the latest."""

LEAST: Final = 3
"""Measurements before anything is concluded; as many in a row can show a change."""

WORTH: Final = 0.01
"""By which part a step must get shorter for shares to change."""

LOST: Final = 2.0
"""Steps that are lost before a change is believed: as many as a measurement takes to
come to be known. What loses less is followed as the median of the window moves."""

SCATTER: Final = 0.5
"""Distance of the quartiles over the median from which nothing can be concluded."""

PROBE: Final = 64
"""Steps after which a replica that takes nothing is given one micro-batch."""


class Rebalance:
    """Shares of replicas, by what a micro-batch takes on each.

    Attributes:
        shares: Micro-batches of each replica, for the next step.
        seconds: Current estimate of a micro-batch's seconds on each replica; 0 where
            not known.
    """

    def __init__(self, given: Sequence[int], most: Sequence[int] | None = None) -> None:
        """Starts with the given shares.

        Args:
            given: Micro-batches of each replica.
            most: Largest share that the memory of each holds; None for no bound.
        """
        self.shares = tuple(given)
        self._most = [sum(given)] * len(given) if most is None else list(most)
        self.seconds = (0.0,) * len(given)
        self._total = sum(given)
        self._seen: list[list[float]] = [[] for _ in given]
        self._idle = 0

    def saw(self, seconds: Sequence[float]) -> tuple[int, ...]:
        """Takes in one step's measurements.

        Args:
            seconds: Measured seconds of a micro-batch on each replica; 0 where it was
                not measured.

        Returns:
            The shares of the next step.
        """
        for seen, value in zip(self._seen, seconds, strict=True):
            if value > 0:
                seen.append(float(value))
                del seen[:-WINDOW]
        self._forget()
        self.seconds = tuple(statistics.median(s) if s else 0.0 for s in self._seen)
        self._settle()
        return self.shares

    def _forget(self) -> None:
        """Drops what was measured before a change that has cost enough."""
        if not all(self._seen):
            return
        for count in range(LEAST, WINDOW // 2 + 1):
            pairs = [_before_and_after_seconds(seen, count) for seen in self._seen]
            before, now = zip(*pairs, strict=True)
            if before == now:
                continue
            ignoring, following = (
                makespan(self._divide_by_speed(seconds), now)
                for seconds in (before, now)
            )
            if count * (ignoring / following - 1) >= LOST:
                for seen, (old, new) in zip(self._seen, pairs, strict=True):
                    if new != old:
                        del seen[:-count]
                return

    def _settle(self) -> None:
        if any(len(seen) < LEAST for seen in self._seen):
            # Of those that take nothing there is nothing to measure.
            if all(
                len(seen) >= LEAST or not share
                for seen, share in zip(self._seen, self.shares, strict=True)
            ):
                self._probe()
            return
        wanted = self._best_shares()
        before, after = (makespan(s, self.seconds) for s in (self.shares, wanted))
        if before > after * (1 + WORTH):
            self.shares = wanted
        self._probe()

    def _best_shares(self) -> tuple[int, ...]:
        enough = (seen for seen in self._seen if len(seen) >= WINDOW // 2)
        if any(_scatter(seen) > SCATTER for seen in enough):
            return self._divide_by_speed([1.0] * len(self.shares))
        return self._divide_by_speed(self.seconds)

    def _divide_by_speed(self, seconds: Sequence[float]) -> tuple[int, ...]:
        return shares(self._total, seconds, self._most)

    def _probe(self) -> None:
        """Gives one micro-batch, now and then, to a device that has none, to measure
        it.
        """
        pairs = enumerate(zip(self.shares, self._most, strict=True))
        idle = [i for i, (share, most) in pairs if most and not share]
        self._idle = self._idle + 1 if idle else 0
        if self._idle >= PROBE:
            result = list(self.shares)
            for i in idle:
                result[result.index(max(result))] -= 1
                result[i] += 1
            self.shares, self._idle = tuple(result), 0


def _before_and_after_seconds(seen: Sequence[float], count: int) -> tuple[float, float]:
    """Seconds before so many latest measurements, and what these say at least.

    Those show a change if all lie on one side; the one that differs least says how far.
    """
    if len(seen) < LEAST + count:
        middle = statistics.median(seen)
        return middle, middle
    before, latest = statistics.median(seen[:-count]), seen[-count:]
    return before, max(min(latest), min(max(latest), before))


def _scatter(seen: Sequence[float]) -> float:
    low, middle, high = statistics.quantiles(seen, n=4, method="inclusive")
    return (high - low) / middle
