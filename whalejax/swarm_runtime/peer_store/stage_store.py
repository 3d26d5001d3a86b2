"""Holds a peer's states, tensors, gradients and sums, by step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from whalejax.swarm_runtime.peer_programs import (
    StagePrograms,
    StageState,
    StageUpdate,
    ready_stage,
)
from whalejax.swarm_runtime.staged_job import StagedJob
from whalejax.wire.messages import A, Question
from whalejax.wire.service import (
    Address,
    Caller,
    RefusedRequestError,
    UnreachableProcessError,
)
from whalejax.wire.swarm_messages import At, StageCall, StageValues


Hook = Callable[[str, int], None]
"""Is told a point of the protocol and the step as it is reached."""

Part = list[np.ndarray]

TRANSFERS: Final = 2
"""Tensors that a peer takes from others at once."""


class StageHolder:
    """The stage that a peer serves, and what it keeps until a step is over.

    Attributes:
        name: Name of the peer.
        stage: Stage that it serves; None while it changes.
        run: Run that the registry named.
        generation: Newest known generation of that run; -1 before the first.
        done: Micro-batches computed, forward or backward.
        waiting: Calls that wait for the device, with the one that has it.
        seconds: Duration of the last call on the device.
        sent_bytes: Bytes of tensors that were sent to peers of other stages.
    """

    def __init__(
        self,
        cut: StagedJob,
        caller: Caller,
        name: str,
        *,
        wire: str,
        sum_wire: str = "f32",
        pull_seconds: float,
        hook: Hook = lambda point, step: None,
    ) -> None:
        """Starts without a stage.

        Args:
            cut: Staged job.
            caller: Asks other processes.
            name: Name of the peer.
            wire: One of ``WIRES``.
            sum_wire: One of ``SUM_WIRES``.
            pull_seconds: Deadline of a tensor that another peer is asked for.
            hook: Called at points of the protocol.
        """
        self.cut, self.name = cut, name
        self.wire, self.sum_wire = wire, sum_wire
        self._caller, self._pull_seconds, self._hook = caller, pull_seconds, hook
        self.stage: StagePrograms | None = None
        self.run, self.generation = "", -1
        self._syncs = 0
        self.done, self.waiting, self.seconds, self.sent_bytes = 0, 0, 0.0, 0
        self._lock = threading.RLock()
        self._device = threading.Lock()
        self._turns = threading.BoundedSemaphore(TRANSFERS)
        self._states: dict[int, StageState] = {}
        self._digests: dict[int, str] = {}
        self._tensors: dict[tuple[int, str, int, int], Part] = {}
        self._inputs: dict[tuple[int, int, tuple[int, ...]], Part] = {}
        self._gradients: dict[tuple[int, int, int], Part] = {}
        self._parts: dict[tuple[int, int], Part] = {}
        self._updates: dict[tuple[int, int], StageUpdate] = {}
        self._answers: dict[tuple[int, int, int], StageValues] = {}
        self._packed: tuple[int, np.ndarray] | None = None
        # All by the step first.
        self._held: tuple[dict[Any, Any], ...] = (
            self._tensors,
            self._inputs,
            self._gradients,
            self._parts,
            self._updates,
            self._answers,
        )

    @property
    def step(self) -> int:
        """Steps done, as the newest state says; -1 where there is none."""
        with self._lock:
            return max(self._states, default=-1)

    def enter(self, run: str) -> None:
        """Work for a run from now on; of another one only the state is kept.

        Args:
            run: Its name, which every question of its trainer has.
        """
        with self._lock:
            if run != self.run:
                self._clear()
                self.run, self.generation = run, -1

    def serve(self, number: int) -> None:
        """Serves a stage from now on; its programs are compiled here."""
        with self._lock:
            self.stage = None
            self._clear()
            self._states, self._digests, self._packed = {}, {}, None
        stage = ready_stage(self.cut, number)
        with self._lock:
            self.stage = stage

    def _clear(self) -> None:
        for held in self._held:
            held.clear()

    # Which step.

    def _at(
        self, asked: At, number: int | None = None
    ) -> tuple[StagePrograms, StageState]:
        """The stage, and the state that a question is about.

        Raises:
            Refused: The question is of another generation, stage or step.
        """
        before = state_of(asked)
        with self._lock:
            stage, state = self.stage, self._states.get(before)
            if not self._is_of_now(asked) or stage is None or state is None:
                raise RefusedRequestError(
                    "stale",
                    f"{self.name} is at step {self.step} of generation "
                    f"{self.generation} of run {self.run!r}, and was asked for step "
                    f"{before} of generation {asked.generation} of run "
                    f"{asked.run!r}",
                )
            if number is not None and number != stage.number:
                raise RefusedRequestError(
                    "stale",
                    f"{self.name} serves stage {stage.number}, and was asked for stage "
                    f"{number}",
                )
            self._release(before)
            return stage, state

    def _is_of_now(self, asked: At) -> bool:
        """Whether a question is of the run and the generation that this peer is in."""
        now = self.run, self.generation
        return (asked.run, asked.generation) == now

    def _release(self, step: int) -> None:
        """Lets go of what no step from this one on reads."""
        for held in self._held:
            for key in [k for k in held if k[0] < step]:
                del held[key]
        for key in [k for k in self._states if k < step]:
            del self._states[key]
            self._digests.pop(key, None)
        if self._packed is not None and self._packed[0] < step:
            self._packed = None

    # What is computed, kept and pulled.

    def _run_on_device(self, compute: Callable[[], Any]) -> Any:
        """Runs a computation on the device, one after the other."""
        with self._lock:
            self.waiting += 1
        try:
            with self._device:
                begun = time.monotonic()
                result = compute()
                self.seconds = time.monotonic() - begun
        finally:
            with self._lock:
                self.waiting -= 1
                self.done += 1
        return result

    def _keep(self, asked: At, stage: StagePrograms, keep: Callable[[], None]) -> None:
        """Keeps a result.

        Raises:
            Refused: This peer has gone on to another generation, step or stage.
        """
        with self._lock:
            if (
                not self._is_of_now(asked)
                or stage is not self.stage
                or state_of(asked) not in self._states
            ):
                raise RefusedRequestError(
                    "stale",
                    f"{self.name} has gone on while it computed for step "
                    f"{asked.step} of generation "
                    f"{asked.generation}, stage {stage.number}",
                )
            keep()

    def _pull(
        self,
        address: Address,
        question: Question[A],
        name: str,
        blame: str,
    ) -> A:
        """Returns another process's answer.

        Raises:
            Refused: It gave none; ``blame`` is who is at fault.
        """
        seconds = self._pull_seconds
        try:
            return self._caller.ask(address, question, seconds=seconds)
        except UnreachableProcessError as error:
            why = f"{name} did not give {question.kind} to {self.name}: {error}"
            raise RefusedRequestError(
                "late" if error.late else "source", why, blame
            ) from None
        except RefusedRequestError as error:
            why = f"{name} did not give {question.kind} to {self.name}: {error.why}"
            codes = {"answer": "shape", "overflow": "overflow"}
            code = codes.get(error.code, "missing")
            raise RefusedRequestError(code, why, error.blame or blame) from None


def at(asked: At) -> dict[str, Any]:
    """Run, generation and step of a question."""
    return {"run": asked.run, "generation": asked.generation, "step": asked.step}


def state_of(asked: At) -> int:
    """Steps done in the state that a question is about; calls name it."""
    return asked.state if isinstance(asked, StageCall) else asked.step
