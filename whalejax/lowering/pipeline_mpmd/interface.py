"""Interface of the executor that steps, transfers and compilation use."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from jax.sharding import Mesh, NamedSharding

from whalejax.lowering.pipeline_mpmd.stage_programs import VirtualStagePrograms
from whalejax.lowering.spmd.spmd_executor import Program, Sums
from whalejax.lowering.train_state import TrainState
from whalejax.planner.pipeline.program_cut import Division, Value
from whalejax.planner.pipeline.schedules import Schedule
from whalejax.planner.plan.plan import Plan


class StageExecutor(Protocol):
    """Interface of ``stage_programs_executor.StageProgramsExecutor``.

    Attributes:
        plan: Plan of the model.
        plans: Plan of each stage.
        mesh: Mesh of all stages.
        meshes: Mesh of each stage.
        whole: For each stage, the sharding that replicates over all its devices.
        here: Whether this process has devices of each stage.
        division: Division of the loss into virtual stages.
        table: Pipeline schedule: rows of (tick, stage, chunk, micro-batch, action).
        layouts: Shardings of values on each stage.
        moves: Transfers between stages.
        finish: Program at the end of a step.
        program: Loss, optimizer and plan of the model.
    """

    plan: Plan
    plans: tuple[Plan, ...]
    mesh: Mesh
    meshes: list[Mesh]
    whole: list[NamedSharding]
    here: list[bool]
    division: Division
    table: Schedule
    layouts: dict[int, dict[Value, Any]]
    moves: Any
    finish: Any

    @property
    def program(self) -> Program: ...
    @functools.cached_property
    def stages(self) -> TrainState: ...
    @functools.cached_property
    def sites(self) -> Sequence[VirtualStagePrograms]: ...
    @functools.cached_property
    def sums(self) -> Sums: ...
    @functools.cached_property
    def wide_params(self) -> Sequence[Any]: ...
    @functools.cached_property
    def first_batch(self) -> int: ...
    def gradient_aval(self, number: int) -> Any:
        """Returns the abstract sum of gradients by an input of the loss."""
        ...

    @functools.cached_property
    def avals(self) -> Any: ...
    @functools.cached_property
    def zeros(self) -> Sequence[tuple[Callable[[], list[Any]], ...]]: ...
    @functools.cached_property
    def numbers(self) -> Sequence[Any]: ...
    def total(self, values: Sequence[Any]) -> Any:
        """Returns the sum of arrays on one stage."""
        ...

    @functools.cached_property
    def one(self) -> Any: ...
    @functools.cached_property
    def unread(self) -> Any: ...
    def advance_counter(self, number: int, leaf: Any) -> Any:
        """Advances counters in the non-trainable state after a step."""
        ...

    def owner(self, number: int) -> int:
        """Returns the stage that owns an input of the loss."""
        ...

    def input_sharding(self, number: int, stage: int) -> NamedSharding:
        """Returns the sharding of an input of the loss on a stage."""
        ...

    def gradient_sharding(self, number: int, stage: int) -> NamedSharding:
        """Returns the sharding of a gradient on a stage."""
        ...
