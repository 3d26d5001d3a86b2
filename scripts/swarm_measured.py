"""Swarms on slow processors, over slow links and under churn, as processes.

    python scripts/swarm_measured.py [--only quotas,links,churn] [--churn-seconds 120]

Needs root: peers are put under CPU quotas (control groups) and into network namespaces
whose links are shaped by ``tc tbf``. All peers share the cores of this machine, so what
is compared was measured in one run of the same processes, or beside a prediction from
times that were measured in it.

``quotas``: 3 stages, each of one peer with 40 % of a core and one with 10 %; 256
micro-batches a step, 24 at once.
``of_max_flow``: micro-batches a second, sums and updates included, as a part of what
the stage that needs most processor time could do if its peers computed all the time:
the quotas of its peers over the processor seconds that they spent on a micro-batch.
``over_static``: beside the same peers that are asked in turn, so that each is given as
many micro-batches as its mate; ideally 2.5.

``links``: 3 stages of one peer each, in namespaces of their own. ``link_step_ratio``:
seconds of a step over the simulator's for these links, by Mb/s and wire. It is given
what TCP carries each way over a link that is limited so (``goodput_part``: of the rate,
between two of the namespaces), and times of calls before links were limited, with one
micro-batch under way, so that no call waits for another: what a peer says that it
computed with float32 keeps it busy, and the rest of a call, such as questions and the
coding of int8, is its latency. ``int8_wire_ratio``: bytes
that went over the interfaces with float32 between stages, over those with int8;
``border_part``: of these bytes, tensors at the borders of stages; the rest are batches
of data, headers, questions and announcements.

``churn``: 3 stages of 2 peers; one drawn peer is killed every ``--churn-interval``
seconds, and a process that replaces it is started at once.
``over_restarting_gpipe``: steps a second of the swarm over those of the same peers and
programs as a rigid pipeline: all of them are restarted from the newest checkpoint, 5
steps apart, when one is killed. Their start is charged with the seconds that a newcomer
of the swarm took, since on a machine of few cores six processes start more slowly than
one; kills while they start are left out. ``joiner_steps``: the most steps from that
whose state a newcomer took to the first in which it was asked to compute.

The last line is one JSON object.
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
from whalejax.swarm.rebalancing import Rule
from whalejax.swarm.simulator import Setting, StageCost, simulate
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
    # One thread each: what spins while it waits would use up a quota.
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
}
QUOTAS: Final = (40.0, 10.0)
STATIC_STEPS: Final = 1
OTHERS: Final = 30.0
"""Other processes that would compute at the same time."""

ROWS: Final = 8192
WIDTH: Final = 64


def wide() -> wh.Job:
    """Layers that compute little beside what they send: 2 MiB at each border."""

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
        drawn = np.random.default_rng(step)
        return {"x": drawn.normal(size=(size, 8)).astype(np.float32)}

    return wh.Job(loss_fn, make_model, batch, optax.sgd(0.1), batch_size=12 * ROWS)


def gpt(layers: int, *, batch: int, width: int, sequence: int) -> dict[str, Any]:
    """Options of a gpt."""
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
    """Processes that serve the stages of a run."""

    def __init__(self, given: dict[str, Any]) -> None:
        self._given, self.serving = given, None
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
        """One more; the address by which it is known."""
        host = host or f"127.0.1.{next(self._hosts)}"
        options = {
            **self._given,
            "stage": stage,
            "host": host,
            "registry": list(serving.address),
            "key": str(KEY.path),
            "pull_seconds": 30.0,
        }
        words = [] if space is None else space.inside
        self.processes[host] = subprocess.Popen(
            [*words, sys.executable, str(ROOT / "scripts/swarm_peer.py")]
            + [json.dumps(options)],
            env={**os.environ, **ENVIRONMENT},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        return host

    def ready(self, serving: RegistryServer) -> None:
        """Wait until all are."""
        end = time.monotonic() + READY_SECONDS
        while True:
            members = serving.trainer.fleet.members()
            if {m.address[0] for m in members if m.ready} >= self.processes.keys():
                return
            if time.monotonic() > end:
                raise SystemExit(f"after {READY_SECONDS:.0f} s peers are not ready")
            time.sleep(0.05)

    def kill(self, host: str) -> None:
        """End one."""
        process = self.processes.pop(host)
        process.kill()
        process.wait()

    def close(self) -> None:
        """End all."""
        for host in [*self.processes]:
            self.kill(host)


def processor_seconds(pid: int) -> float:
    """That a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# Slow processors.


