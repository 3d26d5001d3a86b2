"""Measures a replica's seconds while its programs run, without waiting for it."""

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
        seconds: Seconds of a micro-batch at the last measurement; 0 if there was none.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._queue: queue.SimpleQueue[tuple[Any, int]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, before: Any) -> None:
        """Micro-batches are about to be issued.

        Args:
            before: An array that is there when they can begin.
        """
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._look_on, name="whalejax-stopwatch", daemon=True
            )
            self._thread.start()
        self._queue.put((before, 0))

    def stop(self, after: Any, count: int) -> None:
        """Ends the issuing of a group of micro-batches.

        Args:
            after: Arrays that are there when they are done; donated to nothing.
            count: Number of micro-batches, 1 or more.
        """
        self._queue.put((after, count))

    def _look_on(self) -> None:
        started: float | None = None
        while True:
            array, count = self._queue.get()
            try:
                jax.block_until_ready(array)
            except (RuntimeError, ValueError):
                started = None  # The step itself says what failed.
                continue
            finally:
                del array  # What it waited for may go before the next step begins.
            now = time.perf_counter()
            if not count:
                started = now
            elif started is not None:
                self.seconds = (now - started) / count
