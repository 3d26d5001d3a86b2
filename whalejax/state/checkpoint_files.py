"""The files of a checkpoint: their hashes, and their completion or removal.

If a file cannot be written or read, all processes raise an error with the path and the
remedy. A process that continued alone would wait for the others.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import jax

from whalejax import _compat_processes
from whalejax.meshes.errors import Problems, WhaleError
from whalejax.planner.plan_errors import PlanError
from whalejax.state.checkpoint_record import (
    LONGEST_REASON,
    RECORD,
    Record,
    files_of,
    refuse_damaged,
    unfinished,
)


_WRITTEN_BY: Final = re.compile(r"(?:^|/)ocdbt\.process_(\d+)/")
_SHOWN_DIGITS: Final = 12
_MOST_THREADS: Final = 8
_WAIT_SECONDS: Final = 1800.0

_REMEDIES: Final = {
    errno.ENOSPC: "The disk is full: free some space, or save to another one",
    errno.EDQUOT: "The quota is used up: remove something, or save elsewhere",
    errno.EFBIG: "A file is larger than is allowed here: save to another file system, "
    "or raise the limit (ulimit -f)",
    errno.EROFS: "The file system is read-only: save to another one",
    errno.EACCES: "Ask for permission to write there, or save elsewhere",
    errno.EPERM: "Ask for permission to write there, or save elsewhere",
    errno.ENOTDIR: "A part of the path is a file: give another path",
    errno.ENAMETOOLONG: "Give a shorter path",
}
_REMEDY: Final = "Save to another path, or mend the file system"
_OS_ERROR: Final = re.compile(r"os_error_code='(\d+)'")
"""Matches the number of a system error in Orbax's messages."""

_rounds = itertools.count()
"""Numbers of the exchanges, which all processes make in the same order."""


# Exchange between processes.


def told_by_all(mine: str, what: str) -> list[str]:
    """Returns a text of each process, by rank; all processes call this.

    It uses no device, so pending device work cannot block it.

    Raises:
        WhaleError: A process did not answer in time.
    """
    count, here = jax.process_count(), jax.process_index()
    if count == 1:
        return [mine]
    number = next(_rounds)
    folder = f"whalejax/checkpoints/{number}"
    _compat_processes.tell_processes(f"{folder}/{here}", mine)
    deadline = time.monotonic() + _WAIT_SECONDS
    said = [_waited_for(f"{folder}/{n}", deadline) for n in range(count)]
    # All processes have come here, so all have read the texts of the previous round.
    if number:
        _compat_processes.forget_told(f"whalejax/checkpoints/{number - 1}/{here}")
    silent = [str(n) for n, text in enumerate(said) if text is None]
    if silent:
        raise WhaleError(
            f"{what}: processes {', '.join(silent)} said nothing in "
            f"{_WAIT_SECONDS:.0f} s. Look for the first error of theirs"
        )
    return [text for text in said if text is not None]


def told_by_first(make: Callable[[], str], what: str) -> str:
    """Returns the text that the first process makes; all processes call this.

    Args:
        make: Function that makes the text; only the first process calls it.
        what: Name of the text for messages.

    Raises:
        PlanError: ``make`` raised a ``PlanError``; all processes raise it.
        WhaleError: ``make`` raised another error, which the first process raises
            itself.
    """
    text, failed = "", None
    if jax.process_index() == 0:
        try:
            text = make()
        except Exception as error:  # The other processes must not wait for a text.
            failed = error
    message = str(failed or "")
    if failed is not None and not isinstance(failed, WhaleError):
        message = f"{what}: process 0 failed with {type(failed).__name__}: {message}"
    has_no_plan = isinstance(failed, PlanError)
    first, *_ = told_by_all(json.dumps([text, message, has_no_plan]), what)
    if failed is not None:
        raise failed
    text, message, has_no_plan = json.loads(first)
    if message:
        raise (PlanError if has_no_plan else WhaleError)(message)
    return str(text)


def _waited_for(key: str, deadline: float) -> str | None:
    """Returns another process's value, or None after the deadline."""
    while True:
        result = _compat_processes.told_by(key, 1.0)
        if result is not None or time.monotonic() > deadline:
            return result


def fail_together(error: str, what: str) -> None:
    """Raises in all processes if one of them has an error.

    Args:
        error: Error of this process, or empty.
        what: Action that failed; the same text in all processes.

    Raises:
        WhaleError: A process has an error; it is the error of the lowest rank.
    """
    if text := first_error(error, what):
        raise WhaleError(text)


def first_error(error: str, what: str) -> str:
    """Returns the error of the lowest rank that has one, or an empty text.

    All processes call this.

    Args:
        error, what: Arguments of ``fail_together``.

    Raises:
        WhaleError: A process did not call this.
    """
    return next((text for text in told_by_all(error, what) if text), "")


# Hashes.


def hashed(building: Path) -> dict[str, str]:
    """Returns the SHA-256 of every file of a checkpoint that is being written.

    All processes call this. Each process flushes the files that it wrote to the disk,
    and hashes them while they are in its machine's memory. The first process also takes
    the common files. Reading all files in one process would take longer than writing
    them.

    Args:
        building: Folder of the checkpoint, in which all files are complete.

    Raises:
        OSError: A process cannot read its files; all processes raise it.
    """
    here, count = jax.process_index(), jax.process_count()
    mine = [name for name in files_of(building) if _writer(name) % count == here]
    try:
        flush_to_disk(building / name for name in mine)
        own, error = _hashes(building, mine), ""
    except OSError as failed:
        own, error = {}, _reason(failed)
    result: dict[str, str] = {}
    for said in told_by_all(json.dumps([own, error]), f"hashes of {building.name}"):
        theirs, error = json.loads(said)
        if error:
            raise OSError(f"what was written cannot be read again: {error}")
        result.update(theirs)
    return dict(sorted(result.items()))


