"""Where the processes of a run keep copies in the memory of their machine.

They outlive the processes, so that the supervisor removes them. It imports no JAX.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Final


MEMORY: Final = Path("/dev/shm")
"""The memory file system of Linux."""


def memory_folder(key: Path) -> Path:
    """Where the copies of a run go.

    Args:
        key: file of the key of the run, which no other run has.
    """
    name = hashlib.sha256(str(key.absolute()).encode()).hexdigest()[:16]
    return MEMORY / f"whalejax-{os.getuid()}-{name}"


def remove_copies(key: Path) -> None:
    """Remove what a run keeps in memory; nothing where it keeps nothing."""
    shutil.rmtree(memory_folder(key), ignore_errors=True)
