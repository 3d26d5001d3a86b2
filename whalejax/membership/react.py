"""The function that drives a run: it takes an event and returns effects.

It touches no socket, process or clock, and each event comes with its time. So a test
can try any order of events.
"""

from __future__ import annotations

from whalejax.membership import (
    dead_members,
    generations,
    member_failures,
    member_messages,
    resizing,
    run_ends,
)
from whalejax.membership import events as ev
from whalejax.membership.elastic_run import ElasticRun
from whalejax.membership.history import apply, record
from whalejax.membership.restart_policy import Failure


def react(run: ElasticRun, now: float, event: ev.Event) -> list[ev.Effect]:
    """Applies an event to a run, and returns its effects.

    It chooses the members of a generation at ``Tick``, once per turn of the loop, and
    before it handles the end of a process.

    Args:
        run: Run to change.
        now: The time, in seconds.
        event: Event that happened.

    Returns:
        Effects to carry out, in this order.

    >>> from whalejax.membership.settings import SupervisorSettings
    >>> run = ElasticRun(settings=SupervisorSettings(least=1, most=2))
    >>> react(run, 0.0, ev.StartsAllowedEvent())
    [StartEffect(slot=0), StartEffect(slot=1)]
    """
    match event:
        case ev.MemberMessageEvent(name=name, message=message):
            member_messages.hear(run, now, name, message)
        case ev.Tick():
            _tick(run, now)
        case ev.RegisterEvent():
            member_messages.register(run, now, event)
        case ev.Disconnected(name=name):
            if name in run.members:
                run.members[name].connected = False
        case ev.ProcessExitEvent(name=name, status=status, log=log):
            if not run.is_settled:
                generations.settle(run, now)  # Messages before the end count first.
            member_failures.exited(run, now, name, status, log)
        case ev.Unrunnable(name=name, why=why):
            member_messages.unrunnable(run, now, name, why)
        case ev.ReductionProposed(by=by, why=why):
            if by and not run.adding_up[0]:
                record(run, now, "adding_up", by=by, why=why)
        case ev.StartsAllowedEvent():
            for slot in run.slots:
                run.failures.due[slot] = now
            _tick(run, now)
        case ev.Resume():
            _resume(run, now, event)
        case ev.Terminate(at_once=True):
            run_ends.end_at_once(run, now)
        case ev.Terminate():
            generations.terminate(run, now)
        case ev.ResizeEvent():
            resizing.resize(run, now, event)
        case ev.Started():
            member_messages.started(run, now, event)
            resizing.leave_slots(run, now)  # The run may have been resized meanwhile.
        case _:
            _place(run, now, event)
    if not isinstance(event, ev.MemberMessageEvent | ev.Disconnected):
        run.is_settled = isinstance(event, ev.Tick)
        run.forget_left()
    effects, run.outbox = run.outbox, []
    return effects


def _place(run: ElasticRun, now: float, event: ev.Event) -> None:
    match event:
        case ev.NotStarted(slot=slot, why=why):
            run.starting.discard(slot)
            record(run, now, "not_started", slot=slot, why=why)
            hold = max(run.settings.hold_seconds, run.failures.hold(now, slot))
            run.failures.due[slot] = now + hold
        case ev.Deferred(slot=slot, until=at):
            run.starting.discard(slot)
            if at is None:
                run.unplaced.add(slot)
            else:
                run.failures.due[slot] = at
        case ev.RoomFreed(rooms=room):
            _fill_room(run, now, room)
        case ev.AgentJoined(agent=agent, host=host, room=room):
            record(run, now, "agent_joined", agent=agent, host=host, room=room)
            run.awaited.discard(agent)
            run.agents[agent] = room
            _fill_room(run, now, room)
        case ev.AgentLeft(agent=agent):
            record(run, now, "agent_left", agent=agent)
            run.agents.pop(agent, None)
        case ev.AgentLost(agent=agent, why=why):
            member_failures.agent_lost(run, now, agent, why)


def _fill_room(run: ElasticRun, now: float, room: int) -> None:
    # A slot with its own device needs room on that device's host, so try all slots.
    for slot in sorted(run.unplaced)[: len(run.unplaced) if run.devices else room]:
        run.unplaced.discard(slot)
        run.failures.due.setdefault(slot, now)


# Time.


def _tick(run: ElasticRun, now: float) -> None:
    dead_members.give_up_overdue(run, now)
    member_failures.start_due(run, now)
    generations.settle(run, now)


def _resume(run: ElasticRun, now: float, event: ev.Resume) -> None:
    """Resumes the run of a killed supervisor, whose members get time to reconnect."""
    before, newest = run.generation, event.losses
    for said in event.events:
        apply(run, now, said["event"], said)
    since = [step for step, (made_in, _) in newest.items() if made_in >= run.generation]
    run.generation, run.asked_at = max(before, run.generation), now
    for member in run.present_members():
        member.moved_at = now
        run.lease.expect(member.name, now + run.settings.rejoin_seconds)
    run.losses = dict(newest)
    run.pace.start_generation(max([run.step, *since]), now)
    _count_again(run, now - event.wall, event)
    if run.phase not in ("draining", "ending"):
        taken = {m.slot for m in run.present_members()}
        for slot in run.slots:
            if slot not in taken:
                run.failures.due[slot] = now
    if run.over is not None:
        run_ends.end_again(run)
    elif run.draining and run.phase != "draining":
        generations.begin_draining(run, now)


def _count_again(run: ElasticRun, shift: float, event: ev.Resume) -> None:
    """Counts the failures in a journal; ``shift`` converts its times to this clock."""
    for said in event.events:
        match said:
            case {"event": "failed", "name": name, "why": why}:
                run.failures.record_error(name, why)
    for said in event.events:
        match said:
            case {"event": "lost" | "ended", "counts": True, "name": name, "why": why}:
                at = said.get("time", 0.0)
                failure = Failure(
                    at=shift + at,
                    since=shift + at - said.get("seconds", 0.0),
                    name=name,
                    why=why,
                    error=said.get("said", ""),
                    step=said["step"],
                )
                run.failures.count(failure)
                if at < event.committed_at:
                    run.failures.progressed()