def _writer(name: str) -> int:
    match = _WRITTEN_BY.search(name)
    return int(match[1]) if match else 0


def check_hashes(target: Path, record: Record) -> None:
    """Refuses a checkpoint if a file was changed since it was written.

    Each process reads some of the files, and all get the same result.

    Args:
        target: Folder of the checkpoint.
        record: Record of the checkpoint; without hashes, nothing is checked.

    Raises:
        DamagedCheckpoint: Files were changed.
    """
    if record.file_sha256 is None:
        return
    here, count = jax.process_index(), jax.process_count()
    by_size = sorted(
        record.file_bytes, key=lambda name: (record.file_bytes[name], name)
    )
    result = changed(target, record.file_sha256, by_size[here::count])
    problems = Problems()
    for said in told_by_all(json.dumps(result), f"checking {target.name}"):
        for text in json.loads(said):
            problems.add(text)
    refuse_damaged(target, problems)


def changed(
    target: Path, file_sha256: Mapping[str, str], names: Sequence[str]
) -> list[str]:
    """Returns descriptions of files whose contents differ from their hashes.

    Args:
        target: Folder of the checkpoint.
        file_sha256: Hash of each file when it was written.
        names: Names of the files to read.
    """
    try:
        hashes = _hashes(target, names)
    except OSError as error:
        return [f"{error.filename or target} cannot be read ({_reason(error)})"]
    return [
        f"{name} was changed: its SHA-256 begins with {result[:_SHOWN_DIGITS]}; "
        f"expected {str(file_sha256[name])[:_SHOWN_DIGITS]}"
        for name, result in hashes.items()
        if result != file_sha256[name]
    ]


def _hashes(folder: Path, names: Sequence[str]) -> dict[str, str]:
    threads = min(_MOST_THREADS, os.cpu_count() or 1, max(1, len(names)))
    with ThreadPoolExecutor(threads) as pool:
        hashes = pool.map(lambda name: _sha256(folder / name), names)
        return dict(zip(names, hashes, strict=True))


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


# Durability.


def flush_to_disk(paths: Iterable[Path]) -> None:
    """Flushes the contents of files, and the entries of folders, to the disk.

    Without a flush, a loss of power soon after a checkpoint's rename can leave empty
    files, while older checkpoints are already removed.
    """
    for path in paths:
        opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(opened)
        except OSError as error:
            if error.errno != errno.EINVAL:  # The file system cannot flush.
                raise
        finally:
            os.close(opened)


# Building.


_MOST_REMOVALS: Final = 50
_REMOVAL_SECONDS: Final = 0.1


@contextmanager
def being_built(target: Path) -> Iterator[Path]:
    """Yields the folder of an unfinished checkpoint, and renames it at the end.

    After any error it removes the folder. All processes call this.

    Raises:
        WhaleError: The folder cannot be written, or another process writes to it.
    """
    building, first = unfinished(target), jax.process_index() == 0
    held, error = -1, ""
    try:
        if first:
            try:
                held = _create_build_folder(building)
            except (OSError, WhaleError) as found:
                error = _error_text(target, found)
        fail_together(error, f"{target.name} begun")
        try:
            yield building
            if first:
                inside = (path for path in building.rglob("*") if path.is_dir())
                flush_to_disk((*building.glob(RECORD), *inside, building))
                building.rename(target)
                flush_to_disk([target.parent])
        except OSError as found:
            error = _error_text(target, found)
        fail_together(error, f"{target.name} written")
    except BaseException:
        if held >= 0:
            _removed(building)
        raise
    finally:
        if held >= 0:
            os.close(held)


def _removed(building: Path) -> None:
    """Removes a folder, with retries, as other processes may still write to it."""
    for _ in range(_MOST_REMOVALS):
        shutil.rmtree(building, ignore_errors=True)
        if not building.exists():
            return
        time.sleep(_REMOVAL_SECONDS)


def _create_build_folder(building: Path) -> int:
    """Creates an empty folder, and returns the descriptor of a lock on it.

    Raises:
        WhaleError: Another process is writing to the folder.
    """
    if building.exists():
        left = _locked(building)
        shutil.rmtree(building, ignore_errors=True)
        os.close(left)
    building.mkdir(parents=True)
    return _locked(building)


def _locked(folder: Path) -> int:
    opened = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(opened)
        raise WhaleError(
            f"{folder.with_suffix('')}: another process is writing a checkpoint to "
            "this path at this moment. Save to another path, or wait for it"
        ) from error
    except OSError:  # The file system has no locks.
        return opened
    return opened


def _error_text(target: Path, error: Exception) -> str:
    return (
        str(error)
        if isinstance(error, WhaleError)
        else write_failure_message(target, error)
    )


def write_failure_message(target: Path, error: Exception) -> str:
    """Returns why a checkpoint could not be written, with the remedy.

    Args:
        target: Path of the checkpoint.
        error: Error of the system, or an error of Orbax that quotes it.
    """
    number = error.errno if isinstance(error, OSError) else None
    if number is None:
        match = _OS_ERROR.search(str(error))
        number = int(match[1]) if match else None
    remedy = _REMEDY if number is None else _REMEDIES.get(number, _REMEDY)
    return (
        f"{target}: this checkpoint could not be written ({_reason(error)}); its files "
        f"are removed. {remedy}. The state is as it was"
    )


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    match = _OS_ERROR.search(str(error))
    if match:
        return os.strerror(int(match[1]))
    return (str(error).splitlines() or [""])[0][:LONGEST_REASON] or type(error).__name__
