"""Measures swarms on slow processors, over slow links and under churn, as processes.

    python scripts/swarm_measured.py [--only quotas,links,churn] [--churn-seconds 120]

Needs root: peers run under CPU quotas (control groups) and in network namespaces whose
links are shaped by ``tc tbf``. All peers share the cores of this machine, so every
comparison is within one run of the same processes, or with a prediction from times of
that run. The last line is one JSON object.

``quotas``: 3 stages, each of one peer with 40 % of a core and one with 10 %; 256
micro-batches a step, 24 at once.

    of_max_flow     micro-batches a second, sums and updates included, over the limit of
                    the stage that needs most processor time: the quotas of its peers
                    over the processor seconds that they spent on a micro-batch
    over_static     the same over peers that are called in turn, so that both of a stage
                    get equally many micro-batches; ideally 2.5

``links``: 3 stages of one peer each, in namespaces of their own.

    link_step_ratio  seconds of a step over the simulator's, by Mb/s and wire. Its input
                     is TCP's rate each way over such a link, and times of calls before
                     links were limited, with one micro-batch under way, so that no call
                     waits for another: the computing that a peer reports with float32
                     keeps it busy, and the rest of a call is its latency
    goodput_part     TCP's part of the rate, between two of the namespaces
    int8_wire_ratio  bytes over the interfaces with float32 between stages, over those
                     with int8
    border_part      part of these bytes that are tensors between stages; the rest are
                     batches, headers, requests and announcements

``churn``: 3 stages of 2 peers; a random peer is killed every ``--churn-interval``
seconds, and a process that replaces it is started at once.

    over_restarting_gpipe  steps a second of the swarm over those of the same peers and
                     programs as a rigid pipeline: all of them restart from the newest
                     checkpoint, 5 steps apart, when one is killed. Their start counts
                     as the seconds of a newcomer of the swarm, since on a machine of
                     few cores six processes start more slowly than one; kills while
                     they start are left out
    joiner_steps     largest number of steps from the state that a newcomer took to the
                     first in which it had to compute
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
from network_namespaces import (
    BRIDGE_ADDRESS,
    Space,
    carried,
    goodput,
    namespaces,
    shape,
    unshape,
)
from run_key import new_key
from swarm_peer import cut_of

import whalejax as wh
from whalejax.distributed.cgroup_quota import Quota
from whalejax.swarm.churn import ChurnEvent, PeerEventKind, PeerLink
from whalejax.swarm.quantize import BLOCK
from whalejax.swarm.simulator import Setting, StageCost, simulate
from whalejax.swarm.stage_assignment import Rule
from whalejax.swarm_runtime.registry import PeerRecord
from whalejax.swarm_runtime.registry_server import RegistryServer
from whalejax.swarm_runtime.staged_job import StagedJob
from whalejax.swarm_runtime.trainers.trainer_state import Settings


ROOT: Final = Path(__file__).resolve().parents[1]
STAGES: Final = 3
KEY: Final = new_key()
READY_SECONDS: Final = 300.0
ENVIRONMENT: Final = {
    "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}",
    "JAX_PLATFORMS": "cpu",
    "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    # One thread each, because spinning waits would use up a quota.
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
}
QUOTAS: Final = (40.0, 10.0)
STATIC_STEPS: Final = 1
CPU_WEIGHT: Final = 30.0
"""CPU weight relative to other processes on this machine."""

ROWS: Final = 8192
WIDTH: Final = 64


def wide() -> wh.Job:
    """Returns layers with little computing for their transfers: 2 MiB at each cut."""

    def make_model(key: Any) -> dict[str, Any]:
        keys = jax.random.split(key, STAGES + 1)
        shapes = [(8, WIDTH), *[(WIDTH, WIDTH)] * (STAGES - 1), (WIDTH, 8)]
        return {
            f"w{i}": jax.random.normal(k, shape) * 0.2
            for i, (k, shape) in enumerate(zip(keys, shapes, strict=True))
        }

    def loss_fn(model: Any, batch: Any) -> Any:
        hidden = batch["x"]
        for i in range(STAGES + 1):
            hidden = jnp.tanh(hidden @ model[f"w{i}"])
        return jnp.mean(hidden**2)

    def batch(step: int, size: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(step)
        return {"x": rng.normal(size=(size, 8)).astype(np.float32)}

    return wh.Job(loss_fn, make_model, batch, optax.sgd(0.1), batch_size=12 * ROWS)


def gpt(layers: int, *, batch: int, width: int, sequence: int) -> dict[str, Any]:
    return {
        "layers": layers,
        "batch_size": batch,
        "embed": width,
        "heads": 2,
        "mlp": 4 * width,
        "vocab": 64,
        "sequence": sequence,
    }


class Peers:
    def __init__(self, peer_options: dict[str, Any]) -> None:
        self._given, self.serving = peer_options, None
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._hosts = itertools.count(2)

    def start(
        self,
        serving: RegistryServer,
        stage: int,
        *,
        space: Space | None = None,
        host: str = "",
    ) -> str:
        """Starts a peer; returns its address."""
        host = host or f"127.0.1.{next(self._hosts)}"
        options = {
            **self._given,
            "stage": stage,
            "host": host,
            "registry": list(serving.address),
            "key": str(KEY.path),
            "pull_seconds": 30.0,
        }
        prefix = [] if space is None else space.inside
        self.processes[host] = subprocess.Popen(
            [*prefix, sys.executable, str(ROOT / "scripts/swarm_peer.py")]
            + [json.dumps(options)],
            env={**os.environ, **ENVIRONMENT},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        return host

    def ready(self, serving: RegistryServer) -> None:
        """Waits until all are ready."""
        end = time.monotonic() + READY_SECONDS
        while True:
            members = serving.trainer.fleet.members()
            if {m.address[0] for m in members if m.ready} >= self.processes.keys():
                return
            if time.monotonic() > end:
                raise SystemExit(f"after {READY_SECONDS:.0f} s peers are not ready")
            time.sleep(0.05)

    def kill(self, host: str) -> None:
        process = self.processes.pop(host)
        process.kill()
        process.wait()

    def close(self) -> None:
        for host in [*self.processes]:
            self.kill(host)


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# Slow processors.


def choose_in_turn(serving: RegistryServer) -> Callable[..., PeerRecord | None]:
    """Returns a choice of peers in turn, as if they were equal."""
    turns: Counter[tuple[int, float]] = Counter()
    lock = threading.Lock()

    def choose(
        stage: int, task: float, avoid: Collection[str] = ()
    ) -> PeerRecord | None:
        del avoid
        peers = serving.trainer.fleet.usable(stage)
        with lock:
            turns[stage, task] += 1
            return peers[turns[stage, task] % len(peers)] if peers else None

    return choose


def quotas(steps: int) -> dict[str, Any]:
    """Measures peers of different speed, chosen by speed and in turn."""
    count = 256
    options = gpt(STAGES, batch=4 * count, width=128, sequence=64)
    peer_options = {
        "job": "gpt-test",
        "options": options,
        "stages": STAGES,
        "micro_batches": count,
    }
    settings = Settings(
        steps=1 + steps + STATIC_STEPS, call_seconds=300.0, in_flight=24
    )
    serving = RegistryServer(cut_of(peer_options), KEY, settings)
    peers = Peers(peer_options)
    with contextlib.ExitStack() as stack:
        stack.callback(serving.close)
        stack.callback(peers.close)
        hosts = [
            [peers.start(serving, stage) for _ in QUOTAS] for stage in range(STAGES)
        ]
        peers.ready(serving)
        for stage_hosts in hosts:
            for host, percent in zip(stage_hosts, QUOTAS, strict=True):
                quota = stack.enter_context(Quota(percent))
                quota.weigh(CPU_WEIGHT)
                quota.add(peers.processes[host].pid)

        def used() -> list[float]:
            return [
                sum(processor_seconds(peers.processes[h].pid) for h in stage_hosts)
                for stage_hosts in hosts
            ]

        starts, used_before = [], []
        for step, _ in serving.run():
            starts.append(time.monotonic())
            used_before.append(used())
            if step == 1 + steps:
                serving.trainer.fleet.choose = choose_in_turn(serving)  # type: ignore[method-assign]
        seconds = (starts[steps] - starts[0]) / steps
        static = (starts[-1] - starts[steps]) / STATIC_STEPS
        by_micro_batch = [
            (b - a) / steps / count
            for a, b in zip(used_before[0], used_before[steps], strict=True)
        ]
    limit = sum(QUOTAS) / 100 / max(by_micro_batch)
    return {
        "of_max_flow": round(count / seconds / limit, 3),
        "over_static": round(static / seconds, 3),
        "quota_step_seconds": round(seconds, 2),
        "static_step_seconds": round(static, 2),
        "processor_seconds": [round(x, 4) for x in by_micro_batch],
    }


# Slow links.

Pairs = list[tuple[float, float]]
"""Seconds of the forward and the backward pass of each stage."""

LATENCIES: Final = 4
"""Latencies of a call: request, request for tensors, tensors, answer."""


def predicted_seconds(
    cut: StagedJob, calls: Pairs, computed: Pairs, border: float, rate: float
) -> float:
    """Returns the simulated seconds of a step.

    Args:
        cut: Model in stages.
        calls: Seconds of forward and backward of each stage, without other calls.
        computed: Part of them that the peer computed.
        border: Bytes of a tensor between stages.
        rate: Bytes a second of a link.
    """
    batch = ROWS * 8 * 4
    costs = []
    for stage, (forward, backward) in enumerate(computed):
        first, last = stage == 0, stage == cut.stages - 1
        into = batch if first else border
        # With one peer a stage, the backward pass has the inputs of the forward.
        costs.append(
            StageCost(
                forward_seconds=forward,
                backward_seconds=backward,
                forward_bytes=(0, 0) if last else (int(into), int(border)),
                backward_bytes=(int(border), 0 if first else int(border)),
            )
        )
    trace = []
    for stage in range(cut.stages):
        pairs = zip(calls[stage], computed[stage], strict=True)
        latencies = [max(call - computing, 0.0) for call, computing in pairs if call]
        link = PeerLink(
            up_bytes_per_second=rate,
            down_bytes_per_second=rate,
            latency_seconds=statistics.mean(latencies) / LATENCIES,
        )
        trace.append(
            ChurnEvent(time=0.0, event=PeerEventKind.JOIN, peer=f"p{stage}", link=link)
        )
    setting = Setting(
        stages=tuple(costs), micro_batches=cut.count, rule=Rule.NONE, period=1e9
    )
    simulation = simulate(setting, trace, 600.0)
    return statistics.median(simulation.step_seconds[1:])


Noted = dict[tuple[int, str], list[float]]
"""Seconds by stage and ``"forward"`` or ``"backward"``."""


def noted(
    serving: RegistryServer, is_wanted: Callable[[], bool]
) -> tuple[Noted, Noted]:
    """Records the seconds of later calls, as the trainer and as peers measure them.

    Args:
        serving: Registry of the trainer that calls.
        is_wanted: Whether a call that ends now counts.
    """
    calls: Noted = {}
    computed: Noted = {}
    ask = serving.trainer.caller.ask

    def note(address: Any, question: Any, *, seconds: float) -> Any:
        start = time.monotonic()
        answer = ask(address, question, seconds=seconds)
        if question.kind in ("forward", "backward") and is_wanted():
            key = question.stage, question.kind
            calls.setdefault(key, []).append(time.monotonic() - start)
            computed.setdefault(key, []).append(answer.seconds)
        return answer

    serving.trainer.caller.ask = note  # type: ignore[method-assign]
    return calls, computed


def run_over_links(
    spaces: list[Space], cut: StagedJob, wire: str, rates: list[int], steps: int
) -> tuple[Pairs, Pairs, dict[int, float], float]:
    """Returns seconds of calls and of computing without limits, of steps, and bytes.

    Seconds of a step are by Mb/s; bytes are of a step without limits.
    """
    peer_options = {
        "job": "swarm_measured:wide",
        "stages": STAGES,
        "micro_batches": cut.count,
        "wire": wire,
    }
    all_steps = (1 + steps) * (1 + len(rates))
    # At first one micro-batch at a time, so that no call waits for another.
    settings = Settings(steps=all_steps, call_seconds=120.0, in_flight=1)
    serving = RegistryServer(cut, KEY, settings, wire=wire, host=BRIDGE_ADDRESS)
    peers = Peers(peer_options)
    ends: list[float] = []
    counts: list[int] = []
    calls, computed = noted(serving, lambda: 1 <= len(ends) < 1 + steps)
    try:
        for stage, space in enumerate(spaces):
            peers.start(serving, stage, space=space, host=space.address)
        peers.ready(serving)
        for step, _ in serving.run():
            ends.append(time.monotonic())
            counts.append(sum(map(carried, spaces)))
            if step % (1 + steps) == 0 and step < all_steps:
                serving.trainer.settings = dataclasses.replace(settings, in_flight=0)
                for space in spaces:
                    shape(space, rates[step // (1 + steps) - 1])
    finally:
        peers.close()
        serving.close()
    # The first step after each change is left out.
    firsts = [n * (1 + steps) for n in range(1, 1 + len(rates))]
    seconds = {
        rate: (ends[n + steps] - ends[n]) / steps
        for rate, n in zip(rates, firsts, strict=True)
    }
    call_seconds, own_seconds = (
        [
            (
                statistics.median(source.get((stage, "forward"), [0.0])),
                statistics.median(source[stage, "backward"]),
            )
            for stage in range(STAGES)
        ]
        for source in (calls, computed)
    )
    return call_seconds, own_seconds, seconds, (counts[steps] - counts[0]) / steps


def links(steps: int) -> dict[str, Any]:
    """Measures steps over links of 200 and 80 Mb/s and their bytes."""
    cut = StagedJob(wide(), stages=STAGES, micro_batches=12)
    nbytes = ROWS * WIDTH * 4
    borders = {"f32": nbytes, "int8": nbytes / 4 * (1 + 4 / BLOCK)}
    rates, ratios, rows, carried_bytes = [200, 80], {}, {}, {}
    calls: dict[str, Pairs] = {}
    own: dict[str, Pairs] = {}
    with namespaces(STAGES) as spaces:
        carries = {}
        for rate in rates:
            for space in spaces:
                shape(space, rate)
            carries[rate] = goodput(spaces)
        for space in spaces:
            unshape(space)
        for wire, border in borders.items():
            results = run_over_links(spaces, cut, wire, rates, steps)
            calls[wire], own[wire], seconds, carried_bytes[wire] = results
            for space in spaces:
                unshape(space)
            for rate in rates:
                model = predicted_seconds(
                    cut, calls[wire], own["f32"], border, carries[rate]
                )
                ratios[f"{wire} {rate}"] = round(seconds[rate] / model, 3)
                rows[f"{wire} {rate}"] = round(seconds[rate], 2), round(model, 2)
    # Each tensor goes out of one namespace and into another; there and back.
    crossings = 2 * 2 * (STAGES - 1) * cut.count
    parts = {
        wire: round(crossings * border / carried_bytes[wire], 4)
        for wire, border in borders.items()
    }
    return {
        "link_step_ratio": ratios,
        "link_seconds": rows,
        "int8_wire_ratio": round(carried_bytes["f32"] / carried_bytes["int8"], 3),
        "border_part": parts,
        "goodput_part": {
            str(rate): round(carries[rate] / (rate * 1e6 / 8), 3) for rate in rates
        },
        "call_seconds": _rounded(calls),
        "computed_seconds": _rounded(own),
    }


def _rounded(seconds: dict[str, Pairs]) -> dict[str, list[list[float]]]:
    return {
        wire: [[round(x, 4) for x in pair] for pair in stages]
        for wire, stages in seconds.items()
    }


# Churn.


class Journal:
    """Steps at which peers were first called, and at which they took the state."""

    def __init__(self) -> None:
        self.asked: dict[str, int] = {}
        self.joined: dict[str, int] = {}

    def write(self, event: str, fields: Any) -> None:
        """Receives events of the ledger."""
        if event == "begun":
            self.asked.setdefault(fields["peer"], fields["step"])

    def tell(self, kind: str, **more: Any) -> None:
        """Receives messages of the trainer."""
        if kind == "joined":
            self.joined.setdefault(more["peer"], more["step"])


class Kills:
    """Kills a random peer from time to time, and starts another in its place.

    Attributes:
        starts: Seconds from the start of each newcomer until it was ready.
        count: Number of kills.
    """

    def __init__(self, serving: RegistryServer, peers: Peers, interval: float) -> None:
        self._serving, self._peers, self._interval = serving, peers, interval
        self._stages = {
            peers.start(serving, n % STAGES): n % STAGES for n in range(2 * STAGES)
        }
        self._draw, self._over = random.Random(0), threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.starts: list[float] = []
        self.count = 0

    def begin(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends the kills."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(self._interval):
            synced = {m.address[0] for m in self._serving.trainer.fleet.synced()}
            hosts = sorted(synced & self._peers.processes.keys())
            if hosts:
                host = self._draw.choice(hosts)
                self._peers.kill(host)
                self.count += 1
                fresh = threading.Thread(target=self._start, args=(self._stages[host],))
                fresh.start()

    def _start(self, stage: int) -> None:
        start = time.monotonic()
        host = self._peers.start(self._serving, stage)
        self._stages[host] = stage
        fleet = self._serving.trainer.fleet
        while host not in {m.address[0] for m in fleet.members() if m.ready}:
            if self._over.wait(0.05):
                return
        self.starts.append(time.monotonic() - start)


def swarm_under_churn(
    options: dict[str, Any], interval: float, seconds: float
) -> tuple[float, list[float], int, int]:
    """Returns steps a second of a swarm, newcomers' starts, joiner steps, and kills."""
    journal, peers = Journal(), Peers(options)
    serving = RegistryServer(
        cut_of(options),
        KEY,
        Settings(steps=10**6, call_seconds=12.0, snapshot_every=5),
        lease_seconds=12.0,
        write=journal.write,
        tell=journal.tell,
    )
    kills = Kills(serving, peers, interval)
    first = last = 0
    start = spent = 0.0
    try:
        peers.ready(serving)
        for step, _ in serving.run():
            if not first:
                first, start = step, time.monotonic()
                kills.begin()
            last, spent = step, time.monotonic() - start
            if spent > seconds:
                break
    finally:
        kills.close()
        peers.close()
        serving.close()
    delays = [
        journal.asked[p] - s for p, s in journal.joined.items() if p in journal.asked
    ]
    speed = (last - first) / spent
    return speed, kills.starts, max(delays, default=-1), kills.count


