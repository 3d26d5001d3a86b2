"""Jobs under a virtual clock."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from whalejax.scheduler.allocation import JobState
from whalejax.scheduler.job_table import JobError, JobOption, Place, ScheduledJob
from whalejax.scheduler.schedule import JobSchedule, elastic, first_come_first_served
from whalejax.scheduler.simulation import JobSimulation, simulate


EIGHT = {"": 8}


def job(
    name: str, samples: float, arrival: float = 0.0, asked: int = 4, resize: float = 0.0
) -> ScheduledJob:
    """A job that scales perfectly to eight devices, a sample a second and device."""
    options = {
        ("", n): JobOption(place=("", n), samples_per_second=float(n))
        for n in range(1, 9)
    }
    return ScheduledJob(
        name=name,
        options=options,
        samples=samples,
        arrival=arrival,
        asked=("", asked),
        resize_seconds=resize,
    )


def test_static_jobs_wait_for_the_devices_that_they_asked_for() -> None:
    jobs = [job("a", 400), job("b", 400, asked=8), job("c", 4, asked=1)]
    found = simulate(jobs, EIGHT, first_come_first_served(EIGHT))
    assert [one.end for one in found.records] == pytest.approx([100, 150, 154])
    assert found.records[1].waited == pytest.approx(100)
    assert found.records[2].waited == pytest.approx(150)  # b came before it.
    assert found.starved == 0 and found.makespan == pytest.approx(154)


def test_elastic_jobs_take_what_others_leave() -> None:
    jobs = [job("a", 400), job("b", 400, arrival=10.0)]
    found = simulate(jobs, EIGHT, elastic(EIGHT, "throughput", 600.0), every=1e9)
    first, second = found.records
    done = 80.0
    assert first.intervals[0].place == ("", 8)
    ends = sorted((first.end, second.end))
    assert ends[1] == pytest.approx(10 + (800 - done) / 8)  # Nobody is ever idle.
    assert found.utilisation == pytest.approx(1.0)


def test_a_resize_costs_its_seconds() -> None:
    one = job("a", 80, resize=30.0)
    found = simulate([one], EIGHT, elastic(EIGHT, "throughput", 600.0))
    (record,) = found.records
    assert record.end == pytest.approx(40) and record.resizes == 0


def played(seed: int, objective: str) -> tuple[JobSimulation, JobSimulation]:
    draw = random.Random(seed)
    jobs, now = [], 0.0
    for number in range(40):
        now += draw.expovariate(1 / 40)
        asked = draw.choice((1, 2, 4, 8))
        samples = draw.uniform(20, 600)
        jobs.append(job(f"{number}", samples, now, asked, resize=2.0))
    static = simulate(jobs, EIGHT, first_come_first_served(EIGHT))
    return simulate(jobs, EIGHT, elastic(EIGHT, objective, 120.0)), static  # type: ignore[arg-type]


@pytest.mark.parametrize("objective", ["throughput", "completion"])
@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_lost_and_nobody_starves(seed: int, objective: str) -> None:
    found, static = played(seed, objective)
    assert found.starved == static.starved == 0
    for record in found.records:
        done = sum(
            record.job.progress(i.place)
            * max(0.0, i.end - i.begin - record.job.resize_seconds)
            for i in record.intervals
        )
        assert done == pytest.approx(record.job.samples, rel=1e-6)
        pairs = itertools.pairwise(record.intervals)
        assert all(before.end <= after.begin for before, after in pairs)
    moments = {i.begin for one in found.records for i in one.intervals}
    for at in moments:
        held = sum(
            i.place[1]
            for one in found.records
            for i in one.intervals
            if i.begin <= at < i.end
        )
        assert held <= 8
    assert found.mean_completion < static.mean_completion


def test_a_decision_takes_no_more_than_there_is() -> None:
    with pytest.raises(JobError, match="takes 9 of 8 devices"):
        simulate([job("a", 1)], EIGHT, lambda states: {"a": ("", 9)})
    with pytest.raises(JobError, match="no job gets devices"):
        simulate([job("a", 1)], EIGHT, lambda states: {})


def test_clocks_that_began_long_ago_end_short_jobs() -> None:
    jobs = [job(f"{n}", 1e-3 * (n + 1), 1.7e9 + 1e-3 * n) for n in range(8)]
    found = simulate(jobs, EIGHT, elastic(EIGHT, "throughput", 600.0))
    assert len(found.records) == 8
    assert all(0 <= one.completion < 1 for one in found.records)


def test_further_devices_take_part_later_and_the_job_goes_on_meanwhile() -> None:
    costs = {"resize_seconds": 1.0, "start_seconds": 5.0, "join_seconds": 10.0}
    options = {
        ("", n): JobOption(place=("", n), samples_per_second=float(n))
        for n in range(1, 9)
    }
    jobs = [
        ScheduledJob(name="a", options=options, samples=400.0, **costs),
        ScheduledJob(name="b", options=options, samples=100.0, arrival=1.0, **costs),
    ]

    def decide(states: Sequence[JobState]) -> dict[str, Place]:
        there = [one.job.name for one in states]
        return {name: ("", 8 // len(there)) for name in there}

    found = simulate(jobs, EIGHT, decide, every=1e9)
    first, second = found.records
    # b starts at 1 for 5 s, and does 4 a second.
    assert second.end == pytest.approx(1 + 5 + 25)
    # a does nothing till 1 (it starts for 5 s, and is resized), 4 from 2 to 31, 4 till
    # 41 while it grows, nothing for 1 s, and then 8.
    assert first.end == pytest.approx(42 + (400 - 4 * 29 - 4 * 10) / 8)
    grown = costs["resize_seconds"] + 10.0 * (1 - 4 / 8)
    assert jobs[0].lost_seconds(("", 4), ("", 8)) == pytest.approx(grown)
    assert jobs[0].lost_seconds(("", 8), ("", 4)) == 1.0
    assert jobs[0].lost_seconds(("", 0), ("", 4)) == 5.0
    assert jobs[0].lost_seconds(("x", 4), ("y", 4)) == 5.0


def test_it_is_decided_where_something_happens_and_every_so_often() -> None:
    schedule = JobSchedule(EIGHT, elastic(EIGHT, "throughput", 600.0), every=60.0)
    assert schedule.decide(0.0) == [] and schedule.next_at == 60.0
    schedule.add(job("a", 400), 400.0)
    assert schedule.next_at < 1.0
    (move,) = schedule.decide(1.0)
    assert (move.name, move.before, move.after) == ("a", ("", 0), ("", 8))
    schedule.update("a", 200.0)
    assert schedule.next_at == 61.0
    schedule.add(job("b", 400), 400.0)
    moves = schedule.decide(2.0)
    # Who gives devices up comes first.
    assert [(m.name, m.after[1] - m.before[1]) for m in moves] == [("a", -1), ("b", 1)]
    schedule.remove("b")
    assert [m.after for m in schedule.decide(3.0)] == [("", 8)]
    assert schedule.places() == {"a": ("", 8)}
