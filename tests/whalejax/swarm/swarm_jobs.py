"""Small jobs that a swarm trains, and the same run in one process."""

from __future__ import annotations

import functools
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax

import whalejax as wh
from whalejax import jobs
from whalejax.meshes import cluster
from whalejax.swarm_runtime.staged_job import StagedJob


SIZE: Final = 24
COUNT: Final = 6
STAGES: Final = 3
WIDTH: Final = 8
DEPTH: Final = 6


def make_model(key: Any) -> dict[str, Any]:
    keys = jax.random.split(key, DEPTH)
    return {
        f"w{i}": jax.random.normal(k, (WIDTH, WIDTH), dtype=jnp.float32) * 0.5
        for i, k in enumerate(keys)
    }


def loss_fn(model: Any, batch: Any, rng: Any) -> Any:
    hidden = batch["x"]
    for i in range(DEPTH):
        hidden = jnp.tanh(hidden @ model[f"w{i}"])
    # Random keys must not depend on who runs a micro-batch.
    kept = jax.random.bernoulli(rng, 0.9, hidden.shape).astype(hidden.dtype)
    error = hidden * kept - batch["y"]
    return jnp.mean(error**2), wh.Aux(samples={"number": batch["number"]})


def batch(step: int, size: int) -> dict[str, np.ndarray]:
    drawn = np.random.default_rng(step)
    return {
        "x": drawn.normal(size=(size, WIDTH)).astype(np.float32),
        "y": drawn.normal(size=(size, WIDTH)).astype(np.float32),
        "number": np.arange(step * size, (step + 1) * size, dtype=np.int32),
    }


def make(clip: float | None = None) -> wh.Job:
    """The job; with a norm over all stages where it clips."""
    tx = optax.adam(1e-2)
    if clip is not None:
        tx = optax.chain(optax.clip_by_global_norm(clip), tx)
    return wh.Job(loss_fn, make_model, batch, tx, batch_size=SIZE)


@functools.cache
def cut(clip: float | None = None) -> StagedJob:
    """The job in stages; peers of all tests share its programs."""
    return StagedJob(make(clip), stages=STAGES, micro_batches=COUNT)


@functools.cache
def step(clip: float | None = None) -> wh.TrainStep:
    """The same job on one device."""
    job = make(clip)
    model, first = jobs.abstract_model(job), jobs.first_batch(job, None)
    plan = jobs.make_plan(job, model, first, cluster("cpu:1"), num_micro_batches=COUNT)
    return wh.compile(
        plan, job.loss_fn, model, optimizer=job.optimizer, devices=jax.devices()[:1]
    )


@functools.cache
def losses(steps: int, clip: float | None = None) -> list[float]:
    """Of each step in one process that nothing disturbs."""
    compiled, job = step(clip), make(clip)
    state = compiled.init(job.make_model, rng=jax.random.key(0))
    found = []
    for number in range(steps):
        state, metrics = compiled(state, job.batch_at(number))
        found.append(float(metrics["loss"]))
    return found
