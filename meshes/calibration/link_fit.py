"""Fits latency and bandwidth of a link to measured collectives, without JAX."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTime:
    """One measured collective.

    Attributes:
        collective: ``"all-reduce"``, ``"all-gather"``, ``"reduce-scatter"`` or
            ``"all-to-all"``.
        group_size: Number of participating devices. All other devices run the same
            collective in other groups at the same time.
        payload_bytes: Bytes on one device of the reduced, gathered or exchanged array.
        seconds: Seconds of one collective.
        shared: Whether the devices are threads over one memory; see ``Level``.
    """

    collective: str
    group_size: int
    payload_bytes: int
    seconds: float
    shared: bool = False

    @property
    def rounds(self) -> int:
        """Number of passes over the ring: 2 for an all-reduce, else 1."""
        return 2 if self.collective == "all-reduce" else 1

    @property
    def waits(self) -> int:
        """Number of latencies in all rounds."""
        return self.rounds * (self.group_size if self.shared else 1)

    @property
    def wire_bytes(self) -> float:
        """Bytes that one device sends in all rounds."""
        share = 1.0 if self.shared else (self.group_size - 1) / self.group_size
        return self.rounds * self.payload_bytes * share


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFit:
    """Result of ``fit_link``.

    Attributes:
        latency_seconds: Latency of one round.
        bandwidth_bytes_per_second: Bandwidth of one device, one direction.
        slowdown: (collective, factor) pairs: geometric mean of measured over fitted
            times.
        notes: Notes on clipped values, with the reasons.
    """

    latency_seconds: float
    bandwidth_bytes_per_second: float
    slowdown: tuple[tuple[str, float], ...]
    notes: tuple[str, ...]


def fit_link(times: Sequence[CollectiveTime]) -> LinkFit:
    """Fits latency and bandwidth by least squares of the logarithm of the times.

    The model is ``seconds = waits * latency + wire_bytes / bandwidth``. With
    logarithms, large payloads do not dominate. A robust loss limits the effect of a
    disturbed measurement. All-to-all is not a ring, so it is omitted if other
    collectives were measured, and corrected by its ``slowdown``.

    Args:
        times: Measured times, one or more.

    Example:
        >>> fit = fit_link([
        ...     CollectiveTime(collective="all-gather", group_size=2,
        ...                    payload_bytes=2 * size, seconds=1e-5 + size / 1e9)
        ...     for size in (1000, 100000, 10000000)
        ... ])
        >>> round(fit.latency_seconds * 1e6, 3), round(fit.bandwidth_bytes_per_second)
        (10.0, 1000000000)
    """
    rings = [t for t in times if t.collective != "all-to-all"] or list(times)
    latency, inverse, notes = _two_numbers(
        np.array([t.waits for t in rings], float),
        np.array([t.wire_bytes for t in rings]),
        np.array([t.seconds for t in rings]),
    )
    return LinkFit(
        latency_seconds=latency,
        bandwidth_bytes_per_second=1.0 / inverse,
        slowdown=_slowdown(times, latency, inverse),
        notes=notes,
    )


def _two_numbers(
    waits: np.ndarray, wire: np.ndarray, seconds: np.ndarray
) -> tuple[float, float, tuple[str, ...]]:
    """Returns the latency, the seconds per byte, and notes on clipped values."""

    def errors(logs: np.ndarray) -> np.ndarray:
        latency, inverse = np.exp(logs)
        return np.asarray(np.log((waits * latency + wire * inverse) / seconds))

    # Bounds: no term exceeds the slowest case, or is less than a ten-millionth of the
    # fastest one.
    high = np.log([(seconds / waits).max(), (seconds / wire).max()])
    low = np.log([(seconds / waits).min(), (seconds / wire).min()]) - np.log(1e7)
    start = np.log([(seconds / waits).min() / 2, (seconds / wire).min() / 2])
    solved = least_squares(errors, start, bounds=(low, high), loss="soft_l1")
    latency, inverse = (float(v) for v in np.exp(solved.x))
    notes = []
    if solved.x[0] < low[0] + 1:
        notes.append(f"latency clipped to 0: below the noise of {seconds.min():.1e} s")
        latency = 0.0
    if solved.x[1] < low[1] + 1:
        notes.append(
            "bandwidth is a lower bound from the largest payload, because times did "
            "not grow with size"
        )
        inverse = float(seconds[wire.argmax()] / wire.max())
    return latency, inverse, tuple(notes)


def _slowdown(
    times: Sequence[CollectiveTime], latency: float, inverse: float
) -> tuple[tuple[str, float], ...]:
    logs: dict[str, list[float]] = {}
    for t in times:
        predicted = t.waits * latency + t.wire_bytes * inverse
        logs.setdefault(t.collective, []).append(math.log(t.seconds / predicted))
    return tuple(
        (name, math.exp(sum(values) / len(values))) for name, values in logs.items()
    )
