"""Fits the constants of ``meshes.fitted_constants`` to measured step times.

Robust least squares on the logarithm of predicted over measured, with a pull towards
known values of such devices, so that a constant without effect on the given runs keeps
its value. The formulas are those of ``step_model``.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from scipy.optimize import least_squares

from whalejax.estimates.step_model import Array, Runs
from whalejax.meshes.fitted_constants import Achieved, Constants, width_of
from whalejax.meshes.ratings import STANDS_IN, rating_of


@dataclass(frozen=True, slots=True)
class Range:
    """Most likely value of a constant, and its bounds."""

    likely: float
    low: float
    high: float


GPU = {
    "half_depth": Range(50, 1, 400),
    "half_size": Range(60, 1, 400),
    "tile_medium": Range(0.92, 0.8, 1.0),
    "tile_small": Range(0.72, 0.5, 0.95),
    "tile_smallest": Range(0.45, 0.3, 0.8),
    "tile_idle": Range(0.6, 0.0, 1.0),
    "attention": Range(0.57, 0.4, 0.75),
    "attention_before": Range(0.6, 0.5, 0.7),
    "attention_half": Range(300, 100, 600),
    "unaligned": Range(0.7, 0.5, 0.9),
    "memory": Range(0.8, 0.5, 0.92),
    "kernel_seconds": Range(2e-6, 0.2e-6, 8e-6),
    "launch_seconds": Range(3e-6, 0.2e-6, 10e-6),
    "dispatch_seconds": Range(50e-6, 5e-6, 150e-6),
    "micro_seconds": Range(1e-3, 0.0, 5e-3),
    "jitter_seconds": Range(10e-6, 0.0, 60e-6),
    "blend": Range(4.0, 1.5, 8.0),
    "node_seconds": Range(20e-6, 0.0, 100e-6),
    "network": Range(0.75, 0.5, 0.9),
    "ring_seconds": Range(1.5e-6, 0.3e-6, 6e-6),
    "bucket_bytes": Range(2e8, 4e7, 1e9),
    "overlap_gradients": Range(0.8, 0.3, 0.98),
    "overlap_parameters": Range(0.8, 0.3, 0.98),
    "overlap_layers": Range(0.6, 0.2, 0.95),
    "update_bytes": Range(36, 28, 60),
    "step_seconds": Range(3e-3, 0.0, 3e-2),
}
"""Constants of GPUs that step times determine."""

TPU = {
    "half_size": Range(100, 1, 400),
    "attention": Range(0.45, 0.2, 0.75),
    "memory": Range(0.8, 0.5, 0.92),
    "node": Range(0.6, 0.3, 0.9),
    "network": Range(0.5, 0.2, 0.9),
    "overlap_parameters": Range(0.8, 0.0, 0.98),
}
"""Constants of TPUs that step times determine."""

EFFICIENCY = Range(0.8, 0.15, 0.9)
"""Efficiency of a family of devices in one type."""

NODE = Range(0.75, 0.5, 0.9)
"""Efficiency of the links inside a node of a family of GPUs."""

FULL = ("f32", "tf32")
"""Types of full precision, as PyTorch calls it."""

PULL = 0.8
"""Weight of the most likely values: a constant at the other end of its range counts as
this relative error in a run."""

SCALE = 0.04
"""Relative error from which a run counts as an outlier."""

STEP = 1e-6
"""Part of a constant's range by which it moves for its slope."""

ROUNDS = 2
"""Number of times that the pipelines' waits are computed."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Location of a fitted number: a platform's constant, or an efficiency."""

    platform: str
    name: str
    range: Range


def _places(runs: Runs) -> tuple[list[_Place], list[_Place]]:
    """Returns the constants that are fitted first, and efficiencies in full precision.

    Training in full precision is rare and its frameworks are research code, so that its
    runs determine only the speed of a device in it.
    """
    shared = [_Place("gpu", name, span) for name, span in GPU.items()]
    shared += [_Place("tpu", name, span) for name, span in TPU.items()]
    types = dict.fromkeys((run.device.kind.family, run.speed) for run in runs.runs)
    first = [_Place(f, d, EFFICIENCY) for f, d in types if d not in FULL]
    kinds = [run.device.kind for run in runs.runs if width_of(run.dtype) not in FULL]
    gpus = dict.fromkeys(kind.family for kind in kinds if kind.platform == "gpu")
    first += [_Place(family, "node", NODE) for family in gpus]
    return shared + first, [_Place(f, d, EFFICIENCY) for f, d in types if d in FULL]


def _with(base: Constants, places: Sequence[_Place], values: Array) -> Constants:
    platforms: dict[str, dict[str, float]] = {}
    efficiency: dict[tuple[str, str], float] = dict(base.efficiency)
    node = dict(base.node)
    for place, value in zip(places, values.tolist(), strict=True):
        if place.platform in base.platforms:
            platforms.setdefault(place.platform, {})[place.name] = value
        elif place.name == "node":
            node[place.platform] = value
        else:
            efficiency[place.platform, place.name] = value
    changed: Mapping[str, Achieved] = {
        name: dataclasses.replace(achieved, **platforms.get(name, {}))
        for name, achieved in base.platforms.items()
    }
    return dataclasses.replace(
        base, platforms=changed, efficiency=efficiency, node=node
    )


