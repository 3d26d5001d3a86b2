"""Ledger of one step's calls: each micro-batch counts once, even after failures.

For each stage and micro-batch, the ledger knows the attempt that counts. A repeated
call has a higher attempt number, so a late answer of the abandoned call never counts.
A step is committed with an assignment of micro-batches to peers that has each
micro-batch of a stage exactly once. Each change is recorded, so that
``count_lost_and_doubled`` can check this later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from whalejax.meshes.errors import WhaleError
from whalejax.meshes.units import count_text


Write = Callable[[str, Mapping[str, object]], None]
MOST_NAMED: Final = 8  # maximum number of micro-batches that an error lists


class Phase(StrEnum):
    """Kinds of calls of a stage."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Verdict(StrEnum):
    """Results of recording an answer.

    - ``COUNTED``: The answer counts.
    - ``LATE``: The attempt was abandoned, or its peer was lost.
    - ``DUPLICATE``: The attempt was already counted.
    """

    COUNTED = "counted"
    LATE = "late"
    DUPLICATE = "duplicate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """An attempt at a call, with a number among those of the same call."""

    stage: int
    number: int
    phase: Phase
    peer: str
    incarnation: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Task:
    """Call that must be made or repeated."""

    stage: int
    number: int
    phase: Phase


@dataclass(slots=True, kw_only=True)
class _Cell:
    newest: int = 0
    current: Attempt | None = None
    is_done: bool = False


@dataclass(slots=True, kw_only=True)
class _Commit:
    """Round of the sealed assignment, digests of a committed step, summed stages."""

    is_sealed: bool = False
    round: int = 0
    summed: set[int] = field(default_factory=set)
    digests: dict[int, str] = field(default_factory=dict)


class Ledger:
    """Record of one step's calls, sums and commit.

    Example:
        >>> ledger = Ledger(step=0, stages=1, micro_batches=2)
        >>> for number, peer in enumerate(("a", "b")):
        ...     call = ledger.begin(0, number, Phase.BACKWARD, peer, incarnation=1)
        ...     print(ledger.record_answer(call))
        counted
        counted
        >>> ledger.assignment(0)
        {'a': (0,), 'b': (1,)}
        >>> ledger.lost_with("b", 1)
        (Task(stage=0, number=1, phase=<Phase.BACKWARD: 'backward'>),)
    """

    def __init__(
        self, *, step: int, stages: int, micro_batches: int, write: Write | None = None
    ) -> None:
        """Opens the ledger of a step.

        Args:
            step: Number of the step.
            stages: Number of stages of the model.
            micro_batches: Micro-batches of the step, over all trainers.
            write: Function that receives the name and fields of each record before the
                record takes effect, such as ``write`` of a journal.
        """
        if step < 0 or stages < 1 or micro_batches < 1:
            raise WhaleError(
                f"ledger: step {step}, {count_text(stages, 'stage')}, "
                f"{count_text(micro_batches, 'micro-batch')}; "
                "a step is at least 0, and there is at least 1 stage and micro-batch"
            )
        self.step, self.stages, self.micro_batches = step, stages, micro_batches
        self._write = write
        self._cells: dict[tuple[int, int, Phase], _Cell] = {
            (stage, number, phase): _Cell()
            for stage in range(stages)
            for number in range(micro_batches)
            for phase in Phase
        }
        self._held = [0] * stages
        self._commit = _Commit()
        self._record("step", {"stages": stages, "micro_batches": micro_batches})

    def begin(
        self, stage: int, number: int, phase: Phase, peer: str, incarnation: int
    ) -> Attempt:
        """Begins an attempt at a call, and abandons earlier attempts at it.

        Args:
            stage: Stage of the call.
            number: Number of the micro-batch.
            phase: Forward or backward.
            peer: Name of the called peer.
            incarnation: Incarnation of that peer.

        Raises:
            WhaleError: The call is already done, is not in this step, or the step's
                assignment is sealed.
        """
        cell = self._cell(stage, number, phase)
        if cell.is_done or self._commit.is_sealed:
            why = "is done" if cell.is_done else "belongs to a sealed assignment"
            raise WhaleError(
                f"ledger, step {self.step}: {phase} of micro-batch {number} in stage "
                f"{stage} {why} and cannot be given to {peer}; ask lost_with what must "
                "be computed again"
            )
        attempt = Attempt(
            stage=stage,
            number=number,
            phase=phase,
            peer=peer,
            incarnation=incarnation,
            attempt=cell.newest + 1,
        )
        self._record("begun", _fields(attempt))
        cell.newest, cell.current = attempt.attempt, attempt
        return attempt

    def count_from(self, number: int, first: int) -> None:
        """Makes later attempts at a micro-batch get numbers above ``first``.

        Args:
            number: Number of the micro-batch.
            first: Largest number of another trainer's attempts at it.
        """
        for (_, other, _), cell in self._cells.items():
            if other == number:
                cell.newest = max(cell.newest, first)

    def take_in(self, attempt: Attempt, trainer: str) -> Verdict:
        """Counts a finished call of another trainer.

        Args:
            attempt: Attempt of the call.
            trainer: Name of the trainer that made it.
        """
        cell = self._cell(attempt.stage, attempt.number, attempt.phase)
        if cell.is_done:
            return Verdict.DUPLICATE
        if attempt.attempt <= cell.newest:
            return Verdict.LATE
        self._record("taken in", {**_fields(attempt), "trainer": trainer})
        cell.newest, cell.current = attempt.attempt, attempt
        return self._is_done_now(cell, attempt)

    def _is_done_now(self, cell: _Cell, attempt: Attempt) -> Verdict:
        cell.is_done = True
        if attempt.phase is Phase.BACKWARD:
            self._held[attempt.stage] += 1
        return Verdict.COUNTED

    def record_answer(self, attempt: Attempt) -> Verdict:
        """Records an answer; returns whether it counts.

        Args:
            attempt: Attempt that ``begin`` returned for the call.
        """
        cell = self._cell(attempt.stage, attempt.number, attempt.phase)
        if cell.current != attempt:
            return Verdict.LATE
        if cell.is_done:
            return Verdict.DUPLICATE
        self._record("done", _fields(attempt))
        return self._is_done_now(cell, attempt)

    def give_up(self, attempt: Attempt) -> None:
        """Records that a call failed or timed out, so that its answer never counts."""
        cell = self._cell(attempt.stage, attempt.number, attempt.phase)
        if cell.current == attempt and not cell.is_done:
            self._record("given up", _fields(attempt))
            cell.current = None

    def lost_with(self, peer: str, incarnation: int) -> tuple[Task, ...]:
        """Records the loss of a peer; returns its pending calls and lost gradients.

        A finished forward call stays done, because the trainer has its result. The
        ledger is unsealed if its assignment has the peer.

        Args:
            peer: Name of the peer.
            incarnation: Lost incarnation; earlier incarnations are lost too.
        """
        if self._commit.digests:
            return ()
        self._record("lost peer", {"peer": peer, "incarnation": incarnation})
        return self._lose(peer, incarnation)

    def is_complete(self, stage: int) -> bool:
        """Whether peers have all gradients of a stage."""
        return self._held[stage] == self.micro_batches

    def is_done(self, stage: int, number: int, phase: Phase) -> bool:
        """Whether a call has been counted."""
        return self._cell(stage, number, phase).is_done

    def assignment(self, stage: int) -> dict[str, tuple[int, ...]]:
        """Returns the micro-batches that each peer of a stage sums.

        Args:
            stage: Number of the stage.

        Returns:
            Micro-batches of each peer in ascending order, by name of the peer.

        Raises:
            WhaleError: Gradients are missing.
        """
        held: dict[str, list[int]] = {}
        for attempt in self.gradient_attempts(stage):
            held.setdefault(attempt.peer, []).append(attempt.number)
        assignment = {peer: tuple(numbers) for peer, numbers in sorted(held.items())}
        check_partition(
            assignment, self.micro_batches, f"step {self.step}, stage {stage}"
        )
        return assignment

    def gradient_attempts(self, stage: int) -> list[Attempt]:
        """Returns the attempts with a stage's gradients, one for each micro-batch.

        Args:
            stage: Number of the stage.

        Raises:
            WhaleError: Gradients are missing.
        """
        gradient_attempts, missing = [], []
        for number in range(self.micro_batches):
            cell = self._cell(stage, number, Phase.BACKWARD)
            if cell.is_done and cell.current is not None:
                gradient_attempts.append(cell.current)
            else:
                missing.append(number)
        if missing:
            raise WhaleError(
                f"ledger, step {self.step}: stage {stage} has the gradients of "
                f"{self.micro_batches - len(missing)} of {self.micro_batches} "
                "micro-batches and cannot be committed; missing "
                f"{_number_list_text(missing)}"
            )
        return gradient_attempts

    def summed(
        self, stage: int, added: Mapping[str, tuple[list[int], list[int]]]
    ) -> None:
        """Records that a stage's peers have its sum, which later losses do not affect.

        Args:
            stage: Number of the stage.
            added: Reported numbers and attempts of the micro-batches in each peer's
                sum.
        """
        said = {peer: [*map(list, both)] for peer, both in sorted(added.items())}
        self._record("summed", {"stage": stage, "added": said})
        self._commit.summed.add(stage)

    def holders(self, stage: int) -> dict[str, int]:
        """Returns the incarnation of each peer in a stage's assignment."""
        holders = {}
        for number in range(self.micro_batches):
            cell = self._cell(stage, number, Phase.BACKWARD)
            if cell.is_done and cell.current is not None:
                holders[cell.current.peer] = cell.current.incarnation
        return dict(sorted(holders.items()))

    def gradients_at(self) -> Counter[str]:
        """Returns the number of micro-batches whose gradients each peer has."""
        cells = (
            self._cell(stage, number, Phase.BACKWARD)
            for stage in range(self.stages)
            for number in range(self.micro_batches)
        )
        return Counter(c.current.peer for c in cells if c.is_done and c.current)

    def seal(self) -> int:
        """Seals the assignment before summation, and returns the number of the round.

        The loss of a peer unseals it. The next round then has a higher number, and
        sums of earlier rounds must be discarded.
        """
        for stage in range(self.stages):
            self.assignment(stage)
        self._record("sealed", {"round": self._commit.round + 1})
        self._commit.is_sealed, self._commit.round = True, self._commit.round + 1
        return self._commit.round

    def commit(self, digests: Mapping[int, str]) -> None:
        """Records that all stages have applied the sum, which ends the step.

        Args:
            digests: Digests of each stage's parameters and optimizer state.

        Raises:
            WhaleError: The assignment is not sealed, or a stage has no digest.
        """
        every = list(range(self.stages))
        stands = self._commit.is_sealed or sorted(self._commit.summed) == every
        if not stands or sorted(digests) != every:
            raise WhaleError(
                f"ledger, step {self.step}: cannot be committed with digests of stages "
                f"{sorted(digests)}; seal the assignment first, and give the digest of "
                f"each of the {count_text(self.stages, 'stage')}"
            )
        said = {str(stage): digest for stage, digest in sorted(digests.items())}
        self._record("committed", {"digests": said, "round": self._commit.round})
        self._commit.digests = dict(digests)

    @property
    def round(self) -> int:
        """Number of the latest seal; 0 before the first."""
        return self._commit.round

    @property
    def is_sealed(self) -> bool:
        """Whether the assignment is sealed."""
        return self._commit.is_sealed

    @property
    def digests(self) -> Mapping[int, str]:
        """Digest of each stage after the commit."""
        return dict(self._commit.digests)

    @property
    def missing_gradients(self) -> int:
        """Number of gradients that no peer has yet; 0 after the commit."""
        if self._commit.digests:
            return 0
        return self.stages * self.micro_batches - sum(self._held)

    def to_do(self) -> tuple[Task, ...]:
        """Returns the calls that have not been counted yet, including pending ones."""
        return tuple(
            Task(stage=stage, number=number, phase=phase)
            for (stage, number, phase), cell in self._cells.items()
            if not cell.is_done
        )

    def _lose(self, peer: str, incarnation: int) -> tuple[Task, ...]:
        lost = []
        for (stage, number, phase), cell in self._cells.items():
            held = cell.current
            if held is None or held.peer != peer or held.incarnation > incarnation:
                continue
            if phase is Phase.FORWARD and cell.is_done:
                continue
            self._clear(stage, cell, phase)
            lost.append(Task(stage=stage, number=number, phase=phase))
            if phase is Phase.BACKWARD:
                self._commit.is_sealed = False
        return tuple(lost)

    def _clear(self, stage: int, cell: _Cell, phase: Phase) -> None:
        if cell.is_done and phase is Phase.BACKWARD:
            self._held[stage] -= 1
        cell.current, cell.is_done = None, False

    def _cell(self, stage: int, number: int, phase: Phase) -> _Cell:
        cell = self._cells.get((stage, number, phase))
        if cell is None:
            raise WhaleError(
                f"ledger, step {self.step}: micro-batch {number} of stage {stage}; "
                f"there are micro-batches 0 to {self.micro_batches - 1} and stages 0 "
                f"to {self.stages - 1}"
            )
        return cell

    def _record(self, event: str, fields: Mapping[str, object]) -> None:
        if self._write is not None:
            self._write(event, {"step": self.step, **fields})


