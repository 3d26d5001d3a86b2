"""A member's connection to the supervisor, with heartbeats and reconnection.

If the supervisor is killed, it restarts at the same address, and its members reconnect.
Steps continue meanwhile unless a member fails.
"""

from __future__ import annotations

import collections
import contextlib
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from whalejax.distributed.launch_env import KEY_FILE, split_address
from whalejax.elastic.environment import RUN, SUPERVISOR_SECONDS
from whalejax.meshes.errors import WhaleError
from whalejax.processes.local_processes import machine
from whalejax.state.folder_lock import is_free
from whalejax.wire import run_messages as wire
from whalejax.wire.connection import (
    Channel,
    OtherProtocol,
    WrongKey,
    dial,
)
from whalejax.wire.keys import Key, load_key
from whalejax.wire.messages import WireError


FIRST_SECONDS: Final = 30.0
"""Seconds for the first connection to a supervisor that should already run."""

_AGAIN_SECONDS: Final = 0.2
_ASK_SECONDS: Final = 5.0
_SILENT_BEATS: Final = 24
_FIRST_BEAT_SECONDS: Final = 1.0


def first_seconds(supervisor_seconds: float = SUPERVISOR_SECONDS) -> float:
    """Returns the seconds for which this process waits for its first answer.

    A process that a supervisor started waits ``supervisor_seconds``, because the
    supervisor may be restarting. Another process may have a wrong address, so it waits
    only ``FIRST_SECONDS``.

    Args:
        supervisor_seconds: Seconds to wait for a lost supervisor.
    """
    return supervisor_seconds if os.environ.get(RUN) else FIRST_SECONDS


@contextlib.contextmanager
def on_notice(leave: Callable[[], None]) -> Iterator[None]:
    """Calls ``leave`` on SIGTERM within the block, if this is the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: leave())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def key_of_run(key_file: str, address: str) -> Key:
    """Returns the key by which members and supervisor authenticate each other.

    Args:
        key_file: Path of the key file; empty if none was given.
        address: Address of the supervisor, for the error.

    Raises:
        WhaleError: There is no key file, or other users can read it.
    """
    if not key_file:
        raise WhaleError(
            f"{KEY_FILE} is not set; expected the path of the key file of the "
            f"supervisor at {address}. Without the key no member is taken"
        )
    return load_key(Path(key_file))


def is_hopeless(error: WireError) -> bool:
    """Returns whether retrying the connection cannot help."""
    return isinstance(error, WrongKey | OtherProtocol)


class NoSupervisorError(WhaleError):
    """No supervisor answers at the expected address."""


def unreachable(where: str, error: WireError) -> WhaleError:
    """Returns the error for a process that reaches no supervisor.

    Args:
        where: Host and port of the supervisor.
        error: Error of the connection.
    """
    if isinstance(error, WrongKey):
        return NoSupervisorError(
            f"{error}: this process and the supervisor have different keys. Give it "
            f"elastic/key of the folder of this run, or a copy, in {KEY_FILE} or --key"
        )
    if isinstance(error, OtherProtocol):
        return NoSupervisorError(
            f"{error}. Give the address at which whalejax launch listens, and run the "
            "same whalejax everywhere"
        )
    return NoSupervisorError(
        f"no supervisor answers at {where} ({error}). See that "
        "whalejax launch runs there, and that this host can reach it"
    )


class RunStopped(WhaleError):
    """The supervisor has ended this member's part in the run."""


