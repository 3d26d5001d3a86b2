"""The one function by which a run goes on: an event comes in, what is to be done out.

No socket, process or clock is touched here: what happened comes in with the time of it,
so that every order of events can be tried in a test with a clock of its own.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace
from typing import Any, Final

from whalejax.membership.effects import Effect
from whalejax.membership.events import (
    AgentJoined,
    AgentLeft,
    AgentLost,
    Begin,
    Deferred,
    Disconnected,
    EndAtOnce,
    Event,
    Exited,
    Heard,
    NotStarted,
    ReductionProposed,
    Register,
    Resume,
    RoomFreed,
    Started,
    Terminate,
    Tick,
    Unrunnable,
)
from whalejax.membership.failures import Failure
from whalejax.membership.generations import (
    begin_draining,
    change,
    settle,
    terminate,
)
from whalejax.membership.history import History, MemberRecord, RunRecord
from whalejax.membership.lease import shifted
from whalejax.membership.losses import (
    agent_lost,
    check_budget,
    exited,
    lose,
    start_due,
)
from whalejax.membership.members import hear, register, started, unrunnable
from whalejax.membership.phases import COMPUTING
from whalejax.membership.run import Member, Run
from whalejax.membership.run_ends import end_again, end_at_once


_SUSPECT_SECONDS: Final = 1.0
"""How long the end of a member may lag behind that of its connections."""


def react(run: Run, now: float, event: Event) -> list[Effect]:
    """Take an event, and say what is to be done.

    Who takes part is decided once a turn of the loop, at ``Tick``.

    Args:
        run: changed by it.
        now: the time, in seconds.
        event: what happened.

    Returns:
        What is to be done, in this order.

    >>> from whalejax.membership.settings import SupervisorSettings
    >>> run = Run(settings=SupervisorSettings(least=1, most=2))
    >>> react(run, 0.0, Begin())
    [Start(slot=0), Start(slot=1)]
    """
    match event:
        case Heard(name=name, kind=kind, fields=said):
            hear(run, now, name, kind, said)
        case Tick():
            _tick(run, now)
        case Register():
            register(run, now, event)
        case Disconnected(name=name):
            if name in run.members:
                run.members[name].connected = False
        case Exited(name=name, status=status, log=log):
            if not run.is_settled:
                settle(run, now)  # What it said before counts first.
            exited(run, now, name, status, log)
        case Unrunnable(name=name, why=why):
            unrunnable(run, now, name, why)
        case ReductionProposed(by=by, why=why):
            if by and not run.adding_up[0]:
                run.adding_up = by, why
                run.record("adding_up", by=by, why=why)
        case Begin():
            for slot in range(run.settings.most + run.settings.spares):
                run.failures.due[slot] = now
            _tick(run, now)
        case Resume():
            _resume(run, now, event)
        case Terminate():
            terminate(run, now)
        case EndAtOnce():
            end_at_once(run, now)
        case Started():
            started(run, now, event)
        case _:
            _place(run, now, event)
    if not isinstance(event, Heard | Disconnected):
        run.is_settled = isinstance(event, Tick)
        run.forget_left()
    effects, run.outbox = run.outbox, []
    return effects


def _place(run: Run, now: float, event: Event) -> None:
    """What comes of starting processes, and of the agents that hold them."""
    match event:
        case NotStarted(slot=slot, why=why):
            run.starting.discard(slot)
            run.record("not_started", slot=slot, why=why)
            hold = max(run.settings.hold_seconds, run.failures.hold(now, slot))
            run.failures.due[slot] = now + hold
        case Deferred(slot=slot, until=None):
            run.starting.discard(slot)
            run.unplaced.add(slot)
        case Deferred(slot=slot, until=float(at)):
            run.starting.discard(slot)
            run.failures.due[slot] = at
        case RoomFreed(count=room):
            _fill_room(run, now, room)
        case AgentJoined(agent=agent, host=host, room=room):
            run.record("agent_joined", agent=agent, host=host, room=room)
            run.awaited.discard(agent)
            run.agents[agent] = room
            _fill_room(run, now, room)
        case AgentLeft(agent=agent):
            run.record("agent_left", agent=agent)
            run.agents.pop(agent, None)
        case AgentLost(agent=agent, why=why):
            agent_lost(run, now, agent, why)


def _fill_room(run: Run, now: float, room: int) -> None:
    for slot in sorted(run.unplaced)[:room]:
        run.unplaced.discard(slot)
        run.failures.due.setdefault(slot, now)


# Time.


def _tick(run: Run, now: float) -> None:
    stood = run.lease.turn(now)
    if stood:
        _forgive(run, now, stood)
    if run.phase != "ending":  # Else the loop ends what has not ended in time.
        silent = run.lease.overdue(now)
        for member in [*run.members.values()]:
            why = _overdue(run, now, member, silent.get(member.name))
            if why and run.over is None:
                lose(run, now, member, why)
    if not run.restarts:  # Else steps are between the processes, which watch over them.
        check_step(run, now)
    start_due(run, now)
    settle(run, now)


def _forgive(run: Run, now: float, seconds: float) -> None:
    """The supervisor was frozen, and could not have heard of anybody meanwhile."""
    for member in run.there():
        member.moved_at = shifted(member.moved_at, seconds, now)
        member.since = shifted(member.since, seconds, now)
    run.pace.at = min(run.pace.at + seconds, now)
    run.asked_at = min(run.asked_at + seconds, now)
    if run.short_since is not None:
        run.short_since = min(run.short_since + seconds, now)
    if run.suspected_at is not None:
        run.suspected_at = min(run.suspected_at + seconds, now)


def _overdue(run: Run, now: float, member: Member, silent: float | None) -> str:
    """Why a member is given up now, or nothing."""
    settings = run.settings
    match member.status:
        case "gone":
            return ""
        case "starting":
            waited = now - member.since
            if member.slot is not None and waited > settings.start_seconds:
                return f"it said nothing in {waited:.0f} s after its start"
            return ""
        case "registered" if now - member.since > settings.compile_seconds:
            return f"it was not ready for steps after {now - member.since:.0f} s"
    if silent is not None:
        return f"it was silent for {silent:.1f} s"
    released = member.released_at
    if released is not None and now - released > settings.finish_seconds:
        return f"it did not end in {now - released:.0f} s after it was let go"
    return ""


def check_step(run: Run, now: float) -> None:
    """Give up who holds a step up; connect anew where nobody can be named."""
    at = run.suspected_at
    if at is not None and run.phase == "running" and now - at > _SUSPECT_SECONDS:
        _connect_anew(run, now)
    if run.phase != "running":
        return
    limit = run.pace.limit()
    there = [m for m in run.taking_part() if m.status == "active"]
    limits = [run.limit(member, limit) for member in there]
    for member, own in zip(there, limits, strict=True):
        if own is not None and now - member.moved_at > own:
            step = member.phase in (COMPUTING, "")
            what = "in a step" if step else f"({member.phase})"
            lose(run, now, member, f"it did not move on {what} for {own:.0f} s")
    moved_at = max([run.pace.at, *(m.moved_at for m in there)])
    if there and now - moved_at > limit and not any(limits):
        run.record("stuck", seconds=limit, members=list(run.active))
        why, since = "waited for each other", run.pace.at
        run.failures.count(Failure(at=now, since=since, name="all members", why=why))
        check_budget(run, now)
        change(run, now, -1)


def _connect_anew(run: Run, now: float) -> None:
    """Members cannot reach each other, though all reach the supervisor.

    The first time they try again. Of those whose link breaks again, one is given up:
    who has most such links, and of two alike not the one with the newer state.
    """
    there = {m.name: m for m in run.taking_part()}
    links = {link for link in run.broken_links if link <= there.keys()}
    if any(not there[name].connected for link in links for name in link):
        run.suspected_at = now  # It is coming back, or its lease will tell.
        return
    run.suspected_at = None
    again = links & run.reconnected_links
    run.reconnected_links |= links
    if again:
        ends = Counter(name for link in again for name in link)
        order = [*there]
        worst = max(ends, key=lambda n: (ends[n], -there[n].step, order.index(n)))
        lose(run, now, there[worst], "other members cannot reach it")
    change(run, now, -1)


# The journal.


def run_history(run: Run) -> History:
    """What a journal must tell of this run by now."""
    own = {f.name: getattr(run, f.name) for f in fields(RunRecord)}
    members = {name: MemberRecord(**_record(m)) for name, m in run.members.items()}
    return History(members=members, **own)


def _record(member: MemberRecord) -> dict[str, Any]:
    return {f.name: getattr(member, f.name) for f in fields(MemberRecord)}


def _resume(run: Run, now: float, event: Resume) -> None:
    """Go on where a supervisor that was killed has left the run; see ``Resume``.

    Its members are given time to come back.
    """
    told, before = event.told, run.generation
    for f in fields(RunRecord):
        setattr(run, f.name, getattr(told, f.name))
    run.generation, run.asked_at = max(before, told.generation), now
    for name, one in told.members.items():
        run.members[name] = Member(name=name, since=now, moved_at=now, **_record(one))
        if one.status != "gone":
            run.lease.expect(name, now + run.settings.rejoin_seconds)
    run.losses = dict(event.losses)
    since = [s for s, (g, _) in event.losses.items() if g >= told.generation]
    run.pace.begun(max([told.step, *since]), now)
    for name, error in told.errors.items():
        run.failures.said(name, error)
    for failure in told.failed:
        at, began = now - event.wall + failure.at, now - event.wall + failure.since
        run.failures.count(replace(failure, at=at, since=began))
        if failure.at < event.committed_at:
            run.failures.progressed()
    if run.phase not in ("draining", "ending"):
        taken = {m.slot for m in run.there()}
        for slot in range(run.settings.most + run.settings.spares):
            if slot not in taken:
                run.failures.due[slot] = now
    if run.over is not None:
        end_again(run)
    elif run.draining and run.phase != "draining":
        begin_draining(run, now)
