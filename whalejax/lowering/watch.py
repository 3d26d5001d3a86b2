"""Steps that several processes make together, when one of them is gone or stands still.

Of a process that is gone the others get an error. For one that stands still they would
wait for ever, in programs that Python cannot interrupt; so a thread looks on, says what
is waited for, and ends the process.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import jax

from whalejax.meshes.problems import WhaleError
from whalejax.planner.issuing import Handing, words_of
from whalejax.planner.schedules import Row


LEAST_SECONDS: Final = 300.0
"""A step may take this long in any case."""

TIMES_LONGEST: Final = 10
"""Or so many times as long as the longest before it."""

EXIT_CODE: Final = 70
"""Of a process that is ended."""

_GONE: Final = (
    "gloo",
    "nccl",
    "connection",
    "socket",
    "unavailable",
    "deadline_exceeded",
    "aborted",
)
"""What errors say that come of a lost process."""


def tells_of_loss(error: BaseException) -> bool:
    """Whether an error of a step says that another process is gone.

    Args:
        error: what issuing a step, or waiting for its results, raised.
    """
    return isinstance(error, (jax.errors.JaxRuntimeError, ValueError)) and any(
        sign in str(error).lower() for sign in _GONE
    )


def lost(error: BaseException, where: str) -> WhaleError:
    """What a user is told when another process is gone.

    Args:
        error: what JAX says of it.
        where: what was being done.
    """
    said = str(error).splitlines()[0][:200]
    return WhaleError(
        f"another process of this step is gone ({said}), at {where}. Look for the "
        "first error of the others, start all processes anew, and restore the latest "
        "checkpoint"
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
        self._begun: float | None = None
        self._results: Sequence[Any] | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """A step is about to be issued."""
        if self._alone:
            return
        with self._lock:
            self._settle()
            self._begun, self._results = time.monotonic(), None
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._look_on, name="whalejax-watch", daemon=True
            )
            self._thread.start()

    def issued(self, results: Sequence[Any]) -> None:
        """All of a step is issued; it ends when its results are there."""
        if not self._alone:
            with self._lock:
                self._results = results

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
                self._begun = self._results = None
            if not self._alone and tells_of_loss(error):
                raise lost(error, self._where()) from error
            raise

    def _settle(self) -> bool:
        """Note the step's end, if it has ended."""
        if self._begun is None:
            return True
        if self._results is None or not all(x.is_ready() for x in self._results):
            return False
        took = time.monotonic() - self._begun
        # The first compiles, and says nothing of those that follow.
        self._longest = 0.0 if self._longest is None else max(took, self._longest)
        self._begun = self._results = None
        return True

    def _overdue(self) -> float | None:
        """The seconds that a step has waited, if they are too many."""
        with self._lock:
            if self._settle() or self._begun is None or self._longest is None:
                return None
            waited = time.monotonic() - self._begun
            allowed = max(self.least_seconds, TIMES_LONGEST * self._longest)
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
        print(
            f"whalejax: a step has waited for {waited:.0f} s at {self._where()}; the "
            f"longest before took {longest:.1f} s. Another process has stopped, or "
            "does something else than this one, which ends here. Look for the first "
            "error of the others, start all processes anew, and restore the latest "
            "checkpoint",
            file=sys.stderr,
            flush=True,
        )
        faulthandler.dump_traceback(file=sys.stderr)
        os._exit(EXIT_CODE)
