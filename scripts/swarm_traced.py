"""Compares the simulator with live swarms under the same churn.

    python scripts/swarm_traced.py [--seeds 3] [--seconds 150]

Peers are processes of their own that join, are killed (SIGKILL) or stopped (SIGSTOP) at
the times of a random trace: 6 at first, lives of 120 s on average, half of the ends
silent, and one that joins every 20 s on average; 3 stages, 24 micro-batches a step. A
call takes a peer 0.15 s (forward) or 0.45 s (backward), most of which it sleeps: all
share the cores of this machine, and the comparison is of the order of work, not of
speed. Real are the processes, their start, wire, ledger, sums, states and snapshots.

Three steps before the trace give the simulator its parameters: the time of a call
besides the sleep (the tenth part of calls that waited least), and the sum and the
update of a step. The time from a newcomer's start until it is ready is measured in the
run. The last line is one JSON object:

    simulated_over_live  micro-batches of committed steps by the end of the trace, the
                         simulator's over the live run's, over all seeds; of the last
                         step, the part by time
    by_seed              both numbers of each seed
    trace_seconds        seconds of a trace
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
"""Seconds after the trace in which its last step must end."""

Curve = list[tuple[float, float]]
"""Seconds, and number of micro-batches done by then."""


def churn(seconds: float) -> Churn:
    """Returns the distribution of traces."""
    return Churn(
        peers=2 * STAGES,
        lifetime_seconds=120.0,
        join_seconds=20.0,
        seconds=seconds,
        silent=0.5,
    )


def done_at(curve: Curve, seconds: float) -> float:
    """Returns micro-batches by then, with the time's part of the step under way."""
    previous = (0.0, 0.0)
    for at, done in curve:
        if at > seconds:
            part = (seconds - previous[0]) / (at - previous[0])
            return previous[1] + part * max(0.0, done - previous[1])
        previous = at, done
    return previous[1]


@dataclass(slots=True)
class LiveRun:
    """Results of a live run.

    Attributes:
        curve: Progress over the trace's time.
        latency: Seconds of a link in a call.
        update_seconds: Seconds of the sum and the update of a step.
        starts: Seconds from the start of each newcomer until it was ready.
        messages: Number of the trainer's messages by kind.
    """

    curve: Curve = field(default_factory=list)
    latency: float = 0.0
    update_seconds: float = 0.0
    starts: list[float] = field(default_factory=list)
    messages: dict[str, int] = field(default_factory=dict)


class Player:
    """Makes peers come and go as in a trace, in a thread."""

    def __init__(self, serving: RegistryServer, peers: Peers, run: LiveRun) -> None:
        self._serving, self._peers, self._lived = serving, peers, run
        self._hosts: dict[str, str] = {}
        self._is_over = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self, peer: str, stage: int) -> str:
        """Starts a process for a peer of the trace."""
        host = self._peers.start(self._serving, stage)
        self._hosts[peer] = host
        return host

    def begin(self, trace: Sequence[ChurnEvent]) -> None:
        later = [event for event in trace if event.time > 0]
        self._run(self._play, later, time.monotonic())

    def close(self) -> None:
        """Ends all coming and going."""
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _run(self, target: Any, *given: Any) -> None:
        thread = threading.Thread(target=target, args=given)
        self._threads.append(thread)
        thread.start()

    def _play(self, trace: Sequence[ChurnEvent], begun: float) -> None:
        for event in trace:
            if self._is_over.wait(max(0.0, begun + event.time - time.monotonic())):
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
            if self._is_over.wait(0.05) or host not in self._peers.processes:
                return
        self._lived.starts.append(time.monotonic() - begun)


