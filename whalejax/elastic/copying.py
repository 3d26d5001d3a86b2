"""When the processes of a spread model copy their shards, and how they take them back.

How often follows from what a copy costs and how long it is between failures. Whether
one is made, and which set is taken, all processes decide alike.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import jax

from whalejax.elastic.copies import (
    BadCopies,
    Copied,
    Copies,
    read_copies,
    whole_sets,
)
from whalejax.elastic.supervisor.memory_folder import memory_folder
from whalejax.elastic.supervisor.processes import machine
from whalejax.meshes.errors import WhaleError
from whalejax.planner.plan.goodput import daly_seconds
from whalejax.runtime.adopt_state import to_save
from whalejax.runtime.checkpoint_files import fail_together, told_by_all
from whalejax.runtime.state import TrainState
from whalejax.runtime.train_step import TrainStep


_LEAST_SECONDS: Final = 1e-4
_MOST_STEPS: Final = 1_000_000


class Copying:
    """Copies of a run in the memory of its machine; without them it goes on."""

    def __init__(
        self,
        step: TrainStep,
        key: Path,
        generation: int,
        *,
        every: int | None,
        mtbf: float,
        tell: Callable[[int, str], None],
    ) -> None:
        """Copy nothing yet; all processes call this.

        Args:
            step: whose states are copied.
            key: file of the key of the run.
            generation: that these processes are in.
            every: steps between copies; None finds the best number, by Daly.
            mtbf: seconds between failures, for that.
            tell: is told, with the step, why copies are made no more.
        """
        self._step, self._generation = step, generation
        self._every, self._mtbf, self._tell = every, mtbf, tell
        self._cost = self._seconds = 0.0
        self._last, self._began = -1, 0.0
        self._copies: Copies | None = None
        error = ""
        try:
            self._copies = Copies(memory_folder(key))
        except BadCopies as found:
            error = str(found)
        machines = set(told_by_all(machine(), "machines"))
        if len(machines) > 1:
            error = (
                f"these processes run on {len(machines)} machines, and copies are of "
                "one; steps since the newest checkpoint are done again after a loss"
            )
        self._stop_together(0, error)

    def _stop_together(self, done: int, error: str) -> None:
        """Make none any more where one process cannot."""
        try:
            fail_together(error, "copies in memory")
        except WhaleError as found:
            self._copies = None
            self._tell(done, str(found))

    # Back.

    def newest(self, than: int) -> TrainState | None:
        """The state of the newest whole set, where it is newer than a checkpoint.

        Args:
            than: step of the checkpoint. All processes call this.
        """
        if self._copies is None:
            return None
        folder = self._copies.folder
        found = [s for s in whole_sets(folder) if s.step > than]
        mine = json.dumps([[s.step, s.generation, s.count] for s in found[:2]])
        for step, generation, count in json.loads(told_by_all(mine, "copies")[0]):
            copied = Copied(step=step, generation=generation, count=count)
            state, error = None, ""
            try:
                abstract = self._step.abstract_state()
                state = read_copies(folder, copied, abstract, self._step.plan)
            except BadCopies as bad:
                error = str(bad)
            try:
                fail_together(error, f"copies of step {step}")
            except WhaleError as bad:
                self._tell(step, str(bad))
                continue
            return state
        return None

    # Forth.

    def took(self, seconds: float) -> None:
        """A step took so long."""
        weight = 0.2 if self._seconds else 1.0
        self._seconds += weight * (seconds - self._seconds)

    def steps(self) -> int:
        """After how many steps a copy is due."""
        if self._every is not None:
            return self._every
        if not self._cost:
            return 1  # What one costs is not known yet.
        best = daly_seconds(max(self._cost, _LEAST_SECONDS), self._mtbf)
        return min(
            max(round(best / max(self._seconds, _LEAST_SECONDS)), 1), _MOST_STEPS
        )

    def is_due(self, done: int) -> bool:
        """Whether this process would copy the state of a step; the first decides."""
        copies = self._copies
        if copies is None or copies.busy or done <= max(self._last, 0):
            return False
        return self._last < 0 or done - self._last >= self.steps()

    def copy(self, state: TrainState, done: int) -> None:
        """Copy a state, beside the steps that follow; all processes call this.

        Args:
            state: is kept.
            done: its step.
        """
        if self._copies is None:
            return
        began = time.monotonic()
        self._copies.wait()
        self._stop_together(done, self._copies.problem())
        if self._copies is None:
            return
        whole: Any = to_save(state, self._step.abstract_state(), trains=True)
        count, rank = jax.process_count(), jax.process_index()
        copied = Copied(step=done, generation=self._generation, count=count)
        self._copies.begin(whole, self._step.plan, copied, rank)
        self._last, self._cost = done, time.monotonic() - began

    def wait(self) -> None:
        """Wait until what was begun is written."""
        if self._copies is not None:
            self._copies.wait()