def in_turn(serving: RegistryServer) -> Callable[..., PeerRecord | None]:
    """Asks the peers of each stage in turn, as if they were alike."""
    turns: Counter[tuple[int, float]] = Counter()
    lock = threading.Lock()

    def choose(
        stage: int, task: float, avoid: Collection[str] = ()
    ) -> PeerRecord | None:
        del avoid
        found = serving.trainer.fleet.usable(stage)
        with lock:
            turns[stage, task] += 1
            return found[turns[stage, task] % len(found)] if found else None

    return choose


def quotas(steps: int) -> dict[str, Any]:
    """Peers of unlike speed, chosen by speed and in turn."""
    count = 256
    options = gpt(STAGES, batch=4 * count, width=128, sequence=64)
    given = {
        "job": "gpt-test",
        "options": options,
        "stages": STAGES,
        "micro_batches": count,
    }
    settings = Settings(
        steps=1 + steps + STATIC_STEPS, call_seconds=300.0, in_flight=24
    )
    serving = RegistryServer(cut_of(given), KEY, settings)
    peers = Peers(given)
    with contextlib.ExitStack() as stack:
        stack.callback(serving.close)
        stack.callback(peers.close)
        hosts = [
            [peers.start(serving, stage) for _ in QUOTAS] for stage in range(STAGES)
        ]
        peers.ready(serving)
        for several in hosts:
            for host, percent in zip(several, QUOTAS, strict=True):
                quota = stack.enter_context(Quota(percent))
                quota.weigh(OTHERS)
                quota.add(peers.processes[host].pid)

        def used() -> list[float]:
            return [
                sum(processor_seconds(peers.processes[h].pid) for h in several)
                for several in hosts
            ]

        begun, before = [], []
        for step, _ in serving.run():
            begun.append(time.monotonic())
            before.append(used())
            if step == 1 + steps:
                serving.trainer.fleet.choose = in_turn(serving)  # type: ignore[method-assign]
        seconds = (begun[steps] - begun[0]) / steps
        static = (begun[-1] - begun[steps]) / STATIC_STEPS
        spent = [
            (b - a) / steps / count
            for a, b in zip(before[0], before[steps], strict=True)
        ]
    most = sum(QUOTAS) / 100 / max(spent)
    return {
        "of_max_flow": round(count / seconds / most, 3),
        "over_static": round(static / seconds, 3),
        "quota_step_seconds": round(seconds, 2),
        "static_step_seconds": round(static, 2),
        "processor_seconds": [round(x, 4) for x in spent],
    }


# Slow links.

Pairs = list[tuple[float, float]]
"""Seconds of a forward and of a backward of each stage."""

LATENCIES: Final = 4
"""Of a link in a call: the question, the tensors' question and they, the answer."""


def predicted(
    cut: StagedJob, calls: Pairs, computed: Pairs, border: float, rate: float
) -> float:
    """Seconds of a step by the simulator.

    Args:
        cut: the model in stages.
        calls: seconds of forward and backward of each stage, nothing else under way.
        computed: those of them that the peer computed.
        border: bytes of a tensor at a border.
        rate: bytes a second that a link carries.
    """
    batch = ROWS * 8 * 4
    costs = []
    for stage, (forward, backward) in enumerate(computed):
        first, last = stage == 0, stage == cut.stages - 1
        into = batch if first else border
        # One peer a stage: what it took for a forward it has for the backward.
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
        beside = [max(call - own, 0.0) for call, own in pairs if call]
        link = PeerLink(
            up_bytes_per_second=rate,
            down_bytes_per_second=rate,
            latency_seconds=statistics.mean(beside) / LATENCIES,
        )
        trace.append(
            ChurnEvent(time=0.0, event=PeerEventKind.JOIN, peer=f"p{stage}", link=link)
        )
    setting = Setting(
        stages=tuple(costs), micro_batches=cut.count, rule=Rule.NONE, period=1e9
    )
    found = simulate(setting, trace, 600.0)
    return statistics.median(found.step_seconds[1:])


Noted = dict[tuple[int, str], list[float]]
"""Seconds by stage, and ``"forward"`` or ``"backward"``."""


