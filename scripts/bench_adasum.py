"""Adasum on eight virtual devices: is it right, what does it cost, does it help?

Devices combine drawn tensors, over 2 to 8 ranks and with tensor-parallel shards, and
are compared with float64; a step with Adasum and one with the mean are timed in turn;
and two tasks are learned with the sum, the mean and Adasum of the gradients of eight
ranks, each with learning rates of its own. These runs are computed on one device, all
seeds at once, by the definition in float32. Their results over 20 seeds are kept in
``adasum.json`` beside this script, with commit, versions and seeds; without options
that is printed, and fresh seeds are measured beside it.

    python scripts/bench_adasum.py [--seeds 2] [--seed N] [--refresh] [--anew]

``--refresh`` measures the kept runs, writes each down as it ends, and goes on where it
stopped (``--anew`` begins again). The last line is one JSON object:

    max_rel_diff        largest difference of a tensor from float64, over its norm
    ranks_differ        devices whose bits of a part differ from another's
    overhead_over_mean  time of a step with Adasum over one with the mean, less 1
    collectives_ratio   the same, of the combination alone, over a butterfly of
                        ``ppermute`` of whole tensors with the same arithmetic
    steps               for each task and arm the learning rate by which most seeds
                        reach the task's loss soonest, the median of the steps, and how
                        many seeds reached it: of the kept seeds, and of fresh ones
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
KEPT: Final = 20
AT_ONCE: Final = 5
"""Seeds that are measured together, and written down."""

STEPS: Final = 200
ARMS: Final = ("mean", "sum", "adasum")
RATES: Final = tuple(2.0**k for k in range(-8, 4))
"""Learning rates of every arm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is learned by a small network from drawn samples.

    Attributes:
        loss: of parameters, inputs and answers.
        answers: of inputs, by a drawn key.
        sizes: of the layers.
        goal: the loss that is to be reached.
        batch: samples of a rank.
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


def _drawn(key: Any, sizes: Sequence[int], scale: float = 1.0) -> Any:
    keys = jax.random.split(key, len(sizes) - 1)
    return [
        {
            "kernel": jax.random.normal(k, (n, m)) * scale / n**0.5,
            "bias": jnp.zeros(m),
        }
        for k, n, m in zip(keys, sizes[:-1], sizes[1:], strict=True)
    ]


def _teacher(key: Any, x: Any) -> Any:
    return _network(_drawn(key, (8, 16, 1), 2.0), x)


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


# What helps.


def _pair(a: Any, b: Any) -> Any:
    def one(a: Any, b: Any) -> Any:
        dot, x, y = (a * b).sum(), (a * a).sum(), (b * b).sum()
        first = 1 - jnp.where(x > 0, dot / (2 * jnp.where(x > 0, x, 1)), 0)
        second = 1 - jnp.where(y > 0, dot / (2 * jnp.where(y > 0, y, 1)), 0)
        return first * a + second * b

    return jax.tree.map(one, a, b)


def _met(gradients: Any, arm: str) -> Any:
    """Gradients of ranks along a leading dimension, by one of the arms."""
    if arm != "adasum":
        end = jnp.mean if arm == "mean" else jnp.sum
        return jax.tree.map(lambda x: end(x, 0), gradients)
    count = RANKS
    while count > 1:
        halves = [jax.tree.map(lambda x, f=f: x[f::2], gradients) for f in (0, 1)]
        gradients, count = jax.vmap(_pair)(*halves), count // 2
    return jax.tree.map(lambda x: x[0], gradients)


