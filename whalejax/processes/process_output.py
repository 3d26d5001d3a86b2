"""Copies a process's output to its log, to the terminal and to the launcher.

Apart from the launcher, because of its one promise: whatever the process writes and
whatever cannot be written is taken out of the pipe, so that the process never waits.
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
"""Taken out of a pipe at once."""

TAIL_BYTES: Final = 1 << 14
"""Kept of the end of what a process wrote, for when it fails."""

MOST_LINE: Final = 300
"""Characters shown of one line of it."""

PATIENCE_SECONDS: Final = 1.0
"""After which what is shown and not read is left out."""

_MOST_MARK_BYTES: Final = 4096
_MARK: Final = MARK.encode()
_LINES: Final = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")


class Log:
    """A file of what a process wrote; what it cannot take is lost, and said once."""

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        """Makes the file.

        Args:
            path: Path of the file.
            say: Function that receives a line when something cannot be written.

        Raises:
            WhaleError: It cannot be made.
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
        """Appends as much as the file takes."""
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
        """Writes no more."""
        with contextlib.suppress(OSError):
            self._file.close()


def _without_waiting(path: str, flags: int) -> int:
    """Opens a file to write; a pipe, whether somebody reads it or not, is refused.

    Raises:
        OSError: ENXIO for a pipe, as the system itself says where nobody reads it.
    """
    number = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if stat.S_ISFIFO(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.ENXIO, os.strerror(errno.ENXIO), path)
    os.set_blocking(number, True)
    return number


class TerminalOutput:
    """The terminal, or what stands for it; what it cannot take is lost.

    Attributes:
        lost: Whether output was lost while somebody was there to read.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        """Writes to ``sys.stdout``.

        Args:
            say: Function that receives a line when nothing can be written any more.
        """
        self._say = say
        self.lost = False
        self._over = False
        self._lost_bytes = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def write(self, data: bytes) -> None:
        """Shows what has come, parts of lines too."""
        out = sys.stdout
        if self._over or out is None:
            return
        text = self._decoder.decode(data)
        encoding = getattr(out, "encoding", None) or "utf-8"
        coded = text.encode(encoding, "replace")
        try:
            try:
                number = out.fileno()
            except (OSError, AttributeError):  # in memory, which takes all
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
        """Writes what a descriptor takes; leaves out what nobody reads."""
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
    """Whether so much as ``PIPE_BUF`` can be written without waiting longer."""
    takes = select.poll()
    takes.register(number, select.POLLOUT)
    return bool(takes.poll(seconds * 1000))


class Pump:
    """Takes out of a pipe what one process writes.

    Attributes:
        last: When something came last, in ``time.monotonic()``.
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
            outputs: Targets of all output that is not for the launcher.
            told: Function that receives messages for the launcher; it returns False for
                invalid ones, which then count as output.
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
        """Takes all, until the process and its children have closed the pipe."""
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
        """Passes on what came; what may become a line for the launcher is held."""
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
        """The last lines that were written, each cut where it is long."""
        with self._lock:
            lines = self._tail.decode(errors="replace").splitlines()[-count:]
        return [
            line if len(line) <= MOST_LINE else f"{line[:MOST_LINE]}…" for line in lines
        ]
