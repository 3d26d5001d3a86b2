"""Times our step against a hand-written ``jax.jit`` step with the same PartitionSpecs.

Both train the same model from the same values on eight devices, data-parallel with the
plan's own layout, in turn.

    python scripts/bench_overhead.py [--pairs 30] [--only gpt]

The last line is one JSON object: for each model, ``ratio_NAME`` is the median ratio of
its pairs, ours over the other.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from typing import Any

from paired import eight_devices, timed_pairs


eight_devices()

import jax  # noqa: E402
import optax  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

import whalejax as wh  # noqa: E402
from whalejax import models  # noqa: E402
from whalejax.adapters.base import adapt  # noqa: E402
from whalejax.meshes.jax_mesh import partition_spec  # noqa: E402


# A step takes some tenths of a second on two cores, so that a cost per step would show.
JOBS: dict[str, Callable[[], wh.Job]] = {
    "gpt": lambda: models.job("gpt", batch_size=16, annotated=False),
    "bert": lambda: models.job("bert-test", batch_size=64),
    "resnet50": lambda: models.job(
        "resnet50", batch_size=8, image_size=32, classes=100, annotated=False
    ),
    "moe": lambda: models.job("moe-test", batch_size=64, annotated=False),
}


def hand_written(job: wh.Job, plan: wh.Plan, model: Any, key: Any) -> Any:
    """Returns a hand-written step, its first state, and how to place batches."""
    adapter = adapt(model, job.loss_fn)
    mesh = plan.mesh(jax.devices())
    params, rest = adapter.take_apart(model)
    tree = jax.tree.structure(params)
    specs = plan.partition_specs()
    layouts = [NamedSharding(mesh, specs[path]) for path in adapter.param_paths]
    params = jax.device_put(params, tree.unflatten(layouts))
    replicated = NamedSharding(mesh, PartitionSpec())
    rest = jax.device_put(rest, replicated)
    opt_state = jax.jit(job.optimizer.init)(params)
    batch_layouts = [
        NamedSharding(mesh, partition_spec(leaf.spec)) for leaf in plan.batch
    ]

    def loss(params: Any, rest: Any, batch: Any, rng: Any) -> Any:
        result = adapter.loss(params, rest, batch, rng if adapter.takes_rng else None)
        return result.total / result.weight, result.rest

    def step(state: Any, batch: Any) -> Any:
        params, rest, opt_state, count = state
        rng = jax.random.fold_in(key, count)
        (value, rest), grads = jax.value_and_grad(loss, has_aux=True)(
            params, rest, batch, rng
        )
        updates, opt_state = job.optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return (params, rest, opt_state, count + 1), value

    run = jax.jit(step, donate_argnums=0)
    state = jax.tree.map(
        lambda x: x.copy(), (params, rest, opt_state, jax.numpy.int32(0))
    )

    def place(batch: Any) -> Any:
        leaves, structure = jax.tree.flatten(batch)
        return structure.unflatten(
            [jax.device_put(x, s) for x, s in zip(leaves, batch_layouts, strict=True)]
        )

    return run, state, place


def compare(name: str, pairs: int) -> dict[str, float]:
    """Times both steps of one model."""
    job = JOBS[name]()
    key = jax.random.key(0)
    model = job.make_model(key)
    batch = job.batch_at(0)
    plan = wh.plan(
        job.loss_fn,
        model,
        batch,
        optimizer=job.optimizer,
        cluster="h100:8",
        mesh={"data": 8},
        zero=0,
    )
    step = wh.compile(
        plan, job.loss_fn, model, optimizer=job.optimizer, devices=jax.devices()
    )
    ours = step.init_from(model, rng=key)
    run, theirs, place = hand_written(job, plan, model, key)

    def our_step() -> None:
        nonlocal ours
        ours, metrics = step(ours, batch)
        jax.block_until_ready((ours, metrics))

    def their_step() -> None:
        nonlocal theirs
        theirs, loss = run(theirs, place(batch))
        jax.block_until_ready((theirs, loss))

    times = timed_pairs(our_step, their_step, pairs=pairs)
    ratio = times.ratio
    print(
        f"{name:10} ours {statistics.median(times.first_seconds) * 1e3:8.1f} ms   "
        f"by hand {statistics.median(times.second_seconds) * 1e3:8.1f} ms   "
        f"ratio {ratio:.3f}   mesh {dict(plan.axes)}",
        flush=True,
    )
    return {f"ratio_{name}": round(ratio, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=30, help="timed pairs a model")
    parser.add_argument("--only", choices=sorted(JOBS), help="one model")
    arguments = parser.parse_args()
    names = [arguments.only] if arguments.only else list(JOBS)
    results: dict[str, float] = {}
    for name in names:
        results.update(compare(name, arguments.pairs))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
