"""Decides when to form a generation, of which members, and when a run ends."""

from __future__ import annotations

from typing import Final

from whalejax.membership.assignment import assign_micro_batches, ranks, repaired
from whalejax.membership.elastic_run import ElasticRun, MemberRecord, Phase
from whalejax.membership.exit_status import Ending
from whalejax.membership.history import record
from whalejax.membership.member_failures import (
    check_budget,
    count,
    lose,
    restart_members,
)
from whalejax.membership.phases import BETWEEN, FETCHING, RESTORING, SAVING
from whalejax.membership.run_ends import end
from whalejax.wire import run_messages as wire


_LONG: Final = frozenset({BETWEEN, RESTORING, SAVING})
"""Phases that cannot be interrupted."""

_PREPARE_STEPS: Final = 3

_BEATS_BEYOND: Final = 2
"""Number of successive heartbeats from a later step after which a member counts as
going on, although another member has left its loop."""


def settle(run: ElasticRun, now: float) -> None:
    """Forms a generation or ends the run, if one of them is due."""
    if _all_leave(run, now):
        terminate(run, now)
    if not _left_alike(run, now):
        match run.phase:
            case "gathering":
                _gather(run, now)
            case "preparing" | "draining":
                _await_prepared(run, now)
            case "running":
                _watch(run, now)


# Gathering members.


def _gather(run: ElasticRun, now: float) -> None:
    settings, members = run.settings, run.fitting()
    if run.short_since is None:
        run.short_since = now
    waited = now - run.short_since
    _release_stopped(run, now)
    coming, finishing = run.are_coming, run.is_finishing
    if len(members) >= settings.least or (members and finishing):
        if (
            len(members) == run.size
            or finishing
            or (run.formed and not run.restarts)
            or not (coming or run.failures.due or run.awaited)
            or (waited > settings.gather_seconds and len(members) >= run.expected)
        ):
            change(run, now, -1)
        return
    # Members that start or compile have deadlines of their own.
    if waited > settings.wait_seconds and not coming:
        gone = [m for m in run.members.values() if not m.is_there]
        names = ", ".join(m.name for m in gone) or "nobody"
        why = (
            f"{len(members)} of at least {settings.least} members are there, and no "
            f"other came in {waited:.0f} s; gone are {names}"
            f"{run.agents_text()}{run.checkpoint_text()}"
        )
        end(run, now, Ending.LOST, why)


def _release_stopped(run: ElasticRun, now: float) -> None:
    """Releases stopped members that asked to leave, unless their state is needed."""
    there = run.taking_part()
    newest = max((m.step for m in there if not m.leaving), default=-1)
    for member in there:
        stopped = member.leaving and member.prepared == run.generation
        if stopped and member.released_at is None and member.step <= newest:
            release(run, now, member)


def release(run: ElasticRun, now: float, member: MemberRecord) -> None:
    """Tells a member that asked to leave that it may end."""
    if member.released_at is None:
        member.released_at = now
    run.send(member.name, wire.RunEnded(why="drained", well=True))


# Running.


def _watch(run: ElasticRun, now: float) -> None:
    if run.restarts:
        if run.stops:
            _watch_collectives(run, now)
        return
    there = {m.name: m for m in run.taking_part()}
    if any(name not in there for name in run.active):
        change(run, now, -1)
        return
    if all(there[name].status == "finished" for name in run.active):
        end(run, now, Ending.COMPLETE, "")
        return
    # Near the end of the run, members no longer join.
    boundary = run.boundary()
    if run.steps and boundary >= run.steps:
        return
    members = run.candidates()
    leaves = any(there[name].leaving for name in run.active)
    if members and set(members) != set(run.active):
        if leaves or len(members) >= run.settings.least:
            change(run, now, boundary)


def _watch_collectives(run: ElasticRun, now: float) -> None:
    """Stops members with collectives at a step, if some leave or more could join."""
    there = run.taking_part()
    if len(there) < len(run.active) or run.is_finishing:
        return
    if not run.pace.moves:
        return
    ready = [m for m in run.present_members() if m.status == "ready" and not m.leaving]
    members = run.fitting()
    enough = len(members) > len(there)
    if enough and len(members) < run.size:
        # Wait for all members that are starting, so that the run stops only once.
        coming = run.are_coming or bool(run.failures.due)
        waited = now - min(m.since for m in ready)
        enough = not coming or waited > run.settings.gather_seconds
    if enough or any(m.leaving for m in there):
        ask(run, now, [m.name for m in there], -1, phase="preparing")


