"""Ranks plans by time, and plans with nearly equal times by memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar


Weighable = TypeVar("Weighable")

TIE = 0.005
"""Largest difference of step times that count as equal, as a fraction."""

SURE = 0.1
"""Smallest speedup, as a fraction, at which a plan of another kind is chosen or
reported although the user did not ask for it. Predictions of different kinds of plans
are not more precise.
"""


def best_first(
    plans: Sequence[Weighable],
    *,
    seconds: Callable[[Weighable], float],
    ties: Callable[[Weighable], tuple[float, float]],
    most: int = 32,
) -> list[Weighable]:
    """Returns plans by time, the fastest first; ``ties`` orders nearly equal times.

    Args:
        plans: Plans in any order.
        seconds: Function that returns the step time of a plan.
        ties: Function that returns the memory and communication of a plan, to minimise.
        most: Number of plans to rank; the others follow by time alone. Default: 32.
    """
    left = sorted(plans, key=seconds)
    first: list[Weighable] = []
    while left and len(first) < most:
        limit = seconds(left[0]) * (1 + TIE)
        tied = list(itertools.takewhile(lambda s: seconds(s) <= limit, left))  # noqa: B023
        best = min(tied, key=ties)
        first.append(best)
        left.remove(best)
    return [*first, *left]
