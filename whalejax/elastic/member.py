"""A member of an elastic run: its steps, and what it does when the world changes.

It runs its micro-batches, adds gradients up with the others by messages, and updates
its own copy of the state. Before the sum of a step is there, its state is whole, so a
generation that ends in the middle of a step loses no step: micro-batches that are done
are kept, and only those that were lost are run again, by others.
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

from whalejax.distributed.launch_env import is_loopback, joined_address
from whalejax.elastic.async_checkpoints import Saver
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
from whalejax.membership.assignment import Node
from whalejax.membership.phases import (
    BETWEEN,
    COMPILING,
    COMPUTING,
    CONNECTING,
    FETCHING,
    FINISHED,
    HANDING_OVER,
    RESTORING,
    SAVING,
    STOPPED,
    WAITING,
)
from whalejax.meshes.errors import WhaleError
from whalejax.runtime.folder_lock import LOCK
from whalejax.wire.messages import WireError
from whalejax.wire.run_messages import (
    Begin,
    Committed,
    Failed,
    Finished,
    Leaving,
    MemberLeft,
    Prepare,
    Prepared,
    Ready,
    RunDone,
    RunEnded,
    State,
    Stop,
    Suspect,
    ToMember,
)


_DRAINED_STATUS = 0
_TERMINATED_STATUS = 143
_FLUSH_SECONDS = 10.0
_EACH_WEIGHT = 0.2
_KEEP_SECONDS = 300.0
_SHARED_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Extent of a member's training, and its folder.

    Attributes:
        steps: Number of steps of the whole run.
        save: Folder of checkpoints, or None.
        save_every, keep: Steps between checkpoints, and how many stay.
        copy_every: Steps between copies in memory, of a model over several processes;
            None finds the best number, 0 makes none.
        mtbf: Seconds between failures, for that.
    """

    steps: int
    save: Path | None
    save_every: int
    keep: int
    copy_every: int | None = None
    mtbf: float = 3600.0


class _Regroup(Exception):
    """The supervisor forms a generation: what is being done is to be left."""


