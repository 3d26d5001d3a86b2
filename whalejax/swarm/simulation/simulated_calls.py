"""Calls of simulated peers, with their links and times."""

from __future__ import annotations

import abc
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from whalejax.swarm.churn import PeerLink
from whalejax.swarm.ledger import Attempt, Ledger, Phase, Verdict
from whalejax.swarm.peer_choice import BACKWARD_TASK, FORWARD_TASK, StageWiring
from whalejax.swarm.simulation.setting import Setting


DEADLINE_FACTOR: Final = 10.0  # ratio of a call's deadline to its predicted duration

Place = tuple[int, int]
"""Number of committed steps, and number of rollbacks."""


@dataclass(slots=True, kw_only=True)
class SimulatedCall:
    """A call without an answer yet.

    Attributes:
        attempt: Attempt in the ledger.
        trainer: Trainer that sent it.
        task: Work of the call, relative to a forward pass.
        sent: Time of sending.
        alone: Whether it is a recomputation that starts no further calls.
    """

    attempt: Attempt
    trainer: int
    task: float
    sent: float
    alone: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedDownload:
    """Download of the state by a peer.

    Attributes:
        place: Committed steps and rollbacks of the state.
        began: Time of the start.
        takes: Total seconds.
    """

    place: Place
    began: float
    takes: float

    @property
    def ends(self) -> float:
        """Time at which the download ends."""
        return self.began + self.takes


@dataclass(slots=True, kw_only=True, eq=False)
class SimulatedPeer:
    """A peer, from joining to its end.

    Attributes:
        name, incarnation, speed, link, stage: Fields of a live peer, unchanged.
        joined: Time at which it joined.
        is_serving: Whether it has the state of the step and receives calls.
        is_alive: Whether its process runs.
        is_leaving: Whether it leaves after the step.
        is_ready: Whether the programs of its stage are compiled.
        task: Number of the current compilation or download; 0 without one.
        coming: Current download, or None.
        late: Start time of its first download that ended too late, or negative.
        is_given_up: Whether the swarm no longer waits for it.
        pause_seconds: Seconds of its last pause after a failure.
        paused_until: End time of that pause.
        down_free, compute_free, up_free: Times at which its links and its processor are
            free.
        calls: Received calls, by number.
        queue_seconds: Integral of the number of waiting calls over the seconds since
            the last check.
        queue_since: Time up to which ``queue_seconds`` counts.
    """

    name: str
    incarnation: int
    speed: float
    link: PeerLink
    joined: float
    stage: int
    is_serving: bool = False
    is_alive: bool = True
    is_leaving: bool = False
    is_ready: bool = False
    task: int = 0
    coming: SimulatedDownload | None = None
    late: float = -1.0
    is_given_up: bool = False
    pause_seconds: float = 0.0
    paused_until: float = 0.0
    down_free: float = 0.0
    compute_free: float = 0.0
    up_free: float = 0.0
    calls: dict[int, SimulatedCall] = field(default_factory=dict)
    queue_seconds: float = 0.0
    queue_since: float = 0.0