def check_partition(
    assignment: Mapping[str, Iterable[int]], micro_batches: int, where: str
) -> None:
    """Raises unless each micro-batch occurs exactly once.

    Args:
        assignment: Micro-batches of each peer.
        micro_batches: Number of micro-batches of the step.
        where: Name of the assignment, for the error.

    Raises:
        WhaleError: A micro-batch is missing, occurs twice or is unknown.
    """
    named: dict[int, list[str]] = {}
    for peer, numbers in assignment.items():
        for number in numbers:
            named.setdefault(number, []).append(peer)
    problems = [
        f"{number} is named by {' and '.join(peers)}"
        for number, peers in sorted(named.items())
        if len(peers) > 1
    ]
    if missing := sorted(set(range(micro_batches)) - set(named)):
        problems.append(f"{_number_list_text(missing)} named by nobody")
    if foreign := sorted(set(named) - set(range(micro_batches))):
        problems.append(f"{_number_list_text(foreign)} not of this step")
    if problems:
        raise WhaleError(
            f"{where}: an assignment must name each of the micro-batches 0 to "
            f"{micro_batches - 1} once; {'; '.join(problems)}"
        )


def committed(records: Iterable[Mapping[str, Any]]) -> dict[int, dict[int, str]]:
    """Returns the digests of each stage for each committed step in a journal."""
    return {
        record["step"]: {int(s): digest for s, digest in record["digests"].items()}
        for record in records
        if record["event"] == "committed"
    }


