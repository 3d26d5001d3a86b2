"""Folder in the machine's memory for the copies of a run's shards.

The copies outlive the processes, so the supervisor and agents remove them. This module
imports no JAX.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from pathlib import Path
from typing import Final


MEMORY: Final = Path("/dev/shm")
"""Memory file system of Linux."""


def memory_folder(key: Path, run: str) -> Path:
    """Returns the folder of a run's copies.

    Args:
        key: Path of the run's key file, which identifies the run's folder.
        run: Name of the run, unique among all runs with this key.
    """
    return MEMORY / f"{_prefix(key)}{run}"


def memory_folders(key: Path) -> list[Path]:
    """Returns the folders of copies of all runs with a key file."""
    with contextlib.suppress(OSError):
        return sorted(p for p in MEMORY.iterdir() if p.name.startswith(_prefix(key)))
    return []


def remove_copies(key: Path, *, but: str | None = None) -> None:
    """Removes the copies of all runs with a key file, except those of run ``but``."""
    for folder in memory_folders(key):
        if but is None or folder != memory_folder(key, but):
            shutil.rmtree(folder, ignore_errors=True)


def _prefix(key: Path) -> str:
    name = hashlib.sha256(str(key.absolute()).encode()).hexdigest()[:16]
    return f"whalejax-{os.getuid()}-{name}-"
