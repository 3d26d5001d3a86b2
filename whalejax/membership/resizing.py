"""Resizes a run to another number of members, as a user or scheduler requests."""

from __future__ import annotations

from whalejax.membership.elastic_run import ElasticRun
from whalejax.membership.events import KillEffect, ResizeEvent
from whalejax.membership.exit_status import Ending
from whalejax.membership.generations import release, terminate
from whalejax.membership.history import record


def resize_refusal(run: ElasticRun, size: int) -> str:
    """Returns why a run cannot have ``size`` members; empty if it can.

    Args:
        run: The run.
        size: Number of members; 0 ends the run after a step, with a checkpoint.
    """
    settings = run.settings
    if run.draining or run.phase == "ending":
        return "" if not size else "the run ends"
    if size and not settings.least <= size <= settings.most:
        return (
            f"{size} members were asked for; expected {settings.least} to "
            f"{settings.most}, as the run was started with, or 0 to end it"
        )
    if size and run.restarts and not run.stops:
        return (
            "the processes of this run cannot be stopped at a step; expected a loop of "
            "wh.train_elastic"
        )
    return ""


def resize(run: ElasticRun, now: float, event: ResizeEvent) -> None:
    """Fills new slots, or lets the members of the last slots leave after a step.

    Members that still start or compile are killed immediately. If only one member has
    the state, it stays until another member has it.
    """
    if resize_refusal(run, event.size):
        return
    if not event.size:
        terminate(run, now)
        return
    told = {} if event.devices is None else {"devices": list(event.devices)}
    record(run, now, "resized", size=event.size, **told)
    run.unplaced.intersection_update(run.slots)
    filled = {m.slot for m in run.present_members()} | run.starting | run.unplaced
    for slot in run.slots:
        if slot not in filled:
            run.refill(now, slot)
    leave_slots(run, now)


def leave_slots(run: ElasticRun, now: float) -> None:
    """Makes the members of removed slots leave."""
    why = f"the run has {run.size} members now"
    for member in run.present_members():
        if member.slot is None or member.slot in run.slots or member.leaving:
            continue
        if member.status in ("starting", "registered"):
            # While it starts or compiles, it reads no messages and has no state.
            record(run, now, "ended", name=member.name, why=why, how=Ending.DRAINED)
            run.outbox.append(KillEffect(name=member.name, pid=member.pid))
        elif member.status in ("ready", "active"):
            record(run, now, "leaving", name=member.name, why=why)
            if member.status == "ready":
                release(run, now, member)
