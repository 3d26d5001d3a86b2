"""Requests to the checking process, and its virtual devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from whalejax.meshes.units import count_text
from whalejax.verification.targets import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRequest:
    """Plan, model and limits of a check.

    Attributes:
        plan: Document of the plan.
        target: Virtual CPU devices of the process.
        adapter: Model and loss, without values.
        optimizer: Optax transformation, or None.
        batch: Abstract global batch.
        batch_axes: Argument of ``wh.plan``, unchanged.
        samples: Some values of each leaf of the model and of the batch, or None.
        multiples: Number of elements per device along a sharded dimension, of each run.
        seed: Seed of the random numbers.
        wide: Whether to compute in float64 instead of float32.
        limit_bytes: Memory limit of the process.
    """

    plan: dict[str, Any]
    target: Target
    adapter: Any
    optimizer: Any
    batch: Any
    batch_axes: Any
    samples: tuple[Sequence[Any], Sequence[Any]]
    multiples: tuple[int, ...]
    seed: int
    wide: bool
    limit_bytes: int


def virtual_devices(count: int) -> Target:
    """Returns a target of CPU devices in a separate process."""
    return Target(
        platform="local",
        words=count_text(count, "virtual device"),
        kind="cpu",
        topology="",
        slices=1,
        num_devices=count,
        memory_bytes=0,
    )
