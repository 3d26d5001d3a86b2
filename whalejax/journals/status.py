"""``whalejax status``: the elastic runs of a folder, read from their journal."""

from __future__ import annotations

import dataclasses
import json as json_module
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from whalejax.distributed.launch_env import printable
from whalejax.journals import journal
from whalejax.journals.journal import FOLDER
from whalejax.journals.reduction_choice import GradientReduction
from whalejax.membership.exit_status import TERMINATED
from whalejax.meshes.errors import WhaleError
from whalejax.state.folder_lock import is_held


_LONGEST: Final = 500

STATE_OF: Final = {
    "started": "starting",
    "registered": "compiling",
    "ready": "standing by",
    "finished": "finished",
    "leaving": "leaving",
    "left": "left its loop",
    "failed": "failed",
}
"""State of a member after an event. After ``"begun"`` and after the member's end, the
state depends on more than the event."""

_OF_STATES: Final = ("begun", "recovered", "finished", "saved")
"""Events whose field ``step`` is the step of a member's state, or -1 without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A generation: its start, the step of its first state, and its members."""

    number: int
    seconds: float
    step: int
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LostMember:
    """A member that was given up, or ended with an error of its own.

    Attributes:
        name: Name of the member.
        seconds: Seconds since the run began.
        step: Newest committed step.
        why: Reason for giving it up, or how it ended.
        state: ``"lost"`` or ``"failed"``.
    """

    name: str
    seconds: float
    step: int
    why: str
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStatus:
    """A process of a run.

    Attributes:
        state: ``"starting"``, ``"compiling"``, ``"standing by"``, ``"training"``,
            ``"leaving"``, ``"left its loop"`` or ``"finished"``. After its end,
            ``"complete"``, ``"drained"`` (it was asked to leave), ``"interrupted"``
            (the run was asked to end), ``"ended"`` (the run was given up), ``"failed"``
            (with its own error) or ``"lost"`` (it was given up).
        rank: Rank in its newest generation, or None.
        pid: Id of its process, or None if the supervisor did not start it.
        host: Address at which other members reach it, or None if unknown.
    """

    state: str
    rank: int | None
    pid: int | None
    host: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """One run in a folder, from a launch to its end, with all restarts.

    Attributes:
        state: ``"running"``, ``"without supervisor"`` (the supervisor was killed, and
            the run continues when it is restarted), ``"complete"``, ``"drained"`` or
            ``"interrupted"`` (the run was asked to end), ``"failed"``, ``"refused"``
            (its input cannot be run) or ``"lost"``.
        why: Reason for an end before all steps were done.
        step, steps: Number of finished steps, and total number of steps.
        steps_done: Number of steps of this run alone, without those before its first
            checkpoint.
        loss_first, loss: Loss of the run's first step and of its newest step.
        step_seconds: Median time of a step; None if there are too few.
        generations: Generations in order.
        members: All processes, by name.
        lost: Members that were given up or failed.
        adding_up: Reduction of gradients; None before it is decided, and in runs of
            ordinary scripts.
        tables_placed: Newest placement of embedding tables; None if the job has none.
        checkpoint: Path of the newest checkpoint.
        goodput: Committed steps times the median step time, divided by the time since
            the first step; None if there are too few steps.
        seconds: Seconds since the run began.
        ended: Exit status of a run that is over, or None.
    """

    state: str
    why: str
    step: int
    steps: int
    steps_done: int
    loss_first: float | None
    loss: float | None
    step_seconds: float | None
    generations: tuple[Generation, ...]
    members: Mapping[str, MemberStatus]
    lost: tuple[LostMember, ...]
    adding_up: GradientReduction | None
    tables_placed: str | None
    checkpoint: str | None
    goodput: float | None
    seconds: float
    ended: int | None


Events = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunJournal:
    """Contents of one run's journal.

    Attributes:
        events: Events in order; the first is ``"opened"``.
        commits: Commits of its generations, in order.
        has_supervisor: Whether a supervisor runs now.
    """

    events: Events
    commits: Events
    has_supervisor: bool


def status_of(folder: Path) -> tuple[RunStatus, ...]:
    """Returns the runs of a folder, in order; the last is the newest.

    Args:
        folder: Folder of the checkpoints, or of the logs.

    Raises:
        WhaleError: The folder has no elastic run.
    """
    return tuple(map(run_status, journals_of(folder)))


