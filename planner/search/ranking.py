"""Ranks plans: the fastest first, and the leanest of those that tie.

And how far a search has come with them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar


Weighable = TypeVar("Weighable")

TIE = 0.005
"""Plans closer than this part of the best step time count as equally fast."""

SURE = 0.1
"""By which part of its time a plan of another sort has to be faster to be taken or
named where nobody asks for it: predictions of two sorts are no closer to each other."""


def best_first(
    plans: Sequence[Weighable],
    *,
    seconds: Callable[[Weighable], float],
    ties: Callable[[Weighable], tuple[float, float]],
    most: int = 32,
) -> list[Weighable]:
    """Plans, the fastest first; among those that tie, the one with the least ``ties``.

    Args:
        plans: Plans in any order.
        seconds: Step time of one.
        ties: Memory and communication of one.
        most: Number of plans to rank; the rest is in order of time alone.
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
