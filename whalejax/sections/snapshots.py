"""Snapshots of a process's rows in a folder, of which the newest complete one is used.

Snapshots survive the process but not the machine. After the loss of a machine, the
state comes from a checkpoint.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np


_NAME: Final = "rows-{:012d}.npz"


def write_snapshot(
    folder: Path, arrays: Mapping[str, np.ndarray], kept: int = -1
) -> None:
    """Writes a snapshot, then removes the older ones.

    Args:
        folder: Folder with only this process's snapshots.
        arrays: Arrays that ``SparseRows.copy`` returned.
        kept: Version of a snapshot that is not removed; -1 for none.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = _NAME.format(int(arrays["version"]))
    draft = folder / f".{name}.{os.getpid()}"
    with draft.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
    draft.replace(folder / name)
    for other in sorted(folder.glob("rows-*.npz")):
        if other.name < name and other.name != _NAME.format(kept):
            other.unlink(missing_ok=True)


def read_snapshot(folder: Path, version: int = -1) -> dict[str, np.ndarray] | None:
    """Returns the newest complete snapshot, or None.

    Args:
        folder: Folder of the snapshots.
        version: Version of the snapshot to read; newer snapshots are removed, because
            their steps will be repeated. -1 reads the newest.
    """
    for path in folder.glob("rows-*.npz") if version >= 0 else ():
        if path.name > _NAME.format(version):
            path.unlink(missing_ok=True)
    for path in sorted(folder.glob("rows-*.npz"), reverse=True):
        if version >= 0 and path.name != _NAME.format(version):
            continue
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as found:
                return {name: found[name] for name in found.files}
        except (OSError, ValueError, zipfile.BadZipFile):
            continue
    return None


def clear_snapshots(folder: Path) -> None:
    """Removes all snapshots of a process.

    Args:
        folder: Folder of the snapshots.
    """
    for path in folder.glob("*rows-*.npz*"):
        path.unlink(missing_ok=True)
