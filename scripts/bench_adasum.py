"""Measures Adasum on eight virtual devices: its error, its cost and its benefit.

Devices combine random tensors, over 2 to 8 ranks and with tensor-parallel shards, and
are compared with float64; a step with Adasum and one with the mean are timed in turn;
and two tasks are learned with the sum, the mean and Adasum of the gradients of eight
ranks, each with learning rates of its own. These runs are computed on one device, all
seeds at once, by the definition in float32. ``adasum.json`` beside this script has
their results over 20 seeds, with commit, versions and seeds; without options the
script prints these and measures fresh seeds.

    python scripts/bench_adasum.py [--seeds 2] [--seed N] [--refresh] [--anew]

``--refresh`` measures the stored runs, writes each one as it ends, and continues where
it stopped (``--anew`` begins again). The last line is one JSON object:

    max_rel_diff        largest difference of a tensor from float64, over its norm
    ranks_differ        devices whose bits of a part differ from another's
    overhead_over_mean  time of a step with Adasum over one with the mean, less 1
    collectives_ratio   time of the combination alone, over a butterfly of ``ppermute``
                        of whole tensors with the same arithmetic
    steps               for each task and arm the learning rate with the lowest median
                        of steps to the task's loss, that median, and the number of
                        seeds that reached it; of the stored and of the fresh seeds
    seed                seed of the fresh measurements
    commits, versions   commits of the stored runs; versions of the packages
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import checkout
from paired import eight_devices, timed_pairs


eight_devices()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec  # noqa: E402

import whalejax as wh  # noqa: E402
from tests.adasum import differ, difference, on_devices, reference  # noqa: E402
from whalejax.lowering.spmd import adasum  # noqa: E402
from whalejax.planner.cost.adasum_cost import COLUMN, Part  # noqa: E402


FILE: Final = Path(__file__).with_name("adasum.json")
RANKS: Final = 8
STORED_SEEDS: Final = 20
RUN_SEEDS: Final = 5
"""Seeds that are measured and written together."""

STEPS: Final = 200
ARMS: Final = ("mean", "sum", "adasum")
RATES: Final = tuple(2.0**k for k in range(-8, 4))
"""Learning rates of every arm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A small network that learns from random samples.

    Attributes:
        loss: Function of parameters, inputs and answers.
        answers: Function of a key and inputs.
        sizes: Sizes of the layers.
        goal: Loss to reach.
        batch: Samples of a rank.
    """

    loss: Callable[..., Any]
    answers: Callable[..., Any]
    sizes: tuple[int, ...]
    goal: float
    batch: int = 4


def _network(params: Any, x: Any) -> Any:
    for w in params[:-1]:
        x = jnp.tanh(x @ w["kernel"] + w["bias"])
    return x @ params[-1]["kernel"] + params[-1]["bias"]


def _layers(key: Any, sizes: Sequence[int], scale: float = 1.0) -> Any:
    keys = jax.random.split(key, len(sizes) - 1)
    return [
        {
            "kernel": jax.random.normal(k, (n, m)) * scale / n**0.5,
            "bias": jnp.zeros(m),
        }
        for k, n, m in zip(keys, sizes[:-1], sizes[1:], strict=True)
    ]


def _teacher(key: Any, x: Any) -> Any:
    return _network(_layers(key, (8, 16, 1), 2.0), x)


def _square(params: Any, x: Any, y: Any) -> Any:
    return ((_network(params, x) - y) ** 2).mean()


def _sectors(key: Any, x: Any) -> Any:
    turned = x[:, :2] @ jax.random.orthogonal(key, 2)
    return jnp.floor(2 * jnp.arctan2(turned[:, 1], turned[:, 0]) / jnp.pi).astype(int)


def _classes(params: Any, x: Any, y: Any) -> Any:
    logits = _network(params, x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y % 4).mean()


TASKS: Final = {
    "regression": Task(loss=_square, answers=_teacher, sizes=(8, 32, 1), goal=0.2),
    "classes": Task(loss=_classes, answers=_sectors, sizes=(8, 32, 4), goal=0.15),
}


# Benefit.


def _pair(a: Any, b: Any) -> Any:
    def combine_leaf(a: Any, b: Any) -> Any:
        dot, x, y = (a * b).sum(), (a * a).sum(), (b * b).sum()
        first = 1 - jnp.where(x > 0, dot / (2 * jnp.where(x > 0, x, 1)), 0)
        second = 1 - jnp.where(y > 0, dot / (2 * jnp.where(y > 0, y, 1)), 0)
        return first * a + second * b

    return jax.tree.map(combine_leaf, a, b)


def _combine(gradients: Any, arm: str) -> Any:
    """Combines the gradients of ranks, along a leading dimension, by one arm."""
    if arm != "adasum":
        reduce = jnp.mean if arm == "mean" else jnp.sum
        return jax.tree.map(lambda x: reduce(x, 0), gradients)
    count = RANKS
    while count > 1:
        halves = [jax.tree.map(lambda x, f=f: x[f::2], gradients) for f in (0, 1)]
        gradients, count = jax.vmap(_pair)(*halves), count // 2
    return jax.tree.map(lambda x: x[0], gradients)


def _run(task: Task, rate: Any, seed: Any) -> Any:
    """Returns for each arm the first step at the goal, or ``STEPS``."""
    keys = jax.random.split(jax.random.key(seed), 4)
    inputs = task.sizes[0]
    probe = jax.random.normal(keys[2], (256, inputs))
    answers = task.answers(keys[1], probe)

    def step(arms: Any, key: Any) -> tuple[Any, Any]:
        x = jax.random.normal(key, (RANKS * task.batch, inputs))
        y = task.answers(keys[1], x)
        cut = [v.reshape(RANKS, task.batch, *v.shape[1:]) for v in (x, y)]
        stepped = {}
        for arm, params in arms.items():
            gradients = jax.vmap(jax.grad(task.loss), (None, 0, 0))(params, *cut)
            moves = _combine(gradients, arm)
            stepped[arm] = jax.tree.map(lambda p, g: p - rate * g, params, moves)
        return stepped, {a: task.loss(p, probe, answers) for a, p in stepped.items()}

    start = dict.fromkeys(ARMS, _layers(keys[0], task.sizes))
    _, losses = jax.lax.scan(step, start, jax.random.split(keys[3], STEPS))

    def first(losses: Any) -> Any:
        is_reached = losses <= task.goal
        return jnp.where(is_reached.any(), is_reached.argmax() + 1, STEPS)

    return jax.tree.map(first, losses)


Steps = dict[str, dict[str, list[int]]]
"""Steps to the goal of every seed, by arm and learning rate."""


@functools.cache
def _all_seeds(name: str) -> Any:
    run = functools.partial(_run, TASKS[name])
    return jax.jit(jax.vmap(jax.vmap(run, (None, 0)), (0, None)))


def measure_steps(name: str, seeds: Sequence[int]) -> Steps:
    """Returns the steps of all arms for a task."""
    steps = _all_seeds(name)(jnp.asarray(RATES), jnp.asarray(seeds, jnp.uint32))
    return {
        arm: dict(zip(map(str, RATES), np.asarray(rows).tolist(), strict=True))
        for arm, rows in steps.items()
    }


def merge_seeds(parts: Sequence[Steps]) -> Steps:
    return {
        arm: {
            rate: [n for part in parts for n in part[arm][rate]]
            for rate in parts[0][arm]
        }
        for arm in ARMS
    }


def best_rate(rows: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Returns the rate with the fewest steps, and its results."""
    rate = min(rows, key=lambda r: (statistics.median(rows[r]), sum(rows[r])))
    steps = rows[rate]
    return {
        "rate": float(rate),
        "median_steps": statistics.median(steps),
        "reached": sum(n < STEPS for n in steps),
        "of": len(steps),
    }


