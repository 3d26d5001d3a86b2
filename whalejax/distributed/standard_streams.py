"""Standard output and error, which may be closed, full, or a pipe that nobody reads.

Apart from the pump, which writes what others said, and from the commands, which write
their own results: for both, a stream that takes no more is no reason to crash, and for
a command it is one to say so and to end with another status than 0.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from types import TracebackType
from typing import Any, TextIO, cast

from whalejax.meshes.errors import WhaleError


class Unwritten(WhaleError, OSError):
    """What a command found cannot be written to standard output."""

    def __init__(self, error: OSError) -> None:
        """Say why.

        Args:
            error: of the system.
        """
        WhaleError.__init__(
            self,
            f"standard output cannot be written ({error.strerror or error}), and what "
            "this command prints there is lost or cut. Send it elsewhere, or make room",
        )


class _Output:
    """Standard output whose errors say that they are of it.

    A pipe that nobody reads any more is left alone: who read has seen enough.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def __getattr__(self, name: str) -> Any:
        return getattr(self._out, name)

    def write(self, text: str) -> int:
        with _Said():
            return self._out.write(text)

    def flush(self) -> None:
        with _Said():
            self._out.flush()


class _Said:
    """Around what writes to standard output: errors of the system become ours."""

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
            raise Unwritten(error) from error


@contextlib.contextmanager
def standard_output() -> Iterator[None]:
    """Inside the block ``sys.stdout`` raises ``Unwritten`` for what it does not take.

    Where standard output is closed, what is printed goes nowhere.
    """
    with contextlib.ExitStack() as stack:
        out: TextIO | None = sys.stdout
        if out is None:
            out = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
        checked = cast("TextIO", _Output(out))
        stack.enter_context(contextlib.redirect_stdout(checked))
        yield


def drop_stdout() -> None:
    """Send what stdout still holds nowhere: Python would fail over it at its end."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def hold_standard_streams() -> None:
    """Open what of stdin, stdout and stderr is closed, so that no pipe or log gets
    its number and what is printed does not end in it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free


def say(text: str) -> None:
    """Print a line to standard error, if it is there and takes it."""
    if sys.stderr is not None:  # else print would take standard output
        with contextlib.suppress(OSError, ValueError):
            print(text, file=sys.stderr, flush=True)
