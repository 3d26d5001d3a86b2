"""The simulator beside live swarms under the same churn.

    python scripts/swarm_traced.py [--seeds 3] [--seconds 150]

Peers are processes of their own that join, are killed (SIGKILL) or stopped (SIGSTOP) at
the times of a drawn trace: 6 at first, lives of 120 s on average, half of the ends
silent, and one that joins every 20 s on average; 3 stages, 24 micro-batches a step. A
call takes a peer 0.15 s (forward) or 0.45 s (backward), most of which it sleeps: all
share the cores of this machine, and what is compared is who computes what and when, not
how fast. Real are the processes, their start, wire, ledger, sums, states and snapshots.

Three steps before the trace begins give the simulator what it is driven by: what a call
takes beside the time that is slept (the tenth part of calls that waited least), and the
sum and the update of a step. What a newcomer takes from its start until it is ready is
measured in the run.

``simulated_over_live``: micro-batches of committed steps by the end of the trace, the
simulator's over the live run's, over all seeds; of the step that was under way, the
part by time. ``by_seed``: both numbers of each.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import signal
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import jax
from swarm_measured import KEY, LATENCIES, STAGES, Noted, Peers, gpt, noted
from swarm_peer import cut_of

from whalejax.swarm.churn import Churn, ChurnEvent, PeerEventKind, PeerLink, draw
from whalejax.swarm.simulator import Setting, StageCost, simulate
from whalejax.swarm_runtime.registry import ANY
from whalejax.swarm_runtime.registry_server import RegistryServer
from whalejax.swarm_runtime.stage_moves import StageMover
from whalejax.swarm_runtime.trainers.trainer_state import Settings


FORWARD_SECONDS: Final = 0.15
BACKWARD_SECONDS: Final = 0.45
MICRO_BATCHES: Final = 24
QUIET_STEPS: Final = 3
SNAPSHOT_EVERY: Final = 2
REBALANCE_SECONDS: Final = 20.0
LEASE_SECONDS: Final = 10.0
LONGEST_STEP: Final = 90.0
"""Seconds after the trace, in which the step under way at its end is to be done."""

Curve = list[tuple[float, float]]
"""Seconds, and micro-batches that are done by then."""


def churn(seconds: float) -> Churn:
    """What traces are drawn from."""
    return Churn(
        peers=2 * STAGES,
        lifetime_seconds=120.0,
        join_seconds=20.0,
        seconds=seconds,
        silent=0.5,
    )


def done_at(curve: Curve, seconds: float) -> float:
    """Micro-batches by then, the step under way by its part of the time."""
    before = (0.0, 0.0)
    for at, done in curve:
        if at > seconds:
            part = (seconds - before[0]) / (at - before[0])
            return before[1] + part * max(0.0, done - before[1])
        before = at, done
    return before[1]


@dataclass(slots=True)
class Lived:
    """What a live run gave.

    Attributes:
        curve: of the trace's time.
        latency: seconds of a link in a call.
        update_seconds: of the sum and the update of a step.
        starts: seconds from the start of each newcomer until it was ready.
        told: how often the trainer said what.
    """

    curve: Curve = field(default_factory=list)
    latency: float = 0.0
    update_seconds: float = 0.0
    starts: list[float] = field(default_factory=list)
    told: dict[str, int] = field(default_factory=dict)


class Player:
    """Has peers come and go as a trace says, in a thread."""

    def __init__(self, serving: RegistryServer, peers: Peers, lived: Lived) -> None:
        self._serving, self._peers, self._lived = serving, peers, lived
        self._hosts: dict[str, str] = {}
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self, peer: str, stage: int) -> str:
        """A process for a peer of the trace."""
        host = self._peers.start(self._serving, stage)
        self._hosts[peer] = host
        return host

    def begin(self, trace: Sequence[ChurnEvent]) -> None:
        """From now on."""
        later = [event for event in trace if event.time > 0]
        self._run(self._play, later, time.monotonic())

    def close(self) -> None:
        """Nobody comes or goes any more."""
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _run(self, target: Any, *given: Any) -> None:
        thread = threading.Thread(target=target, args=given)
        self._threads.append(thread)
        thread.start()

    def _play(self, trace: Sequence[ChurnEvent], begun: float) -> None:
        for event in trace:
            if self._over.wait(max(0.0, begun + event.time - time.monotonic())):
                return
            if event.event is PeerEventKind.JOIN:
                host = self.start(event.peer, ANY)
                self._run(self._until_ready, host, time.monotonic())
            elif event.event is PeerEventKind.KILL:
                self._peers.kill(self._hosts[event.peer])
            else:
                process = self._peers.processes[self._hosts[event.peer]]
                process.send_signal(signal.SIGSTOP)

    def _until_ready(self, host: str, begun: float) -> None:
        fleet = self._serving.trainer.fleet
        while host not in {m.address[0] for m in fleet.members() if m.ready}:
            if self._over.wait(0.05) or host not in self._peers.processes:
                return
        self._lived.starts.append(time.monotonic() - begun)


def live(trace: Sequence[ChurnEvent], seconds: float) -> Lived:
    """A swarm of processes under a trace."""
    given = {
        "job": "gpt-test",
        "options": gpt(STAGES, batch=MICRO_BATCHES, width=16, sequence=16),
        "stages": STAGES,
        "micro_batches": MICRO_BATCHES,
        "call_takes": [FORWARD_SECONDS, BACKWARD_SECONDS],
    }
    lived, peers, steps = Lived(), Peers(given), itertools.count()

    def tell(kind: str, **more: Any) -> None:
        del more
        lived.told[kind] = lived.told.get(kind, 0) + 1

    serving = RegistryServer(
        cut_of(given),
        KEY,
        Settings(steps=10**6, call_seconds=10.0, snapshot_every=SNAPSHOT_EVERY),
        lease_seconds=LEASE_SECONDS,
        tell=tell,
        rebalance=StageMover(STAGES, period=REBALANCE_SECONDS),
    )
    player = Player(serving, peers, lived)
    is_quiet = threading.Event()
    calls, computed = noted(serving, is_quiet.is_set)
    updates = timed_updates(serving)
    try:
        for number in range(2 * STAGES):
            player.start(f"p{number}", number % STAGES)
        peers.ready(serving)
        begun, first = 0.0, 0
        for step, _ in serving.run():
            now = time.monotonic()
            if next(steps) == 0:
                is_quiet.set()  # Programs are compiled in the first step.
            if not begun and step == 1 + QUIET_STEPS:
                is_quiet.clear()
                begun, first = now, step
                lived.update_seconds = statistics.median(updates[1:])
                player.begin(trace)
            elif begun:
                done = float(MICRO_BATCHES * (step - first))
                lived.curve.append((now - begun, done))
                if now - begun > seconds:
                    break
    finally:
        player.close()
        peers.close()
        serving.close()
    lived.latency = latency_of(calls, computed)
    return lived


def timed_updates(serving: RegistryServer) -> list[float]:
    """Seconds of each sum and update from now on."""
    trainer: Any = serving.trainer
    committed, found = trainer._committed, []

    def timed(given: Any) -> Any:
        begun = time.monotonic()
        commit = committed(given)
        found.append(time.monotonic() - begun)
        return commit

    trainer._committed = timed
    return found


def latency_of(calls: Noted, computed: Noted) -> float:
    """Seconds of a link in a call, of those that waited least."""
    beside = [
        statistics.quantiles(
            [whole - own for whole, own in zip(calls[key], computed[key], strict=True)],
            n=10,
        )[0]
        for key in calls
    ]
    return max(0.0, statistics.mean(beside)) / LATENCIES


def simulated(trace: Sequence[ChurnEvent], lived: Lived, seconds: float) -> Curve:
    """The same by the simulator."""
    link = PeerLink(latency_seconds=lived.latency)
    both = FORWARD_SECONDS + BACKWARD_SECONDS
    inner = StageCost(
        forward_seconds=FORWARD_SECONDS,
        backward_seconds=BACKWARD_SECONDS,
        update_seconds=lived.update_seconds,
    )
    last = dataclasses.replace(inner, forward_seconds=0.0, backward_seconds=both)
    setting = Setting(
        stages=(*[inner] * (STAGES - 1), last),
        micro_batches=MICRO_BATCHES,
        period=REBALANCE_SECONDS,
        compile_seconds=statistics.mean(lived.starts) if lived.starts else 0.0,
        forget_seconds=LEASE_SECONDS,
        snapshot_every=SNAPSHOT_EVERY,
    )
    linked = [dataclasses.replace(event, link=link) for event in trace]
    found = simulate(setting, linked, seconds + LONGEST_STEP)
    return [(at, float(done)) for at, done in found.timeline]


def traced(seeds: int, seconds: float) -> dict[str, Any]:
    """Both, over so many traces.

    Args:
        seeds: of traces.
        seconds: of each.
    """
    rows = []
    for seed in range(seeds):
        trace = draw(churn(seconds), seed)
        lived = live(trace, seconds)
        pair = [
            round(done_at(curve, seconds), 1)
            for curve in (simulated(trace, lived, seconds), lived.curve)
        ]
        row = {
            "seed": seed,
            "simulated": pair[0],
            "live": pair[1],
            "ratio": round(pair[0] / pair[1], 3),
            "latency": round(lived.latency, 4),
            "update_seconds": round(lived.update_seconds, 3),
            "newcomer_seconds": [round(x, 1) for x in lived.starts],
            "told": lived.told,
        }
        print(json.dumps(row), flush=True)
        rows.append(row)
    whole = [sum(row[key] for row in rows) for key in ("simulated", "live")]
    return {
        "simulated_over_live": round(whole[0] / whole[1], 3),
        "by_seed": [[row["simulated"], row["live"]] for row in rows],
        "trace_seconds": seconds,
    }


def measured() -> dict[str, Any]:
    """What is kept by ``bench_swarm.py``."""
    return traced(3, 150.0)


def main() -> None:
    """Measure, and print what came out."""
    parser = argparse.ArgumentParser(description="Simulated and live swarms.")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=150.0, help="of a trace")
    words = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    print(json.dumps(traced(words.seeds, words.seconds)))


if __name__ == "__main__":
    main()
