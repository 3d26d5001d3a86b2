"""Questions and answers over connections, with a deadline for each question.

A connection carries one question at a time. A caller keeps idle connections, and opens
another if all are in use. An answer is a message, or a refusal with its reason.
"""

from __future__ import annotations

import functools
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, cast

from whalejax.meshes.errors import WhaleError
from whalejax.wire.acceptor import Acceptor
from whalejax.wire.addresses import joined_address
from whalejax.wire.connection import (
    FRAME_SECONDS,
    SLOWEST_BYTES_PER_SECOND,
    Channel,
    ConnectionClosedError,
    OtherProtocol,
    WireTimeoutError,
    WrongKey,
    dial,
)
from whalejax.wire.keys import Key
from whalejax.wire.messages import (
    DATA_BYTES,
    A,
    MalformedError,
    Message,
    Messages,
    Question,
    Text,
    WireError,
    answer_type,
)


_LONGEST_REASON: Final = 2000
_MOST_AT_ONCE: Final = 256
"""Maximum number of processes that ``ask_all`` asks at the same time."""

Address = tuple[str, int]
Handlers = Mapping[type[Question[Any]], Callable[[Any], Message]]
"""Functions that answer questions, by the type of the question."""


class UnansweredError(WhaleError):
    """A question got no answer; base class of the errors below."""

    code, why, blame = "", "", ""
    late = hopeless = False


class RefusedRequestError(UnansweredError):
    """A question was refused.

    Attributes:
        code: Kind of the error: ``"stale"`` (a generation or step that is over or has
            not begun), ``"missing"`` (the process lacks the requested data),
            ``"source"`` (another peer did not answer), ``"late"`` (another peer did not
            answer in time), ``"not finite"`` (received numbers), ``"overflow"`` (a sum
            or state of finite numbers is not finite), ``"shape"`` (another peer sent an
            impossible shape), ``"answer"`` (an invalid answer), or ``"failed"``.
        why: Reason in words.
        blame: Name of another peer that is at fault; empty if none.
    """

    def __init__(self, code: str, why: str, blame: str = "") -> None:
        super().__init__(why)
        self.code, self.why, self.blame = code, why, blame


class UnreachableProcessError(UnansweredError):
    """A process did not answer, or not in time.

    Attributes:
        late: Whether it did not answer in time; if not, the connection ended.
        hopeless: Whether the process uses another key or protocol, so retries fail.
    """

    def __init__(self, text: str, *, late: bool, hopeless: bool = False) -> None:
        super().__init__(text)
        self.late, self.hopeless = late, hopeless


class Declined(Message, tag="refused"):
    """Refusal of a question; see ``RefusedRequestError``."""

    code: Text
    why: Text
    blame: Text


class Service:
    """Answers questions, each in a thread of its own."""

    def __init__(
        self,
        listening: socket.socket,
        key: Key,
        handlers: Handlers,
    ) -> None:
        """Starts to answer questions.

        Args:
            listening: Listening socket; ``close`` closes it.
            key: Key of this process.
            handlers: Handlers of all accepted questions.
        """
        self._questions, self._handlers = Messages(*handlers), handlers
        host, port = listening.getsockname()[:2]
        self.address: Address = host, port
        self._workers = _Workers()
        self._lock = threading.Lock()
        self._served: set[Channel] = set()
        self._acceptor = Acceptor(listening, key, self._notice, most_bytes=DATA_BYTES)

    def close(self) -> None:
        """Ends all connections."""
        self._acceptor.close()
        self._workers.end()

    def _notice(self, channel: Channel) -> None:
        """Starts a thread for a channel that has received data, if it has none."""
        with self._lock:
            if channel in self._served:
                return
            self._served.add(channel)
        self._workers.do(functools.partial(self._serve, channel))

    def _serve(self, channel: Channel) -> None:
        try:
            while True:
                question = channel.next(self._questions)
                if question is None:
                    with self._lock:
                        self._served.discard(channel)
                    # Data that came before this line started no other thread.
                    if not channel.has_more:
                        return
                    self._notice(channel)
                    return
                _send(channel, self._answer(question))
        except WireError:
            channel.close()  # The other side has ended, or sent no valid question.
            with self._lock:
                self._served.discard(channel)

    def _answer(self, question: Question[Any]) -> Message:
        try:
            return self._handlers[type(question)](question)
        except RefusedRequestError as error:
            return _declined(error.code, error.why, error.blame)
        except Exception as error:  # Any error is sent to the asking side.
            return _declined("failed", f"{type(error).__name__}: {error}", "")


def _send(channel: Channel, answer: Message) -> None:
    """Sends an answer, or a refusal if the answer is too large."""
    size = sum(x.nbytes for x in getattr(answer, "arrays", ()))
    try:
        channel.send(answer, seconds=FRAME_SECONDS + size / SLOWEST_BYTES_PER_SECOND)
    except (ConnectionClosedError, WireTimeoutError):
        raise
    except WireError as error:
        channel.send(_declined("failed", str(error), ""))


