"""Leases the micro-batches of one step to trainers.

If a trainer fails or returns a micro-batch, the micro-batch is leased again with higher
attempt numbers. Results with lower attempt numbers are then refused.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final


OWN: Final = ""
"""Name of the primary trainer, which has the registry."""

ATTEMPTS: Final = 1 << 20
"""Number of attempt numbers that a lease reserves for its trainer."""

_LOOK_SECONDS: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchLease:
    """Lease of a micro-batch to a trainer.

    Attributes:
        number: Number of the micro-batch.
        times: Number of its earlier leases.
        trainer: Name of the trainer that has the lease.
    """

    number: int
    times: int
    trainer: str

    @property
    def attempts(self) -> range:
        """Attempt numbers that this trainer may use."""
        return range(self.times * ATTEMPTS + 1, (self.times + 1) * ATTEMPTS)


class MicroBatchQueue:
    """Leases the micro-batches of a step; thread-safe."""

    def __init__(self, count: int, stop: threading.Event) -> None:
        """Starts with all micro-batches waiting.

        Args:
            count: Number of micro-batches of the step.
            stop: Event that ends the step immediately.
        """
        self._stop, self._left = stop, count
        self._waiting = deque(range(count))
        self._times = [0] * count
        self._held: dict[int, MicroBatchLease] = {}
        self._since: dict[int, float] = {}
        self._only_own: set[int] = set()
        self._changed = threading.Condition()

    @property
    def is_over(self) -> bool:
        """Whether all micro-batches are finished, or the step was stopped."""
        return self._left == 0 or self._stop.is_set()

    def leading_count(self, trainer: str) -> int:
        """Returns the number of leases that a trainer has."""
        with self._changed:
            return sum(s.trainer == trainer for s in self._held.values())

    def take(self, trainer: str, most: int) -> MicroBatchLease | None:
        """Leases the next micro-batch to a trainer, or returns None."""
        with self._changed:
            if self.is_over or self.leading_count(trainer) >= most:
                return None
            for number in self._waiting:
                if trainer == OWN or number not in self._only_own:
                    self._waiting.remove(number)
                    share = MicroBatchLease(
                        number=number, times=self._times[number], trainer=trainer
                    )
                    self._held[number] = share
                    self._since[number] = time.monotonic()
                    return share
            return None

    def wait_for(
        self, trainer: str, most: Callable[[], int], seconds: float
    ) -> MicroBatchLease | None:
        """Waits until ``take`` leases a micro-batch; returns None after the wait.

        Args:
            trainer: Name of the trainer, or ``OWN``.
            most: Function that returns the number of leases that it may have at a time.
            seconds: Longest wait in seconds.
        """
        deadline = time.monotonic() + seconds
        while True:
            count = most()
            with self._changed:
                wait = self.take(trainer, count)
                left = deadline - time.monotonic()
                if wait is not None or self.is_over or left <= 0:
                    return wait
                self._changed.wait(min(left, _LOOK_SECONDS))

    def finish(self, share: MicroBatchLease, count: Callable[[], None]) -> bool:
        """Ends a lease after the last stage; returns whether the lease was valid.

        Args:
            share: Lease of the micro-batch.
            count: Function that counts the results; called only for a valid lease.
        """
        with self._changed:
            if self._held.get(share.number) != share or self._stop.is_set():
                return False
            count()
            del self._held[share.number]
            self._left -= 1
            self._changed.notify_all()
            return True

    def overdue(self, seconds: float) -> list[MicroBatchLease]:
        """Returns the leases that secondary trainers have had for over ``seconds``."""
        now = time.monotonic()
        with self._changed:
            return [
                s
                for s in self._held.values()
                if s.trainer != OWN and now - self._since[s.number] > seconds
            ]

    def give_back(self, share: MicroBatchLease) -> bool:
        """Ends the lease of an unfinished micro-batch; returns whether it was valid."""
        with self._changed:
            if self._held.get(share.number) != share:
                return False
            self._only_own.add(share.number)
            self._requeue(share)
            return True

    def lose(self, trainer: str, but: Collection[tuple[int, int]] = ()) -> list[int]:
        """Revokes a trainer's leases, so that others get its micro-batches.

        Args:
            trainer: Name of the trainer.
            but: Number and ``times`` of each lease that the trainer keeps.

        Returns:
            Numbers of the micro-batches whose leases were revoked.
        """
        with self._changed:
            lost = [
                s
                for s in self._held.values()
                if s.trainer == trainer and (s.number, s.times) not in but
            ]
            for share in lost:
                self._requeue(share)
            return sorted(s.number for s in lost)

    def _requeue(self, share: MicroBatchLease) -> None:
        del self._held[share.number]
        self._times[share.number] += 1
        self._waiting.appendleft(share.number)
        self._changed.notify_all()
