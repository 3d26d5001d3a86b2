"""Copies a process's output to its log, to the terminal and to the launcher.

All output is read from the pipe even if it cannot be written, so that the process never
waits for a reader.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import os
import re
import select
import stat
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from whalejax.distributed.launch_env import (
    MARK,
    BlameReport,
    DeviceReport,
    Joining,
    parse_report,
)
from whalejax.distributed.standard_streams import drop_stdout
from whalejax.meshes.errors import WhaleError


CHUNK_BYTES: Final = 1 << 16
"""Maximum number of bytes read from a pipe at once."""

TAIL_BYTES: Final = 1 << 14
"""Number of bytes kept from the end of a process's output, for reports of failures."""

MOST_LINE: Final = 300
"""Maximum number of characters shown of one line of output."""

PATIENCE_SECONDS: Final = 1.0
"""Seconds after which output that nobody reads is dropped."""

_MOST_MARK_BYTES: Final = 4096
_MARK: Final = MARK.encode()
_LINES: Final = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")


class Log:
    """Log file of a process; the first loss of output is reported."""

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        """Creates the file.

        Args:
            path: Path of the file.
            say: Function that receives a line when output cannot be written.

        Raises:
            WhaleError: The file cannot be created.
        """
        self.path = path
        self._say = say
        self._said = False
        try:
            self._file = open(path, "wb", buffering=0, opener=_without_waiting)
        except OSError as error:
            why = error.strerror
            if error.errno == errno.ENXIO:
                why = "it is a pipe or a socket, where writing may block"
            raise WhaleError(
                f"--logs {path.parent}: {path.name} cannot be written "
                f"({why}). Name another folder, or remove that file"
            ) from error

    def write(self, data: bytes) -> None:
        """Appends data as far as it can be written."""
        view = memoryview(data)
        try:
            while view:
                view = view[self._file.write(view) or 0 :]
        except (OSError, ValueError) as error:
            if not self._said and not self._file.closed:
                self._said = True
                why = getattr(error, "strerror", None) or error
                self._say(
                    f"whalejax: {self.path} cannot be written ({why}); the processes "
                    "go on, and what this one says is missing there"
                )

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()


def _without_waiting(path: str, flags: int) -> int:
    """Opens a file to write, but refuses pipes.

    Raises:
        OSError: The file cannot be opened; ENXIO for a pipe.
    """
    number = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if stat.S_ISFIFO(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.ENXIO, os.strerror(errno.ENXIO), path)
    os.set_blocking(number, True)
    return number


class TerminalOutput:
    """Standard output of this process; output that cannot be written is lost.

    Attributes:
        lost: Whether output was lost while there was a reader.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        """Writes to ``sys.stdout``.

        Args:
            say: Function that receives a line when output can no longer be written.
        """
        self._say = say
        self.lost = False
        self._over = False
        self._lost_bytes = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def write(self, data: bytes) -> None:
        """Writes data at once, incomplete lines included."""
        out = sys.stdout
        if self._over or out is None:
            return
        text = self._decoder.decode(data)
        encoding = getattr(out, "encoding", None) or "utf-8"
        coded = text.encode(encoding, "replace")
        try:
            try:
                number = out.fileno()
            except (OSError, AttributeError):  # an in-memory stream
                out.write(coded.decode(encoding))
                out.flush()
            else:
                self._write_to(number, coded)
        except (OSError, ValueError) as error:
            self._over = True
            self.lost = not isinstance(error, BrokenPipeError)
            drop_stdout()
            why = getattr(error, "strerror", None) or error
            self._say(
                f"whalejax: rank 0 cannot be shown ({why}); the processes go on, and "
                "its log has what it says"
            )

    def _write_to(self, number: int, data: bytes) -> None:
        """Writes data to a descriptor, and drops data that nobody reads in time."""
        if self._lost_bytes and _takes(number, 0.0):
            said = f"\n[{self._lost_bytes} bytes are left out here: see the log]\n"
            self._lost_bytes = 0
            data = said.encode() + data
        patience = 0.0 if self._lost_bytes else PATIENCE_SECONDS
        while data:
            if not _takes(number, patience):
                self._lost_bytes += len(data)
                return
            data = data[os.write(number, data[: select.PIPE_BUF]) :]


def _takes(number: int, seconds: float) -> bool:
    """Returns whether ``PIPE_BUF`` bytes can be written within a time."""
    takes = select.poll()
    takes.register(number, select.POLLOUT)
    return bool(takes.poll(seconds * 1000))


class Pump:
    """Reads the output of one process from a pipe.

    Attributes:
        last: Time of the last output, by ``time.monotonic()``.
    """

    def __init__(
        self,
        source: int,
        outputs: tuple[Log | TerminalOutput, ...],
        told: Callable[[DeviceReport | BlameReport | Joining], bool],
    ) -> None:
        """Connects a source to its outputs.

        Args:
            source: Descriptor of the pipe.
            outputs: Targets of all output except messages for the launcher.
            told: Function that receives messages for the launcher. It returns False for
                an invalid message, which then counts as output.
        """
        self.last = time.monotonic()
        self._source = source
        self._outputs = outputs
        self._told = told
        self._tail = b""
        self._held = b""
        self._at_start = True
        self._lock = threading.Lock()

    def run(self) -> None:
        """Reads until the process and its children have closed the pipe."""
        while True:
            try:
                data = os.read(self._source, CHUNK_BYTES)
            except OSError:
                data = b""
            if not data:
                break
            self.last = time.monotonic()
            self.feed(data)
        self._write(self._held)

    def feed(self, data: bytes) -> None:
        """Passes data on, but holds back an incomplete message for the launcher."""
        passed = []
        for piece in _LINES.findall(data):
            line, self._held = self._held + piece, b""
            ends = piece.endswith((b"\n", b"\r"))
            begins = self._at_start and _MARK.startswith(line[: len(_MARK)])
            if begins and not ends and len(line) < _MOST_MARK_BYTES:
                self._held = line
                continue
            if not (begins and ends and self._for_launcher(line)):
                passed.append(line)
            self._at_start = ends
        self._write(b"".join(passed))

    def _for_launcher(self, line: bytes) -> bool:
        for_launcher = parse_report(line) if line.startswith(_MARK) else None
        return for_launcher is not None and self._told(for_launcher)

    def _write(self, data: bytes) -> None:
        if not data:
            return
        with self._lock:
            self._tail = (self._tail + data)[-TAIL_BYTES:]
        for output in self._outputs:
            output.write(data)

    def tail(self, count: int) -> list[str]:
        """Returns the last lines of output, each shortened to ``MOST_LINE``."""
        with self._lock:
            lines = self._tail.decode(errors="replace").splitlines()[-count:]
        return [
            line if len(line) <= MOST_LINE else f"{line[:MOST_LINE]}…" for line in lines
        ]
