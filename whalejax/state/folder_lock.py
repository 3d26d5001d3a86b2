"""A lock on a folder of checkpoints, so that one run at a time writes there.

Two runs that save into one folder would remove each other's checkpoints. The lock is a
system lock on a file that names its owner. The system releases it when the owner ends
for any reason. On a file system without locks, the file itself is the lock until its
owner has ended. This module imports no JAX, so commands can check a lock fast.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import Any, Final

from whalejax.meshes.errors import WhaleError
from whalejax.processes.local_processes import began_at


LOCK: Final = "whalejax.lock"
"""Name of the lock's file in the folder."""

_LONGEST: Final = 4096
_TRIES: Final = 5
_AGAIN_SECONDS: Final = 0.05
_UNSUPPORTED: Final = frozenset(
    (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL)
)

_FULL: Final = frozenset((errno.ENOSPC, errno.EDQUOT))


class FolderLock:
    """Locks a folder while a block runs; creates it, with its parents.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as name, FolderLock(Path(name)):
        ...     try:
        ...         FolderLock(Path(name)).__enter__()
        ...     except WhaleError as error:
        ...         print("is in use by process" in str(error))
        True
    """

    def __init__(self, folder: Path) -> None:
        """Stores the folder; does not acquire the lock yet.

        Args:
            folder: Folder of checkpoints.
        """
        self.folder = folder
        self._opened = -1
        self._is_new = self._is_locked = False

    def __enter__(self) -> FolderLock:
        """Acquires the lock.

        Raises:
            WhaleError: Another run has the lock, or the folder cannot be written.
        """
        try:
            self._is_new = not self.folder.exists()
            self.folder.mkdir(parents=True, exist_ok=True)
            self._opened = self._acquire()
            self._say_who()
        except OSError as error:
            self._give_up()
            raise WhaleError(
                f"{self.folder}: checkpoints cannot be written here "
                f"({error.strerror or error}). Give another directory, free some space "
                "if the disk is full, or ask for permission to write there"
            ) from error
        return self

    def __exit__(self, *_: object) -> None:
        self._give_up()

    def _say_who(self) -> None:
        """Writes the owner into the lock's file; a full disk matters only in a new one.

        The text of an earlier run is overwritten before truncation, which needs no
        space. A new folder on a full disk is refused, because nothing can be saved.
        """
        owner = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
            "started": began_at(os.getpid()),
        }
        text = json.dumps(owner).encode()
        try:
            os.pwrite(self._opened, text, 0)
        except OSError as error:
            if error.errno not in _FULL or self._is_new or not self._is_locked:
                raise
            text = b""
        os.ftruncate(self._opened, len(text))

    def _give_up(self) -> None:
        with contextlib.suppress(OSError):
            # Remove the file while it is locked; the next owner creates its own. If
            # this file is already removed, the path may have another run's file.
            if self._opened >= 0 and _is_at(self._opened, self.folder / LOCK):
                (self.folder / LOCK).unlink()
            if self._is_new:
                self.folder.rmdir()  # succeeds only if the folder is empty
        if self._opened >= 0:
            os.close(self._opened)
        self._opened = -1

    def _acquire(self) -> int:
        """Returns the descriptor of the locked file; may reuse an abandoned file."""
        path, left = self.folder / LOCK, _TRIES
        while True:
            left -= 1
            opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                holder = _read(opened)
                os.close(opened)
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    if left and not _lives_here(holder):
                        time.sleep(_AGAIN_SECONDS)  # ``is_free`` locks briefly.
                        continue
                    raise self._locked_error(holder) from error
                if error.errno not in _UNSUPPORTED:
                    raise
                return self._without_locks(path, holder)
            # The previous owner may have removed the file before it was locked.
            if _is_at(opened, path):
                self._is_locked = True
                return opened
            os.close(opened)

    def _without_locks(self, path: Path, holder: dict[str, Any]) -> int:
        """Acquires the lock by the file's contents, on a file system without locks."""
        if holder and not _has_ended(holder):
            raise self._locked_error(holder)
        path.unlink(missing_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def _locked_error(self, holder: dict[str, Any]) -> WhaleError:
        who = (
            f"process {holder['pid']} on {holder['host']} since {holder['since']}"
            if {"pid", "host", "since"} <= holder.keys()
            else "another run"
        )
        return WhaleError(
            f"{self.folder} is in use by {who}: two runs would remove each other's "
            "checkpoints. Give another directory, or wait for that run or end it. If "
            f"it is known to have ended, remove {self.folder / LOCK}"
        )


def is_free(folder: Path) -> bool:
    """Returns whether no run on any machine has locked a folder.

    If the file system has locks, this briefly acquires a shared lock.
    """
    try:
        opened = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    holder = _read(opened)
    try:
        if _lives_here(holder):
            return False
        fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return True
    except OSError as error:
        return error.errno in _UNSUPPORTED and (not holder or _has_ended(holder))
    finally:
        os.close(opened)


def is_held(folder: Path) -> bool:
    """Returns whether a live run has locked a folder; does not lock it.

    A run on another machine counts as live, because its process cannot be seen here.
    """
    try:
        opened = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        holder = _read(opened)
    finally:
        os.close(opened)
    return bool(holder) and not _has_ended(holder)


def _is_at(opened: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(opened), path.stat())
    except FileNotFoundError:
        return False


def _read(opened: int) -> dict[str, Any]:
    try:
        said = json.loads(os.pread(opened, _LONGEST, 0))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(said, dict):
        return {}
    return {
        name: value
        for name, value in said.items()
        if isinstance(value, int | str) and str(value).isprintable()
    }


def _lives_here(holder: dict[str, Any]) -> bool:
    return holder.get("host") == socket.gethostname() and not _has_ended(holder)


def _has_ended(holder: dict[str, Any]) -> bool:
    if holder.get("host") != socket.gethostname():
        return False
    pid = holder.get("pid")
    if not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        pass
    return began_at(pid) != holder.get("started")
