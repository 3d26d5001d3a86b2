"""Chooses the peer of a trainer's next call: interleaved weighted round robin.

The rule is SWARM's (Ryabinin et al. 2023, section 3.2). Each peer has a virtual time.
The next call goes to the peer with the smallest virtual time, which then grows by the
call's expected seconds. So each peer gets calls in proportion to its speed. A
``StageWiring`` has one trainer's view of one stage, and reads no clock.
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
BACKWARD_TASK: Final = 2.5  # forward passes, as in the paper's code


@dataclass(slots=True, kw_only=True)
class _Peer:
    """State of a peer from a trainer's view.

    Attributes:
        incarnation: Incarnation of its process, as last announced.
        expires: Time at which its announcement ends.
        virtual_time: Seconds of assigned work, from a common origin.
        entry: Number of its newest entry in the heap; older entries are skipped.
        weighted_seconds: Moving average of the seconds per task, times ``weight``.
        weight: Total weight of the measurements in the average; it approaches 1.
        guessed_tasks: Tasks charged before the first measurement.
        guessed_seconds: Seconds charged for ``guessed_tasks``.
        in_flight: Pending calls of this trainer.
        queued_by_others: Calls of other trainers that wait or run.
        answered: Time of its last answer.
        is_banned: Whether it gets no calls until it announces itself again.
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
    """The peers of one stage, from one trainer's view.

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
            alpha: Weight of the latest measurement in a peer's average.
            initial_seconds: Expected seconds of a task before the first measurement.
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
        """Records a peer's announcement, unless it is known or has expired.

        A joining peer gets the smallest virtual time, so it soon gets a call. A ban
        ends with a higher incarnation or a later expiry, because the registry may still
        show the announcement from before the ban.

        Args:
            peer: Name of the peer.
            incarnation: Incarnation of its process.
            now: Current time in seconds.
            expires: End of the announcement, in seconds of the same clock.
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
        """Records the number of calls that a peer reports as waiting or running.

        The peer's virtual time already includes this trainer's calls. When peers are
        compared, the expected seconds of other trainers' calls are added.

        Args:
            peer: Name of the peer.
            queue_length: Number of waiting and running calls of all trainers.
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
        """Returns the peer for the next call, and charges it; None if there is no peer.

        Args:
            now: Current time in seconds.
            task: Work of the call, relative to a forward pass of a micro-batch.
            avoid: Peers to choose only if there is no other, such as peers that just
                failed the call.
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
        *,
        incarnation: int | None = None,
    ) -> None:
        """Records an answered call.

        If the call was sent before the peer's last answer, only the time since that
        answer counts. A wait behind this trainer's own calls depends on their number
        and not on the peer's speed, so it does not count. A wait behind other trainers'
        calls counts.

        Args:
            peer: Name of the peer.
            task: Work of the call, as passed to ``choose``.
            seconds: Seconds from sending to the answer, including queue and wire.
            now: Time of the answer, in seconds.
            incarnation: Called incarnation; calls to an earlier one are ignored.
        """
        known = self._current_peer(peer, incarnation)
        if known is None:
            return
        known.in_flight = max(0, known.in_flight - 1)
        spent = min(seconds, now - known.answered)
        known.answered = max(now, known.answered)
        self._measured(peer, known, max(0.0, spent) / task)

    def failed(
        self,
        peer: str,
        seconds: float,
        *,
        ban: bool,
        task: float = FORWARD_TASK,
        incarnation: int | None = None,
    ) -> None:
        """Records a failed call, and charges its cost.

        Args:
            peer: Name of the peer.
            seconds: Seconds that the caller lost; for a timeout, the deadline.
            ban: Whether the peer gets no calls until it announces itself again.
            task: Work of the call.
            incarnation: Called incarnation; failures of an earlier one do not count.
        """
        known = self._current_peer(peer, incarnation)
        if known is None:
            return
        known.in_flight = max(0, known.in_flight - 1)
        expected = self._expected(known) * task
        # A refused connection fails fast. Charge the expected time, or the peer would
        # look fast.
        if seconds > expected:
            if known.weight > 0:
                known.virtual_time += seconds - expected
            self._measured(peer, known, seconds / task)
        known.is_banned = known.is_banned or ban
        if not known.is_banned:
            self._push(peer)

    def leave(self, peer: str) -> None:
        """Removes a peer from the stage until a later announcement."""
        known = self._peers.get(peer)
        if known is not None:
            known.is_banned = True

    def peers(self, now: float) -> tuple[str, ...]:
        """Returns the names of the peers that may be chosen now."""
        return tuple(sorted(self._live(now)))

    def incarnation(self, peer: str) -> int | None:
        """Returns the latest announced incarnation; None for an unknown peer."""
        known = self._peers.get(peer)
        return None if known is None else known.incarnation

    def seconds_per_task(self, peer: str) -> float | None:
        """Returns a peer's average, with queue and wire; None before a measurement."""
        known = self._peers.get(peer)
        if known is None or known.weight == 0:
            return None
        return known.weighted_seconds / known.weight

    def in_flight(self, peer: str) -> int:
        """Returns the number of this trainer's pending calls at a peer."""
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
        """Returns the expected seconds of a task at a peer.

        An unmeasured peer gets the mean of the measured ones, or ``initial_seconds``.
        """
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
