"""Stages on two processes of unlike speed: ``bench_mixed.py --pipeline``."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import time
from typing import Any


DEEP_SAMPLES = 64
"""Of a global batch of --pipeline."""

TIMED_SAMPLES = 8
"""Of a micro-batch that is timed."""


def median(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.0f} ms"


def together(name: str) -> None:
    """Wait for all processes."""
    from jax.experimental import multihost_utils

    multihost_utils.sync_global_devices(name)


class _Piped:
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
        given: dict[str, Any] = {} if schedule is None else {"schedule": schedule}
        mark = wh.pipeline(num_stages=2, **given)

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
        """Seconds of one step, to the last of it in both processes."""
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
    """Stages as the planner has them for two speeds, against equal ones.

    Args:
        name: of the model.
        sizes: of it.
        arguments: of the script.
        quota: of this process.
    """
    import numpy as np

    quota.set(50 if arguments.process else 100)
    cluster, ratio = _timed_kinds(name, sizes)
    quota.set(100)
    chosen = _Piped(name, sizes, cluster, None)
    stages = chosen.plan.stages
    assert stages is not None
    alike = dataclasses.replace(cluster, nodes=cluster.nodes[:1] * 2)
    count = chosen.plan.num_micro_batches
    equal = _Piped(name, sizes, alike, stages.schedule, num_micro_batches=count)
    for run in (chosen, equal):
        run.step()
    quota.set(50 if arguments.process else 100)
    compiled = _count_compilations()
    seconds: dict[str, list[float]] = {"chosen": [], "equal": []}
    for _ in range(arguments.rounds):
        seconds["equal"].append(equal.step())
        seconds["chosen"].append(chosen.step())
    pairs = zip(seconds["equal"], seconds["chosen"], strict=True)
    ratios = [a / b for a, b in pairs]
    low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75])
    key = f"pipeline_{name}"
    if arguments.process == 0:
        steps = [f"{median(several)} {which}" for which, several in seconds.items()]
        words = stages.words(), *chosen.plan.notes, f"step {', '.join(steps)}"
        print(f"{name}:", *words, sep="\n  ", flush=True)
    return {
        key: round(float(middle), 4),
        f"{key}_low": round(float(low), 4),
        f"{key}_high": round(float(high), 4),
        f"{key}_ratio": round(ratio, 4),
        f"{key}_count": count,
        f"{key}_compilations": len(compiled),
    }


def _timed_kinds(name: str, sizes: dict[str, Any]) -> tuple[Any, float]:
    """Both processes as a kind each, by a micro-batch timed in both at once."""
    import numpy as np
    from jax.experimental import multihost_utils

    from whalejax import models
    from whalejax.cli.measure_model import with_timing
    from whalejax.meshes import cluster
    from whalejax.meshes.cluster import Node

    job = models.job(f"{name}-test", annotated=False, **sizes)
    two = cluster("cpu:2")
    _, timed = with_timing(two.part(1), job, TIMED_SAMPLES)
    mine = np.array([timed.seconds], np.float32)
    every = multihost_utils.process_allgather(mine).ravel().tolist()
    nodes = [
        Node(
            kind=dataclasses.replace(
                two.kinds[0],
                name=f"cpu-{index}",
                label=f"CPU {index}",
                timed_models=(dataclasses.replace(timed, seconds=seconds),),
            ),
            count=1,
        )
        for index, seconds in enumerate(every)
    ]
    return dataclasses.replace(two, nodes=tuple(nodes)), every[1] / every[0]


def _count_compilations() -> list[str]:
    """Grows by one whenever this process compiles a program."""
    import jax

    found: list[str] = []

    def heard(event: str, duration_secs: float, **_: Any) -> None:
        del duration_secs
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(heard)
    return found
