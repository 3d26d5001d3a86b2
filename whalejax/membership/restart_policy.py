"""Failures of members: when to restart a process, and when to give up a run."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict, deque
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Final

from whalejax.distributed.launch_env import printable
from whalejax.membership.settings import SupervisorSettings


_MOST_SAID: Final = 4000
_LONGEST_ERROR: Final = 300

_ERROR_LINE: Final = re.compile(
    r"(?:[\w.]*(?:Error|Exception|Interrupt|Exit|Group)|[A-Za-z_]\w*(?:\.\w+)+)"
    r"(?:: .*)?$"
)
"""Matches the last line of a traceback: the class of an exception, and its text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A failure of a member.

    Attributes:
        at: Time of the failure.
        since: Start of the failed attempt, which is the start of its process or of the
            generation in which it took part.
        name: Name of the member.
        why: Reason for which it was given up.
        error: Error of the member itself; empty if it was lost otherwise.
        step: Newest step that the run had committed; -1 before the first.
    """

    at: float
    since: float
    name: str
    why: str
    error: str = ""
    step: int = -1


class Failures:
    """Counts failures, in total and per slot.

    Members that fail together count as one attempt. Only an attempt that begins after
    an earlier failure, and fails too, shows that a restart does not help.

    Attributes:
        due: Times at which to start processes, by slot number.
        total: Number of failures so far.
    """

    def __init__(self, settings: SupervisorSettings) -> None:
        self.due: MutableMapping[int, float] = {}
        self.total = 0
        self._settings = settings
        self._times: deque[float] = deque()
        self._of_slot: defaultdict[int, deque[float]] = defaultdict(deque)
        self._furthest = -1
        self._errors: dict[str, str] = {}
        self._forget()

    def _forget(self) -> None:
        self._attempts, self._failed_at = 0, float("-inf")
        self._first, self._first_is_error = "", False
        self._first_of: dict[tuple[str, int], Failure] = {}
        self._repeated = ""

    def record_error(self, name: str, error: str) -> None:
        """Records the error that a member reported before its end."""
        self._errors.setdefault(name, error)

    def error_of(self, name: str, log: str) -> str:
        """Returns the error that ended a member, in one line.

        Args:
            name: Name of the member.
            log: End of its log, used if it reported no error.
        """
        text = self._errors.get(name) or error_line(log)
        return printable(" ".join(text.split()))[:_LONGEST_ERROR]

    def count(self, failure: Failure, log: str = "") -> None:
        """Counts a failure; ``log`` is the end of the member's log."""
        self.total += 1
        self._times.append(failure.at)
        if failure.since > self._failed_at:
            self._attempts, self._failed_at = self._attempts + 1, failure.at
        if not self._first or (failure.error and not self._first_is_error):
            said = self._errors.get(failure.name) or log or failure.error
            said = said[-_MOST_SAID:].strip() if failure.error else ""
            more = f":\n{said}" if said else ""
            self._first = f"{failure.name}: {failure.why}{more}"
            self._first_is_error = bool(failure.error)
        self._errors.pop(failure.name, None)
        if failure.error:
            key = failure.error, failure.step
            before = self._first_of.setdefault(key, failure)
            if failure.since > before.at:
                self._repeated = f"{before.name} and then {failure.name}"

    def progressed(self, step: int | None = None) -> None:
        """Forgets earlier failures, because the run has made progress.

        Args:
            step: Committed step. A step that was committed before is no progress: the
                failure may be in the step after it.
        """
        if step is not None:
            if step <= self._furthest:
                return
            self._furthest = step
        self._forget()

    def exceeded(self, now: float, where: str = "", *, passed: bool = False) -> str:
        """Returns why the run is given up, with the first error; empty if it goes on.

        Args:
            now: The time, in seconds.
            where: Text that names the newest checkpoint, which precedes the error.
            passed: Whether another member got further than the one that failed, so that
                the failure does not affect all.
        """
        settings = self._settings
        while self._times and now - self._times[0] > settings.window_seconds:
            self._times.popleft()
        first = f"{where}. The first error: {self._first}"
        if self._repeated and not passed:
            return (
                f"the same error ended {self._repeated}, without a new step between "
                f"them{first}"
            )
        if self._attempts >= settings.fruitless and not passed:
            return f"{self._attempts} failures without a new step between them{first}"
        if len(self._times) > settings.restarts:
            if not settings.restarts:
                return f"a process failed, and none is restarted{first}"
            return (
                f"{len(self._times)} failures in {settings.window_seconds:.0f} s, more "
                f"than the {settings.restarts} allowed{first}"
            )
        return ""

    def hold(self, now: float, slot: int) -> float:
        """Records a failure and returns the slot's restart delay in seconds."""
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


def error_line(log: str) -> str:
    """Returns the line of a log that names the error.

    This is the last line of the last traceback, with the indented lines that follow it.
    Without a traceback, it is the last line of the log.

    Args:
        log: End of a process's log.

    >>> error_line("Traceback (most recent call last):\\nValueError: no\\nDone.\\n")
    'ValueError: no'
    """
    lines = [line for line in log.splitlines() if line.strip()]
    _, result, after = log.rpartition("Traceback (most recent call last)")
    if result:
        found = after.splitlines()
        for place, line in enumerate(found):
            if place and _ERROR_LINE.match(line):
                more = itertools.takewhile(lambda x: x[:1] == " ", found[place + 1 :])
                return " ".join([line, *map(str.strip, more)])
    return lines[-1] if lines else ""
