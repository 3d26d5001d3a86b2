"""Choice of a job's batch within the range that its user allows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final, Literal

from whalejax.scheduler.job_table import (
    JobOption,
    Place,
    batch_efficiency,
    speed_ratios,
)


RateRule = Literal["linear", "sqrt"]
"""Growth of the learning rate with the batch size: linear, or as its square root."""

LEAST_GAIN: Final = 1.1
"""Minimum ratio of a chosen batch's progress to the progress of the current batch."""


def rate_factor(batch: int, own_batch: int, rule: RateRule) -> float:
    """Returns the ratio of a larger batch's learning rate to that of the job's batch.

    The linear rule is for SGD (Goyal et al., "Accurate, Large Minibatch SGD: Training
    ImageNet in 1 Hour", 2017). The square root is for adaptive optimizers such as Adam
    (Malladi et al., "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms",
    2022).

    Args:
        batch: Samples of the larger batch.
        own_batch: Samples of the job's own batch.
        rule: Rule that the user gave.

    >>> rate_factor(256, 64, "linear"), rate_factor(256, 64, "sqrt")
    (4.0, 2.0)
    """
    ratio = batch / own_batch
    return ratio if rule == "linear" else float(ratio**0.5)


def options_with_batches(
    tables: Mapping[int, Mapping[Place, JobOption]],
    *,
    own_batch: int,
    present: int,
    noise_scale: float,
    measured: Mapping[Place, float],
    least_gain: float = LEAST_GAIN,
) -> dict[Place, JobOption]:
    """Returns a job's option at each place, with the batch of most progress.

    A change of the batch restarts the run, so it needs clearly more progress.

    Args:
        tables: Predicted options of each batch, by place.
        own_batch: Samples of the job's own batch.
        present: Samples of the run's current batch.
        noise_scale: Measured gradient-noise scale, in samples.
        measured: Samples per second at the current batch, by place. They replace
            predictions, and scale the predictions for other places and batches.
        least_gain: Minimum ratio of a chosen batch's progress to that of the current
            batch.
    """
    ratio = speed_ratios(tables[present], measured)
    best: dict[Place, JobOption] = {}
    for batch in sorted(tables, key=lambda batch: (batch != present, batch)):
        efficiency = batch_efficiency(batch, own_batch, noise_scale)
        for place, option in tables[batch].items():
            speed = option.samples_per_second * ratio(place[0])
            if batch == present:
                speed = measured.get(place, speed)
            option = dataclasses.replace(
                option, samples_per_second=speed, efficiency=efficiency, batch=batch
            )
            other = best.get(place)
            gain = least_gain if other is not None and other.batch == present else 1.0
            if other is None or option.progress > gain * other.progress:
                best[place] = option
    return best
