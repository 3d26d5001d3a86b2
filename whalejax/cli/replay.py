"""Repeats the first training steps on one device, to compare the losses.

If the losses on one device and on several agree, the distribution did not change the
result. ``whalejax train --replay`` does this after a run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from whalejax.api.job_plans import make_plan
from whalejax.lowering.train_state import TrainState
from whalejax.meshes import Cluster
from whalejax.meshes.errors import WhaleError
from whalejax.planner.plan.plan import Plan
from whalejax.runtime.train_step import TrainStep
from whalejax.runtime.train_step import compile as compile_step
from whalejax.user_code.losses import Job


def one_device_step(job: Job, model: Any, batch: Any, plan: Plan) -> TrainStep:
    """Returns the training step of a job on the first device only.

    Args:
        job: Job to train.
        model: Model of the job, abstract or real.
        batch: A global batch of the job.
        plan: Plan for many devices. The step has the same precision and micro-batches.

    Raises:
        WhaleError: The model does not fit on one device.
    """
    alone = make_plan(
        job,
        model,
        batch,
        one_device(plan.cluster),
        precision=plan.asked_precision,
        num_micro_batches=plan.num_micro_batches,
    )
    return compile_step(
        alone,
        job.loss_fn,
        model,
        optimizer=job.optimizer,
        batch=batch,
        devices=jax.devices()[:1],
    )


def one_device(cluster: Cluster) -> Cluster:
    """Returns a cluster with only the first device.

    If the devices are virtual CPUs that share a memory, this device may use all of it.

    >>> from whalejax.meshes import cluster
    >>> one_device(cluster("h100:4x8")).num_devices
    1
    """
    node = dataclasses.replace(cluster.nodes[0], count=1)
    level = dataclasses.replace(cluster.levels[0], size=1, torus=False)
    alone = dataclasses.replace(cluster, nodes=(node,), levels=(level,))
    if cluster.platform != "cpu":
        return alone
    return alone.with_memory(cluster.memory_bytes * cluster.nodes[0].count)


def replay(
    step: TrainStep,
    state: TrainState,
    batches: Callable[[int], Any],
    *,
    steps: int,
    on_step: Callable[[int], None] | None = None,
) -> tuple[float, ...]:
    """Runs a number of steps, and returns their losses.

    Args:
        step: Result of ``one_device_step``.
        state: State at the beginning of the compared run; its buffers are donated.
        batches: Returns the global batch of a step, counted from 0.
        steps: Number of steps.
        on_step: Called after each step with the number of steps so far.

    Raises:
        WhaleError: A loss is not finite.
    """
    first = int(state.step)
    losses = []
    for index in range(first, first + steps):
        state, metrics = step(state, batches(index))
        losses.append(float(metrics["loss"]))
        if not math.isfinite(losses[-1]):
            raise WhaleError(
                f"step {index + 1} on one device: the loss is {losses[-1]}, but was "
                "finite on several devices. The results differ"
            )
        if on_step is not None:
            on_step(len(losses))
    return tuple(losses)


def max_relative_difference(
    losses: Sequence[float], references: Sequence[float]
) -> float:
    """Returns the largest ``|loss - reference| / |reference|`` over the common steps.

    >>> max_relative_difference([2.0, 1.0, 0.5], [2.0, 1.25])
    0.2
    """
    return max(
        abs(loss - reference) / max(abs(reference), 1e-30)
        for loss, reference in zip(losses, references, strict=False)
    )
