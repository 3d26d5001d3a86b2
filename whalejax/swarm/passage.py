"""The way of one micro-batch through the stages and back, over whoever is there.

Each stage is asked for its part by a small call; tensors go from peer to peer. Where a
peer is lost, what it made and is still needed is made again by a mate, and nothing else
is.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from whalejax.meshes.errors import WhaleError
from whalejax.swarm.cut import Cut
from whalejax.swarm.fleet import Fleet
from whalejax.swarm.ledger import Attempt, Ledger, Phase, Verdict
from whalejax.swarm.registry import Member
from whalejax.swarm.wire.service import Address, Caller, Gone, Refused
from whalejax.swarm.wiring import BACKWARD_TASK, FORWARD_TASK


MOST_ATTEMPTS: Final = 100
"""Of one part of one micro-batch; a run in which more are needed is ended."""


class Interrupted(Exception):
    """The step cannot go on: a stage has lost all that held its state."""

    def __init__(self, stage: int) -> None:
        super().__init__(f"stage {stage}")
        self.stage = stage


@dataclass(slots=True, kw_only=True)
class Counts:
    """What went wrong in a run, and what was done about it.

    Attributes:
        failed: calls without an answer.
        late: of them, those that ran into their deadline.
        refused: answers that were words.
        recomputed: parts of micro-batches that were computed again.
        late_answers: answers to calls that had been given up.
    """

    failed: int = 0
    late: int = 0
    refused: int = 0
    recomputed: int = 0
    late_answers: int = 0


@dataclass(kw_only=True)
class StepContext:
    """What all micro-batches of a step share.

    Attributes:
        cut, fleet, caller: of the run.
        ledger: of the step.
        lock: of the ledger and the counts.
        generation, step: of the run.
        batch: address of who gives micro-batches.
        call_seconds: deadline of a call.
        await_peer: waits until a stage has a peer that may be asked; raises where it
            will have none.
        tell: is told what happens.
        counts: of the run.
    """

    cut: Cut
    fleet: Fleet
    caller: Caller
    ledger: Ledger
    lock: threading.RLock
    generation: int
    step: int
    batch: Address
    call_seconds: float
    await_peer: Callable[[int], None]
    tell: Callable[..., None]
    counts: Counts
    strikes: dict[tuple[str, int, int], set[str]] = field(default_factory=dict)

    def at(self) -> dict[str, int]:
        """Generation and step, as every question names them."""
        return {"generation": self.generation, "step": self.step}

    def lose(self, name: str, why: str) -> None:
        """A peer did not answer: what it held is to be computed again.

        Args:
            name: of the peer.
            why: for whoever reads.
        """
        with self.lock:
            lost = self.ledger.lost_with(name, 1 << 60)
        if lost:
            self.tell("lost", peer=name, why=why, parts=len(lost))

    def struck(self, phase: str, stage: int, number: int, name: str, why: str) -> None:
        """A peer made something that is not finite; a second one ends the run.

        Args:
            phase, stage, number: of what it made.
            name: of the peer.
            why: in words.

        Raises:
            WhaleError: another peer made the same, so that it is the model.
        """
        with self.lock:
            by = self.strikes.setdefault((phase, stage, number), set())
            by.add(name)
            several = sorted(by)
        self.tell("refused", peer=name, why=why)
        if len(several) > 1 or len(self.fleet.synced(stage)) < 2:
            raise WhaleError(
                f"step {self.step}: {phase} of micro-batch {number} in stage {stage} "
                f"is not finite wherever it is computed ({', '.join(several)}): {why}. "
                "Lower the learning rate, or look at the data of this step"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """Who holds what was made of a micro-batch at a stage.

    Attributes:
        member: the peer.
        attempt: of which call it was the answer.
    """

    member: Member
    attempt: int


class Passage:
    """One micro-batch of one step.

    Attributes:
        sums: total, weight and metrics of the loss, flat, once they are known.
        backward: by stage, who holds its gradient.
    """

    def __init__(self, context: StepContext, number: int) -> None:
        """Nothing is made yet.

        Args:
            context: of the step.
            number: of the micro-batch.
        """
        self._context, self._number = context, number
        self._forward: dict[int, Made] = {}
        self.backward: dict[int, Made] = {}
        self._attempts = 0
        self._tried: Counter[tuple[int, Phase]] = Counter()
        self._made: set[tuple[str, int]] = set()
        self._lock = threading.RLock()
        self.sums: tuple[Any, ...] = ()

    def run(self) -> None:
        """Take the micro-batch through all stages and back.

        Raises:
            Interrupted: a stage has nobody left.
        """
        with self._lock:
            for stage in reversed(range(self._context.cut.stages)):
                self.need_backward(stage)

    def again(self, stage: int) -> None:
        """Make the gradient of a stage again, if its holder was lost."""
        with self._lock:
            self.need_backward(stage)

    # What is there, or is made.

    def need_forward(self, stage: int) -> Made:
        """What a stage hands on."""
        while True:
            made = self._forward.get(stage)
            if made is not None and self._context.fleet.has(made.member.name):
                return made
            self._forward.pop(stage, None)
            found = self._ask(stage, Phase.FORWARD)
            if found is not None:
                self._forward[stage] = found

    def need_backward(self, stage: int) -> Made:
        """The gradient of a stage, and what it hands back."""
        context = self._context
        while True:
            made = self.backward.get(stage)
            with context.lock:
                counted = context.ledger.is_done(stage, self._number, Phase.BACKWARD)
            if made is not None and counted and context.fleet.has(made.member.name):
                return made
            if made is not None and counted:
                context.lose(made.member.name, "its lease ended or it failed")
            self.backward.pop(stage, None)
            found = self._ask(stage, Phase.BACKWARD)
            if found is not None:
                self.backward[stage] = found

    def _ask(self, stage: int, phase: Phase) -> Made | None:
        """One attempt; none where it failed."""
        context = self._context
        self._attempts += 1
        self._tried[stage, phase] += 1
        if self._tried[stage, phase] > MOST_ATTEMPTS:
            raise WhaleError(
                f"step {context.step}: micro-batch {self._number} was tried "
                f"{MOST_ATTEMPTS} times and has not got through stage {stage}. Look at "
                "`whalejax swarm show` for peers that fail"
            )
        sources = [(s, self.need_forward(s)) for s in context.cut.sources(stage)]
        sinks: list[tuple[int, Made]] = []
        if phase is Phase.BACKWARD:
            sinks = [(s, self.need_backward(s)) for s in context.cut.sinks(stage)]
        task = BACKWARD_TASK if phase is Phase.BACKWARD else FORWARD_TASK
        avoid = context.strikes.get((str(phase), stage, self._number), set())
        member = context.fleet.choose(stage, task, avoid)
        if member is None:
            context.await_peer(stage)
            return None
        attempt = self._begin(stage, phase, member)
        number = self._attempts if attempt is None else attempt.attempt
        fields = {
            **context.at(),
            "stage": stage,
            "number": self._number,
            "attempt": number,
            "batch": list(context.batch),
            "sources": [_told(s, made) for s, made in sources],
        }
        if phase is Phase.BACKWARD:
            fields["cotangents"] = [_told(s, made) for s, made in sinks]
        begun = context.fleet.now()
        try:
            answer = context.caller.ask(
                member.address, str(phase), fields, seconds=context.call_seconds
            )
        except (Gone, Refused) as error:
            self._failed(stage, phase, member, attempt, error, begun, task)
            return None
        context.fleet.completed(member, task, context.fleet.now() - begun)
        return self._answered(stage, phase, member, attempt, number, answer.arrays)

    def _begin(self, stage: int, phase: Phase, member: Member) -> Attempt | None:
        """Note an attempt. What forward makes is no gradient and may be made twice."""
        context = self._context
        with context.lock:
            if (str(phase), stage) in self._made:
                context.counts.recomputed += 1
            if phase is Phase.FORWARD:
                return None
            return context.ledger.begin(
                stage, self._number, phase, member.name, member.incarnation
            )

    def _answered(
        self,
        stage: int,
        phase: Phase,
        member: Member,
        attempt: Attempt | None,
        number: int,
        arrays: tuple[Any, ...],
    ) -> Made | None:
        context = self._context
        last = stage == context.cut.stages - 1
        if phase is Phase.BACKWARD and last:
            wanted = context.cut.flat_sums
            if [(x.shape, x.dtype) for x in arrays] != [
                (tuple(a.shape), a.dtype) for a in wanted
            ]:
                context.tell("refused", peer=member.name, why="it sent no loss")
                context.fleet.failed(member, BACKWARD_TASK, 0.0, ban=True)
                return None
            self.sums = tuple(arrays)
        if attempt is not None:
            with context.lock:
                verdict = context.ledger.done(attempt)
                if verdict is not Verdict.COUNTED:
                    context.counts.late_answers += 1
                    return None
        self._made.add((str(phase), stage))
        return Made(member=member, attempt=number)

    def _failed(
        self,
        stage: int,
        phase: Phase,
        member: Member,
        attempt: Attempt | None,
        error: Gone | Refused,
        begun: float,
        task: float,
    ) -> None:
        """Take note of who is at fault, so that the next attempt goes elsewhere."""
        context, fleet = self._context, self._context.fleet
        seconds = fleet.now() - begun
        with context.lock:
            if attempt is not None:
                context.ledger.give_up(attempt)
            context.counts.failed += 1
            context.counts.late += isinstance(error, Gone) and error.late
            context.counts.refused += isinstance(error, Refused)
        if isinstance(error, Gone):
            context.caller.forget(member.address)
            fleet.failed(member, task, seconds, ban=True)
            context.lose(member.name, str(error))
            return
        fleet.failed(member, task, seconds, ban=error.code == "failed")
        if error.code == "not finite":
            by = error.blame or member.name
            at = stage if by == member.name else self._stage_of(by)
            context.struck(str(phase), at, self._number, by, error.why)
        elif error.code == "stale":
            fleet.drop(member.name)
            context.lose(member.name, error.why)
        elif error.code == "failed":
            context.lose(member.name, error.why)
            context.tell("failed", peer=member.name, why=error.why)
        if error.blame and error.blame != member.name:
            self._blamed(error)

    def _blamed(self, error: Refused) -> None:
        """Another peer did not give what it was asked for."""
        context = self._context
        for held in (self._forward, self.backward):
            for stage in [s for s, m in held.items() if m.member.name == error.blame]:
                made = held.pop(stage)
                if error.code != "missing":
                    context.fleet.failed(made.member, FORWARD_TASK, 0.0, ban=True)
        context.lose(error.blame, error.why)
        if error.code == "shape":
            context.tell("refused", peer=error.blame, why=error.why)

    def _stage_of(self, name: str) -> int:
        held: Mapping[int, Made] = {**self._forward, **self.backward}
        return next((s for s, m in held.items() if m.member.name == name), 0)


def _told(stage: int, made: Made) -> list[Any]:
    member = made.member
    return [stage, member.name, list(member.address), made.attempt]
