"""Measures stages on two processes of different speed for ``bench_mixed.py``."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import time
from typing import Any


DEEP_SAMPLES = 64
"""Samples of a global batch of --pipeline."""

TIMED_SAMPLES = 8
"""Samples of a timed micro-batch."""


def median(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.0f} ms"


def together(name: str) -> None:
    from jax.experimental import multihost_utils

    multihost_utils.sync_global_devices(name)


class _StagedRun:
    """A training run in two stages, one in each process."""

    def __init__(
        self,
        name: str,
        sizes: dict[str, Any],
        cluster: Any,
        schedule: str | None,
        **options: Any,
    ) -> None:
        import jax
        import optax

        import whalejax as wh
        from whalejax import jobs, models

        job = models.job(f"{name}-test", annotated=False, **sizes)
        self.batch = job.batch_at(0, DEEP_SAMPLES)
        marks: dict[str, Any] = {} if schedule is None else {"schedule": schedule}
        mark = wh.pipeline(num_stages=2, **marks)

        @functools.wraps(job.loss_fn)
        def loss(*arguments: Any) -> Any:
            with mark:
                return job.loss_fn(*arguments)

        model = jobs.abstract_model(job)
        optimizer = optax.sgd(0.01, momentum=0.9)
        self.plan = wh.plan(
            loss, model, self.batch, optimizer=optimizer, cluster=cluster, **options
        )
        step = wh.compile(
            self.plan, loss, model, optimizer=optimizer, devices=jax.devices()
        )
        self.trained: Any = step
        self.state = step.init(job.make_model, rng=jax.random.key(0))

    def step(self) -> float:
        """Returns the seconds of one step, until both processes have ended it."""
        import jax

        together("step")
        start = time.perf_counter()
        self.state, metrics = self.trained(self.state, self.batch)
        jax.block_until_ready((self.state, metrics))
        together("end")
        return time.perf_counter() - start


def piped(
    name: str, sizes: dict[str, Any], arguments: argparse.Namespace, quota: Any
) -> dict[str, Any]:
    """Compares the planner's stages for two speeds with equal ones."""
    import numpy as np

    quota.set(50 if arguments.process else 100)
    cluster, ratio = _timed_kinds(name, sizes)
    quota.set(100)
    chosen = _StagedRun(name, sizes, cluster, None)
    stages = chosen.plan.stages
    assert stages is not None
    even = dataclasses.replace(cluster, nodes=cluster.nodes[:1] * 2)
    count = chosen.plan.num_micro_batches
    equal = _StagedRun(name, sizes, even, stages.schedule, num_micro_batches=count)
    for run in (chosen, equal):
        run.step()
    quota.set(50 if arguments.process else 100)
    compilations = _count_compilations()
    seconds: dict[str, list[float]] = {"chosen": [], "equal": []}
    for _ in range(arguments.rounds):
        seconds["equal"].append(equal.step())
        seconds["chosen"].append(chosen.step())
    pairs = zip(seconds["equal"], seconds["chosen"], strict=True)
    ratios = [a / b for a, b in pairs]
    low, median_ratio, high = np.quantile(ratios, [0.25, 0.5, 0.75])
    key = f"pipeline_{name}"
    if arguments.process == 0:
        steps = [f"{median(values)} {kind}" for kind, values in seconds.items()]
        texts = stages.words(), *chosen.plan.notes, f"step {', '.join(steps)}"
        print(f"{name}:", *texts, sep="\n  ", flush=True)
    return {
        key: round(float(median_ratio), 4),
        f"{key}_low": round(float(low), 4),
        f"{key}_high": round(float(high), 4),
        f"{key}_ratio": round(ratio, 4),
        f"{key}_count": count,
        f"{key}_compilations": len(compilations),
    }


def _timed_kinds(name: str, sizes: dict[str, Any]) -> tuple[Any, float]:
    """Returns both processes as a device kind each, timed at once, and their ratio."""
    import numpy as np
    from jax.experimental import multihost_utils

    from whalejax import models
    from whalejax.cli.measure_model import with_timing
    from whalejax.meshes import cluster
    from whalejax.meshes.cluster import Node

    job = models.job(f"{name}-test", annotated=False, **sizes)
    two = cluster("cpu:2")
    _, timing = with_timing(two.part(1), job, TIMED_SAMPLES)
    own_seconds = np.array([timing.seconds], np.float32)
    all_seconds = multihost_utils.process_allgather(own_seconds).ravel().tolist()
    nodes = [
        Node(
            kind=dataclasses.replace(
                two.kinds[0],
                name=f"cpu-{index}",
                label=f"CPU {index}",
                timed_models=(dataclasses.replace(timing, seconds=seconds),),
            ),
            count=1,
        )
        for index, seconds in enumerate(all_seconds)
    ]
    return dataclasses.replace(two, nodes=tuple(nodes)), all_seconds[1] / all_seconds[0]


def _count_compilations() -> list[str]:
    """Returns a list that grows by one whenever this process compiles a program."""
    import jax

    events: list[str] = []

    def listener(event: str, duration_secs: float, **_: Any) -> None:
        del duration_secs
        if event == "/jax/core/compile/backend_compile_duration":
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listener)
    return events
