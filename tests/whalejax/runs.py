"""A small training job and its compiled steps, for the tests of what stands around it.

The cluster is that of the catalogue: nothing here depends on how fast the machine is.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax

import whalejax as wh
from whalejax.jobs import split_settings
from whalejax.runtime.train_step import TrainState, TrainStep


ROOT: Final = Path(__file__).resolve().parents[2]
BATCH_SIZE: Final = 16


def loss_fn(params: Any, batch: Any) -> jax.Array:
    """Mean squared error of a two-layer perceptron."""
    hidden = jax.nn.relu(batch["x"] @ params["up"] + params["bias"][None])
    return jnp.mean((hidden @ params["down"] - batch["y"]) ** 2)


def make_params(key: jax.Array) -> dict[str, jax.Array]:
    """Fresh parameters of the perceptron."""
    first, second = jax.random.split(key)
    return {
        "up": 0.3 * jax.random.normal(first, (12, 320)),
        "bias": jnp.zeros((320,)),
        "down": 0.1 * jax.random.normal(second, (320, 8)),
    }


def batch_at(step: int, size: int) -> dict[str, Any]:
    """The batch of one step, the same in every process."""
    numbers = np.random.default_rng(step)
    x = numbers.standard_normal((size, 12), dtype=np.float32)
    return {"x": x, "y": np.tanh(x[:, :8])}


def make_job(**changes: Any) -> wh.Job:
    """The job; fields of ``wh.Job`` can be changed."""
    job = wh.Job(
        loss_fn, make_params, batch_at, optax.adam(1e-2), BATCH_SIZE, "perceptron"
    )
    return dataclasses.replace(job, **changes)


def described_cluster(num_devices: int = 8) -> wh.Cluster:
    """So many CPU devices as one node, as the catalogue knows them."""
    found = wh.Cluster.detect(calibrate=False)
    node = dataclasses.replace(found.nodes[0], count=num_devices)
    level = dataclasses.replace(found.levels[0], size=num_devices)
    return dataclasses.replace(found, nodes=(node,), levels=(level,))


def step_of(job: wh.Job, num_devices: int = 8, **options: Any) -> TrainStep:
    """A step of a job, compiled for the first devices."""
    model = jax.eval_shape(job.make_model, jax.random.key(0))
    plan = wh.plan(
        job.loss_fn,
        model,
        job.batch_at(0),
        optimizer=job.optimizer,
        cluster=described_cluster(num_devices),
        **{**split_settings(job), **options},
    )
    devices = jax.devices()[:num_devices]
    return wh.compile(
        plan, job.loss_fn, model, optimizer=job.optimizer, devices=devices
    )


@cache
def shared_step() -> TrainStep:
    """The job's step on eight devices; it holds no state, so tests may share it."""
    return step_of(make_job())


def fresh_state(step: TrainStep) -> TrainState:
    """The state that every run here begins with."""
    return step.init(make_params, rng=jax.random.key(7))


def host_leaves(state: Any) -> list[Any]:
    """Every leaf of a state as bytes and type, random keys as their words."""

    def plain(leaf: Any) -> tuple[str, bytes]:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            words = np.asarray(jax.random.key_data(leaf))
            return str(leaf.dtype), words.tobytes()
        return str(leaf.dtype), np.asarray(leaf).tobytes()

    return [plain(leaf) for leaf in jax.tree.leaves(state)]


def run_script(
    code: str, *arguments: object, cwd: Path
) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own, which may be killed."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
    )
