"""A swarm on a virtual clock: the wiring, ledger and rebalancing of live runs.

Peers compute one call after the other. Each takes what a call needs from who made it,
over the links of both. Trainers choose peers by ``StageWiring``, count by ``Ledger``
and have peers moved by ``Rebalancer``. Time is a number that jumps from event to event,
so hundreds of peers and hours of churn take seconds. A call of which start and end are
known is one event.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from whalejax.meshes.errors import Problems, WhaleError
from whalejax.planner.swarm_data import sum_bytes
from whalejax.swarm.churn import ChurnEvent, Happening, PeerLink
from whalejax.swarm.ledger import Attempt, Ledger, Phase, Verdict, check_partition
from whalejax.swarm.rebalancing import (
    MoveCost,
    PeerLoad,
    Rebalancer,
    Rule,
    best_stages,
    newcomer_stage,
    optimum_move,
    pipeline_speed,
)
from whalejax.swarm.wiring import BACKWARD_TASK, FORWARD_TASK, StageWiring


if TYPE_CHECKING:
    from whalejax.display.swarms import SimulatedChart


DEADLINE_FACTOR: Final = 10.0  # of a call, over what it is predicted to take


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """What one micro-batch and one step cost in a stage, on a peer of speed 1.

    Attributes:
        forward_seconds: of a forward; 0 in the last stage, where one call does both.
        backward_seconds: of a backward, its recomputed forward included.
        forward_bytes: received and sent by a forward.
        backward_bytes: received and sent by a backward.
        state_bytes: parameters and optimizer state, which a newcomer downloads.
        gradient_bytes: that peers of the stage add up once a step, as sent.
        update_seconds: of the optimizer.
    """

    forward_seconds: float
    backward_seconds: float
    forward_bytes: tuple[int, int] = (0, 0)
    backward_bytes: tuple[int, int] = (0, 0)
    state_bytes: int = 0
    gradient_bytes: int = 0
    update_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is simulated, beside the trace.

    Attributes:
        stages: in order.
        micro_batches: of a step, over all trainers.
        in_flight: micro-batches under way at once, over all trainers; two for each
            peer that serves where it is 0.
        trainers: that share the micro-batches; each has wirings of its own.
        rule: of rebalancing.
        period: seconds from one look to the next.
        oracle: peers are placed at their best after each change, at once and free of
            charge, and newcomers need no download: what rebalancing is held against.
        compile_seconds: of a newcomer, before its first call.
        notice_seconds: from a death that breaks connections until trainers know.
        forget_seconds: after which a silent peer's announcement has expired.
        threshold: gain below which nobody moves, as a part of the speed.
        delayed_updates: gradients of a step are added up and applied while the next
            step is computed; a step waits for the update before the last one. A peer
            that dies meanwhile costs no more than one that dies in between.
        seed: of the wirings.
    """

    stages: tuple[StageCost, ...]
    micro_batches: int
    in_flight: int = 0
    trainers: int = 1
    rule: Rule = Rule.OPTIMUM
    period: float = 60.0
    oracle: bool = False
    compile_seconds: float = 0.0
    notice_seconds: float = 0.01
    forget_seconds: float = 60.0
    threshold: float = 0.02
    delayed_updates: bool = False
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """What came of it.

    Attributes:
        seconds: simulated.
        micro_batches: of committed steps and of the step that was under way, counted
            once each.
        step_seconds: of each committed step.
        busy_seconds: of each peer, computing.
        present_seconds: of each peer, from joining to its end.
        max_flow: micro-batches that the best placement of the peers that were there
            could have computed, without sums, fills or links shared by others.
        changes: joins, leaves and deaths after the start.
        moves: of peers from stage to stage.
        emptied_by_moves: moves that left a stage without peers; 0 unless it is broken.
        empty_seconds: during which some stage had nobody.
        recomputed: gradients that were computed again because their holder was lost.
        late: answers that came after they had been given up.
        timeline: (seconds, micro-batches done by then), one for each commit.
    """

    seconds: float
    micro_batches: int
    step_seconds: tuple[float, ...]
    busy_seconds: dict[str, float]
    present_seconds: dict[str, float]
    max_flow: float
    changes: int
    moves: int
    emptied_by_moves: int
    empty_seconds: float
    recomputed: int
    late: int
    timeline: tuple[tuple[float, int], ...]

    @property
    def micro_batches_per_second(self) -> float:
        """Throughput."""
        return self.micro_batches / self.seconds if self.seconds else 0.0

    @property
    def utilization(self) -> float:
        """Part of the time that peers computed."""
        present = math.fsum(self.present_seconds.values())
        return math.fsum(self.busy_seconds.values()) / present if present else 0.0

    @property
    def of_max_flow(self) -> float:
        """Throughput as a part of the best placement's."""
        return self.micro_batches / self.max_flow if self.max_flow else 0.0

    def __str__(self) -> str:
        steps = len(self.step_seconds)
        mean = math.fsum(self.step_seconds) / steps if steps else math.nan
        return "\n".join(
            [
                f"{self.seconds:,.0f} s simulated: {self.micro_batches:,} "
                f"micro-batches, {self.micro_batches_per_second:.3g} a second",
                f"{steps} steps of {mean:.3g} s on average",
                f"peers compute {self.utilization:.0%} of the time; throughput is "
                f"{self.of_max_flow:.0%} of what the best placement allows",
                f"{self.changes} peers came or went, {self.moves} moved to another "
                f"stage; for {self.empty_seconds:,.0f} s some stage had no peer",
                f"{self.recomputed} gradients were computed again, {self.late} answers "
                "came late",
            ]
        )

    def chart(self) -> SimulatedChart:
        """Micro-batches of committed steps over time.

        Returns:
            What a notebook draws and ``print`` says; ``save`` writes it to a file.
        """
        from whalejax.display.swarms import SimulatedChart

        return SimulatedChart(
            str(self), self.seconds, self.timeline, self.empty_seconds
        )

    def _repr_mimebundle_(
        self, include: object = None, exclude: object = None
    ) -> dict[str, str]:
        return self.chart()._repr_mimebundle_()


