"""Runs a supervisor in its own process, and restarts it if it is killed.

Its members continue meanwhile.
"""

from __future__ import annotations

import dataclasses
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from whalejax.elastic.environment import AT_ONCE, SUPERVISOR_SECONDS
from whalejax.elastic.supervisor.event_messages import tell_user
from whalejax.membership.settings import Supervised, SupervisorSettings
from whalejax.meshes.errors import WhaleError
from whalejax.processes.local_processes import start_child


_MOST_RESTARTS: Final = 1000
_FIRST_PULSE_SECONDS: Final = 120.0
_AGAIN_PULSE_SECONDS: Final = SUPERVISOR_SECONDS / 3
"""Deadline of the first heartbeat of a restarted supervisor, before members give up."""

_PULSE_SECONDS: Final = 1.0
_ERROR_STATUS: Final = 2

_INTERRUPTED: Final = (
    "interrupted: the run ends after a step, with a checkpoint where it saves any",
    "interrupted again: the run still waits for the end of a step, of the loop's body "
    "or of a checkpoint; once more ends all processes at once",
    "interrupted for the third time: all processes are ended",
)
"""Messages to a user who interrupts for the first, second and third time."""

LOOPBACK: Final = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlaces:
    """Places of a run's processes: the supervisor's address and the expected agents.

    Attributes:
        host: Address at which agents join; None if all processes are on this machine.
        port: Port of that address; a free one if None.
        awaited: Names of agents that are started for the run.
    """

    host: str | None = None
    port: int | None = None
    awaited: tuple[str, ...] = ()


def supervise(
    words: Sequence[str],
    folder: Path,
    settings: SupervisorSettings,
    places: ProcessPlaces | None = None,
    *,
    seconds: float = 300.0,
    quiet: bool = False,
    devices: tuple[str, ...] | None = None,
    environment: Mapping[str, str] | None = None,
) -> int:
    """Runs a supervisor to its end, and restarts it when it is killed.

    Args:
        words: Command of the processes that it starts.
        folder: Folder of the run.
        settings: Settings of the supervisor.
        places: Placement of the processes; on this machine if None.
        seconds: Deadline for processes to end after the run.
        quiet: Whether to report errors only, and no progress.
        devices, environment: Fields of ``Supervised``.

    Returns:
        Exit status of the supervisor.

    Raises:
        WhaleError: Signals ended the supervisor too many times.
    """
    places = places or ProcessPlaces()
    run = Supervised(
        command=tuple(words),
        folder=folder,
        settings=settings,
        host=places.host or LOOPBACK,
        port=places.port or 0,
        places=places.host is not None,
        awaited=places.awaited,
        exit_seconds=seconds,
        quiet=quiet,
        devices=devices,
        environment=environment,
    )
    ends = _SignalForwarder()
    for number in range(_MOST_RESTARTS):
        status = _run_once(dataclasses.replace(run, again=number > 0), ends)
        if status >= 0:
            return status
        name = signal.Signals(-status).name
        tell_user(f"the supervisor ended by {name}; it is started again")
    raise WhaleError(f"the supervisor was ended by signals {_MOST_RESTARTS} times")


def _run_once(run: Supervised, ends: _SignalForwarder) -> int:
    """Starts a supervisor and waits for its end; kills one that is frozen."""
    read, write = os.pipe()
    try:
        run = dataclasses.replace(run, pulse=write)
        said = msgspec.json.encode(run, enc_hook=str).decode()
        ends.hears = False
        words = [sys.executable, "-m", "whalejax.elastic.launching", said]
        child = ends.child = start_child(words, passed=[write])
    finally:
        os.close(write)
    with open(read, "rb", buffering=0) as pulse:
        seconds = _AGAIN_PULSE_SECONDS if run.again else _FIRST_PULSE_SECONDS
        while True:
            ready, _, _ = select.select([pulse], [], [], seconds)
            if not ready:
                child.kill()
            if not ready or not pulse.read(4096):
                ends.hears = False
                return child.wait()
            ends.beats()
            seconds = max(run.settings.lease_seconds, _PULSE_SECONDS * 4)


class _SignalForwarder:
    """Forwards signals that end this process to the supervisor.

    A supervisor that is still starting cannot handle them: it gets them after its first
    heartbeat. The third Ctrl-C ends the run at once.

    Attributes:
        child: The supervisor.
        hears: Whether the supervisor has sent a heartbeat, after which signals do not
            end it.
        told: Whether this process got such a signal.
        interrupts: Number of times that the user pressed Ctrl-C.
    """

    def __init__(self) -> None:
        self.child: subprocess.Popen[bytes] | None = None
        self.hears = self.told = False
        self.interrupts = 0
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._pass_on)

    def beats(self) -> None:
        """Handles a heartbeat of the supervisor."""
        first, self.hears = not self.hears, True
        if first and self.told:
            self._tell()

    def _pass_on(self, number: int, _: object) -> None:
        self.told = True
        self.interrupts += number == signal.SIGINT
        if number == signal.SIGINT and self.interrupts <= len(_INTERRUPTED):
            tell_user(_INTERRUPTED[self.interrupts - 1])
        if self.hears:
            self._tell()

    def _tell(self) -> None:
        if self.child is not None and self.child.poll() is None:
            self.child.send_signal(signal.SIGTERM)
            if self.interrupts >= len(_INTERRUPTED):
                self.child.send_signal(AT_ONCE)


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
