"""What happened in a run, as one JSON line per event; a supervisor goes on from it.

An event is on the disk before anything that follows from it is done. A line that a kill
cut short is the last one, and what it would have led to was not done.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from whalejax.elastic.supervisor.member_record import Member
from whalejax.elastic.supervisor.membership import Membership
from whalejax.meshes.errors import WhaleError


EVENTS: Final = "events.jsonl"
COMMITS: Final = "commits.jsonl"


class Lines:
    """A file of JSON lines that is written to its end."""

    def __init__(self, path: Path, *, durable: bool) -> None:
        """Open it; a line that was cut short is ended.

        Args:
            path: of the file.
            durable: each line is on the disk when ``write`` returns.
        """
        self._durable = durable
        try:
            self._opened = os.open(
                path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
            )
            size = os.fstat(self._opened).st_size
            if size and os.pread(self._opened, 1, size - 1) != b"\n":
                os.write(self._opened, b"\n")
        except OSError as error:
            raise WhaleError(
                f"{path}: the events of this run cannot be written "
                f"({error.strerror or error}). Give a folder that can be written"
            ) from error

    def write(self, event: str, fields: Mapping[str, object]) -> None:
        """Write an event.

        Args:
            event: what happened.
            fields: more about it.
        """
        said = {"time": round(time.time(), 3), "event": event, **fields}
        data = (json.dumps(said) + "\n").encode()
        try:
            while data:
                data = data[os.write(self._opened, data) :]
            if self._durable:
                os.fdatasync(self._opened)
        except OSError as error:
            raise WhaleError(
                f"an event of this run ({event}) cannot be written "
                f"({error.strerror or error}). Free some space, and start the "
                "supervisor again: it takes its members back"
            ) from error

    def close(self) -> None:
        """Close the file."""
        os.close(self._opened)


def read(path: Path) -> list[dict[str, Any]]:
    """The events in a file, without lines that were cut short; none without a file."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return []
    found = []
    for line in text.splitlines():
        try:
            said = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(said, dict) and isinstance(said.get("event"), str):
            found.append(said)
    return found


def is_over(events: Iterable[Mapping[str, Any]]) -> bool:
    """Whether the run that these events tell of has come to its end."""
    over = False
    for said in events:
        over = said["event"] == "ending" or (over and said["event"] != "opened")
    return over


def replay(
    membership: Membership,
    events: Iterable[Mapping[str, Any]],
    commits: Iterable[Mapping[str, Any]],
    now: float,
) -> None:
    """Bring a membership to where the events of a supervisor that was killed left it.

    Its members are given time to come back.

    Args:
        membership: a new one.
        events: of the journal, in order.
        commits: steps that were written down.
        now: the time.
    """
    members = membership.members
    for said in events:
        name = said.get("name", "")
        match said["event"]:
            case "started":
                members[name] = Member(name=name, slot=said["slot"], pid=said["pid"])
            case "registered":
                known = members.setdefault(name, Member(name=name, slot=None))
                known.status = "registered"
            case "ready" | "finished" as status if name in members:
                members[name].status = status
            case "lost" | "ended" if name in members:
                members[name].status = "gone"
            case "leaving" if name in members:
                members[name].leaving = True
            case "preparing":
                membership.generation = said["generation"]
                membership.phase = "gathering"
            case "begun":
                membership.begun(said["members"], said["step"])
            case "facts":
                facts = {k: v for k, v in said.items() if k not in ("time", "event")}
                membership.know(facts)
            case "saved":
                membership.checkpoint = said["path"]
    grace = now + membership.settings.rejoin_seconds
    for member in members.values():
        member.since = now
        # A lease that ends when the time to come back does.
        member.heard_at = grace - membership.settings.lease_seconds
        member.moved_at = now
    losses = {said["step"]: said["loss"] for said in commits}
    membership.recovered(now, losses)
