"""How long a replica takes, measured while its programs run, without waiting for it."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

import jax


class Stopwatch:
    """Measures what a micro-batch takes on one replica.

    A thread waits for what a step begins with and ends with; the step goes on.

    Attributes:
        seconds: of a micro-batch when last measured; 0 if it never was.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._queue: queue.SimpleQueue[tuple[Any, Any, int]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def time(self, before: Any, after: Any, count: int) -> None:
        """Measure micro-batches that were issued.

        Args:
            before: an array that is there when they can begin.
            after: one that is there when they are done; donated to nothing.
            count: how many they are, 1 or more.
        """
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._look_on, name="whalejax-stopwatch", daemon=True
            )
            self._thread.start()
        self._queue.put((before, after, count))

    def _look_on(self) -> None:
        while True:
            before, after, count = self._queue.get()
            try:
                jax.block_until_ready(before)
                start = time.perf_counter()
                jax.block_until_ready(after)
            except (RuntimeError, ValueError):
                continue  # The step itself says what failed.
            self.seconds = (time.perf_counter() - start) / count
