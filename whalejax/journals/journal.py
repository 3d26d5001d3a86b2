"""Journal of a run: one JSON line per event, from which a supervisor resumes.

A supervisor writes each event to the disk before it carries out the effects of the
event. So a kill can cut short only the last line, whose effects were not carried out.
If the disk is full, events wait in memory and the run continues, but no process is
started.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from whalejax.meshes.errors import WhaleError


FOLDER: Final = "elastic"
"""Folder of a run's journal, key and logs, inside the run's folder."""

EVENTS: Final = "events.jsonl"
COMMITS: Final = "commits.jsonl"

_COPIED_BYTES: Final = 1 << 20

COMMITTED: Final = "committed"


def _is_text(x: Any) -> bool:
    return isinstance(x, str)


def _is_int(x: Any) -> bool:
    return isinstance(x, int)


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float)


def _is_count(x: Any) -> bool:
    return isinstance(x, str) and x.isascii() and x.isdigit()


def _are_names(x: Any) -> bool:
    return isinstance(x, list) and all(map(_is_text, x))


_FIELDS: Final[Mapping[str, Mapping[str, Callable[[Any], bool]]]] = {
    "started": {"name": _is_text, "slot": _is_int, "pid": _is_int, "began": _is_text},
    "lost": {"name": _is_text, "why": _is_text, "step": _is_int},
    "begun": {"generation": _is_int, "members": _are_names, "step": _is_int},
    "preparing": {"generation": _is_int, "members": _are_names, "after": _is_int},
    "facts": {"steps": _is_count, "micro-batches": _is_count},
    "resized": {"size": _is_int},
    "adding_up": {"by": _is_text, "why": _is_text},
    "ending": {"status": _is_int},
    "saved": {"name": _is_text, "step": _is_int, "path": _is_text},
    "recovered": {"step": _is_int},
    COMMITTED: {"step": _is_int, "generation": _is_int, "loss": _is_number},
    **dict.fromkeys(("registered", "ready", "ended", "leaving"), {"name": _is_text}),
    **dict.fromkeys(("finished", "left"), {"name": _is_text, "step": _is_int}),
    "failed": {"name": _is_text, "why": _is_text},
}
"""Required fields of an elastic run's events, with functions that check them."""


class JournalLines:
    """A file of JSON lines, to which lines are appended.

    Attributes:
        problem: Reason why the newest event is not written; empty if it is.
    """

    def __init__(self, path: Path, *, durable: bool) -> None:
        """Opens the file, and ends a line that was cut short.

        Args:
            path: Path of the file.
            durable: Whether to flush each line to the disk before ``write`` returns.

        Raises:
            WhaleError: The file cannot be opened.
        """
        self._path, self._durable = path, durable
        self._waiting = bytearray()
        self.problem, self._synced = "", True
        try:
            self._opened = os.open(
                path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
            )
            size = os.fstat(self._opened).st_size
            if size and os.pread(self._opened, 1, size - 1) != b"\n":
                self._waiting += b"\n"
        except OSError as error:
            raise WhaleError(
                f"{path}: the events of this run cannot be written "
                f"({error.strerror or error}). Give a folder that can be written"
            ) from error
        self.flush()

    def add(self, event: str, fields: Mapping[str, object]) -> None:
        """Adds an event that ``flush`` writes."""
        said = {"time": round(time.time(), 3), "event": event, **fields}
        self._waiting += (json.dumps(said) + "\n").encode()

    def write(self, event: str, fields: Mapping[str, object]) -> None:
        """Writes an event, or keeps it in memory until the disk has space."""
        self.add(event, fields)
        self.flush()

    def flush(self) -> bool:
        """Writes the events in memory; returns whether all are written."""
        try:
            self._put_back()
            if not self._waiting and self._synced:
                return True
            self._synced = not self._durable
            while self._waiting:
                del self._waiting[: os.write(self._opened, self._waiting)]
            if self._durable:
                os.fdatasync(self._opened)
                self._synced = True
        except OSError as error:
            self.problem = error.strerror or str(error)
            return False
        self.problem = ""
        return True

    def _put_back(self) -> None:
        """Restores a removed file from its open descriptor.

        Without the file, a restarted supervisor would find no run.
        """
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(self._opened), self._path.stat()):
                return
        draft = self._path.with_name(f".{self._path.name}")
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        opened = os.open(draft, flags, 0o600)
        try:
            place = 0
            while data := os.pread(self._opened, _COPIED_BYTES, place):
                place += os.write(opened, data)
            os.fsync(opened)
            draft.replace(self._path)
        except OSError:
            os.close(opened)
            raise
        os.close(self._opened)
        self._opened = opened

    @property
    def is_written(self) -> bool:
        """Whether every event is on the disk."""
        return not self._waiting and self._synced

    def close(self) -> None:
        """Closes the file."""
        os.close(self._opened)


def _json_objects(text: bytes) -> list[dict[str, Any]]:
    """Returns the JSON objects in the complete lines of a text."""
    result = []
    for line in text.splitlines():
        # A killed writer leaves incomplete lines.
        with contextlib.suppress(ValueError, RecursionError):
            result.append(json.loads(line))
    return [said for said in result if isinstance(said, dict)]


class LineReader:
    """Reader of a file of JSON lines that another process may append to."""

    def __init__(self, path: Path) -> None:
        """Stores the path; the file need not exist yet."""
        self._path, self._read_bytes = path, 0

    def new_objects(self) -> list[dict[str, Any]]:
        """Returns the JSON objects in the lines that ended since the last call.

        If the file cannot be read, the next call returns its objects.
        """
        try:
            with self._path.open("rb") as file:
                file.seek(self._read_bytes)
                text = file.read()
        except OSError:
            return []
        text = text[: text.rfind(b"\n") + 1]
        self._read_bytes += len(text)
        return _json_objects(text)


def read(path: Path) -> list[dict[str, Any]]:
    """Returns the events in complete lines of a file; none if there is no file.

    Raises:
        WhaleError: The file cannot be read.
    """
    try:
        objects = _json_objects(path.read_bytes())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise WhaleError(
            f"{path}: the events of this run cannot be read "
            f"({error.strerror or error}). Make the file readable for this user"
        ) from error
    return [said for said in objects if _is_text(said.get("event"))]


def read_events(path: Path) -> list[dict[str, Any]]:
    """Returns the complete events of elastic runs in a file."""
    return [said for said in read(path) if is_whole(said)]


def read_commits(path: Path) -> list[dict[str, Any]]:
    """Returns the complete records of committed steps in a file."""
    return [said for said in read_events(path) if said["event"] == COMMITTED]


def is_whole(said: Mapping[str, Any]) -> bool:
    """Returns whether an event has all fields that its readers need."""
    if not _is_text(said.get("event")):
        return False
    fields = {"time": _is_number, **_FIELDS.get(said["event"], {})}
    return all(is_good(said.get(name)) for name, is_good in fields.items())


def is_over(events: Iterable[Mapping[str, Any]]) -> bool:
    """Returns whether the run of these events has ended."""
    over = False
    for said in events:
        over = said["event"] == "ending" or (over and said["event"] != "opened")
    return over


def losses(commits: Iterable[Mapping[str, Any]]) -> dict[int, tuple[int, float]]:
    """Returns the last generation and loss of each committed step.

    Args:
        commits: Commits in order.
    """
    return {said["step"]: (said["generation"], said["loss"]) for said in commits}
