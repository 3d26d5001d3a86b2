"""Settings of a supervisor: its command, the numbers of members, and deadlines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from whalejax.meshes.errors import Problems


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorSettings:
    """Numbers of members of an elastic run, and the deadlines of all its waits.

    Attributes:
        least, most: Minimum and maximum number of members in a step.
        first: Number of members at the start; ``most`` if None. Resizing allows
            ``least`` to ``most``.
        spares: Number of spare members, which have compiled everything and wait.
        lease_seconds: Seconds of silence after which a member is given up.
        start_seconds: Deadline from a process's start to its first message.
        compile_seconds: Deadline from the first message until the process is ready for
            steps; also the deadline of its first step.
        restore_seconds: Deadline of reading a checkpoint.
        body_seconds: Deadline of the body of the user's loop, such as an evaluation.
        save_seconds: Deadline of copying a state, and of writing a checkpoint.
        finish_seconds: Deadline for a process to end after its part in the run.
        prepare_seconds: Deadline for members to stop at a boundary.
        gather_seconds: Longest wait for members that start, once ``least`` are ready.
        wait_seconds: Longest wait with fewer than ``least`` members; then the run ends.
        rejoin_seconds: Time for members to reconnect to a restarted supervisor.
        step_factor, step_seconds: Limits of a step: a multiple of the median step time,
            and seconds. A step that exceeds both is stuck.
        restarts, window_seconds: More than ``restarts`` failures within
            ``window_seconds`` end the run.
        fruitless: Number of failures that ends the run if no step is between them.
        hold_seconds, most_hold_seconds: First and longest restart delay of a process
            that fails repeatedly. The delay doubles with each failure.
    """

    least: int
    most: int
    first: int | None = None
    spares: int = 0
    lease_seconds: float = 10.0
    start_seconds: float = 300.0
    compile_seconds: float = 900.0
    restore_seconds: float = 900.0
    body_seconds: float = 900.0
    save_seconds: float = 900.0
    finish_seconds: float = 300.0
    prepare_seconds: float = 60.0
    gather_seconds: float = 60.0
    wait_seconds: float = 300.0
    rejoin_seconds: float = 20.0
    step_factor: float = 20.0
    step_seconds: float = 30.0
    restarts: int = 100
    window_seconds: float = 3600.0
    fruitless: int = 8
    hold_seconds: float = 1.0
    most_hold_seconds: float = 60.0

    def __post_init__(self) -> None:
        with Problems("elastic run") as problems:
            if self.least < 1:
                problems.add(f"MIN is {self.least}; expected at least 1 process")
            if self.least > self.most:
                problems.add(
                    f"MIN is {self.least} and MAX is {self.most}; expected MIN:MAX "
                    f"with MIN at most MAX, such as {self.most}:{self.least}"
                )
            if self.first is not None and not self.least <= self.first <= self.most:
                problems.add(
                    f"first is {self.first}; expected {self.least} to {self.most} "
                    "processes, as MIN:MAX says"
                )
            if self.spares < 0:
                problems.add(f"--spares is {self.spares}; expected 0 or more")
            for name in self.__slots__:
                value = getattr(self, name)
                if name.endswith("_seconds") and not 0 < value < float("inf"):
                    problems.add(
                        f"{name} is {value}; expected a positive number of seconds"
                    )

    @property
    def beat_seconds(self) -> float:
        """Seconds between two heartbeats of a member."""
        return self.lease_seconds / 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervised:
    """Command and settings of a supervisor.

    Attributes:
        command: Command of the processes; if empty, others start the members.
        folder: Folder of the run.
        settings: Numbers and deadlines of the run.
        host, port: Address to listen at; port 0 chooses a free one.
        exit_seconds: Deadline for processes to end after the run.
        environment: Environment variables for the processes.
        again: Whether a signal ended an earlier supervisor of this run. If so, this one
            resumes from the journal, even if the run is over or no member is left.
        quiet: Whether to report errors only, and no progress.
        devices: Names of the devices of each slot, for ``CUDA_VISIBLE_DEVICES``; if
            None, all slots share all devices.
        places: Whether processes are placed on agents, which join at ``host`` and
            ``port``; if not, they are started on this machine.
        awaited: Names of agents that are started for this run.
    """

    command: tuple[str, ...]
    folder: Path
    settings: SupervisorSettings
    host: str = "127.0.0.1"
    port: int = 0
    exit_seconds: float = 300.0
    environment: Mapping[str, str] | None = None
    again: bool = False
    quiet: bool = False
    devices: tuple[str, ...] | None = None
    places: bool = False
    awaited: tuple[str, ...] = ()


def least_and_most(text: str) -> tuple[int, int]:
    """Returns MIN and MAX of ``MIN:MAX``; a single number is both.

    Raises:
        WhaleError: The text has another form.

    >>> least_and_most("2:4"), least_and_most("3")
    ((2, 4), (3, 3))
    """
    first, colon, second = text.partition(":")
    parts = (first, second) if colon else (first, first)
    with Problems("--processes") as problems:
        if not all(p.isascii() and p.isdigit() and len(p) < 6 for p in parts):
            problems.add(
                f"it is {text[:40]!r}; expected MIN:MAX, such as 2:4, or one number"
            )
    return int(parts[0]), int(parts[1])
