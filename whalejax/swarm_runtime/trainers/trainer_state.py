"""The state of a run: its peers, downloads by joining peers, and snapshots."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from whalejax.state.state_bytes import digest_of, packed
from whalejax.swarm.deadlines import NEWCOMER_SECONDS, SPARE_SECONDS
from whalejax.swarm.stage_assignment import pays_to_wait
from whalejax.swarm_runtime.micro_batch_route import Counts
from whalejax.swarm_runtime.peer_fleet import Fleet
from whalejax.swarm_runtime.registry import PeerRecord, Registry
from whalejax.swarm_runtime.staged_job import StagedJob
from whalejax.swarm_runtime.wire.state_transfer import downloaded, piece
from whalejax.wire.service import Address, Caller, RefusedRequestError, UnansweredError
from whalejax.wire.swarm_messages import (
    At,
    Batch,
    FetchState,
    Holder,
    StateChunk,
    Sync,
    Tensors,
)


STATE_SECONDS: Final = 600.0
"""Deadline in seconds for the download of a stage's state."""


PULL_LOOK_SECONDS: Final = 0.5
GONE_ON: Final = ("missing", "stale")
"""Codes of refusals of a request for another step or stage than the peer's."""

Tell = Callable[..., None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a run.

    Attributes:
        steps: Total number of steps.
        call_seconds: Deadline of a call; slower peers are skipped.
        in_flight: Maximum number of micro-batches in flight; 0 means twice the number
            of peers.
        patience_seconds: Longest wait in seconds for a stage without peers.
        snapshot_every: Steps between snapshots, to which a run rolls back if all peers
            of a stage are lost.
        state_seconds: Deadline of a state download.
        newcomer_seconds: Longest time in seconds for which a step waits for joining
            peers that download its state. It waits before the gradients are summed or,
            with delayed updates, before the step is computed. If 0, the time follows
            from the measured rate of downloads, and a step waits if ``pays_to_wait``.
        spare_seconds: Seconds after which a stage without peers gets a peer of a stage
            that has several.
    """

    steps: int
    call_seconds: float = 30.0
    in_flight: int = 0
    patience_seconds: float = 3600.0
    snapshot_every: int = 100
    state_seconds: float = STATE_SECONDS
    newcomer_seconds: float = 0.0
    spare_seconds: float = SPARE_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state of all stages after a step, in the trainer's memory.

    Attributes:
        step: Number of completed steps.
        arrays: Arrays of each stage, as from ``StagePrograms.raw``. None at the start
            of a run, when every peer initialises its state itself.
    """

    step: int
    arrays: dict[int, list[np.ndarray]] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _JoiningPeer:
    """A peer that downloads the state.

    Attributes:
        stage: Stage that it serves.
        keeps: Whether it claims to have the state already.
        at: Generation and step of that state.
        since: Time at which this download started.
        ready: Time at which the peer's first download started.
    """

    stage: int
    keeps: bool
    at: tuple[int, int]
    since: float
    ready: float


@dataclass(slots=True)
class SnapshotDownload:
    """A snapshot download in progress.

    Attributes:
        source: Peer that sends the state.
        is_cancelled: Whether the download is no longer needed.
        thread: Thread that downloads it.
        error: Error of the download, or None.
    """

    source: PeerRecord | None = None
    is_cancelled: bool = False
    thread: threading.Thread | None = None
    error: BaseException | None = None


@dataclass(slots=True, kw_only=True)
class TransferRates:
    """Latest measured costs of a move.

    Attributes:
        bytes_per_second: Rate of a download of a state between peers; 200 Mb/s before
            the first measurement.
        compile_seconds: Seconds to compile a stage's programs.
    """

    bytes_per_second: float = 25e6
    compile_seconds: float = 30.0


class TrainerState:
    """State of a run in its trainer.

    Attributes:
        pace: Measured costs of moves.
        run_id: Random identifier of the run, which every question has.
        moving: Target stage of each moving peer, by name.
    """

    def __init__(
        self,
        cut: StagedJob,
        registry: Registry,
        caller: Caller,
        settings: Settings,
        *,
        tell: Tell,
        snapshot: Snapshot | None,
        generation: int,
        on_snapshot: Callable[[Snapshot], None],
        clock: Callable[[], float],
    ) -> None:
        """Prepares the state; ``address`` must be set before a peer downloads it."""
        self.cut, self.registry, self.caller = cut, registry, caller
        self.settings, self.tell = settings, tell
        self.fleet = Fleet(registry.members, cut.stages, seed=cut.seed, clock=clock)
        self._snapshot = snapshot or Snapshot(step=0, arrays=None)
        self.generation, self.step = generation, self._snapshot.step
        self._on_snapshot = on_snapshot
        self.address: Address = ("", 0)
        self.counts = Counts()
        self.run_id = secrets.token_hex(8)
        self.moving: dict[str, int] = {}
        self.pace = TransferRates()
        self._coming: dict[tuple[str, int], _JoiningPeer] = {}
        self._late: dict[tuple[str, int], float] = {}
        self._given_up: set[tuple[str, int]] = set()
        self._changed = threading.Event()
        self._owed = False
        self._is_summing = False
        self.digests = digests_of(self._snapshot)
        self._lock = threading.RLock()
        self._packed: dict[tuple[int, int], tuple[np.ndarray, str]] = {}
        self._keeps = True
        self._pull: SnapshotDownload | None = None
        self._snapshot_lock = threading.Lock()

    @property
    def newest(self) -> Snapshot:
        """Newest snapshot."""
        return self._snapshot

    def _check_now(self, asked: At, *, ahead: int = 0) -> None:
        """Refuses a question about another run, generation or step."""
        now = self._now()
        if self.step < asked.step <= self.step + ahead:
            now["step"] = asked.step
        given = {"run": asked.run, "generation": asked.generation, "step": asked.step}
        if given != now:
            raise RefusedRequestError(
                "stale", f"the trainer is at {now}, and was asked at {given}"
            )

    def _now(self) -> dict[str, Any]:
        with self._lock:
            return {
                "run": self.run_id,
                "generation": self.generation,
                "step": self.step,
            }

    def give_state(self, asked: FetchState) -> StateChunk:
        """Returns a part of a stage's state from the snapshot."""
        stage, step = asked.stage, asked.step
        self._check_now(asked)
        with self._lock:
            shot = self._snapshot
            if shot.arrays is None or shot.step != step or stage not in shot.arrays:
                raise RefusedRequestError(
                    "missing", f"the trainer holds no state of step {step}"
                )
            if (stage, step) not in self._packed:
                arrays = shot.arrays[stage]
                self._packed[stage, step] = packed(arrays), digest_of(arrays)
            data, digest = self._packed[stage, step]
        return piece(data, asked.place, digest)

    # Joining peers.

    def _bring(self, *, late: bool = True) -> None:
        """Starts downloads of the state by joining peers, and by peers that are behind.

        Downloads run during the steps. A peer that has the state before the sum
        computes micro-batches of that step, or takes part in its sum.

        Args:
            late: Whether to include peers whose earlier downloads were too late; only
                at the beginning of a step.
        """
        members = self.fleet.members()
        with self._lock:
            names = {m.name for m in members}
            here = {(m.name, m.incarnation) for m in members}
            self._given_up &= here
            for key in self._late.keys() - here:
                del self._late[key]
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
                and (late or (m.name, m.incarnation) not in self._late)
                and self.moving.get(m.name, m.stage) == m.stage
                and not self.fleet.is_paused(m)
            ]
            # Peers that already have the state come first, so that others can download
            # from them.
            coming.sort(key=lambda m: not self._has_state(m))
            for member in coming:
                keeps = self._has_state(member)
                if keeps or member.stage not in self._keeping:
                    self._begin(member, keeps)

    @property
    def _keeping(self) -> set[int]:
        """Stages of peers whose claim to have the state is being checked."""
        now = self.generation, self.step
        return {c.stage for c in self._coming.values() if c.keeps and c.at == now}

    def _coming_now(self) -> dict[tuple[str, int], _JoiningPeer]:
        here = {(m.name, m.incarnation) for m in self.fleet.members()}
        with self._lock:
            now = self.generation, self.step
            return {k: c for k, c in self._coming.items() if c.at == now and k in here}

    def _waits_for_newcomers(self, since: float) -> bool:
        with self._lock:
            given_up = set(self._given_up)
        coming, now = self._coming_now(), self.fleet.now()
        coming = {key: c for key, c in coming.items() if key not in given_up}
        if not coming:
            return False
        rate = self.pace.bytes_per_second
        takes = [self.cut.state_bytes(c.stage) / rate for c in coming.values()]
        # Measurements of one link do not apply to others.
        longest = max(NEWCOMER_SECONDS, 2 * max(takes))
        if now - since >= (self.settings.newcomer_seconds or longest):
            with self._lock:
                self._given_up |= coming.keys() & self._coming.keys()
            return False
        if self.settings.newcomer_seconds:
            return True
        pairs = zip(coming.values(), takes, strict=True)
        # A peer whose download was late may take as long again.
        left = abs(max(c.since + seconds for c, seconds in pairs) - now)
        lost = [now - c.ready for c in coming.values()]
        return pays_to_wait(lost, len(self.fleet.synced()), left)

    def _has_state(self, member: PeerRecord) -> bool:
        known = member.generation == self.generation or member.stage in self.digests
        return self._keeps and known and member.step == self.step

    def _begin(self, member: PeerRecord, keeps: bool) -> None:
        sources = self._sources(member)
        if sources is None and not keeps:
            return  # No peer has the stage's state, so the run must roll back.
        key = member.name, member.incarnation
        at = self.generation, self.step
        now = self.fleet.now()
        self._coming[key] = _JoiningPeer(
            stage=member.stage,
            keeps=keeps,
            at=at,
            since=now,
            ready=self._late.get(key, now),
        )

        def sync() -> None:
            try:
                self._sync(member, sources, keeps, at)
            finally:
                with self._lock:
                    del self._coming[key]
                self._changed.set()

        threading.Thread(target=sync, daemon=True).start()

    def _sources(self, member: PeerRecord) -> list[Holder] | None:
        """Returns the sources of the state that a peer needs; None if it is lost.

        The list is empty at the start of a run, when each peer initialises its state.
        """
        mates = [m for m in self.fleet.usable(member.stage) if m.name != member.name]
        shot = self._snapshot
        if mates:
            return [(m.name, m.address, [], []) for m in mates]
        if shot.step != self.step:
            return None
        return [] if shot.arrays is None else [("the trainer", self.address, [], [])]

    def _sync(
        self,
        member: PeerRecord,
        sources: list[Holder] | None,
        keeps: bool,
        at: tuple[int, int],
    ) -> None:
        begun = self.fleet.now()
        tries = [keeps, False] if keeps and sources is not None else [keeps]
        failed = ""
        for one in tries:
            digest, failed = self._synced(member, sources or [], keeps=one, at=at)
            if digest is None or self._take_in(member, digest, at):
                break
        key = member.name, member.incarnation
        with self._lock:
            was_given_up = key in self._given_up
            self._given_up.discard(key)
            if any(m.name == member.name for m in self.fleet.synced(member.stage)):
                self._late.pop(key, None)
                return
            if self.generation != at[0]:
                return
            late = not failed and (self.step != at[1] or self._is_summing)
            is_first = late and key not in self._late
            if late:
                self._late.setdefault(key, begun)
        if was_given_up or not late:
            self.fleet.pause(member)
        if is_first or (late and was_given_up):
            took = self.fleet.now() - begun
            why = (
                f"its download took {took:.1f} s, longer than a step and the wait for "
                "it; it is tried again. Give it a faster link, or longer steps"
            )
            self.tell("not synced", peer=member.name, why=why)

    def _take_in(self, member: PeerRecord, digest: str, at: tuple[int, int]) -> bool:
        """Checks the digest of a peer's state; returns False if it is wrong.

        A report that comes too late is not checked.
        """
        with self._lock:
            if (self.generation, self.step) != at or self._is_summing:
                return True  # Too late: the peer restarts with a later step.
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
        member: PeerRecord,
        sources: list[Holder],
        *,
        keeps: bool,
        at: tuple[int, int],
    ) -> tuple[str | None, str]:
        """Asks a peer to get the state of the step.

        Returns the state's digest and an empty text, or None and the reason of a
        failure. If the sources already have a later state, no peer is at fault.
        """
        question = Sync(
            run=self.run_id,
            generation=at[0],
            step=at[1],
            stage=member.stage,
            keeps=keeps,
            sources=sources,
        )
        begun = self.fleet.now()
        try:
            answer = self.caller.ask(
                member.address, question, seconds=self.settings.state_seconds
            )
        except UnansweredError as error:
            is_late = error.code in GONE_ON
            if is_late and (self.generation, self.step) != at:
                return None, ""
            self.tell("not synced", peer=member.name, why=str(error))
            if error.code == "shape":
                for mate in self.fleet.usable(member.stage):
                    if mate.name == error.blame:
                        self.fleet.failed(mate, 1.0, 0.0, ban=True)
            return None, str(error)
        seconds = self.fleet.now() - begun
        if sources and not keeps and seconds > 0:
            size = self.cut.state_bytes(member.stage)
            self.pace.bytes_per_second = size / seconds
        return answer.digest, ""

    # Snapshots.

    def _begin_snapshot(self) -> None:
        pull = SnapshotDownload()

        def take() -> None:
            try:
                self._take_snapshot(pull=pull)
            except BaseException as error:
                pull.error = error

        pull.thread = threading.Thread(target=take, daemon=True)
        self._pull = pull
        pull.thread.start()

    def _await_snapshot(self) -> None:
        """Waits for the snapshot, because peers drop a step's state with the next step.

        If the sending peer is lost, the snapshot is cancelled and stays due.
        """
        pull, self._pull = self._pull, None
        if pull is None or pull.thread is None:
            return
        while pull.thread.is_alive():
            pull.thread.join(PULL_LOOK_SECONDS)
            source = pull.source
            here = {(m.name, m.incarnation) for m in self.fleet.members()}
            if source is not None and (source.name, source.incarnation) not in here:
                with self._snapshot_lock:
                    pull.is_cancelled, self._owed = True, True
                return
        if pull.error is not None:
            raise pull.error

    def _end_snapshots(self) -> None:
        pull, self._pull = self._pull, None
        if pull is not None:
            with self._snapshot_lock:
                pull.is_cancelled = True

    def _take_snapshot(
        self, *, now: bool = False, pull: SnapshotDownload | None = None
    ) -> None:
        """Takes a snapshot of all stages if one is due or was missed."""
        every = self.settings.snapshot_every
        due = self.step % every == 0 or self.step == self.settings.steps
        if self._snapshot.step == self.step or not (due or now or self._owed):
            return
        pull = pull or SnapshotDownload()
        before, result = self._owed, self.snapshot(pull)
        if pull.is_cancelled:
            return
        self._owed = result is None
        if self._owed and not before:
            why = "no peer gave the state of a stage; it is asked for again"
            self.tell("not_saved", step=self.step, why=why)

    def snapshot(self, pull: SnapshotDownload) -> Snapshot | None:
        """Takes a snapshot of the current state of all stages.

        Args:
            pull: Record of the download, by which it may be cancelled.

        Returns:
            The snapshot; None if no peer gave a stage's state, or after a cancellation.
        """
        arrays, step = {}, self.step
        for stage in range(self.cut.stages):
            state = self._state_of(stage, pull)
            if state is None:
                return None
            arrays[stage] = state
        shot = Snapshot(step=step, arrays=arrays)
        with self._snapshot_lock:
            if pull.is_cancelled:
                return None
            with self._lock:
                self._snapshot = shot
                self._packed.clear()
            self._on_snapshot(shot)
        return shot

    def _state_of(self, stage: int, pull: SnapshotDownload) -> list[np.ndarray] | None:
        if self._snapshot.step == self.step and self._snapshot.arrays is not None:
            return self._snapshot.arrays[stage]
        for member in self.fleet.usable(stage):
            pull.source = member

            def ask(place: int, member: PeerRecord = member) -> StateChunk:
                question = FetchState(**self._now(), stage=stage, place=place)
                seconds = self.settings.state_seconds
                return self.caller.ask(member.address, question, seconds=seconds)

            try:
                return downloaded(ask, self.cut, stage, member.name)
            except UnansweredError as error:
                if pull.is_cancelled:
                    return None
                if error.code in GONE_ON:
                    continue  # The peer moves, or is downloading the state itself.
                self.fleet.failed(member, 1.0, 0.0, ban=True)
                self.tell("failed", peer=member.name, why=str(error))
        return None


def digests_of(snapshot: Snapshot) -> dict[int, str]:
    """Returns the digest of each stage's state in a snapshot."""
    arrays = snapshot.arrays or {}
    return {stage: digest_of(several) for stage, several in arrays.items()}


def given_leaves(leaves: Sequence[Any], asked: Batch) -> Tensors:
    """Returns the requested leaves of a micro-batch.

    Args:
        leaves: All leaves of the micro-batch.
        asked: Request of a peer.

    Raises:
        RefusedRequestError: There is no such leaf.
    """
    if any(not 0 <= place < len(leaves) for place in asked.places):
        raise RefusedRequestError(
            "stale", f"a batch has {len(leaves)} leaves, not {asked.places}"
        )
    return Tensors(arrays=tuple(leaves[place] for place in asked.places))
