"""Handles the end or loss of a member, and starts its replacement."""

from __future__ import annotations

import signal
from typing import Final

from whalejax.distributed.launch_env import ENDS_FOR_ANOTHER, LOSS_SIGNS
from whalejax.membership.elastic_run import ElasticRun, MemberRecord, Status
from whalejax.membership.events import KillEffect, StartEffect
from whalejax.membership.exit_status import Ending, exit_text
from whalejax.membership.history import record
from whalejax.membership.restart_policy import Failure
from whalejax.membership.run_ends import end, how_ended, miss_checkpoint
from whalejax.wire import run_messages as wire


_LASTING_SECONDS: Final = 60.0
"""Seconds for which a generation of ordinary scripts must last to count as progress."""

_ERROR_SIGNALS: Final = (
    signal.SIGILL,
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGSEGV,
)
"""Signals of errors of the process itself; other signals come from outside."""

_NEVER_JOINED: Final = (
    "ended with status 0, and never joined the run. wh.train_elastic(…) trains while "
    "something iterates over it: write `for state, metrics in wh.train_elastic(job, "
    "steps=…):`. If the script does not call it, start it without --processes MIN:MAX"
)
"""Reason for the end of a run whose processes never join it."""

_FURTHER: Final[tuple[Status, ...]] = (
    "starting",
    "registered",
    "ready",
    "active",
    "finished",
    "left",
)
"""Statuses of a member, in the order in which it gets them."""


def exited(
    run: ElasticRun, now: float, name: str, status: int | None, log: str
) -> None:
    """Handles the end of a process; see ``ProcessExitEvent``."""
    member = run.members.get(name)
    if member is None or not member.is_there:
        return
    miss_checkpoint(run, now, member, status)
    how = how_ended(run, member, status)
    if status == 0 and how is None and run.has_no_member:
        record(run, now, "ended", name=name, status=0, how=Ending.FAILED, well=False)
        end(run, now, Ending.REFUSED, f"{name} {_NEVER_JOINED}")
        return
    if how is None:
        why = f"its process ended {exit_text(status)}"
        fails = status is not None and (status > 0 or -status in _ERROR_SIGNALS)
        fails = fails and status != ENDS_FOR_ANOTHER
        fails = fails or member.status == "failed"
        if fails and _may_follow(run, run.failures.error_of(name, log), status):
            why += ", which may follow from the loss of another"
        how = Ending.FAILED if fails else Ending.LOST
        lose(run, now, member, why, log, how=how)
    else:
        well = name in run.active and how is Ending.COMPLETE
        record(run, now, "ended", name=name, status=status, how=how, well=well)
        if run.restarts and well:
            pass
        elif run.phase not in ("draining", "ending"):
            run.refill(now + run.settings.hold_seconds, member.slot)
    if run.restarts and run.active and run.well.issuperset(run.active):
        end(run, now, Ending.COMPLETE, "")


def lose(
    run: ElasticRun,
    now: float,
    member: MemberRecord,
    why: str,
    log: str = "",
    *,
    counts: bool = True,
    how: Ending = Ending.LOST,
) -> None:
    """Gives a member up, and kills it before others get its work.

    The loss counts as a failure if ``counts`` is true, unless the member was leaving or
    the run is ending. ``log`` is the end of the member's log.
    """
    if not member.is_there:
        return
    over = run.phase in ("draining", "ending")
    counts = counts and not member.leaving and not over
    failed = how is Ending.FAILED
    error = run.failures.error_of(member.name, log) if failed else ""
    record(
        run,
        now,
        "lost",
        name=member.name,
        why=why,
        step=run.pace.step,
        counts=counts,
        how=how,
        said=error,
        seconds=round(now - member.since, 3),
    )
    if member.pid:
        run.outbox.append(KillEffect(name=member.name, pid=member.pid))
    run.send(member.name, wire.RunEnded(why=f"it was given up: {why}", well=False))
    if over:
        return
    if counts:
        error = "" if _may_follow(run, error) else error
        count(run, now, member, why, error, log)
        check_budget(run, now, member.reached)
    if member.slot is not None and member.slot in run.slots:
        run.failures.due[member.slot] = now + run.failures.hold(now, member.slot)
    together = ("running", "preparing") if run.stops else ("running",)
    if run.restarts and run.phase in together and member.name in run.active:
        restart_members(run, now)


def count(
    run: ElasticRun,
    now: float,
    member: MemberRecord,
    why: str,
    error: str = "",
    log: str = "",
) -> None:
    """Counts a failure of a member, with the member's own error if there is one."""
    failure = Failure(
        at=now,
        since=member.since,
        name=member.name,
        why=why,
        error=error,
        step=run.pace.step,
    )
    run.failures.count(failure, log)


def agent_lost(run: ElasticRun, now: float, agent: str, why: str) -> None:
    """Gives up all members of an agent, which counts as one failure."""
    record(run, now, "agent_lost", agent=agent, why=why)
    run.agents.pop(agent, None)
    text, alone = f"its agent {agent} is lost: {why}", True
    for member in [m for m in run.present_members() if m.agent == agent]:
        lose(run, now, member, text, counts=alone)
        alone = False


def restart_members(run: ElasticRun, now: float) -> None:
    """Kills the remaining members of a generation with collectives, so all restart."""
    if not run.stops and now - run.pace.at > _LASTING_SECONDS:
        run.failures.progressed()
    run.short_since = now
    record(run, now, "restarting", members=list(run.active))
    for name in run.active:
        member = run.members[name]
        if member.is_there:
            why = "all members restart together"
            record(run, now, "ended", name=name, why=why, how=Ending.DRAINED)
            run.outbox.append(KillEffect(name=name, pid=member.pid))
        run.refill(now, member.slot)


def _may_follow(run: ElasticRun, error: str, status: int | None = None) -> bool:
    """Returns whether another member's failure may have caused this member's.

    A failed member breaks the collectives of all. ``error`` is empty if unknown. With
    an exit status, an unknown error or an end by a signal is a possible effect too.
    """
    if not run.restarts or len(run.active) < 2:
        return False
    unknown = status is not None and (status < 0 or not error)
    return unknown or any(sign in error.lower() for sign in LOSS_SIGNS)


def check_budget(run: ElasticRun, now: float, reached: Status = "active") -> None:
    """Ends the run if its failures exceed the budget.

    ``reached`` is the status that the member had before it failed.
    """
    far = _FURTHER.index(reached)
    well = [m for m in run.present_members() if m.status != "failed"]
    passed = any(_FURTHER.index(m.reached) > far for m in well)
    why = run.failures.exceeded(now, run.checkpoint_text(), passed=passed)
    if why:
        end(run, now, Ending.FAILED, why)


def start_due(run: ElasticRun, now: float) -> None:
    """Starts processes in the slots that are due."""
    if run.phase in ("draining", "ending") or run.is_finishing:
        return
    left = run.well or any(m.status == "left" for m in run.taking_part())
    if left and not run.restarts:
        return
    for slot, due in [*run.failures.due.items()]:
        if slot not in run.slots:
            del run.failures.due[slot]  # Resizing has removed the slot.
        elif due <= now:
            del run.failures.due[slot]
            run.starting.add(slot)
            run.outbox.append(StartEffect(slot=slot))
