"""Requests to a scheduler from other machines, by its key.

Adding a job runs code as the user of ``jobs serve``. So a command needs the scheduler's
key file, which is in its folder, or a copy of the file. Connections are encrypted, and
each side shows the certificate in its key file.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final, get_args

from whalejax.distributed.launch_env import split_address
from whalejax.meshes.errors import WhaleError
from whalejax.scheduler.job_table import JobError
from whalejax.scheduler.live import local_socket
from whalejax.scheduler.live.local_socket import WaitingRequest
from whalejax.scheduler.live.requests import (
    MOST_BYTES,
    Answer,
    Request,
    RequestRefused,
)
from whalejax.wire.acceptor import Acceptor
from whalejax.wire.addresses import joined_address
from whalejax.wire.connection import (
    Channel,
    OtherProtocol,
    WireTimeoutError,
    WrongKey,
    dial,
    listen,
)
from whalejax.wire.keys import load_key, make_key
from whalejax.wire.messages import Messages, WireError


KEY: Final = "key"

_REQUESTS: Final = Messages[Request](*get_args(Request))
_ANSWERS: Final = Messages[Answer](*get_args(Answer))
_SECONDS: Final = 30.0
_MOST_WAITING: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerAddress:
    """Options of a command that say where a scheduler is.

    Attributes:
        folder: Folder of ``jobs serve --save``, with the socket and the key.
        address: Host and port of ``jobs serve --listen``; None for the local socket.
        key: Path of the key file; None for the file in the folder.
    """

    folder: Path
    address: str | None = None
    key: Path | None = None


class RemoteSocket:
    """Receives requests with the scheduler's key; the scheduler's loop answers them."""

    def __init__(
        self, folder: Path, address: str, requests: queue.SimpleQueue[WaitingRequest]
    ) -> None:
        """Listens at an address, with the folder's key, which is created if missing.

        Args:
            folder: Folder of the scheduler.
            address: Host and port.
            requests: Queue that receives the requests.

        Raises:
            WhaleError: Nothing can listen there, or the key cannot be read.
        """
        self._requests = requests
        self._room = threading.BoundedSemaphore(_MOST_WAITING)
        host, port = split_address(address, "--listen")
        path = folder / KEY
        make_key(path)
        try:
            listening = listen(host, port)
        except OSError as error:
            raise JobError(
                f"--listen is {address}, and nothing can listen there "
                f"({error.strerror or error}). Give an address of this machine with a "
                "free port"
            ) from error
        where = joined_address(host, port)
        self.address_text = f"{where}, to commands with the key {path}"
        self._acceptor = Acceptor(
            listening, load_key(path), self._notice, most_bytes=MOST_BYTES
        )

    def close(self) -> None:
        """Ends all connections."""
        self._acceptor.close()

    def _notice(self, channel: Channel) -> None:
        try:
            request = channel.next(_REQUESTS)
        except WireError:
            channel.close()  # The other side has ended, or sent no request.
            return
        if request is None:
            return
        if not self._room.acquire(blocking=False):
            channel.close()
            return
        threading.Thread(
            target=self._serve, args=(channel, request), daemon=True
        ).start()

    def _serve(self, channel: Channel, request: Request) -> None:
        asked = WaitingRequest(request, queue.SimpleQueue())
        self._requests.put(asked)
        try:
            with contextlib.suppress(queue.Empty, WireError):
                channel.send(asked.answer.get(timeout=_SECONDS), seconds=_SECONDS)
        finally:
            self._room.release()


def ask(place: SchedulerAddress, request: Request, *, patience: float = 0.0) -> Answer:
    """Sends a request to a scheduler, and returns its answer.

    Args:
        place: Folder or address of the scheduler.
        request: Request to send.
        patience: Seconds to wait for a scheduler that is starting, at its local socket.

    Raises:
        JobError: No scheduler answers, or its key or version differs, or it refuses.
    """
    if place.address is None:
        if place.key is not None:
            raise JobError(
                f"--key is {place.key} without --at, to which it belongs. Leave it "
                "out, or give the address of jobs serve --listen"
            )
        return local_socket.ask(place.folder, request, patience=patience)
    address = split_address(place.address, "--at")
    path = place.key or place.folder / KEY
    try:
        key = load_key(path)
    except WhaleError as error:
        raise JobError(
            f"--at {place.address} needs the key of the scheduler there, the file "
            f"{KEY!r} in the folder of its --save or a copy, and {path} is no such "
            "key. Give it as --key"
        ) from error
    try:
        channel = dial(address, key, seconds=_SECONDS, most_bytes=MOST_BYTES)
    except (WrongKey, OtherProtocol) as error:
        raise JobError(
            f"{error}. Give as --key a copy of the file key in the folder of that jobs "
            "serve, and use the same whalejax"
        ) from None
    except WireError as error:
        raise JobError(
            f"no scheduler listens at {place.address} ({error}). Start whalejax jobs "
            f"serve --listen {place.address} there, or give its address as --at"
        ) from None
    try:
        channel.send(request, seconds=_SECONDS)
        answer = channel.receive(_ANSWERS, seconds=_SECONDS)
    except WireTimeoutError:
        raise JobError(
            f"the scheduler at {place.address} did not answer in {_SECONDS:.0f} s; it "
            "may still carry out the request. See whalejax jobs show"
        ) from None
    except WireError as error:
        raise JobError(
            f"the scheduler at {place.address} ended the connection before its answer "
            f"({error}), and may have carried out the request. See whalejax jobs show "
            "before you ask again"
        ) from None
    finally:
        channel.close()
    if isinstance(answer, RequestRefused):
        raise JobError(answer.why)
    return answer
