"""A run of a leader process and of servers, which are restarted if they are killed.

This is the policy of ``whalejax swarm serve --processes`` and ``whalejax launch
--keep``. Without a leader, it is the policy of processes that store embedding tables.

A process that is killed and a server that fails are restarted. A process whose
heartbeats stop is killed, and so restarted. The run is over when the leader ends by
itself. Many failures in a row, or the same error twice, end the run, unless other
servers serve the leader meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from whalejax.membership import events as ev
from whalejax.membership.exit_status import Ending, exit_text, shell_status
from whalejax.membership.restart_policy import Failure, Failures
from whalejax.membership.settings import SupervisorSettings


FRUITFUL_SECONDS: Final = 60.0
"""Seconds of running after which earlier failures of a process no longer count."""

SHELL_FAILED: Final = 255
"""Exit status of ssh itself, if a host is unreachable."""

_FAILED: Final = 1


class KeptRun:
    """A leader and servers, by name.

    Attributes:
        failures: Counts of failures, which decide on restarts and on the end of the
            run.
        useful: Names of processes that have served, and are restarted without a delay.
    """

    def __init__(
        self, names: Sequence[str], *, leads: bool = True, what: str = "the run"
    ) -> None:
        """Starts without processes.

        Args:
            names: Names of the processes; the first is the leader's, if there is one.
            leads: Whether there is a leader; without one, the run has no end.
            what: Name of the run in the reason for giving it up.
        """
        self._names, self._leader = list(names), names[0] if leads else None
        self.useful: set[str] = set()
        self._what = what
        self.failures = Failures(SupervisorSettings(least=len(names), most=len(names)))
        self._due: dict[str, float] = {}
        self._started_at: dict[str, float] = {}
        self._was_asked = False

    def react(self, now: float, event: ev.Event) -> Iterator[ev.Effect]:
        """Applies an event, and yields its effects.

        Args:
            now: The time, in seconds.
            event: Event that happened.
        """
        match event:
            case ev.StartsAllowedEvent():
                self._due = dict.fromkeys(self._names, now)
                yield from self._start_due(now)
            case ev.Terminate(at_once=at_once):
                self._was_asked = True
                if at_once or self._leader not in self._started_at:
                    yield ev.End(Ending.INTERRUPTED, "")
                else:
                    yield ev.TerminateEffect(self._leader)
            case ev.NotStarted(slot=slot, why=why):
                name = self._names[slot]
                self._started_at.pop(name, None)
                yield self._restart(now, name, f"cannot be started ({why})")
            case ev.ProcessExitEvent(name=name, status=status, log=log):
                assert status is not None  # All processes are children of the loop.
                since = self._started_at.pop(name)
                yield from self._on_end(now, name, status, log, since)
            case ev.Tick(silent=silent):
                for name, seconds in silent.items():
                    yield ev.SayEffect(
                        f"{name} stands still: no beat for {seconds:.0f} s. It is "
                        "killed"
                    )
                    yield ev.KillEffect(name, 0)
                yield from self._start_due(now)

    def _start_due(self, now: float) -> Iterator[ev.Effect]:
        for name in [name for name, at in self._due.items() if at <= now]:
            del self._due[name]
            self._started_at[name] = now
            yield ev.StartEffect(self._names.index(name))

    def _on_end(
        self, now: float, name: str, status: int, log: str, since: float
    ) -> Iterator[ev.Effect]:
        if name == self._leader and (status >= 0 or self._was_asked):
            code = shell_status(status)
            yield ev.End(Ending.FAILED if code else Ending.COMPLETE, "", code)
            return
        if not status and self._leader is not None:
            return  # The server was asked to leave, or knows that the run is over.
        is_own = 0 < status != SHELL_FAILED
        error = self.failures.error_of(name, log) if is_own else ""
        why = f"ended {exit_text(status)}"
        if self._leader is not None and now - since > FRUITFUL_SECONDS:
            self.failures.progressed()
        failure = Failure(at=now, since=since, name=name, why=why, error=error)
        self.failures.count(failure, log)
        passed = False
        if self._leader not in (None, name):
            # While other servers keep running, one may fail any number of times.
            servers = (at for n, at in self._started_at.items() if n != self._leader)
            passed = now - min(servers, default=now) > FRUITFUL_SECONDS
        if given_up := self.failures.exceeded(now, passed=passed):
            text = f"{self._what} is given up: {given_up}"
            yield ev.End(Ending.FAILED, text, _FAILED)
            return
        yield self._restart(now, name, f"{why}{': ' if error else ''}{error}")

    def _restart(self, now: float, name: str, why: str) -> ev.Effect:
        slot, seconds = self._names.index(name), 0.0
        if name not in self.useful:
            seconds = self.failures.hold(now, slot)
        self.useful.discard(name)
        self._due[name] = now + seconds
        when = f" in {seconds:.0f} s" if seconds else ""
        return ev.SayEffect(f"{name} {why}; it is started again{when}")