def journals_of(folder: Path) -> tuple[RunJournal, ...]:
    """Returns the journal of each run of a folder, in order; see ``status_of``."""
    home = _home(folder)
    events = journal.read_events(home / journal.EVENTS)
    places = [n for n, said in enumerate(events) if said["event"] == "opened"]
    if not places:
        raise WhaleError(
            f"{folder} holds no elastic run. Name the folder of --save, or that of "
            "--logs, of whalejax launch --processes MIN:MAX"
        )
    commits = journal.read_commits(home / journal.COMMITS)
    ends = [*places[1:], len(events)]
    runs = []
    for first, end in zip(places, ends, strict=True):
        run = events[first:end]
        # Runs of a folder never share the number of a generation.
        numbers = {e["generation"] for e in run if e["event"] == "begun"}
        mine = [said for said in commits if said["generation"] in numbers]
        goes_on = end == len(events) and is_held(home)
        runs.append(RunJournal(events=run, commits=mine, has_supervisor=goes_on))
    return tuple(runs)


def run_status(run: RunJournal) -> RunStatus:
    """Returns the state of one run."""
    events, commits = run.events, run.commits
    began = events[0]["time"]
    ends = [said for said in events if said["event"] == "ending"]
    last = max([events[-1]["time"], *(c["time"] for c in commits)])
    facts = next((said for said in events if said["event"] == "facts"), {})
    saved = [said["path"] for said in events if said["event"] == "saved"]
    status = ends[-1]["status"] if ends else None
    state = "running" if run.has_supervisor else "without supervisor"
    if ends:
        state = _end_of(ends[-1])
    _, took = _times(commits)
    members = _members(events)
    return RunStatus(
        state=state,
        why=ends[-1].get("why", "") if ends and status else "",
        step=_newest_step(events, commits),
        steps=int(facts.get("steps", 0)),
        steps_done=len({c["step"] for c in commits}),
        loss_first=commits[0]["loss"] if commits else None,
        step_seconds=statistics.median(took) if took else None,
        loss=commits[-1]["loss"] if commits else None,
        generations=_generations(events),
        members=members,
        lost=tuple(
            LostMember(
                name=said["name"],
                seconds=round(said["time"] - began, 1),
                step=said["step"],
                why=loss_text(said),
                state=members[said["name"]].state,
            )
            for said in _before_end(events)
            if said["event"] == "lost"
        ),
        adding_up=_adding_up(events),
        tables_placed=_newest_placement(events),
        checkpoint=saved[-1] if saved else None,
        goodput=goodput_of(commits),
        seconds=round(last - began, 1),
        ended=status,
    )


def _generations(events: Events) -> tuple[Generation, ...]:
    found: list[Generation] = []
    for said in events:
        if said["event"] == "begun":
            generation = Generation(
                number=said["generation"],
                seconds=round(said["time"] - events[0]["time"], 1),
                step=said["step"],
                members=tuple(said["members"]),
            )
            found.append(generation)
        elif said["event"] == "recovered" and found and found[-1].step < 0:
            # No member had a state when the generation began.
            found[-1] = dataclasses.replace(found[-1], step=said["step"])
    return tuple(found)


def _adding_up(events: Events) -> GradientReduction | None:
    for said in events:
        if said["event"] == "adding_up":
            return GradientReduction(by=said["by"], why=said["why"])
    return None


def _newest_placement(events: Events) -> str | None:
    found = [said for said in events if said["event"] == "tables_placed"]
    return f"from step {found[-1]['step']}, {found[-1]['why']}" if found else None


def _newest_step(events: Events, commits: Events) -> int:
    """Returns the newest finished step, even if an earlier run made it."""
    told = [said["step"] for said in events if said["event"] in _OF_STATES]
    return max([0, *map(int, told), *(int(said["step"]) for said in commits)])


def _home(folder: Path) -> Path:
    if folder.is_file():
        raise WhaleError(
            f"{folder} is a file; name the folder of --save, or that of --logs"
        )
    pointer = folder / f"{FOLDER}.json"
    try:
        home = json_module.loads(pointer.read_text())
        return Path(home["folder"])
    except (OSError, ValueError, KeyError, TypeError):
        return folder / FOLDER


def _before_end(events: Events) -> Events:
    for place, said in enumerate(events):
        if said["event"] == "ending":
            return events[:place]
    return events


def _end_of(ending: Mapping[str, Any]) -> str:
    by_status = {0: "complete", TERMINATED: "interrupted"}
    return str(ending.get("how") or by_status.get(ending["status"], "failed"))


def _members(events: Events) -> dict[str, MemberStatus]:
    members: dict[str, MemberStatus] = {}
    before = len(_before_end(events))
    ending = events[before] if before < len(events) else None
    for place, said in enumerate(events):
        if said["event"] == "begun":
            for rank, name in enumerate(said["members"]):
                _change(members, name, state="training", rank=rank)
        name, state = said.get("name", ""), STATE_OF.get(said["event"])
        if said["event"] in ("lost", "ended"):
            was = members[name].state if name in members else ""
            _change(
                members, name, state=_state_at_end(said, was, place > before, ending)
            )
        elif state is not None:
            begins = name not in members or members[name].state in (
                "",
                STATE_OF["started"],
            )
            if said["event"] == "registered" and not begins:
                continue  # The member rejoined a restarted supervisor.
            known = {key: said[key] for key in ("pid", "host") if key in said}
            _change(members, name, state=state, **known)
    if ending is not None:
        there = {*STATE_OF.values(), "training"} - {"failed"}
        for name in [n for n, member in members.items() if member.state in there]:
            _change(members, name, state=_member_state_at_end(ending))
    return members


