"""The loop that starts, monitors and ends processes of this machine.

All runs use it: launches, leaders with servers that are restarted, agents, the commands
that start agents, and supervisors. They differ in their policy, which takes events and
returns the effects that the loop carries out.
"""

from __future__ import annotations

import selectors
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Final, Protocol

from whalejax.membership import events as ev
from whalejax.membership.exit_status import Ending
from whalejax.processes.heartbeat_pipe import SILENT_SECONDS, HeartbeatPipes
from whalejax.processes.local_processes import (
    GRACE_SECONDS,
    Processes,
    handled_signals,
)
from whalejax.wire.connection_loop import Waker


TICK_SECONDS: Final = 0.1
"""Longest time between two turns of the loop."""

_RELEASE_SECONDS: Final = 30.0


class RunPolicy(Protocol):
    """Rules of a run, and the commands of its processes."""

    def react(self, now: float, event: ev.Event) -> Iterable[ev.Effect]:
        """Applies an event, and returns its effects in the order to carry them out.

        Args:
            now: The time, in seconds.
            event: Event that happened.
        """
        ...

    def start(self, slot: int) -> Iterable[ev.Effect] | None:
        """Starts the process of a slot; may return effects, such as its release.

        Raises:
            OSError: The process cannot be started now.
            WhaleError: The process can never be started.
        """


