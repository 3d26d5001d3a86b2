"""Chooses the peer of a trainer's next call: interleaved weighted round robin.

SWARM (Ryabinin et al. 2023, section 3.2): each peer has a virtual time, the next call
goes to the smallest one, and a call adds the seconds that it is expected to take. Over
time each peer is given calls in proportion to its speed. One ``StageWiring`` is one
trainer's view of one stage; nothing in it reads a clock.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from whalejax.meshes.errors import WhaleError


FORWARD_TASK: Final = 1.0
BACKWARD_TASK: Final = 2.5  # of the paper's code: one backward, in forwards


@dataclass(slots=True, kw_only=True)
class _Peer:
    """State of a peer as a trainer knows it.

    Attributes:
        incarnation: Incarnation of the process; a restarted peer has a higher one.
        expires: When its announcement ends.
        virtual_time: Seconds of work given to it, from a common origin.
        entry: Number of its newest entry in the heap; older ones are skipped.
        weighted_seconds: Moving average of seconds a task, not yet corrected.
        weight: The average's share of measurements; 1 after many.
        guessed_tasks: Tasks charged before anything was measured.
        guessed_seconds: Estimated seconds of its calls under way.
        in_flight: Calls of this trainer that have not ended.
        queued_by_others: Calls of other trainers that wait at it.
        answered: When its last answer came.
        is_banned: Nothing is sent to it until it announces itself anew.
    """

    incarnation: int
    expires: float
    virtual_time: float
    entry: int = 0
    weighted_seconds: float = 0.0
    weight: float = 0.0
    guessed_tasks: float = 0.0
    guessed_seconds: float = 0.0
    in_flight: int = 0
    queued_by_others: int = 0
    answered: float = -math.inf
    is_banned: bool = False


class StageWiring:
    """The peers of one stage, as one trainer sees them.

    Example:
        >>> wiring = StageWiring(seed=0)
        >>> wiring.announce("a", 1, now=0.0, expires=60.0)
        >>> wiring.choose(now=0.0, task=1.0)
        'a'
        >>> wiring.completed("a", 1.0, seconds=0.5, now=0.5)
        >>> wiring.seconds_per_task("a")
        0.5
    """

    def __init__(
        self, *, seed: int, alpha: float = 0.1, initial_seconds: float = 1.0
    ) -> None:
        """Starts without peers.

        Args:
            seed: Seed of the random order of peers with equal virtual time.
            alpha: Weight of the newest measurement in a peer's average.
            initial_seconds: Expected of a task while no peer has been measured.
        """
        if not 0 < alpha <= 1 or not initial_seconds > 0:
            raise WhaleError(
                f"wiring: alpha is {alpha} and initial_seconds is {initial_seconds}; "
                "alpha must be above 0 and at most 1, initial_seconds above 0"
            )
        self._random = random.Random(seed)
        self._alpha = alpha
        self._initial_seconds = initial_seconds
        self._peers: dict[str, _Peer] = {}
        self._heap: list[tuple[float, float, str, int]] = []
        self._entries = 0
        self._newest_virtual_time = 0.0

    def announce(self, peer: str, incarnation: int, now: float, expires: float) -> None:
        """Takes note of a peer's announcement; of what is known already, nothing.

        A newcomer enters at the smallest virtual time, so it is tried at once and has
        neither debt nor credit. A ban ends with a higher incarnation, or with an
        announcement that expires later than the one it was banned under: the registry
        may still show the old one.

        Args:
            peer: Its name.
            incarnation: Incarnation of its process.
            now: Seconds.
            expires: When the announcement ends, in seconds of the same clock.
        """
        if expires <= now:
            return
        known = self._peers.get(peer)
        if known is not None and known.expires <= now:
            del self._peers[peer]
            known = None
        if known is None or incarnation > known.incarnation:
            self._peers[peer] = _Peer(
                incarnation=incarnation,
                expires=expires,
                virtual_time=self._smallest(now, without=peer),
            )
            self._push(peer)
        elif incarnation == known.incarnation and expires > known.expires:
            known.expires = expires
            if known.is_banned:
                known.is_banned = False
                smallest = self._smallest(now, without=peer)
                known.virtual_time = max(known.virtual_time, smallest)
                self._push(peer)

    def reported(self, peer: str, queue_length: int) -> None:
        """Takes note of how many calls a peer says wait at it, those in work included.

        This trainer's own calls are in its virtual time already; what others queue
        there is added to its key.

        Args:
            peer: Its name.
            queue_length: Number of waiting calls of all trainers.
        """
        known = self._peers.get(peer)
        if known is None:
            return
        others = max(0, queue_length - known.in_flight)
        if others != known.queued_by_others:
            known.queued_by_others = others
            if not known.is_banned:
                self._push(peer)

    def choose(
        self, now: float, task: float = FORWARD_TASK, avoid: Collection[str] = ()
    ) -> str | None:
        """The peer for the next call, charged with it; none where there is none.

        Args:
            now: Seconds.
            task: Size of the call, in forwards of a micro-batch.
            avoid: Peers that are taken only where there is no other, such as those
                that have just failed at this very call.
        """
        kept: list[tuple[float, float, str, int]] = []
        chosen = None
        while self._heap and chosen is None:
            entry = heapq.heappop(self._heap)
            if not self._is_current(entry, now):
                continue
            if entry[2] in avoid:
                kept.append(entry)
            else:
                chosen = entry[2]
        if chosen is None and kept:
            chosen = kept.pop(0)[2]
        for entry in kept:
            heapq.heappush(self._heap, entry)
        if chosen is None:
            return None
        known = self._peers[chosen]
        self._newest_virtual_time = max(self._newest_virtual_time, known.virtual_time)
        expected = self._expected(known) * task
        if known.weight == 0:
            known.guessed_tasks += task
            known.guessed_seconds += expected
        known.virtual_time += expected
        known.in_flight += 1
        self._push(chosen)
        return chosen

    def completed(
        self,
        peer: str,
        task: float,
        seconds: float,
        now: float,
        warm: bool = True,
        *,
        incarnation: int | None = None,
    ) -> None:
        """Takes note of a call that was answered.

        What counts is the time since the peer's last answer, if the call was sent
        before it: waiting behind this trainer's own calls says how many they were, not
        how fast the peer is, and averages of it swing when a step begins. Waiting
        behind the calls of others is counted.

        Args:
            peer: Its name.
            task: Size of the call, as it was chosen for.
            seconds: From sending to the answer, queue and wire included.
            now: When the answer came, in seconds.
            warm: Whether the time counts; a call that compiled, or that waited for one
                that did, says nothing about the next.
            incarnation: Incarnation that was called; calls to an earlier one are
                ignored.
        """
        known = self._current_peer(peer, incarnation)
        if known is None:
            return
        known.in_flight = max(0, known.in_flight - 1)
        spent = min(seconds, now - known.answered)
        known.answered = max(now, known.answered)
        if warm:
            self._measured(peer, known, max(0.0, spent) / task)

    def failed(
        self,
        peer: str,
        seconds: float,
        now: float,
        ban: bool,
        *,
        task: float = FORWARD_TASK,
        incarnation: int | None = None,
    ) -> None:
        """Takes note of a call that failed; it is charged what it has cost.

        Args:
            peer: Its name.
            seconds: Seconds that the caller lost: of a call that timed out, its
                deadline.
            now: Seconds.
            ban: Nothing more is sent to it until it announces itself anew.
            task: Size of the call.
            incarnation: Incarnation that was called; a restarted peer is not to blame
                for what its predecessor did not answer.
        """
        known = self._current_peer(peer, incarnation)
        if known is None:
            return
        known.in_flight = max(0, known.in_flight - 1)
        expected = self._expected(known) * task
        # Never charge less than was expected: a refused connection ends at once, and
        # would make the peer look fast.
        if seconds > expected:
            if known.weight > 0:
                known.virtual_time += seconds - expected
            self._measured(peer, known, seconds / task)
        known.is_banned = known.is_banned or ban
        if not known.is_banned:
            self._push(peer)

    def leave(self, peer: str) -> None:
        """A peer has left the stage; a newer announcement brings it back."""
        known = self._peers.get(peer)
        if known is not None:
            known.is_banned = True

    def peers(self, now: float) -> tuple[str, ...]:
        """The peers that may be chosen now, by name."""
        return tuple(sorted(self._live(now)))

    def incarnation(self, peer: str) -> int | None:
        """The newest incarnation that was announced; none of an unknown peer."""
        known = self._peers.get(peer)
        return None if known is None else known.incarnation

    def seconds_per_task(self, peer: str) -> float | None:
        """A peer's average, queue and wire included; none before a measurement."""
        known = self._peers.get(peer)
        if known is None or known.weight == 0:
            return None
        return known.weighted_seconds / known.weight

    def in_flight(self, peer: str) -> int:
        """Calls of this trainer at a peer that have not ended."""
        known = self._peers.get(peer)
        return 0 if known is None else known.in_flight

    def _current_peer(self, peer: str, incarnation: int | None) -> _Peer | None:
        known = self._peers.get(peer)
        if known is None or incarnation in (None, known.incarnation):
            return known
        return None

    def _measured(self, peer: str, known: _Peer, seconds: float) -> None:
        known.weighted_seconds += self._alpha * (seconds - known.weighted_seconds)
        known.weight += self._alpha * (1 - known.weight)
        if known.guessed_tasks:
            real = seconds * known.guessed_tasks
            known.virtual_time += real - known.guessed_seconds
            known.guessed_tasks = known.guessed_seconds = 0.0
            if not known.is_banned:
                self._push(peer)

    def _expected(self, known: _Peer) -> float:
        """Seconds of a task at a peer; of one not measured, its mates' mean."""
        if known.weight > 0:
            return known.weighted_seconds / known.weight
        measured = [
            mate.weighted_seconds / mate.weight
            for mate in self._peers.values()
            if mate.weight > 0
        ]
        return sum(measured) / len(measured) if measured else self._initial_seconds

    def _live(self, now: float) -> dict[str, _Peer]:
        for peer in [p for p, k in self._peers.items() if k.expires <= now]:
            del self._peers[peer]
        return {p: k for p, k in self._peers.items() if not k.is_banned}

    def _smallest(self, now: float, *, without: str) -> float:
        times = [k.virtual_time for p, k in self._live(now).items() if p != without]
        return min(times, default=self._newest_virtual_time)

    def _push(self, peer: str) -> None:
        known = self._peers[peer]
        self._entries += 1
        known.entry = self._entries
        key = known.virtual_time + known.queued_by_others * self._expected(known)
        heapq.heappush(self._heap, (key, self._random.random(), peer, known.entry))

    def _is_current(self, entry: tuple[float, float, str, int], now: float) -> bool:
        known = self._peers.get(entry[2])
        if known is None or known.is_banned or known.entry != entry[3]:
            return False
        if known.expires <= now:
            del self._peers[entry[2]]
            return False
        return True