def count_lost_and_doubled(records: Iterable[Mapping[str, Any]]) -> tuple[int, int]:
    """Counts micro-batches of committed steps that are in no sum, or in several sums.

    The counts come from the peers' reports on the applied sums. Each micro-batch of
    each stage adds at most 1.

    Args:
        records: Records of a journal, in order.
    """
    lost = doubled = stages = micro_batches = 0
    sums: dict[int, Mapping[str, Any]] = {}
    for record in records:
        if record["event"] == "step":
            sums = {}
            stages, micro_batches = record["stages"], record["micro_batches"]
        elif record["event"] == "summed":
            sums[record["stage"]] = record["added"]
        elif record["event"] == "committed":
            for stage in range(stages):
                times = [Counter(numbers) for numbers, _ in sums[stage].values()]
                for number in range(micro_batches):
                    lost += any(not time[number] for time in times) or not times
                    doubled += any(time[number] > 1 for time in times)
    return lost, doubled


def _fields(attempt: Attempt) -> dict[str, object]:
    return {
        "stage": attempt.stage,
        "number": attempt.number,
        "phase": str(attempt.phase),
        "peer": attempt.peer,
        "incarnation": attempt.incarnation,
        "attempt": attempt.attempt,
    }


def _number_list_text(numbers: list[int]) -> str:
    shown = ", ".join(str(number) for number in numbers[:MOST_NAMED])
    more = len(numbers) - MOST_NAMED
    return f"{shown} and {more} more" if more > 0 else shown
