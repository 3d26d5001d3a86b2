"""Failures of members: when a process is started again, and when a run is given up."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import MutableMapping

from whalejax.elastic.supervisor.settings import SupervisorSettings


_MOST_SAID = 4000


class Failures:
    """Counts failures, in all and of each slot.

    Attributes:
        due: when a process is to be started in a slot, by the slot's number.
        total: failures so far.
    """

    def __init__(self, settings: SupervisorSettings) -> None:
        self.due: MutableMapping[int, float] = {}
        self.total = 0
        self._settings = settings
        self._times: deque[float] = deque()
        self._of_slot: defaultdict[int, deque[float]] = defaultdict(deque)
        self._fruitless = 0
        self._furthest = -1
        self._first = ""
        self._errors: dict[str, str] = {}

    def said(self, name: str, error: str) -> None:
        """A member told its error before it ends."""
        self._errors.setdefault(name, error)

    def count(self, now: float, name: str, why: str, log: str) -> None:
        """A member failed.

        Args:
            now: the time.
            name: of the member.
            why: it is given up.
            log: the end of what it wrote.
        """
        self.total += 1
        self._times.append(now)
        self._fruitless += 1
        if self._fruitless == 1 or not self._first:
            said = self._errors.pop(name, "") or log
            more = f":\n{said[-_MOST_SAID:].strip()}" if said.strip() else ""
            self._first = f"{name}: {why}{more}"

    def progressed(self, step: int | None = None) -> None:
        """What failed before did not fail for good.

        Args:
            step: that was committed. One that was committed before, and is done again,
                shows nothing: a bug may be in the step behind it.
        """
        if step is not None:
            if step <= self._furthest:
                return
            self._furthest = step
        self._fruitless, self._first = 0, ""

    def exceeded(self, now: float, where: str = "") -> str:
        """Why the run is to be given up, with the first error; or nothing.

        Args:
            now: the time.
            where: the newest checkpoint, as a sentence; the error comes behind it.
        """
        settings = self._settings
        while self._times and now - self._times[0] > settings.window_seconds:
            self._times.popleft()
        first = f"{where}. The first error: {self._first}"
        if self._fruitless >= settings.fruitless:
            return f"{self._fruitless} failures without a new step between them{first}"
        if len(self._times) > settings.restarts:
            return (
                f"{len(self._times)} failures in {settings.window_seconds:.0f} s, more "
                f"than the {settings.restarts} allowed{first}"
            )
        return ""

    def hold(self, now: float, slot: int) -> float:
        """How long a slot stays empty after a failure that happens now.

        Args:
            now: the time.
            slot: whose process failed.
        """
        settings, times = self._settings, self._of_slot[slot]
        times.append(now)
        while now - times[0] > 4 * settings.most_hold_seconds:
            times.popleft()
        again = len(times) - 1
        if not again:
            return 0.0
        return min(
            settings.hold_seconds * 2.0 ** (again - 1), settings.most_hold_seconds
        )
