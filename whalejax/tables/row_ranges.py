"""Rows of a table as slices or arrays, and the rows that two of these share."""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np


Rows: TypeAlias = slice | np.ndarray
"""Increasing row numbers of a table, as a slice with both ends or as an array."""


def common_rows(mine: Rows | range, theirs: Rows | range) -> tuple[Rows, Rows]:
    """Returns the positions, in each argument, of the rows that both have.

    Args:
        mine, theirs: Rows of the same table.

    >>> common_rows(slice(1, 12, 3), slice(0, 12, 2))
    (slice(1, 4, 2), slice(2, 6, 3))
    """
    first, second = _numbers(mine), _numbers(theirs)
    if isinstance(first, range) and isinstance(second, range):
        return _common_range(first, second)
    lists = np.asarray(first), np.asarray(second)
    _, here, there = np.intersect1d(*lists, assume_unique=True, return_indices=True)
    return here, there


def _numbers(rows: Rows | range) -> range | np.ndarray:
    if isinstance(rows, slice):
        return range(rows.start, rows.stop, rows.step or 1)
    return rows


def _common_range(first: range, second: range) -> tuple[slice, slice]:
    none = slice(0, 0)
    if not first or not second:
        return none, none
    divisor = math.gcd(first.step, second.step)
    apart = second.start - first.start
    if apart % divisor:
        return none, none
    # Solves first.start + n * first.step = second.start, modulo second.step.
    modulus = second.step // divisor
    n = apart // divisor * pow(first.step // divisor, -1, modulus) % modulus
    step = first.step * modulus
    number = first.start + n * first.step
    least = max(first.start, second.start)
    number += max(0, -(-(least - number) // step)) * step
    last = min(first[-1], second[-1])
    if number > last:
        return none, none
    count = (last - number) // step + 1

    def positions(numbers: range) -> slice:
        start, stride = (number - numbers.start) // numbers.step, step // numbers.step
        return slice(start, start + (count - 1) * stride + 1, stride)

    return positions(first), positions(second)