# Error and cost.


def exactness(seed: int) -> tuple[float, int]:
    """Returns the largest difference from float64, and devices that differ."""
    draw = np.random.default_rng(seed)
    shapes = {(3, 24, 8): 3, (7,): 1, (1,): 1, (4, 130): 1}
    worst, count = 0.0, 0
    meshes: list[dict[str, int]] = [{"data": n} for n in range(2, RANKS + 1)]
    for mesh in (*meshes, {"data": 2, "tensor": 2}, {"data": 3, "tensor": 2}):
        ranks, tensor = mesh["data"], ("tensor",) if "tensor" in mesh else ()
        specs = [((), (), tensor), ((),), ((),), ((), tensor)]
        values = [
            (draw.normal(size=(ranks, *s)) + 2 * draw.normal(size=s)).astype(np.float16)
            for s in shapes
        ]
        wide = [x.astype(np.float32) for x in values]
        slices = [*shapes.values()]
        combined = on_devices(wide, slices, specs=specs, mesh=mesh)
        for x, own, several in zip(combined, wide, slices, strict=True):
            worst = max(worst, difference(x, reference(own, several), several))
            count += differ(x)
    return worst, count


def _mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:RANKS]), ("data",), axis_types=(AxisType.Auto,))


@dataclass(frozen=True, slots=True, kw_only=True)
class _SingleDevice:
    """Dot products on a device that has the whole tensor: its own."""

    packing: Any

    @staticmethod
    def gather_numbers(own: Any) -> Any:
        return own[None]

    @staticmethod
    def local(every: Any) -> Any:
        return every


def _butterfly(stacked: Any) -> Any:
    """Computes Adasum by exchanging whole tensors with the partner of each level."""
    columns = stacked.shape[1] // COLUMN
    part = Part(slices=1, here=1, numbers=stacked.shape[1], columns=columns)
    packing = adasum._Packing(parts=(part,), ranks=1)
    alone: Any = _SingleDevice(packing=packing)

    def local(x: Any) -> Any:
        own, level = x.reshape(COLUMN, columns), 1
        while level < RANKS:
            swap = [(r, r ^ level) for r in range(RANKS)]
            other = jax.lax.ppermute(own, "data", swap)
            rows = adasum._Rows.of(jnp.stack([own, other]), packing)
            own = adasum._level(rows, alone).values(packing)[0].reshape(own.shape)
            level *= 2
        return own.reshape(-1)

    spec = PartitionSpec("data")
    return jax.shard_map(
        local, mesh=_mesh(), in_specs=spec, out_specs=PartitionSpec(), check_vma=False
    )(stacked)


