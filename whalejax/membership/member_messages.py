"""Handles the messages of members and records them."""

from __future__ import annotations

import math
from typing import Final

from whalejax.agreement.facts import difference
from whalejax.membership.elastic_run import ElasticRun, MemberRecord, Parts
from whalejax.membership.events import RegisterEvent, ReleaseEffect, Started, StepCommit
from whalejax.membership.exit_status import Ending
from whalejax.membership.generations import ask, ask_again, change, release, unfit
from whalejax.membership.history import record
from whalejax.membership.phases import IN_A_STEP, STOPPED
from whalejax.membership.run_ends import dismiss, end
from whalejax.wire import run_messages as wire


_LOSSES_KEPT: Final = 10_000


def started(run: ElasticRun, now: float, event: Started) -> None:
    """Records the start of a process; see ``Started``."""
    name, slot, pid, began = event.name, event.slot, event.pid, event.began
    where = {"agent": event.agent, "machine": event.machine} if event.agent else {}
    run.starting.discard(slot)
    run.lease.renew(name, now)
    record(run, now, "started", name=name, slot=slot, pid=pid, began=began, **where)
    run.outbox.append(ReleaseEffect(name=name))


def refusal(run: ElasticRun, name: str, message: wire.Register) -> str:
    """Returns why a process cannot take part under a name; empty if it can."""
    known = run.members.get(name)
    if known is not None and not known.is_there:
        return "this member was given up, and its generation is over"
    if run.phase == "ending" and known is None:
        return "the run is over"
    own = _facts(message)
    return difference("this member", own, run.facts) if run.facts else ""


def _facts(message: wire.Register) -> dict[str, str]:
    return {
        **message.facts,
        "micro-batches": str(message.micro_batches),
        "steps": str(message.steps),
        "save": message.save,
    }


def register(run: ElasticRun, now: float, event: RegisterEvent) -> None:
    """Registers a member; see ``RegisterEvent``."""
    name, message = event.name, event.message
    if not run.facts:
        record(run, now, "facts", **_facts(message))
    ahead = message.generation > run.generation
    record(
        run,
        now,
        "registered",
        name=name,
        host=message.host,
        step=message.step,
        token=message.token,
        generation=message.generation,
    )
    known = run.members[name]
    if event.slot is not None:
        known.pid = known.pid or message.pid
    known.host, known.port = message.host, message.port
    known.step, known.connected = message.step, True
    run.lease.renew(name, now)
    _catch_up(run, now, known, ahead=ahead)


def _catch_up(
    run: ElasticRun, now: float, member: MemberRecord, *, ahead: bool
) -> None:
    """Sends a member the messages that it may have missed while disconnected."""
    if run.phase == "ending":
        dismiss(run, now, member)
    elif member.released_at is not None:
        release(run, now, member)
    elif ahead and run.phase == "draining":
        ask(run, now, run.target, -1, phase="draining")
    elif ahead and run.phase in ("preparing", "running"):
        change(run, now, -1)  # The member's generation is not in the journal.
    elif run.phase in ("gathering", "preparing", "draining"):
        if member.name in run.target:
            ask_again(run, member.name)


def unrunnable(run: ElasticRun, now: float, name: str, why: str) -> None:
    """Handles a process that has not joined and cannot run with its arguments.

    All processes get the same arguments, so this ends the run as refused. But if a
    process has joined, only this one is at fault, and counts as a failed member.
    """
    member = run.members[name]
    _failed(run, now, member, why)
    if not run.has_no_member:
        return
    record(run, now, "ended", name=name, status=None, how=Ending.FAILED, well=False)
    end(run, now, Ending.REFUSED, why)


def hear(run: ElasticRun, now: float, name: str, message: wire.OfMember) -> None:
    """Handles a message of a member; ignores reports that were received before."""
    member = run.members.get(name)
    if member is None or not member.is_there:
        run.send(name, wire.RunEnded(why="this member was given up", well=False))
        return
    run.lease.renew(name, now)
    match message:
        case wire.Beat(phase=phase, step=step, done=done):
            _beat(run, now, member, phase, step, done)
        case wire.Report(number=number) if 0 < number <= member.reported:
            pass
        case wire.Committed():
            member.reported = max(member.reported, message.number)
            _committed(run, now, member, message)
        case wire.Report(number=number):
            member.reported = max(member.reported, number)
            run.is_settled = False
            run.forget_left()
            _report(run, now, member, message)


