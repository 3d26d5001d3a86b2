"""Allocations of devices to jobs against every allocation that there is."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence

import pytest

from whalejax.scheduler.allocation import (
    OBJECTIVES,
    JobState,
    _values,
    admitted_jobs,
    allocate,
    most_value,
)
from whalejax.scheduler.job_table import (
    NOWHERE,
    JobError,
    JobOption,
    Place,
    ScheduledJob,
    batch_efficiency,
    best_options,
    with_measured,
)


def drawn_job(draw: random.Random, name: str, kinds: Mapping[str, int]) -> ScheduledJob:
    """A job with a concave table from one device or two."""
    options = {}
    for kind, count in kinds.items():
        least, power = draw.choice((1, 1, 2)), draw.uniform(0.4, 1.0)
        speed = draw.uniform(1, 5)
        for number in range(least, count + 1):
            place = kind, number
            options[place] = JobOption(
                place=place, samples_per_second=speed * number**power
            )
    return ScheduledJob(
        name=name,
        options=options,
        samples=draw.uniform(100, 10_000),
        arrival=draw.uniform(0, 100),
        priority=draw.choice((0, 0, 2)),
        resize_seconds=draw.choice((0.0, 5.0, 30.0)),
    )


def drawn_states(
    draw: random.Random, number: int, kinds: Mapping[str, int]
) -> list[JobState]:
    jobs = [drawn_job(draw, f"job {n}", kinds) for n in range(number)]
    return [
        JobState(
            job=job,
            left=job.samples * draw.uniform(0.01, 1),
            place=draw.choice([NOWHERE, *job.places]),
        )
        for job in jobs
    ]


def best_sum(
    values: Sequence[Mapping[Place, float]], devices: Mapping[str, int]
) -> float:
    """The most value of all ways to give each job a place of its own."""
    return max(
        sum(each[place] for each, place in zip(values, places, strict=True))
        for places in itertools.product(*values)
        if all(
            sum(n for k, n in places if k == kind) <= count
            for kind, count in devices.items()
        )
    )


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("kinds", [{"": 10}, {"old": 4, "new": 3}])
@pytest.mark.parametrize("seed", range(6))
def test_no_other_allocation_is_worth_more(
    seed: int, kinds: dict[str, int], objective: str
) -> None:
    draw = random.Random(seed)
    states = drawn_states(draw, draw.randint(1, 4), kinds)
    given = {"objective": objective, "horizon": 60.0}
    found = allocate(states, kinds, **given)
    chosen = admitted_jobs(states, kinds)
    value = _values(objective, len(chosen), kinds, 60.0)
    values = [{p: value(one, p) for p in one.job.places} for one in chosen]
    taken = sum(value(one, found[one.job.name]) for one in chosen)
    assert taken == pytest.approx(best_sum(values, kinds), rel=1e-9)
    for kind, count in kinds.items():
        assert sum(n for k, n in found.values() if k == kind) <= count
    assert {n for n, p in found.items() if p != NOWHERE} == {
        one.job.name for one in chosen
    }
    draw.shuffle(states)
    assert allocate(states, kinds, **given) == found


def test_more_devices_are_worth_no_less() -> None:
    draw = random.Random(0)
    values = [
        {n: draw.uniform(0, 3) for n in range(1, draw.randint(3, 12))} for _ in range(5)
    ]
    sums = []
    for devices in range(5, 40):
        numbers = most_value(values, devices)
        assert sum(numbers) <= devices
        sums.append(sum(v[n] for v, n in zip(values, numbers, strict=True)))
    assert sums == sorted(sums) and sums[-1] > sums[0]


def test_devices_are_kept_where_a_change_wins_less_than_it_costs() -> None:
    def job(name: str, resize: float) -> ScheduledJob:
        options = [
            JobOption(place=("", n), samples_per_second=float(n)) for n in range(1, 9)
        ]
        table = {one.place: one for one in options}
        return ScheduledJob(
            name=name, options=table, samples=1e4, resize_seconds=resize
        )

    def places(resize: float) -> dict[str, Place]:
        states = [
            JobState(job=job("long", resize), left=1e4, place=("", 4)),
            JobState(job=job("short", resize), left=8.0, place=("", 4)),
        ]
        return allocate(states, {"": 8}, objective="completion", horizon=600.0)

    assert places(0.0)["short"][1] == 7  # It ends soonest.
    assert places(30.0) == {"long": ("", 4), "short": ("", 4)}


def test_nobody_starts_before_one_that_came_earlier() -> None:
    def job(name: str, least: int, arrival: float, priority: int = 0) -> ScheduledJob:
        place = ("", least)
        table = {place: JobOption(place=place, samples_per_second=1.0)}
        return ScheduledJob(
            name=name, options=table, samples=1, arrival=arrival, priority=priority
        )

    jobs = [job("a", 3, 0), job("b", 3, 1), job("c", 1, 2), job("d", 1, 3, priority=1)]
    states = [JobState(job=one, left=1.0) for one in jobs]
    assert [s.job.name for s in admitted_jobs(states, {"": 5})] == ["d", "a"]


def test_what_nothing_holds_is_refused() -> None:
    place = ("h100", 8)
    job = ScheduledJob(
        name="large",
        options={place: JobOption(place=place, samples_per_second=1.0)},
        samples=1,
    )
    one = JobState(job=job, left=1.0)
    with pytest.raises(JobError, match="'large' needs at least 8 devices, and the "):
        allocate([one], {"h100": 4})
    with pytest.raises(JobError, match="2 jobs are named 'large'"):
        allocate([one, one], {"h100": 16})
    with pytest.raises(JobError, match="no number of devices holds it"):
        ScheduledJob(name="x", options={}, samples=1)
    idle = {place: JobOption(place=place, samples_per_second=0.0)}
    with pytest.raises(JobError, match="makes 0 samples of progress a second"):
        ScheduledJob(name="x", options=idle, samples=1)
    with pytest.raises(JobError, match="samples is -1; expected 0 or more"):
        ScheduledJob(name="x", options=job.options, samples=-1)


def test_a_table_keeps_what_no_fewer_devices_do() -> None:
    def option(number: int, speed: float, batch: int, good: float) -> JobOption:
        return JobOption(
            place=("", number), samples_per_second=speed, batch=batch, efficiency=good
        )

    slow, larger = option(4, 9.0, 8, 1.0), option(2, 16.0, 16, 0.9)
    found = best_options(
        [option(1, 6.0, 8, 1.0), option(2, 10.0, 8, 1.0), larger, slow]
    )
    assert [one.batch for one in found.values()] == [8, 16]
    assert found["", 2].progress == pytest.approx(14.4)
    assert batch_efficiency(16, 8, 64.0) == pytest.approx(0.9)
    job = ScheduledJob(name="x", options=found, samples=1)
    measured = with_measured(job, {("", 1): 3.0}).options
    assert measured["", 1].samples_per_second == 3.0
    assert measured["", 2].samples_per_second == 8.0  # Half of what was predicted.
