"""Measurements of one kind of device, point by point, and the values between.

Apart from ``kinds``, which says what a device does with them: here are the facts that
a file of a cluster holds, where each comes from, and their interpolation.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from whalejax.meshes.checks import check_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Source of one number.

    Attributes:
        field: The number, such as ``"flops_per_second.bf16"``; ``"*"`` for all.
        url: Address of the document; ``"measured: ..."`` names the command that
            measured it and ``"assumption: ..."`` says what stands in for an unpublished
            number.
        title: Title of the document.
        date: Date of its publication, or of the measurement, as ``YYYY-MM`` or
            ``YYYY-MM-DD``.
    """

    field: str
    url: str
    title: str = ""
    date: str

    def __post_init__(self) -> None:
        check_fields(self, "source")


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulPoint:
    """One measured product of an (m, k) with a (k, n) matrix, all devices at once.

    ``batch`` above 1 says that it was so many of them in one operation.
    """

    dtype: str
    m: int
    k: int
    n: int
    flops_per_second: float
    batch: int = 1

    def __post_init__(self) -> None:
        check_fields(self, "matmul point")


@dataclass(frozen=True, slots=True, kw_only=True)
class BandwidthPoint:
    """Measured bandwidth of an operation that moves so many bytes in all."""

    moved_bytes: int
    bytes_per_second: float

    def __post_init__(self) -> None:
        check_fields(self, "bandwidth point")


FILLED = (64, 256, 512)
"""Sides up to which smaller products may be filled: that from which what was measured
or fitted goes on to hold, and some that keep most of a device busy."""


def effective_size(m: Any, k: Any, n: Any) -> Any:
    """The side of the cube that does as many FLOPs per element moved as m, k, n.

    This harmonic mean is small as soon as one side is, as the achieved FLOP/s are.

    Example:
        >>> effective_size(256, 256, 256)
        256.0
        >>> round(effective_size(64, 2048, 2048))
        181
    """
    return 3.0 / (1.0 / m + 1.0 / k + 1.0 / n)


NARROW = 128
"""Side up to which a product is narrow: its time is that of memory, not of rates."""

ITEM_BYTES = {"f64": 8, "f32": 4, "tf32": 4, "bf16": 2, "f16": 2, "f8": 1, "f4": 0.5}
"""Of an element of a product."""

IN_A_STEP = 1.24
"""Times as long as alone that a kernel of a GPU takes within a training step. Fitted to
five steps of GPTs on an H200 (``measured/h200.json``); what makes it longer, such as a
clock that falls under load, was not measured apart."""

HARDLY_MORE = 2.0
"""Times that of the shortest product: where none took more, nothing is known of it."""


def least_seconds(points: Sequence[MatmulPoint]) -> float:
    """Returns the least time of any product on a device, however little it multiplies.

    The shortest one that was measured, where others took twice as long; where all are
    as short, or there is one alone, nothing is known of it.
    """
    each = [2.0 * p.m * p.k * p.n * p.batch / p.flops_per_second for p in points]
    least = min(each, default=0.0)
    return least if any(t >= HARDLY_MORE * least for t in each) and least else 0.0


def wide_rates(
    points: Sequence[MatmulPoint], least: float
) -> dict[str, list[tuple[float, float]]]:
    """FLOP/s by type and effective size, of products that say something of a rate.

    Those that are wide, alone, and took well longer than any product takes.

    Args:
        points: Measured points.
        least: Seconds of each that are not counted in the rates.
    """
    rates: dict[str, list[tuple[float, float]]] = {}
    long = HARDLY_MORE * least_seconds(points)
    for p in points:
        flops = 2.0 * p.m * p.k * p.n
        seconds = flops / p.flops_per_second
        if p.batch > 1 or min(p.m, p.k, p.n) <= NARROW or seconds < long:
            continue
        size = float(effective_size(p.m, p.k, p.n))
        rates.setdefault(p.dtype, []).append((size, flops / (seconds - least)))
    return rates


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedModel:
    """Measured time of one model's micro-batch on one device.

    Attributes:
        weights: ``Plan.weights_hash`` of the model.
        samples: Number of samples of the micro-batch.
        seconds: Measured, forward and backward.
        predicted_seconds: Planner's expectation for this device at the time.
        title: Name of the model.
    """

    weights: str
    samples: int
    seconds: float
    predicted_seconds: float
    title: str = ""

    def __post_init__(self) -> None:
        check_fields(self, "timed model")


class Curve:
    """A positive quantity interpolated in the logarithms of both axes.

    Constant beyond its ends: extrapolating a slope that was measured between two
    noisy neighbours is how a cost model comes to promise the impossible.
    """

    __slots__ = ("x", "y")

    def __init__(self, points: list[tuple[float, float]]) -> None:
        groups: dict[float, list[float]] = {}
        for x, y in points:
            groups.setdefault(round(math.log(x), 6), []).append(math.log(y))
        self.x = sorted(groups)
        self.y = [sum(groups[x]) / len(groups[x]) for x in self.x]

    def at(self, x: Any) -> Any:
        if isinstance(x, np.ndarray):
            return np.exp(np.interp(np.log(x), self.x, self.y))
        log_x = math.log(x)
        right = bisect_right(self.x, log_x)
        if right == 0:
            return math.exp(self.y[0])
        if right == len(self.x):
            return math.exp(self.y[-1])
        x0, x1 = self.x[right - 1], self.x[right]
        weight = (log_x - x0) / (x1 - x0)
        return math.exp(self.y[right - 1] * (1 - weight) + self.y[right] * weight)
