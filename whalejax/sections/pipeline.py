"""Passes batches, vectors and gradients through both sections, in order.

The caller submits batches. For each process of the sparse section, one thread requests
vectors, and one thread sends gradients. Another thread runs the dense section. With
staleness s, a lookup of step t waits only for the gradients of step t - s - 1.
Gradients stay in a log until a snapshot of the rows includes them. A process that
replaces another receives the missing gradients from the log. By their step numbers it
applies each only once.

The module is long because all threads share one lock and one state.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import numpy as np

from whalejax.meshes.errors import WhaleError
from whalejax.sections.process_requests import ProcessRequest
from whalejax.sections.sparse_rows import Arrays
from whalejax.sections.sparse_section import SparseSection
from whalejax.wire.messages import A, Question
from whalejax.wire.section_messages import (
    Begin,
    Commit,
    GetRows,
    LookUp,
    MakeBatch,
    PutRows,
    Save,
    Update,
)


LOG_BYTES: Final = 256 << 20
"""Default bytes of logged gradients and ids after which a process writes a snapshot."""

_CHUNK_BYTES: Final = 64 << 20
_MOST_LOGS: Final = 4
_TIMED_STEPS: Final = 512


@dataclass(slots=True, kw_only=True)
class Work:
    """One batch in progress.

    Attributes:
        leaves: Leaves that the dense section needs.
        requests: Request to each process.
        metrics: Metrics of the dense section, once it is done.
    """

    leaves: Any
    requests: Sequence[ProcessRequest]
    metrics: Mapping[str, Any] | None = None


@dataclass(slots=True)
class _Rank:
    """A process of the sparse section, from the pipeline's view.

    Attributes:
        begun: Incarnation of the process that was last told its rows, or -1.
        ready: Whether the process answers questions.
        looked_up: Number of steps whose vectors were received.
        acknowledged: Number of steps whose gradients the process has.
        version, durable: Versions of its rows, and of its newest snapshot.
        known: Steps whose ids the process has from a lookup.
        vectors: Vectors that wait for the dense section, by step.
        log: Ids and gradients of steps after ``durable``, by step.
        log_bytes: Bytes in the log.
        sparse_seconds, wire_seconds: Seconds that each question took in the process,
            and in transfer.
        batch_seconds: Seconds of each batch that it made.
    """

    begun: int = -1
    ready: bool = False
    looked_up: int = 0
    acknowledged: int = 0
    version: int = 0
    durable: int = 0
    known: set[int] = field(default_factory=set)
    vectors: dict[int, Arrays] = field(default_factory=dict)
    log: dict[int, tuple[Arrays, Arrays]] = field(default_factory=dict)
    log_bytes: int = 0
    sparse_seconds: deque[float] = field(
        default_factory=lambda: deque(maxlen=2 * _TIMED_STEPS)
    )
    wire_seconds: deque[float] = field(
        default_factory=lambda: deque(maxlen=2 * _TIMED_STEPS)
    )
    batch_seconds: deque[float] = field(
        default_factory=lambda: deque(maxlen=_TIMED_STEPS)
    )

    def trim(self, version: int) -> None:
        """Drops log entries that a snapshot of ``version`` includes."""
        self.durable, self.version = version, max(version, self.version)
        for step in [step for step in self.log if step < version]:
            self.log_bytes -= _entry_bytes(self.log.pop(step))
        self.known = {step for step in self.known if step >= version}


Dense = Callable[[Work, list[Arrays]], tuple[Sequence[Arrays], Mapping[str, Any]]]
"""Function from a batch and the processes' answers to the processes' gradients, and
metrics."""


class Pipeline:
    """Runs both sections.

    Attributes:
        staleness: Maximum number of newest updates that a lookup may miss.
        depth: Maximum number of batches in progress.
        lags: Number of lookups of processes, by the number of missing updates.
        section: Processes of the sparse section.
        kept: Step of the kept snapshots of all processes, which are not removed, or -1.
    """

    def __init__(
        self,
        ranks: int,
        *,
        staleness: int,
        depth: int,
        begin: Callable[[int], Begin],
        dense: Dense,
        log_bytes: int = LOG_BYTES,
        kept: int = -1,
        **settings: Any,
    ) -> None:
        """Starts the processes, with rows of zeros or from the kept snapshots.

        Args:
            ranks: Number of processes.
            staleness, depth, kept: Values of the attributes.
            begin: Function from a rank to the first message to its process.
            dense: Function that runs the dense section on a batch.
            log_bytes: Bytes of logged gradients and ids after which a process writes a
                snapshot.
            settings: Other arguments of ``SparseSection``.
        """
        self.staleness, self.depth, self.kept = staleness, depth, kept
        self.lags: Counter[int] = Counter()
        self._begin, self._dense, self._log_bytes = begin, dense, log_bytes
        self._cond = threading.Condition()
        self._ranks = [_Rank() for _ in range(ranks)]
        self._works: dict[int, Work] = {}
        self._first = self._submitted = self._done = 0
        self._failure: BaseException | None = None
        self._over = self._runs = False
        self._dense_seconds: deque[float] = deque(maxlen=_TIMED_STEPS)
        self.section = SparseSection(ranks, self._wake, self._fail, **settings)
        self._threads = [threading.Thread(target=self._run_dense, daemon=True)]
        for rank in range(ranks):
            for run in (self._run_lookups, self._run_updates, self._run_snapshots):
                self._threads.append(
                    threading.Thread(
                        target=self._guarded, args=(run, rank), daemon=True
                    )
                )
        for thread in self._threads:
            thread.start()

    @property
    def is_over(self) -> bool:
        """Whether the pipeline was closed, or has failed."""
        return self._over or self._failure is not None

    def close(self) -> None:
        """Ends both sections; work in progress is lost."""
        with self._cond:
            self._over = True
            self._cond.notify_all()
        self.section.close()
        for thread in self._threads:
            thread.join(30.0)

    # For the caller.

    def submit(self, work: Work) -> None:
        """Submits a batch; waits while ``depth`` batches are in progress.

        Args:
            work: Batch to submit.

        Raises:
            WhaleError: A section failed.
        """
        with self._cond:
            self._wait(self._has_room)
            self._works[self._submitted] = work
            self._submitted += 1
            self._cond.notify_all()

    def wait_for(self, work: Work) -> Mapping[str, Any]:
        """Waits until the dense section has finished a batch, and returns its metrics.

        Args:
            work: Work that was submitted.
        """
        with self._cond:
            self._wait(lambda: work.metrics is not None)
        assert work.metrics is not None
        return work.metrics

    def make_batch(self, rank: int, step: int) -> list[np.ndarray]:
        """Returns a batch that a process makes, and its ids.

        Args:
            rank: Rank of the process.
            step: Number of the step.
        """
        answer, _ = self._ask_until_answered(rank, MakeBatch(step=step))
        with self._cond:
            self._ranks[rank].batch_seconds.append(answer.seconds)
        return list(answer.arrays)

    def flush(self) -> int:
        """Waits until all updates are applied and saved; returns the number of steps.

        Raises:
            WhaleError: A section failed.
        """
        with self._cond:
            wanted = self._submitted
            self._wait(lambda: self._done == wanted)
        for rank, own in enumerate(self._ranks):
            version = -1
            while version != wanted:
                with self._cond:
                    self._wait(functools.partial(_has_all, own, wanted))
                question = Commit(version=wanted, fresh=False, kept=self.kept)
                answer = self._ask(rank, question)
                version = -1 if answer is None else answer.version
            with self._cond:
                own.trim(wanted)
        self._first = wanted
        return wanted

    def clear(self) -> None:
        """Waits for work in progress, and resets the rows of all processes to zeros."""
        with self._cond:
            self._wait(lambda: self._done == self._submitted)
            self._runs, self.kept = False, -1
        for rank in range(len(self._ranks)):
            self._ask_until_answered(rank, self._begin(rank))

    def begin_at(self, step: int) -> None:
        """Declares that the written rows are the rows after a number of steps.

        Args:
            step: Number of steps.
        """
        for rank in range(len(self._ranks)):
            self._ask_until_answered(
                rank, Commit(version=step, fresh=True, kept=self.kept)
            )
        with self._cond:
            self._runs = True
            self._first = self._submitted = self._done = step
            for own in self._ranks:
                own.looked_up = own.acknowledged = step
                own.version = own.durable = step
                own.known, own.log_bytes = set(), 0
                own.log.clear()

    def look_up(self, requests: Sequence[ProcessRequest]) -> list[Arrays]:
        """Returns the answer of each process from the current rows, after ``flush``.

        Args:
            requests: Request to each process.
        """
        step = self._submitted
        found: list[Arrays] = []
        for rank, own in enumerate(requests):
            question = LookUp(step=step, arrays=own.arrays)
            answer, _ = self._ask_until_answered(rank, question)
            found.append(answer.arrays)
        return found

    def put_rows(
        self, rank: int, width: int, state: str, first: int, rows: np.ndarray
    ) -> None:
        """Replaces rows of a process, before the run begins.

        Args:
            rank: Rank of the process.
            width, state, first, rows: Arguments of ``SparseRows.write``, unchanged.
        """
        size = max(1, _CHUNK_BYTES // max(1, rows[:1].nbytes))
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            question = PutRows(
                width=width, state=state, first=first + start, arrays=(part,)
            )
            self._ask_until_answered(rank, question)

    def get_rows(
        self, rank: int, width: int, state: str, count: int, row_bytes: int
    ) -> np.ndarray:
        """Returns all rows of a buffer of a process, after ``flush``.

        Args:
            rank: Rank of the process.
            width, state: Arguments of ``SparseRows.read``, unchanged.
            count: Number of rows.
            row_bytes: Bytes of one row.
        """
        size = max(1, _CHUNK_BYTES // max(1, row_bytes))
        parts = []
        for first in range(0, count, size):
            question = GetRows(
                width=width, state=state, first=first, count=min(size, count - first)
            )
            answer, _ = self._ask_until_answered(rank, question, row_bytes * size)
            parts.append(answer.arrays[0])
        return np.concatenate(parts)

    def seconds(self) -> tuple[list[float], list[float], list[float], float]:
        """Returns mean seconds of a step.

        These are lists of the seconds of each process, of its transfers and of the
        batches that it makes, and then the seconds of the dense section.
        """

        def mean(values: deque[float]) -> float:
            return float(np.mean(values)) if values else 0.0

        with self._cond:
            # A step has two entries: a lookup and an update.
            sparse = [2 * mean(own.sparse_seconds) for own in self._ranks]
            wire = [2 * mean(own.wire_seconds) for own in self._ranks]
            batch = [mean(own.batch_seconds) for own in self._ranks]
            return sparse, wire, batch, mean(self._dense_seconds)

    def forget_seconds(self) -> None:
        """Discards the measured times."""
        with self._cond:
            self._dense_seconds.clear()
            for own in self._ranks:
                own.sparse_seconds.clear()
                own.wire_seconds.clear()
                own.batch_seconds.clear()

    # Waiting and asking.

    def _wake(self) -> None:
        with self._cond:
            self._cond.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._cond:
            self._failure = self._failure or error
            self._cond.notify_all()

    def _wait(self, is_so: Callable[[], bool]) -> None:
        """Waits for a condition, with the lock held."""
        self._cond.wait_for(lambda: self._failure is not None or self._over or is_so())
        if self._failure is not None:
            raise WhaleError(
                f"a section of the recommender failed: {self._failure}"
            ) from self._failure
        if self._over:
            raise WhaleError("this step was closed; compile the plan again")

    def _turns(self, is_so: Callable[[], bool]) -> Iterator[None]:
        """Yields each time that the condition holds, until the pipeline is over."""
        while True:
            with self._cond:
                self._cond.wait_for(lambda: self.is_over or is_so())
                if self.is_over:
                    return
            yield

    def _guarded(self, run: Callable[[int], None], rank: int) -> None:
        try:
            run(rank)
        except Exception as error:
            if not self._over:
                self._fail(error)

    def _ask(self, rank: int, question: Question[A], num_bytes: int = 0) -> A | None:
        own = self._ranks[rank]
        with self._cond:
            incarnation = own.begun
            if not own.ready:
                return None
        answer = self.section.ask(rank, incarnation, question, num_bytes)
        if answer is None:
            with self._cond:
                if own.begun == incarnation:
                    own.ready = False
        return answer

    def _ask_until_answered(
        self, rank: int, question: Question[Any], num_bytes: int = 0
    ) -> tuple[Any, float]:
        """Asks a process and its replacements until one answers.

        Returns the answer, and the seconds that the last question took.
        """
        own, answer = self._ranks[rank], None
        begun = time.perf_counter()
        while answer is None:
            with self._cond:
                self._wait(lambda: own.ready)
            begun = time.perf_counter()
            answer = self._ask(rank, question, num_bytes)
        return answer, time.perf_counter() - begun

    def _has_room(self) -> bool:
        if self._submitted - self._done >= self.depth:
            return False
        limit = _MOST_LOGS * self._log_bytes
        return not any(self._has_log(own, limit) for own in self._ranks)

    @staticmethod
    def _has_log(own: _Rank, limit: int) -> bool:
        """Whether a snapshot would shorten a log of at least ``limit`` bytes."""
        entries = own.version - own.durable
        return entries > 0 and own.log_bytes * entries > limit * len(own.log)

    # Threads.

    def _can_look_up(self, own: _Rank) -> bool:
        step = own.looked_up
        needs = max(self._first, step - self.staleness)
        return own.ready and step < self._submitted and own.acknowledged >= needs

    def _run_lookups(self, rank: int) -> None:
        own = self._ranks[rank]
        for _ in self._turns(lambda: self._can_look_up(own)):
            with self._cond:
                step, incarnation = own.looked_up, own.begun
                arrays = self._works[step].requests[rank].arrays
            begun = time.perf_counter()
            answer = self._ask(rank, LookUp(step=step, arrays=arrays))
            if answer is None:
                continue
            wire = time.perf_counter() - begun - answer.seconds
            lag = step - answer.version
            if not 0 <= lag <= self.staleness:
                raise WhaleError(
                    f"step {step} was given rows of version {answer.version}, and may "
                    f"lack {self.staleness} updates"
                )
            with self._cond:
                self.lags[lag] += 1
                if own.begun == incarnation:
                    own.known.add(step)
                own.vectors[step] = answer.arrays
                own.looked_up = step + 1
                own.sparse_seconds.append(answer.seconds)
                own.wire_seconds.append(max(wire, 0.0))
                self._cond.notify_all()

    def _is_new(self, rank: int) -> bool:
        found = self.section.at(rank)
        return found is not None and found[0] != self._ranks[rank].begun

    def _run_updates(self, rank: int) -> None:
        own = self._ranks[rank]

        def is_due() -> bool:
            return self._is_new(rank) or (own.ready and own.acknowledged < self._done)

        for _ in self._turns(is_due):
            if self._is_new(rank):
                self._begin_again(rank)
            else:
                self._send_update(rank)

    def _begin_again(self, rank: int) -> None:
        """Tells a replacing process which rows it has, and restores them."""
        own, found = self._ranks[rank], self.section.at(rank)
        if found is None:
            return
        with self._cond:
            own.ready, restores = False, self._runs
            kept = -1 if restores else self.kept
        if own.begun >= 0 and not restores and kept < 0:
            raise WhaleError(
                f"process {rank} of the sparse section ended while rows were written "
                "to it. Begin again with init, init_from or restore of a new step"
            )
        question = self._begin(rank)
        if restores or kept >= 0:
            question = _restoring(question, kept)
        answer = self.section.ask(rank, found[0], question)
        if answer is None:
            return
        with self._cond:
            if restores:
                if answer.version < own.durable:
                    raise WhaleError(
                        f"process {rank} of the sparse section has rows of version "
                        f"{answer.version} and had kept {own.durable}"
                    )
                own.acknowledged = own.version = answer.version
            own.begun, own.ready, own.known = found[0], True, set()
            self._cond.notify_all()

    def _send_update(self, rank: int) -> None:
        own = self._ranks[rank]
        with self._cond:
            step = own.acknowledged
            ids, gradients = own.log[step]
            more = () if step in own.known else tuple(ids)
            arrays = (*gradients, *more)
            received = own.looked_up
        begun = time.perf_counter()
        question = Update(step=step, received=received, arrays=arrays)
        answer = self._ask(rank, question)
        if answer is None:
            return
        wire = time.perf_counter() - begun - answer.seconds
        with self._cond:
            own.acknowledged, own.version = step + 1, answer.version
            own.sparse_seconds.append(answer.seconds)
            own.wire_seconds.append(max(wire, 0.0))
            self._cond.notify_all()

    def _run_snapshots(self, rank: int) -> None:
        own = self._ranks[rank]

        def is_due() -> bool:
            return own.ready and self._has_log(own, self._log_bytes)

        for _ in self._turns(is_due):
            answer = self._ask(rank, Save(kept=self.kept))
            if answer is not None:
                with self._cond:
                    own.trim(answer.version)
                    self._cond.notify_all()

    def _run_dense(self) -> None:
        def is_due() -> bool:
            return self._done < self._submitted and all(
                self._done in own.vectors for own in self._ranks
            )

        try:
            for _ in self._turns(is_due):
                with self._cond:
                    step = self._done
                    work = self._works.pop(step)
                    vectors = [own.vectors.pop(step) for own in self._ranks]
                begun = time.perf_counter()
                gradients, metrics = self._dense(work, vectors)
                seconds = time.perf_counter() - begun
                with self._cond:
                    for rank, own in enumerate(self._ranks):
                        entry = work.requests[rank].arrays, gradients[rank]
                        own.log[step] = entry
                        own.log_bytes += _entry_bytes(entry)
                    work.metrics, self._done = metrics, step + 1
                    self._dense_seconds.append(seconds)
                    self._cond.notify_all()
                self.section.progressed(step + 1)
        except Exception as error:
            self._fail(error)


def _entry_bytes(entry: tuple[Arrays, Arrays]) -> int:
    return sum(array.nbytes for arrays in entry for array in arrays)


def _has_all(own: _Rank, step: int) -> bool:
    return own.ready and own.acknowledged == step


def _restoring(question: Begin, version: int) -> Begin:
    changes: Any = {"restores": True, "version": version}
    found: Begin = msgspec.structs.replace(question, **changes)
    return found
