"""The loop that starts, watches and ends processes of this machine.

It is the same for all runs whose processes are children of one process: a launch of a
fixed number, a leader with servers that are restarted, the commands of agents. A policy
of ``whalejax.membership`` decides: events go to it, and its effects are carried out.
The supervisor of an elastic run and an agent have loops of their own, as they read
messages too; they use the same ``Processes``.
"""

from __future__ import annotations

import selectors
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from whalejax.membership import events as ev
from whalejax.membership.exit_status import Ending
from whalejax.processes.heartbeat_pipe import HeartbeatPipes
from whalejax.processes.local_processes import (
    GRACE_SECONDS,
    Processes,
    handled_signals,
)


_TICK_SECONDS: Final = 0.2
_RELEASE_SECONDS: Final = 30.0


def _ignore(names: Sequence[str]) -> None:
    del names


class LocalRun:
    """Runs processes by a policy, until it ends the run.

    Attributes:
        processes: The processes; ``start`` adds some.
        lock: Lock held while the policy reacts, for other threads that change it.
    """

    def __init__(
        self,
        policy: ev.RunPolicy,
        processes: Processes,
        selector: selectors.BaseSelector,
        start: Callable[[int], None],
        *,
        say: Callable[[str], None],
        asks: Sequence[float] = (GRACE_SECONDS,),
        groups: bool = False,
        own_seconds: float = 0.0,
        stopping: Callable[[Sequence[str]], None] = _ignore,
        releases: Mapping[str, Sequence[str]] = {},
        beats: HeartbeatPipes | None = None,
    ) -> None:
        """Prepares the run; starts no process.

        Args:
            policy: Rules of the run.
            processes: Processes, none of which runs yet.
            selector: Selector that reports their ends; closed at the end of the run.
            start: Function that starts and releases the process of a slot.
            say: Function that receives a line for the user.
            asks: Seconds after each request to end, at the end of the run; processes
                that are left then are killed.
            groups: Whether these requests also go to the processes' children.
            own_seconds: Seconds for processes to end by themselves after a complete
                run, before the first request.
            stopping: Function that receives the names of processes before that.
            releases: Commands that free what a killed process leaves elsewhere, by
                name.
            beats: Pipes of the processes' heartbeats; default: none have any.
        """
        self.processes, self.lock = processes, threading.RLock()
        self._policy, self._selector = policy, selector
        self._start, self._say, self._stopping = start, say, stopping
        self._asks, self._groups, self._own_seconds = asks, groups, own_seconds
        self._releases, self._beats = releases, beats
        self._signals: list[int] = []
        self._heard_signals = 0
        self._end: ev.End | None = None

    def run(self) -> ev.End:
        """Runs the processes; returns the policy's end, when none is left.

        Raises:
            WhaleError: A process cannot be started, and never can be.
        """
        with self._selector, handled_signals(self._on_signal, signal.SIGINT):
            try:
                self._react(ev.StartsAllowedEvent())
                while self._end is None:
                    self._turn()
            finally:
                self._stop()
        return self._end

    def _on_signal(self, number: int, _: object) -> None:
        self._signals.append(number)

    def _turn(self) -> None:
        self._take_ends(_TICK_SECONDS)
        for number in self._signals[self._heard_signals :]:
            self._heard_signals += 1
            self._react(ev.Terminate(self._heard_signals > 1, number))
        states = {name: self.processes.state(name) for name in self.processes.names}
        if (beats := self._beats) is None:
            self._react(ev.Tick(states))
        else:
            self._react(ev.Tick(states, beats.beating, beats.overdue()))

    def _take_ends(self, seconds: float) -> None:
        """Waits at most ``seconds`` for processes to end, and reports their ends."""
        for key, _ in self._selector.select(seconds):
            name = key.data
            if not isinstance(name, str):
                name()
                continue
            status = self.processes.take_exit_status(name)
            if self._beats is not None:
                self._beats.forget(name)
            if status != 0:
                self._release(name)
            log = self.processes.log_tail(name) if status else ""
            self._react(ev.ProcessExitEvent(name, status, log))

    def _react(self, event: ev.Event) -> None:
        if self._end is not None:
            return
        with self.lock:
            effects = self._policy.react(time.monotonic(), event)
        for effect in effects:
            self._do(effect)

    def _do(self, effect: ev.Effect) -> None:
        match effect:
            case ev.StartEffect(slot=slot):
                self._start_in(slot)
            case ev.KillEffect(name=name):
                self.processes.kill(name)
                if self._beats is not None:
                    self._beats.forget(name)
            case ev.TerminateEffect(name=name, number=number):
                self.processes.terminate(name, number)
            case ev.SayEffect(text=text):
                self._say(text)
            case ev.End(text=text):
                self._end = effect
                if text:
                    self._say(text)

    def _start_in(self, slot: int) -> None:
        try:
            self._start(slot)
        except OSError as error:  # Too many processes or files, or too little memory.
            self._react(ev.NotStarted(slot, error.strerror or str(error)))

    def _release(self, name: str) -> None:
        """Frees what a process that did not end by itself has left elsewhere."""
        words = self._releases.get(name)
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

    # The end.

    def _stop(self) -> None:
        """Ends the processes that are left; a further signal kills them at once."""
        told = len(self._signals)
        if self._end is not None and self._end.how is Ending.COMPLETE:
            self._wait_for_ends(self._own_seconds, told)
        if names := self.processes.names:
            self._stopping(names)
        for seconds in self._asks:
            for name in self.processes.names:
                self.processes.terminate(name, group=self._groups)
            self._wait_for_ends(seconds, told)
        for name in self.processes.names:
            self.processes.kill(name)
        # A process in a system call that does not return cannot even be killed.
        self._wait_for_ends(GRACE_SECONDS / 2, told=None)

    def _wait_for_ends(self, seconds: float, told: int | None) -> None:
        end = time.monotonic() + seconds
        while self.processes.names and (left := end - time.monotonic()) > 0:
            if told is not None and len(self._signals) > told:
                return
            self._take_ends(min(left, _TICK_SECONDS))
