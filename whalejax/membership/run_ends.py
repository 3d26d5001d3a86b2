"""The end of a run: messages to its members, and the meaning of each process's end."""

from __future__ import annotations

import signal
from typing import Final

from whalejax.membership.elastic_run import ElasticRun, MemberRecord
from whalejax.membership.events import End, KillEffect
from whalejax.membership.exit_status import STATUS, TERMINATED, Ending, exit_text
from whalejax.membership.history import record
from whalejax.membership.phases import BETWEEN, SAVING
from whalejax.wire import run_messages as wire


_TERMINATED: Final = (TERMINATED, -signal.SIGTERM)
_ERRORS: Final = (Ending.FAILED, Ending.REFUSED, Ending.LOST)


def end(
    run: ElasticRun, now: float, how: Ending, text: str, *, saves: bool = True
) -> None:
    """Ends the run; with ``saves``, a member of an incomplete run writes its state."""
    if run.phase == "ending":
        return
    saver = _saver(run) if saves and how is not Ending.COMPLETE else ""
    record(run, now, "ending", how=how, status=STATUS[how], why=text, saver=saver)
    for member in run.present_members():
        dismiss(run, now, member)
    end_again(run)


def end_again(run: ElasticRun) -> None:
    """Queues the end of a run whose outcome is known."""
    assert run.over is not None
    run.outbox.append(End(how=run.over.how, text=run.over.text))


def end_at_once(run: ElasticRun, now: float) -> None:
    """Ends the run without waiting for anything."""
    for member in run.present_members():
        member.ends_by_kill = True
    text = f"the run was ended at once, on request{run.checkpoint_text()}"
    end(run, now, Ending.INTERRUPTED, text, saves=False)


def _saver(run: ElasticRun) -> str:
    """Returns a member that has the newest state and can write it; empty if none."""
    there = [m for m in run.present_members() if m.status in ("active", "finished")]
    newest = max((m.step for m in there), default=-1)
    holders = [m for m in there if m.step == newest and newest >= 0]
    return min(holders, key=lambda m: not m.connected).name if holders else ""


def saves_last(run: ElasticRun, now: float, name: str) -> bool:
    """Returns whether a member writes the last checkpoint and is not late."""
    member = run.members.get(name)
    if run.over is None or member is None or name != run.over.saver:
        return False
    if run.lease.silent(name, now) > run.lease.seconds:
        return False
    limit = run.limit(member) if member.phase in (BETWEEN, SAVING) else None
    return limit is not None and now - member.moved_at <= limit


def miss_checkpoint(
    run: ElasticRun, now: float, member: MemberRecord, status: int | None
) -> None:
    """Records a missing last checkpoint when the member that should write it ends."""
    if run.over is None or member.name != run.over.saver or run.restarts:
        return
    if run.facts.get("save") and not run.saver_reported:
        why = f"{member.name} ended {exit_text(status)} before it was written"
        record(run, now, "not_saved", name=member.name, step=member.step, why=why)


def dismiss(run: ElasticRun, now: float, member: MemberRecord) -> None:
    """Tells a member that the run is over; may be called again."""
    assert run.over is not None
    how = run.over.how
    if member.released_at is None:
        member.released_at = now
    if member.status in ("starting", "registered") and member.pid:
        # While it starts or compiles, it reads no messages and has nothing to save.
        member.ends_by_kill = True
        run.outbox.append(KillEffect(name=member.name, pid=member.pid))
    elif member.status not in ("active", "finished", "left"):
        run.send(member.name, wire.RunEnded(why="the run is over", well=True))
    elif how is Ending.COMPLETE:
        run.send(member.name, wire.RunDone())
    else:
        saves = member.name == run.over.saver
        well = how in (Ending.DRAINED, Ending.INTERRUPTED)
        run.send(member.name, wire.Stop(why=run.over.text, saves=saves, well=well))


def how_ended(
    run: ElasticRun, member: MemberRecord, status: int | None
) -> Ending | None:
    """Returns the outcome of a member whose process ended; None if unexpected."""
    if run.over is not None:
        ordered = status in (0, None, *_TERMINATED) or member.ends_by_kill
        if run.over.how is Ending.COMPLETE and ordered:
            return Ending.COMPLETE
        # Members end with an error when the supervisor tells them why the run fails.
        fails = run.over.how in _ERRORS and status == 1
        return Ending.DRAINED if ordered or fails else None
    if run.restarts and member.status in ("active", "finished"):
        done = status == 0 or (status is None and member.status == "finished")
        return Ending.COMPLETE if done else None
    if status in _TERMINATED and member.status in ("starting", "registered"):
        return Ending.DRAINED  # The member was asked to leave, but could not report it.
    if status not in (0, None):
        return None
    if member.leaving:
        return Ending.DRAINED
    return Ending.COMPLETE if member.status in ("finished", "left") else None
