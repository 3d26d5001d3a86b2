"""The peers as a trainer sees them: who may be asked, and what asking one has shown.

The wiring decides who is next; this keeps it in step with the registry, and knows which
peers hold the state of the step that is under way, which links between peers have
failed, and which peers are to be left alone for a while.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from typing import Protocol

from whalejax.swarm.deadlines import MOST_PAUSE_SECONDS, PAUSE_SECONDS
from whalejax.swarm.wiring import StageWiring
from whalejax.swarm_runtime.registry import PeerRecord


class PeerDirectory(Protocol):
    """Knows who has announced itself; a registry, or what one has told."""

    def members(self, now: float) -> list[PeerRecord]:
        """Returns the peers whose leases hold."""
        ...


class Fleet:
    """Members by stage, with the wiring of each stage; safe to use from threads."""

    def __init__(
        self,
        registry: PeerDirectory,
        stages: int,
        *,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts without peers that may be asked.

        Args:
            registry: Registry of the peers.
            stages: Number of stages of the model.
            seed: Seed of the order among equal peers.
            clock: Gives seconds, the same as the registry is given.
        """
        self._registry, self.stages, self._clock = registry, stages, clock
        self._lock = threading.RLock()
        self._wirings = [StageWiring(seed=seed + s) for s in range(stages)]
        self._synced: dict[str, tuple[int, int]] = {}
        self._pauses: dict[tuple[str, int], tuple[float, float]] = {}
        self._partners: dict[str, set[str]] = {}
        self._delays: set[tuple[str, str]] = set()
        self._silent: dict[tuple[str, int], float] = {}

    def now(self) -> float:
        """Seconds."""
        return self._clock()

    def members(self) -> list[PeerRecord]:
        """All whose leases hold."""
        return self._registry.members(self._clock())

    def synced(self, stage: int | None = None) -> list[PeerRecord]:
        """Returns the peers that hold the state of the step, of a stage or of all."""
        with self._lock:
            return [
                m
                for m in self.members()
                if self._synced.get(m.name) == (m.stage, m.incarnation)
                and stage in (None, m.stage)
            ]

    def has(self, member: PeerRecord) -> bool:
        """Whether a peer holds the state and may be asked, in the same stage."""
        return any(
            (m.name, m.incarnation) == (member.name, member.incarnation)
            for m in self.usable(member.stage)
        )

    def usable(self, stage: int | None = None) -> list[PeerRecord]:
        """Returns the synced peers that have not failed since they last were heard
        from.
        """
        with self._lock:
            self._refresh()
            now = self._clock()
            open_ = {p for wiring in self._wirings for p in wiring.peers(now)}
            return [m for m in self.synced(stage) if m.name in open_]

    def add(self, member: PeerRecord) -> None:
        """A peer holds the state of the step from now on."""
        with self._lock:
            self._synced[member.name] = member.stage, member.incarnation

    def drop(self, name: str) -> None:
        """A peer does not hold it any more."""
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
        """The peer for the next call of a stage; none where there is none.

        Args:
            stage: Number of the stage.
            task: Size of the call, in forwards.
            avoid: Peers that are taken only where there is no other.
        """
        with self._lock:
            self._refresh()
            name = self._wirings[stage].choose(self._clock(), task, avoid)
            result = {m.name: m for m in self.synced(stage)}
            return None if name is None else result.get(name)

    def completed(self, member: PeerRecord, task: float, seconds: float) -> None:
        """A call was answered; see ``StageWiring.completed``."""
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
        """A call failed; see ``StageWiring.failed``."""
        with self._lock:
            self._refresh()  # It may be one that was never asked.
            if ban:
                newest = [m.expires for m in self.members() if m.name == member.name]
                key = member.name, member.incarnation
                self._silent[key] = max(newest, default=member.expires)
            self._wirings[member.stage].failed(
                member.name,
                seconds,
                self._clock(),
                ban,
                task=task,
                incarnation=member.incarnation,
            )

    def seconds_per_task(self, member: PeerRecord) -> float | None:
        """Measured seconds of a forward at a peer, queue and wire included."""
        with self._lock:
            return self._wirings[member.stage].seconds_per_task(member.name)

    def _refresh(self) -> None:
        """Tells the wiring of all that have announced themselves."""
        now = self._clock()
        for m in self.synced():
            self._wirings[m.stage].announce(m.name, m.incarnation, now, m.expires)
            self._wirings[m.stage].reported(m.name, m.queue)

    # Links between peers.

    def culprit(self, reporter: PeerRecord, blamed: PeerRecord) -> PeerRecord | None:
        """Returns the peer at fault where one cannot reach another that answers here.

        Whoever had failed transfers with several others; of two that had none before,
        the one that reports it, because the other's process is known to answer. A peer
        that alone serves its stage is spared where the other does not.

        Args:
            reporter: Could not reach the other.
            blamed: The other.

        Returns:
            The one to be dropped; none where both are needed.
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
        """Whether one peer waits too long for another for the first time."""
        pair = reporter.name, blamed.name
        with self._lock:
            known = pair in self._delays
            self._delays.add(pair)
            return not known

    def substitutes(self, stage: int, names: Collection[str]) -> list[PeerRecord]:
        """Returns the peers that can serve a stage in place of others, also
        by a move.
        """
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

    # Peers to be left alone.

    def pause(self, member: PeerRecord, least: float = PAUSE_SECONDS) -> None:
        """A peer failed: it is not given the state for a while, longer each time.

        Args:
            member: The peer.
            least: Seconds of the first while.
        """
        key, now = (member.name, member.incarnation), self._clock()
        with self._lock:
            _, before = self._pauses.get(key, (now, 0.0))
            seconds = min(max(2 * before, least), MOST_PAUSE_SECONDS)
            self._pauses[key] = now + seconds, seconds

    def is_paused(self, member: PeerRecord) -> bool:
        """Whether it is left alone still, or has not been heard of since it failed."""
        key = member.name, member.incarnation
        with self._lock:
            until, _ = self._pauses.get(key, (-math.inf, 0.0))
            silent = member.expires <= self._silent.get(key, -math.inf)
            return silent or self._clock() < until

    def end_pause(self, member: PeerRecord) -> None:
        """A peer has done well: its next failure is its first."""
        with self._lock:
            self._pauses.pop((member.name, member.incarnation), None)
            self._partners.pop(member.name, None)