def _run(task: Task, rate: Any, seed: Any) -> Any:
    """For each arm the first step at which it has reached the goal, or ``STEPS``."""
    keys = jax.random.split(jax.random.key(seed), 4)
    inputs = task.sizes[0]
    held = jax.random.normal(keys[2], (256, inputs))
    answers = task.answers(keys[1], held)

    def step(arms: Any, key: Any) -> tuple[Any, Any]:
        x = jax.random.normal(key, (RANKS * task.batch, inputs))
        y = task.answers(keys[1], x)
        cut = [v.reshape(RANKS, task.batch, *v.shape[1:]) for v in (x, y)]
        found = {}
        for arm, params in arms.items():
            gradients = jax.vmap(jax.grad(task.loss), (None, 0, 0))(params, *cut)
            moves = _met(gradients, arm)
            found[arm] = jax.tree.map(lambda p, g: p - rate * g, params, moves)
        return found, {a: task.loss(p, held, answers) for a, p in found.items()}

    start = dict.fromkeys(ARMS, _drawn(keys[0], task.sizes))
    _, losses = jax.lax.scan(step, start, jax.random.split(keys[3], STEPS))

    def first(losses: Any) -> Any:
        there = losses <= task.goal
        return jnp.where(there.any(), there.argmax() + 1, STEPS)

    return jax.tree.map(first, losses)


Steps = dict[str, dict[str, list[int]]]
"""Steps to the goal of every seed, by arm and learning rate."""


@functools.cache
def _every(name: str) -> Any:
    run = functools.partial(_run, TASKS[name])
    return jax.jit(jax.vmap(jax.vmap(run, (None, 0)), (0, None)))


def measured(name: str, seeds: Sequence[int]) -> Steps:
    """What the arms take for a task."""
    found = _every(name)(jnp.asarray(RATES), jnp.asarray(seeds, jnp.uint32))
    return {
        arm: dict(zip(map(str, RATES), np.asarray(rows).tolist(), strict=True))
        for arm, rows in found.items()
    }


def together(parts: Sequence[Steps]) -> Steps:
    """The same of several seeds' results."""
    return {
        arm: {
            rate: [n for part in parts for n in part[arm][rate]]
            for rate in parts[0][arm]
        }
        for arm in ARMS
    }


def best(rows: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """The rate of fewest steps, with what it takes."""
    rate = min(rows, key=lambda r: (statistics.median(rows[r]), sum(rows[r])))
    steps = rows[rate]
    return {
        "rate": float(rate),
        "median_steps": statistics.median(steps),
        "reached": sum(n < STEPS for n in steps),
        "of": len(steps),
    }


# Whether it is right, and what it costs.


def exactness(seed: int) -> tuple[float, int]:
    """The largest difference from float64, and devices that differ."""
    draw = np.random.default_rng(seed)
    shapes = {(3, 24, 8): 3, (7,): 1, (1,): 1, (4, 130): 1}
    worst, wrong = 0.0, 0
    meshes: list[dict[str, int]] = [{"data": n} for n in range(2, RANKS + 1)]
    for mesh in (*meshes, {"data": 2, "tensor": 2}, {"data": 3, "tensor": 2}):
        ranks, tensor = mesh["data"], ("tensor",) if "tensor" in mesh else ()
        specs = [((), (), tensor), ((),), ((),), ((), tensor)]
        given = [
            (draw.normal(size=(ranks, *s)) + 2 * draw.normal(size=s)).astype(np.float16)
            for s in shapes
        ]
        wide = [x.astype(np.float32) for x in given]
        slices = [*shapes.values()]
        found = on_devices(wide, slices, specs=specs, mesh=mesh)
        for x, own, several in zip(found, wide, slices, strict=True):
            worst = max(worst, difference(x, reference(own, several), several))
            wrong += differ(x)
    return worst, wrong


def _mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:RANKS]), ("data",), axis_types=(AxisType.Auto,))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Alone:
    """The dot products of a device that holds all of a tensor: its own."""

    packing: Any

    @staticmethod
    def gathered(own: Any) -> Any:
        return own[None]

    @staticmethod
    def local(every: Any) -> Any:
        return every


