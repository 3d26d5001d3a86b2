"""Stores a peer's states, tensors, gradients and sums, by step."""

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
"""Function for tests, called with the name of a point of the protocol and the step."""

Part = list[np.ndarray]

TRANSFERS: Final = 2
"""Maximum number of tensors that a peer downloads at the same time."""


class StageHolder:
    """The stage of a peer, with its results until a step ends.

    Attributes:
        name: Name of the peer.
        stage: Stage of the peer; None during a change.
        run: Name of the run, from the registry.
        generation: Newest known generation of that run; -1 before the first.
        done: Number of calls that have run on the device, including failed ones.
        waiting: Number of calls that wait for the device or run on it.
        seconds: Duration of the last call on the device.
        sent_bytes: Bytes of tensors sent to peers of other stages.
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
            caller: Client for calls to other processes.
            name: Name of the peer.
            wire: Wire format of tensors, one of ``WIRES``.
            sum_wire: Wire format of gradients during their reduction, one of
                ``SUM_WIRES``.
            pull_seconds: Deadline of a tensor requested from another peer.
            hook: Function called at points of the protocol.
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
        # The first element of every key is the step.
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
        """Number of completed steps of the newest state; -1 without one."""
        with self._lock:
            return max(self._states, default=-1)

    def enter(self, run: str) -> None:
        """Enters a run; of an earlier run only the state is kept.

        Args:
            run: Name of the run, which every question of its trainer has.
        """
        with self._lock:
            if run != self.run:
                self._clear()
                self.run, self.generation = run, -1

    def serve(self, number: int) -> None:
        """Compiles the programs of a stage, and then serves it."""
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
        """Returns the stage and the state for a question.

        Raises:
            RefusedRequestError: The question is for another generation, stage or step.
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
        now = self.run, self.generation
        return (asked.run, asked.generation) == now

    def _release(self, step: int) -> None:
        """Drops the values that neither this step nor later ones read."""
        for held in self._held:
            for key in [k for k in held if k[0] < step]:
                del held[key]
        for key in [k for k in self._states if k < step]:
            del self._states[key]
            self._digests.pop(key, None)
        if self._packed is not None and self._packed[0] < step:
            self._packed = None

    # Computed, stored and pulled values.

    def _run_on_device(self, compute: Callable[[], Any]) -> Any:
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
        """Stores a result.

        Raises:
            RefusedRequestError: This peer has moved to another generation, step or
                stage.
        """
        with self._lock:
            if (
                not self._is_of_now(asked)
                or stage is not self.stage
                or state_of(asked) not in self._states
            ):
                raise RefusedRequestError(
                    "stale",
                    f"{self.name} has moved on while it computed for step "
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
            RefusedRequestError: The process gave no answer; its ``blame`` is the
                argument.
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
    """Returns run, generation and step of a question."""
    return {"run": asked.run, "generation": asked.generation, "step": asked.step}


def state_of(asked: At) -> int:
    """Returns the number of completed steps of the state that a question needs."""
    return asked.state if isinstance(asked, StageCall) else asked.step
