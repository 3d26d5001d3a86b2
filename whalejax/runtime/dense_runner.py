"""The executor of the dense part of a model with tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import optax

from whalejax.adapters.base import Adapter
from whalejax.capture import capture
from whalejax.capture.batch import aval_of
from whalejax.capture.loss_options import as_planned
from whalejax.lowering.train_state import Origin
from whalejax.planner.plan.plan import Plan
from whalejax.runtime.plan_compatibility import (
    check_host_memory,
    check_planned_state,
)
from whalejax.runtime.runner_choice import evaluator_of, runner_of
from whalejax.tables.dense import dense_adapter, dense_batch
from whalejax.tables.recognize import TableProgram


def dense_runner(
    plan: Plan,
    adapter: Adapter,
    program: TableProgram,
    optimizer: optax.GradientTransformation | None,
    devices: Sequence[Any],
    *,
    trains: Any = None,
) -> Any:
    """Returns the executor of a plan of the dense part.

    Args:
        plan: Plan of the dense part.
        adapter: Abstract model.
        program: Loss of the model for the global batch, divided at its lookups.
        optimizer: Optimizer of the dense part, or None.
        devices: Devices of the plan, in node order.
        trains: Executor that trains, if the returned one only evaluates; else None.

    Raises:
        PlanError: The devices lack the plan's host memory, or the optimizer's state
            differs in size from the plan's.
    """
    own = dense_adapter(adapter, program, program.batch)
    check_host_memory(plan, devices[0])
    if trains is None:
        check_planned_state(plan, own, optimizer)
    batch = jax.tree.map(aval_of, dense_batch(program, program.batch))
    # With Adasum, each rank runs the loss on its own samples.
    ranks = 1 if plan.combine == "mean" else plan.axis_sizes["data"]
    count = plan.num_micro_batches * ranks
    captured = as_planned(capture(own, batch, num_micro_batches=count), plan)
    extended = optax.with_extra_args_support(
        optax.identity() if optimizer is None else optimizer
    )
    given = captured, extended, devices, captured.batch_axes, Origin(own)
    if trains is not None:
        return evaluator_of(plan, trains, *given)
    return runner_of(plan)(plan, *given)
