"""Computes gradients of a step and losses of a batch with the executor of the plan.

The train step calls this module alone, so it does not depend on executors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from whalejax.capture.layer_scan import stack_of
from whalejax.lowering.pipeline_spmd.lockstep_executor import (
    pipelined_gradients,
    pipelined_losses,
)
from whalejax.lowering.spmd import per_rank, spmd_executor
from whalejax.lowering.spmd.spmd_executor import Program, Sums


def gradients_of(
    program: Program,
    params: Sequence[Any],
    rest: Any,
    batch: Sequence[Any],
    rng: Any,
    step: Any,
    scale: Any = None,
) -> tuple[Sums, Any]:
    """Returns loss and gradients of the global batch, and the new non-trainable state.

    Args:
        program: Loss, optimizer and plan to run.
        params: Flat trained parameters.
        rest: Non-trainable state.
        batch: Flat leaves of the global batch.
        rng: Random key of the run, or None.
        step: Number of finished steps.
        scale: Scale of float16 losses, or None.
    """
    if program.plan.combine != "mean":
        return per_rank.gradients_of(program, params, rest, batch, rng, step, scale)
    if program.plan.stages is None:
        return spmd_executor.gradients_of(
            program, params, rest, batch, rng, step, scale
        )
    stack = stack_of(program.captured)
    return pipelined_gradients(program, stack, params, rest, batch, rng, step, scale)


def losses_of(
    program: Program,
    params: Sequence[Any],
    rest: Any,
    batch: Sequence[Any],
    rng: Any,
    step: Any,
) -> Sums:
    """Returns the summed losses of the global batch, without gradients.

    Args:
        program: Loss, optimizer and plan to run.
        params: Flat trained parameters.
        rest: Non-trainable state.
        batch: Flat leaves of the global batch.
        rng: Random key of the run, or None.
        step: Number of finished steps.
    """
    if program.plan.combine != "mean":
        return per_rank.losses_of(program, params, rest, batch, rng, step)
    if program.plan.stages is None:
        return spmd_executor.losses_of(program, params, rest, batch, rng, step)
    stack = stack_of(program.captured)
    return pipelined_losses(program, stack, params, rest, batch, rng, step)
