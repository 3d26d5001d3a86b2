"""Runs a supervisor in its own process, and restarts it if it is killed.

The members of the run continue while the supervisor restarts.
"""

from __future__ import annotations

import dataclasses
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from whalejax.distributed.standard_streams import hold_standard_streams
from whalejax.elastic.environment import AT_ONCE, SUPERVISOR_SECONDS
from whalejax.elastic.supervisor.event_messages import tell_user
from whalejax.membership import events as ev
from whalejax.membership.exit_status import Ending, exit_text
from whalejax.membership.settings import Supervised
from whalejax.meshes.errors import WhaleError
from whalejax.processes.heartbeat_pipe import BEAT_SECONDS
from whalejax.processes.local_run import LocalRun


_MOST_RESTARTS: Final = 1000
_FIRST_BEAT_SECONDS: Final = 120.0
AGAIN_BEAT_SECONDS: Final = SUPERVISOR_SECONDS / 3
"""Deadline of a restarted supervisor's first heartbeat, before its members give up."""

_NAME: Final = "supervisor"
_ERROR_STATUS: Final = 2

_INTERRUPTED: Final = (
    "interrupted: the run ends after a step, with a checkpoint where it saves any",
    "interrupted again: the run still waits for the end of a step, of the loop's body "
    "or of a checkpoint; once more ends all processes at once",
    "interrupted for the third time: all processes are ended",
)
"""Messages to a user who interrupts for the first, second and third time."""


def supervise(run: Supervised) -> int:
    """Runs a supervisor to its end, and restarts it when it is killed.

    Args:
        run: Command and settings of the run.

    Returns:
        Exit status of the supervisor.

    Raises:
        WhaleError: Signals ended the supervisor too many times.
    """
    return _SupervisorProcess(run).run()


class _SupervisorProcess:
    """Process of a supervisor, and the rules by which it is restarted.

    A supervisor cannot handle signals while it starts, so signals are passed on after
    its first heartbeat. The third Ctrl-C ends the run immediately.
    """

    def __init__(self, run: Supervised) -> None:
        hold_standard_streams()
        self._run = run
        seconds = max(run.settings.lease_seconds, 4 * BEAT_SECONDS)
        self._loop = LocalRun(self, run.folder, say=tell_user, silent_seconds=seconds)
        self._starts = self._interrupts = 0
        self._hears = self._was_asked = self._is_due = False

    def run(self) -> int:
        return self._loop.run().status

    def react(self, now: float, event: ev.Event) -> Iterator[ev.Effect]:
        del now
        match event:
            case ev.StartsAllowedEvent():
                yield ev.StartEffect(0)
            case ev.NotStarted(why=why):
                text = f"the supervisor cannot be started ({why})"
                if not self._starts:
                    yield ev.End(Ending.FAILED, text, _ERROR_STATUS)
                elif not self._is_due:
                    self._is_due = True
                    yield ev.SayEffect(f"{text}; it is tried again")
            case ev.ProcessExitEvent(status=int(status)) if status >= 0:
                yield ev.End(Ending.COMPLETE, "", status)
            case ev.ProcessExitEvent(status=status):
                self._hears = False
                ended = f"the supervisor ended {exit_text(status)}"
                if self._starts >= _MOST_RESTARTS:
                    text = f"{ended}, for the {_MOST_RESTARTS}th time"
                    yield ev.End(Ending.FAILED, text)
                    return
                yield ev.SayEffect(f"{ended}; it is started again")
                yield ev.StartEffect(0)
            case ev.Terminate(number=number):
                self._was_asked = True
                if number == signal.SIGINT:
                    self._interrupts += 1
                    if self._interrupts <= len(_INTERRUPTED):
                        yield ev.SayEffect(_INTERRUPTED[self._interrupts - 1])
                if self._hears:
                    yield from self._asks()
            case ev.Tick() if self._is_due:
                yield ev.StartEffect(0)
            case ev.Tick(beating=beating, silent=silent):
                if beating and not self._hears:
                    self._hears = True
                    if self._was_asked:
                        yield from self._asks()
                for name in silent:
                    yield ev.KillEffect(name, 0)

    def _asks(self) -> Iterator[ev.Effect]:
        yield ev.TerminateEffect(_NAME)
        if self._interrupts >= len(_INTERRUPTED):
            yield ev.TerminateEffect(_NAME, AT_ONCE)

    def start(self, slot: int) -> None:
        del slot
        again = self._starts > 0
        run = dataclasses.replace(self._run, again=again)
        said = msgspec.json.encode(run, enc_hook=str).decode()
        seconds = AGAIN_BEAT_SECONDS if again else _FIRST_BEAT_SECONDS
        words = [sys.executable, "-m", "whalejax.elastic.launching", said]
        processes = self._loop.processes
        with self._loop.beats.pipe(_NAME, seconds) as (pipe, beats):
            processes.start(
                _NAME, beats, command=words, output=1, errors=2, passed=[pipe]
            )
        processes.release(_NAME)
        self._starts, self._is_due = self._starts + 1, False


def main(words: Sequence[str]) -> int:
    """Runs the supervisor in its own process."""
    from whalejax.elastic.supervisor.supervisor import Supervisor

    def decode_path(kind: type, text: str) -> Path:
        del kind
        return Path(text)

    run = msgspec.json.decode(words[0], type=Supervised, dec_hook=decode_path)
    try:
        return Supervisor(run).run()
    except WhaleError as error:
        tell_user(str(error))
        return _ERROR_STATUS


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
