"""Questions and answers over authenticated connections, with a deadline on each.

A connection carries one question at a time; a caller keeps those that are idle and
dials another where all are in use. An answer is a message, or words why there is none.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from whalejax.elastic.wire.acceptor import Acceptor
from whalejax.elastic.wire.connection import Channel, TooLate, dial
from whalejax.elastic.wire.framing import DATA_BYTES, Message, WireError
from whalejax.meshes.errors import WhaleError
from whalejax.swarm.wire.messages import Fields, checked


IDLE_SECONDS: Final = 600.0
"""A connection on which nothing is asked for so long is ended."""

_LONGEST_REASON: Final = 2000

Address = tuple[str, int]
Handler = Callable[[Message], Message]


class Refused(WhaleError):
    """A question was answered with words.

    Attributes:
        code: why: ``"stale"`` (a generation or step that is over, or not begun),
            ``"missing"`` (what was asked for is not held), ``"source"`` (another peer
            did not answer), ``"not finite"``, ``"shape"`` (another peer sent what
            cannot be), ``"busy"``, ``"failed"``.
        blame: name of the peer that is at fault; empty where nobody else is.
    """

    def __init__(self, code: str, why: str, blame: str = "") -> None:
        super().__init__(why)
        self.code, self.why, self.blame = code, why, blame


class Gone(WhaleError):
    """A process did not answer, or not in time.

    Attributes:
        late: it did not answer in time; otherwise the connection ended.
    """

    def __init__(self, text: str, *, late: bool) -> None:
        super().__init__(text)
        self.late = late


class Service:
    """Answers questions, each connection in a thread of its own."""

    def __init__(
        self,
        listening: socket.socket,
        key: bytes,
        allowed: Mapping[str, Fields],
        handlers: Mapping[str, Handler],
    ) -> None:
        """Begin to answer.

        Args:
            listening: closed by ``close``.
            key: of the swarm.
            allowed: fields of each kind of question.
            handlers: what answers each kind.
        """
        self._allowed, self._handlers = allowed, handlers
        host, port = listening.getsockname()[:2]
        self.address: Address = host, port
        self.refusals = 0
        self._acceptor = Acceptor(listening, key, self._serve, most_bytes=DATA_BYTES)

    def close(self) -> None:
        """End all connections."""
        self._acceptor.close()

    def refused(self) -> str:
        """Why connections were refused since this was last asked; else nothing."""
        found = self._acceptor.refused(time.monotonic())
        return "" if found is None else f"{found.count} refused: {found.why}"

    def _serve(self, channel: Channel) -> None:
        while True:
            try:
                question = checked(channel.receive(seconds=IDLE_SECONDS), self._allowed)
                channel.send(self._answer(question))
            except WireError:
                return  # The other side is gone, or sends what is no question.

    def _answer(self, question: Message) -> Message:
        try:
            return self._handlers[question.kind](question)
        except Refused as error:
            self.refusals += 1
            return _words(error.code, error.why, error.blame)
        except Exception as error:  # Whatever a program raises, who asked is told.
            return _words("failed", f"{type(error).__name__}: {error}", "")


def _words(code: str, why: str, blame: str) -> Message:
    fields = {"code": code, "why": why[:_LONGEST_REASON], "blame": blame}
    return Message(kind="refused", fields=fields)


class Caller:
    """Asks other processes."""

    def __init__(self, key: bytes) -> None:
        """Connect to nobody yet.

        Args:
            key: of the swarm.
        """
        self._key = key
        self._lock = threading.Lock()
        self._idle: dict[Address, list[Channel]] = {}
        self._closed = False

    def ask(
        self,
        address: Address,
        kind: str,
        fields: Mapping[str, Any],
        *arrays: Any,
        seconds: float,
    ) -> Message:
        """The answer to a question.

        Args:
            address: of the process.
            kind, fields, arrays: of the question.
            seconds: until the whole answer must be there.

        Raises:
            Gone: it did not answer.
            Refused: it answered with words.
        """
        end = time.monotonic() + seconds
        message = Message(kind=kind, fields=fields, arrays=arrays)
        while True:
            channel, fresh = self._channel(address, end)
            try:
                left = max(end - time.monotonic(), 0.01)
                channel.send(message, seconds=left)
                left = max(end - time.monotonic(), 0.01)
                answer = channel.receive(seconds=left, whole_seconds=left)
            except WireError as error:
                channel.close()
                if fresh or isinstance(error, TooLate):
                    raise self._gone(address, kind, seconds, error) from None
                continue  # It had been ended while idle; each question may come twice.
            with self._lock:
                if not self._closed:
                    self._idle.setdefault(address, []).append(channel)
            if self._closed:
                channel.close()
            return _checked_answer(answer)

    def _channel(self, address: Address, end: float) -> tuple[Channel, bool]:
        with self._lock:
            idle = self._idle.get(address)
            if idle:
                return idle.pop(), False
        left = end - time.monotonic()
        try:
            found = dial(address, self._key, seconds=left, most_bytes=DATA_BYTES)
        except WireError as error:
            raise self._gone(address, "a connection", left, error) from None
        return found, True

    def _gone(
        self, address: Address, what: str, seconds: float, error: WireError
    ) -> Gone:
        late = isinstance(error, TooLate)
        why = f"no answer in {seconds:.1f} s" if late else str(error)
        return Gone(f"{address[0]}:{address[1]} ({what}): {why}", late=late)

    def forget(self, address: Address) -> None:
        """End the idle connections to a process."""
        with self._lock:
            idle = self._idle.pop(address, [])
        for channel in idle:
            channel.close()

    def close(self) -> None:
        """End all idle connections."""
        with self._lock:
            self._closed = True
            addresses = [*self._idle]
        for address in addresses:
            self.forget(address)


def _checked_answer(answer: Message) -> Message:
    if answer.kind != "refused":
        return answer
    told = [answer.fields.get(name) for name in ("code", "why", "blame")]
    code, why, blame = (x if isinstance(x, str) else "" for x in told)
    raise Refused(code, why, blame)
