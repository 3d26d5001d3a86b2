"""``whalejax status``: an elastic run, as its journal tells it."""

from __future__ import annotations

import dataclasses
import json as json_module
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from whalejax.elastic.supervisor import journal
from whalejax.elastic.supervisor.supervisor import FOLDER
from whalejax.meshes.errors import WhaleError


_STATUS_OF: Final = {
    "started": "starting",
    "registered": "compiling",
    "ready": "standing by",
    "finished": "finished",
    "leaving": "leaving",
    "lost": "",
    "ended": "",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A generation: when it began, at which step, with whom."""

    number: int
    seconds: float
    step: int
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A member that was given up, and why."""

    name: str
    seconds: float
    step: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """An elastic run so far.

    Attributes:
        step, steps: done, and to be done in all.
        loss: of the newest step.
        generations: of the run, in order.
        members: who is there, and what they do.
        lost: who was given up.
        checkpoint: the newest.
        goodput: committed steps times the median of a step, over the time since the
            first; None before there are enough.
        seconds: since the run began.
        ended: status of a run that is over, or None.
    """

    step: int
    steps: int
    loss: float | None
    generations: tuple[Generation, ...]
    members: Mapping[str, str]
    lost: tuple[Lost, ...]
    checkpoint: str | None
    goodput: float | None
    seconds: float
    ended: int | None


def status_of(folder: Path) -> Status:
    """The status of the run in a folder.

    Args:
        folder: of the checkpoints, or of the logs.

    Raises:
        WhaleError: there is no elastic run.
    """
    home = _home(folder)
    events = journal.read(home / journal.EVENTS)
    opened = [n for n, said in enumerate(events) if said["event"] == "opened"]
    if not opened:
        raise WhaleError(
            f"{folder} holds no elastic run. Name the folder of --save, or that of "
            "--logs, of whalejax launch --processes MIN:MAX"
        )
    events = events[opened[-1] :]
    began = events[0]["time"]
    commits = [c for c in journal.read(home / journal.COMMITS) if c["time"] >= began]
    ends = [said for said in events if said["event"] == "ending"]
    last = max([events[-1]["time"], *(c["time"] for c in commits)])
    facts = next((said for said in events if said["event"] == "facts"), {})
    saved = [said["path"] for said in events if said["event"] == "saved"]
    return Status(
        step=max((c["step"] for c in commits), default=0),
        steps=int(facts.get("steps", 0)),
        loss=commits[-1]["loss"] if commits else None,
        generations=tuple(
            Generation(
                number=said["generation"],
                seconds=round(said["time"] - began, 1),
                step=said["step"],
                members=tuple(said["members"]),
            )
            for said in events
            if said["event"] == "begun"
        ),
        members=_members(events),
        lost=tuple(
            Lost(
                name=said["name"],
                seconds=round(said["time"] - began, 1),
                step=said["step"],
                why=said["why"],
            )
            for said in events
            if said["event"] == "lost"
        ),
        checkpoint=saved[-1] if saved else None,
        goodput=goodput_of(commits),
        seconds=round(last - began, 1),
        ended=ends[-1]["status"] if ends else None,
    )


def _home(folder: Path) -> Path:
    pointer = folder / f"{FOLDER}.json"
    try:
        found = json_module.loads(pointer.read_text())
        return Path(found["folder"])
    except (OSError, ValueError, KeyError, TypeError):
        return folder / FOLDER


def _members(events: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    found: dict[str, str] = {}
    for said in events:
        if said["event"] == "begun":
            for rank, name in enumerate(said["members"]):
                found[name] = f"rank {rank}"
        elif said["event"] in _STATUS_OF:
            found[said["name"]] = _STATUS_OF[said["event"]]
    return {name: what for name, what in found.items() if what}


def goodput_of(commits: Sequence[Mapping[str, Any]]) -> float | None:
    """Committed steps times the median of a step, over the time that they took.

    Args:
        commits: of a run, in order.
    """
    newest: dict[int, float] = {}
    for said in commits:
        newest[said["step"]] = said["time"]
    times = [newest[step] for step in sorted(newest)]
    took = [b - a for a, b in zip(times, times[1:], strict=False) if b > a]
    if len(took) < 3:
        return None
    return min(len(took) * statistics.median(took) / (times[-1] - times[0]), 1.0)


def show(folder: Path, *, json: bool = False) -> int:
    """Print the status of a run.

    Args:
        folder: as for ``status_of``.
        json: as one line of JSON.
    """
    found = status_of(folder)
    if json:
        print(json_module.dumps(dataclasses.asdict(found)))
        return 0
    over = {None: "running", 0: "complete", 143: "ended as it was told"}
    print(f"run         {over.get(found.ended, 'failed')}, {found.seconds:g} s")
    loss = "" if found.loss is None else f", loss {found.loss:.6g}"
    print(f"step        {found.step} of {found.steps or 'unknown'}{loss}")
    if found.goodput is not None:
        print(f"goodput     {found.goodput:.3f}")
    print(f"checkpoint  {found.checkpoint or 'none'}")
    if found.ended is None:
        for name, what in found.members.items():
            print(f"member      {name}  {what}")
    for one in found.generations:
        members = ", ".join(one.members)
        step = max(one.step, 0)
        print(f"generation  {one.number}  at {one.seconds:g} s, step {step}: {members}")
    for gone in found.lost:
        print(f"lost        {gone.name}  at {gone.seconds:g} s: {gone.why}")
    return 0
