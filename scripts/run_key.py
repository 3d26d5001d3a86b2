"""Makes a key for the runs of one benchmark, which ends with its process."""

from __future__ import annotations

import atexit
import tempfile
from pathlib import Path

from whalejax.wire.keys import Key, load_key, make_key


def new_key() -> Key:
    """Makes a key, in a folder that is removed at the end."""
    folder = tempfile.TemporaryDirectory(prefix="whalejax-key-")
    atexit.register(folder.cleanup)
    path = Path(folder.name) / "key"
    make_key(path)
    return load_key(path)
