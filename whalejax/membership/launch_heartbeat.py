"""Heartbeats of processes that ``jax.distributed`` connects: each notices failed ones.

When a process fails, JAX ends the others, but its message does not always name the
failed process. If the process blocks instead of ending, JAX waits for minutes.

Here each process writes a heartbeat to JAX's coordination service, and reads the
heartbeat of the next rank. A process that ends, fails, or finds the next rank silent
writes this to a folder of the service that all processes read. After a failure, the
others read all heartbeats and end with an error that names the cause. ``dead_members``
does the same for the members of an elastic run.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

import jax

from whalejax import _compat_processes
from whalejax.distributed.launch_env import (
    ENDS_FOR_ANOTHER,
    LOSS_SIGNS,
    blame,
    exit_seconds,
)
from whalejax.distributed.standard_streams import say
from whalejax.membership.exit_status import shell_status
from whalejax.membership.lease import Lease


SILENT_SECONDS: Final = 30.0
"""Seconds without a heartbeat after which a process counts as dead or frozen."""

BEATS_IN_SILENCE: Final = 15
"""Number of heartbeats that a process sends in that time."""

MISSED: Final = 4
"""Number of missed heartbeats after which a process counts as dead if a connection has
broken."""

GRACE_LOOKS: Final = 2
"""Number of checks in which a failure must be seen before the other processes end. The
checks are half a heartbeat apart."""

_SERVICE: Final = -1
"""Key of JAX's coordination service in the lease."""

_FOLDER: Final = "whalejax/beats"
_LAST: Final = "whalejax/last"
"""Folder of the last heartbeats of processes that ended, failed or fell silent."""
_REMEDY: Final = (
    "Look for its first error, start all processes anew, and restore the latest "
    "checkpoint"
)


