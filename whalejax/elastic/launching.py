"""``whalejax launch --processes MIN:MAX`` and ``whalejax train --processes MIN:MAX``.

The supervisor runs as a process of its own, and this one starts it again if it is
killed: its members do not stop for that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from whalejax.cli.options import LaunchCommand, TrainCommand, given_plan_options
from whalejax.elastic import outcome
from whalejax.elastic.agents.placed import (
    LOOPBACK,
    ProcessPlaces,
    check_places,
    placed,
)
from whalejax.elastic.supervisor.settings import SupervisorSettings, least_and_most
from whalejax.elastic.worker import mesh_asked
from whalejax.meshes.errors import Problems, WhaleError


_MOST_RESTARTS: Final = 1000
_FIRST_PULSE_SECONDS: Final = 120.0
_PULSE_SECONDS: Final = 1.0
_ERROR_STATUS: Final = 2

_ELASTIC_TOO: Final = ("--batch", "--precision", "--micro-batches", "--mesh")
"""Options of plans that elastic runs take."""


def launch_elastic(command: LaunchCommand) -> int:
    """Run a script as processes that may be lost and come back.

    Args:
        command: the options.

    Returns:
        0 where all steps were done, 143 where it was told to end, else 1 or 2.

    Raises:
        WhaleError: options contradict each other.
    """
    least, most = least_and_most(command.processes)
    with Problems("whalejax launch") as problems:
        check_places(command, most + command.spares, problems)
        if command.cpu_quota:
            problems.add(
                f"--cpu-quota is {command.cpu_quota}; with MIN:MAX no process has one. "
                "Leave it out"
            )
    settings = SupervisorSettings(least=least, most=most, spares=command.spares)
    words = (sys.executable, str(command.script), *command.arguments)
    began = time.monotonic()
    with placed(command, command.logs, most + command.spares) as places:
        status = supervise(
            words,
            command.logs,
            settings,
            places,
            seconds=command.exit_timeout,
            quiet=command.json or command.quiet,
        )
    outcome.print_launched(command, status, time.monotonic() - began)
    return status


def train_elastically(command: TrainCommand) -> int:
    """Train a job with processes that may be lost and come back.

    Args:
        command: the options.

    Returns:
        As for ``launch_elastic``.

    Raises:
        WhaleError: options contradict each other.
    """
    assert command.processes is not None
    least, most = least_and_most(command.processes)
    with Problems("whalejax train --processes") as problems:
        check_places(command, most + command.spares, problems)
        if command.save is None:
            problems.add(
                "--processes was given without --save DIR, where checkpoints and the "
                "journal of the run go. Give it"
            )
        given = [name for name, _ in given_plan_options(command)]
        given += ["--plan"] * (command.plan is not None)
        given += ["--replay"] * bool(command.replay)
        for name in given:
            if name not in _ELASTIC_TOO:
                problems.add(
                    f"{name} was given, which elastic runs do not take: each process "
                    "runs the whole model as one replica, or its part by --mesh. Leave "
                    "it out, or leave out --processes"
                )
        try:
            mesh_asked(command.mesh)
        except WhaleError as error:
            problems.add(str(error))
    assert command.save is not None
    words = (sys.executable, "-m", "whalejax.elastic.worker", told(command))
    settings = SupervisorSettings(least=least, most=most, spares=command.spares)
    began = time.monotonic()
    with placed(command, command.save, most + command.spares) as places:
        status = supervise(words, command.save, settings, places, quiet=command.quiet)
    outcome.print_trained(command, status, time.monotonic() - began)
    return status


def told(command: TrainCommand) -> str:
    """The options of a command as one word, for the process that it starts."""
    return json.dumps(dataclasses.asdict(command), default=str)


def supervise(
    words: Sequence[str],
    folder: Path,
    settings: SupervisorSettings,
    places: ProcessPlaces | None = None,
    *,
    seconds: float = 300.0,
    quiet: bool = False,
) -> int:
    """Run a supervisor to its end, again where it is killed.

    Args:
        words: of the processes that it starts.
        folder: of the run.
        settings: how it decides.
        places: where processes are held; on this machine if None.
        seconds: for processes to end after the run has.
        quiet: say what goes wrong, and no progress.

    Returns:
        Its status.
    """
    places = places or ProcessPlaces()
    given = {
        "command": list(words),
        "folder": str(folder),
        "settings": dataclasses.asdict(settings),
        "host": places.host,
        "port": places.port or 0,
        "awaited": list(places.awaited),
        "exit_seconds": seconds,
        "quiet": quiet,
    }
    ends = _Ends()
    for number in range(_MOST_RESTARTS):
        again = {**given, "again": number > 0}
        status = _run_once(again, ends, settings.lease_seconds)
        if status >= 0:
            return status
        name = signal.Signals(-status).name
        with contextlib.suppress(OSError, ValueError):  # Nobody reads it any more.
            print(
                f"whalejax: the supervisor ended by {name}; it is started again",
                file=sys.stderr,
                flush=True,
            )
    raise WhaleError(f"the supervisor was ended by signals {_MOST_RESTARTS} times")


def _run_once(given: Mapping[str, Any], ends: _Ends, lease: float) -> int:
    """Start a supervisor and wait for its end, which a frozen one is brought to."""
    read, write = os.pipe()
    try:
        said = json.dumps({**given, "pulse": write})
        ends.hears = False
        # Not in this one's group: Ctrl-C comes once, by way of this process.
        child = ends.child = subprocess.Popen(
            [sys.executable, "-m", "whalejax.elastic.launching", said],
            start_new_session=True,
            pass_fds=[write],
        )
    finally:
        os.close(write)
    with open(read, "rb", buffering=0) as pulse:
        seconds = _FIRST_PULSE_SECONDS
        while True:
            ready, _, _ = select.select([pulse], [], [], seconds)
            if not ready:
                child.kill()
            if not ready or not pulse.read(4096):
                ends.hears = False
                return child.wait()
            ends.beats()
            seconds = max(lease, _PULSE_SECONDS * 4)


class _Ends:
    """Passes on to the supervisor that this process is to end.

    One that still starts, or is started again, does not hear it: it is told when it
    beats for the first time.

    Attributes:
        child: the supervisor.
        hears: it has beaten, so that signals do not end it.
        told: this process is to end.
    """

    def __init__(self) -> None:
        self.child: subprocess.Popen[bytes] | None = None
        self.hears = self.told = False
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._pass_on)

    def beats(self) -> None:
        """The supervisor has beaten."""
        first, self.hears = not self.hears, True
        if first and self.told:
            self._tell()

    def _pass_on(self, number: int, _: object) -> None:
        self.told = True
        if self.hears:
            self._tell()

    def _tell(self) -> None:
        if self.child is not None and self.child.poll() is None:
            self.child.send_signal(signal.SIGTERM)


def main(words: Sequence[str]) -> int:
    """The supervisor's own process.

    Args:
        words: one, what ``supervise`` gives it.
    """
    from whalejax.elastic.supervisor.supervisor import Supervised, Supervisor

    given: dict[str, Any] = json.loads(words[0])
    run = Supervised(
        command=tuple(given["command"]),
        folder=Path(given["folder"]),
        settings=SupervisorSettings(**given["settings"]),
        host=given["host"] or LOOPBACK,
        places=given["host"] is not None,
        awaited=tuple(given["awaited"]),
        port=given["port"],
        exit_seconds=given["exit_seconds"],
        pulse=given["pulse"],
        again=given["again"],
        quiet=given["quiet"],
    )
    try:
        return Supervisor(run).run()
    except WhaleError as error:
        print(f"whalejax: {error}", file=sys.stderr, flush=True)
        return _ERROR_STATUS


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
