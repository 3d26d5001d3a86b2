"""Ends a process whose step waits for another process that died or hangs.

If a process dies, the others get an error. If one hangs, the others would wait for
ever, in programs that Python cannot interrupt. So a thread watches the steps, reports
the wait, and ends the process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from whalejax.distributed.launch_env import ENDS_FOR_ANOTHER
from whalejax.distributed.standard_streams import say
from whalejax.membership import launch_heartbeat
from whalejax.meshes.errors import WhaleError
from whalejax.planner.pipeline.schedules import ScheduleRow
from whalejax.planner.pipeline.transfer_order import ScheduledTransfer, words_of


LEAST_SECONDS: Final = 300.0
"""Smallest deadline of a step, in seconds."""

FIRST_SECONDS: Final = 3600.0
"""Deadline in seconds of the first step of a kind, as processes may still compile."""

TIMES_LONGEST: Final = 10
"""Deadline of a step, as a multiple of the longest earlier step of its kind."""


def lost_process_error(error: BaseException, where: str) -> WhaleError:
    """Returns the error for a step that failed because another process died.

    The function waits until the heartbeats show which process died.

    Args:
        error: Error that JAX raised.
        where: Activity that failed, for the message.
    """
    said = str(error).splitlines()[0][:200]
    who = (
        launch_heartbeat.start_heartbeat().missing()
        or "which one cannot be seen from here"
    )
    return WhaleError(
        f"another process of this step is gone ({said}), at {where}: {who}. Look for "
        "its first error, start all processes anew, and restore the latest checkpoint"
    )


class Watch:
    """Watches steps and evaluations.

    Attributes:
        least_seconds: Smallest deadline of a step, in seconds.
        first_seconds: Deadline of the first step of each kind, in seconds.
        doing: Part of the step that is being issued, or None.
    """

    def __init__(self, *, alone: bool) -> None:
        """Starts the watch, except in a process that runs alone.

        Args:
            alone: Whether no other process takes part.
        """
        self._alone = alone
        self.least_seconds = LEAST_SECONDS
        self.first_seconds = FIRST_SECONDS
        self.doing: ScheduleRow | ScheduledTransfer | None = None
        self._failed = ""
        # Seconds of the longest step of each kind, without the first one.
        self._longest: dict[str, float] = {}
        # Kind, start and pending results of each unfinished step.
        self._open: deque[tuple[str, float, Sequence[Any] | None]] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def begin(self, kind: str) -> None:
        """Starts to watch a step that is about to be issued.

        Raises:
            WhaleError: An earlier step failed in this process, and other processes may
                still wait in that step.
        """
        if self._alone:
            return
        if self._failed:
            raise WhaleError(
                f"{self._failed} failed before in this process, and other processes "
                "may still wait in it: they would read data of this step as data of "
                "that one. Look at that error, start all processes anew, and restore "
                "the latest checkpoint"
            )
        launch_heartbeat.start_heartbeat().step()
        with self._lock:
            self._settle()
            self._open.append((kind, time.monotonic(), None))
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._look_on, name="whalejax-watch", daemon=True
            )
            self._thread.start()

    def issued(self, results: Sequence[Any]) -> None:
        """Sets the results of the issued step, which ends when they are ready."""
        if not self._alone:
            with self._lock:
                self._open.append((*self._open.pop()[:2], results))

    @contextmanager
    def step(self, kind: str = "a step") -> Iterator[None]:
        """Watches a block that issues a step or other work.

        Args:
            kind: Name of the work, for the message.

        Raises:
            WhaleError: A process died, or an earlier step failed.
        """
        self.begin(kind)
        try:
            yield
        except BaseException as error:
            self._failed = kind
            with self._lock:
                self._open.clear()
            if not self._alone and launch_heartbeat.tells_of_loss(error):
                raise lost_process_error(error, self._activity_text()) from error
            raise

    def _settle(self) -> None:
        while self._open and _results_ready(self._open[0][2]):
            kind, began, _ = self._open.popleft()
            took, longest = time.monotonic() - began, self._longest.get(kind)
            # The first one compiles, so its time does not count.
            self._longest[kind] = 0.0 if longest is None else max(took, longest)

    def _overdue(self) -> tuple[str, float, float] | None:
        with self._lock:
            self._settle()
            if not self._open:
                return None
            kind, began, _ = self._open[0]
            longest, waited = self._longest.get(kind), time.monotonic() - began
            allowed = (
                self.first_seconds
                if longest is None
                else max(self.least_seconds, TIMES_LONGEST * longest)
            )
            if (
                launch_heartbeat.start_heartbeat().ended_ranks()
            ):  # Processes that ended do not answer.
                allowed = min(
                    allowed, launch_heartbeat.start_heartbeat().silent_seconds
                )
            return (kind, waited, longest or 0.0) if waited > allowed else None

    def _look_on(self) -> None:
        while True:
            time.sleep(min(1.0, self.least_seconds / 4))
            overdue = self._overdue()
            if overdue is not None:
                self._end(*overdue)

    def _activity_text(self) -> str:
        return "its beginning" if self.doing is None else words_of(self.doing)

    def _end(self, kind: str, waited: float, longest: float) -> None:
        who = launch_heartbeat.start_heartbeat().late() or (
            "All processes are alive and have begun the same number of steps: another "
            "one runs a different program"
        )
        say(
            f"whalejax: {kind} has waited for {waited:.0f} s at "
            f"{self._activity_text()}; the "
            f"longest before took {longest:.1f} s. {who}. This process ends here. Look "
            "for the first error of the others, start all processes anew, and restore "
            "the latest checkpoint"
        )
        with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):
            faulthandler.dump_traceback(file=sys.stderr)
        launch_heartbeat.start_heartbeat().leave(ENDS_FOR_ANOTHER)


def _results_ready(results: Sequence[Any] | None) -> bool:
    if results is None:
        return False
    try:
        return all(x.is_deleted() or x.is_ready() for x in results)
    except RuntimeError:  # The array was donated in this moment.
        return True
