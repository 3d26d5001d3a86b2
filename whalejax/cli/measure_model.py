"""Measures the time of a model's micro-batch on the first device of this machine."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Mapping
from typing import Any

import jax

from whalejax.api.job_plans import abstract_model, make_plan
from whalejax.meshes import Cluster, WhaleError
from whalejax.meshes.device_kinds import TimedModel
from whalejax.meshes.units import count_text
from whalejax.planner.balance.shares import weights_hash
from whalejax.planner.plan.plan import Plan
from whalejax.runtime.train_step import compile as compile_step
from whalejax.user_code.losses import Job


FEW, MANY = 1, 3
"""Micro-batches of the two timed steps. The difference of their times contains neither
the update nor other costs per step."""

ROUNDS = 7


def with_timing(
    cluster: Cluster,
    job: Job,
    samples: int | None = None,
    precision: str | Mapping[str, str] = "f32",
) -> tuple[Cluster, TimedModel]:
    """Times a micro-batch of a job, and adds the time to the cluster's description.

    Args:
        cluster: This machine, with devices of one kind, as ``calibrate`` describes it.
        job: The model and its batches.
        samples: Number of samples of the micro-batch; None is the job's own batch.
        precision: Precision of the model, as ``wh.plan`` takes it.

    Returns:
        The cluster with the timing added, which replaces an older timing of the model.
        And the timing, with the planner's prediction.

    Raises:
        WhaleError: ``samples`` is less than 1, or the measurement is unusable.
        PlanError: The model with so many samples does not fit on one device.
    """
    if samples is not None and samples < 1:
        raise WhaleError(f"samples is {samples}; expected 1 or more, or nothing")
    count = samples or jax.tree.leaves(job.batch_at(0, None))[0].shape[0]
    model = abstract_model(job)
    plans = {
        n: make_plan(
            job,
            model,
            job.batch_at(0, count * n),
            cluster.part(1),
            precision=precision,
            num_micro_batches=n,
            offload=(),
        )
        for n in (FEW, MANY)
    }
    predicted = _micro_batch_seconds(
        {n: plan.time.step_seconds for n, plan in plans.items()}
    )
    measured = _micro_batch_seconds(
        {n: _step_seconds(job, model, p, n * count) for n, p in plans.items()}
    )
    if measured <= 0:
        raise WhaleError(
            f"{MANY} micro-batches of {count_text(count, 'sample')} took no longer "
            f"than {FEW}. The machine is too busy, or the micro-batches are too small; "
            "give more --samples"
        )
    timed = TimedModel(
        weights=weights_hash(plans[FEW].leaves),
        samples=count,
        seconds=measured,
        predicted_seconds=predicted,
        title=job.name,
    )
    (kind,) = cluster.kinds
    others = (model for model in kind.timed_models if model.weights != timed.weights)
    kind = dataclasses.replace(kind, timed_models=(*others, timed))
    nodes = tuple(dataclasses.replace(node, kind=kind) for node in cluster.nodes)
    return dataclasses.replace(cluster, nodes=nodes), timed


FAR = 1.5
"""Factor between a time and its prediction above which ``timing_words`` comments."""


def timing_words(timed: TimedModel) -> str:
    """Describes a timing and its prediction, and what a large difference means.

    Args:
        timed: The timing.

    Example:
        >>> one = TimedModel(weights="", samples=4, seconds=0.02,
        ...     predicted_seconds=0.018, title="gpt")
        >>> timing_words(one)
        'gpt: 20 ms for a micro-batch of 4, 18 ms predicted'
    """
    words = (
        f"{timed.title}: {timed.seconds * 1e3:.3g} ms for a micro-batch of "
        f"{timed.samples}, {timed.predicted_seconds * 1e3:.3g} ms predicted"
    )
    ratio = timed.seconds / timed.predicted_seconds
    if max(ratio, 1 / ratio) <= FAR:
        return words
    return (
        f"{words}: {ratio:.2g} times the prediction. Predicted step times of this "
        "model have about the same error. Work is divided between kinds of devices by "
        "the measured times if all kinds have one"
    )


def _micro_batch_seconds(steps: Mapping[int, float]) -> float:
    return (steps[MANY] - steps[FEW]) / (MANY - FEW)


def _step_seconds(job: Job, model: Any, plan: Plan, samples: int) -> float:
    batch = job.batch_at(0, samples)
    step = compile_step(
        plan,
        job.loss_fn,
        model,
        optimizer=job.optimizer,
        batch=batch,
        devices=jax.local_devices()[:1],
    )
    state = step.init(job.make_model, rng=jax.random.key(0))
    result = []
    for _ in range(ROUNDS + 1):
        start = time.perf_counter()
        state, metrics = step(state, batch)
        jax.block_until_ready(metrics)
        result.append(time.perf_counter() - start)
    return statistics.median(result[1:])