class SimulatedCalls(abc.ABC):
    """The clock, and the calls of the current step.

    Attributes:
        setting: Settings of the simulation.
        now: Current time in seconds.
    """

    def __init__(self, setting: Setting) -> None:
        """Starts at time 0 without peers.

        Args:
            setting: Settings of the simulation.
        """
        self.setting, self.now = setting, 0.0
        self._count = len(setting.stages)
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order, self._numbers = itertools.count(), itertools.count(1)
        self._peers: dict[str, SimulatedPeer] = {}
        self._wirings = [
            [
                StageWiring(
                    seed=setting.seed + 1000 * trainer + stage,
                    initial_seconds=cost.backward_seconds / BACKWARD_TASK,
                )
                for stage, cost in enumerate(setting.stages)
            ]
            for trainer in range(setting.trainers)
        ]
        self._parked: list[deque[tuple[int, Phase, bool, tuple[str, ...]]]] = [
            deque() for _ in range(self._count)
        ]
        self._ledger = self._fresh_ledger(0)
        self._holders: dict[tuple[int, int, Phase], SimulatedPeer] = {}
        self._waiting: list[deque[int]] = [deque() for _ in range(setting.trainers)]
        self._under_way = [0] * setting.trainers
        self._serving = self._fewest = 0  # peers of all stages, and of the smallest
        self._busy: dict[str, float] = {}
        self._late = 0

    def _at(self, time: float, function: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (time, next(self._order), function, arguments))

    def _fresh_ledger(self, step: int) -> Ledger:
        return Ledger(
            step=step, stages=self._count, micro_batches=self.setting.micro_batches
        )

    @abc.abstractmethod
    def _sum_if_complete(self) -> None:
        """Sums the gradients of the step, if all are available."""

    def _begin_micro_batches(self) -> None:
        self._holders.clear()
        for trainer, waiting in enumerate(self._waiting):
            waiting.clear()
            waiting.extend(
                range(trainer, self.setting.micro_batches, self.setting.trainers)
            )
        self._under_way = [0] * self.setting.trainers
        for trainer in range(self.setting.trainers):
            self._begin_more(trainer)

    def _begin_more(self, trainer: int) -> None:
        limit = -(-self._in_flight() // self.setting.trainers)
        while self._waiting[trainer] and self._under_way[trainer] < limit:
            number = self._waiting[trainer].popleft()
            self._under_way[trainer] += 1
            # The last stage computes both passes in one call.
            only = self._count == 1
            self._call(0, number, Phase.BACKWARD if only else Phase.FORWARD)

    def _in_flight(self) -> int:
        return self.setting.in_flight or max(self._count, 2 * self._serving)

    def _send_parked(self, stage: int) -> None:
        parked, self._parked[stage] = self._parked[stage], deque()
        for number, phase, alone, avoid in parked:
            self._call(stage, number, phase, alone=alone, avoid=avoid)

    def _call(
        self,
        stage: int,
        number: int,
        phase: Phase,
        *,
        alone: bool = False,
        avoid: tuple[str, ...] = (),
    ) -> None:
        trainer = number % self.setting.trainers
        wiring = self._wirings[trainer][stage]
        task = FORWARD_TASK if phase is Phase.FORWARD else BACKWARD_TASK
        name = wiring.choose(self.now, task, avoid)
        if name is None:
            self._parked[stage].append((number, phase, alone, avoid))
            return
        peer = self._peers[name]
        call = SimulatedCall(
            attempt=self._ledger.begin(stage, number, phase, name, peer.incarnation),
            trainer=trainer,
            task=task,
            sent=self.now,
            alone=alone,
        )
        self._queue_changes(peer)
        call_number = next(self._numbers)
        peer.calls[call_number] = call
        if not peer.is_alive:
            self._at(self._deadline(call), self._timed_out, peer, call_number)
            return
        answered = self._computed_at(peer, call.attempt)
        if answered > self._deadline(call):
            self._at(self._deadline(call), self._timed_out, peer, call_number)
        self._at(answered, self._on_answer, peer, call_number)

    def _computed_at(self, peer: SimulatedPeer, attempt: Attempt) -> float:
        """Reserves links and processor for a call; returns the time of its answer."""
        cost = self.setting.stages[attempt.stage]
        if attempt.phase is Phase.FORWARD:
            seconds, received = cost.forward_seconds, cost.forward_bytes[0]
        else:
            seconds, received = cost.backward_seconds, cost.backward_bytes[0]
        latency = peer.link.latency_seconds
        asked = self.now + latency
        arrived, left = asked, received
        for source, size in self._sources(attempt):
            size = min(size, left)
            left -= size
            way = max(latency, source.link.latency_seconds)
            seconds_up = size / source.link.up_bytes_per_second
            # Transferred data use both links at the same time.
            source.up_free = max(asked + way, source.up_free) + seconds_up
            arrived = max(arrived, source.up_free + way)
        rate = peer.link.down_bytes_per_second
        peer.down_free = max(asked, peer.down_free) + received / rate
        arrived = max(arrived, peer.down_free)
        seconds /= peer.speed
        peer.compute_free = max(arrived, peer.compute_free) + seconds
        self._busy[peer.name] = self._busy.get(peer.name, 0.0) + seconds
        return peer.compute_free + latency

    def _sources(self, attempt: Attempt) -> Iterator[tuple[SimulatedPeer, int]]:
        """Yields the sources of a call's inputs, with their bytes.

        Inputs that no peer has, such as data, come from a trainer.
        """
        stages, stage = self.setting.stages, attempt.stage
        wanted = []
        if attempt.phase is Phase.BACKWARD and stage + 1 < self._count:
            size = stages[stage + 1].backward_bytes[1]
            wanted.append((stage + 1, Phase.BACKWARD, size))
        if stage > 0:
            wanted.append(
                (stage - 1, Phase.FORWARD, stages[stage - 1].forward_bytes[1])
            )
        for other, phase, size in wanted:
            holder = self._holders.get((other, attempt.number, phase))
            if holder is not None and holder.is_alive:
                yield holder, size

    def _deadline(self, call: SimulatedCall) -> float:
        cost = self.setting.stages[call.attempt.stage]
        link = self._peers[call.attempt.peer].link
        predicted = (
            max(cost.forward_seconds, cost.backward_seconds)
            + max(cost.forward_bytes[0], cost.backward_bytes[0])
            / link.down_bytes_per_second
            + max(cost.forward_bytes[1], cost.backward_bytes[1])
            / link.up_bytes_per_second
            + 2 * link.latency_seconds
        )
        waiting = self._in_flight() / max(1, self._fewest)
        return max(call.sent + DEADLINE_FACTOR * predicted * (1 + waiting), self.now)

    def _on_answer(self, peer: SimulatedPeer, number: int) -> None:
        if not peer.is_alive:
            return
        call = peer.calls.pop(number, None)
        if call is None:  # The call was abandoned.
            self._late += 1
            return
        self._queue_changes(peer, ended=1)
        attempt = call.attempt
        wiring = self._wirings[call.trainer][attempt.stage]
        wiring.completed(
            peer.name,
            call.task,
            self.now - call.sent,
            self.now,
            incarnation=peer.incarnation,
        )
        if self.setting.trainers > 1:
            wiring.reported(peer.name, len(peer.calls))
        if self._ledger.record_answer(attempt) is not Verdict.COUNTED:
            self._late += 1
            return
        self._holders[attempt.stage, attempt.number, attempt.phase] = peer
        if not call.alone:
            self._goes_on(attempt)
        self._sum_if_complete()

    def _goes_on(self, attempt: Attempt) -> None:
        stage, number = attempt.stage, attempt.number
        if attempt.phase is Phase.FORWARD:
            is_last = stage + 1 == self._count - 1
            phase = Phase.BACKWARD if is_last else Phase.FORWARD
            self._call(stage + 1, number, phase)
        elif stage > 0:
            self._call(stage - 1, number, Phase.BACKWARD)
        else:
            trainer = number % self.setting.trainers
            self._under_way[trainer] -= 1
            self._begin_more(trainer)

    def _timed_out(self, peer: SimulatedPeer, number: int) -> None:
        call = peer.calls.pop(number, None)
        if call is None:
            return
        self._queue_changes(peer, ended=1)
        attempt = call.attempt
        self._ledger.give_up(attempt)
        self._failed(peer, call, is_gone=not peer.is_alive)
        if not self._ledger.is_done(attempt.stage, attempt.number, attempt.phase):
            self._call(
                attempt.stage,
                attempt.number,
                attempt.phase,
                alone=call.alone,
                avoid=(peer.name,),
            )

    def _failed(
        self, peer: SimulatedPeer, call: SimulatedCall, *, is_gone: bool
    ) -> None:
        self._wirings[call.trainer][call.attempt.stage].failed(
            peer.name,
            self.now - call.sent,
            ban=is_gone,
            task=call.task,
            incarnation=peer.incarnation,
        )

    def _recompute(self, peer: SimulatedPeer) -> int:
        """Repeats a dead peer's work on others; returns how many gradients it lost."""
        calls, peer.calls = peer.calls, {}
        for call in calls.values():
            self._failed(peer, call, is_gone=True)
        alone = {
            (call.attempt.stage, call.attempt.number, call.attempt.phase): call.alone
            for call in calls.values()
        }
        lost = self._ledger.lost_with(peer.name, peer.incarnation)
        for task in lost:
            key = (task.stage, task.number, task.phase)
            self._call(
                task.stage,
                task.number,
                task.phase,
                alone=alone.get(key, True),
                avoid=(peer.name,),
            )
        done = [(t.stage, t.number, t.phase) for t in lost]
        return sum(key not in alone for key in done)

    def _queue_changes(self, peer: SimulatedPeer, ended: int = 0) -> None:
        waited = len(peer.calls) + ended
        peer.queue_seconds += waited * (self.now - peer.queue_since)
        peer.queue_since = self.now
