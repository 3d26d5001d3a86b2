"""Swarms under faults: what is lost, counted twice, or differs from one process.

    python scripts/bench_swarm.py [--faults 4] [--measure] [--first 0] [--full]
        [--seconds 540] [--refresh] [--no-keep] [--model gpt-test] [--journal FILE]

Runs of 30 steps of a gpt in 3 stages with 2 peers each, all processes of their own.
Drawn peers send themselves SIGKILL or SIGSTOP at a drawn point of the protocol
(forward, backward, sum, apply, download, save), one after the other, and each is
replaced by a process that was started ahead. A further trainer leads beside the first;
it is killed in the middle of a step, the next one is stopped (``trainers_lost``: of
both, those that were found to be gone). Each peer answers a question for a sum with
the micro-batches that it has added, which the ledger's journal keeps:

``drawn``: faults that peers were started with. ``faults``: those that came about; a
peer writes a line before it sends itself the signal. ``killed_from_outside``: peers
that nobody asked for what they were to end at. ``lost``, ``doubled``: micro-batches of
committed steps that a peer of their stage had not in its sum, or more than once, by
those answers. ``digests_equal``: peers of a stage had the same parameters and optimizer
state after each step; ``max_rel_loss_diff``: of any step, to the same steps in one
process. Sums are compared by the digests and the losses alone.

Beside them, runs without faults in one process: ``int8_wire_ratio``, bytes of tensors
at borders over a wire of float32 over those of int8, as peers counted them; and the
largest difference of losses for bf16 and int8.

From ``swarm_measured.py``, which says what they are: ``of_max_flow``, ``over_static``,
``link_step_ratio``, ``interface_int8_wire_ratio``, ``over_restarting_gpipe`` and
``joiner_steps``; from ``swarm_traced.py``, ``simulated_over_live``; from
``swarm_simulated.py``, ``of_optimum_under_churn`` and ``without_rebalancing``. They are
the newest kept ones, with the commit of each in ``measured_at``, or, with
``--measure``, new ones. ``kept``: faults of all kept runs, of whatever commit.

Finished runs are kept in ``scripts/swarm.json`` with commit, versions and seeds; one
that is there for this commit is not run again, unless ``--refresh``. Those of a changed
working tree are neither kept nor read, and none are with ``--no-keep``. The last line
is one JSON object.
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
KEPT: Final = ROOT / "scripts" / "swarm.json"
STAGES: Final = 3
PEERS: Final = 6
STEPS: Final = 30
MICRO_BATCHES: Final = 8
MOST_FAULTS: Final = 45
"""Of a run, three at a time."""

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


def given(model: str) -> dict[str, Any]:
    """Options of a peer's process."""
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
    """Of each step in one process."""
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
    found = []
    for number in range(steps):
        state, metrics = step(state, job.batch_at(number))
        found.append(float(metrics["loss"]))
    return found


def faulty_run(
    options: dict[str, Any],
    seed: int,
    faults: int,
    whole: list[float],
    until: float,
    journal: list[dict[str, Any]],
) -> dict[str, Any]:
    """One run of processes with faults; what happens is added to the journal."""
    told: Counter[str] = Counter()
    begun = time.monotonic()

    def write(event: str, fields: Any) -> None:
        at = {"event": event, "seconds": round(time.monotonic() - begun, 2)}
        journal.append({**at, **json.loads(json.dumps(fields))})

    def tell(kind: str, **more: Any) -> None:
        told.update([kind])
        write(f"told: {kind}", more)

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
        losses = stepped(serving, processes, write, until)
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
        "digests_equal": told["differs"] == 0,
        "max_rel_loss_diff": difference([losses[k + 1] for k in range(steps)], whole),
        "recomputed": serving.trainer.counts.recomputed,
        "late_calls": serving.trainer.counts.late,
        "went_back": told["went back"],
        "trainers": told["trainer joined"],
        "trainers_lost": told["trainer lost"],
        "waited": round(processes.waited, 1),
        "seconds": round(time.monotonic() - begun, 1),
    }


def stepped(
    serving: RegistryServer,
    processes: Processes,
    write: Callable[[str, Any], None],
    until: float,
) -> dict[int, float]:
    """The loss of each step, by its number; between two, peers are replaced."""
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


def difference(losses: list[float], whole: list[float]) -> float:
    """The largest relative difference of a loss."""
    pairs = zip(losses, whole, strict=False)
    return max((abs(a - b) / abs(b) for a, b in pairs), default=float("nan"))


def quiet_run(
    options: dict[str, Any], wire: str, steps: int
) -> tuple[list[float], int]:
    """Losses, and bytes at borders, of peers in this process."""
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


def wires(options: dict[str, Any], whole: list[float]) -> dict[str, Any]:
    """What narrow wires save and cost."""
    steps = 5
    found = {wire: quiet_run(options, wire, steps) for wire in ("f32", "bf16", "int8")}
    return {
        "int8_wire_ratio": round(found["f32"][1] / found["int8"][1], 3),
        "bf16_wire_ratio": round(found["f32"][1] / found["bf16"][1], 3),
        "int8_max_rel_loss_diff": difference(found["int8"][0], whole),
        "bf16_max_rel_loss_diff": difference(found["bf16"][0], whole),
        "quiet_max_rel_loss_diff": difference(found["f32"][0], whole),
    }


