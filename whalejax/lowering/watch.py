"""Steps that several processes make together, when one of them is gone or stands still.

Of a process that is gone the others get an error. For one that stands still they would
wait for ever, in programs that Python cannot interrupt; so a thread looks on, says what
is waited for, and ends the process.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from whalejax import beats
from whalejax.meshes.launched import ENDS_FOR_ANOTHER
from whalejax.meshes.problems import WhaleError
from whalejax.planner.issuing import Handing, words_of
from whalejax.planner.schedules import Row


LEAST_SECONDS: Final = 300.0
"""A step may take this long in any case."""

TIMES_LONGEST: Final = 10
"""Or so many times as long as the longest before it."""


def lost(error: BaseException, where: str) -> WhaleError:
    """What a user is told when another process is gone; waits to see which.

    Args:
        error: what JAX says of it.
        where: what was being done.
    """
    said = str(error).splitlines()[0][:200]
    who = beats.begun().missing() or "which one cannot be seen from here"
    return WhaleError(
        f"another process of this step is gone ({said}), at {where}: {who}. Look for "
        "its first error, start all processes anew, and restore the latest checkpoint"
    )


class Watch:
    """Watches one step at a time.

    The first step is let be: processes wait in it while others compile.

    Attributes:
        least_seconds: that a step may take in any case.
        doing: what is being issued.
    """

    def __init__(self, *, alone: bool) -> None:
        """Know whether there is something to watch.

        Args:
            alone: no other process takes part, so that nothing is watched.
        """
        self._alone = alone
        self.least_seconds = LEAST_SECONDS
        self.doing: Row | Handing | None = None
        self._longest: float | None = None
        # When each step that has not ended was begun, and what it will give.
        self._open: deque[tuple[float, Sequence[Any] | None]] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """A step is about to be issued."""
        if self._alone:
            return
        beats.begun().step()
        with self._lock:
            self._settle()
            self._open.append((time.monotonic(), None))
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._look_on, name="whalejax-watch", daemon=True
            )
            self._thread.start()

    def issued(self, results: Sequence[Any]) -> None:
        """All of a step is issued; it ends when its results are there."""
        if not self._alone:
            with self._lock:
                self._open.append((self._open.pop()[0], results))

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around the issuing of a step.

        Raises:
            WhaleError: a process that takes part is gone.
        """
        self.begin()
        try:
            yield
        except BaseException as error:
            with self._lock:
                self._open.clear()
            if not self._alone and beats.tells_of_loss(error):
                raise lost(error, self._where()) from error
            raise

    def _settle(self) -> None:
        """Note the end of the steps that have ended."""
        while self._open and _there(self._open[0][1]):
            took = time.monotonic() - self._open.popleft()[0]
            # The first compiles, and says nothing of those that follow.
            self._longest = 0.0 if self._longest is None else max(took, self._longest)

    def _overdue(self) -> float | None:
        """The seconds that a step has waited, if they are too many."""
        with self._lock:
            self._settle()
            if not self._open or self._longest is None:
                return None
            waited = time.monotonic() - self._open[0][0]
            allowed = max(self.least_seconds, TIMES_LONGEST * self._longest)
            if beats.begun().ended():  # for one that has gone home nobody need wait
                allowed = min(allowed, beats.begun().silent_seconds)
            return waited if waited > allowed else None

    def _look_on(self) -> None:
        while True:
            time.sleep(min(1.0, self.least_seconds / 4))
            waited = self._overdue()
            if waited is not None:
                self._end(waited)

    def _where(self) -> str:
        return "its beginning" if self.doing is None else words_of(self.doing)

    def _end(self, waited: float) -> None:
        longest = self._longest or 0.0
        who = beats.begun().late() or (
            "All processes are there and have begun as many steps: another one does "
            "something else than this one"
        )
        print(
            f"whalejax: a step has waited for {waited:.0f} s at {self._where()}; the "
            f"longest before took {longest:.1f} s. {who}. This process ends here. Look "
            "for the first error of the others, start all processes anew, and restore "
            "the latest checkpoint",
            file=sys.stderr,
            flush=True,
        )
        faulthandler.dump_traceback(file=sys.stderr)
        beats.begun().leave(ENDS_FOR_ANOTHER)


def _there(results: Sequence[Any] | None) -> bool:
    """What a step gives is there; what the next one has consumed was."""
    if results is None:
        return False
    try:
        return all(x.is_deleted() or x.is_ready() for x in results)
    except RuntimeError:  # consumed in this very moment
        return True
