"""Who fails first, stands still or ends for another is told apart, by rules alone."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Final

import pytest

from whalejax.distributed.launch_env import (
    ENDS_FOR_ANOTHER,
    BlameReport,
    DeviceReport,
    Joining,
)
from whalejax.membership.fixed_run import (
    LOOK_SECONDS,
    SOON_SECONDS,
    STOPPED_LOOKS,
    FixedRun,
)


CPU: Final = DeviceReport(kind="cpu", devices=1)


def run_of(processes: int, *, stops: bool = True) -> FixedRun:
    return FixedRun(processes=processes, stops=stops, exit_seconds=30.0, now=0.0)


def runs(_: int) -> str:
    return "S"


def look(run: FixedRun, now: float, *stopped: int, heard: float = 0.0) -> None:
    heard_at = dict.fromkeys(range(run.processes), heard)
    run.look(now, lambda rank: "T" if rank in stopped else "S", heard_at)


def test_all_that_end_well_end_it() -> None:
    run = run_of(2)
    run.end(1.0, 1, 0)
    assert run.seconds_left(1.0) == float("inf")
    run.end(2.0, 0, 0)
    assert (run.seconds_left(2.0), run.status) == (0.0, 0)


@pytest.mark.parametrize(
    ("ends", "blames", "rank", "how"),
    [
        ({1: 3}, {}, 1, "failed first, with status 3"),
        ({1: -9}, {}, 1, "failed first, with signal SIGKILL"),
        # Who ends for another one was only quicker.
        ({0: ENDS_FOR_ANOTHER, 2: 4}, {}, 2, "failed first, with status 4"),
        ({0: -signal.SIGABRT, 2: 1}, {}, 2, "failed first, with status 1"),
        ({0: 1, 2: -9}, {}, 2, "failed first, with signal SIGKILL"),
        (
            {0: ENDS_FOR_ANOTHER},
            {0: (2, "has said nothing")},
            2,
            "has said nothing (rank 0 ended for it)",
        ),
        ({0: ENDS_FOR_ANOTHER, 1: ENDS_FOR_ANOTHER}, {}, 0, "status 70"),
    ],
)
def test_who_failed_first(
    ends: Mapping[int, int], blames: Mapping[int, tuple[int, str]], rank: int, how: str
) -> None:
    run = run_of(3)
    for number, (other, why) in blames.items():
        assert run.hear(number, BlameReport(rank=other, why=why))
    for number, status in ends.items():
        run.end(1.0, number, status)
    assert 0 < run.seconds_left(1.0) <= SOON_SECONDS
    assert run.seconds_left(1.0 + SOON_SECONDS) == 0.0
    found, said = run.who_failed(runs)
    assert (found, how in said) == (rank, True)
    status = next(iter(ends.values()))
    assert run.status == (status if status > 0 else 128 - status)


def test_one_that_is_stopped_is_given_up_and_one_that_goes_on_is_not() -> None:
    run = run_of(2)
    for count in range(1, STOPPED_LOOKS):
        look(run, count * LOOK_SECONDS, 1)
    look(run, 30.0)
    for count in range(STOPPED_LOOKS):
        assert run.seconds_left(31.0 + count) == float("inf")
        look(run, 31.0 + count, 1)
    assert run.who_failed(runs)[0] == 1 and run.status == 1
    assert "is stopped by a signal" in run.who_failed(runs)[1]


def test_all_that_end_for_one_that_is_stopped_name_it() -> None:
    run = run_of(3)
    run.end(1.0, 0, ENDS_FOR_ANOTHER)
    assert run.who_failed(lambda rank: "T" if rank == 2 else "S") == (
        2,
        "is stopped by a signal (SIGSTOP or SIGTSTP) and stands still "
        "(rank 0 ended for it)",
    )


def test_one_that_ends_before_it_has_joined_others_that_wait() -> None:
    run = run_of(3)
    run.end(1.0, 1, 0)
    look(run, 2.0)
    assert not run.failed
    run.hear(0, Joining())
    look(run, 3.0)
    assert run.who_failed(runs)[0] == 1
    assert "ended with exit status 0 before it had joined" in run.who_failed(runs)[1]
    # One that says what it computes on has joined.
    run = run_of(2)
    for rank in range(2):
        run.hear(rank, Joining())
        run.hear(rank, CPU)
    run.end(1.0, 1, 0)
    look(run, 2.0)
    assert not run.failed


def test_silence_counts_when_others_have_ended_and_from_what_was_written_last() -> None:
    run = run_of(2)
    look(run, 1000.0)
    run.end(1000.0, 0, 0)
    look(run, 1030.0)
    look(run, 1060.0, heard=1031.0)
    assert not run.failed
    look(run, 1062.0, heard=1031.0)
    assert run.who_failed(runs)[0] == 1
    assert "has not ended 30 s after others had" in run.who_failed(runs)[1]


def test_where_the_rest_go_on_only_rank_0_ends_all() -> None:
    run = run_of(3, stops=False)
    run.end(1.0, 1, 3)
    assert run.seconds_left(1.0) == float("inf")
    run.end(2.0, 0, 4)
    assert run.seconds_left(2.0) <= SOON_SECONDS
    assert (run.status, run.who_failed(runs)[0]) == (3, 1)


def test_what_cannot_be_true_is_no_report() -> None:
    run = run_of(2)
    assert not run.hear(1, BlameReport(rank=1, why="itself"))
    assert not run.hear(1, BlameReport(rank=2, why="nobody"))
    run.end(1.0, 0, ENDS_FOR_ANOTHER)
    assert run.who_failed(runs)[0] == 0
