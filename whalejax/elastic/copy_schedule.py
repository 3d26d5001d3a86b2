"""Decides when the processes of a sharded model copy their shards, and restores copies.

The interval follows from the cost of a copy and the time between failures. All
processes make the same decisions: whether to make a copy, and which set to use.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import jax

from whalejax.elastic.environment import RUN, SUPERVISOR, local_host
from whalejax.elastic.supervisor.memory_folder import memory_folder
from whalejax.lowering.train_state import TrainState
from whalejax.planner.plan.goodput import daly_seconds
from whalejax.processes.local_processes import machine
from whalejax.state.checkpoint_files import first_error, told_by_all
from whalejax.state.remote_shard_copies import (
    CopyExchange,
    CopyHolder,
    names_in,
    other_machine,
    remove_others,
)
from whalejax.state.shard_copies import (
    BadCopies,
    CopiedStates,
    Copies,
    CopyFile,
    ShardCopySet,
    copy_file,
    read_copies,
    whole_sets,
)
from whalejax.wire.addresses import joined_address
from whalejax.wire.keys import load_key


_LEAST_SECONDS: Final = 1e-4
_MOST_STEPS: Final = 1_000_000
_MOST_FAILED: Final = 3
"""Number of consecutive failed sets of copies after which copying ends."""


class ShardCopyManager:
    """Copies of a run's shards in the memory of its machines.

    If copies fail, the run goes on without them.
    """

    def __init__(
        self,
        states: CopiedStates,
        key: Path,
        generation: int,
        *,
        every: int | None,
        mtbf: float,
        tell: Callable[[int, str], None],
    ) -> None:
        """Prepares the copies; all processes call this.

        Args:
            states: Kind of the states that are copied.
            key: Key file of the run.
            generation: Generation of these processes.
            every: Steps between copies; None uses the best number by Daly's formula.
            mtbf: Mean seconds between failures, for that formula.
            tell: Function that receives the step and the reason when copies end.
        """
        self._states, self._generation = states, generation
        self._every, self._mtbf, self._tell = every, mtbf, tell
        self._cost = self._seconds = 0.0
        self._last, self._failed = -1, 0
        self._begun: ShardCopySet | None = None
        self._whole: ShardCopySet | None = None
        self._copies: Copies | None = None
        self._exchange: CopyExchange | None = None
        self._other: CopyHolder | None = None
        error = ""
        folder = memory_folder(key, os.environ.get(RUN, ""))
        try:
            self._copies = Copies(folder)
        except BadCopies as found:
            error = str(found)
        mine = CopyHolder(machine=machine(), folder=str(folder))
        if self._agreed(0, error):
            self._meet(mine, key)

    def _meet(self, mine: CopyHolder, key: Path) -> None:
        """Finds the holders of copies; several folders need an exchange."""
        assert self._copies is not None
        error = ""
        self._holders = _holders(mine)
        places = [(h.machine, h.folder) for h in self._holders]
        if len(set(places)) > 1:
            try:
                host = local_host(os.environ[SUPERVISOR])
                self._exchange = CopyExchange(self._copies.folder, load_key(key), host)
            except OSError as found:
                error = f"copies of other machines cannot be taken here ({found})"
            if not self._agreed(0, error):
                return
            assert self._exchange is not None
            at = self._exchange.host, self._exchange.port
            where = joined_address(*at)
            print(
                f"whalejax: shards of other machines are taken at {where}",
                file=sys.stderr,
                flush=True,
            )
            mine = dataclasses.replace(mine, host=at[0], port=at[1])
            self._holders = _holders(mine)
        here = jax.process_index()
        self._other = other_machine(self._holders, here)
        self._removes = places.index(places[here]) == here

    def close(self) -> None:
        """Waits until the current set is written, and stops serving copies."""
        self.wait()
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None

    def _agreed(self, done: int, error: str) -> bool:
        """Returns whether no process has an error; an error ends copying in all."""
        result = first_error(error, "copies in memory")
        if result:
            self._copies = None
            self.close()
            self._tell(done, result)
        return not result

    # Restoring.

    def newest(self, than: int) -> TrainState | None:
        """Returns the state of the newest complete set; None if a checkpoint is newer.

        All processes call this.

        Args:
            than: Step of the newest checkpoint.
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
                    lambda name: self._open_copy(name, there[name]),
                    copied,
                    self._states,
                )
            except BadCopies as bad:
                error = str(bad)
            if problem := first_error(error, f"copies of step {copied.step}"):
                self._tell(copied.step, problem)
                whole.remove(copied)
                continue
            self._whole = copied
            break
        else:
            state = None
        # By now all processes have finished reading.
        if self._removes:
            names = (name for copied in whole[:2] for name in copied.names)
            remove_others(folder, names)
        return state

    def _open_copy(self, name: str, ranks: Sequence[int]) -> CopyFile:
        """Opens a file of this folder, or of another process if it is not here.

        Raises:
            OSError: No process could open the file.
        """
        assert self._copies is not None
        here = jax.process_index()
        own = self._holders[here]
        if self._exchange is None or any(
            (self._holders[n].machine, self._holders[n].folder)
            == (own.machine, own.folder)
            for n in ranks
        ):
            return copy_file(self._copies.folder / name)
        # Readers are distributed over the holders.
        first = here % len(ranks)
        problem = OSError(f"{name} is nowhere")
        for rank in [*ranks[first:], *ranks[:first]]:
            try:
                return self._exchange.file(name, self._holders[rank])
            except OSError as error:
                problem = error
        raise problem

    # Copying.

    def took(self, seconds: float) -> None:
        """Records the duration of a step."""
        weight = 0.2 if self._seconds else 1.0
        self._seconds += weight * (seconds - self._seconds)

    def steps(self) -> int:
        """Returns the number of steps between two copies."""
        if self._every is not None:
            return self._every
        if not self._cost:
            return 1  # The cost of a copy is still unknown.
        best = daly_seconds(max(self._cost, _LEAST_SECONDS), self._mtbf)
        if self._copies is not None:  # Copies use links at most half of the time.
            best = max(best, 2 * self._copies.seconds)
        return min(
            max(round(best / max(self._seconds, _LEAST_SECONDS)), 1), _MOST_STEPS
        )

    def is_due(self, done: int) -> bool:
        """Returns whether this process would make a copy after ``done`` steps."""
        copies = self._copies
        if copies is None or copies.busy or done <= max(self._last, 0):
            return False
        return self._last < 0 or done - self._last >= self.steps()

    @property
    def busy(self) -> bool:
        """Whether this process still writes or sends a copy."""
        return self._copies is not None and self._copies.busy

    def copy(self, state: TrainState, done: int) -> None:
        """Copies a state while the next steps run; all processes call this."""
        if self._copies is None:
            return
        began = time.monotonic()
        self._settle(done)
        if self._copies is None:
            return
        count, rank = jax.process_count(), jax.process_index()
        copied = ShardCopySet(step=done, generation=self._generation, count=count)
        if self._removes:  # Keep only the last complete set and the one begun here.
            kept = [*copied.names] + (self._whole.names if self._whole else [])
            drafts = [f".{name}{end}" for name in copied.names for end in ("", ".put")]
            remove_others(self._copies.folder, [*kept, *drafts])
        send = self._send if self._other is not None else None
        parts = self._states.parts(state)
        self._copies.begin(parts, state.samples, copied, rank, send)
        self._begun = copied
        self._last, self._cost = done, time.monotonic() - began

    def _settle(self, done: int) -> None:
        assert self._copies is not None
        if self._begun is None:
            return
        self._copies.wait()
        begun, self._begun = self._begun, None
        problem = first_error(self._copies.problem(), "copies in memory")
        if not problem:
            self._whole, self._failed = begun, 0
            return
        self._failed += 1
        if self._failed >= _MOST_FAILED:
            self._copies = None
            self.close()
            problem += f"; {self._failed} in a row failed, so no more copies are made"
        self._tell(done, problem)

    def _send(self, path: Path) -> None:
        assert self._exchange is not None and self._other is not None
        self._exchange.send(path, self._other)

    def wait(self) -> None:
        """Waits until the current set is written."""
        if self._copies is not None:
            self._copies.wait()


def _holders(mine: CopyHolder) -> list[CopyHolder]:
    text = json.dumps(dataclasses.asdict(mine))
    said = told_by_all(text, "where copies are")
    return [CopyHolder(**json.loads(text)) for text in said]
