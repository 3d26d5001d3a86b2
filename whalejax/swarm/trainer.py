"""Leads a run: asks peers for each micro-batch's parts, commits steps, keeps snapshots.

It computes nothing and no tensor goes through it but micro-batches and the snapshots of
the state. Newcomers take the state beside the steps; between two steps those that leave
are let go, and a checkpoint is written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from whalejax.elastic.wire.framing import Message
from whalejax.meshes.errors import WhaleError
from whalejax.swarm.commit import Commit
from whalejax.swarm.cut import Cut
from whalejax.swarm.fleet import Fleet
from whalejax.swarm.ledger import Ledger, Write
from whalejax.swarm.passage import (
    Counts,
    Passage,
    StageLost,
    StepContext,
    Stopped,
)
from whalejax.swarm.registry import Member, Registry
from whalejax.swarm.wire.service import Address, Caller, Gone, Refused
from whalejax.swarm.wire.states import digest_of, downloaded, packed, piece


LOOK_SECONDS: Final = 0.05
STATE_SECONDS: Final = 600.0
"""Deadline of the state of a stage, from peer to peer or to the trainer."""

NEWCOMER_SECONDS: Final = 10.0
"""That a step waits for newcomers, if the step before took less."""

Tell = Callable[..., None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a run is led.

    Attributes:
        steps: to be done in all.
        call_seconds: deadline of a call; a peer that takes longer is passed over.
        in_flight: micro-batches at once; twice the number of peers if 0.
        patience_seconds: to wait for a stage that has no peer.
        snapshot_every: steps between snapshots, to which a run goes back where all
            peers of a stage are lost.
        state_seconds: deadline of a peer that takes the state.
        newcomer_seconds: that a step waits for peers that take the state; as long as
            the step before took, and at least 10 s, if 0.
        spare_seconds: after which a stage without peers is given one of a stage that
            has several.
    """

    steps: int
    call_seconds: float = 30.0
    in_flight: int = 0
    patience_seconds: float = 3600.0
    snapshot_every: int = 100
    state_seconds: float = STATE_SECONDS
    newcomer_seconds: float = 0.0
    spare_seconds: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state of all stages after a step, in the trainer's memory.

    Attributes:
        step: steps done.
        arrays: of each stage, as ``Stage.raw`` gives them; None stands for a run that
            begins, which every peer can make for itself.
    """

    step: int
    arrays: dict[int, list[np.ndarray]] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Coming:
    """A peer that takes the state.

    Attributes:
        stage: that it serves.
        keeps: it says that it has the state already.
        at: generation and step of that state.
    """

    stage: int
    keeps: bool
    at: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Computed:
    """A step whose gradients are there, and that is not applied yet.

    Attributes:
        context: of the step.
        passages: of its micro-batches.
        sums: total, weight and metrics of the loss, flat.
    """

    context: StepContext
    passages: Sequence[Passage]
    sums: tuple[np.ndarray, ...]


@dataclass(slots=True, kw_only=True)
class Pace:
    """What a move takes, as the newest one that was measured.

    Attributes:
        bytes_per_second: of a state from peer to peer; 200 Mb/s before the first.
        compile_seconds: of the programs of a stage.
    """

    bytes_per_second: float = 25e6
    compile_seconds: float = 30.0


class Trainer:
    """Leads the steps of one run.

    Attributes:
        pace: of moves.
        run_id: drawn at random; every question has it.
        moving: by name of a peer that changes stage, the stage that it is to serve.
    """

    def __init__(
        self,
        cut: Cut,
        registry: Registry,
        caller: Caller,
        settings: Settings,
        *,
        tell: Tell = lambda kind, **more: None,
        write: Write | None = None,
        snapshot: Snapshot | None = None,
        generation: int = 0,
        sum_wire: str = "f32",
        on_snapshot: Callable[[Snapshot], None] = lambda snapshot: None,
        between: Callable[[Trainer], None] = lambda trainer: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Ask nobody yet; ``address`` must be set before ``run``.

        Args:
            cut: of the job.
            registry: that peers announce themselves to.
            caller: asks them.
            settings: of the run.
            tell: is told what happens, in words.
            write: of the ledger's journal.
            snapshot: where the run goes on; a fresh run if left out.
            generation: counts how often the run has begun or gone back.
            sum_wire: how peers send gradients while they add them up.
            on_snapshot: is given each snapshot, such as to write a checkpoint.
            between: called between two steps, such as to move peers.
            clock: gives seconds.
        """
        self.cut, self.registry, self.caller = cut, registry, caller
        self.settings, self.tell, self._write = settings, tell, write
        self.fleet = Fleet(registry, cut.stages, seed=cut.seed, clock=clock)
        self._snapshot = snapshot or Snapshot(step=0, arrays=None)
        self.generation, self.step = generation, self._snapshot.step
        self._on_snapshot, self._between = on_snapshot, between
        self._sum_wire = sum_wire
        self.address: Address = ("", 0)
        self.counts = Counts()
        self.ledger: Ledger | None = None
        self.run_id = secrets.token_hex(8)
        self.moving: dict[str, int] = {}
        self.pace = Pace()
        self._coming: dict[tuple[str, int], _Coming] = {}
        self._changed = threading.Event()
        self._seconds, self._owed = 0.0, False
        self._pending: _Computed | None = None
        self._is_overlapping = False
        self._step_lock = threading.RLock()
        self._failures: dict[tuple[int, str, int, int], Counter[str]] = {}
        self.digests = _digests(self._snapshot)
        self._lock = threading.RLock()
        self._packed: dict[tuple[int, int], tuple[np.ndarray, str]] = {}
        self._keeps = True

    @property
    def newest(self) -> Snapshot:
        """The newest snapshot."""
        return self._snapshot

    # What peers ask.

    def give_batch(self, asked: Message) -> Message:
        """Leaves of a micro-batch of the step that is under way."""
        fields = asked.fields
        self._check_now(asked, ahead=int(self.cut.delayed_updates))
        if not 0 <= fields["number"] < self.cut.count:
            raise Refused("stale", f"there is no micro-batch {fields['number']}")
        with self._lock:
            leaves = self.cut.micro_batch(fields["step"], fields["number"])
        places = fields["places"]
        if any(not 0 <= p < len(leaves) for p in places):
            raise Refused("stale", f"a batch has {len(leaves)} leaves, not {places}")
        arrays = tuple(leaves[p] for p in places)
        return Message(kind="tensors", fields={}, arrays=arrays)

    def _check_now(self, asked: Message, *, ahead: int = 0) -> None:
        """Refuse a question of another run, generation or step.

        Args:
            asked: the question.
            ahead: steps that it may be ahead of those that are done.
        """
        now = self._now()
        step = asked.fields["step"]
        if self.step < step <= self.step + ahead:
            now["step"] = step
        if any(asked.fields[name] != value for name, value in now.items()):
            given = {name: asked.fields[name] for name in now}
            raise Refused("stale", f"the trainer is at {now}, and was asked at {given}")

    def _now(self) -> dict[str, Any]:
        with self._lock:
            return {
                "run": self.run_id,
                "generation": self.generation,
                "step": self.step,
            }

    def give_state(self, asked: Message) -> Message:
        """A part of a stage's state of the snapshot."""
        stage, step = asked.fields["stage"], asked.fields["step"]
        self._check_now(asked)
        with self._lock:
            shot = self._snapshot
            if shot.arrays is None or shot.step != step or stage not in shot.arrays:
                raise Refused("missing", f"the trainer holds no state of step {step}")
            if (stage, step) not in self._packed:
                arrays = shot.arrays[stage]
                self._packed[stage, step] = packed(arrays), digest_of(arrays)
            data, digest = self._packed[stage, step]
        return piece(data, asked.fields["place"], digest)

    # The run.

    def run(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Do steps until all are done.

        Yields:
            Steps done, and metrics.

        Raises:
            WhaleError: a stage has had no peer for too long, or the run cannot go on.
        """
        while self.step < self.settings.steps:
            try:
                self._ready()
                metrics = self._one()
            except StageLost as gone:
                self._go_back(gone.stage)
                continue
            if metrics is None:
                continue  # The first step's gradients are there.
            yield self.step, metrics
            if self.step < self.settings.steps:
                self._between(self)
        self._take_snapshot()
        if self._snapshot.step != self.step:
            raise WhaleError(
                f"all {self.step} steps are done, and no peer gave the state of a "
                f"stage after the last: the newest whole state is of step "
                f"{self._snapshot.step}. Start the run again with the same folder; it "
                "goes on from there"
            )

    def _one(self) -> dict[str, Any] | None:
        """One step; where updates are delayed, with the gradients of the next.

        Returns:
            Metrics; none where the step's gradients are there and wait for the next
            step to be computed with the same parameters.
        """
        begun, pending = self.fleet.now(), self._pending
        if not self.cut.delayed_updates:
            computed = self._computed(self._context(self.step))
            commit = self._committed(computed)
        elif pending is None:
            self._pending = self._computed(self._context(self.step))
            return None
        else:
            computed = pending
            computed.context.state = self.step
            if self._is_alone():
                commit, self._pending = self._committed(computed), None
            else:
                commit, self._pending = self._overlapped(computed)
        self._applied(commit.applied, commit.digests)
        metrics: dict[str, Any] = {
            name: np.asarray(value)
            for name, value in self.cut.metrics(list(computed.sums)).items()
        }
        self._seconds = self.fleet.now() - begun
        if commit.sum_error is not None:
            metrics["sum_error"] = commit.sum_error
        return {**metrics, "generation": self.generation, "seconds": self._seconds}

    def _is_alone(self) -> bool:
        """Whether a step is to be applied before any other begins.

        The last step is, and one whose gradients are with a peer that leaves.
        """
        is_last = self.step + 1 == self.settings.steps
        return is_last or any(m.leaving for m in self.fleet.members())

    def _computed(self, context: StepContext) -> _Computed:
        """Take the micro-batches of a step through all stages and back."""
        count = self.cut.count
        passages = [Passage(context, number) for number in range(count)]
        self.ledger = context.ledger
        with self._lock:
            self.cut.micro_batch(context.step, 0)  # An error of the data ends the run.
        self._travel(context, passages)
        return _Computed(context=context, passages=passages, sums=_summed(passages))

    def _committed(self, computed: _Computed) -> Commit:
        """Sum the gradients of a step and apply them."""
        with threads(self.cut.stages, computed.context.stop) as pool:
            commit = Commit(computed.context, computed.passages, pool)
            commit.run(computed.sums)
        return commit

    def _overlapped(self, computed: _Computed) -> tuple[Commit, _Computed]:
        """Sum and apply a step while the next is computed with the same parameters."""
        context = self._context(self.step + 1)
        self._is_overlapping = True

        def commit() -> Commit:
            try:
                return self._committed(computed)
            except BaseException:
                context.stop.set()
                raise

        try:
            with threads(1, computed.context.stop) as pool:
                committing = pool.submit(commit)
                try:
                    following = self._computed(context)
                except Stopped:
                    committing.result()  # It says why.
                    raise
                return committing.result(), following
        finally:
            self._is_overlapping = False

    def _context(self, step: int) -> StepContext:
        """Of a step that is computed with the parameters of the steps that are done."""
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
        )

    def _applied(self, names: set[str], digests: dict[int, str]) -> None:
        """The step is over; who has not applied it takes the state again."""
        with self._lock:
            for member in self.fleet.synced():
                if member.name in names:
                    self.fleet.end_pause(member)
                else:
                    self.fleet.drop(member.name)
            self.digests = digests
            for key in [k for k in self._failures if k[0] <= self.step]:
                del self._failures[key]
            self.step += 1
            self._keeps = True

    def _travel(self, context: StepContext, passages: Sequence[Passage]) -> None:
        """Take all micro-batches through; what the first error was is raised."""
        peers = len(self.fleet.synced())
        count = self.settings.in_flight or 2 * peers
        errors: list[Exception] = []

        def one(passage: Passage) -> None:
            try:
                if context.stop.is_set():
                    raise Stopped
                passage.run()
            except Exception as error:
                errors.append(error)
                context.stop.set()

        with threads(max(1, min(count, len(passages))), context.stop) as pool:
            for waiting in [pool.submit(one, p) for p in passages]:
                waiting.result()
        if errors:
            raise next((e for e in errors if not isinstance(e, Stopped)), errors[0])

    # Between steps.

    def _ready(self) -> None:
        """Bring everybody to the step, and wait for stages without peers."""
        begun = self.fleet.now()
        newcomers = self.settings.newcomer_seconds or max(
            NEWCOMER_SECONDS, self._seconds
        )
        said: list[int] = []
        while True:
            self._changed.clear()
            self._let_go()
            self._bring()
            coming = self._coming_stages()
            lacking = [s for s in range(self.cut.stages) if not self.fleet.usable(s)]
            waited = self.fleet.now() - begun
            if not lacking and (not coming or waited >= newcomers):
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
        self._take_snapshot()

    def _let_go(self) -> None:
        """Those that leave hold nothing that is needed once a step is over."""
        if self._pending is not None:
            return
        for member in self.fleet.members():
            if not member.leaving:
                continue
            mates = [m for m in self.fleet.usable(member.stage) if not m.leaving]
            holds = any(m.name == member.name for m in self.fleet.synced(member.stage))
            if not mates and holds:
                # The last of its stage: what it holds is kept here.
                self._take_snapshot(now=True)
                if self._snapshot.step != self.step:
                    continue  # Another stage has nobody; this one is needed still.
            self.fleet.drop(member.name)
            self.registry.free(member.name)
            self.tell("left", peer=member.name, stage=member.stage)

    # Newcomers.

    def _bring(self) -> None:
        """Newcomers, and those that were behind, begin to take the state of the step.

        They do so beside the steps: who has it before the gradients are summed works in
        that step already.
        """
        members = self.fleet.members()
        with self._lock:
            names = {m.name for m in members}
            for name in [n for n in self.moving if n not in names]:
                del self.moving[name]
            synced = {m.name for m in self.fleet.synced()}
            coming = [
                m
                for m in members
                if m.ready
                and not m.leaving
                and m.name not in synced
                and (m.name, m.incarnation) not in self._coming
                and self.moving.get(m.name, m.stage) == m.stage
                and not self.fleet.is_paused(m)
            ]
            # Those that have it already first, so that others can take it from them.
            coming.sort(key=lambda m: not self._has_state(m))
            for member in coming:
                keeps = self._has_state(member)
                if keeps or member.stage not in self._keeping:
                    self._begin(member, keeps)

    @property
    def _keeping(self) -> set[int]:
        """Stages of peers that are asked whether they have the state already."""
        now = self.generation, self.step
        return {c.stage for c in self._coming.values() if c.keeps and c.at == now}

    def _coming_stages(self) -> set[int]:
        """Stages of peers that take the state of this step."""
        with self._lock:
            now = self.generation, self.step
            return {c.stage for c in self._coming.values() if c.at == now}

    def _has_state(self, member: Member) -> bool:
        known = member.generation == self.generation or member.stage in self.digests
        return self._keeps and known and member.step == self.step

    def _begin(self, member: Member, keeps: bool) -> None:
        sources = self._sources(member)
        if sources is None and not keeps:
            return  # Its stage has nobody; the run has to go back.
        key = member.name, member.incarnation
        at = self.generation, self.step
        self._coming[key] = _Coming(stage=member.stage, keeps=keeps, at=at)

        def sync() -> None:
            try:
                self._sync(member, sources, keeps, at)
            finally:
                with self._lock:
                    del self._coming[key]
                self._changed.set()

        threading.Thread(target=sync, daemon=True).start()

    def _sources(self, member: Member) -> list[Any] | None:
        """Who has the state that a peer needs; none where it is lost.

        An empty list stands for a run that begins, whose state each peer makes itself.
        """
        mates = [m for m in self.fleet.usable(member.stage) if m.name != member.name]
        shot = self._snapshot
        if mates:
            return [[m.name, list(m.address), [], []] for m in mates]
        if shot.step != self.step:
            return None
        return [] if shot.arrays is None else [["the trainer", [*self.address], [], []]]

    def _sync(
        self,
        member: Member,
        sources: list[Any] | None,
        keeps: bool,
        at: tuple[int, int],
    ) -> None:
        """Bring a peer to the step, in a thread of its own."""
        tries = [keeps, False] if keeps and sources is not None else [keeps]
        for one in tries:
            digest = self._synced(member, sources or [], keeps=one, at=at)
            if digest is None or self._take_in(member, digest, at):
                break
        with self._lock:
            if any(m.name == member.name for m in self.fleet.synced(member.stage)):
                return
            if self.generation != at[0]:
                return  # All begin again.
            late = self.step != at[1] or self._is_overlapping
        self.fleet.pause(member)
        if late:
            why = "it took longer than a step; give it a faster link, or longer steps"
            self.tell("not synced", peer=member.name, why=why)

    def _take_in(self, member: Member, digest: str, at: tuple[int, int]) -> bool:
        """A peer says that it has a state; whether it is that of the step."""
        with self._lock:
            if (self.generation, self.step) != at or self._is_overlapping:
                return True  # Too late: it begins again with a later step.
            known = self.digests.setdefault(member.stage, digest)
            if known == digest:
                self.moving.pop(member.name, None)
                self.fleet.add(member)
        if known == digest:
            self.tell("joined", peer=member.name, stage=member.stage, step=at[1])
            return True
        why = (
            f"stage {member.stage}, step {at[1]}: {digest[:12]}, and {known[:12]} here"
        )
        self.tell("differs", peer=member.name, why=why)
        return False

    def _synced(
        self,
        member: Member,
        sources: Sequence[Any],
        *,
        keeps: bool,
        at: tuple[int, int],
    ) -> str | None:
        """Ask a peer to be at the step; the digest of its state, or none."""
        fields = {
            "run": self.run_id,
            "generation": at[0],
            "step": at[1],
            "stage": member.stage,
            "keeps": keeps,
            "sources": sources,
        }
        begun = self.fleet.now()
        try:
            answer = self.caller.ask(
                member.address, "sync", fields, seconds=self.settings.state_seconds
            )
        except (Gone, Refused) as error:
            if self.step == at[1]:
                self.tell("not synced", peer=member.name, why=str(error))
            if isinstance(error, Refused) and error.code == "shape":
                for mate in self.fleet.usable(member.stage):
                    if mate.name == error.blame:
                        self.fleet.failed(mate, 1.0, 0.0, ban=True)
            return None
        seconds = self.fleet.now() - begun
        if sources and not keeps and seconds > 0:
            size = self.cut.state_bytes(member.stage)
            self.pace.bytes_per_second = size / seconds
        return str(answer.fields["digest"])

    # Moves.

    def move(self, member: Member, target: int) -> None:
        """Have a peer serve another stage; it is asked for no step meanwhile.

        Args:
            member: the peer.
            target: the stage.
        """
        told = {"peer": member.name, "source": member.stage, "target": target}
        with self._lock:
            self.moving[member.name] = target
            self.fleet.drop(member.name)
        self.tell("moves", **told)

        def go() -> None:
            begun = self.fleet.now()
            try:
                self.caller.ask(
                    member.address,
                    "move",
                    {"stage": target},
                    seconds=self.settings.state_seconds,
                )
            except (Gone, Refused) as error:
                with self._lock:
                    self.moving.pop(member.name, None)
                self.tell("failed", peer=member.name, why=str(error))
            else:
                self.pace.compile_seconds = self.fleet.now() - begun
                self.tell("moved", **told)
            self._changed.set()

        threading.Thread(target=go, daemon=True).start()

    def _send_spare(self, lacking: Sequence[int]) -> None:
        """A stage that nobody serves is given a peer of a stage that has several."""
        for stage in lacking:
            members = [m for m in self.fleet.members() if not m.leaving]
            if any(stage in (m.stage, self.moving.get(m.name)) for m in members):
                continue
            counts = Counter(m.stage for m in members if m.name not in self.moving)
            spare = [
                m
                for m in members
                if m.ready and m.name not in self.moving and counts[m.stage] > 1
            ]
            if spare:
                # First those that wait for the step, then those of the largest stage.
                synced = {m.name for m in self.fleet.synced()}
                spare.sort(key=lambda m: (m.name in synced, -counts[m.stage]))
                self.move(spare[0], stage)

    # Snapshots.

    def _take_snapshot(self, *, now: bool = False) -> None:
        """Keep the state of all stages, where it is time to, or was and none came."""
        every = self.settings.snapshot_every
        due = self.step % every == 0 or self.step == self.settings.steps
        if self._snapshot.step == self.step or not (due or now or self._owed):
            return
        before, self._owed = self._owed, self.snapshot() is None
        if self._owed and not before:
            why = "no peer gave the state of a stage; it is asked for again"
            self.tell("not_saved", step=self.step, why=why)

    def snapshot(self) -> Snapshot | None:
        """The state of all stages as the next step begins; none if somebody is lost."""
        arrays = {}
        for stage in range(self.cut.stages):
            found = self._state_of(stage)
            if found is None:
                return None
            arrays[stage] = found
        shot = Snapshot(step=self.step, arrays=arrays)
        with self._lock:
            self._snapshot = shot
            self._packed.clear()
        self._on_snapshot(shot)
        return shot

    def _state_of(self, stage: int) -> list[np.ndarray] | None:
        if self._snapshot.step == self.step and self._snapshot.arrays is not None:
            return self._snapshot.arrays[stage]
        for member in self.fleet.usable(stage):

            def ask(place: int, member: Member = member) -> Message:
                fields = {**self._now(), "stage": stage, "place": place}
                seconds = self.settings.state_seconds
                return self.caller.ask(member.address, "state", fields, seconds=seconds)

            try:
                return downloaded(ask, self.cut, stage, member.name)
            except (Gone, Refused) as error:
                self.fleet.failed(member, 1.0, 0.0, ban=True)
                self.tell("failed", peer=member.name, why=str(error))
        return None

    # Losses.

    def _await_peer(self, stage: int) -> None:
        """Wait until a peer of a stage may be asked.

        Raises:
            StageLost: all that held its state are gone.
        """
        while not self.fleet.usable(stage):
            if not self.fleet.synced(stage):
                raise StageLost(stage)
            time.sleep(LOOK_SECONDS)  # At most until their leases end.

    def _go_back_if_lost(self, lacking: Sequence[int]) -> None:
        """Go back where a stage's state is nowhere any more and a peer has come."""
        if self._snapshot.step == self.step:
            return
        for stage in lacking:
            there = [m for m in self.fleet.members() if m.stage == stage and m.ready]
            if not self.fleet.synced(stage) and there:
                self._go_back(stage)
                return

    def _go_back(self, stage: int) -> None:
        """All stages go back to the snapshot."""
        with self._lock:
            self.generation += 1
            before, self.step = self.step, self._snapshot.step
            self._keeps, self._pending = False, None
            self.digests = _digests(self._snapshot)
            self.fleet.drop_all()
        self.tell("went back", stage=stage, step=self.step, before=before)


@contextlib.contextmanager
def threads(count: int, stop: threading.Event) -> Iterator[ThreadPoolExecutor]:
    """Threads that are waited for, unless the process is asked to end.

    Args:
        count: how many.
        stop: set where they are to end.
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


def _digests(snapshot: Snapshot) -> dict[int, str]:
    """Of each stage's state in a snapshot."""
    arrays = snapshot.arrays or {}
    return {stage: digest_of(several) for stage, several in arrays.items()}


def _summed(passages: Sequence[Passage]) -> tuple[np.ndarray, ...]:
    """Total, weight and metrics of all micro-batches, added in their order."""
    total: list[np.ndarray] = []
    for passage in passages:
        if not total:
            total = [np.array(x) for x in passage.sums]
        else:
            total = [a + b for a, b in zip(total, passage.sums, strict=True)]
    return tuple(np.asarray(x) for x in total)


def as_told(counts: Counts) -> dict[str, int]:
    """Counts by name."""
    return dataclasses.asdict(counts)
