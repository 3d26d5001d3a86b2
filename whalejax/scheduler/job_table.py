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
    """A job cannot be scheduled; the message says why and what helps."""


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
        samples: Samples until its end, counted at the job's own batch.
        arrival: Time of its arrival, in seconds from the start.
        priority: Priority; higher ones are admitted first, and the weight in the
            objective is 1 plus it.
        resize_seconds: Time without progress when its devices change.
        start_seconds: Time without progress when it starts, or changes to another kind
            of device; ``resize_seconds`` if None.
        join_seconds: Time until added devices take part; until then it runs without
            them, at the old speed.
        asked: Place that its user would have requested.
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
        """Returns its progress in samples per second; 0 if it cannot run there."""
        option = self.options.get(place)
        return 0.0 if option is None else option.progress

    def change_seconds(self, before: Place, after: Place) -> tuple[float, float]:
        """Returns a change's seconds at the old speed, then those without progress."""
        if before == after or not after[1]:
            return 0.0, 0.0
        if not before[1] or before[0] != after[0]:
            start = self.start_seconds
            return 0.0, self.resize_seconds if start is None else start
        joins = self.join_seconds if after[1] > before[1] else 0.0
        return joins, self.resize_seconds

    def lost_seconds(self, before: Place, after: Place) -> float:
        """Returns the cost of a change, in seconds of the progress that follows it."""
        joins, still = self.change_seconds(before, after)
        if joins:
            slower = self.progress(before) / max(self.progress(after), 1e-12)
            still += joins * max(0.0, 1.0 - slower)
        return still

    @property
    def places(self) -> list[Place]:
        """Places at which it can run, by kind, then by number of devices."""
        return sorted(self.options)

    @property
    def least(self) -> int:
        """Fewest devices on which it can run."""
        return min(count for _, count in self.options)

    @property
    def least_progress(self) -> float:
        """Progress on the fewest devices, of the slowest kind with that number."""
        return min(
            one.progress
            for place, one in self.options.items()
            if place[1] == self.least
        )


def best_options(options: Iterable[JobOption]) -> dict[Place, JobOption]:
    """Returns the best option at each place, if it beats those with fewer devices.

    Args:
        options: Options of one job, with any number of batches at a place.

    Returns:
        The option of most progress at each place. A place is left out if fewer devices
        of its kind make as much progress.
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

    The gradient-noise scale is the batch at which noise and gradient are equally large;
    progress per sample falls as ``1 / (noise_scale + batch)`` (McCandlish et al., "An
    Empirical Model of Large-Batch Training", 2018; Qiao et al., "Pollux", 2021).

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
    """Returns a function from a kind of device to its mean ratio of measured to
    predicted throughput.

    For a kind without measurements, it is the mean over all measured places; 1 if there
    are none.

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