def live(trace: Sequence[ChurnEvent], seconds: float) -> LiveRun:
    """Runs a swarm of processes under a trace."""
    options = {
        "job": "gpt-test",
        "options": gpt(STAGES, batch=MICRO_BATCHES, width=16, sequence=16),
        "stages": STAGES,
        "micro_batches": MICRO_BATCHES,
        "call_takes": [FORWARD_SECONDS, BACKWARD_SECONDS],
    }
    run, peers, steps = LiveRun(), Peers(options), itertools.count()

    def tell(kind: str, **fields: Any) -> None:
        del fields
        run.messages[kind] = run.messages.get(kind, 0) + 1

    serving = RegistryServer(
        cut_of(options),
        KEY,
        Settings(steps=10**6, call_seconds=10.0, snapshot_every=SNAPSHOT_EVERY),
        lease_seconds=LEASE_SECONDS,
        tell=tell,
        rebalance=StageMover(STAGES, period=REBALANCE_SECONDS),
    )
    player = Player(serving, peers, run)
    is_quiet = threading.Event()
    calls, computed = noted(serving, is_quiet.is_set)
    updates = timed_updates(serving)
    try:
        for number in range(2 * STAGES):
            player.start(f"p{number}", number % STAGES)
        peers.ready(serving)
        start, first = 0.0, 0
        for step, _ in serving.run():
            now = time.monotonic()
            if next(steps) == 0:
                is_quiet.set()  # Programs are compiled in the first step.
            if not start and step == 1 + QUIET_STEPS:
                is_quiet.clear()
                start, first = now, step
                run.update_seconds = statistics.median(updates[1:])
                player.begin(trace)
            elif start:
                done = float(MICRO_BATCHES * (step - first))
                run.curve.append((now - start, done))
                if now - start > seconds:
                    break
    finally:
        player.close()
        peers.close()
        serving.close()
    run.latency = latency_of(calls, computed)
    return run


def timed_updates(serving: RegistryServer) -> list[float]:
    """Returns a list that gets the seconds of each later sum and update."""
    trainer: Any = serving.trainer
    real_commit, seconds = trainer._committed, []

    def timed_commit(computed: Any) -> Any:
        start = time.monotonic()
        commit = real_commit(computed)
        seconds.append(time.monotonic() - start)
        return commit

    trainer._committed = timed_commit
    return seconds


def latency_of(calls: Noted, computed: Noted) -> float:
    """Returns the seconds of a link in a call, of those that waited least."""
    quantiles = [
        statistics.quantiles(
            [call - own for call, own in zip(calls[key], computed[key], strict=True)],
            n=10,
        )[0]
        for key in calls
    ]
    return max(0.0, statistics.mean(quantiles)) / LATENCIES


def simulated_curve(trace: Sequence[ChurnEvent], run: LiveRun, seconds: float) -> Curve:
    """Simulates the trace with the live run's parameters."""
    link = PeerLink(latency_seconds=run.latency)
    both = FORWARD_SECONDS + BACKWARD_SECONDS
    inner = StageCost(
        forward_seconds=FORWARD_SECONDS,
        backward_seconds=BACKWARD_SECONDS,
        update_seconds=run.update_seconds,
    )
    last = dataclasses.replace(inner, forward_seconds=0.0, backward_seconds=both)
    setting = Setting(
        stages=(*[inner] * (STAGES - 1), last),
        micro_batches=MICRO_BATCHES,
        period=REBALANCE_SECONDS,
        compile_seconds=statistics.mean(run.starts) if run.starts else 0.0,
        forget_seconds=LEASE_SECONDS,
        snapshot_every=SNAPSHOT_EVERY,
    )
    events = [dataclasses.replace(event, link=link) for event in trace]
    simulation = simulate(setting, events, seconds + LONGEST_STEP)
    return [(at, float(done)) for at, done in simulation.timeline]


def compare_traces(seeds: int, seconds: float) -> dict[str, Any]:
    """Runs and simulates ``seeds`` traces of some seconds each."""
    rows = []
    for seed in range(seeds):
        trace = draw(churn(seconds), seed)
        run = live(trace, seconds)
        pair = [
            round(done_at(curve, seconds), 1)
            for curve in (simulated_curve(trace, run, seconds), run.curve)
        ]
        row = {
            "seed": seed,
            "simulated": pair[0],
            "live": pair[1],
            "ratio": round(pair[0] / pair[1], 3),
            "latency": round(run.latency, 4),
            "update_seconds": round(run.update_seconds, 3),
            "newcomer_seconds": [round(x, 1) for x in run.starts],
            "told": run.messages,
        }
        print(json.dumps(row), flush=True)
        rows.append(row)
    totals = [sum(row[key] for row in rows) for key in ("simulated", "live")]
    return {
        "simulated_over_live": round(totals[0] / totals[1], 3),
        "by_seed": [[row["simulated"], row["live"]] for row in rows],
        "trace_seconds": seconds,
    }


def measured() -> dict[str, Any]:
    """Returns the results that ``bench_swarm.py`` stores."""
    return compare_traces(3, 150.0)


def main() -> None:
    parser = argparse.ArgumentParser(description="Simulated and live swarms.")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=150.0, help="of a trace")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    print(json.dumps(compare_traces(args.seeds, args.seconds)))


if __name__ == "__main__":
    main()