def source_weights(sources: Sequence[str]) -> Array:
    """Returns the weight of each run: less than proportional to a source's runs.

    A sweep of hundreds of layouts on one machine has more information than a table of
    ten, but not in proportion.
    """
    counts = Counter(sources)
    return np.array([counts[source] ** -0.15 for source in sources])


def fit(
    runs: Runs,
    seconds: Array,
    weights: Array,
    base: Constants,
    *,
    kept: Array | None = None,
    layers: Array | None = None,
) -> Constants:
    """Returns the constants that explain measured step times best.

    Args:
        runs: Measured runs.
        seconds: Seconds of each step.
        weights: Weight of each run.
        base: Constants that are not fitted, and start of the fit.
        kept: Whether each run counts, or None for all.
        layers: Whether ``seconds`` of a run is that of one layer and micro-batch.
    """
    first, full_precision = _places(runs)
    counts = np.ones(len(runs.runs), bool) if kept is None else kept
    precise = np.array([width_of(run.dtype) in FULL for run in runs.runs])
    single = np.zeros(len(runs.runs), bool) if layers is None else layers
    start = dataclasses.replace(base, efficiency={}, node={})
    measured = _Target(runs=runs, logs=np.log(seconds), weights=weights, layers=single)
    if (counts & ~precise).any():
        start = _solve(measured, first, start, counts & ~precise)
    if full_precision and (counts & precise).any():
        start = _solve(measured, full_precision, start, counts & precise)
    return start


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """Data of a fit; see ``fit``."""

    runs: Runs
    logs: Array
    weights: Array
    layers: Array

    def off(self, constants: Constants, kept: Array) -> Array:
        """Returns weighted logarithms of predicted over measured."""
        prices = self.runs.price(constants, settle=False)
        predicted = np.where(self.layers, prices.layer_seconds, prices.step_seconds)
        off: Array = (np.log(predicted) - self.logs)[kept] * self.weights[kept]
        return off


def _feels(runs: Runs, place: _Place) -> Array:
    """Returns whether each run depends on a constant."""
    kinds = (entry.kind for entry in runs.entries)
    if place.platform in ("gpu", "tpu"):
        return np.array([kind.platform == place.platform for kind in kinds])
    rating = rating_of(place.platform)
    generation = rating.generation if rating is not None else ""
    return np.array(
        [
            place.platform == k.family
            or (bool(generation) and generation in _generations(k.generation))
            for k in kinds
        ],
        dtype=bool,
    )


def _generations(generation: str) -> tuple[str, ...]:
    """Returns a generation and those whose measurements stand in for its own."""
    generations = [generation]
    while generations[-1] in STANDS_IN:
        generations.append(STANDS_IN[generations[-1]])
    return tuple(generations)


def _together(runs: Runs, places: Sequence[_Place]) -> list[list[int]]:
    """Returns groups of constants in which no run depends on two."""
    groups: list[tuple[list[int], Array]] = []
    for index, place in enumerate(places):
        depends = _feels(runs, place)
        for members, used in groups:
            if not (used & depends).any():
                members.append(index)
                used |= depends
                break
        else:
            groups.append(([index], depends))
    return [members for members, _ in groups]


def _solve(
    target: _Target, places: Sequence[_Place], base: Constants, kept: Array
) -> Constants:
    """Fits some constants to some runs; the others keep their values."""
    low = np.array([p.range.low for p in places])
    high = np.array([p.range.high for p in places])
    likely = (np.array([p.range.likely for p in places]) - low) / (high - low)
    pull = PULL * SCALE * np.sqrt(np.sum(target.weights[kept] ** 2)) / 2

    def differences(unit: Array) -> Array:
        constants = _with(base, places, low + unit * (high - low))
        return np.concatenate([target.off(constants, kept), pull * (unit - likely)])

    groups = _together(target.runs, places)

    def slopes(unit: Array) -> Array:
        """Returns slopes by each constant; those that share no run move at once."""
        before = differences(unit)
        jacobian = np.zeros((len(before), len(places)))
        for group in groups:
            step = np.zeros(len(places))
            step[group] = np.where(unit[group] + STEP > 1, -STEP, STEP)
            change = (differences(unit + step) - before)[: -len(places)]
            for index in group:
                depends = _feels(target.runs, places[index])[kept]
                jacobian[: len(depends), index] = change * depends / step[index]
        jacobian[-len(places) :] = np.diag(np.full(len(places), pull))
        return jacobian

    unit = np.clip(likely, 0.01, 0.99)
    for _ in range(ROUNDS):
        target.runs.price(_with(base, places, low + unit * (high - low)))
        solution = least_squares(
            differences,
            unit,
            jac=cast(Any, slopes),  # typed as the names of methods
            bounds=(0, 1),
            loss="cauchy",
            f_scale=SCALE,
            max_nfev=30,
        )
        unit = np.clip(solution.x, 1e-4, 1 - 1e-4)
    return _with(base, places, low + unit * (high - low))