class LocalRun:
    """Runs processes by a policy, until the policy ends the run.

    Attributes:
        processes: The processes, which the policy starts.
        beats: Pipes of the processes that send heartbeats.
        lock: Lock held while the policy reacts, for other threads that use the policy.
    """

    def __init__(
        self,
        policy: RunPolicy,
        logs: Path,
        *,
        say: Callable[[str], None],
        end_with_this: bool = False,
        silent_seconds: float = SILENT_SECONDS,
        own_seconds: float = 0.0,
        asks: Sequence[float] = (GRACE_SECONDS,),
        groups: bool = False,
        stopping: Callable[[Sequence[str]], None] | None = None,
        releases: Mapping[str, Sequence[str]] = {},
        signals: Sequence[signal.Signals] = (),
        turn: Callable[[Sequence[ev.Effect]], AbstractContextManager[None]]
        | None = None,
        further: Callable[[ev.Effect], None] = lambda effect: None,
    ) -> None:
        """Prepares the run; starts no process.

        Args:
            policy: Rules of the run.
            logs: Folder of one log for each process.
            say: Function that receives a line for the user.
            end_with_this: Argument of ``Processes``: whether the processes are killed
                together with this one.
            silent_seconds: Seconds after which a process whose heartbeats have stopped
                is silent.
            own_seconds: Seconds for processes to end by themselves after a complete
                run, before they are asked to end.
            asks: Seconds to wait after each request to end, when the run is over.
                After the last wait, the remaining processes are killed.
            groups: Whether requests to end also go to the processes' children.
            stopping: Function that receives the names of the processes before the first
                request to end.
            releases: Commands by name of a process. They free what it leaves elsewhere,
                and run if its exit status is not 0.
            signals: Signals that request the end besides SIGTERM, SIGINT and SIGHUP.
            turn: Function that receives the effects of a turn, for example to write
                them to a journal, and returns the context in which they are carried
                out. If None, effects are carried out after each event.
            further: Function that also receives each effect, and carries out those that
                concern no local process, such as messages.
        """
        self._selector = selectors.DefaultSelector()
        self.processes = Processes(
            (), {}, logs, self._selector, end_with_this=end_with_this
        )
        self.lock = threading.RLock()
        self.beats = HeartbeatPipes(self._selector, silent_seconds)
        self._policy, self._say, self._stopping = policy, say, stopping
        self._asks, self._groups, self._own_seconds = asks, groups, own_seconds
        self._releases, self._handled = releases, (signal.SIGINT, *signals)
        self._turn_context, self._further = turn, further
        self._effects: list[ev.Effect] = []
        self._signals: list[int] = []
        self._heard_signals = 0
        self._end: ev.End | None = None

    def watch(self, source: Waker, read: Callable[[], Iterable[ev.Effect]]) -> None:
        """Adds another source of effects, such as messages.

        Args:
            source: Waker of the loop when there are effects; the loop resets it.
            read: Function that yields effects; each is carried out before the next.
        """

        def take() -> Iterable[ev.Effect]:
            source.clear()
            return read()

        self._selector.register(source, selectors.EVENT_READ, take)

    def run(self) -> ev.End:
        """Runs until the policy ends the run and no process is left; returns the end.

        Raises:
            WhaleError: A process can never be started.
        """
        with self._selector, handled_signals(self._on_signal, *self._handled):
            try:
                self._react(ev.StartsAllowedEvent())
                self._carry_out()
                while self._end is None:
                    self._turn()
            finally:
                self._stop()
        return self._end

    def _on_signal(self, number: int, _: object) -> None:
        self._signals.append(number)

    def _turn(self) -> None:
        self._take_ends(TICK_SECONDS)
        for number in self._signals[self._heard_signals :]:
            self._heard_signals += 1
            self._react(ev.Terminate(self._heard_signals > 1, number))
        self._react(ev.Tick(self.beats.beating, self.beats.overdue()))
        self._carry_out()

    def _take_ends(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            name = key.data
            if not isinstance(name, str):
                for effect in name():
                    self._do(effect)
                    if self._end is not None:
                        break
                continue
            status = self.processes.take_exit_status(name)
            self.beats.forget(name)
            if status != 0:
                self._release(name)
            log = self.processes.log_tail(name)
            self._react(ev.ProcessExitEvent(name, status, log))

    def _react(self, event: ev.Event) -> None:
        if self._end is not None:
            return
        with self.lock:
            self._effects += self._policy.react(time.monotonic(), event)
        if self._turn_context is None:
            self._carry_out()

    def _carry_out(self) -> None:
        is_new = True
        while is_new:
            effects, self._effects = self._effects, []
            with self._turn_context(effects) if self._turn_context else nullcontext():
                for effect in effects:
                    self._do(effect)
            is_new = bool(self._effects)

    def _do(self, effect: ev.Effect) -> None:
        if self._end is not None:
            return
        match effect:
            case ev.StartEffect(slot=slot):
                self._start_in(slot)
            case ev.ReleaseEffect(name=name):
                self.processes.release(name)
            case ev.KillEffect(name=name):
                self.processes.kill(name)
                self.beats.forget(name)
            case ev.TerminateEffect(name=name, number=number):
                self.processes.terminate(name, number)
            case ev.SayEffect(text=text):
                self._say(text)
            case ev.End(text=text):
                self._end = effect
                if text:
                    self._say(text)
        self._further(effect)

    def _start_in(self, slot: int) -> None:
        try:
            self._effects += self._policy.start(slot) or ()
        except OSError as error:  # for example too many processes
            self._react(ev.NotStarted(slot, error.strerror or str(error)))

    def _release(self, name: str) -> None:
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
        """Ends the remaining processes; a further signal kills them immediately."""
        told = len(self._signals)
        # After an error, no process is restarted.
        self._end = self._end or ev.End(Ending.FAILED, "")
        if self._end.how is Ending.COMPLETE:
            self._wait_for_ends(self._own_seconds, told)
        if self._stopping is not None and (names := self.processes.names):
            self._stopping(names)
        for seconds in self._asks:
            for name in self.processes.names:
                self.processes.terminate(name, group=self._groups)
            self._wait_for_ends(seconds, told)
        for name in self.processes.names:
            self.processes.kill(name)
        # A process in a system call that does not return cannot be killed.
        self._wait_for_ends(GRACE_SECONDS / 2, told=None)

    def _wait_for_ends(self, seconds: float, told: int | None) -> None:
        end = time.monotonic() + seconds
        while self.processes.names and (left := end - time.monotonic()) > 0:
            if told is not None and len(self._signals) > told:
                return
            self._take_ends(min(left, TICK_SECONDS))
