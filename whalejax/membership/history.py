"""What the events of a journal tell of a run: one pure function of their list.

A supervisor that was killed goes on from this, and a living one must agree with it at
any time, so that it does not matter behind which event it is killed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from whalejax.membership.endings import Ending
from whalejax.membership.failures import Failure


Phase = Literal["gathering", "preparing", "running", "draining", "ending"]
Status = Literal[
    "starting", "registered", "ready", "active", "finished", "left", "failed", "gone"
]


@dataclass(slots=True, kw_only=True)
class MemberRecord:
    """A member, as events tell of it.

    Attributes:
        slot: the place among local processes that it fills; None for one that the
            supervisor did not start.
        pid: of a local process; 0 where it is not known.
        began: when that process began.
        agent: that holds the process; empty where it runs on the supervisor's machine.
        machine: of the process, as ``processes.machine`` names it.
        token: what its process drew, by which it is known before it has heard its name.
        status: ``"starting"`` until it says something, ``"registered"`` while it
            compiles, ``"ready"`` where it could take part, ``"active"`` where it does,
            ``"finished"`` behind the last step, ``"left"`` where its loop was left,
            ``"failed"`` where it told its error and has not ended yet.
        leaving: it asked to leave.
    """

    slot: int | None
    pid: int = 0
    began: str = ""
    agent: str = ""
    machine: str = ""
    token: str = ""
    status: Status = "starting"
    leaving: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Over:
    """The end of a run.

    Attributes:
        how: it ended.
        text: for a user.
        saver: the member that writes a last checkpoint; empty for none.
    """

    how: Ending
    text: str
    saver: str


@dataclass(slots=True, kw_only=True)
class RunRecord:
    """A run, as events tell of it.

    Attributes:
        generation: the newest that members were asked to form.
        phase: ``"gathering"`` members, ``"preparing"`` a generation, ``"running"``,
            ``"draining"`` where it was told to end, ``"ending"``.
        active: of the newest generation that began, by rank.
        target, after: who was asked to form the newest one, and behind which step.
        step: at which the newest generation began.
        facts: that all members have in common.
        checkpoint: the newest.
        adding_up: how gradients are added up, and why; empty before it is decided.
        formed: a generation has begun.
        draining: the run was told to end.
        well: who has done its work and ended, of the generation.
        over: how it ended; None before.
    """

    generation: int = 0
    phase: Phase = "gathering"
    active: list[str] = field(default_factory=list)
    target: list[str] = field(default_factory=list)
    after: int = -1
    step: int = -1
    facts: dict[str, str] = field(default_factory=dict)
    checkpoint: str = ""
    adding_up: tuple[str, str] = ("", "")
    formed: bool = False
    draining: bool = False
    well: set[str] = field(default_factory=set)
    over: Over | None = None


@dataclass(slots=True, kw_only=True)
class History(RunRecord):
    """A run so far.

    Attributes:
        members: all that ever were, by name.
        failed: each failure that counts, in seconds since the epoch.
        errors: what members told of their errors, by name.
    """

    members: dict[str, MemberRecord] = field(default_factory=dict)
    failed: list[Failure] = field(default_factory=list, compare=False)
    errors: dict[str, str] = field(default_factory=dict, compare=False)


def history(events: Iterable[Mapping[str, Any]]) -> History:
    """The state of a run behind these events.

    Args:
        events: of one run, in order.

    >>> told = [{"event": "started", "name": "m1", "slot": 0, "pid": 7, "began": "1"}]
    >>> history(told).members["m1"].status
    'starting'
    """
    found = History()
    for said in events:
        if "name" in said:
            _take_of_member(found, said["name"], said)
        else:
            _take(found, said)
    return found


def _take_of_member(found: History, name: str, said: Mapping[str, Any]) -> None:
    """An event of one member."""
    match said["event"]:
        case "started":
            found.members[name] = MemberRecord(
                slot=said["slot"],
                pid=said["pid"],
                began=said["began"],
                agent=said.get("agent", ""),
                machine=said.get("machine", ""),
            )
        case "registered":
            known = found.members.setdefault(name, MemberRecord(slot=None))
            if known.status == "starting":  # Else it came back.
                known.status = "registered"
            known.token = said.get("token", "")
            found.generation = max(found.generation, said.get("generation", 0))
        case _ if name not in found.members:
            pass
        case "ready" | "finished" | "left" | "failed" as status:
            found.members[name].status = status
            if status == "failed":
                found.errors[name] = said["why"]
        case "lost" | "ended" as event:
            found.members[name].status = "gone"
            if said.get("counts"):
                at = said.get("time", 0.0)
                failure = Failure(
                    at=at,
                    since=at - said.get("seconds", 0.0),
                    name=name,
                    why=said["why"],
                    error=said.get("said", ""),
                    step=said["step"],
                )
                found.failed.append(failure)
            if event == "ended" and said.get("well"):
                found.well.add(name)
        case "leaving":
            found.members[name].leaving = True
        case "saved":
            found.checkpoint = said["path"]


def _take(found: History, said: Mapping[str, Any]) -> None:
    """An event of the run."""
    match said["event"]:
        case "preparing":
            found.generation = said["generation"]
            found.phase = said.get("phase", "gathering")
            found.target, found.after = _known(found, said["members"]), said["after"]
            found.well = set()
        case "begun":
            found.active, found.step = _known(found, said["members"]), said["step"]
            found.phase, found.formed = "running", True
            found.target, found.after = [], -1
            found.well = set()
            for name in found.active:
                if found.members[name].status != "finished":
                    found.members[name].status = "active"
        case "restarting":
            found.phase = "gathering"
        case "facts":
            found.facts = {k: v for k, v in said.items() if k not in ("time", "event")}
        case "adding_up":
            found.adding_up = said["by"], said["why"]
        case "draining":
            found.draining = True
        case "ending":
            found.phase = "ending"
            how = str(said.get("how"))
            found.over = Over(
                how=Ending(how) if how in [*Ending] else Ending.FAILED,
                text=said.get("why", ""),
                saver=said.get("saver", ""),
            )


def _known(found: History, names: Iterable[str]) -> list[str]:
    """Those of members that the journal tells of: a line may be missing."""
    return [name for name in names if name in found.members]
