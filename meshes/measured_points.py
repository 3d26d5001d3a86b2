"""Measured points of a kind of device in a cluster file, sources and interpolation."""

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
        field: Name of the number, such as ``"flops_per_second.bf16"``; ``"*"`` for all.
        url: Address of the document. ``"measured: ..."`` names the command that
            measured the number. ``"assumption: ..."`` explains how an unpublished
            number was chosen.
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
    """Measured product of an (m, k) with a (k, n) matrix, on all devices at once.

    ``batch`` is the number of products in one operation.
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
    """Measured bandwidth of an operation, and the bytes that it moves."""

    moved_bytes: int
    bytes_per_second: float

    def __post_init__(self) -> None:
        check_fields(self, "bandwidth point")


FILLED = (64, 256, 512)
"""Sizes to which smaller sides of a product may be padded.

From the first size on, measurements and fits are valid. Products of the other sizes
keep most of a device busy.
"""


def effective_size(m: Any, k: Any, n: Any) -> Any:
    """Returns the side of the cube with as many FLOPs per moved element as (m, k, n).

    It is the harmonic mean of the sides, which is small if one side is small.

    Example:
        >>> effective_size(256, 256, 256)
        256.0
        >>> round(effective_size(64, 2048, 2048))
        181
    """
    return 3.0 / (1.0 / m + 1.0 / k + 1.0 / n)


NARROW = 128
"""Largest side of a narrow product, whose time depends on memory traffic."""

ITEM_BYTES = {"f64": 8, "f32": 4, "tf32": 4, "bf16": 2, "f16": 2, "f8": 1, "f4": 0.5}
"""Bytes of an element of a product."""

IN_A_STEP = 1.24
"""Factor by which a GPU kernel takes longer within a training step than alone. Fitted
to five steps of GPTs on an H200 (``measured/h200.json``); its causes, such as a clock
that falls under load, were not measured separately."""

HARDLY_MORE = 2.0
"""The least time is known if a product took this many times as long as the shortest."""


def least_seconds(points: Sequence[MatmulPoint]) -> float:
    """Returns the seconds that a product of any size takes at least.

    They are those of the shortest measured product if another took twice as long; else
    they are unknown, and 0.
    """
    each = [2.0 * p.m * p.k * p.n * p.batch / p.flops_per_second for p in points]
    least = min(each, default=0.0)
    return least if any(t >= HARDLY_MORE * least for t in each) and least else 0.0


def wide_rates(
    points: Sequence[MatmulPoint], least: float
) -> dict[str, list[tuple[float, float]]]:
    """Returns pairs of effective size and FLOP/s by type.

    Narrow products, batched ones and those of nearly the least time are left out.

    Args:
        points: Measured products.
        least: Seconds to subtract from the time of each product; see ``least_seconds``.
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
        weights: Hash of the model's parameters; see ``shares.weights_hash``.
        samples: Number of samples of the micro-batch.
        seconds: Measured seconds, forward and backward.
        predicted_seconds: Predicted seconds, at the time of measurement.
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
    """Interpolates positive points in the logarithms of both axes.

    The curve is constant beyond its ends. Extrapolating the slope between two noisy
    points could predict impossible speeds.
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
