"""Requests to the process that checks a plan, and its start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from whalejax.verification.targets import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRequest:
    """Plan, model and limits of a check.

    Attributes:
        plan: The plan's document.
        target: Virtual CPU devices.
        adapter: The model and its loss, without values.
        optimizer: An optax transformation, or None.
        batch: The global batch, abstract.
        batch_axes: Argument of ``wh.plan``, unchanged.
        samples: Some values of each leaf of the model, and of the batch, or None.
        multiples: Elements of each device along a dimension that is shared, of each
            run.
        seed: Seed of the random numbers.
        wide: Compute in float64 what is in float32.
        limit_bytes: Memory that the process may take.
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
    """Returns a target of so many CPU devices in a process of its own."""
    return Target(
        platform="local",
        words=f"{count} virtual devices",
        kind="cpu",
        topology="",
        slices=1,
        num_devices=count,
        memory_bytes=0,
    )
