"""Shares that follow the measured speed of replicas during a run.

Speeds change as other programs come and go and chips get hot. Every process receives
the same measurements and computes the same shares, so no agreement is needed. A change
of speed counts only if it lasts, and sooner the more it costs. Shares change only for a
sufficient gain. They are even if measurements scatter too widely to compare speeds.

The wait balances two costs. Shares that ignore a change lose time in every step. Shares
that follow a short change lose as much until they are reset. Waiting until the loss
equals the largest cost of following is never far from the best choice, although the
future is unknown.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Final

from whalejax.planner.balance.shares import makespan, shares


WINDOW: Final = 16
"""Number of a replica's latest measurements that count."""

LEAST: Final = 3
"""Number of measurements before any conclusion; as many in a row can show a change."""

WORTH: Final = 0.01
"""Fraction by which a step must get shorter for shares to change."""

LOST: Final = 2.0
"""Loss before a change counts, in steps: as many as a measurement takes to arrive.
Smaller losses are followed as the median of the window moves.
"""

SCATTER: Final = 0.5
"""Interquartile range, divided by the median, above which nothing is concluded."""

PROBE: Final = 64
"""Number of steps after which a replica without a share gets one micro-batch."""


class Rebalance:
    """Shares of replicas that follow the seconds of a micro-batch on each.

    Attributes:
        shares: Number of micro-batches of each replica in the next step.
        seconds: Estimated seconds of a micro-batch on each replica; 0 if unknown.
    """

    def __init__(self, given: Sequence[int], most: Sequence[int] | None = None) -> None:
        """Creates the shares of the first step.

        Args:
            given: Number of micro-batches of each replica.
            most: Largest share that fits each replica's memory; None for no limit.
        """
        self.shares = tuple(given)
        self._most = [sum(given)] * len(given) if most is None else list(most)
        self.seconds = (0.0,) * len(given)
        self._total = sum(given)
        self._seen: list[list[float]] = [[] for _ in given]
        self._idle = 0

    def saw(self, seconds: Sequence[float]) -> tuple[int, ...]:
        """Records one step's measurements, and returns the next shares.

        Args:
            seconds: Measured seconds of a micro-batch on each replica; 0 if unknown.

        Returns:
            Number of micro-batches of each replica in the next step.
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
        """Drops the measurements before a change that has cost enough."""
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
            # A replica without a share has no measurements.
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
        """Gives each idle replica a micro-batch now and then, to measure it."""
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
    """Returns the seconds before the latest measurements, and the size of their change.

    Latest measurements show a change if all are on one side. The smallest difference is
    its size.
    """
    if len(seen) < LEAST + count:
        middle = statistics.median(seen)
        return middle, middle
    before, latest = statistics.median(seen[:-count]), seen[-count:]
    return before, max(min(latest), min(max(latest), before))


def _scatter(seen: Sequence[float]) -> float:
    low, middle, high = statistics.quantiles(seen, n=4, method="inclusive")
    return (high - low) / middle
