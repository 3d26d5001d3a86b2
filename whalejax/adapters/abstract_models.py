"""Shapes of a job's model, without values."""

from __future__ import annotations

import sys
from typing import Any

import jax

from whalejax import _compat
from whalejax.adapters.base import made_model
from whalejax.user_code.losses import Job


def abstract_model(job: Job) -> Any:
    """Returns the shapes of a job's model, without making arrays or touching devices.

    Args:
        job: Job whose ``make_model`` takes a key or nothing.
    """

    def build() -> Any:
        return made_model(job.make_model, jax.random.key(0))

    # NNX modules need nnx.eval_shape; the user's code has imported it.
    nnx = sys.modules.get("flax.nnx")
    with _compat.short_sharding_errors():
        return jax.eval_shape(build) if nnx is None else nnx.eval_shape(build)
