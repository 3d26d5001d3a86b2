"""The end of a step: the peers of each stage sum their gradients and apply them.

No peer applies gradients before the peers have all gradients of all stages. If peers
fail before the sum, others recompute their micro-batches. Peers that fail after the sum
are dropped, because the others make the same update. A peer that did not finish the
update downloads the state from another peer before the next step.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from whalejax.agreement.facts import values_hash
from whalejax.meshes.errors import WhaleError
from whalejax.planner.plan_entries import sum_bytes
from whalejax.swarm.peer_choice import FORWARD_TASK
from whalejax.swarm_runtime.micro_batch_route import (
    MOST_ATTEMPTS,
    MicroBatchRoute,
    StepContext,
    StopRequested,
)
from whalejax.swarm_runtime.registry import PeerRecord
from whalejax.wire.connection import SLOWEST_BYTES_PER_SECOND
from whalejax.wire.messages import A, Question
from whalejax.wire.service import (
    RefusedRequestError,
    UnansweredError,
    UnreachableProcessError,
    ask_all,
)
from whalejax.wire.swarm_messages import Holders, StageValues, Sum, Summed, UpdateStage


class SwarmStepCommit:
    """Sum and update at the end of one step."""

    def __init__(
        self,
        context: StepContext,
        routes: Sequence[MicroBatchRoute],
        pool: ThreadPoolExecutor,
    ) -> None:
        """Prepares the commit; calls no peer yet."""
        self._context, self._routes, self._pool = context, routes, pool
        self._holders: dict[int, Holders] = {}
        self._rounds: dict[int, int] = {}
        self._members: dict[int, list[PeerRecord]] = {}
        self._heard: list[dict[int, np.ndarray]] = []
        self._failures: dict[int, str] = {}
        self._applied: set[str] = set()
        self._errors: dict[int, tuple[float, float]] = {}
        self.digests: dict[int, str] = {}

    def run(self, sums: Sequence[np.ndarray]) -> dict[int, str]:
        """Sums and applies the gradients; returns the digest of each stage's new state.

        Args:
            sums: Total, weight and metrics of all micro-batches.

        Raises:
            StageLost: A stage has no peer left.
            StopRequested: The process was asked to stop.
            WhaleError: The peers of a stage failed in all rounds.
        """
        context = self._context
        stages = range(context.cut.stages)
        self._each(self._sum, stages)
        self._complete()
        for level in range(context.cut.update.rounds):
            one = functools.partial(self._level, level=level, sums=sums)
            told = self._each(one, stages)
            self._heard.append({n: x for one in told for n, x in one.items()})
        with context.lock:
            # The sum includes peers lost after it.
            context.ledger.commit(self.digests)
        return self.digests

    @property
    def sum_error(self) -> float | None:
        """Relative error that the wire format adds to the summed gradients.

        It is the square root of the total squared error divided by the total squared
        gradients. It is None if gradients are not encoded.
        """
        if self._context.sum_wire == "f32":
            return None
        lost, whole = map(sum, zip(*self._errors.values(), strict=True))
        return math.sqrt(lost / whole) if whole else 0.0

    @property
    def applied(self) -> set[str]:
        """Names of the peers with the new state."""
        return self._applied

    def _each(self, do: Callable[[int], Any], stages: Sequence[int]) -> list[Any]:
        waiting = [self._pool.submit(do, stage) for stage in stages]
        each, errors = [], []
        for one in waiting:
            try:
                each.append(one.result())
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return each

    def _complete(self) -> None:
        """Recomputes lost gradients, and seals the complete ledger."""
        context = self._context
        lacking = [0]
        for _ in range(MOST_ATTEMPTS):
            with context.lock:
                stages = range(context.cut.stages)
                lacking = [s for s in stages if not context.ledger.is_complete(s)]
                if not lacking:
                    context.ledger.seal()
                    return
            self._each(self._sum, lacking)
        raise self._run_end_error(lacking[0], "sum")

    def _run_end_error(self, stage: int, what: str) -> WhaleError:
        return WhaleError(
            f"step {self._context.step}: the peers of stage {stage} did not {what} "
            f"their gradients in {MOST_ATTEMPTS} rounds. The last failure: "
            f"{self._failures.get(stage, 'a peer was lost in each of them')}. Mend or "
            f"stop that peer, or start another for stage {stage}: whalejax swarm join, "
            "with --stage"
        )

    # The sum.

    def _sum(self, stage: int) -> None:
        """Asks a stage's peers for the sum, until all answer in the same round."""
        context = self._context
        for _ in range(MOST_ATTEMPTS):
            for route in self._routes:
                route.remake_gradient(stage)
            members = context.fleet.usable(stage)
            holders = self._assigned(stage, members)
            if holders is None:
                continue
            self._rounds[stage] = self._rounds.get(stage, 0) + 1
            question = Sum(
                **context.at(), stage=stage, round=self._rounds[stage], peers=holders
            )
            seconds = context.call_seconds + self._sum_seconds(stage, len(members))
            answers = self._ask(stage, members, question, seconds)
            if members and len(answers) == len(members):
                self._holders[stage], self._members[stage] = holders, members
                self._note(stage, answers)
                return
        raise self._run_end_error(stage, "sum")

    def _sum_seconds(self, stage: int, peers: int) -> float:
        cut = self._context.cut
        wire = self._context.sum_wire
        sent = sum_bytes(cut.gradient_bytes(stage), peers, wire)
        return sent / SLOWEST_BYTES_PER_SECOND

    def _note(self, stage: int, answers: Mapping[str, Summed]) -> None:
        added = {
            name: (answer.numbers, answer.attempts) for name, answer in answers.items()
        }
        self._errors[stage] = (
            sum(answer.lost for answer in answers.values()),
            sum(answer.whole for answer in answers.values()),
        )
        with self._context.lock:
            self._context.ledger.summed(stage, added)

    def _assigned(self, stage: int, members: Sequence[PeerRecord]) -> Holders | None:
        """Returns the micro-batches of each peer; None if a peer was lost meanwhile."""
        context = self._context
        with context.lock:
            if not context.ledger.is_complete(stage):
                return None
            held = context.ledger.gradient_attempts(stage)
        by_peer: dict[tuple[str, int], tuple[list[int], list[int]]] = {
            (m.name, m.incarnation): ([], []) for m in members
        }
        for attempt in held:
            if (attempt.peer, attempt.incarnation) not in by_peer:
                return None
            numbers, attempts = by_peer[attempt.peer, attempt.incarnation]
            numbers.append(attempt.number)
            attempts.append(attempt.attempt)
        return [(m.name, m.address, *by_peer[m.name, m.incarnation]) for m in members]

    def _ask(
        self,
        stage: int,
        members: Sequence[PeerRecord],
        question: Question[A],
        seconds: float,
    ) -> dict[str, A]:
        context = self._context
        if context.stop.is_set():
            raise StopRequested

        addresses = [member.address for member in members]
        answers = ask_all(context.caller, addresses, question, seconds)
        result: dict[str, A] = {}
        for member, answer in zip(members, answers, strict=True):
            if isinstance(answer, UnansweredError):
                self._failed(stage, member, question.kind, answer)
            else:
                result[member.name] = answer
        return result

    def _failed(
        self,
        stage: int,
        member: PeerRecord,
        kind: str,
        error: UnansweredError,
    ) -> None:
        context = self._context
        context.count_failure(error)
        self._failures[stage] = f"{member.name}: {error}"
        is_gone = isinstance(error, UnreachableProcessError)
        if is_gone or error.code in ("stale", "failed", "answer"):
            if is_gone:
                context.caller.forget(member.address)
            context.fleet.failed(member, FORWARD_TASK, context.call_seconds, ban=True)
            if kind == "sum":
                context.lose(member, str(error))
            if not is_gone:
                context.fleet.drop(member.name)
                context.tell("failed", peer=member.name, why=str(error))
                if error.code == "failed":
                    context.broken(kind, stage, -1, member, error.why)
            return
        if error.code == "overflow":
            context.overflow(stage, member, error.why)
            return
        others = {m.name: m for m in context.fleet.synced(stage)}
        culprit = others.get(error.blame)
        if culprit is None:
            return
        if error.code in ("source", "late") and culprit.name != member.name:
            context.unreached(
                member,
                culprit,
                error.why,
                loses=kind == "sum",
                late=error.code == "late",
            )
            return
        if error.code in ("not finite", "shape"):
            context.tell("refused", peer=error.blame, why=error.why)
        context.fleet.failed(culprit, FORWARD_TASK, 0.0, ban=True)
        if kind == "sum":
            context.lose(culprit, error.why)

    # The update.

    def _level(
        self, stage: int, level: int, sums: Sequence[np.ndarray]
    ) -> dict[int, np.ndarray]:
        """Runs a round of the update; returns the values that the stage broadcasts."""
        for _ in range(MOST_ATTEMPTS):
            answers: dict[str, StageValues] = {}
            for before in range(level + 1):
                answers = self._updated(stage, before, sums)
                if not answers:
                    break
            if answers:
                return self._majority_values(stage, level, answers)
            # No peer can update: recompute the gradients of lost peers, and sum again.
            for member in self._members[stage]:
                if not self._context.fleet.has(member):
                    self._context.lose(member, "it was lost before the update")
            self._sum(stage)
        raise self._run_end_error(stage, "apply")

    def _updated(
        self, stage: int, level: int, sums: Sequence[np.ndarray]
    ) -> dict[str, StageValues]:
        heard: dict[int, np.ndarray] = {}
        for earlier in self._heard[:level]:
            heard.update(earlier)
        question = UpdateStage(
            **self._context.at(),
            stage=stage,
            round=self._rounds[stage],
            level=level,
            heard=[*heard],
            peers=self._holders[stage],
            arrays=tuple(sums) if level == 0 else tuple(heard.values()),
        )
        context = self._context
        members = [m for m in self._members[stage] if context.fleet.has(m)]
        seconds = context.call_seconds + self._sum_seconds(stage, len(members))
        result = self._ask(stage, members, question, seconds)
        last = level == context.cut.update.rounds - 1
        for member in members:
            answer = result.get(member.name)
            if (
                answer is not None
                and not last
                and not self._is_whole(stage, level, answer)
            ):
                del result[member.name]
                why = f"{member.name} sent other values than the update of stage "
                why += f"{stage} has"
                self._failed(
                    stage, member, "update", RefusedRequestError("answer", why)
                )
        return result

    def _is_whole(self, stage: int, level: int, answer: StageValues) -> bool:
        cut = self._context.cut
        wanted = [cut.update.steps.avals[n] for n in cut.broadcast_values(level, stage)]
        sent = [(x.shape, x.dtype) for x in answer.arrays]
        named = answer.numbers == [*cut.broadcast_values(level, stage)]
        return named and sent == [(tuple(a.shape), a.dtype) for a in wanted]

    def _majority_values(
        self, stage: int, level: int, answers: Mapping[str, StageValues]
    ) -> dict[int, np.ndarray]:
        """Returns the values that most peers of a stage broadcast in a round.

        Peers with other values are out of sync, and are dropped. After the last round,
        peers without an answer are dropped too.
        """
        context = self._context
        is_last = level == context.cut.update.rounds - 1
        late = [m for m in self._members[stage] if is_last and m.name not in answers]
        digests = {
            name: a.digest if is_last else values_hash(a.arrays)
            for name, a in answers.items()
        }
        ((good, _),) = Counter(digests.values()).most_common(1)
        known = next(name for name, said in digests.items() if said == good)
        for member in self._members[stage]:
            said = digests.get(member.name)
            if said is not None and said != good:
                context.tell(
                    "differs",
                    peer=member.name,
                    why=f"stage {stage}, step {context.step + 1}: {said[:12]}, and "
                    f"{good[:12]} at {known}",
                )
                late.append(member)
        for member in late:
            context.fleet.drop(member.name)
        if is_last:
            self.digests[stage] = good
            self._applied |= {name for name, said in digests.items() if said == good}
            return {}
        values = answers[known]
        return dict(zip(values.numbers, values.arrays, strict=True))