@dataclass(slots=True, kw_only=True)
class _Call:
    attempt: Attempt
    trainer: int
    task: float
    sent: float
    warm: bool
    alone: bool  # computed again: nothing follows from it


@dataclass(slots=True, kw_only=True, eq=False)
class _Peer:
    name: str
    incarnation: int
    speed: float
    link: PeerLink
    joined: float
    stage: int
    is_serving: bool = False
    is_alive: bool = True
    is_leaving: bool = False
    moving: int = 0  # number of the download under way; 0 without one
    down_free: float = 0.0
    compute_free: float = 0.0
    up_free: float = 0.0
    calls: dict[int, _Call] = field(default_factory=dict)
    warm_after: float = 0.0
    queue_seconds: float = 0.0
    queue_since: float = 0.0


class Simulator:
    """One run; ``simulate`` is its door."""

    def __init__(self, setting: Setting, trace: Sequence[ChurnEvent]) -> None:
        """At time 0, with nobody there."""
        _check(setting, trace)
        self.setting, self.now = setting, 0.0
        self._count = len(setting.stages)
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order, self._call_ids = itertools.count(), itertools.count(1)
        self._peers: dict[str, _Peer] = {}
        self._incarnations: dict[str, int] = {}
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
        self._rebalancer = Rebalancer(
            stages=self._count,
            rule=Rule.NONE if setting.oracle else setting.rule,
            period=setting.period,
            threshold=setting.threshold,
        )
        self._parked: list[deque[tuple[int, Phase, bool, tuple[str, ...]]]] = [
            deque() for _ in range(self._count)
        ]
        self._ledger = Ledger(
            step=0, stages=self._count, micro_batches=setting.micro_batches
        )
        self._holders: dict[tuple[int, int, Phase], _Peer] = {}
        self._waiting: list[deque[int]] = [deque() for _ in range(setting.trainers)]
        self._under_way = [0] * setting.trainers
        self._step_began, self._is_summing = 0.0, False
        self._updated_at = 0.0
        self._serving = self._fewest = 0  # peers, of all stages and of the smallest
        self._arriving: list[_Peer] = []
        self._speed_since, self._best_speed, self._is_empty = 0.0, 0.0, False
        self._committed = 0
        self._steps: list[float] = []
        self._timeline: list[tuple[float, int]] = []
        self._busy: dict[str, float] = {}
        self._present: dict[str, float] = {}
        self._max_flow = self._empty_seconds = 0.0
        self._changes = self._moves = self._emptied = self._recomputed = self._late = 0
        for event in trace:
            self._at(event.time, self._happens, event)

    def run(self, seconds: float) -> Simulated:
        """Until the clock shows so many seconds."""
        started = False
        while self._events and self._events[0][0] <= seconds:
            at, _, function, arguments = heapq.heappop(self._events)
            self.now = at
            function(*arguments)
            if not started and (not self._events or self._events[0][0] > 0.0):
                started = True
                self._start()
        self.now = seconds
        self._account()
        for peer in self._peers.values():
            if peer.is_alive:
                self._leaves_the_books(peer)
        done = self.setting.micro_batches * self._committed
        under_way = {
            task.number for task in self._ledger.to_do() if task.phase is Phase.BACKWARD
        }
        return Simulated(
            seconds=seconds,
            micro_batches=done + self.setting.micro_batches - len(under_way),
            step_seconds=tuple(self._steps),
            busy_seconds=self._busy,
            present_seconds=self._present,
            max_flow=self._max_flow,
            changes=self._changes,
            moves=self._moves,
            emptied_by_moves=self._emptied,
            empty_seconds=self._empty_seconds,
            recomputed=self._recomputed,
            late=self._late,
            timeline=tuple(self._timeline),
        )

    def _at(self, time: float, function: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (time, next(self._order), function, arguments))

    # Peers.

    def _start(self) -> None:
        """Place those who are there at the start, and begin."""
        peers = [peer for peer in self._peers.values() if peer.is_alive]
        if len(peers) < self._count:
            raise WhaleError(
                f"simulated swarm: {len(peers)} peers join at time 0, and there are "
                f"{self._count} stages; each needs one"
            )
        speeds = {peer.name: self._speeds(peer) for peer in peers}
        placed = best_stages(speeds, self._count)
        for peer in peers:
            peer.stage = placed[peer.name]
            self._serves(peer)
        self._changed()
        self._begin_step()
        self._at(self.setting.period, self._look_regularly)

    def _happens(self, event: ChurnEvent) -> None:
        if event.event is Happening.JOIN:
            self._joins(event)
        else:
            peer = self._peers.get(event.peer)
            if peer is None or not peer.is_alive or peer.is_leaving:
                return
            if event.event is Happening.SPEED:
                peer.speed = event.speed
            elif event.event is Happening.LEAVE:
                self._leaves(peer)
            else:
                self._dies(peer, is_silent=event.event is Happening.STOP)
        if self.now > 0.0:
            self._changes += event.event is not Happening.SPEED
            self._changed()

    def _joins(self, event: ChurnEvent) -> None:
        known = self._peers.get(event.peer)
        if known is not None and known.is_alive:
            if not known.is_leaving:
                return
            self._dies(known, is_silent=False)  # It begins anew before it has gone.
        incarnation = self._incarnations.get(event.peer, 0) + 1
        self._incarnations[event.peer] = incarnation
        present = self._loads(with_movers=True)
        peer = _Peer(
            name=event.peer,
            incarnation=incarnation,
            speed=event.speed,
            link=event.link,
            joined=self.now,
            stage=newcomer_stage(present, self._count) if self.now else 0,
        )
        self._peers[event.peer] = peer
        if self.now:
            self._downloads(peer)

    def _downloads(self, peer: _Peer) -> None:
        """State of its stage, then its programs; it serves from the next step on."""
        if self.setting.oracle:
            self._serves(peer)
            return
        peer.moving = next(self._call_ids)
        seconds = self._move_cost(peer.stage, peer.link).seconds
        self._at(self.now + seconds, self._arrives, peer, peer.moving)

    def _arrives(self, peer: _Peer, moving: int) -> None:
        if peer.is_alive and peer.moving == moving:
            peer.moving = 0
            # With nobody in the stage there is no step to wait for.
            if self._members(peer.stage):
                self._arriving.append(peer)
            else:
                self._serves(peer)
                self._changed()

    def _serves(self, peer: _Peer) -> None:
        peer.is_serving, peer.queue_since, peer.queue_seconds = True, self.now, 0.0
        for wirings in self._wirings:
            wirings[peer.stage].leave(peer.name)
            wirings[peer.stage].announce(
                peer.name, peer.incarnation, self.now, expires=self._expiry()
            )
        self._rebalancer.arrived(peer.name)
        parked, self._parked[peer.stage] = self._parked[peer.stage], deque()
        for number, phase, alone, avoid in parked:
            self._call(peer.stage, number, phase, alone=alone, avoid=avoid)

    def _expiry(self) -> float:
        """Never, but later than any announcement before: it lifts bans."""
        return 1e15 + next(self._call_ids)

    def _stops_serving(self, peer: _Peer) -> None:
        peer.is_serving = False
        for wirings in self._wirings:
            for wiring in wirings:
                wiring.leave(peer.name)

    def _leaves(self, peer: _Peer) -> None:
        """It answers what it was given, and is there for the sum of this step."""
        self._stops_serving(peer)
        peer.is_leaving = True
        self._rebalancer.arrived(peer.name, is_gone=True)

    def _dies(self, peer: _Peer, *, is_silent: bool) -> None:
        peer.is_alive = False
        self._leaves_the_books(peer)
        if is_silent:
            for number, call in peer.calls.items():
                self._at(self._deadline(call), self._timed_out, peer, number)
            self._at(self.now + self.setting.forget_seconds, self._gone, peer)
        else:
            self._at(self.now + self.setting.notice_seconds, self._gone, peer)

    def _gone(self, peer: _Peer) -> None:
        """Trainers know that it is dead: what it had is computed again."""
        self._rebalancer.arrived(peer.name, is_gone=True)
        if self._peers.get(peer.name) is peer:
            self._stops_serving(peer)
        calls, peer.calls = peer.calls, {}
        for call in calls.values():
            wiring = self._wirings[call.trainer][call.attempt.stage]
            seconds = self.now - call.sent
            wiring.failed(
                peer.name,
                seconds,
                self.now,
                True,
                task=call.task,
                incarnation=peer.incarnation,
            )
        alone = {
            (call.attempt.stage, call.attempt.number, call.attempt.phase): call.alone
            for call in calls.values()
        }
        lost = self._ledger.lost_with(peer.name, peer.incarnation)
        if lost:
            self._is_summing = False
        for task in lost:
            key = (task.stage, task.number, task.phase)
            self._recomputed += key not in alone
            self._call(
                task.stage,
                task.number,
                task.phase,
                alone=alone.get(key, True),
                avoid=(peer.name,),
            )
        if not self._members(peer.stage):
            self._look()
        self._sum_if_complete()

    def _leaves_the_books(self, peer: _Peer) -> None:
        self._present[peer.name] = (
            self._present.get(peer.name, 0.0) + self.now - peer.joined
        )
        # Work that was booked ahead and will not be done.
        ahead = max(0.0, peer.compute_free - self.now)
        self._busy[peer.name] = max(0.0, self._busy.get(peer.name, 0.0) - ahead)

    # Calls.

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
        call = _Call(
            attempt=self._ledger.begin(stage, number, phase, name, peer.incarnation),
            trainer=trainer,
            task=task,
            sent=self.now,
            warm=self.now >= peer.warm_after,
            alone=alone,
        )
        self._queue_changes(peer)
        call_id = next(self._call_ids)
        peer.calls[call_id] = call
        if not peer.is_alive:
            self._at(self._deadline(call), self._timed_out, peer, call_id)
            return
        answered = self._computed_at(peer, call.attempt)
        if answered > self._deadline(call):
            self._at(self._deadline(call), self._timed_out, peer, call_id)
        self._at(answered, self._answered, peer, call_id)

    def _computed_at(self, peer: _Peer, attempt: Attempt) -> float:
        """When the answer is there; books links and the peer's processor."""
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
            # What is asked for goes over both links at once.
            source.up_free = max(asked + way, source.up_free) + seconds_up
            arrived = max(arrived, source.up_free + way)
        rate = peer.link.down_bytes_per_second
        peer.down_free = max(asked, peer.down_free) + received / rate
        arrived = max(arrived, peer.down_free)
        seconds /= peer.speed
        peer.compute_free = max(arrived, peer.compute_free) + seconds
        self._busy[peer.name] = self._busy.get(peer.name, 0.0) + seconds
        return peer.compute_free + latency

    def _sources(self, attempt: Attempt) -> Iterator[tuple[_Peer, int]]:
        """Who holds what a call reads, and how many bytes of it.

        What nobody holds, such as data, comes from a trainer.
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

    def _deadline(self, call: _Call) -> float:
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

    def _in_flight(self) -> int:
        return self.setting.in_flight or max(self._count, 2 * self._serving)

    def _answered(self, peer: _Peer, call_id: int) -> None:
        if not peer.is_alive:
            return
        call = peer.calls.pop(call_id, None)
        if call is None:  # it was given up before
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
            call.warm,
            incarnation=peer.incarnation,
        )
        if self.setting.trainers > 1:
            wiring.reported(peer.name, len(peer.calls))
        if self._ledger.done(attempt) is not Verdict.COUNTED:
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

    def _timed_out(self, peer: _Peer, call_id: int) -> None:
        call = peer.calls.pop(call_id, None)
        if call is None:
            return
        self._queue_changes(peer, ended=1)
        attempt = call.attempt
        self._ledger.give_up(attempt)
        self._wirings[call.trainer][attempt.stage].failed(
            peer.name,
            self.now - call.sent,
            self.now,
            not peer.is_alive,
            task=call.task,
            incarnation=peer.incarnation,
        )
        if not self._ledger.is_done(attempt.stage, attempt.number, attempt.phase):
            self._call(
                attempt.stage,
                attempt.number,
                attempt.phase,
                alone=call.alone,
                avoid=(peer.name,),
            )

    def _queue_changes(self, peer: _Peer, ended: int = 0) -> None:
        waited = len(peer.calls) + ended
        peer.queue_seconds += waited * (self.now - peer.queue_since)
        peer.queue_since = self.now

    # Steps.

    def _begin_step(self) -> None:
        self._step_began, self._is_summing = self.now, False
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
        """As many micro-batches as may be under way at once."""
        limit = -(-self._in_flight() // self.setting.trainers)
        while self._waiting[trainer] and self._under_way[trainer] < limit:
            number = self._waiting[trainer].popleft()
            self._under_way[trainer] += 1
            # A last stage computes forward and backward in one call.
            only = self._count == 1
            self._call(0, number, Phase.BACKWARD if only else Phase.FORWARD)

    def _sum_if_complete(self) -> None:
        is_complete = all(self._ledger.is_complete(s) for s in range(self._count))
        if self._is_summing or not is_complete:
            return
        self._is_summing = True
        sealed = self._ledger.seal()
        step, seconds = self._ledger.step, self._sum_seconds()
        if self.setting.delayed_updates:
            # The update before must be there; that of this step runs beside the next.
            ends = max(self._updated_at, self.now)
            self._updated_at = ends + seconds
        else:
            ends = self.now + seconds
        self._at(ends, self._summed, step, sealed)

    def _sum_seconds(self) -> float:
        """Of the slowest stage: its gradients are reduced, gathered and applied."""
        slowest = 0.0
        for stage, cost in enumerate(self.setting.stages):
            names = {*self._ledger.holders(stage), *self._members(stage)}
            peers = [self._peers[name] for name in names]
            count = len(peers)
            rate = min(
                min(peer.link.up_bytes_per_second, peer.link.down_bytes_per_second)
                for peer in peers
            )
            sent = sum_bytes(cost.gradient_bytes, count)
            latency = 2 * max(peer.link.latency_seconds for peer in peers)
            seconds = sent / rate + (latency if count > 1 else 0.0)
            seconds += cost.update_seconds / min(peer.speed for peer in peers)
            slowest = max(slowest, seconds)
        return slowest

    def _summed(self, step: int, sealed: int) -> None:
        ledger = self._ledger
        is_newest = ledger.step == step and ledger.round == sealed
        if not is_newest or not ledger.is_sealed:
            return
        for stage in range(self._count):
            where = f"simulated step {step}, stage {stage}"
            numbers = ledger.assignment(stage)
            check_partition(numbers, self.setting.micro_batches, where)
        ledger.commit({stage: "" for stage in range(self._count)})
        self._committed += 1
        self._steps.append(self.now - self._step_began)
        done = self._committed * self.setting.micro_batches
        self._timeline.append((self.now, done))
        self._ledger = Ledger(
            step=step + 1,
            stages=self._count,
            micro_batches=self.setting.micro_batches,
        )
        self._step_ends()
        self._begin_step()

    def _step_ends(self) -> None:
        """Who left in order is gone now, and who has its state serves from here on."""
        for peer in self._peers.values():
            if peer.is_leaving and peer.is_alive:
                peer.is_alive = False
                self._leaves_the_books(peer)
        arriving, self._arriving = self._arriving, []
        for peer in arriving:
            if peer.is_alive and not peer.is_leaving:
                self._serves(peer)
        self._changed()

    # Rebalancing and the books.

    def _look(self) -> None:
        if self.setting.rule is not Rule.NONE:
            self._send_waiting()
        loads = self._loads()
        # It serves from the next step on, which is half a step away on average.
        wait = max(self._steps[-1:] or [self.now - self._step_began]) / 2
        costs = [
            self._move_cost(stage, self._any_link(), wait)
            for stage in range(self._count)
        ]
        move = self._rebalancer.decide(loads, self.now, costs)
        if move is not None:
            self._moves_to(self._peers[move.peer], move.target)

    def _send_waiting(self) -> None:
        """Who waits for a step to end goes to a stage without which it does not end."""
        for stage in range(self._count):
            staying = [
                p for p in self._peers.values() if p.is_alive and not p.is_leaving
            ]
            here = [p for p in self._arriving if p in staying]
            if not here or any(p.stage == stage for p in staying):
                continue  # Somebody serves it, or downloads its state.
            self._arriving.remove(here[0])
            here[0].stage = stage
            self._downloads(here[0])

    def _look_regularly(self) -> None:
        self._look()
        for peer in self._peers.values():
            peer.queue_since, peer.queue_seconds = self.now, 0.0
        self._at(self.now + self.setting.period, self._look_regularly)

    def _moves_to(self, peer: _Peer, stage: int) -> None:
        self._moves += 1
        self._stops_serving(peer)
        if not self._members(peer.stage):
            self._emptied += 1
        peer.stage = stage
        self._downloads(peer)
        self._changed()

    def _any_link(self) -> PeerLink:
        here = (peer.link for peer in self._peers.values() if peer.is_alive)
        return next(here, next(iter(self._peers.values())).link)

    def _move_cost(self, stage: int, link: PeerLink, wait: float = 0.0) -> MoveCost:
        return MoveCost(
            state_bytes=self.setting.stages[stage].state_bytes,
            bytes_per_second=min(link.down_bytes_per_second, link.up_bytes_per_second),
            compile_seconds=self.setting.compile_seconds,
            wait_seconds=wait,
        )

    def _members(self, stage: int) -> list[str]:
        return [
            peer.name
            for peer in self._peers.values()
            if peer.stage == stage and peer.is_alive and peer.is_serving
        ]

    def _loads(self, *, with_movers: bool = False) -> list[PeerLoad]:
        found = []
        for peer in self._peers.values():
            is_here = peer.is_alive and not peer.is_leaving
            if not is_here or not (peer.is_serving or with_movers):
                continue
            self._queue_changes(peer)
            since = max(1e-9, min(self.setting.period, self.now - peer.joined))
            found.append(
                PeerLoad(
                    peer=peer.name,
                    stage=peer.stage,
                    queue_length=peer.queue_seconds / since,
                    speeds=self._speeds(peer),
                )
            )
        return found

    def _speeds(self, peer: _Peer) -> tuple[float, ...]:
        return tuple(
            peer_speed(cost, peer.speed, peer.link) for cost in self.setting.stages
        )

    def _changed(self) -> None:
        """Peers have come, gone or moved: the books of the speed before are closed."""
        self._account()
        if self.setting.oracle:
            while (move := optimum_move(self._loads(), self._count)) is not None:
                peer = self._peers[move.peer]
                self._stops_serving(peer)
                peer.stage = move.target
                self._serves(peer)
                self._moves += 1
        here = self._loads(with_movers=True)
        counts = [len(self._members(stage)) for stage in range(self._count)]
        self._serving, self._fewest = sum(counts), min(counts)
        self._is_empty = self._fewest == 0
        self._best_speed = 0.0
        if len(here) >= self._count:
            speeds = {load.peer: load.speeds for load in here}
            placed = best_stages(speeds, self._count)
            self._best_speed = pipeline_speed(speeds, placed, self._count)

    def _account(self) -> None:
        since = self.now - self._speed_since
        self._max_flow += since * self._best_speed
        self._empty_seconds += since * self._is_empty
        self._speed_since = self.now


def peer_speed(cost: StageCost, speed: float, link: PeerLink) -> float:
    """Micro-batches a second of a peer in a stage: its processor or its links bound it.

    Args:
        cost: of the stage.
        speed: of the peer.
        link: of the peer.
    """
    received = cost.forward_bytes[0] + cost.backward_bytes[0]
    sent = cost.forward_bytes[1] + cost.backward_bytes[1]
    return 1 / max(
        (cost.forward_seconds + cost.backward_seconds) / speed,
        received / link.down_bytes_per_second,
        sent / link.up_bytes_per_second,
    )


def simulate(
    setting: Setting, trace: Sequence[ChurnEvent], seconds: float
) -> Simulated:
    """What a swarm does under a trace, by the code that live runs decide with.

    Args:
        setting: stages, micro-batches and rebalancing.
        trace: who comes and goes; those at time 0 are placed at their best.
        seconds: how long.

    Raises:
        WhaleError: the setting or the trace makes no sense.

    Example:
        >>> from whalejax.swarm.churn import Churn, draw
        >>> cost = StageCost(forward_seconds=0.25, backward_seconds=0.75)
        >>> last = StageCost(forward_seconds=0.0, backward_seconds=1.0)
        >>> churn = Churn(peers=4, lifetime_seconds=1e9, join_seconds=math.inf,
        ...               seconds=100.0)
        >>> setting = Setting(stages=(cost, last), micro_batches=50)
        >>> simulate(setting, draw(churn, seed=0), 104.0).micro_batches
        200
    """
    return Simulator(setting, trace).run(seconds)


def _check(setting: Setting, trace: Sequence[ChurnEvent]) -> None:
    with Problems("simulated swarm") as problems:
        if not setting.stages:
            problems.add("stages: there are none; give at least one")
        for number, cost in enumerate(setting.stages):
            if not cost.backward_seconds > 0:
                problems.add(
                    f"stages[{number}].backward_seconds is {cost.backward_seconds}; "
                    "expected more than 0"
                )
        for name in ("micro_batches", "trainers"):
            if getattr(setting, name) < 1:
                problems.add(f"{name} is {getattr(setting, name)}; expected at least 1")
        if not setting.period > 0:
            problems.add(f"period is {setting.period} s; expected more than 0")
        if not any(event.event is Happening.JOIN for event in trace):
            problems.add("trace: nobody joins; expected a join at time 0")
