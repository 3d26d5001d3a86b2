"""Planning without the garbage collector in between.

A trace and its graph are hundreds of thousands of small objects that live until the
plan is made. While they grow, Python's collector goes through all of them again and
again, which took longer than planning itself, and frees almost nothing.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collections_paused() -> Iterator[None]:
    """No cyclic garbage is looked for inside; reference counts free the rest.

    Where the collector is off already, it stays so.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
