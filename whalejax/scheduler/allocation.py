"""Divides devices among jobs: an exact dynamic program, or an integer program.

On devices of one kind, a recursion over the jobs gives the largest value of ``j`` jobs
on ``k`` devices. It is the maximum over ``g`` of the value of job ``j`` on ``g``
devices plus the value of the other jobs on ``k - g`` (Saxena et al., "Effective Elastic
Scaling of Deep Learning Workloads", 2020). On several kinds, an integer program chooses
the place of each job (as in Jayaram Subramanya et al., "Sia", 2023). The values include
the cost of a change, so a job keeps its devices unless others gain more.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from whalejax.meshes.units import count_text
from whalejax.scheduler.job_table import NOWHERE, JobError, Place, ScheduledJob


Objective = Literal["throughput", "completion", "fairness", "sia"]
"""Value of a job. The sum over jobs, weighted by 1 plus the priority, is maximised.

- ``throughput``: progress relative to that on the fewest devices.
- ``completion``: part of the remaining work done per second, which ends short jobs
  first.
- ``fairness``, ``sia``: powers of the progress relative to a fair share, as in Pollux
  and Sia.
"""

OBJECTIVES: Final = get_args(Objective)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """A job that waits or runs.

    Attributes:
        job: The job.
        left: Number of remaining samples.
        place: Current place.
    """

    job: ScheduledJob
    left: float
    place: Place = NOWHERE


def admitted_jobs(
    states: Sequence[JobState], devices: Mapping[str, int]
) -> list[JobState]:
    """Returns the jobs that get devices, by priority and then by arrival.

    If a job does not fit, all later jobs wait too.

    Args:
        states: Jobs that wait or run.
        devices: Number of devices by kind.
    """
    order = sorted(
        states,
        key=lambda one: (-one.job.priority, one.job.arrival, one.job.name),
    )
    low, high = 0, len(order)
    while low < high:
        middle = (low + high + 1) // 2
        if _hold(order[:middle], devices):
            low = middle
        else:
            high = middle - 1
    return order[:low]


def _hold(states: Sequence[JobState], devices: Mapping[str, int]) -> bool:
    """Returns whether all jobs can run at the same time, each on its fewest devices."""
    if len(devices) == 1:
        (count,) = devices.values()
        return sum(state.job.least for state in states) <= count
    # A quick check before the integer program.
    if sum(state.job.least for state in states) > sum(devices.values()):
        return False
    values = [{place: 0.0 for place in state.job.places} for state in states]
    return _by_integer_program(values, devices, feasible=True) is not None


def allocate(
    states: Sequence[JobState],
    devices: Mapping[str, int],
    *,
    objective: Objective = "throughput",
    horizon: float = 600.0,
) -> dict[str, Place]:
    """Decides where every job runs.

    Args:
        states: Jobs that wait or run, in any order.
        devices: Number of devices by kind; the kind is empty if there is only one.
        objective: Quantity to maximise.
        horizon: Seconds within which a change has to gain more than it costs.

    Returns:
        Place of each job, by its name; ``NOWHERE`` for a job that waits.

    Raises:
        JobError: A job fits on no number of devices, or two jobs have the same name.
    """
    _check(states, devices)
    result = dict.fromkeys((state.job.name for state in states), NOWHERE)
    chosen = admitted_jobs(states, devices)
    if not chosen:
        return result
    value = _values(objective, len(chosen), devices, horizon)
    values = [{p: value(one, p) for p in one.job.places} for one in chosen]
    if len(devices) == 1:
        ((kind, count),) = devices.items()
        numbers = most_value(
            [{n: v for (k, n), v in value.items() if k == kind} for value in values],
            count,
        )
        places: Sequence[Place] = [(kind, n) for n in numbers]
    else:
        solved = _by_integer_program(values, devices)
        assert solved is not None, "admitted jobs hold"
        places = solved
    result.update((one.job.name, p) for one, p in zip(chosen, places, strict=True))
    return result


def _check(states: Sequence[JobState], devices: Mapping[str, int]) -> None:
    for name, number in Counter(state.job.name for state in states).items():
        if number > 1:
            raise JobError(f"{number} jobs are named {name!r}. Give them other names")
    for one in states:
        least = min(
            (n for kind, n in one.job.places if n <= devices.get(kind, 0)), default=None
        )
        if least is None:
            there = ", ".join(
                f"{n}{f' {kind}' if kind else ''}" for kind, n in devices.items()
            )
            raise JobError(
                f"job {one.job.name!r} needs at least "
                f"{count_text(one.job.least, 'device')}, and the "
                f"cluster has {there}. Take a larger cluster, or a smaller job"
            )


def _values(
    objective: Objective, jobs: int, devices: Mapping[str, int], horizon: float
) -> Callable[[JobState, Place], float]:
    """Returns a function for the value of a job at a place, with the cost of a move."""
    share = max(1, sum(devices.values()) // jobs)

    def fair_progress(job: ScheduledJob) -> float:
        within = [p for p in job.places if p[1] <= share] or job.places[:1]
        return max(job.progress(p) for p in within)

    def value(one: JobState, place: Place) -> float:
        job = one.job
        progress = job.progress(place)
        if place != one.place and progress:
            lost = job.lost_seconds(one.place, place)
            holds = min(horizon, one.left / progress + lost)
            progress *= max(0.0, 1 - lost / max(holds, 1e-9))
        weight = 1 + job.priority
        if objective == "completion":
            return weight * progress / max(one.left, 1e-9)
        if objective == "throughput":
            return weight * progress / job.least_progress
        power = -1.0 if objective == "fairness" else -0.5
        speed = max(progress / fair_progress(job), 1e-6)
        return -weight * float(speed**power)

    return value


def most_value(values: Sequence[Mapping[int, float]], devices: int) -> list[int]:
    """Returns the number of devices of each job for which the sum of values is largest.

    Args:
        values: Value of each number of devices, for each job.
        devices: Number of devices.

    Returns:
        Number of devices of each job. Among equal sums, later jobs get fewer devices.

    Raises:
        JobError: There are too few devices for all jobs at once.

    >>> most_value([{1: 1.0, 2: 1.8, 4: 3.0}, {1: 1.0, 2: 1.9}], 4)
    [2, 2]
    """
    best = np.zeros(devices + 1)
    choices: list[tuple[np.ndarray, np.ndarray]] = []
    for each in values:
        numbers = np.array(sorted(n for n in each if n <= devices), dtype=np.int64)
        sums = np.full((len(numbers), devices + 1), -np.inf)
        for row, number in enumerate(numbers.tolist()):
            sums[row, number:] = best[: devices + 1 - number] + each[number]
        if not len(numbers):
            raise JobError(f"no number of {devices} devices holds a job")
        chosen = sums.argmax(axis=0)
        choices.append((numbers, chosen))
        best = sums[chosen, np.arange(devices + 1)]
    if best[devices] == -math.inf:
        raise JobError(
            f"{devices} devices do not hold {count_text(len(values), 'job')} at once. "
            "Admit fewer"
        )
    left, value = devices, []
    for numbers, chosen in reversed(choices):
        number = int(numbers[chosen[left]])
        value.append(number)
        left -= number
    return value[::-1]


def _by_integer_program(
    values: Sequence[Mapping[Place, float]],
    devices: Mapping[str, int],
    *,
    feasible: bool = False,
) -> list[Place] | None:
    """Returns a place for each job with the largest sum of values; None if impossible.

    With 2,000 pairs of job and place or more, the sum may be 0.1 % below the largest.
    If ``feasible``, the places need not have the largest sum.
    """
    columns = [
        (job, place)
        for job, each in enumerate(values)
        for place in each
        if place[1] <= devices.get(place[0], 0)
    ]
    if {job for job, _ in columns} != {*range(len(values))}:
        return None
    kinds = {kind: row for row, kind in enumerate(devices, start=len(values))}
    index = np.arange(len(columns))
    jobs = np.array([job for job, _ in columns])
    row = np.concatenate([jobs, [kinds[place[0]] for _, place in columns]])
    entry = np.concatenate([np.ones(len(columns)), [p[1] for _, p in columns]])
    shape = len(values) + len(devices), len(columns)
    matrix = csr_array((entry, (row, np.concatenate([index, index]))), shape=shape)
    least = np.concatenate([np.ones(len(values)), np.zeros(len(devices))])
    most = np.concatenate([np.ones(len(values)), [*devices.values()]])
    worth = np.array([values[job][place] for job, place in columns])
    largest = float(np.abs(worth).max(initial=0.0)) or 1.0
    solved = milp(
        np.zeros(len(columns)) if feasible else -worth / largest,
        constraints=LinearConstraint(matrix, least, most),
        integrality=np.ones(len(columns)),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 0.0 if len(columns) < 2000 else 1e-3},
    )
    if solved.x is None:
        return None
    return [columns[i][1] for i in np.flatnonzero(solved.x > 0.5).tolist()]