def pipeline_under_churn(
    options: dict[str, Any], interval: float, seconds: float, start_seconds: float
) -> tuple[float, list[float], int]:
    """Returns steps a second of a rigid pipeline, its real starts, and restarts."""
    cut, draw = cut_of(options), random.Random(0)
    settings = Settings(steps=10**6, call_seconds=12.0, snapshot_every=5)
    snapshot, spent, first, last = None, 0.0, None, 0
    starts: list[float] = []
    next_kill = interval
    while True:
        serving = RegistryServer(
            cut, KEY, settings, snapshot=snapshot, generation=len(starts)
        )
        peers = Peers(options)
        try:
            start = time.monotonic()
            for n in range(2 * STAGES):
                peers.start(serving, n % STAGES)
            peers.ready(serving)
            starts.append(time.monotonic() - start)
            if first is not None:
                spent += start_seconds
            start = time.monotonic()
            for step, _ in serving.run():
                if first is None:  # The first start and step of both are left out.
                    first, start = step, time.monotonic()
                last = step
                now = spent + time.monotonic() - start
                if now > seconds or now > next_kill:
                    peers.kill(draw.choice(sorted(peers.processes)))
                    break
            spent += time.monotonic() - start
            if spent > seconds:
                break
            next_kill = interval * math.ceil((spent + start_seconds) / interval)
            snapshot = serving.trainer.newest
        finally:
            peers.close()
            serving.close()
    assert first is not None
    return (last - first) / spent, starts[1:], len(starts) - 1