def collectives_ratio() -> float:
    """Returns our time over a butterfly's, for a tensor of 131,072 numbers."""
    mesh = _mesh()
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    x = jax.device_put(jnp.ones((RANKS, 2**17)), sharding)
    ones = jnp.ones(RANKS)
    ours = jax.jit(lambda x: adasum.adasum_reduce([x], ones, [((),)], [1], mesh)[0])
    theirs = jax.jit(_butterfly)
    pairs = timed_pairs(
        lambda: jax.block_until_ready(ours(x)),
        lambda: jax.block_until_ready(theirs(x)),
        pairs=5,
    )
    return pairs.ratio


def overhead() -> float:
    """Returns the time of a step with Adasum over one with the mean, less 1."""

    def loss(params: Any, batch: Any) -> Any:
        return _square(params, *batch)

    sizes = (128, 256, 256, 16)
    model = _layers(jax.random.key(0), sizes)
    batch = jnp.ones((128, sizes[0])), jnp.ones((128, sizes[-1]))
    tx = optax.sgd(1e-3)
    runs = []
    for combine in ("adasum", "mean"):
        plan = wh.plan(
            *(loss, model, batch),
            optimizer=tx,
            cluster=f"cpu:{RANKS}",
            mesh={"data": RANKS},
            zero=0,
            combine=combine,
        )
        devices = jax.devices()[:RANKS]
        step = wh.compile(plan, loss, model, optimizer=tx, devices=devices)
        states = [step.init_from(model)]

        def run(step: Any = step, states: list[Any] = states) -> None:
            states[0], metrics = step(states[0], batch)
            jax.block_until_ready((states[0].params, metrics))

        runs.append(run)
    return timed_pairs(*runs, pairs=9).ratio - 1


# Stored runs.


def _versions() -> dict[str, str]:
    names = ("jax", "jaxlib", "optax", "numpy")
    return {"python": platform.python_version()} | {
        name: metadata.version(name) for name in names
    }


def refresh(anew: bool) -> dict[str, Any]:
    """Measures the missing runs, writes each as it ends, and returns all."""
    record = json.loads(FILE.read_text()) if FILE.exists() and not anew else {}
    settings = {
        "most_steps": STEPS,
        "goals": {name: t.goal for name, t in TASKS.items()},
    }
    is_same = all(record.get(name) == value for name, value in settings.items())
    runs = record.get("runs", {}) if is_same else {}
    for task in TASKS:
        for first in range(0, STORED_SEEDS, RUN_SEEDS):
            name = f"{task}/{first}"
            if name in runs:
                continue
            began = time.monotonic()
            steps = measure_steps(task, range(first, first + RUN_SEEDS))
            runs[name] = {"task": task, "commit": checkout.commit(), "steps": steps}
            print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
            record = {"versions": _versions(), **settings, "runs": runs}
            unfinished = FILE.with_suffix(".unfinished")
            unfinished.write_text(json.dumps(record, indent=1) + "\n")
            unfinished.replace(FILE)
    return record


def results(runs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the best rate of each task and arm."""
    rates = {}
    for task in dict.fromkeys(run["task"] for run in runs.values()):
        steps = merge_seeds([r["steps"] for r in runs.values() if r["task"] == task])
        rates |= {f"{task}/{arm}": best_rate(rows) for arm, rows in steps.items()}
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=2, help="fresh seeds")
    parser.add_argument("--seed", type=int, default=None, help="seed of fresh runs")
    parser.add_argument("--refresh", action="store_true", help="measure all")
    parser.add_argument("--anew", action="store_true", help="begin again")
    args = parser.parse_args()
    if args.refresh:
        stored = refresh(args.anew)
    else:
        stored = json.loads(FILE.read_text()) if FILE.exists() else {"runs": {}}
    seed = random.randrange(2**20) if args.seed is None else args.seed
    worst, count = exactness(seed)
    print(f"seed {seed}: {worst:.2e} from float64, {count} devices differ", flush=True)
    seeds = range(STORED_SEEDS + seed, STORED_SEEDS + seed + args.seeds)
    fresh = results(
        {task: {"task": task, "steps": measure_steps(task, seeds)} for task in TASKS}
    )
    steps = results(stored["runs"])
    for name, values in fresh.items():
        print(f"{name}: stored {steps.get(name)}, fresh {values}", flush=True)
    report = {
        "max_rel_diff": worst,
        "ranks_differ": count,
        "overhead_over_mean": round(overhead(), 3),
        "collectives_ratio": round(collectives_ratio(), 3),
        "steps": {"kept": steps, "fresh": fresh},
        "seed": seed,
        "commits": sorted({values["commit"] for values in stored["runs"].values()}),
        "versions": _versions(),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