def _change(found: dict[str, MemberStatus], name: str, **changed: Any) -> None:
    known = found.get(name, MemberStatus(state="", rank=None, pid=None, host=None))
    found[name] = dataclasses.replace(known, **changed)


def _state_at_end(
    said: Mapping[str, Any], was: str, after: bool, ending: Mapping[str, Any] | None
) -> str:
    if said["event"] == "ended" and "how" in said:
        return str(said["how"])
    if after and ending is not None:
        return "drained" if was == "leaving" else _member_state_at_end(ending)
    if said["event"] == "lost":
        return "failed" if was == "failed" else str(said.get("how", "lost"))
    return {"leaving": "drained", "finished": "complete"}.get(was, "ended")


def _member_state_at_end(ending: Mapping[str, Any]) -> str:
    member_state = _end_of(ending)
    return (
        member_state
        if member_state in ("complete", "drained", "interrupted")
        else "ended"
    )


def goodput_of(commits: Iterable[Mapping[str, Any]]) -> float | None:
    """Returns the number of steps times their median time, divided by the total time.

    Args:
        commits: Commits of a run, in order.

    Returns:
        The ratio, at most 1; None if there are too few commits.
    """
    times, took = _times(commits)
    if len(took) < 3:
        return None
    return min(len(took) * statistics.median(took) / (times[-1] - times[0]), 1.0)


def _times(commits: Iterable[Mapping[str, Any]]) -> tuple[list[float], list[float]]:
    newest: dict[int, float] = {}
    for said in commits:
        newest[said["step"]] = said["time"]
    times = [newest[step] for step in sorted(newest)]
    return times, [b - a for a, b in zip(times, times[1:], strict=False) if b > a]


def loss_text(fields: Mapping[str, Any]) -> str:
    """Returns the reason why a member was lost or failed."""
    said = f"; its log ends: {fields['said']}" if fields.get("said") else ""
    return f"{fields['why']}{said}"


def document(runs: Sequence[RunStatus]) -> dict[str, Any]:
    """Returns JSON data with the values of the newest run, and all runs as ``runs``."""
    told = [dataclasses.asdict(run) for run in runs]
    return {**told[-1], "runs": told}


def show(folder: Path, *, json: bool = False) -> int:
    """Prints the runs of a folder, the newest one last."""
    runs = status_of(folder)
    if json:
        print(json_module.dumps(document(runs)))
        return 0
    for number, run in enumerate(runs, start=1):
        if len(runs) > 1:
            print(f"{'' if number == 1 else chr(10)}run {number} of {len(runs)}")
        for line in _lines(run):
            print(line)
    return 0


def _lines(run: RunStatus) -> list[str]:
    loss = "" if run.loss is None else f", loss {run.loss:.6g}"
    steps = f"{run.step} of {run.steps or 'unknown'}{loss}"
    checkpoint = run.checkpoint or "none"
    if run.generations and not (run.steps or run.steps_done or run.checkpoint):
        steps = "not known: the script has a loop of its own"
        checkpoint = "not known: the script saves its own"
    lines = [
        f"run         {run.state}, {run.seconds:g} s",
        f"step        {steps}",
    ]
    if run.why:
        why = printable(" ".join(run.why.split()))
        mark = " …" if len(why) > _LONGEST else ""
        lines.insert(1, f"why         {why[:_LONGEST]}{mark}")
    if run.goodput is not None:
        lines.append(f"goodput     {run.goodput:.3f}")
    if run.adding_up is not None:
        why = printable(run.adding_up.why)[:_LONGEST]
        lines.append(f"reduction   by {run.adding_up.by}: {why}")
    if run.tables_placed is not None:
        lines.append(f"tables      {printable(run.tables_placed)}")
    lines.append(f"checkpoint  {checkpoint}")
    for name, member in run.members.items():
        rank = "" if member.rank is None else f", rank {member.rank}"
        pid = "" if member.pid is None else f", pid {member.pid}"
        host = "" if member.host is None else f", host {member.host}"
        lines.append(f"member      {name}  {member.state}{rank}{pid}{host}")
    for one in run.generations:
        members = ", ".join(one.members)
        step = max(one.step, 0)
        lines.append(
            f"generation  {one.number}  at {one.seconds:g} s, step {step}: {members}"
        )
    lines += [
        f"{m.state:<12}{m.name}  at {m.seconds:g} s: {printable(m.why)}"
        for m in run.lost
    ]
    return lines
