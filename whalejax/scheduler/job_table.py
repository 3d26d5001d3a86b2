"""Table of a job: its throughput for each kind and number of devices."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from whalejax.meshes.checks import Arguments, is_number
from whalejax.meshes.errors import WhaleError


class JobError(WhaleError):
    """A job cannot be scheduled."""


Place = tuple[str, int]
"""Device kind and number of devices; the kind is empty if there is only one."""

NOWHERE: Final[Place] = ("", 0)
"""Place of a job without devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOption:
    """Throughput of a job at one place, with its plan.

    Attributes:
        place: Device kind and number of devices.
        samples_per_second: Throughput of the plan, predicted or measured.
        efficiency: Progress per sample relative to the job's own batch, 1 at most.
        batch: Samples of a global batch.
        layout: Description of the plan.
    """

    place: Place
    samples_per_second: float
    efficiency: float = 1.0
    batch: int = 0
    layout: str = ""

    @property
    def progress(self) -> float:
        """Progress per second, in samples at the job's own batch."""
        return self.samples_per_second * self.efficiency


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledJob:
    """A job and its table.

    Attributes:
        name: Name, unique among all jobs.
        options: Options by place.
        samples: Total number of samples, counted at the job's own batch.
        arrival: Time of its arrival, in seconds from the start.
        priority: Priority. Jobs of a higher priority are admitted first; the weight in
            the objective is 1 plus the priority.
        resize_seconds: Seconds without progress when its devices change.
        start_seconds: Seconds without progress when it starts or changes to another
            kind of device; ``resize_seconds`` if None.
        join_seconds: Seconds until added devices take part; until then it runs at the
            old speed.
        asked: Place that its user would request from a scheduler with fixed places.
    """

    name: str
    options: Mapping[Place, JobOption]
    samples: float
    arrival: float = 0.0
    priority: int = 0
    resize_seconds: float = 0.0
    start_seconds: float | None = None
    join_seconds: float = 0.0
    asked: Place = NOWHERE

    def __post_init__(self) -> None:
        problems = Arguments(f"job {self.name!r}", JobError)
        problems.words("name", self.name)
        problems.of("options", self.options, Mapping, "a table of JobOption by place")
        for name in (
            "samples", "arrival", "resize_seconds", "start_seconds", "join_seconds"
        ):  # fmt: skip
            value = getattr(self, name)
            if name == "start_seconds" and value is None:
                continue
            if not (is_number(value) and value >= 0):
                problems.refuse(name, value, "0 or more")
        problems.whole("priority", self.priority, least=0, most=100)
        problems.raise_if_any()
        for place, one in self.options.items():
            if not one.progress > 0:
                problems.add(
                    f"its option for {place} makes {one.progress:g} samples of "
                    "progress a second; expected more than 0"
                )
        problems.raise_if_any()
        if not self.options:
            raise JobError(
                f"job {self.name!r}: no number of devices holds it. Give it more "
                "devices, devices with more memory, or a smaller batch"
            )

    def progress(self, place: Place) -> float:
        """Returns the progress at a place in samples per second, or 0."""
        option = self.options.get(place)
        return 0.0 if option is None else option.progress

    def change_seconds(self, before: Place, after: Place) -> tuple[float, float]:
        """Returns the seconds of a change at the old speed, and without progress."""
        if before == after or not after[1]:
            return 0.0, 0.0
        if not before[1] or before[0] != after[0]:
            start = self.start_seconds
            return 0.0, self.resize_seconds if start is None else start
        joins = self.join_seconds if after[1] > before[1] else 0.0
        return joins, self.resize_seconds

    def lost_seconds(self, before: Place, after: Place) -> float:
        """Returns the cost of a change, in seconds at the progress after it."""
        joins, still = self.change_seconds(before, after)
        if joins:
            slower = self.progress(before) / max(self.progress(after), 1e-12)
            still += joins * max(0.0, 1.0 - slower)
        return still

    @property
    def places(self) -> list[Place]:
        """Places at which it can run, sorted by kind and number of devices."""
        return sorted(self.options)

    @property
    def least(self) -> int:
        """Fewest devices on which it can run."""
        return min(count for _, count in self.options)

    @property
    def least_progress(self) -> float:
        """Progress on the fewest devices, in samples per second of the slowest kind."""
        return min(
            one.progress
            for place, one in self.options.items()
            if place[1] == self.least
        )


def best_options(options: Iterable[JobOption]) -> dict[Place, JobOption]:
    """Returns the option of most progress at each place.

    Args:
        options: Options of one job, with any number of batches at a place.

    Returns:
        Options by place. A place is left out if fewer devices of its kind make as much
        progress.
    """
    result: dict[Place, JobOption] = {}
    for one in sorted(options, key=lambda one: (one.place, -one.progress)):
        kind, _ = one.place
        fewer = [o.progress for (k, _), o in result.items() if k == kind]
        if one.progress > max(fewer, default=0.0):
            result[one.place] = one
    return result


def batch_efficiency(batch: int, own_batch: int, noise_scale: float) -> float:
    """Returns the progress per sample in a larger batch relative to the job's own.

    The gradient-noise scale is the batch size at which noise and gradient are equally
    large. Progress per sample falls as ``1 / (noise_scale + batch)`` (McCandlish et
    al., "An Empirical Model of Large-Batch Training", 2018; Qiao et al., "Pollux",
    2021).

    Args:
        batch: Samples of the larger batch.
        own_batch: Samples of the job's own batch.
        noise_scale: Gradient-noise scale in samples, 0 or more.

    >>> batch_efficiency(128, 128, 1000.0)
    1.0
    >>> round(batch_efficiency(1128, 128, 1000.0), 2)
    0.53
    """
    return (noise_scale + own_batch) / (noise_scale + batch)


def with_measured(job: ScheduledJob, measured: Mapping[Place, float]) -> ScheduledJob:
    """Returns a job with measured throughputs in place of predicted ones.

    Predictions for other places are scaled by the ratios of ``speed_ratios``.

    Args:
        job: The job.
        measured: Samples per second, by place.
    """
    ratio = speed_ratios(job.options, measured)
    options = {
        place: dataclasses.replace(
            one,
            samples_per_second=measured.get(
                place, one.samples_per_second * ratio(place[0])
            ),
        )
        for place, one in job.options.items()
    }
    return dataclasses.replace(job, options=options)


def speed_ratios(
    options: Mapping[Place, JobOption], measured: Mapping[Place, float]
) -> Callable[[str], float]:
    """Returns a function for the mean ratio of measured to predicted throughput.

    Its argument is a kind of device. For a kind without measurements it returns the
    mean over all measured places, or 1 if there are none.

    Args:
        options: Predicted options by place.
        measured: Samples per second, by place.
    """
    ratios: dict[str, list[float]] = {}
    for place, speed in measured.items():
        if place in options:
            ratio = speed / options[place].samples_per_second
            ratios.setdefault(place[0], []).append(ratio)
    every = [ratio for each in ratios.values() for ratio in each] or [1.0]
    return lambda kind: statistics.fmean(ratios.get(kind, every))
