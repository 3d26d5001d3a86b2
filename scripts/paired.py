"""Times two programs in turn and compares each pair, for ``scripts/bench_*.py``.

The machine's speed drifts; two timings next to each other drift together, so that their
ratio is reliable.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final


ROOT = Path(__file__).resolve().parents[1]


def eight_devices() -> None:
    """Requests eight virtual CPU devices; call it before JAX is imported."""
    flag = "--xla_force_host_platform_device_count=8"
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
    sys.path.insert(0, str(ROOT))


KEPT_MEMORY: Final = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TOP_PAD_": "1000000000",
    "MALLOC_TRIM_THRESHOLD_": "8000000000",
}
"""Variables with which glibc keeps freed memory for later allocations."""


def keep_memory() -> None:
    """Restarts the script with ``KEPT_MEMORY``; call it before JAX is imported.

    A CPU program gets new temporary memory at each run, which costs a page fault for
    every 4 KiB. On other devices this cost does not exist.
    """
    if any(os.environ.get(name) != value for name, value in KEPT_MEMORY.items()):
        os.environ.update(KEPT_MEMORY)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    first_seconds: tuple[float, ...]
    second_seconds: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Median over pairs of first over second."""
        pairs = zip(self.first_seconds, self.second_seconds, strict=True)
        return statistics.median(a / b for a, b in pairs)


def timed_pairs(
    first: Callable[[], Any], second: Callable[[], Any], *, pairs: int, warm: int = 2
) -> Pairs:
    """Times two callables in turn, with the order swapped from pair to pair.

    Args:
        first, second: Callables that run once and block until done.
        pairs: Number of timed pairs.
        warm: Number of earlier pairs that do not count.
    """
    times: tuple[list[float], list[float]] = ([], [])
    for index in range(warm + pairs):
        order = (0, 1) if index % 2 else (1, 0)
        for place in order:
            start = time.perf_counter()
            (first, second)[place]()
            elapsed = time.perf_counter() - start
            if index >= warm:
                times[place].append(elapsed)
    return Pairs(first_seconds=tuple(times[0]), second_seconds=tuple(times[1]))