def unfit(run: ElasticRun, now: float, size: int, why: str) -> None:
    """Records that no plan was found for a number of members.

    Numbers above the maximum are ignored. If no number has a plan, the run ends.
    """
    if size > run.settings.most:
        return
    if size not in run.unfit:
        run.unfit[size] = why
        record(run, now, "unfit", count=size, why=why)
    if run.phase in ("draining", "ending"):
        return
    sizes = range(run.settings.least, run.settings.most + 1)
    if all(size in run.unfit for size in sizes):
        every = "; ".join(dict.fromkeys(run.unfit[size] for size in sizes))
        text = f"there is no plan for {sizes[0]} to {sizes[-1]} processes: {every}"
        if run.pace.has_committed:
            end(run, now, Ending.FAILED, f"{text}{run.checkpoint_text()}")
        else:
            end(run, now, Ending.REFUSED, text)
    elif run.phase == "running" and len(run.active) == size:
        restart_members(run, now)


def _left_alike(run: ElasticRun, now: float) -> bool:
    """Handles members that left their loops; returns whether ``settle`` is then done.

    If all members left at one step, the run is complete once they have ended without an
    error. An error in the loop's body leaves the loop too, hence the wait. If other
    members go on, those that left count as failed.
    """
    if run.restarts or run.phase in ("draining", "ending"):
        return False
    there = run.taking_part()
    left = [m for m in there if m.status == "left"]
    if not left and not run.well:
        return False
    others = [m for m in there if m.status == "active"]
    if not others:
        waited = min((now - m.since for m in left), default=0.0)
        if waited > run.settings.finish_seconds or (run.well and not left):
            end(run, now, Ending.COMPLETE, "")
        return bool(left) or run.phase == "ending"
    if any(m.beyond >= _BEATS_BEYOND for m in there):
        _fail_left(run, now, [m.name for m in left] + sorted(run.well))
        change(run, now, -1)
        return False
    asked = [run.members[name].status for name in run.target]
    steps = [run.members[n].step for n in {*run.well, *(m.name for m in left)}]
    gone = len(others) + len(left) + len(run.well) < len(run.active)
    behind = any(m.step < min(steps) for m in others)
    if "left" in asked or (run.phase == "running" and gone and behind):
        # The others may wait for the gradients of a member that is gone.
        change(run, now, -1)
    return run.phase == "running"


def _fail_left(run: ElasticRun, now: float, names: list[str]) -> None:
    for name in names:
        member = run.members[name]
        why = f"its loop was left at step {member.step}, where others go on"
        if member.is_there:
            lose(run, now, member, why)
        else:
            count(run, now, member, why)
            check_budget(run, now)


# A new generation.


def change(run: ElasticRun, now: float, after: int) -> None:
    """Asks the present members for a new generation after a step; -1: immediately."""
    if run.phase == "ending":
        return
    members = run.fitting()
    chosen = set(members)
    leaving = [
        m.name
        for m in run.taking_part()
        if m.status == "active" and m.leaving and m.name not in chosen
    ]
    target = ranks(run.active, members) + leaving
    enough = len(members) >= run.settings.least or run.is_finishing
    ask(run, now, target, after, phase="preparing" if enough else "gathering")
    if not enough:
        run.short_since = now
        record(run, now, "short", members=members, least=run.settings.least)


def ask(
    run: ElasticRun, now: float, target: list[str], after: int, *, phase: Phase
) -> None:
    """Asks members to stop after a step, for a new generation."""
    run.asked_at, run.suspected_at = now, None
    run.broken_links.clear()
    record(
        run,
        now,
        "preparing",
        generation=run.generation + 1,
        members=list(target),
        after=after,
        phase=phase,
    )
    for name in target:
        ask_again(run, name)


def ask_again(run: ElasticRun, name: str) -> None:
    """Sends one member the current request to stop."""
    run.send(name, wire.Prepare(generation=run.generation, after=run.after))


def _await_prepared(run: ElasticRun, now: float) -> None:
    if run.stops and (run.is_finishing or run.well):
        return  # The members reached the last step before the request.
    absent = ("gone", "left", "failed")
    asked = [n for n in run.target if run.members[n].status not in absent]
    if len(asked) < len(run.target) and run.phase != "draining":
        change(run, now, -1)
        return
    late = [n for n in asked if run.members[n].prepared != run.generation]
    waited = now - run.asked_at
    if not late:
        _drain(run, now) if run.phase == "draining" else _form(run, now)
        return
    stuck = [n for n in late if _is_late(run, now, run.members[n])]
    for name in stuck:
        why = f"it did not stop for generation {run.generation} in {waited:.0f} s"
        lose(run, now, run.members[name], why)
    if not stuck and run.after >= 0 and waited > run.pace.patience(run.after):
        # Some stopped before others got the request, and the others now wait for them.
        ask(run, now, asked, -1, phase=run.phase)


