"""Ranks plans: the fastest first; among ties, the one with the least memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar


Weighable = TypeVar("Weighable")

TIE = 0.005
"""Largest relative difference of step times that count as equal."""

SURE = 0.1
"""Least relative speedup at which a plan of another kind is chosen or reported without
a request. Predictions of different kinds are no more precise.
"""


def best_first(
    plans: Sequence[Weighable],
    *,
    seconds: Callable[[Weighable], float],
    ties: Callable[[Weighable], tuple[float, float]],
    most: int = 32,
) -> list[Weighable]:
    """Returns plans, the fastest first; among ties, the one with the least ``ties``.

    Args:
        plans: Plans in any order.
        seconds: Function that returns the step time of a plan.
        ties: Function that returns the memory and communication of a plan.
        most: Number of plans to rank; the others are in order of time alone.
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
