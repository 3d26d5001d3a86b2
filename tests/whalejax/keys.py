"""Keys of two runs, made once in each process of the tests."""

from __future__ import annotations

import atexit
import tempfile
from pathlib import Path
from typing import Final

from whalejax.wire.keys import Key, load_key, make_key


_folder: Final = tempfile.TemporaryDirectory(prefix="whalejax-keys-")
atexit.register(_folder.cleanup)


def _made(name: str) -> Key:
    path = Path(_folder.name) / name
    make_key(path)
    return load_key(path)


KEY: Final = _made("key")
OTHER: Final = _made("other")
"""Of another run."""
