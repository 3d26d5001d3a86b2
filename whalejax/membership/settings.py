"""Settings of a supervisor: its command, the numbers of members, and deadlines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from whalejax.meshes.errors import Problems


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorSettings:
    """Numbers of an elastic run; every wait in it has one of these as its deadline.

    Attributes:
        least, most: Members that take part in a step.
        first: Members with which the run begins; ``most`` if None. A run that is
            resized has from ``least`` to ``most``.
        spares: Further ones, which have compiled everything and wait.
        lease_seconds: A member that is silent for so long is given up.
        start_seconds: From a process's start to its first word.
        compile_seconds: From there until it is ready for steps; also the first step.
        restore_seconds: Deadline of reading a checkpoint.
        body_seconds: For the body of the user's loop, such as an evaluation.
        save_seconds: Deadline of copying a state, and of writing a checkpoint.
        finish_seconds: For a process to end after its part in the run has.
        prepare_seconds: For members to stop at a boundary.
        gather_seconds: With ``least`` members ready, to wait for those that start.
        wait_seconds: Below ``least``, before the run ends.
        rejoin_seconds: For members to come back to a supervisor that was restarted.
        step_factor, step_seconds: A step that takes longer than both so many times the
            median and so many seconds is stuck.
        restarts, window_seconds: So many failures in such a time end the run.
        fruitless: Number of failures without a step between them that ends the run.
        hold_seconds: A process that fails again is held out for so long, twice as long
            each further time, and at most ``most_hold_seconds``.
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
        """Seconds between heartbeats of a member."""
        return self.lease_seconds / 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervised:
    """Command and settings of a supervisor.

    Attributes:
        command: Words of the program; none waits for members that others start.
        folder: Folder of the run.
        settings: Settings of its decisions.
        host, port: Address to listen at; a free port if 0.
        exit_seconds: For processes to end after the run has.
        environment: Variables for the processes.
        pulse: A file that is written to while the supervisor is not frozen, or None.
        again: An earlier supervisor of this run was ended by a signal: go on from its
            journal, also where the run is over or nobody is left.
        quiet: Say what goes wrong, and no progress.
        devices: Names of the devices of each slot, for ``CUDA_VISIBLE_DEVICES``; all
            slots share what there is if None.
        places: Processes are placed on agents, which join at ``host`` and ``port``;
            else they are started on this machine.
        awaited: Names of agents that are started for this run.
    """

    command: tuple[str, ...]
    folder: Path
    settings: SupervisorSettings
    host: str = "127.0.0.1"
    port: int = 0
    exit_seconds: float = 300.0
    environment: Mapping[str, str] | None = None
    pulse: int | None = None
    again: bool = False
    quiet: bool = False
    devices: tuple[str, ...] | None = None
    places: bool = False
    awaited: tuple[str, ...] = ()


def least_and_most(text: str) -> tuple[int, int]:
    """MIN and MAX of ``MIN:MAX``; one number is both.

    Raises:
        WhaleError: It is not of that form.

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