def noted(
    serving: RegistryServer, is_wanted: Callable[[], bool]
) -> tuple[Noted, Noted]:
    """What calls take from now on, as the trainer sees it, and as peers say.

    Args:
        serving: whose calls.
        is_wanted: whether one that ends now counts.
    """
    calls: Noted = {}
    computed: Noted = {}
    ask = serving.trainer.caller.ask

    def note(address: Any, question: Any, *, seconds: float) -> Any:
        begun = time.monotonic()
        answer = ask(address, question, seconds=seconds)
        if question.kind in ("forward", "backward") and is_wanted():
            key = question.stage, question.kind
            calls.setdefault(key, []).append(time.monotonic() - begun)
            computed.setdefault(key, []).append(answer.seconds)
        return answer

    serving.trainer.caller.ask = note  # type: ignore[method-assign]
    return calls, computed


def linked(
    spaces: list[Space], cut: StagedJob, wire: str, rates: list[int], steps: int
) -> tuple[Pairs, Pairs, dict[int, float], float]:
    """Seconds of calls without limits and computed in them, of a step, and its bytes.

    Those of a step are by Mb/s; bytes are of one without limits.
    """
    given = {
        "job": "swarm_measured:wide",
        "stages": STAGES,
        "micro_batches": cut.count,
        "wire": wire,
    }
    every = (1 + steps) * (1 + len(rates))
    # At first one micro-batch after the other: no call waits for another.
    settings = Settings(steps=every, call_seconds=120.0, in_flight=1)
    serving = RegistryServer(cut, KEY, settings, wire=wire, host=BRIDGE_ADDRESS)
    peers = Peers(given)
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
            if step % (1 + steps) == 0 and step < every:
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
    whole, own = (
        [
            (
                statistics.median(of.get((stage, "forward"), [0.0])),
                statistics.median(of[stage, "backward"]),
            )
            for stage in range(STAGES)
        ]
        for of in (calls, computed)
    )
    return whole, own, seconds, (counts[steps] - counts[0]) / steps


def links(steps: int) -> dict[str, Any]:
    """Steps over links of 200 and 80 Mb/s beside the simulator's, and bytes."""
    cut = StagedJob(wide(), stages=STAGES, micro_batches=12)
    whole = ROWS * WIDTH * 4
    borders = {"f32": whole, "int8": whole / 4 * (1 + 4 / BLOCK)}
    rates, ratios, told, carried_bytes = [200, 80], {}, {}, {}
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
            found = linked(spaces, cut, wire, rates, steps)
            calls[wire], own[wire], seconds, carried_bytes[wire] = found
            for space in spaces:
                unshape(space)
            for rate in rates:
                guess = predicted(cut, calls[wire], own["f32"], border, carries[rate])
                ratios[f"{wire} {rate}"] = round(seconds[rate] / guess, 3)
                told[f"{wire} {rate}"] = round(seconds[rate], 2), round(guess, 2)
    # Each tensor goes out of one namespace and into another; there and back.
    crossings = 2 * 2 * (STAGES - 1) * cut.count
    parts = {
        wire: round(crossings * border / carried_bytes[wire], 4)
        for wire, border in borders.items()
    }
    return {
        "link_step_ratio": ratios,
        "link_seconds": told,
        "int8_wire_ratio": round(carried_bytes["f32"] / carried_bytes["int8"], 3),
        "border_part": parts,
        "goodput_part": {
            str(rate): round(carries[rate] / (rate * 1e6 / 8), 3) for rate in rates
        },
        "call_seconds": _rounded(calls),
        "computed_seconds": _rounded(own),
    }


def _rounded(found: dict[str, Pairs]) -> dict[str, list[list[float]]]:
    return {
        wire: [[round(x, 4) for x in one] for one in several]
        for wire, several in found.items()
    }


# Churn.


class Journal:
    """What peers were asked, and which of them took the state when."""

    def __init__(self) -> None:
        self.asked: dict[str, int] = {}
        self.joined: dict[str, int] = {}

    def write(self, event: str, fields: Any) -> None:
        """Of the ledger."""
        if event == "begun":
            self.asked.setdefault(fields["peer"], fields["step"])

    def tell(self, kind: str, **more: Any) -> None:
        """Of the trainer."""
        if kind == "joined":
            self.joined.setdefault(more["peer"], more["step"])


class Kills:
    """Kills a drawn peer from time to time, and starts another in its place.

    Attributes:
        starts: seconds from the start of each newcomer until it was ready.
        count: of kills.
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
        """Kill from now on."""
        self._thread.start()

    def close(self) -> None:
        """Kill no more."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(self._interval):
            there = {m.address[0] for m in self._serving.trainer.fleet.synced()}
            hosts = sorted(there & self._peers.processes.keys())
            if hosts:
                host = self._draw.choice(hosts)
                self._peers.kill(host)
                self.count += 1
                again = threading.Thread(target=self._start, args=(self._stages[host],))
                again.start()

    def _start(self, stage: int) -> None:
        begun = time.monotonic()
        host = self._peers.start(self._serving, stage)
        self._stages[host] = stage
        fleet = self._serving.trainer.fleet
        while host not in {m.address[0] for m in fleet.members() if m.ready}:
            if self._over.wait(0.05):
                return
        self.starts.append(time.monotonic() - begun)


