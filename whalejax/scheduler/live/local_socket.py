"""The local socket of a scheduler, in a folder that only its user can open.

Adding a job runs code, so anyone who can open the socket has all rights of its user.
Therefore the folder has mode 0700, and the socket has mode 0600. On Linux, the socket's
address uses a descriptor of the folder, because its path may be too long.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from whalejax.scheduler.job_table import JobError
from whalejax.scheduler.live.job_book import JOURNAL
from whalejax.scheduler.live.requests import (
    MOST_BYTES,
    Answer,
    Request,
    RequestRefused,
    decoded_answer,
    decoded_request,
    encoded,
)


SOCKET: Final = "socket"

_SECONDS: Final = 30.0
_AGAIN_SECONDS: Final = 0.2
_MOST_CONNECTIONS: Final = 64


class WaitingRequest(NamedTuple):
    """A request that waits for its answer."""

    request: Request
    answer: queue.SimpleQueue[Answer]


def make_private(folder: Path) -> None:
    """Creates the scheduler's folder, and ensures that no other user can open it.

    Raises:
        JobError: The folder cannot be created, belongs to another user, or has files
            while other users can open it.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        if status.st_uid != os.geteuid():
            raise JobError(
                f"{folder} belongs to user {status.st_uid}: who may add a job there "
                "runs code as you. Give a folder of your own as --save"
            )
        if stat.S_IMODE(status.st_mode) & 0o077:
            if any(folder.iterdir()) and not (folder / JOURNAL).exists():
                raise JobError(
                    f"{folder} has other files, and other users may open it: a "
                    "scheduler's folder is for its user alone. Give a new folder as "
                    "--save"
                )
            folder.chmod(0o700)
    except OSError as error:
        raise JobError(
            f"{folder} cannot hold the scheduler's socket and journal "
            f"({error.strerror or error}). Give another --save"
        ) from error


class LocalSocket:
    """Receives requests in its own threads; the scheduler's loop answers them."""

    def __init__(self, folder: Path) -> None:
        """Listens at the socket.

        Args:
            folder: Folder that the scheduler has locked. An existing socket in it
                belongs to an earlier scheduler, and is replaced.

        Raises:
            JobError: The socket cannot be created.
        """
        self.requests: queue.SimpleQueue[WaitingRequest] = queue.SimpleQueue()
        self._path = folder / SOCKET
        self._there = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        self._is_closed = False
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        self._listening = socket.socket(socket.AF_UNIX)
        before = os.umask(0o177)
        try:
            with _short(self._path) as path:
                self._listening.bind(path)
        except OSError as error:
            raise JobError(
                f"{self._path} cannot be made ({error.strerror or error}). Give "
                "another --save, on a file system with sockets"
            ) from error
        finally:
            os.umask(before)
        self._listening.listen(_MOST_CONNECTIONS)
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Stops receiving requests, and removes the socket."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        with contextlib.suppress(OSError):
            self._path.unlink()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                link, _ = self._listening.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(_AGAIN_SECONDS)  # for example too many open files
                continue
            if not self._there.acquire(blocking=False):
                link.close()
                continue
            threading.Thread(target=self._serve, args=(link,), daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self._there.release)
            stack.enter_context(link)
            stack.enter_context(contextlib.suppress(OSError))
            link.settimeout(_SECONDS)
            try:
                request = decoded_request(_line(link))
            except JobError as error:
                link.sendall(encoded(RequestRefused(why=str(error))))
                return
            asked = WaitingRequest(request, queue.SimpleQueue())
            self.requests.put(asked)
            with contextlib.suppress(queue.Empty):
                link.sendall(encoded(asked.answer.get(timeout=_SECONDS)))


def ask(folder: Path, request: Request, *, patience: float = 0.0) -> Answer:
    """Sends a request to the scheduler of a folder, and returns its answer.

    Args:
        folder: Folder of the scheduler.
        request: Request to send.
        patience: Seconds to wait for a scheduler that is starting.

    Raises:
        JobError: No scheduler answers, or its version differs, or it refuses.
    """
    end = time.monotonic() + patience
    while True:
        try:
            line = _send_request(folder, request)
            break
        except TimeoutError as error:
            raise JobError(
                f"the scheduler of {folder} did not answer in {_SECONDS:.0f} s; it may "
                "still carry out the request. See whalejax jobs show"
            ) from error
        except OSError as error:
            if time.monotonic() < end:
                time.sleep(_AGAIN_SECONDS)
                continue
            raise JobError(
                f"no scheduler listens at {folder / SOCKET} "
                f"({error.strerror or error}). Start whalejax jobs serve --save "
                f"{folder}, or give the --save of one that runs"
            ) from error
    if not line:
        raise JobError(
            f"the scheduler of {folder} ended the connection before its answer, and "
            "may have carried out the request. See whalejax jobs show before you ask "
            "again"
        )
    answer = decoded_answer(line)
    if isinstance(answer, RequestRefused):
        raise JobError(answer.why)
    return answer


def _send_request(folder: Path, request: Request) -> bytes:
    with socket.socket(socket.AF_UNIX) as link, _short(folder / SOCKET) as short:
        link.settimeout(_SECONDS)
        link.connect(short)
        link.sendall(encoded(request))
        return _line(link)


def _line(link: socket.socket) -> bytes:
    line = bytearray()
    while not line.endswith(b"\n") and len(line) < MOST_BYTES:
        some = link.recv(65536)
        if not some:
            break
        line += some
    return bytes(line)


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """Yields a path to a socket that is short enough for an address."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        short = f"/proc/self/fd/{folder}/{path.name}"
        yield short if Path("/proc/self/fd").exists() else str(path)
    finally:
        os.close(folder)
