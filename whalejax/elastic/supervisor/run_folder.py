"""Files that a supervisor writes for other processes, in the folders of a run."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from whalejax.distributed.launch_env import KEY_FILE
from whalejax.elastic.environment import RUN
from whalejax.elastic.supervisor.event_messages import tell_user


KEY: Final = "key"
"""File with the key of a run, in its folder."""

COMPILED: Final = "compiled"
"""Folder of compiled programs, next to the logs of the processes."""

_UNFINISHED: Final = re.compile(r"step_\d{6,}\.(unfinished|deleted)")
_CACHE: Final = "JAX_COMPILATION_CACHE_DIR"
_LEAST_CACHED: Final = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"


def compilation_cache(folder: Path) -> dict[str, str]:
    """Returns variables that set a shared compilation cache; empty if one is set."""
    if _CACHE in os.environ:
        return {}
    return {_CACHE: str(folder.absolute()), _LEAST_CACHED: "0"}


def write_pointer(path: Path, said: Mapping[str, str]) -> None:
    """Writes a file by which ``whalejax status`` finds a run, or warns on a full disk.

    Raises:
        OSError: The write failed for another reason than a full disk.
    """
    draft = path.with_name(f".{path.name}")
    try:
        draft.write_text(json.dumps(said))
        draft.replace(path)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        tell_user(
            f"{path} cannot be written ({error.strerror}); the run goes on, and "
            "whalejax status does not find it by this file"
        )


def processes_of(key: Path) -> list[int]:
    """Returns the ids of this machine's processes that use the key file."""
    given, processes = f"{KEY_FILE}={key.absolute()}".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # ended, or another user's process
            names = path.read_bytes().split(b"\0")
            if given in names and any(x.startswith(f"{RUN}=".encode()) for x in names):
                processes.append(int(path.parent.name))
    return sorted(processes)


def remove_unfinished(folder: Path) -> None:
    """Removes files that killed members were writing or removing."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if _UNFINISHED.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
