"""Applies the events of a journal to a run.

A supervisor applies each event when it writes it. A restarted supervisor replays the
events by the same function, so it does not matter after which event one is killed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from whalejax.membership.elastic_run import ElasticRun, MemberRecord, Parts, RunOutcome
from whalejax.membership.events import WriteEvent
from whalejax.membership.exit_status import Ending
from whalejax.membership.settings import SupervisorSettings


def record(run: ElasticRun, now: float, event: str, **fields: Any) -> None:
    """Applies an event to a run, and queues it for the journal."""
    run.outbox.append(WriteEvent(event=event, fields=fields))
    apply(run, now, event, fields)


def replay_events(
    settings: SupervisorSettings, events: Iterable[Mapping[str, Any]]
) -> ElasticRun:
    """Returns the run that results from the events of a journal.

    Args:
        settings: Settings of the run.
        events: Events of one run, in order.

    >>> told = [{"event": "started", "name": "m1", "slot": 0, "pid": 7, "began": "1"}]
    >>> replay_events(SupervisorSettings(least=1, most=1), told).members["m1"].status
    'starting'
    """
    run = ElasticRun(settings=settings)
    for said in events:
        apply(run, 0.0, said["event"], said)
    return run


def apply(run: ElasticRun, now: float, event: str, fields: Mapping[str, Any]) -> None:
    """Applies an event to the journalled state of a run.

    Args:
        run: Run to change.
        now: The time, in seconds.
        event: Kind of the event; an unknown kind changes nothing.
        fields: Fields of the event.
    """
    name = fields.get("name")
    if name is not None:
        _apply_to_member(run, now, name, event, fields)
        return
    match event:
        case "preparing":
            run.generation, run.after = fields["generation"], fields["after"]
            run.phase = fields.get("phase", "gathering")
            run.target, run.well = _known_members(run, fields["members"]), set()
        case "begun":
            run.active, run.step = (
                _known_members(run, fields["members"]),
                fields["step"],
            )
            run.phase, run.formed = "running", True
            run.target, run.after, run.well = [], -1, set()
            first, later = (_parts(fields.get(name)) for name in ("first", "later"))
            run.assigned = fields["generation"], first, later
            for name in run.active:
                if run.members[name].status != "finished":
                    run.members[name].becomes("active", now)
        case "restarting":
            run.phase = "gathering"
        case "facts":
            run.facts = {k: v for k, v in fields.items() if k not in ("time", "event")}
        case "resized":
            run.size = fields["size"]
            if (devices := fields.get("devices")) is not None:
                run.devices = tuple(devices)
        case "adding_up":
            run.adding_up = fields["by"], fields["why"]
        case "draining":
            run.draining = True
        case "ending":
            how, text = str(fields.get("how")), fields.get("why", "")
            ending = Ending(how) if how in [*Ending] else Ending.FAILED
            run.over = RunOutcome(how=ending, text=text, saver=fields.get("saver", ""))
            run.phase = "ending"


def _apply_to_member(
    run: ElasticRun, now: float, name: str, event: str, fields: Mapping[str, Any]
) -> None:
    if event == "started":
        own = {k: fields.get(k, "") for k in ("slot", "pid", "began")}
        where = {k: fields.get(k, "") for k in ("agent", "machine")}
        run.members[name] = MemberRecord(name=name, since=now, **own, **where)
        return
    if event == "registered":
        run.members.setdefault(name, MemberRecord(name=name, slot=None, since=now))
    member = run.members.get(name)
    if member is None:
        return
    match event:
        case "registered":
            if member.status == "starting":
                member.becomes("registered", now)
            member.token = fields.get("token", "")
            run.generation = max(run.generation, fields.get("generation", 0))
        case "ready" | "finished" | "left" | "failed" as status:
            member.becomes(status, now)
        case "lost" | "ended":
            member.becomes("gone", now)
            run.lease.forget(name)
            if event == "ended" and fields.get("well"):
                run.well.add(name)
        case "leaving":
            member.leaving = True
        case "saved":
            run.checkpoint = fields["path"]


def _parts(told: Mapping[str, Iterable[Sequence[int]]] | None) -> Parts:
    return {n: [(a, b) for a, b in nodes] for n, nodes in (told or {}).items()}


def _known_members(run: ElasticRun, names: Iterable[str]) -> list[str]:
    """Returns the named members that are known, as the journal may lack a line."""
    return [name for name in names if name in run.members]
