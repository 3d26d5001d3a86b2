"""Runs the steps of a swarm: calls peers, commits steps and takes snapshots.

Activations and gradients do not pass through the trainer. Only micro-batches, losses,
metrics, values of the update's rounds and snapshots do. Joining peers download the
state during steps. Leaving peers are released between two steps.

The module is long because one loop handles every loss of a peer, within and between
steps.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from whalejax.meshes.errors import WhaleError
from whalejax.swarm.ledger import Ledger, Write
from whalejax.swarm_runtime.commit import SwarmStepCommit
from whalejax.swarm_runtime.micro_batch_route import (
    MicroBatchRoute,
    StageLost,
    StepContext,
    StopRequested,
)
from whalejax.swarm_runtime.registry import PeerRecord, Registry
from whalejax.swarm_runtime.staged_job import StagedJob
from whalejax.swarm_runtime.trainers.micro_batch_queue import OWN
from whalejax.swarm_runtime.trainers.trainer_pool import TrainerPool
from whalejax.swarm_runtime.trainers.trainer_state import (
    Settings,
    Snapshot,
    Tell,
    TrainerState,
    digests_of,
    given_leaves,
)
from whalejax.wire.service import Caller, RefusedRequestError, UnansweredError
from whalejax.wire.swarm_messages import Batch, MovePeer, Tensors


LOOK_SECONDS: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class _ComputedStep:
    """A step whose gradients are computed but not applied.

    Attributes:
        context: State that the micro-batches of the step share.
        routes: Routes of its micro-batches.
        sums: Flat total, weight and metrics of the loss.
    """

    context: StepContext
    routes: Sequence[MicroBatchRoute]
    sums: tuple[np.ndarray, ...]


class Trainer(TrainerState):
    """Runs the steps of one run.

    Attributes:
        ledger: Ledger of the current step.
        sharing: Pool of the secondary trainers.
    """

    def __init__(
        self,
        cut: StagedJob,
        registry: Registry,
        caller: Caller,
        settings: Settings,
        *,
        tell: Tell = lambda kind, **more: None,
        write: Write | None = None,
        snapshot: Snapshot | None = None,
        generation: int = 0,
        wire: str = "f32",
        sum_wire: str = "f32",
        on_snapshot: Callable[[Snapshot], None] = lambda snapshot: None,
        rebalance: Callable[[Trainer], None] = lambda trainer: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepares the steps; ``address`` must be set before ``run``.

        Args:
            cut: Staged job.
            registry: Registry of the peers.
            caller: Client for calls to the peers.
            settings: Settings of the run.
            tell: Function that reports events.
            write: Function that writes the ledger's journal.
            snapshot: Snapshot to restore; default: a new run.
            generation: Number of earlier starts and rollbacks of the run.
            wire: Wire format of tensors.
            sum_wire: Wire format of gradients during their reduction.
            on_snapshot: Function that receives each snapshot, such as one that writes a
                checkpoint.
            rebalance: Function that may move peers. It is called between two steps,
                and, unless updates are delayed, repeatedly during a step.
            clock: Clock in seconds.
        """
        super().__init__(
            cut,
            registry,
            caller,
            settings,
            tell=tell,
            snapshot=snapshot,
            generation=generation,
            on_snapshot=on_snapshot,
            clock=clock,
        )
        self._write, self._rebalance = write, rebalance
        self.sharing = TrainerPool(self.fleet, caller, tell, registry.lease.seconds)
        self._wire, self._sum_wire = wire, sum_wire
        self.ledger: Ledger | None = None
        self._seconds = 0.0
        self._pending: _ComputedStep | None = None
        self._computing: StepContext | None = None
        self._step_lock = threading.RLock()
        self._failures: dict[tuple[int, str, int, int], Counter[str]] = {}
        self._not_finite: dict[tuple[int, str, int], set[str]] = {}

    # Requests of peers.

    def give_batch(self, asked: Batch) -> Tensors:
        """Returns the leaves of a micro-batch of the current step.

        Raises:
            RefusedRequestError: The request is not for the current step, or the
                micro-batch or a leaf does not exist.
        """
        self._check_now(asked, ahead=int(self.cut.delayed_updates))
        if not 0 <= asked.number < self.cut.count:
            raise RefusedRequestError(
                "stale", f"there is no micro-batch {asked.number}"
            )
        with self._lock:
            leaves = self.cut.micro_batch(asked.step, asked.number)
        return given_leaves(leaves, asked)

    # The run.

    def run(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Runs the remaining steps.

        Yields:
            Number of completed steps, and metrics.

        Raises:
            WhaleError: A stage has had no peer for too long, or the run cannot
                continue.
        """
        try:
            yield from self._steps()
            self._take_snapshot()
        except Exception:
            with contextlib.suppress(Exception):
                self._await_snapshot()  # Keep a snapshot that began before the error.
            raise
        finally:
            self._end_snapshots()
        if self._snapshot.step != self.step:
            raise WhaleError(
                f"step {self.step}, the last, is done, and no peer gave the state of a "
                f"stage after it: the newest whole state is of step "
                f"{self._snapshot.step}. Start the run again with the same folder; it "
                "goes on from there"
            )

    def _steps(self) -> Iterator[tuple[int, dict[str, Any]]]:
        while self.step < self.settings.steps:
            try:
                self._ready()
                metrics = self._one()
            except StageLost as gone:
                self._go_back(gone.stage)
                continue
            if metrics is None:
                continue  # The first step is computed but not applied.
            yield self.step, metrics
            if self.step < self.settings.steps:
                self._rebalance(self)

    def _one(self) -> dict[str, Any] | None:
        """Runs one step; with delayed updates, also computes the gradients of the next.

        Returns:
            Metrics. None after the first step with delayed updates, which is applied
            while the next step is computed.
        """
        begun, computed = self.fleet.now(), self._pending
        if computed is None:
            computed = self._compute_step(self._context(self.step))
            if self.cut.delayed_updates:
                self._pending = computed
                return None
            self._await_newcomers()
            self._await_snapshot()
        with self._summing():
            commit = self._sum_and_apply(computed)
            self._applied(commit.applied, commit.digests)
        metrics: dict[str, Any] = {
            name: np.asarray(value)
            for name, value in self.cut.metrics(list(computed.sums)).items()
        }
        self._seconds = self.fleet.now() - begun
        if commit.sum_error is not None:
            metrics["sum_error"] = commit.sum_error
        if self._wire != "f32":
            metrics["wire_error"] = computed.routes[0].wire_error
        return {**metrics, "generation": self.generation, "seconds": self._seconds}

    @contextlib.contextmanager
    def _summing(self) -> Iterator[None]:
        """Marks the time of the gradient sum, in which joining peers wait for the next
        state.
        """
        with self._lock:
            self._is_summing = True
        try:
            yield
        finally:
            with self._lock:
                self._is_summing = False

    def _sum_and_apply(self, computed: _ComputedStep) -> SwarmStepCommit:
        """Sums and applies a step; with delayed updates, during the next one."""
        if not self.cut.delayed_updates:
            return self._committed(computed)
        computed.context.state = self.step
        is_last = self.step + 1 == self.settings.steps
        if is_last or any(m.leaving for m in self.fleet.members()):
            commit, self._pending = self._committed(computed), None
        else:
            commit, self._pending = self._overlapped(computed)
        return commit

    def _compute_step(self, context: StepContext) -> _ComputedStep:
        count = self.cut.count
        routes = [MicroBatchRoute(context, number) for number in range(count)]
        self.ledger = context.ledger
        with self._lock:
            self.cut.micro_batch(context.step, 0)  # raises an error in the data
        self._travel(context, routes)
        return _ComputedStep(context=context, routes=routes, sums=_summed(routes))

    def _await_newcomers(self) -> None:
        begun = self.fleet.now()
        while self._waits_for_newcomers(begun):
            self._changed.clear()
            self._changed.wait(LOOK_SECONDS)

    def _committed(self, computed: _ComputedStep) -> SwarmStepCommit:
        with threads(self.cut.stages, computed.context.stop) as pool:
            commit = SwarmStepCommit(computed.context, computed.routes, pool)
            commit.run(computed.sums)
        return commit

    def _overlapped(
        self, computed: _ComputedStep
    ) -> tuple[SwarmStepCommit, _ComputedStep]:
        context = self._context(self.step + 1)

        def commit() -> SwarmStepCommit:
            try:
                return self._committed(computed)
            except BaseException:
                context.stop.set()
                raise

        with threads(1, computed.context.stop) as pool:
            committing = pool.submit(commit)
            try:
                following = self._compute_step(context)
            except StopRequested:
                committing.result()  # raises its own error
                raise
            return committing.result(), following

    def _context(self, step: int) -> StepContext:
        generation = self.generation

        def write(event: str, fields: Mapping[str, object]) -> None:
            if self._write is not None:
                self._write(event, {"generation": generation, **fields})

        ledger = Ledger(
            step=step,
            stages=self.cut.stages,
            micro_batches=self.cut.count,
            write=write,
        )
        return StepContext(
            cut=self.cut,
            fleet=self.fleet,
            caller=self.caller,
            ledger=ledger,
            lock=self._step_lock,
            run=self.run_id,
            generation=generation,
            step=step,
            state=self.step,
            batch=self.address,
            sum_wire=self._sum_wire,
            call_seconds=self.settings.call_seconds,
            await_peer=self._await_peer,
            tell=self.tell,
            counts=self.counts,
            failures=self._failures,
            not_finite=self._not_finite,
        )

    def _applied(self, names: set[str], digests: dict[int, str]) -> None:
        """Ends a step; peers that have not applied it download the state again."""
        with self._lock:
            for member in self.fleet.synced():
                if member.name in names:
                    self.fleet.end_pause(member)
                else:
                    self.fleet.drop(member.name)
            self.digests = digests
            for key in [k for k in self._failures if k[0] <= self.step]:
                del self._failures[key]
            for at in [k for k in self._not_finite if k[0] <= self.step]:
                del self._not_finite[at]
            self.step += 1
            self._keeps = True

    def _travel(self, context: StepContext, routes: Sequence[MicroBatchRoute]) -> None:
        """Sends all micro-batches through the stages; raises the first error.

        Secondary trainers run the micro-batches that they lease.
        """
        peers = len(self.fleet.synced())
        count = max(1, min(self.settings.in_flight or 2 * peers, len(routes)))
        shares = self.sharing.open(context, routes, count)
        errors: list[Exception] = []

        def lead() -> None:
            try:
                while not shares.is_over:
                    share = shares.wait_for(OWN, self.sharing.most, LOOK_SECONDS)
                    if share is not None:
                        routes[share.number].run(share.attempts.start - 1)
                        self.sharing.led += shares.finish(share, lambda: None)
            except Exception as error:
                errors.append(error)
                context.stop.set()

        self._computing = context
        try:
            with threads(count, context.stop) as pool:
                leading = {pool.submit(lead) for _ in range(count)}
                while leading:
                    done, leading = wait(leading, timeout=LOOK_SECONDS)
                    for one in done:
                        one.result()
                    self.sharing.watch()
                    if not self.cut.delayed_updates:
                        self._bring(late=False)
                        self._rebalance(self)
        finally:
            self._computing = None
            self.sharing.close()
        _raise_first(errors)
        if context.stop.is_set():
            raise StopRequested
        self._make_again(context, routes, count)

    def _make_again(
        self, context: StepContext, routes: Sequence[MicroBatchRoute], count: int
    ) -> None:
        stages = range(self.cut.stages)
        for stage in stages:
            context.lose_gone(stage)
        with context.lock:
            if all(context.ledger.is_complete(stage) for stage in stages):
                return
        with threads(count, context.stop) as pool:
            again = [pool.submit(route.run) for route in routes]
            errors = [one.exception() for one in again]
        _raise_first([error for error in errors if error is not None])

    def gradients_at(self) -> Counter[str]:
        """Returns the number of the open step's gradients on each peer."""
        context = self._open_step
        if context is None:
            return Counter()
        with context.lock:
            return context.ledger.gradients_at()

    @property
    def _open_step(self) -> StepContext | None:
        """Step whose gradients are on peers and not yet summed, or None."""
        if self._computing is None and self._pending is not None:
            return self._pending.context
        return self._computing

    # Between steps.

    def _ready(self) -> None:
        """Starts state downloads for the step, and waits for stages without peers.

        Raises:
            WhaleError: A stage has had no peer for ``patience_seconds``.
        """
        begun = whole = self.fleet.now()
        said: list[int] = []
        while True:
            self._changed.clear()
            self._let_go()
            self._bring()
            coming = {one.stage for one in self._coming_now().values()}
            lacking = [s for s in range(self.cut.stages) if not self.fleet.usable(s)]
            waited = self.fleet.now() - begun
            if lacking:
                whole = self.fleet.now()
            elif not self._waits_at_first(whole):
                break
            lacking = [s for s in lacking if s not in coming]
            if lacking and lacking != said:
                said = lacking
                self.tell("waiting", stages=lacking, step=self.step)
            if lacking and waited > self.settings.patience_seconds:
                raise WhaleError(
                    f"no peer serves stage {', '.join(map(str, lacking))} of "
                    f"{self.cut.stages}, for {self.settings.patience_seconds:.0f} s. "
                    "Start one: whalejax swarm join, with --stage"
                )
            self._go_back_if_lost(lacking)
            if waited >= self.settings.spare_seconds:
                self._send_spare(lacking)
            self._changed.wait(LOOK_SECONDS)
        if said:
            self.tell("resumed", step=self.step)
        if self.cut.delayed_updates:
            self._take_snapshot()
        else:
            self._begin_snapshot()

    def _waits_at_first(self, since: float) -> bool:
        """Whether a step waits for joining peers before it is computed.

        It waits if most peers are downloading the state, as at the start. It also waits
        if updates are delayed, because the gradient sum then begins with the step.
        """
        most = len(self._coming_now()) > len(self.fleet.usable())
        waits = most or self.cut.delayed_updates
        return waits and self._waits_for_newcomers(since)

    def _let_go(self) -> None:
        """Releases leaving peers whose gradients no computed step needs."""
        if self._pending is not None:
            return
        for member in self.fleet.members():
            if not member.leaving:
                continue
            mates = [m for m in self.fleet.usable(member.stage) if not m.leaving]
            holds = any(m.name == member.name for m in self.fleet.synced(member.stage))
            if not mates and holds:
                # It is the last peer of its stage, so its state is saved first.
                self._take_snapshot(now=True)
                if self._snapshot.step != self.step:
                    continue  # No snapshot without peers of another stage: keep it.
            self.fleet.drop(member.name)
            self.registry.free(member.name)
            self.tell("left", peer=member.name, stage=member.stage)

    # Moves.

    def move(self, member: PeerRecord, target: int) -> None:
        """Moves a peer to another stage; it gets no calls during the move.

        Other peers recompute its results of the current step.
        """
        told = {"peer": member.name, "source": member.stage, "target": target}
        with self._lock:
            self.moving[member.name] = target
            self.fleet.drop(member.name)
        self.tell("moves", **told)
        if self._open_step is not None:
            self._open_step.lose(member, f"it moves to stage {target}")

        def go() -> None:
            begun = self.fleet.now()
            try:
                self.caller.ask(
                    member.address,
                    MovePeer(stage=target),
                    seconds=self.settings.state_seconds,
                )
            except UnansweredError as error:
                with self._lock:
                    self.moving.pop(member.name, None)
                self.tell("failed", peer=member.name, why=str(error))
            else:
                self.pace.compile_seconds = self.fleet.now() - begun
                self.tell("moved", **told)
            self._changed.set()

        threading.Thread(target=go, daemon=True).start()

    def _send_spare(self, lacking: Sequence[int]) -> None:
        for stage in lacking:
            members = [m for m in self.fleet.members() if not m.leaving]
            members = [m for m in members if not self.fleet.is_paused(m)]
            if any(stage in (m.stage, self.moving.get(m.name)) for m in members):
                continue
            counts = Counter(m.stage for m in members if m.name not in self.moving)
            spare = [
                m
                for m in members
                if m.ready and m.name not in self.moving and counts[m.stage] > 1
            ]
            if spare:
                # Peers that wait for the step come first, then those of the largest
                # stage.
                synced = {m.name for m in self.fleet.synced()}
                spare.sort(key=lambda m: (m.name in synced, -counts[m.stage]))
                self.move(spare[0], stage)

    # Losses.

    def _await_peer(self, stage: int) -> None:
        """Waits until a stage has a usable peer.

        Raises:
            StageLost: All peers with its state are lost.
        """
        while not self.fleet.usable(stage):
            if not self.fleet.synced(stage):
                raise StageLost(stage)
            time.sleep(LOOK_SECONDS)  # ends at the latest with the peers' leases

    def _go_back_if_lost(self, lacking: Sequence[int]) -> None:
        if self._snapshot.step == self.step:
            return
        for stage in lacking:
            there = [m for m in self.fleet.members() if m.stage == stage and m.ready]
            if not self.fleet.synced(stage) and there:
                self._go_back(stage)
                return

    def _go_back(self, stage: int) -> None:
        self._await_snapshot()
        with self._lock:
            self.generation += 1
            before, self.step = self.step, self._snapshot.step
            self._keeps, self._pending = False, None
            self.digests = digests_of(self._snapshot)
            self.fleet.drop_all()
        self.tell("went back", stage=stage, step=self.step, before=before)


@contextlib.contextmanager
def threads(count: int, stop: threading.Event) -> Iterator[ThreadPoolExecutor]:
    """Provides threads, and waits for them unless the process is asked to stop.

    Args:
        count: Number of threads.
        stop: Event that ends the threads; it is set if the body raises.
    """
    pool = ThreadPoolExecutor(count)
    try:
        yield pool
    except Exception:
        stop.set()
        pool.shutdown(cancel_futures=True)
        raise
    except BaseException:
        stop.set()
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def _raise_first(errors: Sequence[BaseException]) -> None:
    if errors:
        raise min(errors, key=lambda error: isinstance(error, StopRequested))


def _summed(routes: Sequence[MicroBatchRoute]) -> tuple[np.ndarray, ...]:
    """Returns total, weight and metrics of all micro-batches, summed in order."""
    total: list[np.ndarray] = []
    for route in routes:
        if not total:
            total = [np.array(x) for x in route.sums]
        else:
            total = [a + b for a, b in zip(total, route.sums, strict=True)]
    return tuple(np.asarray(x) for x in total)
