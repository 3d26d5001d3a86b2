"""Which of several plans is the best: the fastest, or the leanest of those that tie.

And how far a search has come with them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar


Weighable = TypeVar("Weighable")

TIE = 0.005
"""Plans closer than this part of the best step time count as equally fast."""


@dataclass(slots=True)
class Tally:
    """What a search did.

    Attributes:
        covered: cases that it chose among.
        weighed: cases whose time was computed.
        best: least step time so far.
        bound: a lower bound on every case that was not weighed.
    """

    covered: int = 0
    weighed: int = 0
    best: float = math.inf
    bound: float = math.inf

    @property
    def gap(self) -> float:
        """By which part of its time the best could at most be beaten."""
        return max(0.0, 1.0 - self.bound / self.best) if self.best < math.inf else 1.0


def best_first(
    plans: Sequence[Weighable],
    *,
    seconds: Callable[[Weighable], float],
    ties: Callable[[Weighable], tuple[float, float]],
    most: int = 32,
) -> list[Weighable]:
    """Plans, the fastest first; among those that tie, the one with the least ``ties``.

    Args:
        plans: in any order.
        seconds: step time of one.
        ties: memory and communication of one.
        most: how many to rank; what follows them is in order of time alone.
    """
    left = sorted(plans, key=seconds)
    found: list[Weighable] = []
    while left and len(found) < most:
        limit = seconds(left[0]) * (1 + TIE)
        tied = list(itertools.takewhile(lambda s: seconds(s) <= limit, left))  # noqa: B023
        best = min(tied, key=ties)
        found.append(best)
        left.remove(best)
    return [*found, *left]
