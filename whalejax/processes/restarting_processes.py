"""A run of a leader process and of servers, started and restarted from here.

It is the policy of ``whalejax swarm serve --processes``. A killed process, or a failed
server, is restarted, and so is one whose heartbeats stop; the run is over when the
leader ends by itself. Repeated failures, or the same error twice, end the run, unless
other servers serve it.
"""

from __future__ import annotations

import selectors
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from whalejax.membership.exit_status import exit_text
from whalejax.membership.restart_policy import Failure, Failures
from whalejax.membership.settings import SupervisorSettings
from whalejax.meshes.errors import WhaleError
from whalejax.processes.beat_file import SILENT_SECONDS, BeatListener
from whalejax.processes.local_processes import (
    GRACE_SECONDS,
    Processes,
    handled_signals,
)


FRUITFUL_SECONDS: Final = 60.0
"""Running time after which earlier failures of a process no longer count."""

AT_ONCE_SECONDS: Final = 1.0
"""Time between the first and the second request to end."""

_TICK_SECONDS: Final = 0.2
_RELEASE_SECONDS: Final = 30.0
_FAILED: Final = 1
SHELL_FAILED: Final = 255
"""Exit status of ssh itself, if a host is unreachable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptCommand:
    """Command that is started and kept running.

    Attributes:
        name: Unique name.
        command: Words of the command.
        environment: Environment variables that are added.
        release: Command that frees what a killed command leaves elsewhere; empty if
            there is nothing.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    release: Sequence[str] = ()


class Keeper:
    """Keeps programs running until the first of them ends by itself."""

    def __init__(
        self,
        programs: Sequence[KeptCommand],
        logs: Path,
        say: Callable[[str], None],
        *,
        silent_seconds: float = SILENT_SECONDS,
    ) -> None:
        """Prepares the commands; starts none yet.

        Args:
            programs: Programs; first the leader, which uses this process's output.
            logs: Folder of one log for each of the others.
            say: Function that receives a line on each end and restart.
            silent_seconds: Seconds without a beat after which a program is restarted.

        Raises:
            WhaleError: The folder cannot be created.
        """
        try:
            logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise WhaleError(
                f"--logs {logs}: {error.strerror}. Name a folder that can be made"
            ) from error
        self._programs = {program.name: program for program in programs}
        self._leader, self._slots = programs[0].name, [p.name for p in programs]
        self._say = say
        self._selector = selectors.DefaultSelector()
        self._processes = Processes((), {}, logs, self._selector, end_with_this=True)
        self._beats = BeatListener(logs, silent_seconds)
        count = len(programs)
        self._failures = Failures(SupervisorSettings(least=count, most=count))
        self._due = dict.fromkeys(self._slots, 0.0)
        self._started_at: dict[str, float] = {}
        self._told = self._passed_on = 0
        self._status: int | None = None

    def run(self) -> int:
        """Keeps the programs running.

        Returns:
            The leader's exit status; 1 if the run is given up.

        Raises:
            WhaleError: A program does not exist.
        """
        with self._selector, handled_signals(self._handle, signal.SIGINT):
            try:
                while self._status is None:
                    self._turn()
                self._end_others()
            finally:
                left = self._processes.names
                self._processes.end_all()
                for name in left:
                    self._release(name)
        return self._status

    def _end_others(self) -> None:
        """Waits for the others to end after the leader, and asks them to if it failed.

        A command that runs another one elsewhere has to end that first. A peer leaves
        after its step when it is asked once, and at once when it is asked again.
        """
        for seconds in (AT_ONCE_SECONDS, GRACE_SECONDS):
            for name in self._processes.names if self._status else ():
                self._processes.terminate(name)
            end = time.monotonic() + seconds
            while self._processes.names and time.monotonic() < end:
                self._take_ends()

    def _handle(self, number: int, _: object) -> None:
        del number
        self._told += 1

    def _turn(self) -> None:
        self._take_ends()
        if self._told > self._passed_on:
            self._passed_on = self._told
            self._processes.terminate(self._leader)
            if self._told > 1 or self._leader not in self._processes.names:
                self._status = 128 + signal.SIGTERM
            return
        now = time.monotonic()
        for name, seconds in self._beats.silent(self._processes.names, now).items():
            self._say(f"{name} stands still: no beat for {seconds:.0f} s. It is killed")
            self._processes.kill(name)
            self._beats.forget(name)
        for name in [name for name, at in self._due.items() if at <= now]:
            self._start(name)

    def _take_ends(self) -> None:
        for key, _ in self._selector.select(_TICK_SECONDS):
            name = key.data
            status = self._processes.take_exit_status(name)
            assert status is not None  # Each is a child of this process.
            self._beats.forget(name)
            if status:
                self._release(name)
            if self._status is None:
                self._on_process_end(name, status)

    def _release(self, name: str) -> None:
        """Frees what a command that did not end by itself has left elsewhere."""
        words = self._programs[name].release
        if not words:
            return
        try:
            subprocess.run(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                timeout=_RELEASE_SECONDS,
                check=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            self._say(f"{name} may have left something: {shlex.join(words)}: {error}")

    def _start(self, name: str) -> None:
        program, leads = self._programs[name], name == self._leader
        beats = self._beats.environment(name)
        own = {"PYTHONUNBUFFERED": "1", **beats, **program.environment}
        try:
            self._processes.start(
                name,
                own,
                command=program.command,
                output=1 if leads else None,
                errors=2 if leads else None,
            )
        except OSError as error:  # Too many processes or files, or too little memory.
            self._schedule_restart(
                name, f"cannot be started ({error.strerror or error})"
            )
            return
        self._processes.release(name)
        self._started_at[name] = time.monotonic()
        del self._due[name]

    def _on_process_end(self, name: str, status: int) -> None:
        """Handles the end of a process: restarts it, or ends the run."""
        if name == self._leader and (status >= 0 or self._told):
            self._status = status if status >= 0 else 128 - status
            return
        if not status:
            return  # It was asked to leave, or knows that the run is over.
        now, since = time.monotonic(), self._started_at[name]
        log = "" if name == self._leader else self._processes.log_tail(name)
        is_own = 0 < status != SHELL_FAILED
        error = self._failures.error_of(name, log) if is_own else ""
        why = f"ended {exit_text(status)}"
        if now - since > FRUITFUL_SECONDS:
            self._failures.progressed()
        failure = Failure(at=now, since=since, name=name, why=why, error=error)
        self._failures.count(failure, log)
        others = self._processes.names
        since = min(
            (self._started_at[n] for n in others if n != self._leader), default=now
        )
        # While others serve for long, one server may fail any number of times.
        passed = name != self._leader and now - since > FRUITFUL_SECONDS
        if given_up := self._failures.exceeded(now, passed=passed):
            self._say(f"the run is given up: {given_up}")
            self._status = _FAILED
            return
        self._schedule_restart(name, f"{why}{': ' if error else ''}{error}")

    def _schedule_restart(self, name: str, why: str) -> None:
        now = time.monotonic()
        seconds = self._failures.hold(now, self._slots.index(name))
        self._due[name] = now + seconds
        when = f" in {seconds:.0f} s" if seconds else ""
        self._say(f"{name} {why}; it is started again{when}")
