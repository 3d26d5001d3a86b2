"""A member of an elastic run: its steps, and its reaction to changes of the members.

A member runs its micro-batches, reduces gradients with the others by messages, and
updates its own copy of the state. It changes the state only after the sum of a step is
known. If a generation ends within a step, members keep their finished micro-batches and
repeat only those of failed members.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whalejax import _compat
from whalejax.distributed.launch_env import is_loopback
from whalejax.elastic.environment import HELD_BY, local_host
from whalejax.elastic.gradient_reduction.message_all_reduce import exchanged
from whalejax.elastic.member_connections import Peers
from whalejax.elastic.replica_programs import Buffers, ReplicaPrograms
from whalejax.elastic.supervisor_client import (
    Control,
    NoSupervisorError,
    RunStopped,
    on_notice,
)
from whalejax.lowering.train_state import TrainState
from whalejax.membership import phases
from whalejax.membership.assignment import Node
from whalejax.membership.exit_status import TERMINATED
from whalejax.meshes.errors import WhaleError
from whalejax.runtime.steps_in_flight import is_divergent
from whalejax.state.async_checkpoints import Saver
from whalejax.state.folder_lock import LOCK
from whalejax.wire import run_messages as wire
from whalejax.wire.addresses import joined_address
from whalejax.wire.messages import WireError


_DRAINED_STATUS = 0
_FLUSH_SECONDS = 10.0
_EACH_WEIGHT = 0.2
_KEEP_SECONDS = 300.0
_SHARED_SECONDS = 60.0
_MOST_WORDS = 5000


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Extent of a member's training, and its folder.

    Attributes:
        steps: Number of steps of the run.
        save: Folder of checkpoints, or None.
        save_every, keep: Steps between checkpoints, and number of checkpoints to keep.
        copy_every: Steps between copies in memory of a model over several processes.
            None computes the number from ``mtbf``, 0 makes no copies.
        mtbf: Mean seconds between failures.
    """

    steps: int
    save: Path | None
    save_every: int
    keep: int
    copy_every: int | None = None
    mtbf: float = 3600.0


class _Regroup(Exception):
    """Stops the current work because the supervisor forms a generation."""


def error_text(error: Exception) -> str:
    """Returns the text of an error, of a user's error with its class and line.

    Args:
        error: Error that ends this member.
    """
    text = str(error)[-_MOST_WORDS:]
    if isinstance(error, WhaleError):
        return text
    return f"{type(error).__name__}: {text} (at {_compat.raised_at(error)})"


