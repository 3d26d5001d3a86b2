"""Shapes of a job's model, without values."""

from __future__ import annotations

import sys
from typing import Any

import jax

from whalejax import _compat
from whalejax.adapters.base import made_model
from whalejax.user_code.losses import Job


def abstract_model(job: Job) -> Any:
    """Shapes of a job's model; no array is made and no device is touched.

    Args:
        job: Its ``make_model`` takes a key or nothing.
    """

    def build() -> Any:
        return made_model(job.make_model, jax.random.key(0))

    # NNX modules need its own eval_shape; who made one has imported it.
    nnx = sys.modules.get("flax.nnx")
    with _compat.short_sharding_errors():
        return jax.eval_shape(build) if nnx is None else nnx.eval_shape(build)
