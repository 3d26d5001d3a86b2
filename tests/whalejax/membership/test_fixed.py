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
from whalejax.membership import events as ev
from whalejax.membership.exit_status import Ending
from whalejax.membership.fixed_run import (
    SOON_SECONDS,
    STOPPED_SECONDS,
    FixedRun,
    rank_name,
)


CPU: Final = DeviceReport(kind="cpu", devices=1)


def run_of(processes: int, *, stops: bool = True) -> FixedRun:
    run = FixedRun(processes=processes, stops=stops, exit_seconds=30.0, now=0.0)
    starts = run.react(0.0, ev.StartsAllowedEvent())
    assert starts == [ev.StartEffect(rank) for rank in range(processes)]
    return run


def end(run: FixedRun, now: float, rank: int, status: int) -> list[ev.Effect]:
    return run.react(now, ev.ProcessExitEvent(rank_name(rank), status))


def look(
    run: FixedRun, now: float, *stopped: int, heard: float = 0.0
) -> list[ev.Effect]:
    run.written_at = dict.fromkeys(range(run.processes), heard)
    run.states = {
        rank_name(rank): "T" if rank in stopped else "S" for rank in run.running_ranks()
    }
    return run.react(now, ev.Tick())


def failure(run: FixedRun) -> tuple[int, str]:
    assert run.failure is not None
    return run.failure


def test_all_that_end_well_end_it() -> None:
    run = run_of(2)
    assert not end(run, 1.0, 1, 0)
    assert end(run, 2.0, 0, 0) == [ev.End(Ending.COMPLETE, "")]


def test_a_signal_ends_it() -> None:
    (effect,) = run_of(2).react(1.0, ev.Terminate(at_once=False, number=2))
    assert isinstance(effect, ev.End)
    assert (effect.how, effect.status) == (Ending.INTERRUPTED, 130)


def test_a_rank_that_cannot_start_ends_it() -> None:
    run = run_of(3)
    assert not run.react(1.0, ev.NotStarted(2, "Too many open files"))
    (effect,) = look(run, 1.0 + SOON_SECONDS)
    assert isinstance(effect, ev.End) and effect.how == Ending.FAILED
    assert failure(run) == (2, "cannot be started: Too many open files")


def test_a_stopped_rank_is_named_though_an_end_comes_last() -> None:
    run = run_of(3)
    assert not look(run, 0.5, 2)
    assert not end(run, 1.0, 0, -signal.SIGABRT)
    assert end(run, 1.1 + SOON_SECONDS, 1, -signal.SIGABRT)
    assert failure(run)[0] == 2


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
        assert not end(run, 1.0, number, status)
    assert not look(run, 1.0 + SOON_SECONDS / 2)
    (effect,) = look(run, 1.0 + SOON_SECONDS)
    found, said = failure(run)
    assert (found, how in said) == (rank, True)
    status = next(iter(ends.values()))
    assert isinstance(effect, ev.End)
    assert effect.status == (status if status > 0 else 128 - status)


def test_a_failure_of_its_own_is_not_for_the_blamed_process() -> None:
    run = run_of(2)
    assert run.hear(1, BlameReport(rank=0, why="has said nothing"))
    assert run.hear(0, BlameReport(rank=1, why="has said nothing for long"))
    assert not end(run, 1.0, 1, 3)
    look(run, 1.0 + SOON_SECONDS)
    assert failure(run) == (0, "has said nothing")


def test_one_that_is_stopped_is_given_up_and_one_that_goes_on_is_not() -> None:
    run, last = run_of(2), int(STOPPED_SECONDS)
    for second in range(last):
        assert not look(run, float(second), 1)
    assert not look(run, float(last))  # It goes on.
    for second in range(last + 1, 2 * last + 2):
        assert not look(run, float(second), 1)
    look(run, 2 * last + 3.0, 1)
    (effect,) = look(run, 2 * last + 3.0 + SOON_SECONDS, 1)
    assert isinstance(effect, ev.End) and effect.status == 1
    found, said = failure(run)
    assert found == 1 and "is stopped by a signal" in said


def test_time_in_which_the_launcher_was_stopped_does_not_count() -> None:
    run = run_of(2)
    look(run, 0.0, 1)
    look(run, 100.0, 1)
    assert not run.failed


def test_all_that_end_for_one_that_is_stopped_name_it() -> None:
    run = run_of(3)
    end(run, 1.0, 0, ENDS_FOR_ANOTHER)
    look(run, 1.0 + SOON_SECONDS, 2)
    assert failure(run) == (
        2,
        "is stopped by a signal (SIGSTOP or SIGTSTP) and stands still "
        "(rank 0 ended for it)",
    )


def test_one_that_ends_before_it_has_joined_others_that_wait() -> None:
    run = run_of(3)
    end(run, 1.0, 1, 0)
    look(run, 2.0)
    assert not run.failed
    run.hear(0, Joining())
    look(run, 3.0)
    look(run, 3.0 + SOON_SECONDS)
    found, said = failure(run)
    assert found == 1 and "ended with exit status 0 before it had joined" in said
    # One that says what it computes on has joined.
    run = run_of(2)
    for rank in range(2):
        run.hear(rank, Joining())
        run.hear(rank, CPU)
    end(run, 1.0, 1, 0)
    look(run, 2.0)
    assert not run.failed


def test_silence_counts_when_others_have_ended_and_from_what_was_written_last() -> None:
    run = run_of(2)
    look(run, 1000.0)
    end(run, 1000.0, 0, 0)
    look(run, 1030.0)
    look(run, 1060.0, heard=1031.0)
    assert not run.failed
    look(run, 1062.0, heard=1031.0)
    found, said = failure(run)
    assert found == 1 and "has not ended 30 s after others had" in said


def test_where_the_rest_go_on_only_rank_0_ends_all() -> None:
    run = run_of(3, stops=False)
    end(run, 1.0, 1, 3)
    assert not look(run, 1.0 + 2 * SOON_SECONDS)
    end(run, 4.0, 0, 4)
    (effect,) = look(run, 4.0 + SOON_SECONDS)
    assert isinstance(effect, ev.End)
    assert (effect.status, failure(run)[0]) == (3, 1)


def test_what_cannot_be_true_is_no_report() -> None:
    run = run_of(2)
    assert not run.hear(1, BlameReport(rank=1, why="itself"))
    assert not run.hear(1, BlameReport(rank=2, why="nobody"))
    end(run, 1.0, 0, ENDS_FOR_ANOTHER)
    look(run, 1.0 + SOON_SECONDS)
    assert failure(run)[0] == 0
