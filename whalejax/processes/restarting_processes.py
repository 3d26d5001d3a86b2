"""Restarts commands on this machine until the leader, the first one, ends by itself.

``kept_run`` has the rules of restarts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from whalejax.membership import events as ev
from whalejax.membership.kept_run import KeptRun
from whalejax.processes.heartbeat_pipe import SILENT_SECONDS
from whalejax.processes.local_processes import GRACE_SECONDS, log_folder
from whalejax.processes.local_run import LocalRun


AT_ONCE_SECONDS: Final = 1.0
"""Seconds between the first and the second request to end.

After the first request, a peer leaves after its step. After the second, it leaves
immediately.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptCommand:
    """Command that is started and kept running.

    Attributes:
        name: Unique name.
        command: Words of the command.
        environment: Additional environment variables.
        release: Command that frees what a killed command leaves elsewhere, or empty.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    release: Sequence[str] = ()


class Keeper:
    """Keeps programs running until the leader, the first one, ends by itself."""

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
            programs: Programs, the leader first. The leader writes to this process's
                output.
            logs: Folder of one log for each other program.
            say: Function that receives a line on each end and restart.
            silent_seconds: Seconds without a heartbeat after which a program is
                restarted.

        Raises:
            WhaleError: The folder cannot be created.
        """
        self._programs = programs
        self._rules = KeptRun([program.name for program in programs])
        self._loop = LocalRun(
            self,
            log_folder(logs),
            say=say,
            end_with_this=True,
            silent_seconds=silent_seconds,
            own_seconds=AT_ONCE_SECONDS + GRACE_SECONDS,
            asks=(AT_ONCE_SECONDS, GRACE_SECONDS),
            releases={program.name: program.release for program in programs},
        )

    def run(self) -> int:
        """Keeps the programs running until the leader ends.

        Returns:
            The leader's exit status; 1 if the run is given up.

        Raises:
            WhaleError: A program does not exist.
        """
        return self._loop.run().status

    def react(self, now: float, event: ev.Event) -> Iterator[ev.Effect]:
        """Applies an event, and returns its effects; see ``RunPolicy``."""
        return self._rules.react(now, event)

    def start(self, slot: int) -> None:
        """Starts a program."""
        program = self._programs[slot]
        with self._loop.beats.pipe(program.name, math.inf) as (pipe, beats):
            self._loop.processes.start(
                program.name,
                {"PYTHONUNBUFFERED": "1", **beats, **program.environment},
                command=program.command,
                output=None if slot else 1,
                errors=None if slot else 2,
                passed=[pipe],
            )
        self._loop.processes.release(program.name)
