"""What members say, and what is written down of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from whalejax.membership.endings import Ending
from whalejax.membership.events import Register, Release, Started, StepCommit
from whalejax.membership.facts import difference, told_facts
from whalejax.membership.generations import ask, ask_again, change, release, unfit
from whalejax.membership.history import record
from whalejax.membership.phases import IN_A_STEP, STOPPED
from whalejax.membership.run import Member, Run
from whalejax.membership.run_ends import dismiss, end


_LOSSES_KEPT: Final = 10_000


def started(run: Run, now: float, event: Started) -> None:
    """A process was started; see ``Started``."""
    name, slot, pid, began = event.name, event.slot, event.pid, event.began
    where = {"agent": event.agent, "machine": event.machine} if event.agent else {}
    run.starting.discard(slot)
    run.lease.heard(name, now)
    record(run, now, "started", name=name, slot=slot, pid=pid, began=began, **where)
    run.outbox.append(Release(name=name))


def refusal(run: Run, name: str, fields: Mapping[str, Any]) -> str:
    """Why a process cannot take part under a name, by its fields; or nothing."""
    known = run.members.get(name)
    if known is not None and not known.is_there:
        return "this member was given up, and its generation is over"
    if run.phase == "ending" and known is None:
        return "the run is over"
    return difference(told_facts(fields), run.facts) if run.facts else ""


def register(run: Run, now: float, event: Register) -> None:
    """A member introduces itself; see ``Register``."""
    name, slot, fields = event.name, event.slot, event.fields
    if not run.facts:
        record(run, now, "facts", **told_facts(fields))
    ahead = fields["generation"] > run.generation
    record(
        run,
        now,
        "registered",
        name=name,
        **{k: fields[k] for k in ("host", "step", "token", "generation")},
    )
    known = run.members[name]
    known.pid = known.pid or (fields["pid"] if slot is not None else 0)
    known.host, known.port = fields["host"], fields["port"]
    known.step, known.connected = fields["step"], True
    run.lease.heard(name, now)
    _catch_up(run, now, known, ahead=ahead)


def _catch_up(run: Run, now: float, member: Member, *, ahead: bool) -> None:
    """Tell a member what it may have missed while it was not connected."""
    if run.phase == "ending":
        dismiss(run, now, member)
    elif member.released_at is not None:
        release(run, now, member)
    elif ahead and run.phase == "draining":
        ask(run, now, run.target, -1, phase="draining")
    elif ahead and run.phase in ("preparing", "running"):
        change(run, now, -1)  # The journal lacks its generation.
    elif run.phase in ("gathering", "preparing", "draining"):
        if member.name in run.target:
            ask_again(run, member.name)


def unrunnable(run: Run, now: float, name: str, why: str) -> None:
    """A process that has not joined cannot be run with what it was given.

    All are given the same. Where another has joined, it is this one that differs, and
    it fails like any other.
    """
    member = run.members[name]
    _failed(run, now, member, why)
    joined = any(m.token for m in run.members.values())
    if joined or run.formed or run.phase != "gathering":
        return
    record(run, now, "ended", name=name, status=None, how=Ending.FAILED, well=False)
    end(run, now, Ending.REFUSED, why)


def hear(run: Run, now: float, name: str, kind: str, fields: Mapping[str, Any]) -> None:
    """A member said something; what it repeats, for want of an answer, is left out."""
    member = run.members.get(name)
    if member is None or not member.is_there:
        run.send(name, "over", why="this member was given up", well=False)
        return
    run.lease.heard(name, now)
    number = fields.get("number", 0)
    if number and number <= member.reported:
        return
    member.reported = max(member.reported, number)
    match kind:
        case "beat":
            _beat(run, now, member, fields["phase"], fields["step"], fields["done"])
        case "committed":
            _committed(run, now, member, fields)
        case _:
            run.is_settled = False
            run.forget_left()
            _report(run, now, member, kind, fields)


def _report(
    run: Run, now: float, member: Member, kind: str, fields: Mapping[str, Any]
) -> None:
    """What is said seldom, and may change who takes part."""
    name = member.name
    match kind, fields:
        case "ready", _:
            if member.status == "registered":
                record(run, now, "ready", name=name)
        case "prepared", {"generation": generation, "step": step, "held": held}:
            if generation == run.generation:
                member.prepared, member.step = generation, step
                member.held = [(first, last) for first, last in held]
        case "suspect", {"generation": generation, "name": other, "why": why}:
            _suspect(run, now, member, generation, other, why)
        case "leaving", {"why": why}:
            if not member.leaving and member.status not in ("finished", "left"):
                record(run, now, "leaving", name=name, why=why)
                if member.status in ("registered", "ready"):
                    release(run, now, member)
        case "left", {"step": step}:
            # The same will hold of all, or of it alone: losses are equal in all
            # members, so that a condition on them is.
            member.step = max(member.step, step)
            if member.status == "active":
                record(run, now, "left", name=name, step=step)
        case "finished", {"step": step}:
            member.step = max(member.step, step)
            if member.status != "finished":
                record(run, now, "finished", name=name, step=step)
        case "failed", {"why": why}:
            _failed(run, now, member, why)
        case "unfit", {"count": count, "why": why}:
            unfit(run, now, count, why)
        case "written", {"step": step}:
            # It asks whether its checkpoint may take its name: not if it was given up.
            run.send(name, "keep", step=step)
        case "saved" | "not_saved" | "recovered", _:
            if kind in ("saved", "not_saved") and run.over is not None:
                run.saver_reported |= name == run.over.saver
            if kind == "recovered":  # From copies in memory, a checkpoint, or none.
                run.pace.begun(fields["step"], now)
            record(run, now, kind, name=name, **_told(fields))
        case "compiled_ahead" | "not_copied" | "note", _:
            record(run, now, kind, name=name, **_told(fields))
        case _:
            raise ValueError(f"a member said {kind!r}, which no rule is for")


def _beat(
    run: Run, now: float, member: Member, phase: str, step: int, done: int
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
            change(run, now, -1)  # It never heard that this one began.


def _committed(run: Run, now: float, member: Member, fields: Mapping[str, Any]) -> None:
    generation, step, loss = fields["generation"], fields["step"], fields["loss"]
    member.step = max(member.step, step)
    member.seconds, member.moved_at = fields["seconds"], now
    known = run.losses.get(step)
    if known is None or generation > known[0]:
        run.losses[step] = generation, loss
        assigned_in, first, later = run.assigned
        parts = fields["parts"]  # The first member alone tells them.
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
    run: Run, now: float, member: Member, step: int, loss: float, known: float
) -> None:
    """End a run whose members come to other losses from the same sums.

    A step that another generation redoes may be computed elsewhere, and so differ in
    its last bits; members of one generation add up the same numbers.
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
    run: Run, now: float, member: Member, generation: int, other: str, why: str
) -> None:
    record(run, now, "suspect", name=other, by=member.name, why=why)
    known = run.members.get(other)
    if known is None or known.status in ("left", "failed", "gone"):
        return  # That it cannot be reached is known.
    if generation == run.generation:
        run.broken_links.add(frozenset((other, member.name)))
        if run.suspected_at is None:
            run.suspected_at = now


def _told(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What a report tells, without the number that the member gave it."""
    return {key: value for key, value in fields.items() if key != "number"}


def _failed(run: Run, now: float, member: Member, why: str) -> None:
    """It ends by an error, and takes no part any more: the others do not wait."""
    record(run, now, "failed", name=member.name, why=why)
    run.failures.said(member.name, why)
    member.released_at = now
