"""The key by which the processes of a run know each other: a file for its owner alone.

Whoever can read the key can join the run and change its result, so a file that others
could read is refused, as ssh refuses such a private key.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path
from typing import Final

from whalejax.meshes.errors import WhaleError


LEAST_BYTES: Final = 16
"""A shorter key could be guessed."""

_MOST_BYTES: Final = 4096


def make_key(path: Path) -> None:
    """Write a new random key, unless there is a file already.

    Args:
        path: of the file; only its owner can read it.

    Raises:
        WhaleError: it cannot be written.
    """
    if path.exists():
        return
    # Written under another name first: whoever sees the file sees the whole key.
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        opened = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(opened, "w") as file:
            file.write(secrets.token_hex(32))
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
        draft.unlink()
    except OSError as error:
        raise WhaleError(
            f"{path}: the key of this run cannot be written "
            f"({error.strerror or error}). Give a folder that can be written"
        ) from error


def load_key(path: Path) -> bytes:
    """The key in a file.

    Args:
        path: of the file.

    Raises:
        WhaleError: it cannot be read, others can read it, or it is too short.
    """
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise WhaleError(f"{path} is no regular file; expected a key file")
            _check_owner(path, found)
            key = file.read(_MOST_BYTES).strip()
    except OSError as error:
        raise WhaleError(
            f"{path}: the key of the run cannot be read ({error.strerror or error}). "
            "Name the key file of the run: elastic/key in the folder of an elastic "
            "run, swarm.key of a swarm"
        ) from error
    if len(key) < LEAST_BYTES:
        raise WhaleError(
            f"{path} holds a key of {len(key)} bytes; expected at least {LEAST_BYTES}, "
            "such as what openssl rand -hex 32 prints"
        )
    return key


def _check_owner(path: Path, found: os.stat_result) -> None:
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077:
        raise WhaleError(
            f"{path} has mode {mode:o}, so that others can read the key of the run or "
            f"write it; expected 600. Run chmod 600 {path}"
        )
    if found.st_uid != os.geteuid():
        raise WhaleError(
            f"{path} belongs to user {found.st_uid}; this process runs as user "
            f"{os.geteuid()}. Copy the key into a file of your own with mode 600"
        )