class ElasticMember:
    """Takes part in a run until its last step."""

    def __init__(
        self, programs: ReplicaPrograms, training: Training, address: str, key_file: str
    ) -> None:
        """Prepares the member; connects to nothing yet.

        Args:
            programs: Programs of the replica.
            training: Extent of the training, and its folder.
            address: Address of the supervisor.
            key_file: Path of the key of the run.
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
        self._asked: Prepare | None = None
        self._suspected: set[str] = set()
        self._seconds = 0.0
        self._leaves = self._told_leaving = self._done = False
        self._has_saved = False  # Since it was told to leave.

    def _registers(self) -> dict[str, Any]:
        """Returns the fields with which it registers."""
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
        """Steps that the state has behind it; -1 without a state."""
        return self._control.step

    def run(self) -> Iterator[tuple[TrainState, dict[str, Any]]]:
        """The states and metrics of steps, from the one where this member joined.

        Raises:
            WhaleError: The run cannot go on, or this member's part in it is over.
            SystemExit: It was told to leave, or was a spare that nobody needed.
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
            self._control.phase = COMPILING
            self._programs.warm_up()
            self._control.phase = STOPPED
            self._control.post(Ready())
            while True:
                try:
                    yield from self._generations()
                    return
                except _Regroup:
                    continue
                except GeneratorExit:
                    self._control.post(MemberLeft(step=self._at))
                    self._control.phase = SAVING
                    self._saver.wait()
                    raise
                except NoSupervisorError:
                    self._save_last()
                    raise
                except Exception as error:
                    self._control.post(Failed(why=str(error)[-5000:]))
                    raise

    def _generations(self) -> Iterator[tuple[TrainState, dict[str, Any]]]:
        """The steps of the next generation; returns at the end of the run."""
        begin = self._await_begin()
        if begin is None:
            return
        self._join(begin)
        while self._at < self._training.steps:
            self._stop_at_boundary()
            metrics = self._step()
            self._save_if_due()
            assert self._state is not None
            self._control.phase = BETWEEN
            yield self._state, metrics
        self._control.phase = SAVING
        self._saver.wait(self._look)
        self._control.phase = FINISHED
        self._control.post(Finished(step=self._at))
        if self._asked is not None:  # A boundary that lies behind the last step.
            raise _Regroup
        while not self._done:
            self._listen()

    # What the supervisor says.

    def _look(self) -> None:
        """Takes what was said meanwhile; raises where it ends what is being done."""
        self._tell_leaving()
        while (said := self._control.poll()) is not None:
            self._hear(said)
        if self._peers.generation == self._generation:
            for name, why in self._peers.broken.items():
                if name not in self._suspected:
                    self._suspected.add(name)
                    suspect = Suspect(
                        generation=self._generation, name=name, why=why[:500]
                    )
                    self._control.post(suspect)

    def _look_later(self) -> None:
        """Takes what was said; a generation that is asked for comes after the step."""
        with contextlib.suppress(_Regroup):
            self._look()

    def _listen(self) -> None:
        said = self._control.wait()
        if said is not None:
            self._hear(said)

    def _tell_leaving(self) -> None:
        if self._leaves and not self._told_leaving:
            self._told_leaving = True
            self._control.post(Leaving(why="it was asked to end (SIGTERM)"))

    def _hear(self, said: ToMember) -> None:
        match said:
            case Prepare(after=after):
                self._asked = said
                if after < 0 or self._at >= self._training.steps:
                    raise _Regroup
            case Stop():
                self._stop(said)
            case RunEnded(why=why, well=well):
                if well:
                    raise SystemExit(_DRAINED_STATUS)
                raise RunStopped(f"{self._control.name}: {why}")
            case RunDone():
                self._done = True

    def _stop(self, said: Stop) -> None:
        """The run ends here."""
        if said.saves and self._state is not None and self._training.save:
            self._control.phase = SAVING
            self._saver.save(self._state, self._at)
            while not self._saver.wait():
                pass  # The supervisor ends this process where it takes too long.
        if said.well:
            raise SystemExit(_TERMINATED_STATUS)
        raise RunStopped(said.why)

    def _stop_at_boundary(self) -> None:
        self._look()
        if self._asked is not None and self._at >= self._asked.after:
            raise _Regroup

    def _await_begin(self) -> Begin | None:
        """Says what is held, and waits until a generation begins; None at the end."""
        self._control.phase = STOPPED
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
            if not isinstance(said, Begin):
                with contextlib.suppress(_Regroup):
                    self._hear(said)
            elif said.generation == self._generation:
                return said

    def _answer(self, asked: Prepare) -> None:
        self._generation = asked.generation
        prepared = Prepared(
            generation=self._generation, step=self._at, held=sorted(self._held)
        )
        self._control.post(prepared)

    # A generation.

    def _join(self, begin: Begin) -> None:
        """Connects to the others, and come to the state that they have."""
        name = self._control.name
        self._suspected.clear()
        members = begin.members
        self._names = [m[0] for m in members]
        self._first, self._later = (
            {n: shares.get(n, []) for n in self._names}
            for shares in (begin.first, begin.later)
        )
        self._control.phase = CONNECTING
        self._connect(members)
        sources = begin.sources
        if name in sources:
            self._fetch(sources[name])
        elif self._state is None:
            self._control.phase = RESTORING
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
            # The supervisor knows who is gone, or that somebody cannot be reached.
            self._pause()

    def _pause(self) -> None:
        self._control.phase = WAITING
        while True:
            self._look()
            self._listen()

    def _fetch(self, source: str) -> None:
        self._control.phase = FETCHING

        def take() -> State:
            self._control.done += 1
            return self._peers.take(source, State, -1, self._look)

        self._set(self._programs.assembled(take, source))

    def _hand_over(self, other: str) -> None:
        assert self._state is not None
        self._control.phase = HANDING_OVER
        with contextlib.suppress(WireError):  # Who is gone needs none.
            for piece in self._programs.pieces(self._state):
                self._control.done += 1
                self._peers.send(other, piece, self._look)

    def _set(self, state: TrainState) -> None:
        self._state, self._held = state, {}
        self._control.step = int(state.step)

    def _save_if_due(self) -> None:
        """The first member saves; so a checkpoint that another began is made up for.

        One that is told to leave, and alone has the state, saves it first: whoever
        told it may not wait until another has come.
        """
        assert self._state is not None
        if self._names[0] == self._control.name:
            last = self._told_leaving and len(self._names) == 1
            last = last and self._training.save is not None and not self._has_saved
            if last or self._saver.is_due(self._at, self._training.steps):
                self._has_saved = self._has_saved or last
                self._control.phase = SAVING
                # What was done is given to the user's loop before anything else.
                self._saver.save(self._state, self._at, self._look_later)

    def _save_last(self) -> None:
        """Writes the state where no supervisor comes back: the run may begin again."""
        if self._state is None or self._training.save is None:
            return
        there = [name for name in self._names if name not in self._peers.broken]
        if there and there[0] == self._control.name:
            self._control.phase = SAVING
            self._saver.save(self._state, self._at)
            self._saver.wait()

    # A step.

    def _step(self) -> dict[str, Any]:
        assert self._state is not None
        step, programs, control = self._at, self._programs, self._control
        given = self._first if step == self._began_at else self._later
        control.phase = COMPUTING
        if self._batch[0] != step:
            self._batch = step, programs.batch(step, self._state.samples)
        self._add_up(given[control.name])
        control.phase = WAITING
        sums, came = self._exchanged(step)
        control.phase = COMPUTING
        self._state, metrics = programs.finish(self._state, sums)
        self._held = {}
        loss = float(metrics["loss"])
        control.phase = BETWEEN  # Before the step: it has not begun the next one.
        control.step = step + 1
        committed = Committed(
            generation=self._generation,
            step=step + 1,
            loss=loss,
            seconds=self._seconds,
            # Of the others the supervisor knows what they were given.
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
            del self._held[node]  # Others were given it.
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
        """Leaves at a step, so that none is lost."""
        self._leaves = True

    def _close(self) -> None:
        # The connection stays until the process ends: the script goes on, perhaps for
        # long, and who is silent is taken for frozen.
        self._control.phase = FINISHED
        self._control.flush(_FLUSH_SECONDS)
        self._peers.close()


def check_shared(save: Path | None) -> None:
    """Refuses a folder of checkpoints that is not the supervisor's.

    The supervisor holds it before a member is admitted, so that its lock is seen there,
    after a while on some network file systems.

    Args:
        save: The folder; None for no checkpoints.

    Raises:
        WhaleError: The lock is not there.
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
