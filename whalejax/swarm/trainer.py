"""Leads a run: asks peers for each micro-batch's parts, commits steps, keeps snapshots.

It computes nothing and no tensor goes through it but micro-batches and the snapshots of
the state. Between two steps newcomers take the state, those that leave are let go, and
a checkpoint is written.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence
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
from whalejax.swarm.passage import Counts, Interrupted, Passage, StepContext
from whalejax.swarm.registry import Member, Registry
from whalejax.swarm.wire.service import Address, Caller, Gone, Refused
from whalejax.swarm.worker import digest_of, packed, piece


LOOK_SECONDS: Final = 0.05
STATE_SECONDS: Final = 600.0
"""Deadline of the state of a stage, from peer to peer or to the trainer."""

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
    """

    steps: int
    call_seconds: float = 30.0
    in_flight: int = 0
    patience_seconds: float = 3600.0
    snapshot_every: int = 100
    state_seconds: float = STATE_SECONDS


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


class Trainer:
    """Leads the steps of one run."""

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
        self.address: Address = ("", 0)
        self.counts = Counts()
        self.ledger: Ledger | None = None
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
        """Leaves of a micro-batch."""
        fields = asked.fields
        if not 0 <= fields["number"] < self.cut.count:
            raise Refused("stale", f"there is no micro-batch {fields['number']}")
        with self._lock:
            leaves = self.cut.micro_batch(fields["step"], fields["number"])
        places = fields["places"]
        if any(not 0 <= p < len(leaves) for p in places):
            raise Refused("stale", f"a batch has {len(leaves)} leaves, not {places}")
        arrays = tuple(leaves[p] for p in places)
        return Message(kind="tensors", fields={}, arrays=arrays)

    def give_state(self, asked: Message) -> Message:
        """A part of a stage's state of the snapshot."""
        stage, step = asked.fields["stage"], asked.fields["step"]
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
            except Interrupted as gone:
                self._go_back(gone.stage)
                continue
            yield self.step, metrics
            self._between(self)
        self._take_snapshot()
        if self._snapshot.step != self.step:
            raise WhaleError(
                f"all {self.step} steps are done, and no peer gave the state of a "
                f"stage after the last: the newest whole state is of step "
                f"{self._snapshot.step}. Start the run again with the same folder; it "
                "goes on from there"
            )

    def _one(self) -> dict[str, Any]:
        """One step."""
        cut = self.cut
        begun = self.fleet.now()
        ledger = Ledger(
            step=self.step,
            stages=cut.stages,
            micro_batches=cut.count,
            write=self._write,
        )
        context = StepContext(
            cut=cut,
            fleet=self.fleet,
            caller=self.caller,
            ledger=ledger,
            lock=threading.RLock(),
            generation=self.generation,
            step=self.step,
            batch=self.address,
            call_seconds=self.settings.call_seconds,
            await_peer=self._await_peer,
            tell=self.tell,
            counts=self.counts,
        )
        self.ledger = ledger
        passages = [Passage(context, number) for number in range(cut.count)]
        self._travel(passages)
        sums = _summed(passages)
        with ThreadPoolExecutor(cut.stages) as pool:
            self.digests = Commit(context, passages, pool).run(sums)
        self.step += 1
        self._keeps = True
        metrics = {
            name: np.asarray(value) for name, value in cut.metrics(list(sums)).items()
        }
        seconds = self.fleet.now() - begun
        return {**metrics, "generation": self.generation, "seconds": seconds}

    def _travel(self, passages: Sequence[Passage]) -> None:
        """Take all micro-batches through; what the first error was is raised."""
        peers = len(self.fleet.synced())
        count = self.settings.in_flight or 2 * peers
        errors: list[BaseException] = []

        def one(passage: Passage) -> None:
            if errors:
                return
            try:
                passage.run()
            except BaseException as error:
                errors.append(error)

        with ThreadPoolExecutor(max(1, min(count, len(passages)))) as pool:
            for waiting in [pool.submit(one, p) for p in passages]:
                waiting.result()
        if errors:
            raise errors[0]

    # Between steps.

    def _ready(self) -> None:
        """Bring everybody to the step, and wait for stages without peers."""
        until = self.fleet.now() + self.settings.patience_seconds
        said: list[int] = []
        while True:
            self._let_go()
            self._bring()
            lacking = [s for s in range(self.cut.stages) if not self.fleet.usable(s)]
            if not lacking:
                break
            if lacking != said:
                said = lacking
                self.tell("waiting", stages=lacking, step=self.step)
            if self.fleet.now() > until:
                raise WhaleError(
                    f"no peer serves stage {', '.join(map(str, lacking))} of "
                    f"{self.cut.stages}, for {self.settings.patience_seconds:.0f} s. "
                    "Start one: whalejax swarm join, with --stage"
                )
            self._go_back_if_lost(lacking)
            time.sleep(LOOK_SECONDS)
        if said:
            self.tell("resumed", step=self.step)
        self._take_snapshot()

    def _let_go(self) -> None:
        """Those that leave hold nothing that is needed once a step is over."""
        for member in self.fleet.members():
            if not member.leaving:
                continue
            mates = [m for m in self.fleet.usable(member.stage) if not m.leaving]
            if not mates and self.fleet.has(member.name):
                # The last of its stage: what it holds is kept here.
                self._take_snapshot(now=True)
                if self._snapshot.step != self.step:
                    continue  # Another stage has nobody; this one is needed still.
            self.fleet.drop(member.name)
            self.registry.free(member.name)
            self.tell("left", peer=member.name, stage=member.stage)

    def _bring(self) -> None:
        """Newcomers, and those that were behind, take the state of the step."""
        synced = {m.name for m in self.fleet.synced()}
        coming = [
            m
            for m in self.fleet.members()
            if m.ready and not m.leaving and m.name not in synced
        ]
        if not coming:
            return
        # First those that have it already, so that others can take it from them.
        coming.sort(key=lambda m: m.step != self.step)
        with ThreadPoolExecutor(len(coming)) as pool:
            for group in (
                [m for m in coming if self._has_state(m)],
                [m for m in coming if not self._has_state(m)],
            ):
                for waiting in [pool.submit(self._sync, m) for m in group]:
                    waiting.result()

    def _has_state(self, member: Member) -> bool:
        return self._keeps and member.step == self.step

    def _sync(self, member: Member) -> None:
        mates = [m for m in self.fleet.usable(member.stage) if m.name != member.name]
        sources = [[m.name, list(m.address), [], []] for m in mates]
        keeps = self._has_state(member)
        shot = self._snapshot
        if not mates and not keeps:
            if shot.step != self.step:
                return  # Its stage has nobody; the run has to go back.
            if shot.arrays is not None:
                sources = [["the trainer", list(self.address), [], []]]
        digest = self._synced(member, sources, keeps=keeps)
        known = self.digests.get(member.stage)
        if digest is not None and known not in (None, digest) and keeps:
            self.tell("differs", peer=member.name, why="the state that it came with")
            keeps = False
            if not mates and shot.step == self.step and shot.arrays is not None:
                sources = [["the trainer", list(self.address), [], []]]
            digest = self._synced(member, sources, keeps=False)
        if digest is None or known not in (None, digest):
            return
        self.digests.setdefault(member.stage, digest)
        self.fleet.add(member)
        self.tell("joined", peer=member.name, stage=member.stage, step=self.step)

    def _synced(
        self, member: Member, sources: Sequence[Any], *, keeps: bool
    ) -> str | None:
        """Ask a peer to be at the step; the digest of its state, or none."""
        fields = {
            "generation": self.generation,
            "step": self.step,
            "stage": member.stage,
            "keeps": keeps,
            "sources": sources,
        }
        try:
            answer = self.caller.ask(
                member.address, "sync", fields, seconds=self.settings.state_seconds
            )
        except (Gone, Refused) as error:
            self.tell("not synced", peer=member.name, why=str(error))
            if isinstance(error, Refused) and error.blame:
                for mate in self.fleet.usable(member.stage):
                    if mate.name == error.blame:
                        self.fleet.failed(mate, 1.0, 0.0, ban=True)
            return None
        return str(answer.fields.get("digest"))

    # Snapshots.

    def _take_snapshot(self, *, now: bool = False) -> None:
        """Keep the state of all stages, where it is time to."""
        every = self.settings.snapshot_every
        due = self.step % every == 0 or self.step == self.settings.steps
        if self._snapshot.step == self.step or not (due or now):
            return
        self.snapshot()

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
            pieces: list[np.ndarray] = []
            count, digest = 1, ""
            left = self.cut.state_bytes(stage)
            try:
                while len(pieces) < count:
                    fields = {"stage": stage, "step": self.step, "place": len(pieces)}
                    answer = self.caller.ask(
                        member.address,
                        "state",
                        fields,
                        seconds=self.settings.state_seconds,
                    )
                    count = int(answer.fields["count"])
                    digest = str(answer.fields["digest"])
                    pieces.append(answer.arrays[0])
                    left -= pieces[-1].nbytes
                    if left < 0 or not pieces[-1].nbytes:
                        raise Refused("shape", "it sends more than a stage holds")
            except (Gone, Refused, KeyError, IndexError, ValueError) as error:
                self.fleet.failed(member, 1.0, 0.0, ban=True)
                self.tell("failed", peer=member.name, why=str(error))
                continue
            found = self.cut.split(stage, np.concatenate(pieces))
            if found is not None and digest_of(found) == digest:
                return found
        return None

    # Losses.

    def _await_peer(self, stage: int) -> None:
        """Wait until a peer of a stage may be asked.

        Raises:
            Interrupted: all that held its state are gone.
        """
        while not self.fleet.usable(stage):
            if not self.fleet.synced(stage):
                raise Interrupted(stage)
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
        self.generation += 1
        before, self.step = self.step, self._snapshot.step
        self._keeps = False
        self.digests = _digests(self._snapshot)
        self.fleet.drop_all()
        self.tell("went back", stage=stage, step=self.step, before=before)


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
