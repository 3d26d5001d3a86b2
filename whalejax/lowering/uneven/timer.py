"""Measures the seconds of a replica's programs, without delaying the step."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

import jax


class Stopwatch:
    """Measures the seconds of a micro-batch on one replica.

    A thread waits for the first input and the results of a step, while the step
    continues.

    Attributes:
        seconds: Seconds of a micro-batch at the last measurement; 0 before the first.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._queue: queue.SimpleQueue[tuple[Any, int]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, before: Any) -> None:
        """Starts a measurement, before micro-batches are issued.

        Args:
            before: Array that is ready when the micro-batches can start.
        """
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._look_on, name="whalejax-stopwatch", daemon=True
            )
            self._thread.start()
        self._queue.put((before, 0))

    def stop(self, after: Any, count: int) -> None:
        """Ends a measurement, after a group of micro-batches was issued.

        Args:
            after: Arrays that are ready when the micro-batches are done; they are not
                donated.
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
                started = None  # The step itself reports the error.
                continue
            finally:
                del array  # Otherwise the array would live in the next step.
            now = time.perf_counter()
            if not count:
                started = now
            elif started is not None:
                self.seconds = (now - started) / count
