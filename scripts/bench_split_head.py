"""Compares data parallelism with replicate + split for 100,000 classes.

This is Whale's own example (USENIX ATC 2022, section 5.3): the ResNet-50 backbone is
replicated, and the classifier is split over the same devices. Each variant trains in
its own process, with donated state, for a few steps of plain SGD in float32 on small
images. Then a classifier of 1,000,000 classes with momentum is planned for eight
devices of 4 GiB: data parallelism alone must be refused for lack of memory.

    python scripts/bench_split_head.py [--batch 32] [--classes 100000] [--steps 5]

The last line is one JSON object:

    bytes_saved                  part of the synchronised bytes that the split saves
    speedup                      step time of data parallelism over that of the split
    bridges                      collectives between backbone and head
    batch, classes               sizes of the run
    data_seconds, split_seconds  step times
    data_parallel_refused        whether a million classes do not fit without a split
    hybrid_mesh, hybrid_head_spec, hybrid_memory_bytes   plan of a million classes
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

from paired import eight_devices


eight_devices()

DEVICE_BYTES = 4 * 2**30
MILLION = 1_000_000


def run_variant(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Trains one variant in this process and describes its program."""
    import jax
    import optax
    from flax import nnx

    import whalejax as wh
    from whalejax import hlo, models

    split = name == "split"
    job = models.job(
        "resnet50",
        batch_size=arguments.batch,
        classes=arguments.classes,
        image_size=arguments.image,
        annotated=split,
    )
    optimizer = optax.sgd(0.01)
    model = nnx.eval_shape(lambda: job.make_model(jax.random.key(0)))
    batch = job.batch_at(0)
    plan = wh.plan(
        job.loss_fn,
        model,
        batch,
        optimizer=optimizer,
        cluster="h100:8",
        mesh={"tensor": 8} if split else {"data": 8},
        zero=0,
        num_micro_batches=1,
    )
    step = wh.compile(
        plan, job.loss_fn, model, optimizer=optimizer, devices=jax.devices()
    )
    collectives = hlo.collectives(step.lower().compile().as_text())
    # Random values of a replicated head take more memory than training.
    state = step.init(lambda: _filled(model), rng=jax.random.key(0))
    state, metrics = step(state, batch)
    jax.block_until_ready(metrics)
    times = []
    for _ in range(arguments.steps):
        start = time.perf_counter()
        state, metrics = step(state, batch)
        jax.block_until_ready((state.step, metrics))
        times.append(time.perf_counter() - start)
    features = batch["images"].shape[0] * 2048
    bridges = [
        i
        for kind in ("all-gather", "all-to-all", "reduce-scatter")
        for i in collectives.of(kind)
        if any(_elements(shape) >= features // 8 for _, shape in i.shapes)
    ]
    return {
        "seconds": statistics.median(times),
        "loss": float(metrics["loss"]),
        "sync_bytes": sum(collectives.nbytes.values()),
        "bytes_by_kind": dict(collectives.nbytes),
        "counts": dict(collectives.counts),
        "bridges": sum(i.count for i in bridges),
        "peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def _filled(model: Any) -> Any:
    """Returns the model with every value set to one small number."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    graph, state = nnx.split(model)
    filled = jax.tree.map(lambda x: jnp.full(x.shape, 0.01, x.dtype), state)
    return nnx.merge(graph, filled)


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def plan_million() -> dict[str, Any]:
    """Plans a million classes on eight devices of 4 GiB; nothing runs."""
    import jax
    import optax
    from flax import nnx

    import whalejax as wh
    from whalejax import models

    cluster = wh.cluster("h100:8").with_memory(DEVICE_BYTES)
    optimizer = optax.sgd(0.01, momentum=0.9)

    def plan_with(
        annotated: bool, mesh: dict[str, int] | None, zero: int | None
    ) -> Any:
        job = models.job(
            "resnet50", batch_size=64, classes=MILLION, annotated=annotated
        )
        model = nnx.eval_shape(lambda: job.make_model(jax.random.key(0)))
        return wh.plan(
            job.loss_fn,
            model,
            job.batch_at(0),
            optimizer=optimizer,
            cluster=cluster,
            mesh=mesh,
            zero=zero,
        )

    refusal = ""
    try:
        plan_with(False, {"data": 8}, 0)
    except wh.WhaleError as error:
        refusal = str(error)
    hybrid = plan_with(True, None, None)
    head = next(leaf for leaf in hybrid.leaves if leaf.shape == (2048, MILLION))
    return {
        "data_parallel_refused": "no plan fits" in refusal,
        "refusal": refusal,
        "hybrid_mesh": dict(hybrid.axes),
        "hybrid_head_spec": [list(axes) for axes in head.compute_spec],
        "hybrid_memory_bytes": hybrid.memory.total_bytes,
    }


def in_subprocess(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs one variant in a fresh process, so that memory starts empty."""
    command = [sys.executable, __file__, "--variant", name]
    for option in ("batch", "classes", "image", "steps"):
        command += [f"--{option}", str(getattr(arguments, option))]
    process = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ
    )
    if process.returncode:
        raise SystemExit(f"{name} failed:\n{process.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    print(f"{name:6} {json.dumps(result)}", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=32, help="global batch")
    parser.add_argument("--classes", type=int, default=100_000, help="classes")
    parser.add_argument("--image", type=int, default=32, help="pixels a side")
    parser.add_argument("--steps", type=int, default=5, help="timed steps, at most 5")
    parser.add_argument("--variant", choices=("data", "split"), help="run only this")
    arguments = parser.parse_args()
    if arguments.variant:
        print(json.dumps(run_variant(arguments.variant, arguments)))
        return
    data = in_subprocess("data", arguments)
    split = in_subprocess("split", arguments)
    million = plan_million()
    print(
        json.dumps(
            {
                "bytes_saved": round(1 - split["sync_bytes"] / data["sync_bytes"], 4),
                "speedup": round(data["seconds"] / split["seconds"], 3),
                "bridges": split["bridges"],
                "batch": arguments.batch,
                "classes": arguments.classes,
                "data_seconds": round(data["seconds"], 4),
                "split_seconds": round(split["seconds"], 4),
                **{k: v for k, v in million.items() if k != "refusal"},
            }
        )
    )


if __name__ == "__main__":
    main()