class Kept:
    """Results on disk, written after each."""

    def __init__(self, *, refresh: bool, keep: bool = True) -> None:
        there = KEPT.is_file() and not refresh
        self.runs: list[dict[str, Any]] = json.loads(KEPT.read_text()) if there else []
        self._keep = keep

    def find(self, **wanted: Any) -> dict[str, Any] | None:
        """A result with these values; none of a changed tree, or if none are kept."""
        if not self._keep or wanted["commit"].endswith(checkout.CHANGED):
            return None
        return next(
            (r for r in self.runs if all(r.get(k) == v for k, v in wanted.items())),
            None,
        )

    def newest(self, kind: str) -> dict[str, Any] | None:
        """The last result of a kind, of whatever commit."""
        return next((r for r in reversed(self.runs) if r["kind"] == kind), None)

    def faults(self) -> dict[str, Any]:
        """Of all kept runs that say which faults came about."""
        runs = [r for r in self.runs if r["kind"] == "faults" and "drawn" in r]
        return {
            "runs": len(runs),
            "commits": len({r["commit"] for r in runs}),
            **_sums(runs),
        }

    def add(self, **result: Any) -> dict[str, Any]:
        """Keep a result, unless it is of a changed tree, or none are kept."""
        versions = {"jax": jax.__version__, "jaxlib": jaxlib.version.__version__}
        record = {**result, **versions, "numpy": np.__version__}
        if self._keep and not record["commit"].endswith(checkout.CHANGED):
            self.runs.append(record)
            KEPT.write_text(json.dumps(self.runs, indent=1) + "\n")
        return record


def seeds(faults: int, first: int) -> Iterator[tuple[int, int]]:
    """A seed and a number of faults for each run."""
    number = first
    while faults > 0:
        yield number, min(MOST_FAULTS, faults)
        faults, number = faults - MOST_FAULTS, number + 1


def _sums(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """What runs with faults came to."""
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


def _slow(kept: Kept, here: str, *, measure: bool) -> dict[str, Any]:
    """What slow processors, slow links and churn came to, and at which commit."""
    found: dict[str, Any] = {}
    at: dict[str, str] = {}
    for kind in (*swarm_measured.KINDS, "trace", "simulated"):
        result = kept.newest(kind)
        if measure:
            result = kept.add(kind=kind, commit=here, **_measured(kind))
        if result is not None:
            at[kind] = result["commit"]
            found |= {SLOW_KEYS[k]: v for k, v in result.items() if k in SLOW_KEYS}
    return {**found, "measured_at": at}


def main() -> None:
    """Run what is not kept, and print what came out."""
    parser = argparse.ArgumentParser(description="Swarms under faults.")
    parser.add_argument("--faults", type=int, default=4, help="in all runs together")
    parser.add_argument("--full", action="store_true", help="20 faults")
    parser.add_argument("--refresh", action="store_true", help="forget what is kept")
    parser.add_argument(
        "--no-keep", dest="keep", action="store_false", help="run anew, write no file"
    )
    parser.add_argument("--measure", action="store_true", help="all of these")
    parser.add_argument("--first", type=int, default=0, help="seed of the first run")
    parser.add_argument("--seconds", type=float, default=LONGEST_SECONDS, help="limit")
    parser.add_argument("--model", default="gpt-test", help="a model of the package")
    parser.add_argument("--journal", help="file for what happened in the runs, by time")
    words = parser.parse_args()
    swarm_processes.prepare()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_compilation_cache_dir", CACHED["JAX_COMPILATION_CACHE_DIR"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    until = time.monotonic() + (1e9 if words.full else words.seconds)
    options, kept, here = (
        given(words.model),
        Kept(refresh=words.refresh),
        checkout.commit(),
    )
    whole = single_losses(options, STEPS)
    same = {"commit": here, "model": words.model}
    narrow = kept.find(kind="wires", **same)
    if narrow is None:
        narrow = kept.add(kind="wires", **same, **wires(options, whole))
    runs = []
    for seed, faults in seeds(20 if words.full else words.faults, words.first):
        wanted = {"kind": "faults", **same, "seed": seed, "asked": faults}
        found = kept.find(**wanted)
        if found is None:
            if time.monotonic() > until:
                break
            journal: list[dict[str, Any]] = []
            try:
                result = faulty_run(options, seed, faults, whole, until, journal)
            finally:
                if words.journal:
                    with open(words.journal, "a", encoding="utf-8") as file:
                        file.writelines(json.dumps(line) + "\n" for line in journal)
            found = kept.add(**{**wanted, **result})
        print(json.dumps(found), flush=True)
        runs.append(found)
    told = {
        "commit": here,
        "runs": len(runs),
        **_sums(runs),
        **{k: v for k, v in narrow.items() if k.endswith(("_ratio", "_diff"))},
        **_slow(kept, here, measure=words.measure),
        "kept": kept.faults(),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