class ElasticMember:
    """Member of a run, from when it joins to the last step."""

    def __init__(
        self, programs: ReplicaPrograms, training: Training, address: str, key_file: str
    ) -> None:
        """Prepares the member; does not connect yet.

        Args:
            programs: Programs of the replica.
            training: Extent of the training, and its folder.
            address: Address of the supervisor.
            key_file: Path of the run's key file.
        """
        self._programs, self._training = programs, training
        self._control = Control(address, key_file, self._registers)
        self._peers = Peers(self._control.key, local_host(address))
        self._saver = Saver(
            programs,
            training.save,
            training.save_every,
            training.keep,
            self._control.post,
            may_keep=self._may_keep,
        )
        self._facts = programs.facts()
        self._state: TrainState | None = None
        self._held: dict[Node, Buffers] = {}
        self._batch: tuple[int, list[Any]] = (-1, [])
        self._generation = 0
        self._names: list[str] = []
        self._first: dict[str, list[Node]] = {}
        self._later: dict[str, list[Node]] = {}
        self._began_at = -1
        self._asked: wire.Prepare | None = None
        self._suspected: set[str] = set()
        self._seconds = 0.0
        self._leaves = self._told_leaving = self._done = False
        self._is_divergent = False
        self._has_saved = False  # since the request to leave

    def _registers(self) -> dict[str, Any]:
        training = self._training
        return {
            "host": self._peers.host,
            "port": self._peers.port,
            "generation": self._generation,
            "micro_batches": self._programs.count,
            "steps": training.steps,
            "save": str(training.save.absolute()) if training.save else "",
            "facts": self._facts,
        }

    def _may_keep(self, step: int) -> bool:
        assert self._training.save is not None
        return self._control.may_keep(step, self._training.save, seconds=_KEEP_SECONDS)

    @property
    def _at(self) -> int:
        return self._control.step

    def run(self) -> Iterator[tuple[TrainState, dict[str, Any]]]:
        """Yields state and metrics after each step since this member joined.

        Raises:
            WhaleError: The run cannot go on, or this member's part in it is over.
            SystemExit: This member was asked to leave, or was an unused spare.
        """
        self._control.open()
        check_shared(self._training.save)
        if not is_loopback(self._peers.host):
            where = joined_address(self._peers.host, self._peers.port)
            text = f"other members reach {self._control.name} at {where}"
            print(f"whalejax: {text}", file=sys.stderr, flush=True)
        with contextlib.ExitStack() as stack:
            stack.callback(self._close)
            stack.enter_context(on_notice(self._leave))
            self._control.phase = phases.COMPILING
            self._programs.warm_up()
            self._control.phase = phases.STOPPED
            self._control.post(wire.Ready())
            while True:
                try:
                    yield from self._generations()
                    return
                except _Regroup:
                    continue
                except GeneratorExit:
                    self._control.phase = phases.SAVING
                    self._save_left()
                    self._saver.wait()
                    self._control.post(wire.MemberLeft(step=self._at))
                    raise
                except NoSupervisorError:
                    self._save_last()
                    raise
                except Exception as error:
                    self._control.post(wire.Failed(why=error_text(error)))
                    raise

    def _generations(self) -> Iterator[tuple[TrainState, dict[str, Any]]]:
        begin = self._await_begin()
        if begin is None:
            return
        self._join(begin)
        while self._at < self._training.steps:
            self._stop_at_boundary()
            metrics = self._step()
            self._save_if_due()
            assert self._state is not None
            self._control.phase = phases.BETWEEN
            yield self._state, metrics
        self._control.phase = phases.SAVING
        self._saver.wait(self._look)
        self._control.phase = phases.FINISHED
        self._control.post(wire.Finished(step=self._at))
        if self._asked is not None:  # The generation ends after the last step.
            raise _Regroup
        while not self._done:
            self._listen()

    # Messages of the supervisor.

    def _look(self) -> None:
        self._tell_leaving()
        while (said := self._control.poll()) is not None:
            self._hear(said)
        if self._peers.generation == self._generation:
            for name, why in self._peers.broken.items():
                if name not in self._suspected:
                    self._suspected.add(name)
                    suspect = wire.Suspect(
                        generation=self._generation, name=name, why=why[:500]
                    )
                    self._control.post(suspect)

    def _look_later(self) -> None:
        """Handles messages without stopping the work for a requested generation."""
        with contextlib.suppress(_Regroup):
            self._look()

    def _listen(self) -> None:
        said = self._control.wait()
        if said is not None:
            self._hear(said)

    def _tell_leaving(self) -> None:
        if self._leaves and not self._told_leaving:
            self._told_leaving = True
            self._control.post(wire.Leaving(why="it was asked to end (SIGTERM)"))

    def _hear(self, said: wire.ToMember) -> None:
        match said:
            case wire.Prepare(after=after):
                self._asked = said
                if after < 0 or self._at >= self._training.steps:
                    raise _Regroup
            case wire.Stop():
                self._stop(said)
            case wire.RunEnded(why=why, well=well):
                if well:
                    raise SystemExit(_DRAINED_STATUS)
                raise RunStopped(f"{self._control.name}: {why}")
            case wire.RunDone():
                self._done = True

    def _stop(self, said: wire.Stop) -> None:
        if said.saves and self._state is not None and self._training.save:
            self._control.phase = phases.SAVING
            self._save_good()
            while not self._saver.wait():
                pass  # The supervisor ends this process if it takes too long.
        if said.well:
            raise SystemExit(TERMINATED)
        raise RunStopped(said.why)

    def _stop_at_boundary(self) -> None:
        self._look()
        if self._asked is not None and self._at >= self._asked.after:
            raise _Regroup

    def _await_begin(self) -> wire.Begin | None:
        self._control.phase = phases.STOPPED
        while True:
            if self._asked is not None:
                self._answer(self._asked)
                self._asked = None
            if self._done:
                return None
            self._tell_leaving()
            said = self._control.wait()
            if said is None:
                continue
            if not isinstance(said, wire.Begin):
                with contextlib.suppress(_Regroup):
                    self._hear(said)
            elif said.generation == self._generation:
                return said

    def _answer(self, asked: wire.Prepare) -> None:
        self._generation = asked.generation
        prepared = wire.Prepared(
            generation=self._generation, step=self._at, held=sorted(self._held)
        )
        self._control.post(prepared)

    # A generation.

    def _join(self, begin: wire.Begin) -> None:
        name = self._control.name
        self._suspected.clear()
        members = begin.members
        self._names = [m[0] for m in members]
        self._first, self._later = (
            {n: shares.get(n, []) for n in self._names}
            for shares in (begin.first, begin.later)
        )
        self._control.phase = phases.CONNECTING
        self._connect(members)
        sources = begin.sources
        if name in sources:
            self._fetch(sources[name])
        elif self._state is None:
            self._control.phase = phases.RESTORING
            self._set(self._programs.newest(self._training.save, self._control.post))
        for other in self._names:
            if sources.get(other) == name:
                self._hand_over(other)
        self._began_at = self._at
        self._save_if_due()

    def _connect(self, members: list[tuple[str, str, int]]) -> None:
        while True:
            with contextlib.suppress(WireError):
                self._peers.connect(
                    self._generation, self._control.name, members, self._look
                )
                return
            # The supervisor learns which member failed or is unreachable.
            self._pause()

    def _pause(self) -> None:
        self._control.phase = phases.WAITING
        while True:
            self._look()
            self._listen()

    def _fetch(self, source: str) -> None:
        self._control.phase = phases.FETCHING

        def take() -> wire.State:
            self._control.done += 1
            return self._peers.take(source, wire.State, -1, self._look)

        self._set(self._programs.assembled(take, source))

    def _hand_over(self, other: str) -> None:
        assert self._state is not None
        self._control.phase = phases.HANDING_OVER
        with contextlib.suppress(WireError):  # A failed member needs no state.
            for piece in self._programs.pieces(self._state):
                self._control.done += 1
                self._peers.send(other, piece, self._look)

    def _set(self, state: TrainState) -> None:
        self._state, self._held = state, {}
        self._is_divergent = False
        self._control.step = int(state.step)

    def _save_if_due(self) -> None:
        """Saves a checkpoint if this is the first member and one is due.

        A leaving member that is alone also saves one: its process may be ended before
        another member has joined.
        """
        assert self._state is not None
        if self._names[0] == self._control.name and not self._is_divergent:
            last = self._told_leaving and len(self._names) == 1
            last = last and self._training.save is not None and not self._has_saved
            if last or self._saver.is_due(self._at, self._training.steps):
                self._has_saved = self._has_saved or last
                self._control.phase = phases.SAVING
                # The finished step goes to the user's loop before anything else.
                self._saver.save(self._state, self._at, self._look_later)

    def _save_left(self) -> None:
        """Saves the state at which the loop was left, if this is the first member."""
        is_first = self._names[:1] == [self._control.name]
        if self._state is not None and is_first and not self._is_divergent:
            self._saver.save_left(self._state, self._at)

    def _save_last(self) -> None:
        """Saves the state when the supervisor is gone, so that the run can resume."""
        if self._state is None or self._training.save is None:
            return
        there = [name for name in self._names if name not in self._peers.broken]
        if there and there[0] == self._control.name:
            self._control.phase = phases.SAVING
            self._save_good()
            self._saver.wait()

    def _save_good(self) -> None:
        """Saves the state if its loss is finite."""
        assert self._state is not None
        if self._is_divergent:
            why = "the loss of its last step is not finite"
            self._control.post(wire.NotSaved(step=self._at, why=why))
        else:
            self._saver.save(self._state, self._at)

    # A step.

    def _step(self) -> dict[str, Any]:
        assert self._state is not None
        step, programs, control = self._at, self._programs, self._control
        given = self._first if step == self._began_at else self._later
        control.phase = phases.COMPUTING
        if self._batch[0] != step:
            self._batch = step, programs.batch(step, self._state.samples)
        self._add_up(given[control.name])
        control.phase = phases.WAITING
        sums, came = self._exchanged(step)
        control.phase = phases.COMPUTING
        self._state, metrics = programs.finish(self._state, sums)
        self._held = {}
        loss = float(metrics["loss"])
        self._is_divergent = is_divergent(loss, metrics)
        # Set the phase first: a heartbeat must not report the next step as computing.
        control.phase = phases.BETWEEN
        control.step = step + 1
        committed = wire.Committed(
            generation=self._generation,
            step=step + 1,
            loss=loss,
            seconds=self._seconds,
            # The supervisor knows the micro-batches of the others.
            parts=came if self._names[0] == control.name else {},
        )
        control.post(committed)
        return {
            **metrics,
            "generation": self._generation,
            "goodput": control.goodput,
        }

    def _add_up(self, nodes: list[Node]) -> None:
        assert self._state is not None
        began, before = time.monotonic(), self._control.done

        def look() -> None:
            self._control.done += 1
            self._look()

        self._programs.add_up(self._state, self._batch[1], nodes, self._held, look)
        for node in [n for n in self._held if n not in nodes]:
            del self._held[node]  # Assigned to others.
        ran = self._control.done - before
        if ran:
            each = (time.monotonic() - began) / ran
            weight = _EACH_WEIGHT if self._seconds else 1.0
            self._seconds += weight * (each - self._seconds)

    def _exchanged(self, step: int) -> tuple[Buffers, dict[str, list[Node]]]:
        with contextlib.suppress(WireError):
            return exchanged(
                self._peers,
                self._names,
                self._control.name,
                step,
                self._held,
                self._programs.shapes,
                self._programs.count,
                self._look,
            )
        self._pause()
        raise AssertionError  # ``_pause`` ends by an exception only.

    # The end.

    def _leave(self) -> None:
        self._leaves = True

    def _close(self) -> None:
        # The connection stays until the process ends: the script may go on for long,
        # and a silent member counts as frozen.
        self._control.phase = phases.FINISHED
        self._control.flush(_FLUSH_SECONDS)
        self._peers.close()


def check_shared(save: Path | None) -> None:
    """Refuses a folder of checkpoints that is not shared with the supervisor.

    The supervisor locks the folder before it admits a member, so a shared folder has
    the lock here too. On some network file systems the lock appears after a delay.

    Args:
        save: Folder of checkpoints; None if the run saves none.

    Raises:
        WhaleError: The folder has no lock.
    """
    agent = os.environ.get(HELD_BY)
    if save is None or agent is None:
        return
    end = time.monotonic() + _SHARED_SECONDS
    while not (save / LOCK).exists():
        if time.monotonic() > end:
            raise WhaleError(
                f"save is {save}, and the folder of that name on the machine of agent "
                f"{agent} is not the one that the supervisor holds: {LOCK} is missing "
                "there. Name a folder that all machines share"
            )
        time.sleep(0.2)