def tells_of_loss(error: BaseException) -> bool:
    """Returns whether the text of an error says that another process failed.

    Args:
        error: Error raised by issuing a step, or by waiting for its results.
    """
    return isinstance(error, (jax.errors.JaxRuntimeError, ValueError)) and any(
        sign in str(error).lower() for sign in LOSS_SIGNS
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessHeartbeat:
    """Heartbeat of a process.

    Attributes:
        count: Number of the heartbeat, which rises with each.
        host: Host of the process.
        pid: Process id on that host.
        steps: Number of steps that it has begun.
        failed: Error with which it ends, or empty.
        ended: Whether it ends without an error.
        ready: Whether the devices of all processes are initialised.
        silent: Text of another process that reported it as silent, or empty.
    """

    count: int
    host: str
    pid: int
    steps: int = 0
    failed: str = ""
    ended: bool = False
    ready: bool = True
    silent: str = ""


class PeerLiveness:
    """Heartbeats of all processes, and the times at which they were received.

    It uses neither threads nor JAX.
    """

    def __init__(
        self,
        mine: int,
        silent_seconds: float,
        processes: int | None = None,
        watched: Collection[int] | None = None,
    ) -> None:
        """Starts without heartbeats.

        Args:
            mine: Rank of this process.
            silent_seconds: Seconds of silence after which a process is missing.
            processes: Number of processes that start their heartbeats together. None if
                each starts on its own; one without a heartbeat is then not missing.
            watched: Ranks of the processes to watch; default: all.
        """
        self._mine = mine
        self._all = range(processes or 0)
        self._watched = {*self._all} if watched is None else {*watched}
        self._beats: dict[int, ProcessHeartbeat] = {}
        self._lease: Lease[int] = Lease(silent_seconds, silent_seconds / 2)

    def hear(self, beats: Mapping[int, ProcessHeartbeat], now: float) -> None:
        """Records an answer of the service.

        Args:
            beats: Latest heartbeats of the watched processes that have sent one.
            now: Time of a monotonic clock, in seconds.
        """
        if _SERVICE not in self._lease.heard_at:
            for number in self._watched:
                self._lease.renew(number, now)
        self._lease.renew(_SERVICE, now)
        for number, beat in beats.items():
            known = self._beats.get(number)
            if known is None or known.count != beat.count or beat.silent:
                self._beats[number] = beat
                self._lease.renew(number, now)

    def look(self, now: float, *, seconds: float | None = None) -> dict[int, str]:
        """Returns for each missing process, by rank, text that says why it is missing.

        Time in which this process itself was stopped does not count as silence.

        Args:
            now: Time on the clock of ``hear``.
            seconds: Seconds of silence after which a process is missing; default:
                ``silent_seconds``.
        """
        self._lease.turn(now)
        answered = self._lease.heard_at.get(_SERVICE)
        if answered is None:
            return {}
        late = self._lease.overdue(now, seconds)
        if self._mine and _SERVICE in late:
            # The service runs in process 0, and is silent if that process is.
            return {0: _silent(late[_SERVICE])}
        # Judge at the time of the last answer: later the service itself may be silent.
        overdue = self._lease.overdue(answered, seconds)
        look = {}
        for number, beat in sorted(self._beats.items()):
            if number == self._mine or (beat.ended and beat.ready):
                continue
            if beat.ended:
                look[number] = "ended before the devices of all were there"
            elif beat.failed:
                look[number] = f"failed with {beat.failed}"
            elif beat.silent:
                look[number] = beat.silent
            elif number in overdue:
                look[number] = _silent(late[number])
        never = self._watched - {self._mine, *self._beats}
        return look | {n: _silent(late[n]) for n in sorted(never) if n in overdue}

    def unheard(self, gone: Collection[int]) -> list[int]:
        """Returns the missing processes that no process has reported yet."""
        beats = ((n, self.beat_of(n)) for n in gone)
        return [n for n, b in beats if not (b.ended or b.failed or b.silent)]

    def process_text(self, number: int) -> str:
        """Returns text that names a process, with its pid and host if known."""
        known = self._beats.get(number)
        if known is None or not known.host:
            return f"process {number}"
        return f"process {number} (pid {known.pid} on {known.host})"

    def behind(self) -> list[int]:
        """Returns the processes that have ended or begun fewer steps than this one."""
        mine = self._beats.get(self._mine)
        steps = 0 if mine is None else mine.steps
        return [
            number
            for number, beat in sorted(self._beats.items())
            if number != self._mine and (beat.steps < steps or beat.ended)
        ]

    def ended_ranks(self) -> set[int]:
        """Returns the other processes that have ended without an error."""
        beats = self._beats.items()
        return {n for n, beat in beats if beat.ended and n != self._mine}

    def running_ranks(self) -> list[int]:
        """Returns the processes that have not ended yet."""
        return sorted({*self._all} - {self._mine} - self.ended_ranks())

    def beat_of(self, number: int) -> ProcessHeartbeat:
        """Returns the last heartbeat of a process; an empty one if there is none."""
        return self._beats.get(number, ProcessHeartbeat(count=0, host="", pid=0))


def _last_error() -> BaseException | None:
    error: BaseException | None = getattr(sys, "last_value", None)
    return None if error is None or _exit_status(error) == 0 else error


def _exit_status(error: BaseException | None) -> int:
    if not isinstance(error, SystemExit):
        return 1
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1


def _silent(seconds: float) -> str:
    return f"has said nothing for {seconds:.0f} s: it is gone or stands still"


class Beats:
    """Sends the heartbeats of this process, and checks those of the others.

    Attributes:
        silent_seconds: Seconds without a heartbeat of a process after which the others
            end.
    """

    def __init__(
        self, silent_seconds: float = SILENT_SECONDS, processes: int | None = None
    ) -> None:
        """Starts the heartbeats; JAX must have joined all processes before.

        Args:
            silent_seconds: Value of the attribute.
            processes: Number of processes that start their heartbeats together, before
                their devices are initialised; None if each starts on its own.
        """
        self.silent_seconds = silent_seconds
        self._pause = silent_seconds / BEATS_IN_SILENCE
        self._mine = _compat_processes.joined_processes()[0]
        self._together = processes is not None
        # If each process starts on its own, the next rank may send no heartbeats.
        self._next = (self._mine + 1) % (processes or 1)
        self._hears_all = processes is None
        watched = () if self._hears_all else (self._next,)
        self._hearing = PeerLiveness(self._mine, silent_seconds, processes, watched)
        self._silent: dict[int, str] = {}
        self._lock = threading.Lock()
        self._count, self._steps, self._blames = 0, 0, False
        self._ready, self._ended, self._failed = not self._together, False, ""
        self._stirred = threading.Event()
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=target, name=f"whalejax-{name}", daemon=True)
            for name, target in (("beat", self._beat), ("look", self._look))
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self._close)

    def ready(self) -> None:
        """Records that the devices of all processes are initialised."""
        self._ready = True

    def fail(self, why: str) -> None:
        """Tells the others that this process ends, and with which error."""
        self._failed = why  # Later heartbeats repeat it.
        self._say_briefly()
        if self._mine == 0:
            time.sleep((GRACE_LOOKS + 2) * self._pause)

    def step(self) -> None:
        """Records the start of a step."""
        self._steps += 1

    def missing(self) -> str:
        """Returns text about processes that are missing after a connection broke.

        It waits until a dead process has missed enough heartbeats. The text is empty if
        no process is missing.
        """
        self._hear_all()
        end = time.monotonic() + 2 * MISSED * self._pause
        while time.monotonic() < end:
            with self._lock:
                gone = self._hearing.look(
                    time.monotonic(), seconds=MISSED * self._pause
                )
                if gone:
                    return self._ranks_text(gone)
            time.sleep(self._pause / 4)
        return ""

    def late(self) -> str:
        """Returns text about the processes that a step waits for; empty without any."""
        self._hear_all()
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._hear()
        with self._lock:
            gone = self._hearing.look(time.monotonic(), seconds=MISSED * self._pause)
            if gone:
                return self._ranks_text(gone)
            behind = self._hearing.behind()
            words = []
            for number in behind:
                beat = self._hearing.beat_of(number)
                does = "has ended" if beat.ended else "still runs"
                words.append(
                    f"{self._hearing.process_text(number)} {does} and has begun "
                    f"{beat.steps} "
                    f"steps, this one {self._steps}"
                )
            if words:
                self._blames = True
                blame(behind[0], "is behind the others")
            return "; ".join(words)

    def leave(self, status: int, *, at_once: bool = False) -> None:
        """Ends the process without JAX's shutdown, which would wait for the others.

        JAX's coordination service ends with process 0. So process 0 waits until the
        others have read the reason, unless a launcher stops them.

        Args:
            status: Exit status; below 0, the process ends by that signal, as Python
                does after Ctrl-C.
            at_once: Whether process 0 ends without this wait.
        """
        if self._mine == 0 and not at_once:
            time.sleep((GRACE_LOOKS + 2) * self._pause)
        for stream in (sys.stdout, sys.stderr):
            # A closed or full stream must not prevent the end.
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        if status < 0:
            os.kill(os.getpid(), -status)
        os._exit(shell_status(status))

    def ended_ranks(self) -> set[int]:
        """Returns the ranks of other processes that ended without an error."""
        with self._lock:
            return self._hearing.ended_ranks()

    def _ranks_text(self, gone: Mapping[int, str]) -> str:
        number, why = next(iter(gone.items()))
        self._blames = True
        blame(number, why)
        return "; ".join(
            f"{self._hearing.process_text(n)} {w}" for n, w in gone.items()
        )

    # Threads.

    def _beat(self) -> None:
        soon = self._pause / 100
        while jax.distributed.is_initialized():
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                # The other thread reports a service that does not answer.
                self._say()
                self._hear()
            # At exit all processes wait for heartbeats, so they are more frequent.
            soon = min(2 * soon, self._pause) if self._ended else soon
            self._stirred.wait(soon if self._ended else self._pause)
            self._stirred.clear()
            if self._over.is_set():
                return
        self._over.set()

    def _hear_all(self) -> None:
        self._hears_all = True
        self._stirred.set()

    def _hear(self) -> None:
        if self._hears_all:
            told = _compat_processes.all_told(_FOLDER)
        else:
            told = _compat_processes.told_at(f"{_FOLDER}/{self._next}")
        told += _compat_processes.all_told(_LAST)
        beats = {
            int(key.rpartition("/")[2]): ProcessHeartbeat(**json.loads(text))
            for key, text in told
        }
        with self._lock:
            self._hearing.hear(beats, time.monotonic())
            silent = [
                (n, why, self._hearing.beat_of(n)) for n, why in self._silent.items()
            ]
            self._silent.clear()
        for number, why, beat in silent:
            said = json.dumps(dataclasses.asdict(beat) | {"silent": why})
            key = f"{_LAST}/{number}"
            _compat_processes.tell_processes(key, said, again=True)

    def _say(self, **more: Any) -> None:
        self._count += 1
        beat = {
            "count": self._count,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "steps": self._steps,
            "ready": self._ready,
            "ended": self._ended,
            "failed": self._failed,
            **more,
        }
        folders = [_FOLDER, *([_LAST] if beat["ended"] or beat["failed"] else [])]
        for folder in folders:
            _compat_processes.tell_processes(
                f"{folder}/{self._mine}", json.dumps(beat), again=True
            )

    def _say_briefly(self, **more: Any) -> None:
        """Sends a last heartbeat, without waiting long for a service that is gone."""

        def speak() -> None:
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self._say(**more)

        last = threading.Thread(target=speak, name="whalejax-last", daemon=True)
        last.start()
        last.join(2 * self._pause)

    def _look(self) -> None:
        seen = 0
        while not self._over.wait(self._pause / 2):
            with self._lock:
                gone = self._hearing.look(time.monotonic())
                for number in self._hearing.unheard(gone):
                    self._silent[number] = gone[number]
                if self._silent:
                    self._stirred.set()
            # The cause may be about to be reported in this process too.
            seen = seen + 1 if gone else 0
            if seen > GRACE_LOOKS:
                self._end(self._ranks_text(gone))

    def _end(self, said: str) -> None:
        say(f"whalejax: {said}. Process {self._mine} ends for it. {_REMEDY}")
        self.leave(ENDS_FOR_ANOTHER)

    def _close(self) -> None:
        """Reports how this process ends, and waits for the others unless it failed."""
        if not jax.distributed.is_initialized():
            return
        # Ctrl-C during the exit would make Python skip JAX's shutdown, for which the
        # other processes wait.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            with contextlib.suppress(ValueError):  # not the main thread
                signal.signal(signal.SIGINT, signal.SIG_DFL)
        error = _last_error()
        exits = isinstance(error, SystemExit)
        # A process that caught the error of a failed process is not the cause.
        cause = error.__context__ if error is not None and exits else error
        if cause is not None and tells_of_loss(cause) and not self._blames:
            # The error was raised outside whalejax's own checks.
            said = self.missing()
            if said:
                say(f"whalejax: {said}. {_REMEDY}")
        failed = ""
        if error is not None:
            failed = f"{type(error).__name__}: {error}".removesuffix(": ")
        if not failed and self._together:
            self._end_together()
        self._over.set()
        self._stirred.set()
        for thread in self._threads:
            thread.join(2 * self._pause)
        if self._blames or not failed:
            self._say_briefly(ended=True)
        else:
            self._say_briefly(failed=failed.splitlines()[0][:200])
        if failed:
            interrupted = isinstance(error, KeyboardInterrupt)
            status = -signal.SIGINT if interrupted else _exit_status(error)
            # A launcher sees the status and reports it.
            self.leave(status, at_once=exits)
        if self._together:
            threading.Thread(target=self._cut_short, daemon=True).start()

    def _end_together(self) -> None:
        """Reports that this process ends, and sends heartbeats until all others end.

        JAX's shutdown waits for all processes without naming a missing one. So this
        process ends with an error if another one is dead or frozen meanwhile.
        """
        self._ended = True
        self._stirred.set()
        seconds = exit_seconds()
        end = time.monotonic() + seconds
        while not self._over.wait(self._pause / 100):
            with self._lock:
                left = self._hearing.running_ranks()
                if not left:
                    return
                late = time.monotonic() > end
                where = self._hearing.process_text(left[0])
            if late:
                why = (
                    f"has not come to its end {seconds:.0f} s after others had: it "
                    "stands still, or waits for one that has ended too early"
                )
                blame(left[0], why)
                self._end(f"{where} {why}")

    def _cut_short(self) -> None:
        """Ends this process if JAX's shutdown waits for a frozen process."""
        time.sleep(self.silent_seconds)
        self._end(
            f"JAX has waited for {self.silent_seconds:.0f} s for another process that "
            "stands still at its exit"
        )


_begun: list[Beats] = []


def start_heartbeat(
    silent_seconds: float = SILENT_SECONDS, *, processes: int | None = None
) -> Beats:
    """Returns the heartbeats of this process, which the first call starts.

    Args:
        silent_seconds, processes: Arguments of ``Beats``, which only the first call
            uses.
    """
    if not _begun:
        _begun.append(Beats(silent_seconds, processes))
    return _begun[0]


def failed(why: str) -> None:
    """Tells the others that this process ends, if it sends heartbeats."""
    for beats in _begun:
        beats.fail(why)
