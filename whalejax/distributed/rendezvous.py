"""Waits for all processes of a program, before JAX is started in any of them.

If processes are missing, JAX aborts the others with a C++ stack trace that names
process 0. If JAX's port is in use, it aborts process 0. So process 0 first listens at
that port itself, and the others connect to it. All processes then report the missing
ranks. JAX cannot be interrupted while it joins the processes. So the connections stay
open meanwhile, and a process that ends or hangs ends the others.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Final, TypeAlias

from msgspec import Meta

from whalejax.distributed.first_connection import listen_at, reach
from whalejax.distributed.launch_env import (
    ENDS_FOR_ANOTHER,
    blame,
    printable,
    split_address,
)
from whalejax.meshes.errors import WhaleError
from whalejax.wire.acceptor import Acceptor
from whalejax.wire.addresses import joined_address
from whalejax.wire.connection import Channel, OtherProtocol, WireTimeoutError, WrongKey
from whalejax.wire.keys import Key
from whalejax.wire.messages import Count, Message, Messages, Text, WireError
from whalejax.wire.run_messages import RegistrationRefused


MOST_NAMED: Final = 10
"""Maximum number of missing processes that a message names."""

_MARGIN_SECONDS: Final = 5.0  # Process 0 gives up this much before the others.

_Rank: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 20)]


class Arrival(Message):
    """First message of a process."""

    rank: _Rank
    count: Count
    where: Text


class NotStopped(Message, tag="here"):
    """Heartbeat of a process while JAX joins it."""


class ProcessJoined(Message, tag="joined"):
    """Message that JAX has joined a process."""


class MissingRanks(Message):
    """Message with some of the missing ranks."""

    ranks: Annotated[list[_Rank], Meta(max_length=MOST_NAMED + 1)]


class Go(Message):
    """Message that all processes have connected."""


class LostProcess(Message):
    """Message that all processes end because one was lost: its rank, what happened to
    it, and the full text of the error.
    """

    rank: _Rank
    why: Text
    text: Text


_TO_HOST: Final = Messages[Arrival | NotStopped | ProcessJoined](
    Arrival, NotStopped, ProcessJoined
)
_TO_GUEST: Final = Messages[MissingRanks | Go | LostProcess | RegistrationRefused](
    MissingRanks, Go, LostProcess, RegistrationRefused
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlace:
    """Rank of this process, and the address at which all meet.

    Attributes:
        coordinator: ``"host:port"`` of process 0.
        count: Number of processes.
        rank: Rank of this process.
        seconds: Seconds after which an absent process counts as missing.
        join_seconds: Seconds in which JAX must join the processes once all are there.
        key: Key of this process; None without one.
    """

    coordinator: str
    count: int
    rank: int
    seconds: float
    join_seconds: float
    key: Key | None = None


class LostProcessError(WhaleError):
    """A process is missing, or has failed; ``rank`` is its rank."""

    def __init__(self, rank: int, said: str) -> None:
        super().__init__(said)
        self.rank = rank


def rendezvous(
    place: ProcessPlace, end: Callable[[str], None]
) -> RendezvousServer | RendezvousClient:
    """Waits until all processes have connected.

    Args:
        place: Rank and meeting address of this process.
        end: Function that ends this process for a reason. A thread calls it if another
            process is lost while JAX joins them.

    Returns:
        Object whose ``mark_joined()`` must be called once JAX has joined them.

    Raises:
        WhaleError: The port is in use, another process is missing, or process 0 refuses
            this one.
    """
    made = (
        RendezvousServer(place, end)
        if place.rank == 0
        else RendezvousClient(place, end)
    )
    try:
        made.wait()
    except BaseException:
        made.close()
        raise
    return made


def missing_ranks_text(missing: list[int], count: int) -> str:
    """Returns process numbers as the subject of a sentence.

    >>> missing_ranks_text([2], 4), missing_ranks_text([1, 2], 4)
    ('process 2 of 4 has', 'processes 1, 2 of 4 have')
    """
    named = ", ".join(map(str, missing[:MOST_NAMED]))
    if len(missing) > MOST_NAMED:
        named += f" and {len(missing) - MOST_NAMED} more"
    one = len(missing) == 1
    return f"process{'' if one else 'es'} {named} of {count} {'has' if one else 'have'}"


class RendezvousServer:
    """Process 0, to which the others connect; runs in the connections' loop."""

    def __init__(self, place: ProcessPlace, end: Callable[[str], None]) -> None:
        """Listens at the port that JAX's service will have.

        Raises:
            WhaleError: The port cannot be used.
        """
        self._place = place
        self._end = end
        # Text that says where each process is, and its connection.
        self._here: dict[int, tuple[str, Channel]] = {}
        self._ranks: dict[Channel, int] = {}
        self._joined: set[int] = set()
        self._gone: dict[int, str] = {}
        self._heard: dict[int, float] = {}
        self._began = False
        self._over = False
        self._changed = threading.Condition()
        self._acceptor = Acceptor(
            _listen(place),
            place.key,
            self._notice,
            idle_seconds=2 * (place.seconds + place.join_seconds),
        )

    def wait(self) -> None:
        """Waits until all processes have connected, and tells them.

        Raises:
            LostProcessError: Processes are missing.
        """
        place = self._place
        with self._changed:
            self._changed.wait_for(lambda: self._full() or self._fatal(), place.seconds)
            full, missing = self._full(), self._missing()
            fatal = self._fatal()
        if full:
            # JAX uses the port from here on.
            self._acceptor.stop_listening()
            now = time.monotonic()
            with self._changed:
                self._began = True
                self._heard = {rank: now for rank in self._here}
            self._tell_all(Go())
            threading.Thread(target=self._look_on, daemon=True).start()
            return
        if fatal:
            rank, why = next(iter(self._gone.items()))
            text = f"process {rank} {why}"
        else:
            rank, why = missing[0], f"has not come in {place.seconds:.0f} s"
            text = (
                f"{missing_ranks_text(missing, place.count)} not come to "
                f"{place.coordinator} in {place.seconds:.0f} s. Look for the first "
                "error there: is it running, has it a process_id of its own and the "
                "same coordinator and num_processes, and is this address and port "
                "open to it?"
            )
        self._tell_all(LostProcess(rank=rank, why=why, text=text))
        blame(rank, why)
        raise LostProcessError(rank, text)

    def mark_joined(self) -> None:
        """Records that JAX has joined this process; heartbeats now watch it."""
        with self._changed:
            self._joined.add(0)
            self._changed.notify_all()

    def close(self) -> None:
        """Closes all connections."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
        self._acceptor.close()

    def _full(self) -> bool:
        return len(self._here) == self._place.count - 1

    def _fatal(self) -> bool:
        # Without a key it may be a stranger's connection, which can be ignored.
        return bool(self._gone and self._place.key)

    def _missing(self) -> list[int]:
        return [rank for rank in range(1, self._place.count) if rank not in self._here]

    def _tell_all(self, message: Message) -> None:
        for _, channel in [*self._here.values()]:
            with contextlib.suppress(WireError):
                channel.post(message)

    # In the loop.

    def _notice(self, channel: Channel) -> None:
        try:
            while (message := channel.next(_TO_HOST)) is not None:
                if isinstance(message, Arrival):
                    self._enter(channel, message)
                    continue
                with self._changed:
                    rank = self._ranks.get(channel)
                    if rank is not None:
                        self._heard[rank] = time.monotonic()
                        self._joined |= (
                            {rank} if isinstance(message, ProcessJoined) else set()
                        )
                        self._changed.notify_all()
        except WireError:
            self._leave(channel)
            channel.close()

    def _enter(self, channel: Channel, message: Arrival) -> None:
        rank, count = message.rank, message.count
        with self._changed:
            if count != self._place.count:
                wrong = (
                    f"num_processes is {count} in process {rank} and "
                    f"{self._place.count} in process 0"
                )
            elif not 0 < rank < count:
                wrong = f"process_id is {rank}, which process 0 has itself"
            elif rank in self._here or channel in self._ranks:
                wrong = f"process_id {rank} was given to two processes"
                if rank in self._here:
                    wrong += f": {self._here[rank][0]} came before"
            else:
                self._gone.pop(rank, None)
                where = printable(message.where)[:200]
                self._here[rank] = where, channel
                self._ranks[channel] = rank
                wrong = ""
            missing = self._missing()
            self._changed.notify_all()
        with contextlib.suppress(WireError):
            if wrong:
                channel.post(RegistrationRefused(why=wrong))
                return
            # Processes that give up before process 0 can then name the missing ones.
            some = MissingRanks(ranks=missing[: MOST_NAMED + 1])
            if len(missing) <= MOST_NAMED:
                self._tell_all(some)
            else:
                channel.post(some)

    def _leave(self, channel: Channel) -> None:
        with self._changed:
            rank = self._ranks.pop(channel, None)
            if rank is None or rank in self._joined:
                return
            where, _ = self._here[rank]
            self._gone[rank] = f"({where}) came and ended before JAX had joined all"
            if not self._began:
                del self._here[rank]
            self._changed.notify_all()

    # In a separate thread.

    def _look_on(self) -> None:
        """Ends all if a process ends or hangs before JAX has joined it."""
        place = self._place
        with self._changed:
            self._changed.wait_for(
                lambda: self._over or self._gone or len(self._joined) == place.count,
                place.join_seconds,
            )
            if self._over or len(self._joined) == place.count:
                return
            # JAX joins all processes at the same time, so all wait for one process. It
            # is the process that has been silent for longest.
            late = {r: t for r, t in self._heard.items() if r not in self._joined}
            rank, why = next(
                iter(self._gone.items()),
                (
                    min(late, key=lambda r: late[r], default=0),
                    "stands still, before JAX had joined all",
                ),
            )
        text = f"process {rank} {why}"
        self._tell_all(LostProcess(rank=rank, why=why, text=text))
        if rank != place.rank:
            blame(rank, why)
        self._end(text)


class RendezvousClient:
    """Process of a rank above 0, which connects to process 0."""

    def __init__(self, place: ProcessPlace, end: Callable[[str], None]) -> None:
        """Stores the address of process 0."""
        self._place = place
        self._end = end
        self._channel: Channel | None = None
        self._is_over = False
        self._missing: list[int] = []

    def wait(self) -> None:
        """Connects, and waits until all processes have connected.

        Raises:
            LostProcessError: Processes are missing.
            WhaleError: Process 0 refuses this process.
        """
        deadline = time.monotonic() + self._place.seconds
        channel = self._channel = self._arrive(deadline)
        while True:
            left = deadline - time.monotonic() + _MARGIN_SECONDS
            try:
                message = channel.receive(_TO_GUEST, seconds=max(0.01, left))
            except WireTimeoutError as error:
                raise self._impatient() from error
            except WireError as error:
                raise self._lost_host(
                    "ended before all processes were there"
                ) from error
            match message:
                case Go():
                    break
                case MissingRanks(ranks=ranks):
                    self._missing = ranks
                case LostProcess(rank=rank, why=why, text=text):
                    if rank != self._place.rank:
                        blame(rank, why)
                    raise LostProcessError(rank, printable(text))
                case RegistrationRefused(why=why):
                    raise WhaleError(f"init_distributed: {printable(why)}")
        threading.Thread(target=self._look_on, daemon=True).start()

    def mark_joined(self) -> None:
        """Records that JAX has joined this process; heartbeats now watch it."""
        self._is_over = True
        if self._channel is not None:
            with contextlib.suppress(WireError):
                self._channel.send(ProcessJoined())
        self.close()

    def close(self) -> None:
        """Closes the connection, so that the end of process 0 is ignored."""
        self._is_over = True
        if self._channel is not None:
            self._channel.close()

    def _arrive(self, deadline: float) -> Channel:
        place = self._place
        where = f"pid {os.getpid()} on {socket.gethostname()}"
        try:
            channel = reach(place.coordinator, place.key, deadline)
            channel.post(Arrival(rank=place.rank, count=place.count, where=where))
            return channel
        except (WrongKey, OtherProtocol) as error:
            raise WhaleError(
                f"what listens at {place.coordinator} is not process 0 of this "
                f"program: {error}. Stop it, or give another port; all processes "
                "start with wh.init_distributed and have the same WHALEJAX_KEY_FILE, "
                "or none"
            ) from error
        except WireTimeoutError as error:
            raise self._lost_host(
                f"does not answer at {place.coordinator} ({error}; is that its "
                "machine, and the port open?)"
            ) from error
        except WireError as error:
            blame(0, f"has not come in {place.seconds:.0f} s")
            raise LostProcessError(
                0,
                f"nothing listens at {place.coordinator} after {place.seconds:.0f} s "
                f"({error}). Is process 0 running, is the address that of its machine, "
                "and is the port open between them?",
            ) from error

    def _impatient(self) -> WhaleError:
        place = self._place
        if not self._missing:
            return self._lost_host("does not answer")
        rank = self._missing[0]
        blame(rank, f"has not come in {place.seconds:.0f} s")
        return LostProcessError(
            rank,
            f"{missing_ranks_text(self._missing, place.count)} not come to "
            f"{place.coordinator} in {place.seconds:.0f} s. Look for the first error "
            "there",
        )

    def _lost_host(self, why: str) -> LostProcessError:
        blame(0, why)
        return LostProcessError(0, f"process 0 {why}. Look for its first error")

    def _look_on(self) -> None:
        """Sends heartbeats to process 0 until JAX has joined this process.

        It ends this process if process 0 asks for that, or if process 0 ends.
        """
        assert self._channel is not None
        rank, why, text = 0, "ended before JAX had joined all", ""
        end = time.monotonic() + self._place.join_seconds + _MARGIN_SECONDS
        with contextlib.suppress(WireError):
            while not text:
                try:
                    message = self._channel.receive(
                        _TO_GUEST, seconds=self._place.join_seconds / 20
                    )
                except WireTimeoutError:
                    if time.monotonic() > end:
                        why = "stands still, before JAX had joined all"
                        break
                    self._channel.post(NotStopped())
                    continue
                # The missing ranks may be outdated.
                if isinstance(message, LostProcess):
                    rank, why, text = message.rank, message.why, message.text
        if self._is_over:
            return
        if rank != self._place.rank:
            blame(rank, why)
        self._end(printable(text) or f"process {rank} {why}")


def end_process(said: str, rank: int) -> None:
    """Ends this process, which waits in JAX for a process that was lost."""
    text = (
        f"whalejax: {said}. Process {rank} ends for it. Look for its first error, and "
        "start all processes anew\n"
    )
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
    os._exit(ENDS_FOR_ANOTHER)


def _listen(place: ProcessPlace) -> socket.socket:
    host, port = split_address(place.coordinator, "coordinator")
    try:
        try:
            return listen_at(place.coordinator)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            # Other hosts may reach this machine by an address that it does not have.
            return listen_at(joined_address("0.0.0.0", port))  # noqa: S104
    except OSError as error:
        raise WhaleError(
            f"coordinator is {joined_address(host, port)!r}, and process 0 cannot "
            f"listen at port {port} of this machine ({error.strerror}). Give another "
            "port to all processes, or stop what holds this one"
        ) from error
