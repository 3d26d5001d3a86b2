"""When the processes of a spread model copy their shards, and how they take them back.

How often follows from what a copy costs and how long it is between failures. Whether
one is made, and which set is taken, all processes decide alike.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import jax

from whalejax.elastic.environment import SUPERVISOR, local_host
from whalejax.elastic.shard_copies.copies import (
    BadCopies,
    Copied,
    Copies,
    CopyFile,
    copy_file,
    read_copies,
    whole_sets,
)
from whalejax.elastic.shard_copies.machines import (
    CopyExchange,
    CopyHolder,
    holder_from,
    names_in,
    other_machine,
    remove_others,
)
from whalejax.elastic.supervisor.memory_folder import memory_folder
from whalejax.elastic.supervisor.processes import machine
from whalejax.elastic.wire.keys import load_key
from whalejax.meshes.errors import WhaleError
from whalejax.planner.plan.goodput import daly_seconds
from whalejax.runtime.adopt_state import to_save
from whalejax.runtime.checkpoint_files import fail_together, told_by_all
from whalejax.runtime.state import TrainState
from whalejax.runtime.train_step import TrainStep


_LEAST_SECONDS: Final = 1e-4
_MOST_STEPS: Final = 1_000_000


class Copying:
    """Copies of a run in the memory of its machines; without them it goes on."""

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
        self._exchange: CopyExchange | None = None
        error = ""
        try:
            self._copies = Copies(memory_folder(key))
        except BadCopies as found:
            error = str(found)
        self._stop_together(0, error)
        self._holders = [
            CopyHolder(machine=m) for m in told_by_all(machine(), "machines")
        ]
        if len({holder.machine for holder in self._holders}) > 1:
            self._meet(key)
        here = jax.process_index()
        self._other = other_machine(self._holders, here)
        mine = self._holders[here].machine
        first = [holder.machine for holder in self._holders].index(mine)
        self._removes = first == here

    def _meet(self, key: Path) -> None:
        """Listen for the processes of other machines, and learn where they listen."""
        error = ""
        if self._copies is not None:
            try:
                host = local_host(os.environ[SUPERVISOR])
                self._exchange = CopyExchange(self._copies.folder, load_key(key), host)
            except OSError as found:
                error = f"copies of other machines cannot be taken here ({found})"
        self._stop_together(0, error)
        at = self._exchange
        told = {
            "machine": machine(),
            "host": at.host if at else "",
            "port": at.port if at else 0,
        }
        said = told_by_all(json.dumps(told), "where copies go")
        self._holders = [holder_from(json.loads(text)) for text in said]

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
        told = told_by_all(json.dumps(names_in(folder)), "copies")
        there: dict[str, list[int]] = {}
        for rank, text in enumerate(told):
            for name in json.loads(text):
                there.setdefault(name, []).append(rank)
        whole = whole_sets(there)
        for copied in [s for s in whole if s.step > than][:2]:
            state, error = None, ""
            try:
                state = read_copies(
                    lambda name: self._opened(name, there[name]),
                    copied,
                    self._step.abstract_state(),
                    self._step.plan,
                )
            except BadCopies as bad:
                error = str(bad)
            try:
                fail_together(error, f"copies of step {copied.step}")
            except WhaleError as bad:
                self._tell(copied.step, str(bad))
                continue
            self._keep(folder, whole)
            return state
        self._keep(folder, whole)
        return None

    def _opened(self, name: str, ranks: Sequence[int]) -> CopyFile:
        """A file, of this machine where that has it."""
        machines = [self._holders[rank].machine for rank in ranks]
        here = self._holders[jax.process_index()].machine
        if here in machines or self._exchange is None:
            assert self._copies is not None
            return copy_file(self._copies.folder / name)
        # Those who read spread over those who have it.
        holder = self._holders[ranks[jax.process_index() % len(ranks)]]
        return self._exchange.file(name, holder)

    def _keep(self, folder: Path, whole: Sequence[Copied]) -> None:
        """Nobody reads any more: what is of no whole set goes."""
        if self._removes:
            remove_others(folder, (name for copied in whole for name in copied.names))

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
        self._copies.begin(
            whole,
            self._step.plan,
            copied,
            rank,
            removes=self._removes,
            send=self._send if self._other is not None else None,
        )
        self._last, self._cost = done, time.monotonic() - began

    def _send(self, path: Path) -> None:
        assert self._exchange is not None and self._other is not None
        self._exchange.send(path, self._other)

    def wait(self) -> None:
        """Wait until what was begun is written."""
        if self._copies is not None:
            self._copies.wait()