def churned(
    given: dict[str, Any], interval: float, seconds: float
) -> tuple[float, list[float], int, int]:
    """Steps a second of a swarm, starts of newcomers, joiner steps, and kills."""
    journal, peers = Journal(), Peers(given)
    serving = RegistryServer(
        cut_of(given),
        KEY,
        Settings(steps=10**6, call_seconds=12.0, snapshot_every=5),
        lease_seconds=12.0,
        write=journal.write,
        tell=journal.tell,
    )
    kills = Kills(serving, peers, interval)
    first = done = 0
    begun = spent = 0.0
    try:
        peers.ready(serving)
        for step, _ in serving.run():
            if not first:
                first, begun = step, time.monotonic()
                kills.begin()
            done, spent = step, time.monotonic() - begun
            if spent > seconds:
                break
    finally:
        kills.close()
        peers.close()
        serving.close()
    late = [
        journal.asked[p] - s for p, s in journal.joined.items() if p in journal.asked
    ]
    speed = (done - first) / spent
    return speed, kills.starts, max(late, default=-1), kills.count


def restarted(
    given: dict[str, Any], interval: float, seconds: float, start_seconds: float
) -> tuple[float, list[float], int]:
    """Steps a second of a rigid pipeline; what its starts really took; restarts."""
    cut, draw = cut_of(given), random.Random(0)
    settings = Settings(steps=10**6, call_seconds=12.0, snapshot_every=5)
    snapshot, spent, first, done = None, 0.0, None, 0
    starts: list[float] = []
    killed = interval
    while True:
        serving = RegistryServer(
            cut, KEY, settings, snapshot=snapshot, generation=len(starts)
        )
        peers = Peers(given)
        try:
            begun = time.monotonic()
            for n in range(2 * STAGES):
                peers.start(serving, n % STAGES)
            peers.ready(serving)
            starts.append(time.monotonic() - begun)
            if first is not None:
                spent += start_seconds
            begun = time.monotonic()
            for step, _ in serving.run():
                if first is None:  # The first start and step of both are left out.
                    first, begun = step, time.monotonic()
                done = step
                now = spent + time.monotonic() - begun
                if now > seconds or now > killed:
                    peers.kill(draw.choice(sorted(peers.processes)))
                    break
            spent += time.monotonic() - begun
            if spent > seconds:
                break
            killed = interval * math.ceil((spent + start_seconds) / interval)
            snapshot = serving.trainer.newest
        finally:
            peers.close()
            serving.close()
    assert first is not None
    return (done - first) / spent, starts[1:], len(starts) - 1


def churn(interval: float, seconds: float) -> dict[str, Any]:
    """A swarm and a rigid pipeline under the same kills."""
    given = {
        "job": "gpt-test",
        "options": gpt(STAGES, batch=32, width=64, sequence=64),
        "stages": STAGES,
        "micro_batches": 8,
    }
    swarm, newcomers, joiner, kills = churned(given, interval, seconds)
    swarm_part = {"joiner_steps": joiner, "newcomer_seconds": newcomers}
    print(json.dumps({**swarm_part, "steps_per_second": swarm}), flush=True)
    start = statistics.mean(newcomers) if newcomers else math.nan
    rigid, starts, restarts = restarted(given, interval, seconds, start)
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
    """What one kind gives.

    Args:
        kind: one of ``KINDS``.
        interval: from kill to kill.
        seconds: of churn.
    """
    if kind == "quotas":
        return quotas(2)
    return links(3) if kind == "links" else churn(interval, seconds)


def main() -> None:
    """Measure, and print what came out."""
    parser = argparse.ArgumentParser(description="Swarms on slow machines.")
    parser.add_argument("--only", default=",".join(KINDS))
    parser.add_argument("--churn-interval", type=float, default=15.0)
    parser.add_argument("--churn-seconds", type=float, default=120.0)
    words = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    told: dict[str, Any] = {}
    for kind in words.only.split(","):
        told |= measured(
            kind, interval=words.churn_interval, seconds=words.churn_seconds
        )
        print(json.dumps({"kind": kind, **told}), flush=True)


if __name__ == "__main__":
    main()