def _report(
    run: ElasticRun, now: float, member: MemberRecord, message: wire.Report
) -> None:
    name = member.name
    match message:
        case wire.Ready() if member.status == "registered":
            record(run, now, "ready", name=name)
        case wire.Prepared(generation=generation) if generation == run.generation:
            member.prepared, member.step = generation, message.step
            member.held = message.held
        case wire.Suspect(generation=generation, name=other, why=why):
            _suspect(run, now, member, generation, other, why)
        case wire.Leaving(why=why):
            if not member.leaving and member.status not in ("finished", "left"):
                record(run, now, "leaving", name=name, why=why)
                if member.status in ("registered", "ready"):
                    release(run, now, member)
        case wire.MemberLeft(step=step):
            # All members have the same losses, so a condition on the loss ends all
            # loops at the same step.
            member.step = max(member.step, step)
            if member.status == "active":
                record(run, now, "left", name=name, step=step)
        case wire.Finished(step=step):
            member.step = max(member.step, step)
            if member.status != "finished":
                record(run, now, "finished", name=name, step=step)
        case wire.Failed(why=why):
            _failed(run, now, member, why)
        case wire.Unfit(count=count, why=why):
            unfit(run, now, count, why)
        case wire.CheckpointWritten(step=step):
            # A member that was given up must not publish its checkpoint.
            run.send(name, wire.Keep(step=step))
        case wire.Saved() | wire.NotSaved():
            if run.over is not None:
                run.saver_reported |= name == run.over.saver
            _record_report(run, now, name, message)
        case wire.Recovered(step=step):
            _record_report(run, now, name, message)
            run.pace.start_generation(step, now)
        case (
            wire.NotCopied() | wire.CompiledAhead() | wire.TablesPlaced() | wire.Note()
        ):
            _record_report(run, now, name, message)


def _record_report(
    run: ElasticRun, now: float, name: str, message: wire.Report
) -> None:
    told = {key: told for key, told in message.fields.items() if key != "number"}
    record(run, now, message.kind, name=name, **told)


def _beat(
    run: ElasticRun, now: float, member: MemberRecord, phase: str, step: int, done: int
) -> None:
    if phase != member.phase or done != member.done:
        member.phase, member.done, member.moved_at = phase, done, now
    member.step = max(member.step, step)
    left_at = run.first_left()
    goes_on = left_at is not None and step >= left_at and member.status == "active"
    if goes_on and phase in IN_A_STEP:
        member.beyond, run.is_settled = member.beyond + 1, False
    else:
        member.beyond = 0
    if phase == STOPPED and run.phase == "running":
        waited = now - run.pace.at > 2 + 2 * run.settings.beat_seconds
        if waited and member.name in run.active:
            change(run, now, -1)  # The member missed the start of this generation.


def _committed(
    run: ElasticRun, now: float, member: MemberRecord, message: wire.Committed
) -> None:
    generation, step, loss = message.generation, message.step, message.loss
    member.step = max(member.step, step)
    member.seconds, member.moved_at = message.seconds, now
    known = run.losses.get(step)
    if known is None or generation > known[0]:
        run.losses[step] = generation, loss
        assigned_in, first, later = run.assigned
        parts: Parts = message.parts  # Only the first member reports them.
        if not parts and generation == assigned_in:
            parts = first if step == run.step + 1 else later
        run.outbox.append(StepCommit(step, generation, loss, parts))
    elif generation == known[0]:
        _compare(run, now, member, step, loss, known[1])
    while len(run.losses) > _LOSSES_KEPT:
        del run.losses[next(iter(run.losses))]
    if step > run.pace.step:
        run.pace.committed(step, now)
        run.failures.progressed(step)
        run.reconnected_links.clear()


def _compare(
    run: ElasticRun,
    now: float,
    member: MemberRecord,
    step: int,
    loss: float,
    known: float,
) -> None:
    """Ends the run if its members compute different losses from the same sums.

    Members of one generation add the same numbers. A later generation may repeat the
    step on other devices, with a loss that differs in its last bits.
    """
    if known == loss or (math.isnan(known) and math.isnan(loss)):
        return
    why = (
        f"{member.name} came to the loss {loss!r} in step {step}, where others came to "
        f"{known!r} from the same sums: its processor or memory is not to be trusted"
        f"{run.checkpoint_text()}"
    )
    end(run, now, Ending.FAILED, why, saves=False)


def _suspect(
    run: ElasticRun,
    now: float,
    member: MemberRecord,
    generation: int,
    other: str,
    why: str,
) -> None:
    record(run, now, "suspect", name=other, by=member.name, why=why)
    known = run.members.get(other)
    if known is None or known.status in ("left", "failed", "gone"):
        return
    if generation == run.generation:
        run.broken_links.add(frozenset((other, member.name)))
        if run.suspected_at is None:
            run.suspected_at = now


def _failed(run: ElasticRun, now: float, member: MemberRecord, why: str) -> None:
    """Records that a member ends by an error; the others do not wait for it."""
    record(run, now, "failed", name=member.name, why=why)
    run.failures.record_error(member.name, why)
    member.released_at = now