class Control:
    """Client of the supervisor in a member.

    Attributes:
        key: Key of the run.
        name: Name of the member; empty before it is admitted.
        goodput: Goodput of the run in the supervisor's last message.
        phase, step, done: Values that the next heartbeat reports; set by the member.
        generation: Generation in which ``await_placement`` placed the process, or 0.
    """

    def __init__(
        self,
        address: str,
        key_file: str,
        registers: Callable[[], Mapping[str, Any]],
        *,
        supervisor_seconds: float = SUPERVISOR_SECONDS,
    ) -> None:
        """Stores the supervisor's address; does not connect yet.

        Args:
            address: Address of the supervisor.
            key_file: Path of the run's key file.
            registers: Function that returns the member's own fields of ``Register``.
            supervisor_seconds: Seconds to wait for a lost supervisor.
        """
        self._address, self._where = split_address(address, "supervisor"), address
        self.key = key_of_run(key_file, address)
        self.name, self.goodput = "", 1.0
        self.phase, self.step, self.done = "starting", -1, 0
        self.generation = 0
        self._registers = registers
        self._seconds = supervisor_seconds
        self._channel: Channel | None = None
        self._changed = threading.Condition()
        self._heard: collections.deque[wire.ToMember] = collections.deque()
        # A killed supervisor may not have written the last reports. So they are kept,
        # and sent again until acknowledged. ``_number`` counts all reports, and
        # ``_sent`` is the number of the last one sent over the current connection.
        self._reports: collections.deque[wire.Report] = collections.deque()
        self._sent = self._number = 0
        self._kept: set[int] = set()
        self._token = secrets.token_hex(16)
        self._run_name = os.environ.get(RUN, "")
        self._error: WhaleError | None = None
        self._closed = False
        self._beat_seconds = _FIRST_BEAT_SECONDS

    def open(self) -> None:
        """Connects to the supervisor and registers.

        Raises:
            WhaleError: No supervisor answers, or it refuses the key or this member.
        """
        self._connect(time.monotonic() + first_seconds(self._seconds), first=True)
        for work in (self._listen, self._speak):
            threading.Thread(target=self._run, args=(work,), daemon=True).start()

    # For the member's own thread.

    def post(self, report: wire.Report) -> None:
        """Sends a report to the supervisor, and repeats it until it is acknowledged."""
        with self._changed:
            self._number += 1
            numbered = msgspec.structs.replace(report, number=self._number)
            self._reports.append(numbered)
            self._changed.notify_all()

    def may_keep(self, step: int, folder: Path, *, seconds: float) -> bool:
        """Returns whether this member may give a finished checkpoint its final name.

        The supervisor forbids that if it has given this member up. If the supervisor is
        gone, the member may do so if nobody has locked the folder.

        Args:
            step: Step of the checkpoint.
            folder: Folder of the checkpoint, which a live supervisor locks.
            seconds: Longest wait for the answer.
        """
        end = time.monotonic() + seconds
        ask_at = 0.0
        with self._changed:
            self._kept.discard(step)  # an answer to an earlier question
        while time.monotonic() < end:
            with self._changed:
                if step in self._kept:
                    self._kept.discard(step)
                    return True
                error, channel = self._error, self._channel
            gone = error is None or isinstance(error, NoSupervisorError)
            if gone and channel is None and is_free(folder):
                return True
            if error is not None:
                return False
            if time.monotonic() > ask_at:
                ask_at = time.monotonic() + _ASK_SECONDS
                self.post(wire.CheckpointWritten(step=step))
            with self._changed:
                if step not in self._kept:
                    self._changed.wait(0.1)
        return False

    def poll(self) -> wire.ToMember | None:
        """Returns the supervisor's next message, or None.

        Raises:
            WhaleError: The supervisor is gone, or refused this member.
        """
        with self._changed:
            if self._heard:
                return self._heard.popleft()
            if self._error is not None:
                raise self._error
            return None

    def check(self) -> None:
        """Raises an error if this process has lost its supervisor.

        Raises:
            WhaleError: The supervisor is gone, or has refused this process.
        """
        with self._changed:
            if self._error is not None:
                raise self._error

    def wait(self) -> wire.ToMember | None:
        """Returns the supervisor's next message, or None after a second without one."""
        said = self.poll()
        if said is not None:
            return said
        with self._changed:
            if not self._heard and self._error is None:
                self._changed.wait(_FIRST_BEAT_SECONDS)
        return self.poll()

    def flush(self, seconds: float) -> None:
        """Waits until all reports are acknowledged, at most ``seconds``."""
        end = time.monotonic() + seconds
        with self._changed:
            while self._reports and self._error is None and time.monotonic() < end:
                self._changed.wait(0.1)

    def close(self) -> None:
        """Ends the connection."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._channel is not None:
            self._channel.close()

    # Threads.

    def _run(self, work: Callable[[], None]) -> None:
        """Runs a thread's work, and stores its error for the member's own thread."""
        try:
            work()
        except Exception as error:
            if not isinstance(error, WhaleError):
                text = f"the connection to the supervisor failed: {error!r}"
                error = WhaleError(text)  # noqa: PLW2901
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _connect(self, end: float, *, first: bool) -> None:
        while True:
            try:
                left = max(end - time.monotonic(), 0.1)
                channel = dial(self._address, self.key, seconds=min(left, 10.0))
                self._admitted(channel)
                return
            except RunStopped:
                raise
            except WireError as error:
                if is_hopeless(error) or time.monotonic() > end or self._closed:
                    raise self._unreachable(error, first=first) from None
            time.sleep(_AGAIN_SECONDS)

    def _unreachable(self, error: WireError, *, first: bool) -> WhaleError:
        if first or is_hopeless(error):
            return unreachable(self._where, error)
        return NoSupervisorError(
            f"the supervisor at {self._where} is gone and did not come back in "
            f"{self._seconds:.0f} s ({error}). Start it again with the same folder; "
            "the run goes on from its last checkpoint"
        )

    def _admitted(self, channel: Channel) -> None:
        fields = {
            "run": self._run_name,
            "name": self.name,
            "machine": machine(),
            "pid": os.getpid(),
            "step": self.step,
            "token": self._token,
            **self._registers(),
        }
        channel.send(wire.Register(**fields))
        while True:
            said = channel.receive(wire.TO_MEMBER, seconds=30.0)
            if isinstance(said, wire.RegistrationRefused | wire.RunEnded):
                channel.close()
                raise RunStopped(f"the supervisor refused this member: {said.why}")
            if isinstance(said, wire.MemberWelcome):
                break
            self._hear(said)
        self.name, self._run_name = said.name, said.run
        self._beat_seconds = said.beat_seconds
        with self._changed:
            self._channel, self._sent = channel, 0
            self._changed.notify_all()

    def _hear(self, said: wire.ToMember) -> None:
        with self._changed:
            match said:
                case wire.ReportReceived(goodput=goodput, number=number):
                    self.goodput = goodput
                    while self._reports and self._reports[0].number <= number:
                        self._reports.popleft()
                case wire.Keep(step=step):
                    self._kept.add(step)
                case _:
                    self._heard.append(said)
            self._changed.notify_all()

    def _listen(self) -> None:
        while not self._closed:
            channel = self._channel
            assert channel is not None
            try:
                silent = _SILENT_BEATS * self._beat_seconds
                self._hear(channel.receive(wire.TO_MEMBER, seconds=silent))
            except WireError:
                channel.close()
                with self._changed:
                    self._channel = None
                if self._closed:
                    return
                self._connect(time.monotonic() + self._seconds, first=False)

    def _speak(self) -> None:
        beat_at = 0.0
        while not self._closed and self._error is None:
            with self._changed:
                if self._sent >= self._number or self._channel is None:
                    self._changed.wait(max(beat_at - time.monotonic(), 0.01))
                channel, said = self._channel, self._unsent()
            if channel is None:
                time.sleep(0.01)
                continue
            try:
                if time.monotonic() >= beat_at:
                    beat = wire.Beat(phase=self.phase, step=self.step, done=self.done)
                    channel.send(beat)
                    beat_at = time.monotonic() + self._beat_seconds
                if said is not None:
                    channel.send(said)
                    with self._changed:
                        if channel is self._channel:
                            self._sent = said.number
            except WireError:
                channel.shut_down()  # The other thread reconnects.
                time.sleep(_AGAIN_SECONDS)

    def _unsent(self) -> wire.Report | None:
        if not self._reports or self._sent >= self._number:
            return None
        place = self._sent + 1 - self._reports[0].number
        return self._reports[max(place, 0)]
