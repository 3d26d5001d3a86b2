"""Waits for all processes of a program, before JAX is started in any of them.

JAX aborts a process for which others do not come, with a C++ stack that names process
0, and dies where its port is in use. So process 0 first listens at that very port
itself and the others come to it: who is missing is known by name, and said by all.
Their connections stay open until JAX has joined them, because JAX cannot be
interrupted in this time: one that is gone by then, or stands still, ends the others.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from whalejax.distributed.json_lines import (
    Connection,
    Stranger,
    greet,
    listener,
    receive,
)
from whalejax.distributed.launch_env import (
    ENDS_FOR_ANOTHER,
    blame,
    joined_address,
    printable,
    split_address,
)
from whalejax.meshes.errors import WhaleError


PURPOSE: Final = "processes"

AT_ONCE: Final = 64
"""Connections more than there are processes that are heard at once; others wait."""

MOST_NAMED: Final = 10
"""So many of those that are missing are named."""

_PAUSE_SECONDS: Final = 0.1
_MARGIN_SECONDS: Final = 5.0  # by which process 0 is the first to lose its patience


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlace:
    """Which process this is, and where all come together.

    Attributes:
        coordinator: ``"host:port"`` of process 0.
        count: how many there are.
        rank: of this one.
        seconds: after which one that has not come is missed.
        join_seconds: from then on, in which JAX joins them.
        key: a secret that all know; empty where there is none.
    """

    coordinator: str
    count: int
    rank: int
    seconds: float
    join_seconds: float
    key: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    """A process that has come: where it runs, and the connection to it."""

    where: str
    link: Connection


class Lost(WhaleError):
    """A process is missing, or is gone; ``rank`` is its number."""

    def __init__(self, rank: int, said: str) -> None:
        super().__init__(said)
        self.rank = rank


def rendezvous(place: ProcessPlace, end: Callable[[str], None]) -> Host | Guest:
    """Wait until all processes are there.

    Args:
        place: of this one.
        end: is called, from another thread, with what happened where another process
            is lost while JAX joins them; it ends this process.

    Returns:
        What is to be told, with ``joined()``, once JAX has joined them.

    Raises:
        WhaleError: the port is in use, or another process is missing.
    """
    made = Host(place, end) if place.rank == 0 else Guest(place, end)
    try:
        made.wait()
    except BaseException:
        made.close()
        raise
    return made


def missing_words(missing: list[int], count: int) -> str:
    """Processes by their numbers, as the subject of a sentence.

    >>> missing_words([2], 4), missing_words([1, 2], 4)
    ('process 2 of 4 has', 'processes 1, 2 of 4 have')
    """
    named = ", ".join(map(str, missing[:MOST_NAMED]))
    if len(missing) > MOST_NAMED:
        named += f" and {len(missing) - MOST_NAMED} more"
    one = len(missing) == 1
    return f"process{'' if one else 'es'} {named} of {count} {'has' if one else 'have'}"


class Host:
    """Process 0: the others come to it."""

    def __init__(self, place: ProcessPlace, end: Callable[[str], None]) -> None:
        """Listen at the port that JAX's service will have.

        Raises:
            WhaleError: it cannot be.
        """
        self._place = place
        self._end = end
        self._here: dict[int, _Member] = {}
        self._joined: set[int] = set()
        self._gone: dict[int, str] = {}
        self._heard: dict[int, float] = {}
        self._links: set[Connection] = set()
        self._began = False
        self._over = False
        self._changed = threading.Condition()
        self._room = threading.BoundedSemaphore(place.count + AT_ONCE)
        self._listener: socket.socket | None = _listen(place)
        threading.Thread(target=self._accept, daemon=True).start()

    def wait(self) -> None:
        """Wait until all are there, and tell them.

        Raises:
            Lost: some are not.
        """
        place = self._place
        with self._changed:
            self._changed.wait_for(lambda: self._full() or self._fatal(), place.seconds)
            full, missing = self._full(), self._missing()
            fatal = self._fatal()
        if full:
            self._stop_listening()
            self._began = True
            now = time.monotonic()
            self._heard = {rank: now for rank in self._here}
            self._tell_all({"go": True})
            threading.Thread(target=self._look_on, daemon=True).start()
            return
        if fatal:
            rank, why = next(iter(self._gone.items()))
            said = f"process {rank} {why}"
        else:
            rank, why = missing[0], f"has not come in {place.seconds:.0f} s"
            said = (
                f"{missing_words(missing, place.count)} not come to "
                f"{place.coordinator} in {place.seconds:.0f} s. Look for the first "
                "error there: is it running, has it a process_id of its own and the "
                "same coordinator and num_processes, and is this address and port "
                "open to it?"
            )
        self._tell_all({"lost": rank, "why": why, "said": said})
        blame(rank, why)
        raise Lost(rank, said)

    def joined(self) -> None:
        """JAX has joined this process: from now on its beats tell of it."""
        with self._changed:
            self._joined.add(0)
            self._changed.notify_all()

    def close(self) -> None:
        """Let all go."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
            links = list(self._links)
        self._stop_listening()
        for link in links:
            link.close()

    def _full(self) -> bool:
        return len(self._here) == self._place.count - 1

    def _fatal(self) -> bool:
        # Without a secret it may have been a stranger, whom the others need not heed.
        return bool(self._gone and self._place.key)

    def _missing(self) -> list[int]:
        return [rank for rank in range(1, self._place.count) if rank not in self._here]

    def _stop_listening(self) -> None:
        found, self._listener = self._listener, None
        if found is not None:
            with contextlib.suppress(OSError):
                found.shutdown(socket.SHUT_RDWR)  # wakes who waits in accept()
            found.close()

    def _tell_all(self, said: Mapping[str, Any]) -> None:
        for member in list(self._here.values()):
            with contextlib.suppress(OSError):
                member.link.tell(said)

    def _accept(self) -> None:
        found = self._listener
        while found is not None:
            self._room.acquire()
            try:
                link = Connection(found.accept()[0])
            except OSError:
                return
            with self._changed:
                self._links.add(link)
            threading.Thread(target=self._hear, args=(link,), daemon=True).start()

    def _hear(self, link: Connection) -> None:
        """Hear one that has come, from its greeting to the end of its connection."""
        rank = None
        with contextlib.suppress(OSError, ValueError):
            receive(link, PURPOSE, self._place.key)
            rank = self._entered(link, link.told())
            if rank is not None:
                self._attend(rank, link)
        if rank is not None:
            self._left(rank, link)
        with self._changed:
            self._links.discard(link)
        link.close()
        self._room.release()

    def _attend(self, rank: int, link: Connection) -> None:
        """Hear that one is there, until JAX has joined it."""
        while rank not in self._joined:
            told = link.told(self._place.seconds + self._place.join_seconds)
            with self._changed:
                self._heard[rank] = time.monotonic()
                if isinstance(told, dict) and "joined" in told:
                    self._joined.add(rank)
                self._changed.notify_all()

    def _entered(self, link: Connection, told: Any) -> int | None:
        """Take one in; None, and it is told why, if it cannot be one of this program.

        Raises:
            ValueError, OSError: what it says is nothing that a process says.
        """
        match told:
            case {"rank": int(rank), "count": int(count), "where": str(where)}:
                pass
            case _:
                raise ValueError("not a process")
        with self._changed:
            if count != self._place.count:
                wrong = (
                    f"num_processes is {count} in process {rank} and "
                    f"{self._place.count} in process 0"
                )
            elif not 0 < rank < count or isinstance(rank, bool):
                wrong = f"process_id is {rank}, which process 0 has itself"
            elif rank in self._here:
                wrong = (
                    f"process_id {rank} was given to two processes: "
                    f"{self._here[rank].where} came before"
                )
            else:
                self._gone.pop(rank, None)
                member = _Member(where=printable(where)[:200], link=link)
                self._here[rank] = member
                wrong = ""
            missing = self._missing()
            self._changed.notify_all()
        if wrong:
            link.tell({"refused": wrong})
            return None
        # Those that lose patience earlier than this process can name who is missing.
        said = {"missing": missing[: MOST_NAMED + 1]}
        if len(missing) <= MOST_NAMED:
            self._tell_all(said)
        else:
            link.tell(said)
        return rank

    def _left(self, rank: int, link: Connection) -> None:
        """A connection has ended."""
        with self._changed:
            member = self._here.get(rank)
            if member is None or member.link is not link or rank in self._joined:
                return
            self._gone[rank] = (
                f"({member.where}) came and ended before JAX had joined all"
            )
            if not self._began:
                del self._here[rank]
            self._changed.notify_all()

    def _look_on(self) -> None:
        """End all where one is gone or stands still before JAX has joined it."""
        place = self._place
        with self._changed:
            self._changed.wait_for(
                lambda: self._over or self._gone or len(self._joined) == place.count,
                place.join_seconds,
            )
            if self._over or len(self._joined) == place.count:
                return
            # JAX joins all at the same moment, so that all wait for one: it is the
            # one that has said nothing for longest.
            late = {r: t for r, t in self._heard.items() if r not in self._joined}
            rank, why = next(
                iter(self._gone.items()),
                (
                    min(late, key=lambda r: late[r], default=0),
                    "stands still, before JAX had joined all",
                ),
            )
        said = f"process {rank} {why}"
        self._tell_all({"lost": rank, "why": why, "said": said})
        if rank != place.rank:
            blame(rank, why)
        self._end(said)


