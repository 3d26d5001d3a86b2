"""The end of a step: each stage's peers sum what the ledger says, and apply it.

Nothing is applied before all gradients of all stages are held. Peers that are lost
before the sum have their micro-batches computed again by mates; those lost after it are
dropped, because applying is the same for all. A peer that could not finish takes the
state of a mate before the next step.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from whalejax.meshes.errors import WhaleError
from whalejax.swarm.ledger import Phase
from whalejax.swarm.passage import MOST_ATTEMPTS, Passage, StepContext
from whalejax.swarm.registry import Member
from whalejax.swarm.wire.service import Gone, Refused
from whalejax.swarm.wiring import FORWARD_TASK


Holders = list[list[Any]]
Answers = dict[str, Any]


class Commit:
    """The end of one step."""

    def __init__(
        self,
        context: StepContext,
        passages: Sequence[Passage],
        pool: ThreadPoolExecutor,
    ) -> None:
        """Ask nobody yet.

        Args:
            context: of the step.
            passages: of its micro-batches, all through.
            pool: threads to ask from.
        """
        self._context, self._passages, self._pool = context, passages, pool
        self._holders: dict[int, Holders] = {}
        self._rounds: dict[int, int] = {}
        self._members: dict[int, list[Member]] = {}
        self._heard: list[dict[int, np.ndarray]] = []
        self.digests: dict[int, str] = {}
        self.behind: list[Member] = []

    def run(self, sums: Sequence[np.ndarray]) -> dict[int, str]:
        """Sum and apply; the digest of each stage's new state.

        Args:
            sums: total, weight and metrics of all micro-batches.

        Raises:
            Interrupted: a stage has nobody left.
        """
        context = self._context
        stages = range(context.cut.stages)
        self._each(self._sum, stages)
        with context.lock:
            if not all(map(context.ledger.is_complete, stages)):
                self._complete(stages)
            context.ledger.seal()
        for level in range(context.cut.update.rounds):
            one = functools.partial(self._level, level=level, sums=sums)
            told = self._each(one, stages)
            self._heard.append({n: x for one in told for n, x in one.items()})
        with context.lock:
            if not context.ledger.is_sealed:
                # Lost after they had applied the sum: what they held is in it.
                self._seal_as_summed()
            context.ledger.commit(self.digests)
        return self.digests

    def _each(self, do: Callable[[int], Any], stages: Sequence[int]) -> list[Any]:
        """Do something for all stages at once; the first error is raised."""
        waiting = [self._pool.submit(do, stage) for stage in stages]
        found, errors = [], []
        for one in waiting:
            try:
                found.append(one.result())
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return found

    def _complete(self, stages: Sequence[int]) -> None:
        """Compute again what was lost since the stages were summed."""
        for stage in stages:
            if not self._context.ledger.is_complete(stage):
                self._sum(stage)

    def _seal_as_summed(self) -> None:
        context = self._context
        for stage, holders in self._holders.items():
            for name, _, numbers, _ in holders:
                for number in numbers:
                    if context.ledger.is_done(stage, number, Phase.BACKWARD):
                        continue
                    attempt = context.ledger.begin(
                        stage, number, Phase.BACKWARD, name, 1 << 61
                    )
                    context.ledger.done(attempt)
        context.ledger.seal()

    # The sum.

    def _sum(self, stage: int) -> None:
        """Have a stage's peers sum; until all that are there have done so."""
        context = self._context
        for _ in range(MOST_ATTEMPTS):
            for passage in self._passages:
                passage.again(stage)
            members = context.fleet.usable(stage)
            holders = self._assigned(stage, members)
            if holders is None:
                continue
            self._rounds[stage] = self._rounds.get(stage, 0) + 1
            fields = {
                **context.at(),
                "stage": stage,
                "round": self._rounds[stage],
                "peers": holders,
            }
            answers = self._ask(stage, members, "sum", fields, ())
            if len(answers) == len(members):
                self._holders[stage], self._members[stage] = holders, members
                return
        raise WhaleError(
            f"step {context.step}: the peers of stage {stage} did not sum their "
            f"gradients in {MOST_ATTEMPTS} rounds"
        )

    def _assigned(self, stage: int, members: Sequence[Member]) -> Holders | None:
        """Who holds which micro-batches; none where somebody was lost meanwhile."""
        context = self._context
        with context.lock:
            if not context.ledger.is_complete(stage):
                return None
            assignment = context.ledger.assignment(stage)
        names = {m.name for m in members}
        if not names.issuperset(assignment):
            return None
        return [
            [
                m.name,
                list(m.address),
                list(assignment.get(m.name, ())),
                [
                    self._passages[n].backward[stage].attempt
                    for n in assignment.get(m.name, ())
                ],
            ]
            for m in members
        ]

    def _ask(
        self,
        stage: int,
        members: Sequence[Member],
        kind: str,
        fields: Mapping[str, Any],
        arrays: Sequence[np.ndarray],
    ) -> Answers:
        """The answers of those that answered; others are taken note of."""
        context = self._context

        def one(member: Member) -> Any:
            try:
                return context.caller.ask(
                    member.address, kind, fields, *arrays, seconds=context.call_seconds
                )
            except (Gone, Refused) as error:
                return error

        with ThreadPoolExecutor(max(1, len(members))) as pool:
            answers = [*pool.map(one, members)]
        found: Answers = {}
        for member, answer in zip(members, answers, strict=True):
            if isinstance(answer, Gone | Refused):
                self._failed(stage, member, kind, answer)
            else:
                found[member.name] = answer
        return found

    def _failed(
        self, stage: int, member: Member, kind: str, error: Gone | Refused
    ) -> None:
        context = self._context
        with context.lock:
            context.counts.failed += 1
            context.counts.late += isinstance(error, Gone) and error.late
            context.counts.refused += isinstance(error, Refused)
        if isinstance(error, Gone) or error.code in ("stale", "failed"):
            if isinstance(error, Gone):
                context.caller.forget(member.address)
            context.fleet.failed(member, FORWARD_TASK, context.call_seconds, ban=True)
            if kind == "sum":
                context.lose(member.name, str(error))
            if not isinstance(error, Gone):
                context.fleet.drop(member.name)
                context.tell("failed", peer=member.name, why=str(error))
            return
        others = {m.name: m for m in context.fleet.synced(stage)}
        culprit = others.get(error.blame)
        if culprit is not None:
            if error.code in ("not finite", "shape"):
                context.tell("refused", peer=error.blame, why=error.why)
            context.fleet.failed(culprit, FORWARD_TASK, 0.0, ban=True)
            if kind == "sum":
                context.lose(error.blame, error.why)

    # The update.

    def _level(
        self, stage: int, level: int, sums: Sequence[np.ndarray]
    ) -> dict[int, np.ndarray]:
        """A round of the update; what the stage tells all others."""
        for _ in range(MOST_ATTEMPTS):
            answers: Answers = {}
            for before in range(level + 1):
                answers = self._updated(stage, before, sums)
                if not answers:
                    break
            if answers:
                return self._taken(stage, level, answers)
            # Nobody has it all: what the lost held is summed anew.
            for member in self._members[stage]:
                if not self._context.fleet.has(member.name):
                    self._context.lose(member.name, "it was lost before the update")
            self._sum(stage)
        raise WhaleError(
            f"step {self._context.step}: the peers of stage {stage} did not apply "
            f"their gradients in {MOST_ATTEMPTS} rounds"
        )

    def _updated(self, stage: int, level: int, sums: Sequence[np.ndarray]) -> Answers:
        heard: dict[int, np.ndarray] = {}
        for earlier in self._heard[:level]:
            heard.update(earlier)
        fields = {
            **self._context.at(),
            "stage": stage,
            "round": self._rounds[stage],
            "level": level,
            "heard": [*heard],
            "peers": self._holders[stage],
        }
        arrays = tuple(sums) if level == 0 else tuple(heard.values())
        members = [m for m in self._members[stage] if self._context.fleet.has(m.name)]
        return self._ask(stage, members, "update", fields, arrays)

    def _taken(self, stage: int, level: int, answers: Answers) -> dict[int, np.ndarray]:
        """What the answers say; who says something else than most of them is behind."""
        context = self._context
        late = [m for m in self._members[stage] if m.name not in answers]
        if level < context.cut.update.rounds - 1:
            first = next(iter(answers.values()))
            return dict(zip(first.fields["numbers"], first.arrays, strict=True))
        digests = {name: str(a.fields["digest"]) for name, a in answers.items()}
        ((good, _),) = Counter(digests.values()).most_common(1)
        known = next(name for name, said in digests.items() if said == good)
        self.digests[stage] = good
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
        return {}