def _declined(code: str, why: str, blame: str) -> Declined:
    return Declined(code=code, why=why[:_LONGEST_REASON], blame=blame)


class _Workers:
    """Threads that each answer one question at a time; idle threads are reused."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle, self._count = threading.Semaphore(0), 0

    def do(self, task: Callable[[], None]) -> None:
        self._tasks.put(task)
        if not self._idle.acquire(blocking=False):
            self._count += 1
            threading.Thread(target=self._work, daemon=True).start()

    def end(self) -> None:
        for _ in range(self._count):
            self._tasks.put(None)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            self._idle.release()


class Caller:
    """Client that asks other processes questions, over connections that it keeps."""

    def __init__(self, key: Key) -> None:
        """Starts without connections."""
        self._key = key
        self._lock = threading.Lock()
        self._idle: dict[Address, list[Channel]] = {}
        self._busy: set[Channel] = set()
        self._closed = False

    def ask(
        self,
        address: Address,
        question: Question[A],
        *,
        seconds: float,
    ) -> A:
        """Returns the answer to a question.

        Args:
            address: Address of the process.
            question: Question to ask.
            seconds: Seconds in which the complete answer must arrive.

        Raises:
            UnreachableProcessError: The process did not answer, or this caller is
                closed.
            RefusedRequestError: The process refused, or sent an invalid answer.
        """
        end = time.monotonic() + seconds
        answers = _answers_to(type(question))
        while True:
            channel, fresh = self._channel(address, end)
            try:
                left = max(end - time.monotonic(), 0.01)
                channel.send(question, seconds=left)
                left = max(end - time.monotonic(), 0.01)
                answer = channel.receive(
                    answers,
                    seconds=left,
                    until=max(end, time.monotonic() + 0.01),
                )
            except MalformedError as error:
                self._put_back(address, channel)
                where = joined_address(*address)
                why = f"{where} answered {question.kind!r} wrongly: {error}"
                raise RefusedRequestError("answer", why) from None
            except WireError as error:
                channel.close()
                with self._lock:
                    self._busy.discard(channel)
                if fresh or isinstance(error, WireTimeoutError):
                    raise self._unreachable_error(
                        address, question.kind, seconds, error
                    ) from None
                continue  # The idle connection had ended; questions may be repeated.
            self._put_back(address, channel)
            if isinstance(answer, Declined):
                raise RefusedRequestError(answer.code, answer.why, answer.blame)
            return cast(A, answer)

    def _put_back(self, address: Address, channel: Channel) -> None:
        with self._lock:
            self._busy.discard(channel)
            if not self._closed:
                self._idle.setdefault(address, []).append(channel)
        if self._closed:
            channel.close()

    def _channel(self, address: Address, end: float) -> tuple[Channel, bool]:
        with self._lock:
            if self._closed:
                raise UnreachableProcessError(
                    f"{joined_address(*address)}: this process ends", late=False
                )
            idle = self._idle.get(address)
            if idle:
                self._busy.add(idle[-1])
                return idle.pop(), False
        left = end - time.monotonic()
        try:
            channel = dial(address, self._key, seconds=left, most_bytes=DATA_BYTES)
        except WireError as error:
            raise self._unreachable_error(
                address, "a connection", left, error
            ) from None
        with self._lock:
            self._busy.add(channel)
        return channel, True

    def _unreachable_error(
        self, address: Address, what: str, seconds: float, error: WireError
    ) -> UnreachableProcessError:
        late = isinstance(error, WireTimeoutError)
        why = f"no answer in {seconds:.1f} s" if late else str(error)
        return UnreachableProcessError(
            f"{joined_address(*address)} ({what}): {why}",
            late=late,
            hopeless=isinstance(error, WrongKey | OtherProtocol),
        )

    def forget(self, address: Address) -> None:
        """Ends the idle connections to a process."""
        with self._lock:
            idle = self._idle.pop(address, [])
        for channel in idle:
            channel.close()

    def close(self) -> None:
        """Ends all connections; unanswered calls raise ``UnreachableProcessError``."""
        with self._lock:
            self._closed = True
            addresses, busy = [*self._idle], [*self._busy]
        for address in addresses:
            self.forget(address)
        for channel in busy:
            channel.close()


def ask_all(
    caller: Caller, addresses: Sequence[Address], question: Question[A], seconds: float
) -> list[A | UnansweredError]:
    """Returns the answers of several processes, or their errors, in order.

    Args:
        caller: Connections of this process.
        addresses: Addresses of the processes, which are asked at the same time.
        question, seconds: Arguments of ``Caller.ask``.
    """

    def one(address: Address) -> A | UnansweredError:
        try:
            return caller.ask(address, question, seconds=seconds)
        except UnansweredError as error:
            return error

    with ThreadPoolExecutor(max(1, min(len(addresses), _MOST_AT_ONCE))) as pool:
        return [*pool.map(one, addresses)]


@functools.cache
def _answers_to(question: type[Question[A]]) -> Messages[A | Declined]:
    return Messages[Any](answer_type(question), Declined)
