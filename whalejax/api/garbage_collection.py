"""Pauses the garbage collector while a plan is made.

A trace and its graph are hundreds of thousands of small objects that live until the
plan is made. Meanwhile Python's collector scans all of them repeatedly, which took
longer than planning itself, and frees almost nothing.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collections_paused() -> Iterator[None]:
    """Disables cyclic garbage collection inside; reference counts still free objects.

    A collector that was already disabled stays so.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
