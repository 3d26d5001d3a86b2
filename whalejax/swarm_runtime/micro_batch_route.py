"""The route of one micro-batch through the stages and back, over present peers.

The trainer makes a small call to a peer of each stage, and tensors go from peer to
peer. If a peer is lost, others recompute only the results of it that are still needed.
If a peer reports that it cannot reach another, the trainer first pings the other.

The module is long because any point of the route may need results of a lost peer. So
its parts would share all of ``MicroBatchRoute``'s state.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from whalejax.meshes.errors import WhaleError
from whalejax.swarm.deadlines import MOST_PAUSE_SECONDS
from whalejax.swarm.ledger import Attempt, Ledger, Phase, Verdict
from whalejax.swarm.peer_choice import BACKWARD_TASK, FORWARD_TASK
from whalejax.swarm_runtime.peer_fleet import Fleet
from whalejax.swarm_runtime.registry import PeerRecord
from whalejax.swarm_runtime.staged_job import StagedJob
from whalejax.swarm_runtime.wire import tensor_codec
from whalejax.wire.service import (
    Address,
    Caller,
    RefusedRequestError,
    UnansweredError,
    UnreachableProcessError,
)
from whalejax.wire.swarm_messages import BackwardCall, Forward, MadeBy, Ping, Receipt


MOST_ATTEMPTS: Final = 100
"""Maximum number of attempts at one stage of a micro-batch; then the run ends."""

PING_SECONDS: Final = 5.0
"""Seconds in which a peer that another cannot reach must answer the trainer."""


class StageLost(Exception):
    """The step cannot go on: a stage has lost all peers with its state."""

    def __init__(self, stage: int) -> None:
        super().__init__(f"stage {stage}")
        self.stage = stage


class StopRequested(Exception):
    """The process was asked to stop."""


@dataclass(slots=True, kw_only=True)
class Counts:
    """Counts of faults in a run, and of recoveries.

    Attributes:
        failed: Number of calls without an answer.
        late: Number of calls that missed their deadline.
        refused: Number of refused calls.
        recomputed: Number of recomputed results of a stage for a micro-batch.
        late_answers: Number of answers to abandoned calls.
    """

    failed: int = 0
    late: int = 0
    refused: int = 0
    recomputed: int = 0
    late_answers: int = 0


@dataclass(kw_only=True)
class StepContext:
    """State that all micro-batches of a step share.

    Attributes:
        cut, fleet, caller: Staged job, peers and connections of the run.
        ledger: Ledger of the step.
        lock: Lock of the ledger and the counts.
        run, generation, step: Identifier of the run, and numbers of its generation and
            of the step.
        state: Number of completed steps of the state with which calls compute.
        batch: Address of the process from which peers get micro-batches.
        sum_wire: Wire format of gradients during their reduction over a stage's peers.
        call_seconds: Deadline of a call.
        await_peer: Function that waits until a stage has a usable peer; raises
            ``StageLost`` if it will have none.
        tell: Function that reports events.
        counts: Counts of the run.
        not_finite: Peers with a non-finite result since the last applied step, by step,
            phase and stage.
        overflowed: Peers with non-finite sums or states, by stage.
        failures: Number of errors that peers raised since the last applied step, by
            step, call, stage and micro-batch.
        stop: Event that ends the step immediately.
    """

    cut: StagedJob
    fleet: Fleet
    caller: Caller
    ledger: Ledger
    lock: threading.RLock
    run: str
    generation: int
    step: int
    state: int
    batch: Address
    sum_wire: str
    call_seconds: float
    await_peer: Callable[[int], None]
    tell: Callable[..., None]
    counts: Counts
    not_finite: dict[tuple[int, str, int], set[str]] = field(default_factory=dict)
    overflowed: dict[int, set[str]] = field(default_factory=dict)
    failures: dict[tuple[int, str, int, int], Counter[str]] = field(
        default_factory=dict
    )
    stop: threading.Event = field(default_factory=threading.Event)

    def at(self) -> dict[str, Any]:
        """Returns run, generation and step, as every question has them."""
        return {"run": self.run, "generation": self.generation, "step": self.step}

    def count_failure(self, error: UnansweredError) -> None:
        """Counts a call without an answer."""
        with self.lock:
            self.counts.failed += 1
            self.counts.refused += isinstance(error, RefusedRequestError)
            self.counts.late += error.late

    def lose(self, member: PeerRecord, why: str) -> None:
        """Records that a peer did not answer, so that its results are recomputed."""
        with self.lock:
            lost = self.ledger.lost_with(member.name, member.incarnation)
        if lost:
            self.tell("lost", peer=member.name, why=why, parts=len(lost))

    def lose_gone(self, stage: int) -> None:
        """Marks the results of peers that left a stage for recomputation."""
        here = {(m.name, m.incarnation) for m in self.fleet.usable(stage)}
        with self.lock:
            held = self.ledger.holders(stage)
            gone = {name: n for name, n in held.items() if (name, n) not in here}
            lost = {name: self.ledger.lost_with(name, n) for name, n in gone.items()}
        for name, parts in lost.items():
            why = "its lease ended, it failed or it moved"
            self.tell("lost", peer=name, why=why, parts=len(parts))

    def member(self, name: str) -> PeerRecord | None:
        """Returns a peer by name, or None after the end of its lease."""
        return next((m for m in self.fleet.members() if m.name == name), None)

    def unreached(
        self,
        reporter: PeerRecord,
        blamed: PeerRecord,
        why: str,
        *,
        loses: bool = True,
        late: bool = False,
    ) -> None:
        """Finds which of two peers is at fault if one cannot reach the other.

        The peer at fault is dropped. If the fault remains unclear, neither is dropped.

        Args:
            reporter: Peer that reports the fault.
            blamed: Peer that it could not reach.
            why: Reason, as a clause.
            loses: Whether the dropped peer's results are recomputed.
            late: Whether the other peer took too long, as after a pause of its process.
        """
        fleet, culprit = self.fleet, blamed
        try:
            seconds = min(PING_SECONDS, self.call_seconds)
            self.caller.ask(blamed.address, Ping(), seconds=seconds)
        except UnansweredError:
            fleet.failed(blamed, FORWARD_TASK, 0.0, ban=True)
        else:
            first = late and fleet.is_first_delay(reporter, blamed)
            result = None if first else fleet.culprit(reporter, blamed)
            more = {"peer": reporter.name, "other": blamed.name, "why": why}
            if result is None:
                self.tell("unreached", **more, dropped="neither")
                return
            culprit = result
            self.tell("unreached", **more, dropped=culprit.name)
            fleet.drop(culprit.name)
            fleet.pause(culprit)
        if loses:
            self.lose(culprit, why)

    def overflow(self, stage: int, member: PeerRecord, why: str) -> None:
        """Records a non-finite sum or state of finite gradients.

        The second such peer of a stage ends the run. So does the first if no other peer
        has the state of its stage.

        Raises:
            WhaleError: The model is at fault, not the peer.
        """
        with self.lock:
            by = self.overflowed.setdefault(stage, set())
            by.add(member.name)
            several = sorted(by)
        self.tell("refused", peer=member.name, why=why)
        if len(several) > 1 or len(self.fleet.synced(stage)) < 2:
            raise WhaleError(
                f"step {self.step}, stage {stage}: {why}, while the gradients of each "
                f"micro-batch are finite ({', '.join(several)}). The step was not "
                "applied. Lower the learning rate, clip the gradients, or look at the "
                "data of this step"
            )
        self.fleet.drop(member.name)
        self.fleet.pause(member)
        self.lose(member, why)

    def broken(
        self, what: str, stage: int, number: int, member: PeerRecord, why: str
    ) -> None:
        """Records an error of a peer; the run ends if all peers of the stage fail.

        Args:
            what: Call that failed, as a phrase.
            stage, number: Stage and micro-batch of the call; -1 without a micro-batch.
            member: Peer that failed.
            why: Reason, as a clause.

        Raises:
            WhaleError: The code of the peers is at fault, not the peer.
        """
        with self.lock:
            key = self.step, what, stage, number
            by = self.failures.setdefault(key, Counter())
            by[member.name] += 1
            names, count = {*by}, by.total()
        there = {
            m.name
            for m in self.fleet.members()
            if m.stage == stage and m.ready and not m.leaving
        }
        if count > 1 and there <= names:
            raise WhaleError(
                f"step {self.step}: {what} of stage {stage} raises an error at every "
                f"peer that serves it ({', '.join(sorted(names))}): {why}. Mend what "
                "they run, and start the run and its peers again; with the same --save "
                "it goes on from its newest checkpoint"
            )

    def refuse(self, phase: str, stage: int, number: int, name: str, why: str) -> None:
        """Records a non-finite result, and pauses the peer for long.

        Raises:
            WhaleError: Another peer also made a non-finite result, so the model is at
                fault. Or no other peer can compute it.
        """
        with self.lock:
            key = self.step, phase, stage
            by = self.not_finite.setdefault(key, set())
            by.add(name)
            several = sorted(by)
        self.tell("refused", peer=name, why=why)
        what = f"step {self.step}: {phase} of micro-batch {number} in stage {stage}"
        remedy = "Lower the learning rate, or look at the data of this step"
        if len(several) > 1:
            raise WhaleError(
                f"{what} is not finite wherever it is computed ({', '.join(several)}): "
                f"{why}. {remedy}"
            )
        if not self.fleet.substitutes(stage, by):
            raise WhaleError(
                f"{what} is not finite at {name}, which alone computes it: {why}. "
                f"{remedy}; or start another peer for stage {stage}, which tells "
                "whether it is that peer: whalejax swarm join, with --stage"
            )
        member = self.member(name)
        if member is not None:
            self.fleet.drop(name)
            self.fleet.pause(member, MOST_PAUSE_SECONDS)
            self.lose(member, why)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    """Peer with a stage's result for a micro-batch.

    Attributes:
        member: Peer with the result.
        attempt: Attempt of the call that made it.
        lost: Relative squared error that the wire format added.
    """

    member: PeerRecord
    attempt: int
    lost: float = 0.0


class MicroBatchRoute:
    """Route of one micro-batch of one step.

    Attributes:
        sums: Flat total, weight and metrics of the loss, when known.
        backward: Result with the gradient, by stage.
    """

    def __init__(self, context: StepContext, number: int) -> None:
        """Starts without results."""
        self._context, self._number = context, number
        self._forward: dict[int, StageResult] = {}
        self.backward: dict[int, StageResult] = {}
        self._attempts = 0
        self._tried: Counter[tuple[int, Phase]] = Counter()
        self._failure = "no peer could be asked"
        self._made: set[tuple[str, int]] = set()
        self._lock = threading.RLock()
        self.sums: tuple[Any, ...] = ()

    def run(self, first: int = 0) -> None:
        """Sends the micro-batch through all stages and back.

        Args:
            first: Attempt number above which this trainer's attempts begin.

        Raises:
            StageLost: A stage has no peer left.
            StopRequested: The process was asked to stop.
            WhaleError: The model or the code of the peers is at fault, or a stage was
                tried too often.
        """
        with self._lock:
            self._attempts = max(self._attempts, first)
            with self._context.lock:
                self._context.ledger.count_from(self._number, first)
            for stage in reversed(range(self._context.cut.stages)):
                self.need_backward(stage)

    def remake_gradient(self, stage: int) -> None:
        """Recomputes the gradient of a stage, if its peer was lost."""
        with self._lock:
            self.need_backward(stage)

    @property
    def wire_error(self) -> float:
        """Relative error that the wire format adds to tensors.

        It is the root mean square over all boundaries of stages, forward and backward.
        """
        borders = self._context.cut.stages - 1
        with self._lock:
            made = [*self._forward.values(), *self.backward.values()]
            return math.sqrt(sum(one.lost for one in made) / (2 * borders))

    # Results from another trainer.

    @property
    def results(self) -> MadeBy:
        """Phase, stage and peer of all results, in the form of ``take_in``."""
        with self._lock:
            held = {Phase.FORWARD: self._forward, Phase.BACKWARD: self.backward}
            return [
                (
                    str(phase),
                    stage,
                    made.member.name,
                    made.member.incarnation,
                    made.attempt,
                    made.lost,
                )
                for phase, several in held.items()
                for stage, made in sorted(several.items())
            ]

    def take_in(
        self,
        trainer: str,
        made: MadeBy,
        sums: Sequence[Any],
        attempts: range,
    ) -> None:
        """Adopts another trainer's results for this micro-batch.

        Results of peers that were lost meanwhile are recomputed before the sum.

        Args:
            trainer: Name of the trainer.
            made: Results by stage and phase, as in ``results``.
            sums: Total, weight and metrics of the loss.
            attempts: Possible attempt numbers of the other trainer.

        Raises:
            RefusedRequestError: The values are not a result of this micro-batch.
        """
        context, stages = self._context, range(self._context.cut.stages)
        wanted = [(str(Phase.BACKWARD), s) for s in stages]
        wanted += [(str(Phase.FORWARD), s) for s in stages[:-1]]
        named = sorted((one[0], one[1]) for one in made)
        if named != sorted(wanted) or any(one[4] not in attempts for one in made):
            raise RefusedRequestError(
                "answer",
                f"{trainer} sent an invalid result of micro-batch {self._number}; "
                f"expected {len(stages)} stages and attempts {attempts.start} to "
                f"{attempts.stop - 1}",
                trainer,
            )
        read = tensor_codec.decoded(list(sums), context.cut.flat_sums, "f32", trainer)
        members = {(m.name, m.incarnation): m for m in context.fleet.members()}
        with self._lock, context.lock:
            for phase, stage, name, incarnation, number, lost in made:
                member = members.get((name, incarnation))
                if member is None or member.stage != stage:
                    continue
                one = StageResult(member=member, attempt=number, lost=lost)
                if phase == Phase.FORWARD:
                    self._forward[stage] = one
                    continue
                attempt = Attempt(
                    stage=stage,
                    number=self._number,
                    phase=Phase.BACKWARD,
                    peer=name,
                    incarnation=incarnation,
                    attempt=number,
                )
                if context.ledger.take_in(attempt, trainer) is Verdict.COUNTED:
                    self.backward[stage] = one
            self._attempts = max(self._attempts, attempts.stop)
            context.ledger.count_from(self._number, attempts.stop)
            self.sums = tuple(read)

    # Existing or new results.

    def need_forward(self, stage: int) -> StageResult:
        """Returns the forward result of a stage, recomputed if it was lost."""
        while True:
            made = self._forward.get(stage)
            if made is not None and self._context.fleet.has(made.member):
                return made
            self._forward.pop(stage, None)
            result = self._ask(stage, Phase.FORWARD)
            if result is not None:
                self._forward[stage] = result

    def need_backward(self, stage: int) -> StageResult:
        """Returns the result with a stage's gradient and cotangents."""
        context = self._context
        while True:
            made = self.backward.get(stage)
            with context.lock:
                counted = context.ledger.is_done(stage, self._number, Phase.BACKWARD)
            if made is not None and counted and context.fleet.has(made.member):
                return made
            if made is not None and counted:
                context.lose(made.member, "its lease ended or it failed")
            self.backward.pop(stage, None)
            result = self._ask(stage, Phase.BACKWARD)
            if result is not None:
                self.backward[stage] = result

    def _ask(self, stage: int, phase: Phase) -> StageResult | None:
        context = self._context
        if context.stop.is_set():
            raise StopRequested
        self._attempts += 1
        self._tried[stage, phase] += 1
        if self._tried[stage, phase] > MOST_ATTEMPTS:
            raise WhaleError(
                f"step {context.step}: micro-batch {self._number} was tried "
                f"{MOST_ATTEMPTS} times and has not got through stage {stage}. The "
                f"last failure: {self._failure}. Mend or stop that peer, or start "
                f"another for stage {stage}: whalejax swarm join, with --stage"
            )
        sources = [(s, self.need_forward(s)) for s in context.cut.sources(stage)]
        sinks: list[tuple[int, StageResult]] = []
        if phase is Phase.BACKWARD:
            sinks = [(s, self.need_backward(s)) for s in context.cut.sinks(stage)]
        task = BACKWARD_TASK if phase is Phase.BACKWARD else FORWARD_TASK
        avoid = context.not_finite.get((context.step, str(phase), stage), set())
        member = context.fleet.choose(stage, task, avoid)
        if member is None:
            context.await_peer(stage)
            return None
        attempt = self._begin(stage, phase, member)
        number = self._attempts if attempt is None else attempt.attempt
        call = {
            **context.at(),
            "state": context.state,
            "stage": stage,
            "number": self._number,
            "attempt": number,
            "batch": context.batch,
            "sources": [_source_fields(s, made) for s, made in sources],
        }
        question = (
            BackwardCall(
                **call, cotangents=[_source_fields(s, made) for s, made in sinks]
            )
            if phase is Phase.BACKWARD
            else Forward(**call)
        )
        begun = context.fleet.now()
        try:
            answer: Receipt = context.caller.ask(
                member.address, question, seconds=context.call_seconds
            )
        except UnansweredError as error:
            self._failed(stage, phase, member, attempt, error, begun, task)
            return None
        context.fleet.completed(member, task, context.fleet.now() - begun)
        made = StageResult(member=member, attempt=number, lost=answer.lost)
        return self._record_answer(stage, phase, made, attempt, answer.arrays)

    def _begin(self, stage: int, phase: Phase, member: PeerRecord) -> Attempt | None:
        """Begins an attempt in the ledger; forward passes have none, so None."""
        context = self._context
        with context.lock:
            if (str(phase), stage) in self._made:
                context.counts.recomputed += 1
            if phase is Phase.FORWARD:
                return None
            return context.ledger.begin(
                stage, self._number, phase, member.name, member.incarnation
            )

    def _record_answer(
        self,
        stage: int,
        phase: Phase,
        made: StageResult,
        attempt: Attempt | None,
        arrays: tuple[Any, ...],
    ) -> StageResult | None:
        context, member = self._context, made.member
        last = stage == context.cut.stages - 1
        if phase is Phase.BACKWARD and last:
            wanted = context.cut.flat_sums
            try:
                self.sums = tuple(
                    tensor_codec.decoded(arrays, wanted, "f32", member.name)
                )
            except RefusedRequestError as error:
                self._failure = error.why
                context.fleet.failed(member, BACKWARD_TASK, 0.0, ban=True)
                if error.code == "not finite":
                    context.refuse(
                        str(phase), stage, self._number, member.name, error.why
                    )
                else:
                    context.tell("refused", peer=member.name, why=error.why)
                return None
        if attempt is not None:
            with context.lock:
                verdict = context.ledger.record_answer(attempt)
                if verdict is not Verdict.COUNTED:
                    context.counts.late_answers += 1
                    return None
        self._made.add((str(phase), stage))
        return made

    def _failed(
        self,
        stage: int,
        phase: Phase,
        member: PeerRecord,
        attempt: Attempt | None,
        error: UnansweredError,
        begun: float,
        task: float,
    ) -> None:
        """Records the peer at fault, so that the next attempt goes elsewhere."""
        context, fleet = self._context, self._context.fleet
        if context.stop.is_set():
            raise StopRequested  # No peer is at fault: the step may be over.
        seconds = fleet.now() - begun
        self._failure = f"{member.name}: {error}"
        with context.lock:
            if attempt is not None:
                context.ledger.give_up(attempt)
        context.count_failure(error)
        if isinstance(error, UnreachableProcessError):
            context.caller.forget(member.address)
            fleet.failed(member, task, seconds, ban=True)
            context.lose(member, str(error))
            return
        ban = error.code in ("failed", "answer")
        fleet.failed(member, task, seconds, ban=ban)
        other = error.blame not in ("", member.name)
        if error.code == "not finite":
            made = self._made_by(error.blame) if other else None
            at, what = (stage, phase) if made is None else made[:2]
            by = error.blame or member.name
            context.refuse(str(what), at, self._number, by, error.why)
        elif error.code == "stale":
            fleet.drop(member.name)
            context.lose(member, error.why)
        elif ban:
            context.lose(member, error.why)
            context.tell("failed", peer=member.name, why=error.why)
            if error.code == "failed":
                call = str(phase)
                context.broken(call, stage, self._number, member, error.why)
        elif error.code == "source" and not other:
            self._cut_off(member, error.why)
        if other:
            self._blamed(member, error)

    def _cut_off(self, member: PeerRecord, why: str) -> None:
        """Drops a peer that cannot reach the trainer, if its stage has other peers."""
        context = self._context
        context.tell("failed", peer=member.name, why=why)
        if len(context.fleet.usable(member.stage)) > 1:
            context.fleet.drop(member.name)
            context.fleet.pause(member)
            context.lose(member, why)

    def _blamed(self, reporter: PeerRecord, error: UnansweredError) -> None:
        """Handles a report that another peer did not send a requested value."""
        context = self._context
        result = self._made_by(error.blame)
        blamed = context.member(error.blame) if result is None else result[2].member
        if blamed is None:
            return
        if error.code in ("source", "late"):
            context.unreached(reporter, blamed, error.why, late=error.code == "late")
            return
        for held in (self._forward, self.backward):
            for stage in [s for s, m in held.items() if m.member.name == error.blame]:
                held.pop(stage)
        if error.code != "missing":
            context.fleet.failed(blamed, FORWARD_TASK, 0.0, ban=True)
        context.lose(blamed, error.why)
        if error.code == "shape":
            context.tell("refused", peer=error.blame, why=error.why)

    def _made_by(self, name: str) -> tuple[int, Phase, StageResult] | None:
        for phase, held in (
            (Phase.FORWARD, self._forward),
            (Phase.BACKWARD, self.backward),
        ):
            for stage, made in held.items():
                if made.member.name == name:
                    return stage, phase, made
        return None


def _source_fields(stage: int, made: StageResult) -> tuple[int, str, Address, int]:
    member = made.member
    return stage, member.name, member.address, made.attempt
