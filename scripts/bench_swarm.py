"""Measures swarms under faults: lost and repeated work, and differences of losses.

    python scripts/bench_swarm.py [--faults 4] [--measure] [--first 0] [--full]
        [--seconds 540] [--refresh] [--no-keep] [--model gpt-test] [--journal FILE]

Runs of 30 steps of a gpt in 3 stages with 2 peers each, all processes of their own.
Random peers send themselves SIGKILL or SIGSTOP at a random point of the protocol
(forward, backward, sum, apply, download, save), in turn, and a process that was started
ahead replaces each. A secondary trainer works with the primary one; it is killed in the
middle of a step, the next one is stopped. Each peer answers a request for a sum with
the micro-batches that it has added, which the ledger's journal records. Further runs
without faults, in one process, compare wire formats. ``scripts/swarm.json`` stores
finished runs with commit, versions and seeds; a run of this commit is not repeated
unless ``--refresh``. Those of a changed working tree are neither stored nor read, and
none are with ``--no-keep``. The last line is one JSON object:

    drawn, faults        faults that peers were started with; faults that happened (a
                         peer writes a line before it sends itself the signal)
    killed_from_outside  peers that never reached the point of their fault
    trainers_lost        secondary trainers that were found to have failed
    lost, doubled        micro-batches of committed steps that a peer of their stage had
                         not in its sum, or more than once, by those answers
    digests_equal        whether peers of a stage had the same parameters and optimizer
                         state after each step
    max_rel_loss_diff    largest difference of a step's loss from one process
    int8_wire_ratio      bytes of tensors between stages in float32 over those in int8,
                         as peers counted them; bf16_wire_ratio likewise
    int8_max_rel_loss_diff, bf16_max_rel_loss_diff   differences of losses for a wire
    of_max_flow, over_static, link_step_ratio, interface_int8_wire_ratio,
    over_restarting_gpipe, joiner_steps              of ``swarm_measured.py``
    simulated_over_live                              of ``swarm_traced.py``
    of_optimum_under_churn, without_rebalancing      of ``swarm_simulated.py``
    measured_at          commits of the latter: the newest stored results or, with
                         ``--measure``, new ones
    kept                 totals of all stored runs, of whatever commit
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import checkout
import jax
import jaxlib.version
import numpy as np
import swarm_measured
import swarm_processes
import swarm_simulated
import swarm_traced
from run_key import new_key
from swarm_peer import cut_of, job_of
from swarm_processes import CACHED, Processes

import whalejax as wh
from whalejax import jobs
from whalejax.meshes import cluster
from whalejax.swarm.ledger import committed, count_lost_and_doubled
from whalejax.swarm_runtime.peer import Peer
from whalejax.swarm_runtime.registry_server import RegistryServer
from whalejax.swarm_runtime.trainers.trainer_state import Settings


ROOT: Final = Path(__file__).resolve().parents[1]
FILE: Final = ROOT / "scripts" / "swarm.json"
STAGES: Final = 3
PEERS: Final = 6
STEPS: Final = 30
MICRO_BATCHES: Final = 8
MOST_FAULTS: Final = 45
"""Largest number of faults of a run."""

CALL_SECONDS: Final = 8.0
SETTINGS: Final = Settings(
    steps=STEPS,
    call_seconds=CALL_SECONDS,
    state_seconds=2 * CALL_SECONDS,
    newcomer_seconds=CALL_SECONDS,
    snapshot_every=3,
)

KEY: Final = new_key()
LONGEST_SECONDS: Final = 540.0


def peer_options(model: str) -> dict[str, Any]:
    return {
        "job": model,
        "options": {
            "layers": 3,
            "batch_size": 16,
            "embed": 16,
            "heads": 2,
            "mlp": 32,
            "vocab": 64,
            "sequence": 8,
        },
        "stages": STAGES,
        "micro_batches": MICRO_BATCHES,
    }


def single_losses(options: dict[str, Any], steps: int) -> list[float]:
    """Returns the loss of each step in one process."""
    job = job_of(options)
    model, first = jobs.abstract_model(job), jobs.first_batch(job, None)
    plan = jobs.make_plan(
        job, model, first, cluster("cpu:1"), num_micro_batches=MICRO_BATCHES
    )
    devices = jax.devices()[:1]
    step = wh.compile(
        plan, job.loss_fn, model, optimizer=job.optimizer, devices=devices
    )
    state = step.init(job.make_model, rng=jax.random.key(0))
    losses = []
    for number in range(steps):
        state, metrics = step(state, job.batch_at(number))
        losses.append(float(metrics["loss"]))
    return losses


def faulty_run(
    options: dict[str, Any],
    seed: int,
    faults: int,
    single: list[float],
    until: float,
    journal: list[dict[str, Any]],
) -> dict[str, Any]:
    """Runs processes with faults; adds all events to the journal."""
    reports: Counter[str] = Counter()
    start = time.monotonic()

    def write(event: str, fields: Any) -> None:
        record = {"event": event, "seconds": round(time.monotonic() - start, 2)}
        journal.append({**record, **json.loads(json.dumps(fields))})

    def tell(kind: str, **fields: Any) -> None:
        reports.update([kind])
        write(f"told: {kind}", fields)

    serving = RegistryServer(
        cut_of(options), KEY, SETTINGS, lease_seconds=12.0, write=write, tell=tell
    )
    processes = Processes(
        serving,
        options,
        key=KEY.path,
        draw=random.Random(seed),
        faults=faults,
        steps=STEPS,
        call_seconds=CALL_SECONDS,
        write=write,
    )
    try:
        losses = run_steps(serving, processes, write, until)
        steps, happened = len(losses), processes.happened
    finally:
        processes.close()
        serving.close()
    lost, doubled = count_lost_and_doubled(journal)
    lost += STAGES * MICRO_BATCHES * (steps - len(committed(journal)))
    return {
        "seed": seed,
        "steps": steps,
        "drawn": processes.faults,
        "faults": happened,
        "from_outside": processes.outside,
        "lost": lost,
        "doubled": doubled,
        "digests_equal": reports["differs"] == 0,
        "max_rel_loss_diff": difference([losses[k + 1] for k in range(steps)], single),
        "recomputed": serving.trainer.counts.recomputed,
        "late_calls": serving.trainer.counts.late,
        "went_back": reports["went back"],
        "trainers": reports["trainer joined"],
        "trainers_lost": reports["trainer lost"],
        "waited": round(processes.waited, 1),
        "seconds": round(time.monotonic() - start, 1),
    }


def run_steps(
    serving: RegistryServer,
    processes: Processes,
    write: Callable[[str, Any], None],
    until: float,
) -> dict[int, float]:
    """Returns the loss of each step by number, replacing peers between steps."""
    losses: dict[int, float] = {}
    for number in range(PEERS):
        processes.start(number % STAGES, 2, faulty=number >= STAGES)
    processes.replace(0)
    processes.lead(0)
    for step, metrics in serving.run():
        losses[step] = float(metrics["loss"])
        write("stepped", {"step": step, "took": metrics["seconds"]})
        if time.monotonic() > until:
            break
        if step < STEPS:
            processes.replace(step)
            processes.lead(step)
    return losses


def difference(losses: list[float], single: list[float]) -> float:
    """Returns the largest relative difference of a loss."""
    pairs = zip(losses, single, strict=False)
    return max((abs(a - b) / abs(b) for a, b in pairs), default=float("nan"))


def quiet_run(
    options: dict[str, Any], wire: str, steps: int
) -> tuple[list[float], int]:
    """Returns the losses, and bytes between stages, of peers in this process."""
    cut = _cut(json.dumps(options))
    serving = RegistryServer(
        cut, KEY, Settings(steps=steps, call_seconds=120.0), wire=wire
    )
    peers = []
    try:
        for stage in range(STAGES):
            peer = Peer(cut, KEY, serving.address, stage=stage, wire=wire)
            peers.append(peer)
            peer.start()
        losses = [float(metrics["loss"]) for _, metrics in serving.run()]
        return losses, sum(p.worker.sent_bytes for p in peers)
    finally:
        for peer in peers:
            peer.close()
        serving.close()


_CUTS: Final[dict[str, Any]] = {}


def _cut(text: str) -> Any:
    if text not in _CUTS:
        _CUTS[text] = cut_of(json.loads(text))
    return _CUTS[text]


def wires(options: dict[str, Any], single: list[float]) -> dict[str, Any]:
    """Measures the savings and errors of narrow wires."""
    steps = 5
    runs = {wire: quiet_run(options, wire, steps) for wire in ("f32", "bf16", "int8")}
    return {
        "int8_wire_ratio": round(runs["f32"][1] / runs["int8"][1], 3),
        "bf16_wire_ratio": round(runs["f32"][1] / runs["bf16"][1], 3),
        "int8_max_rel_loss_diff": difference(runs["int8"][0], single),
        "bf16_max_rel_loss_diff": difference(runs["bf16"][0], single),
        "quiet_max_rel_loss_diff": difference(runs["f32"][0], single),
    }


class RunStore:
    """Results on disk, written after each addition."""

    def __init__(self, *, refresh: bool, keep: bool = True) -> None:
        exists = FILE.is_file() and not refresh
        self.runs: list[dict[str, Any]] = json.loads(FILE.read_text()) if exists else []
        self._keep = keep

    def find(self, **values: Any) -> dict[str, Any] | None:
        """Returns a result with these values; None of a changed tree."""
        if not self._keep or values["commit"].endswith(checkout.CHANGED):
            return None
        return next(
            (r for r in self.runs if all(r.get(k) == v for k, v in values.items())),
            None,
        )

    def newest(self, kind: str) -> dict[str, Any] | None:
        """Returns the last result of a kind, of any commit."""
        return next((r for r in reversed(self.runs) if r["kind"] == kind), None)

    def faults(self) -> dict[str, Any]:
        """Returns totals of all stored runs that recorded their faults."""
        runs = [r for r in self.runs if r["kind"] == "faults" and "drawn" in r]
        return {
            "runs": len(runs),
            "commits": len({r["commit"] for r in runs}),
            **_sums(runs),
        }

    def add(self, **result: Any) -> dict[str, Any]:
        """Stores a result, unless it is of a changed tree."""
        versions = {"jax": jax.__version__, "jaxlib": jaxlib.version.__version__}
        record = {**result, **versions, "numpy": np.__version__}
        if self._keep and not record["commit"].endswith(checkout.CHANGED):
            self.runs.append(record)
            FILE.write_text(json.dumps(self.runs, indent=1) + "\n")
        return record


def seeds(faults: int, first: int) -> Iterator[tuple[int, int]]:
    """Yields a seed and a number of faults for each run."""
    number = first
    while faults > 0:
        yield number, min(MOST_FAULTS, faults)
        faults, number = faults - MOST_FAULTS, number + 1


def _sums(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "drawn": sum(len(r["drawn"]) for r in runs),
        "faults": sum(len(r["faults"]) for r in runs),
        "killed_from_outside": sum(r["from_outside"] for r in runs),
        "trainers_lost": sum(r.get("trainers_lost", 0) for r in runs),
        "steps": sum(r["steps"] for r in runs),
        "lost": sum(r["lost"] for r in runs),
        "doubled": sum(r["doubled"] for r in runs),
        "digests_equal": all(r["digests_equal"] for r in runs),
        "max_rel_loss_diff": max((r["max_rel_loss_diff"] for r in runs), default=None),
    }


SLOW_KEYS: Final = {
    "of_max_flow": "of_max_flow",
    "over_static": "over_static",
    "link_step_ratio": "link_step_ratio",
    "int8_wire_ratio": "interface_int8_wire_ratio",
    "over_restarting_gpipe": "over_restarting_gpipe",
    "joiner_steps": "joiner_steps",
    "simulated_over_live": "simulated_over_live",
    "of_optimum_under_churn": "of_optimum_under_churn",
    "without_rebalancing": "without_rebalancing",
}


def _measured(kind: str) -> dict[str, Any]:
    if kind == "trace":
        return swarm_traced.measured()
    if kind == "simulated":
        return swarm_simulated.under_churn(swarm_simulated.SEEDS)
    return dict(swarm_measured.measured(kind))


def _slow(store: RunStore, commit: str, *, measure: bool) -> dict[str, Any]:
    """Returns results on slow machines and under churn, and their commits."""
    results: dict[str, Any] = {}
    commits: dict[str, str] = {}
    for kind in (*swarm_measured.KINDS, "trace", "simulated"):
        result = store.newest(kind)
        if measure:
            result = store.add(kind=kind, commit=commit, **_measured(kind))
        if result is not None:
            commits[kind] = result["commit"]
            results |= {SLOW_KEYS[k]: v for k, v in result.items() if k in SLOW_KEYS}
    return {**results, "measured_at": commits}


def main() -> None:
    parser = argparse.ArgumentParser(description="Swarms under faults.")
    parser.add_argument("--faults", type=int, default=4, help="in all runs")
    parser.add_argument("--full", action="store_true", help="20 faults")
    parser.add_argument("--refresh", action="store_true", help="forget stored runs")
    parser.add_argument(
        "--no-keep", dest="keep", action="store_false", help="store nothing"
    )
    parser.add_argument("--measure", action="store_true", help="measure speed too")
    parser.add_argument("--first", type=int, default=0, help="seed of the first run")
    parser.add_argument("--seconds", type=float, default=LONGEST_SECONDS, help="limit")
    parser.add_argument("--model", default="gpt-test", help="a model of the package")
    parser.add_argument("--journal", help="file for events of the runs")
    args = parser.parse_args()
    swarm_processes.prepare()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_compilation_cache_dir", CACHED["JAX_COMPILATION_CACHE_DIR"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    until = time.monotonic() + (1e9 if args.full else args.seconds)
    options, store, commit = (
        peer_options(args.model),
        RunStore(refresh=args.refresh, keep=args.keep),
        checkout.commit(),
    )
    single = single_losses(options, STEPS)
    key = {"commit": commit, "model": args.model}
    wire_run = store.find(kind="wires", **key)
    if wire_run is None:
        wire_run = store.add(kind="wires", **key, **wires(options, single))
    runs = []
    for seed, faults in seeds(20 if args.full else args.faults, args.first):
        run_key = {"kind": "faults", **key, "seed": seed, "asked": faults}
        run = store.find(**run_key)
        if run is None:
            if time.monotonic() > until:
                break
            journal: list[dict[str, Any]] = []
            try:
                result = faulty_run(options, seed, faults, single, until, journal)
            finally:
                if args.journal:
                    with open(args.journal, "a", encoding="utf-8") as file:
                        file.writelines(json.dumps(line) + "\n" for line in journal)
            run = store.add(**{**run_key, **result})
        print(json.dumps(run), flush=True)
        runs.append(run)
    report = {
        "commit": commit,
        "runs": len(runs),
        **_sums(runs),
        **{k: v for k, v in wire_run.items() if k.endswith(("_ratio", "_diff"))},
        **_slow(store, commit, measure=args.measure),
        "kept": store.faults(),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