def churn(interval: float, seconds: float) -> dict[str, Any]:
    """Measures a swarm and a rigid pipeline under the same kills."""
    options = {
        "job": "gpt-test",
        "options": gpt(STAGES, batch=32, width=64, sequence=64),
        "stages": STAGES,
        "micro_batches": 8,
    }
    swarm, newcomers, joiner, kills = swarm_under_churn(options, interval, seconds)
    swarm_part = {"joiner_steps": joiner, "newcomer_seconds": newcomers}
    print(json.dumps({**swarm_part, "steps_per_second": swarm}), flush=True)
    start = statistics.mean(newcomers) if newcomers else math.nan
    rigid, starts, restarts = pipeline_under_churn(options, interval, seconds, start)
    return {
        "over_restarting_gpipe": round(swarm / rigid, 3) if rigid else math.inf,
        "joiner_steps": joiner,
        "churn_interval": interval,
        "churn_kills": kills,
        "restarts": restarts,
        "swarm_steps_per_second": round(swarm, 3),
        "restarting_steps_per_second": round(rigid, 3),
        "newcomer_seconds": round(start, 2),
        "real_restart_seconds": round(statistics.mean(starts), 2) if starts else None,
    }


KINDS: Final = ("quotas", "links", "churn")


def measured(kind: str, *, interval: float = 15.0, seconds: float = 120.0) -> Any:
    """Returns the results of one of ``KINDS``, with churn of some seconds."""
    if kind == "quotas":
        return quotas(2)
    return links(3) if kind == "links" else churn(interval, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description="Swarms on slow machines.")
    parser.add_argument("--only", default=",".join(KINDS))
    parser.add_argument("--churn-interval", type=float, default=15.0)
    parser.add_argument("--churn-seconds", type=float, default=120.0)
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    report: dict[str, Any] = {}
    for kind in args.only.split(","):
        report |= measured(
            kind, interval=args.churn_interval, seconds=args.churn_seconds
        )
        print(json.dumps({"kind": kind, **report}), flush=True)


if __name__ == "__main__":
    main()
