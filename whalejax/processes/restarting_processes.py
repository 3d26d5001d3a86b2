"""Commands that are started and kept running, until the first of them ends by itself.

``kept_run`` is the policy; the commands are processes of this machine.
"""

from __future__ import annotations

import selectors
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from whalejax.membership.kept_run import KeptRun
from whalejax.processes.heartbeat_pipe import SILENT_SECONDS, HeartbeatPipes
from whalejax.processes.local_processes import GRACE_SECONDS, Processes, log_folder
from whalejax.processes.local_run import LocalRun


AT_ONCE_SECONDS: Final = 1.0
"""Time between the first and the second request to end.

A peer leaves after its step when it is asked once, and at once when it is asked again.
"""


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
        log_folder(logs)
        self._programs, selector = programs, selectors.DefaultSelector()
        self._processes = Processes((), {}, logs, selector, end_with_this=True)
        self._beats = HeartbeatPipes(selector, silent_seconds)
        self._run = LocalRun(
            KeptRun([program.name for program in programs]),
            self._processes,
            selector,
            self._start,
            say=say,
            asks=(AT_ONCE_SECONDS, GRACE_SECONDS),
            own_seconds=AT_ONCE_SECONDS + GRACE_SECONDS,
            releases={program.name: program.release for program in programs},
            beats=self._beats,
        )

    def run(self) -> int:
        """Keeps the programs running.

        Returns:
            The leader's exit status; 1 if the run is given up.

        Raises:
            WhaleError: A program does not exist.
        """
        return self._run.run().status

    def _start(self, slot: int) -> None:
        program = self._programs[slot]
        with self._beats.pipe(program.name) as (pipe, beats):
            self._processes.start(
                program.name,
                {"PYTHONUNBUFFERED": "1", **beats, **program.environment},
                command=program.command,
                output=None if slot else 1,
                errors=None if slot else 2,
                passed=[pipe],
            )
        self._processes.release(program.name)
