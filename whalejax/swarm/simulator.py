"""A simulator of swarms with the wiring, ledger and rebalancing of live runs.

Peers compute their calls in order. Each call's inputs come from the peers that made
them, over the links of both. Trainers choose peers by ``StageWiring``, count calls by
``Ledger`` and move peers by ``Rebalancer``. Joining peers download the state during the
steps. If a stage has lost its last peer, all roll back to a snapshot. The clock jumps
from event to event, so hundreds of peers and hours of churn take seconds.

The module is long because all kinds of events read and change the same state.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from whalejax.meshes.errors import WhaleError
from whalejax.meshes.units import count_text
from whalejax.planner.plan_entries import sum_bytes
from whalejax.swarm.churn import ChurnEvent, PeerEventKind, PeerLink
from whalejax.swarm.deadlines import (
    MOST_PAUSE_SECONDS,
    NEWCOMER_SECONDS,
    PAUSE_SECONDS,
    SPARE_SECONDS,
)
from whalejax.swarm.ledger import Ledger, Phase, check_partition
from whalejax.swarm.simulation.results import SwarmSimulation
from whalejax.swarm.simulation.setting import (
    Setting,
    StageCost,
    check,
    peer_speed,
)
from whalejax.swarm.simulation.simulated_calls import (
    DEADLINE_FACTOR,
    Place,
    SimulatedCalls,
    SimulatedDownload,
    SimulatedPeer,
)
from whalejax.swarm.stage_assignment import (
    MoveCost,
    PeerLoad,
    Rebalancer,
    Rule,
    best_stages,
    newcomer_stage,
    optimum_move,
    pays_to_wait,
    pipeline_speed,
)


__all__ = [
    "DEADLINE_FACTOR",
    "Setting",
    "SwarmSimulation",
    "Simulator",
    "StageCost",
    "peer_speed",
    "simulate",
]


_NOTHING: Final[Mapping[str, int]] = {}


class Simulator(SimulatedCalls):
    """One simulation; ``simulate`` is the public function."""

    def __init__(self, setting: Setting, trace: Sequence[ChurnEvent]) -> None:
        """Starts at time 0 without peers.

        Args:
            setting: Stages, micro-batches and rebalancing.
            trace: Trace of joins, leaves, deaths and changes of speed.

        Raises:
            WhaleError: The settings or the trace are invalid.
        """
        check(setting, trace)
        super().__init__(setting)
        self._incarnations: dict[str, int] = {}
        self._rebalancer = Rebalancer(
            stages=self._count,
            rule=Rule.NONE if setting.oracle else setting.rule,
            period=setting.period,
            threshold=setting.threshold,
        )
        self._is_between, self._ready_since, self._complete_since = True, 0.0, -1.0
        self._step_began, self._is_summing, self._updated_at = 0.0, False, 0.0
        self._committed = self._snapshot = self._went_back = 0
        self._looked = self._snapshot_ends = self._whole_since = 0.0
        self._leases = [0.0] * self._count  # end of the leases of dead peers, by stage
        self._speed_since, self._best_speed, self._is_empty = 0.0, 0.0, False
        self._steps: list[float] = []
        self._timeline: list[tuple[float, int]] = []
        self._served: list[tuple[float, tuple[int, ...]]] = []
        self._present: dict[str, float] = {}
        self._max_flow = self._empty_seconds = 0.0
        self._changes = self._moves = self._emptied = self._recomputed = 0
        for event in trace:
            self._at(event.time, self._happens, event)

    def run(self, seconds: float) -> SwarmSimulation:
        """Runs until the clock reaches an end time.

        Args:
            seconds: End of the simulation.
        """
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
        for peer in self._alive():
            self._leaves_the_books(peer)
        under_way = {
            task.number for task in self._ledger.to_do() if task.phase is Phase.BACKWARD
        }
        return SwarmSimulation(
            seconds=seconds,
            micro_batches=self._committed_micro_batches
            + self.setting.micro_batches
            - len(under_way),
            step_seconds=tuple(self._steps),
            busy_seconds=self._busy,
            present_seconds=self._present,
            max_flow=self._max_flow,
            changes=self._changes,
            moves=self._moves,
            emptied_by_moves=self._emptied,
            empty_seconds=self._empty_seconds,
            went_back=self._went_back,
            recomputed=self._recomputed,
            late=self._late,
            timeline=tuple(self._timeline),
            serving=tuple(self._served),
        )

    @property
    def _committed_micro_batches(self) -> int:
        return self.setting.micro_batches * self._committed

    @property
    def _place(self) -> Place:
        return self._committed, self._went_back

    def _alive(self) -> Iterator[SimulatedPeer]:
        return (peer for peer in self._peers.values() if peer.is_alive)

    # Peers come and go.

    def _start(self) -> None:
        peers = [*self._alive()]
        if len(peers) < self._count:
            raise WhaleError(
                f"simulated swarm: {len(peers)} peers join at time 0, and there are "
                f"{count_text(self._count, 'stage')}; each needs one"
            )
        speeds = {peer.name: self._speeds(peer) for peer in peers}
        placed = best_stages(speeds, self._count)
        for peer in peers:
            peer.stage, peer.is_ready = placed[peer.name], True
            self._serves(peer)
        self._changed()
        self._begin_step()
        self._at(self.setting.period, self._look_beside)

    def _happens(self, event: ChurnEvent) -> None:
        if event.event is PeerEventKind.JOIN:
            self._joins(event)
        else:
            peer = self._peers.get(event.peer)
            if peer is None or not peer.is_alive or peer.is_leaving:
                return
            if event.event is PeerEventKind.SPEED:
                peer.speed = event.speed
            elif event.event is PeerEventKind.LEAVE:
                self._leaves(peer)
            else:
                self._dies(peer, is_silent=event.event is PeerEventKind.STOP)
        if self.now > 0.0:
            self._changes += event.event is not PeerEventKind.SPEED
            self._changed()

    def _joins(self, event: ChurnEvent) -> None:
        known = self._peers.get(event.peer)
        if known is not None and known.is_alive:
            if not known.is_leaving:
                return
            self._dies(known, is_silent=False)  # The peer restarts before its death.
        incarnation = self._incarnations.get(event.peer, 0) + 1
        self._incarnations[event.peer] = incarnation
        present = self._loads(with_movers=True)
        peer = SimulatedPeer(
            name=event.peer,
            incarnation=incarnation,
            speed=event.speed,
            link=event.link,
            joined=self.now,
            stage=newcomer_stage(present, self._count) if self.now else 0,
        )
        self._peers[event.peer] = peer
        if self.now:
            self._compiles(peer)

    def _leaves(self, peer: SimulatedPeer) -> None:
        """Lets a peer leave: after the step if it serves, or else immediately."""
        self._rebalancer.arrived(peer.name, is_gone=True)
        if peer.is_serving:
            peer.is_leaving = True
            self._goes_ahead()
        else:
            self._dies(peer, is_silent=False)

    def _dies(self, peer: SimulatedPeer, *, is_silent: bool) -> None:
        peer.is_alive = False
        self._leaves_the_books(peer)
        forgotten = self.now + self.setting.forget_seconds
        if peer.is_serving:
            self._leases[peer.stage] = max(self._leases[peer.stage], forgotten)
            self._at(forgotten, self._goes_ahead)
        if is_silent:
            for number, call in peer.calls.items():
                self._at(self._deadline(call), self._timed_out, peer, number)
            self._at(forgotten, self._on_death, peer)
        else:
            self._at(self.now + self.setting.notice_seconds, self._on_death, peer)

    def _on_death(self, peer: SimulatedPeer) -> None:
        """Recomputes a peer's results when its death is noticed."""
        self._rebalancer.arrived(peer.name, is_gone=True)
        peer.coming = None
        if self._peers.get(peer.name) is peer:
            self._stops_serving(peer)
        recomputed = self._recompute(peer)
        if not all(self._ledger.is_complete(stage) for stage in range(self._count)):
            self._is_summing, self._complete_since = False, -1.0
        self._recomputed += recomputed
        self._goes_ahead()
        self._sum_if_complete()

    def _leaves_the_books(self, peer: SimulatedPeer) -> None:
        self._present[peer.name] = (
            self._present.get(peer.name, 0.0) + self.now - peer.joined
        )
        # Cancel reserved work that the peer will not do.
        ahead = max(0.0, peer.compute_free - self.now)
        self._busy[peer.name] = max(0.0, self._busy.get(peer.name, 0.0) - ahead)

    def _serves(self, peer: SimulatedPeer) -> None:
        peer.is_serving, peer.queue_since, peer.queue_seconds = True, self.now, 0.0
        for wirings in self._wirings:
            wirings[peer.stage].leave(peer.name)
            wirings[peer.stage].announce(
                peer.name, peer.incarnation, self.now, expires=self._expiry()
            )
        self._rebalancer.arrived(peer.name)
        self._send_parked(peer.stage)

    def _expiry(self) -> float:
        """Returns an expiry later than all earlier announcements, which lifts bans."""
        return 1e15 + next(self._numbers)

    def _stops_serving(self, peer: SimulatedPeer) -> None:
        peer.is_serving = False
        for wirings in self._wirings:
            for wiring in wirings:
                wiring.leave(peer.name)

    # New peers.

    def _compiles(self, peer: SimulatedPeer) -> None:
        if self.setting.oracle:
            self._serves(peer)
            return
        peer.is_ready, peer.task = False, next(self._numbers)
        seconds = self.setting.compile_seconds
        self._at(self.now + seconds, self._compiled, peer, peer.task)

    def _compiled(self, peer: SimulatedPeer, task: int) -> None:
        if peer.is_alive and peer.task == task:
            peer.is_ready, peer.task = True, 0
            self._goes_ahead()

    def _bring(self, peer: SimulatedPeer) -> None:
        """Begins the download of the step's state, if that is possible."""
        is_free = peer.is_ready and not (peer.is_serving or peer.task)
        if not is_free or peer.is_leaving or self.now < peer.paused_until:
            return
        if peer.late >= 0 and not self._is_between:
            return  # A download needs the full state of one step.
        has_source = self._members(peer.stage) or self._snapshot == self._committed
        if not has_source:
            return
        # Each peer makes the initial state itself.
        cost = self._move_cost(peer.stage, peer.link)
        seconds = cost.download_seconds if self._committed else 0.0
        peer.task = next(self._numbers)
        peer.coming = SimulatedDownload(
            place=self._place, began=self.now, takes=seconds
        )
        self._at(peer.coming.ends, self._arrives, peer, peer.task)

    def _arrives(self, peer: SimulatedPeer, task: int) -> None:
        if not peer.is_alive or peer.task != task:
            return
        coming, peer.task, peer.coming = peer.coming, 0, None
        assert coming is not None
        is_beside = self.setting.delayed_updates and not self._is_between
        was_given_up, peer.is_given_up = peer.is_given_up, False
        if coming.place == self._place and not (self._is_summing or is_beside):
            peer.pause_seconds, peer.late = 0.0, -1.0
            self._serves(peer)
            self._changed()
        elif coming.place[1] == self._went_back:
            peer.late = peer.late if peer.late >= 0 else coming.began
            if was_given_up:
                twice = max(2 * peer.pause_seconds, PAUSE_SECONDS)
                peer.pause_seconds = min(twice, MOST_PAUSE_SECONDS)
                peer.paused_until = self.now + peer.pause_seconds
                self._at(peer.paused_until, self._goes_ahead)
        self._goes_ahead()

    def _waits_for_newcomers(self, since: float) -> bool:
        """Whether a ready step still waits for peers that download its state."""
        coming = [
            (peer, peer.coming)
            for peer in self._peers.values()
            if peer.coming and peer.coming.place == self._place and not peer.is_given_up
        ]
        if not coming:
            return False
        longest = max(NEWCOMER_SECONDS, 2 * max(one.takes for _, one in coming))
        if self.now >= since + longest:
            for peer, _ in coming:
                peer.is_given_up = True
            return False
        left = abs(max(one.ends for _, one in coming) - self.now)
        began = [p.late if p.late >= 0 else one.began for p, one in coming]
        lost = [self.now - one for one in began]
        if not pays_to_wait(lost, self._serving, left):
            return False
        self._at(since + longest, self._goes_ahead)
        return True

    # Steps.

    def _goes_ahead(self) -> None:
        """Continues after a change."""
        if self._has_lost_a_stage():
            self._goes_back()
        elif self._is_between:
            self._let_go()
            for peer in [*self._alive()]:
                self._bring(peer)
            lacking = [s for s in range(self._count) if not self._members(s)]
            if lacking:
                self._whole_since = self.now
            if lacking and self.now >= self._ready_since + SPARE_SECONDS:
                self._send_spare(lacking)
            if not lacking and not self._waits_at_first():
                self._take_snapshot()
        else:
            for peer in [*self._alive()]:
                self._bring(peer)
            self._sum_if_complete()

    def _has_lost_a_stage(self) -> bool:
        """Whether the state of some stage is lost; never with an oracle."""
        if self.setting.oracle:
            return False
        for stage in range(self._count):
            is_lost = not self._members(stage) and self.now >= self._leases[stage]
            if is_lost and not self._is_between:
                return True
            there = (p for p in self._alive() if p.stage == stage and p.is_ready)
            if is_lost and self._snapshot != self._committed and any(there):
                return True
        return False

    def _goes_back(self) -> None:
        """Rolls all peers back to the snapshot, which they download."""
        self._went_back += 1
        self._committed, self._updated_at = self._snapshot, self.now
        self._snapshot_ends = 0.0
        self._timeline.append((self.now, self._committed_micro_batches))
        self._ledger = self._fresh_ledger(self._committed)
        for parked in self._parked:
            parked.clear()
        for peer in self._peers.values():
            peer.calls = {}
            if peer.is_alive and peer.is_serving:
                self._stops_serving(peer)
        self._changed()
        self._prepare()

    def _prepare(self) -> None:
        """Prepares the next step after a commit."""
        self._is_between, self._ready_since = True, self.now
        self._whole_since = self.now  # time since which no stage lacks a peer
        self._is_summing, self._complete_since = False, -1.0
        self._at(self.now + SPARE_SECONDS, self._goes_ahead)
        self._goes_ahead()

    def _let_go(self) -> None:
        """Releases leaving peers after a step; a stage's last peer needs a snapshot."""
        for peer in [p for p in self._alive() if p.is_leaving]:
            mates = [n for n in self._members(peer.stage) if n != peer.name]
            if all(self._peers[name].is_leaving for name in mates):
                if not all(self._members(stage) for stage in range(self._count)):
                    continue  # No snapshot without peers of another stage: keep it.
                self._snapshot = self._committed
            self._stops_serving(peer)
            peer.is_alive = False
            self._leaves_the_books(peer)
            self._changed()

    def _waits_at_first(self) -> bool:
        coming = sum(peer.coming is not None for peer in self._alive())
        waits = coming > self._serving or self.setting.delayed_updates
        return waits and self._waits_for_newcomers(self._whole_since)

    def _take_snapshot(self) -> None:
        """Takes a snapshot if one is due, while the next step is computed.

        With delayed updates, it is taken before that step.
        """
        is_due = self._committed % self.setting.snapshot_every == 0
        seconds = 0.0
        if is_due and self._snapshot != self._committed:
            for stage, cost in enumerate(self.setting.stages):
                link = self._peers[self._members(stage)[0]].link
                seconds += cost.state_bytes / link.up_bytes_per_second
            self._snapshot_ends = self.now + seconds
            waits = self.setting.delayed_updates and seconds > 0
            self._at(self._snapshot_ends, self._snapshot_taken, self._place, waits)
        self._is_between = False
        if self._snapshot_ends <= self.now or not self.setting.delayed_updates:
            self._begin_step()

    def _snapshot_taken(self, place: Place, waits: bool) -> None:
        """Ends a snapshot; if ``waits``, the step has waited for it and begins."""
        if place != self._place:
            return
        self._snapshot = self._committed
        if waits:
            self._begin_step()
        else:
            self._sum_if_complete()

    def _begin_step(self) -> None:
        self._is_between, self._is_summing, self._complete_since = False, False, -1.0
        self._ledger = self._fresh_ledger(self._committed)
        self._begin_micro_batches()

    def _sum_if_complete(self) -> None:
        """Sums the gradients if all are available, unless the step waits for a peer."""
        is_complete = all(self._ledger.is_complete(s) for s in range(self._count))
        if self._is_summing or self._is_between or not is_complete:
            return
        if self._complete_since < 0:
            self._complete_since = self.now
        if not self.setting.delayed_updates and (
            self._waits_for_newcomers(self._complete_since)
            or self.now < self._snapshot_ends
        ):
            return
        self._is_summing = True
        sealed = self._ledger.seal()
        seconds = self._sum_seconds()
        if self.setting.delayed_updates:
            # The previous update must be done. This step's update runs during the next
            # step.
            ends = max(self._updated_at, self.now)
            self._updated_at = ends + seconds
        else:
            ends = self.now + seconds
        self._at(ends, self._summed, self._ledger, sealed)

    def _sum_seconds(self) -> float:
        """Returns the slowest stage's seconds of reduction, gathering and update."""
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

    def _summed(self, ledger: Ledger, sealed: int) -> None:
        is_newest = ledger is self._ledger and ledger.round == sealed
        if not is_newest or not ledger.is_sealed:
            return
        for stage in range(self._count):
            where = f"simulated step {ledger.step}, stage {stage}"
            numbers = ledger.assignment(stage)
            check_partition(numbers, self.setting.micro_batches, where)
        ledger.commit({stage: "" for stage in range(self._count)})
        self._committed += 1
        self._steps.append(self.now - self._step_began)
        self._step_began = self.now
        self._timeline.append((self.now, self._committed_micro_batches))
        # It has no calls yet.
        self._ledger = self._fresh_ledger(self._committed)
        self._changed()
        self._look()
        self._prepare()

    # Rebalancing and accounting.

    def _look_beside(self) -> None:
        """Checks the rebalancing while a step is computed.

        With delayed updates it checks between steps.
        """
        if not (self._is_between or self.setting.delayed_updates):
            if self._complete_since < 0:
                self._look()
        due = self._looked + self.setting.period
        later = self.now + min(1.0, self.setting.period)
        self._at(max(due, later), self._look_beside)

    def _look(self) -> None:
        """Checks the peers periodically, unless a stage has none."""
        is_whole = all(self._members(stage) for stage in range(self._count))
        if not is_whole or self.now < self._looked + self.setting.period:
            return
        loads = self._loads(held=self._ledger.gradients_at())
        self._looked = self.now
        for peer in self._peers.values():
            peer.queue_since, peer.queue_seconds = self.now, 0.0
        costs = [
            self._move_cost(stage, self._any_link()) for stage in range(self._count)
        ]
        present = [p.name for p in self._alive() if not p.is_leaving]
        move = self._rebalancer.decide(loads, self.now, costs, present)
        if move is not None:
            self._moves_to(self._peers[move.peer], move.target)

    def _send_spare(self, lacking: Sequence[int]) -> None:
        """Moves a peer to a stage without peers, from a stage that has several.

        It prefers peers that wait for the step, and then peers of the largest stage.
        """
        if self.setting.rule is Rule.NONE:
            return
        for stage in lacking:
            there = [p for p in self._alive() if not p.is_leaving]
            if any(p.stage == stage for p in there):
                continue
            counts = [0] * self._count
            for peer in there:
                counts[peer.stage] += peer.is_ready
            spare = [p for p in there if p.is_ready and counts[p.stage] > 1]
            if spare:
                spare.sort(key=lambda p: (p.is_serving, -counts[p.stage]))
                self._moves_to(spare[0], stage)

    def _moves_to(self, peer: SimulatedPeer, stage: int) -> None:
        self._moves += 1
        if peer.is_serving:
            self._stops_serving(peer)
            self._emptied += not self._members(peer.stage)
            self._recomputed += self._recompute(peer)
        peer.stage, peer.coming = stage, None
        self._compiles(peer)
        self._changed()

    def _any_link(self) -> PeerLink:
        here = (peer.link for peer in self._alive())
        return next(here, next(iter(self._peers.values())).link)

    def _move_cost(self, stage: int, link: PeerLink) -> MoveCost:
        return MoveCost(
            state_bytes=self.setting.stages[stage].state_bytes,
            bytes_per_second=min(link.down_bytes_per_second, link.up_bytes_per_second),
            compile_seconds=self.setting.compile_seconds,
        )

    def _members(self, stage: int) -> list[str]:
        return [p.name for p in self._alive() if p.stage == stage and p.is_serving]

    def _loads(
        self, *, with_movers: bool = False, held: Mapping[str, int] = _NOTHING
    ) -> list[PeerLoad]:
        loads = []
        for peer in self._alive():
            if peer.is_leaving or not (peer.is_serving or with_movers):
                continue
            self._queue_changes(peer)
            since = max(1e-9, self.now - max(self._looked, peer.joined))
            loads.append(
                PeerLoad(
                    peer=peer.name,
                    stage=peer.stage,
                    queue_length=peer.queue_seconds / since,
                    speeds=self._speeds(peer),
                    held=held.get(peer.name, 0),
                )
            )
        return loads

    def _speeds(self, peer: SimulatedPeer) -> tuple[float, ...]:
        return tuple(
            peer_speed(cost, peer.speed, peer.link) for cost in self.setting.stages
        )

    def _changed(self) -> None:
        """Adds up the times since the last change of the peers."""
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
        if not self._served or self._served[-1][1] != (*counts,):
            self._served.append((self.now, (*counts,)))
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


def simulate(
    setting: Setting, trace: Sequence[ChurnEvent], seconds: float
) -> SwarmSimulation:
    """Simulates a swarm under a trace with the rules of live runs.

    Args:
        setting: Stages, micro-batches and rebalancing.
        trace: Trace of the peers; peers that join at time 0 are placed optimally.
        seconds: End of the simulation.

    Raises:
        WhaleError: The settings or the trace are invalid.

    Example:
        >>> from whalejax.swarm.churn import Churn, draw
        >>> cost = StageCost(forward_seconds=0.25, backward_seconds=0.75)
        >>> last = StageCost(forward_seconds=0.0, backward_seconds=1.0)
        >>> churn = Churn(peers=4, lifetime_seconds=1e9, join_seconds=float("inf"),
        ...               seconds=100.0)
        >>> setting = Setting(stages=(cost, last), micro_batches=50)
        >>> simulate(setting, draw(churn, seed=0), 104.0).micro_batches
        200
    """
    return Simulator(setting, trace).run(seconds)
