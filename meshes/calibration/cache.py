"""A cache of measured clusters, one small file for each machine.

The folder is ``$WHALEJAX_CACHE``, else ``$XDG_CACHE_HOME/whalejax``, else
``~/.cache/whalejax``. An unreadable file counts as missing.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whalejax.meshes.cluster_data import ClusterData
from whalejax.meshes.errors import WhaleError, warn
from whalejax.meshes.formats.cluster_toml import from_data, to_data


# Increased when the measurements or their method change.
_FORMAT = 5

MachineKey = Mapping[str, str | int | float]


def directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Returns the folder of the measurements.

    Example:
        >>> directory({"WHALEJAX_CACHE": "/tmp/w"}).as_posix()
        '/tmp/w'
    """
    if environ.get("WHALEJAX_CACHE"):
        return Path(environ["WHALEJAX_CACHE"])
    if environ.get("XDG_CACHE_HOME"):
        return Path(environ["XDG_CACHE_HOME"]) / "whalejax"
    return Path.home() / ".cache" / "whalejax"


def file_of(key: MachineKey) -> Path:
    """Returns the file for one machine."""
    text = json.dumps({**key, "format": _FORMAT}, sort_keys=True)
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    return directory() / f"calibration-{name}.json"


def load(key: MachineKey, budget_seconds: float) -> ClusterData | None:
    """Returns the stored measurement of a machine; None without one of this budget."""
    try:
        record = json.loads(file_of(key).read_text(encoding="utf-8"))
        if record["machine"] != dict(key) or record["format"] != _FORMAT:
            return None
        if float(record["budget_seconds"]) < budget_seconds:
            return None
        return from_data(record["cluster"], "cluster")
    except (OSError, ValueError, KeyError, TypeError, WhaleError):
        return None


def store(key: MachineKey, budget_seconds: float, cluster: ClusterData) -> None:
    """Stores a measurement atomically; warns if the folder cannot be written."""
    record: dict[str, Any] = {
        "format": _FORMAT,
        "machine": dict(key),
        "budget_seconds": budget_seconds,
        "cluster": to_data(cluster),
    }
    path = file_of(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(record, file, indent=1)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        warn(
            f"the measurement of this machine could not be stored in {path.parent}: "
            f"{error}. Set WHALEJAX_CACHE to a writable directory",
        )