def _butterfly(stacked: Any) -> Any:
    """Adasum by exchanging whole tensors with the partner of each level."""
    columns = stacked.shape[1] // COLUMN
    part = Part(slices=1, here=1, numbers=stacked.shape[1], columns=columns)
    packing = adasum._Packing(parts=(part,), ranks=1)
    alone: Any = _Alone(packing=packing)

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
    """Our exchange over a butterfly, of one tensor of 131,072 numbers."""
    mesh = _mesh()
    there = NamedSharding(mesh, PartitionSpec("data"))
    x = jax.device_put(jnp.ones((RANKS, 2**17)), there)
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
    """A step with Adasum over one with the mean, less 1."""

    def loss(params: Any, batch: Any) -> Any:
        return _square(params, *batch)

    sizes = (128, 256, 256, 16)
    model = _drawn(jax.random.key(0), sizes)
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
        held = [step.init_from(model)]

        def run(step: Any = step, held: list[Any] = held) -> None:
            held[0], metrics = step(held[0], batch)
            jax.block_until_ready((held[0].params, metrics))

        runs.append(run)
    return timed_pairs(*runs, pairs=9).ratio - 1


# What is kept.


def _versions() -> dict[str, str]:
    names = ("jax", "jaxlib", "optax", "numpy")
    return {"python": platform.python_version()} | {
        name: metadata.version(name) for name in names
    }


def refreshed(anew: bool) -> dict[str, Any]:
    """The kept runs, those that lack measured; each is written down as it ends."""
    kept = json.loads(FILE.read_text()) if FILE.exists() and not anew else {}
    asked = {
        "most_steps": STEPS,
        "goals": {name: one.goal for name, one in TASKS.items()},
    }
    same = all(kept.get(name) == value for name, value in asked.items())
    runs = kept.get("runs", {}) if same else {}
    for task in TASKS:
        for first in range(0, KEPT, AT_ONCE):
            name = f"{task}/{first}"
            if name in runs:
                continue
            began = time.monotonic()
            steps = measured(task, range(first, first + AT_ONCE))
            runs[name] = {"task": task, "commit": checkout.commit(), "steps": steps}
            print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
            kept = {"versions": _versions(), **asked, "runs": runs}
            beside = FILE.with_suffix(".unfinished")
            beside.write_text(json.dumps(kept, indent=1) + "\n")
            beside.replace(FILE)
    return kept


def results(runs: Mapping[str, Any]) -> dict[str, Any]:
    """The best rate of each task and arm."""
    found = {}
    for task in dict.fromkeys(run["task"] for run in runs.values()):
        steps = together([r["steps"] for r in runs.values() if r["task"] == task])
        found |= {f"{task}/{arm}": best(rows) for arm, rows in steps.items()}
    return found


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=2, help="fresh ones")
    parser.add_argument("--seed", type=int, default=None, help="of what is fresh")
    parser.add_argument("--refresh", action="store_true", help="measure what is kept")
    parser.add_argument("--anew", action="store_true", help="of which nothing is left")
    given = parser.parse_args()
    if given.refresh:
        kept = refreshed(given.anew)
    else:
        kept = json.loads(FILE.read_text()) if FILE.exists() else {"runs": {}}
    seed = random.randrange(2**20) if given.seed is None else given.seed
    worst, wrong = exactness(seed)
    print(f"seed {seed}: {worst:.2e} from float64, {wrong} devices differ", flush=True)
    seeds = range(KEPT + seed, KEPT + seed + given.seeds)
    fresh = results(
        {task: {"task": task, "steps": measured(task, seeds)} for task in TASKS}
    )
    steps = results(kept["runs"])
    for name, one in fresh.items():
        print(f"{name}: kept {steps.get(name)}, fresh {one}", flush=True)
    found = {
        "max_rel_diff": worst,
        "ranks_differ": wrong,
        "overhead_over_mean": round(overhead(), 3),
        "collectives_ratio": round(collectives_ratio(), 3),
        "steps": {"kept": steps, "fresh": fresh},
        "seed": seed,
        "commits": sorted({one["commit"] for one in kept["runs"].values()}),
        "versions": _versions(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
