"""Shares of unlike devices: who takes how many micro-batches of a step.

Data-parallel ranks wait for the slowest, so the shares that matter are the integers
``k`` that minimise ``max(k_i * t_i)``; a device's memory may bound its share. Whale's
Formula 1 asks for the same in fractions.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from whalejax.meshes.problems import Problems
from whalejax.planner.plan import PlanError


def dealt(shares: Sequence[int]) -> list[range]:
    """The micro-batches of each replica.

    Args:
        shares: how many each takes.

    >>> dealt([3, 0, 2])
    [range(0, 3), range(3, 3), range(3, 5)]
    """
    ends = [0, *itertools.accumulate(shares)]
    return [range(*pair) for pair in itertools.pairwise(ends)]


def shares(
    total: int, seconds: Sequence[float], most: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Split equal pieces of work so that the last device is done as early as can be.

    Exact: a piece always goes to the device that would finish it first, which is
    optimal for pieces of one size. Of equal devices the first takes more.

    Args:
        total: pieces (micro-batches), at least 0.
        seconds: of one piece on each device.
        most: pieces that each device can hold, or None for no bound.

    Returns:
        Pieces for each device; they add up to ``total``. A device may get none.

    Raises:
        PlanError: the bounds hold fewer pieces than there are, or a number is none.

    >>> shares(12, [1.0, 2.0])
    (8, 4)
    >>> shares(12, [1.0, 2.0], most=[5, 12])
    (5, 7)
    """
    bounds = [total] * len(seconds) if most is None else list(most)
    _check(total, seconds, bounds)
    # Nobody gets less than what all finish before the ideal time, rounded down.
    found = _start(total, seconds, bounds)
    queue = [
        ((found[i] + 1) * t, i) for i, t in enumerate(seconds) if found[i] < bounds[i]
    ]
    heapq.heapify(queue)
    for _ in range(total - sum(found)):
        _, i = heapq.heappop(queue)
        found[i] += 1
        if found[i] < bounds[i]:
            heapq.heappush(queue, ((found[i] + 1) * seconds[i], i))
    return tuple(found)


def _check(total: int, seconds: Sequence[float], bounds: Sequence[int]) -> None:
    problems = Problems("shares", PlanError)
    if total < 0:
        problems.add(f"total is {total}; expected 0 or more")
    for i, t in enumerate(seconds):
        if not (t > 0 and math.isfinite(t)):
            problems.add(f"seconds[{i}] is {t}; expected a number above 0")
    if len(bounds) != len(seconds):
        problems.add(f"most has {len(bounds)} entries for {len(seconds)} devices")
    elif sum(bounds) < total:
        listed = ", ".join(map(str, bounds))
        problems.add(
            f"the devices hold {sum(bounds)} pieces together ({listed}); there are "
            f"{total}. Use smaller micro-batches, or more devices"
        )
    problems.raise_if_any()


def _start(total: int, seconds: Sequence[float], bounds: Sequence[int]) -> list[int]:
    """What every optimal split gives each device at least."""
    speed = math.fsum(1.0 / t for t in seconds)
    if not speed:
        return [0] * len(seconds)
    # With one piece fewer for each device than at the ideal time, none is over.
    ideal = max(0, total - len(seconds)) / speed
    return [min(b, int(ideal / t)) for t, b in zip(seconds, bounds, strict=True)]


def even_shares(total: int, count: int) -> tuple[int, ...]:
    """Pieces as even as integers allow; the first devices take what is left over.

    >>> even_shares(8, 3)
    (3, 3, 2)
    """
    each, over = divmod(total, count)
    return tuple(each + (i < over) for i in range(count))


def makespan(pieces: Sequence[int], seconds: Sequence[float]) -> float:
    """When the last device is done."""
    return max((k * t for k, t in zip(pieces, seconds, strict=True)), default=0.0)


def smallest_pace(
    counts: Sequence[np.ndarray],
    seconds: Sequence[np.ndarray],
    fixed: Sequence[np.ndarray],
    total: Any,
) -> np.ndarray:
    """The least time in which all workers together finish equal pieces.

    Workers take whole pieces: with ``k`` of them one is busy for ``fixed + k *
    seconds``, and one with none does not count. Exact: some worker ends at the optimum.

    Args:
        counts: workers of each group.
        seconds: of one piece on one worker of the group.
        fixed: what each worker does besides.
        total: pieces, or an array of them.

    >>> one = np.ones(1)
    >>> smallest_pace([one, one], [one, 2 * one], [0 * one, 0 * one], 12)
    array([8.])
    """
    # Who is busy beyond the end with other things alone takes no piece.
    active = [n > 0 for n in counts]
    least: Any = 0.0
    for _ in counts:
        rate: Any = 0.0
        ahead: Any = total + 0.0
        for n, t, e, takes in zip(counts, seconds, fixed, active, strict=True):
            rate = rate + np.where(takes, n / t, 0.0)
            ahead = ahead + np.where(takes, n * e / t, 0.0)
        least = ahead / rate
        active = [takes & (e < least) for takes, e in zip(active, fixed, strict=True)]
    best = np.full(len(least), np.inf)
    # One more piece for each than at the least time is always enough.
    longest = np.max(
        [np.where(n > 0, t, 0.0) for n, t in zip(counts, seconds, strict=True)], axis=0
    )
    for n, t, e in zip(counts, seconds, fixed, strict=True):
        if not (n > 0).any():
            continue
        first = np.maximum(1.0, np.ceil((least - e) / t * (1 - 1e-12)))
        tries = 2 + math.ceil(np.max(np.where(n > 0, longest / t, 0.0)))
        for more in range(tries):
            pace = e + (first + more) * t
            open_ = (n > 0) & (pace < best) & (pace >= least * (1 - 1e-9))
            if not open_.any():
                continue
            enough = pieces_at(pace, counts, seconds, fixed)[1] >= total
            best = np.where(open_ & enough, pace, best)
    return best


def pieces_at(
    pace: np.ndarray,
    counts: Sequence[np.ndarray],
    seconds: Sequence[np.ndarray],
    fixed: Sequence[np.ndarray],
) -> tuple[list[np.ndarray], np.ndarray]:
    """Pieces that a worker of each group finishes in time, and all of them together."""
    each = [
        np.maximum(0.0, np.floor((pace - e) / t * (1 + 1e-12) + 1e-9))
        for t, e in zip(seconds, fixed, strict=True)
    ]
    together: Any = 0.0
    for n, k in zip(counts, each, strict=True):
        together = together + n * k
    return each, together