class Guest:
    """Another process: it comes to process 0."""

    def __init__(self, place: ProcessPlace, end: Callable[[str], None]) -> None:
        """Know where to come to."""
        self._place = place
        self._end = end
        self._link: Connection | None = None
        self._is_joined = self._is_closed = False
        self._missing: list[int] = []

    def wait(self) -> None:
        """Come, and wait until all are there.

        Raises:
            Lost: some are not.
            WhaleError: this one cannot be taken in.
        """
        deadline = time.monotonic() + self._place.seconds
        link = self._link = self._arrived(deadline)
        while True:
            left = deadline - time.monotonic() + _MARGIN_SECONDS
            try:
                told = link.told(max(0.01, left))
            except TimeoutError as error:
                raise self._impatient() from error
            except (OSError, ValueError) as error:
                raise self._lost_host(
                    "ended before all processes were there"
                ) from error
            match told:
                case {"go": True}:
                    break
                case {"missing": list(missing)}:
                    self._missing = [r for r in missing if isinstance(r, int)]
                case {"lost": int(rank), "why": str(why), "said": str(said)}:
                    if rank != self._place.rank:
                        blame(rank, why)
                    raise Lost(rank, printable(said))
                case {"refused": str(why)}:
                    raise WhaleError(f"init_distributed: {printable(why)}")
        for target in (self._look_on, self._say_here):
            threading.Thread(target=target, daemon=True).start()

    def joined(self) -> None:
        """JAX has joined this process: from now on its beats tell of it."""
        self._is_joined = True
        if self._link is not None:
            with contextlib.suppress(OSError):
                self._link.tell({"joined": self._place.rank})
        self.close()

    def close(self) -> None:
        """Let the connection go, which is then no end of process 0's."""
        self._is_closed = True
        if self._link is not None:
            self._link.close()

    def _arrived(self, deadline: float) -> Connection:
        """A connection to process 0, which knows who this is."""
        place = self._place
        address = split_address(place.coordinator, "coordinator")
        refused = "nothing was tried"
        while (left := deadline - time.monotonic()) > 0:
            try:
                link = Connection(
                    socket.create_connection(address, left), most_bytes=1 << 16
                )
            except OSError as error:  # it has not begun yet
                refused = str(error.strerror or error)
                time.sleep(_PAUSE_SECONDS)
                continue
            try:
                greet(link, PURPOSE, place.key, max(0.01, deadline - time.monotonic()))
                where = f"pid {os.getpid()} on {socket.gethostname()}"
                said = {"rank": place.rank, "count": place.count, "where": where}
                link.tell(said)
                return link
            except Stranger as error:
                link.close()
                raise WhaleError(
                    f"what listens at {place.coordinator} is not process 0 of this "
                    f"program: {error}. Stop it, or give another port; all processes "
                    "start with wh.init_distributed"
                ) from error
            except TimeoutError as error:
                link.close()
                raise self._lost_host(
                    f"listens at {place.coordinator} and does not answer"
                ) from error
            except OSError as error:  # it closes where it has begun to end
                link.close()
                refused = str(error.strerror or error)
                time.sleep(_PAUSE_SECONDS)
        blame(0, f"has not come in {place.seconds:.0f} s")
        raise Lost(
            0,
            f"nothing listens at {place.coordinator} after {place.seconds:.0f} s "
            f"({refused}). Is process 0 running, is the address that of its machine, "
            "and is the port open between them?",
        )

    def _impatient(self) -> WhaleError:
        place = self._place
        if not self._missing:
            return self._lost_host("does not answer")
        rank = self._missing[0]
        blame(rank, f"has not come in {place.seconds:.0f} s")
        return Lost(
            rank,
            f"{missing_words(self._missing, place.count)} not come to "
            f"{place.coordinator} in {place.seconds:.0f} s. Look for the first error "
            "there",
        )

    def _lost_host(self, why: str) -> Lost:
        blame(0, why)
        return Lost(0, f"process 0 {why}. Look for its first error")

    def _say_here(self) -> None:
        """Say that this process does not stand still, until JAX has joined it."""
        assert self._link is not None
        with contextlib.suppress(OSError):
            while not self._is_joined:
                self._link.tell({"here": True})
                time.sleep(self._place.join_seconds / 20)

    def _look_on(self) -> None:
        """End this process where process 0 says so, or is gone itself."""
        assert self._link is not None
        rank, why, said = 0, "ended before JAX had joined all", ""
        end = time.monotonic() + self._place.join_seconds + _MARGIN_SECONDS
        try:
            while not said:
                match self._link.told(max(0.01, end - time.monotonic())):
                    case {"lost": int(rank), "why": str(why), "said": str(said)}:
                        pass  # and who is missing was sent before all came
        except TimeoutError:
            why = "stands still, before JAX had joined all"
        except (OSError, ValueError):
            pass
        if self._is_joined or self._is_closed:
            return
        if rank != self._place.rank:
            blame(rank, why)
        self._end(printable(said) or f"process {rank} {why}")


def end_process(said: str, rank: int) -> None:
    """End this process, which JAX holds, because of another one.

    Args:
        said: of the other one.
        rank: of this one.
    """
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
            return listener(host, port)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            # Others may reach this machine by an address that it does not have.
            return listener("0.0.0.0", port)  # noqa: S104
    except socket.gaierror as error:
        raise WhaleError(
            f"coordinator is {place.coordinator!r}: {host} has no address here "
            f"({error.strerror}). Give an address of the machine of process 0"
        ) from error
    except OSError as error:
        raise WhaleError(
            f"coordinator is {joined_address(host, port)!r}, and process 0 cannot "
            f"listen at port {port} of this machine ({error.strerror}). Give another "
            "port to all processes, or stop what holds this one"
        ) from error