def _is_late(run: ElasticRun, now: float, member: MemberRecord) -> bool:
    limit = max(run.settings.prepare_seconds, _PREPARE_STEPS * run.pace.median)
    since = run.asked_at
    if member.phase in _LONG:
        limit = max(limit, run.limit(member) or 0.0)
        since = max(since, member.moved_at)
    elif member.phase == FETCHING:
        since = max(since, member.moved_at)
    return now - since > limit


def _form(run: ElasticRun, now: float) -> None:
    asked = [run.members[name] for name in run.target]
    if run.stops and any(m.status == "active" for m in asked):
        # With collectives, all members restart. Wait for as many members as now, or the
        # next generation could be smaller.
        run.expected = len(run.fitting())
        restart_members(run, now)
        return
    step = max(m.step for m in asked)
    holds = any(m.step == step and not m.leaving for m in asked)
    if step < 0 or holds:
        for member in asked:
            if member.leaving:
                release(run, now, member)
        asked = [m for m in asked if not m.leaving]
    # If all members leave, they stay for one more step, to hand over the state.
    if asked:
        _begin(run, now, asked, step)
    else:
        change(run, now, -1)  # All members have left since the request.


def _begin(run: ElasticRun, now: float, members: list[MemberRecord], step: int) -> None:
    holders = [m.name for m in members if m.step == step and step >= 0]
    holders = holders or [members[0].name]
    having = set(holders)
    behind = [m.name for m in members if m.name not in having]
    sources = {n: holders[i % len(holders)] for i, n in enumerate(behind)}
    seconds = {m.name: m.seconds for m in members}
    held = {m.name: m.held for m in members if m.step == step}
    size, names = run.micro_batches, [m.name for m in members]
    run.short_since, run.expected = None, 0
    run.pace.start_generation(step, now)
    kept = sum(last - first for nodes in held.values() for first, last in nodes)
    first, later = (
        repaired(names, seconds, held, size),
        assign_micro_batches(names, seconds, size),
    )
    record(
        run,
        now,
        "begun",
        generation=run.generation,
        members=names,
        step=step,
        kept_micro_batches=kept,
        first=first,
        later=later,
    )
    begin = wire.Begin(
        generation=run.generation,
        members=[(m.name, m.host, m.port) for m in members],
        step=step,
        sources=sources,
        first=first,
        later=later,
    )
    for member in members:
        member.held, member.beyond = (), 0
        member.moved_at = now
        run.send(member.name, begin)


# The end.


def _all_leave(run: ElasticRun, now: float) -> bool:
    """Returns whether all members with the state leave and no other can take it over.

    Slots whose restart is delayed after repeated failures do not count.
    """
    there = [m for m in run.taking_part() if m.status == "active"]
    if not there or not all(m.leaving for m in there):
        return False
    if run.restarts and not run.stops:
        return False
    if run.candidates() or run.are_coming:
        return False
    return not any(due <= now for due in run.failures.due.values())


def terminate(run: ElasticRun, now: float) -> None:
    """Starts the end of the run: members stop at a step, and one saves its state."""
    if run.draining or run.phase == "ending":
        return
    record(run, now, "draining", step=run.pace.step)
    begin_draining(run, now)


def begin_draining(run: ElasticRun, now: float) -> None:
    """Asks members to stop for the end; ends the run at once if no step was done."""
    there = [m for m in run.taking_part() if m.status == "active"]
    # The steps of members that have not reconnected yet are unknown.
    newest = max([run.pace.step, *(m.step for m in there)])
    alone = run.restarts and not (run.stops and run.phase != "gathering")
    if alone or not there or newest < 0:
        where = run.checkpoint_text()
        text = f"the run was asked to end before its first step{where}"
        if run.restarts and run.formed:
            text = "the run was asked to end"
        end(run, now, Ending.INTERRUPTED, text)
        return
    ask(run, now, [m.name for m in there], run.boundary(), phase="draining")


def _drain(run: ElasticRun, now: float) -> None:
    asked = [run.members[name] for name in run.target]
    there = [m for m in asked if m.status not in ("failed", "gone")]
    newest = max((m.step for m in there), default=-1)
    if newest >= 0:
        why = f"the run was asked to end, after step {newest}"
        end(run, now, Ending.DRAINED, why)
    else:
        why = "the run was asked to end, and its members were lost before they stopped"
        end(run, now, Ending.INTERRUPTED, f"{why}{run.checkpoint_text()}")
