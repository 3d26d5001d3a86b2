"""Chooses the runner of a plan and imports it on demand."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from whalejax.lowering.batch_layout import BatchLayout
from whalejax.lowering.runner import OneProgram, Runner
from whalejax.planner.plan.plan import Plan


if TYPE_CHECKING:
    from whalejax.lowering.pipeline_mpmd.compile_only import CompiledStages
    from whalejax.lowering.train_state import TrainState


def runner_of(plan: Plan) -> Callable[..., Runner]:
    """Returns the class that runs a plan."""
    if plan.pipelines:
        from whalejax.lowering.uneven.pipeline_executor import UnevenPipelinesExecutor

        return UnevenPipelinesExecutor
    if plan.stage_plans:
        from whalejax.lowering.pipeline_mpmd.stage_programs_executor import (
            StageProgramsExecutor,
        )

        return StageProgramsExecutor
    if plan.shares:
        from whalejax.lowering.uneven.replica_executor import UnevenReplicasExecutor

        return UnevenReplicasExecutor
    return OneProgram


def evaluator_of(plan: Plan, trains: Any, *given: Any) -> Runner:
    """Returns a runner of the loss with the model in evaluation mode.

    Args:
        plan: Plan that is run.
        trains: Runner that trains.
        given: Arguments of the runner after the plan.
    """
    if plan.stage_plans and not plan.pipelines:
        from whalejax.lowering.pipeline_mpmd.evaluation import StageProgramsEvaluator

        return StageProgramsEvaluator(trains, plan, *given)
    home = {"home": trains} if plan.pipelines else {}
    return runner_of(plan)(plan, *given, **home)


def rehearsal_of(runner: Any, state: TrainState, batch: Any) -> CompiledStages:
    """Compiles the stage programs of a runner, and runs nothing.

    Args:
        runner: Runner of a plan with stage programs.
        state: Abstract state.
        batch: Abstract batch.
    """
    from whalejax.lowering.pipeline_mpmd.compile_only import compile_stages

    return compile_stages(runner, state, batch)


def layout_of(runner: Any, plan: Plan, structure: Any) -> BatchLayout:
    """Returns the layout of a step's batches.

    Args:
        runner: Runner of the step.
        plan: Plan of the step.
        structure: Tree of a batch.
    """
    if plan.pipelines or (plan.shares and not plan.stage_plans):
        layout: BatchLayout = runner.layout(structure)
        return layout
    return BatchLayout(
        structure=structure, leaves=plan.batch, shardings=runner.batch_shardings
    )
