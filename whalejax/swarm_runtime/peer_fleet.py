"""A trainer's records of the peers: who has the state, who is usable, and how fast.

The wiring chooses the peer of each call. This module gives it the peers that the
registry knows. It also records which peers have the state of the current step, which
links between peers have failed, and which peers are paused.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection

from whalejax.swarm.deadlines import MOST_PAUSE_SECONDS, PAUSE_SECONDS
from whalejax.swarm.peer_choice import StageWiring
from whalejax.swarm_runtime.registry import PeerRecord


class Fleet:
    """Peers by stage, with the wiring of each stage; thread-safe."""

    def __init__(
        self,
        announced: Callable[[float], list[PeerRecord]],
        stages: int,
        *,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts without usable peers.

        Args:
            announced: Function from a time to the peers with valid leases.
            stages: Number of stages of the model.
            seed: Seed of the order among equal peers.
            clock: Clock in seconds, the same as the registry's.
        """
        self._announced, self.stages, self._clock = announced, stages, clock
        self._lock = threading.RLock()
        self._wirings = [StageWiring(seed=seed + s) for s in range(stages)]
        self._synced: dict[str, tuple[int, int]] = {}
        self._pauses: dict[tuple[str, int], tuple[float, float]] = {}
        self._partners: dict[str, set[str]] = {}
        self._delays: set[tuple[str, str]] = set()
        self._silent: dict[tuple[str, int], float] = {}

    def now(self) -> float:
        """Returns the current time in seconds."""
        return self._clock()

    def members(self) -> list[PeerRecord]:
        """Returns all peers with valid leases."""
        return self._announced(self._clock())

    def synced(self, stage: int | None = None) -> list[PeerRecord]:
        """Returns the peers of a stage, or of all, that have the state of the step."""
        with self._lock:
            return [
                m
                for m in self.members()
                if self._synced.get(m.name) == (m.stage, m.incarnation)
                and stage in (None, m.stage)
            ]

    def has(self, member: PeerRecord) -> bool:
        """Returns whether a peer still has the state of its stage and is usable."""
        return any(
            (m.name, m.incarnation) == (member.name, member.incarnation)
            for m in self.usable(member.stage)
        )

    def usable(self, stage: int | None = None) -> list[PeerRecord]:
        """Returns the synced peers that have not failed since they were last seen."""
        with self._lock:
            self._refresh()
            now = self._clock()
            open_ = {p for wiring in self._wirings for p in wiring.peers(now)}
            return [m for m in self.synced(stage) if m.name in open_]

    def add(self, member: PeerRecord) -> None:
        """Records that a peer has the state of the step."""
        with self._lock:
            self._synced[member.name] = member.stage, member.incarnation

    def drop(self, name: str) -> None:
        """Records that a peer no longer has the state."""
        with self._lock:
            self._synced.pop(name, None)
            for wiring in self._wirings:
                wiring.leave(name)

    def drop_all(self) -> None:
        """Drops every peer."""
        with self._lock:
            for name in [*self._synced]:
                self.drop(name)

    def choose(
        self, stage: int, task: float, avoid: Collection[str] = ()
    ) -> PeerRecord | None:
        """Returns the peer for the next call of a stage; None if there is no peer.

        Args:
            stage: Number of the stage.
            task: Work of the call, relative to a forward call.
            avoid: Peers to choose only if there is no other.
        """
        with self._lock:
            self._refresh()
            name = self._wirings[stage].choose(self._clock(), task, avoid)
            result = {m.name: m for m in self.synced(stage)}
            return None if name is None else result.get(name)

    def completed(self, member: PeerRecord, task: float, seconds: float) -> None:
        """Records an answered call; see ``StageWiring.completed``."""
        with self._lock:
            self._wirings[member.stage].completed(
                member.name,
                task,
                seconds,
                self._clock(),
                incarnation=member.incarnation,
            )

    def failed(
        self, member: PeerRecord, task: float, seconds: float, *, ban: bool
    ) -> None:
        """Records a failed call; see ``StageWiring.failed``."""
        with self._lock:
            self._refresh()  # It may never have been called.
            if ban:
                newest = [m.expires for m in self.members() if m.name == member.name]
                key = member.name, member.incarnation
                self._silent[key] = max(newest, default=member.expires)
            self._wirings[member.stage].failed(
                member.name,
                seconds,
                ban=ban,
                task=task,
                incarnation=member.incarnation,
            )

    def seconds_per_task(self, member: PeerRecord) -> float | None:
        """Returns the measured seconds of a forward call at a peer, or None.

        They include the queue and the transfer.
        """
        with self._lock:
            return self._wirings[member.stage].seconds_per_task(member.name)

    def _refresh(self) -> None:
        now = self._clock()
        for m in self.synced():
            self._wirings[m.stage].announce(m.name, m.incarnation, now, m.expires)
            self._wirings[m.stage].reported(m.name, m.queue)

    # Links between peers.

    def culprit(self, reporter: PeerRecord, blamed: PeerRecord) -> PeerRecord | None:
        """Returns the peer at fault if one cannot reach another that answers pings.

        A peer that is the only one of its stage is never at fault. Of two others, it is
        the one whose transfers failed with more partners. In a tie, it is the reporter,
        because the blamed peer answers pings.

        Args:
            reporter: Peer that could not reach the other.
            blamed: The other peer.

        Returns:
            Peer to drop; None if both are needed.
        """
        with self._lock:
            for one, other in ((reporter, blamed), (blamed, reporter)):
                self._partners.setdefault(one.name, set()).add(other.name)
            counts = [len(self._partners[m.name]) for m in (reporter, blamed)]
            alone = [
                all(mate.name == m.name for mate in self.usable(m.stage))
                for m in (reporter, blamed)
            ]
            if all(alone):
                return None
            if any(alone):
                return blamed if alone[0] else reporter
            return blamed if counts[1] > counts[0] else reporter

    def is_first_delay(self, reporter: PeerRecord, blamed: PeerRecord) -> bool:
        """Records that a peer waited too long for another; returns if it is the first
        time.
        """
        pair = reporter.name, blamed.name
        with self._lock:
            known = pair in self._delays
            self._delays.add(pair)
            return not known

    def substitutes(self, stage: int, names: Collection[str]) -> list[PeerRecord]:
        """Returns peers that can replace the named peers of a stage, or move there."""
        substitutes = [
            m for m in self.members() if m.name not in names and not m.leaving
        ]
        substitutes = [m for m in substitutes if not self.is_paused(m)]
        count = Counter(m.stage for m in substitutes)
        return [
            m
            for m in substitutes
            if m.stage == stage or (m.ready and count[m.stage] > 1)
        ]

    # Paused peers.

    def pause(self, member: PeerRecord, least: float = PAUSE_SECONDS) -> None:
        """Records a failure, after which a peer gets no state for a while.

        Each pause is longer than the one before.

        Args:
            member: Peer that failed.
            least: Seconds of the first pause.
        """
        key, now = (member.name, member.incarnation), self._clock()
        with self._lock:
            _, before = self._pauses.get(key, (now, 0.0))
            seconds = min(max(2 * before, least), MOST_PAUSE_SECONDS)
            self._pauses[key] = now + seconds, seconds

    def is_paused(self, member: PeerRecord) -> bool:
        """Returns whether a peer is paused, or has not been seen since it failed."""
        key = member.name, member.incarnation
        with self._lock:
            until, _ = self._pauses.get(key, (-math.inf, 0.0))
            silent = member.expires <= self._silent.get(key, -math.inf)
            return silent or self._clock() < until

    def end_pause(self, member: PeerRecord) -> None:
        """Ends a peer's pause after a success; its next pause is short again."""
        with self._lock:
            self._pauses.pop((member.name, member.incarnation), None)
            self._partners.pop(member.name, None)
