"""Standard output and error, which may be closed, full, or a pipe that nobody reads.

A stream that no longer accepts data must not crash a process. A command that cannot
write its result reports that, and ends with a nonzero status.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final, TextIO, cast

from whalejax.meshes.errors import WhaleError


_LINE_SECONDS: Final = 1.0
"""Seconds in which a working stream accepts a line."""

_END_SECONDS: Final = 2.0
_MOST_LINES: Final = 1000


class OutputWriteError(WhaleError, OSError):
    """A command cannot write its result to standard output."""

    def __init__(self, error: OSError) -> None:
        """Describes the reason."""
        WhaleError.__init__(
            self,
            f"standard output cannot be written ({error.strerror or error}), and what "
            "this command prints there is lost or cut. Send it elsewhere, or make room",
        )


class _Output:
    """Standard output whose errors say that they come from it.

    A closed pipe is not an error, because its reader has seen enough.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def __getattr__(self, name: str) -> Any:
        return getattr(self._out, name)

    def write(self, text: str) -> int:
        with _output_errors():
            return self._out.write(text)

    def flush(self) -> None:
        with _output_errors():
            self._out.flush()


@contextlib.contextmanager
def _output_errors() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputWriteError(error) from error


@contextlib.contextmanager
def standard_output() -> Iterator[None]:
    """Makes failed writes to ``sys.stdout`` raise ``OutputWriteError`` in the context.

    If standard output is closed, printed text is dropped.
    """
    with contextlib.ExitStack() as stack:
        out: TextIO | None = sys.stdout
        if out is None:
            out = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
        checked = cast("TextIO", _Output(out))
        stack.enter_context(contextlib.redirect_stdout(checked))
        yield


def drop_stdout() -> None:
    """Drops the buffered output of stdout, which Python could not write at exit."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def hold_standard_streams() -> None:
    """Opens ``os.devnull`` in place of closed standard streams.

    Otherwise a pipe or log could get the number of a stream and receive printed text.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number


def say(text: str) -> None:
    """Prints a line to standard error, if possible."""
    if sys.stderr is not None:  # With None, print would use standard output.
        with contextlib.suppress(OSError, ValueError):
            print(text, file=sys.stderr, flush=True)


class BackgroundLines:
    """Writes lines to a stream that may block, such as a full pipe, without waiting.

    Lines that the stream does not accept yet follow later, in order.
    """

    def __init__(self, write: Callable[[bytes], None]) -> None:
        """Starts the writer without lines.

        Args:
            write: Function that writes a line and may block; raises ``OSError`` if the
                stream has no reader.
        """
        self._write = write
        self._changed = threading.Condition()
        self._lines: deque[bytes] = deque()
        self._left_out = 0
        self._is_stuck = False
        self._thread: threading.Thread | None = None

    def put(self, line: str) -> None:
        """Writes a line; returns when it is written, or when the stream blocks.

        Args:
            line: Line with its newline. If very many lines wait, it is dropped and
                counted.
        """
        with self._changed:
            if len(self._lines) >= _MOST_LINES:
                self._left_out += 1
                return
            self._lines.append(line.encode(errors="backslashreplace"))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, daemon=True)
                self._thread.start()
            self._changed.notify_all()
            if not self._is_stuck:
                self._is_stuck = not self._drained(_LINE_SECONDS)

    def flush(self, seconds: float | None = None) -> bool:
        """Waits for at most ``seconds``; returns whether all lines are written."""
        with self._changed:
            return self._drained(seconds)

    def _drained(self, seconds: float | None) -> bool:
        return self._changed.wait_for(lambda: not self._lines, seconds)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._lines))
                line = self._lines[0]
            with contextlib.suppress(OSError, ValueError):
                self._write(line)
            with self._changed:
                self._lines.popleft()
                if not self._lines and self._left_out:
                    text = f"whalejax: {self._left_out} lines more were left out\n"
                    self._lines.append(text.encode())
                    self._left_out = 0
                self._is_stuck = self._is_stuck and bool(self._lines)
                self._changed.notify_all()


def _write_errors(line: bytes) -> None:
    while line:
        line = line[os.write(2, line) :]


_errors = BackgroundLines(_write_errors)
atexit.register(_errors.flush, _END_SECONDS)


def wait_for_lines() -> None:
    """Waits until the lines of ``say_in_background`` are written."""
    _errors.flush()


def say_in_background(text: str) -> None:
    """Writes a line to standard error without waiting for its reader."""
    try:
        is_own = sys.stderr is not None and sys.stderr.fileno() == 2
    except (OSError, ValueError, AttributeError):
        is_own = False
    if is_own:
        _errors.put(f"{text}\n")
    else:
        say(text)
