"""Divides a program over the arrays of several stages among the stages.

An operation runs on the stage of its arrays, or on the stage of its scalars if it has
no arrays. Scalars that other stages read are broadcast. Operations on scalars of
several stages run on all stages. The partition needs no devices, so a plan can be
refused early.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from whalejax import _compat
from whalejax.adapters.base import Adapter
from whalejax.capture.batch_independent_state import BatchIndependentState
from whalejax.jaxpr.steps import FixedValue, Operand, Step, Steps
from whalejax.lowering.optimizer_state import kin_of
from whalejax.lowering.spmd.spmd_executor import stepping
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan_errors import PlanError


Owner = int | None
"""Number of a stage; None for a value that every stage has or can compute."""

Group = tuple[int, int]
"""A part of the program: the number of broadcasts before it, and its stage."""

_BEFORE = -1
"""Level of inputs, and of values that every stage computes from common inputs."""


class UpdatePartition:
    """A program divided into parts.

    Attributes:
        owners: Stage that owns each value.
        levels: Number of broadcasts before each value is known. It is -1 for inputs,
            and for values that every stage computes from inputs that all stages have.
        gives: Values that each part computes for other parts of its stage, or for the
            outputs.
        tells: Scalars that each part broadcasts.
        reads: Values that each part reads.
    """

    def __init__(
        self,
        steps: Steps,
        inputs: Sequence[Owner],
        outputs: Sequence[Owner],
        *,
        stages: int,
        meshes: Sequence[Any] = (),
        few_rounds: bool = False,
    ) -> None:
        """Divides the program among the stages.

        Args:
            steps: Program over all stages.
            inputs: Owners of the inputs.
            outputs: Owners of the outputs.
            stages: Number of stages.
            meshes: Mesh of each stage. An operation with a sharding on one of them runs
                on that stage.
            few_rounds: Whether every stage computes an operation on a scalar that all
                stages have after a broadcast, even if its other scalars are of one
                stage. A running sum over the stages then needs a single broadcast, of
                more scalars. Default False.

        Raises:
            PlanError: An operation takes arrays of several stages, or an output is an
                array of another stage.
        """
        self._steps = steps
        self._stages = stages
        self._few_rounds = few_rounds
        self._meshes = list(meshes)
        self._inputs = set(steps.inputs)
        self._outputs: list[tuple[Operand, Owner]]
        self._outputs = [*zip(steps.outputs, outputs, strict=True)]
        self.owners: dict[int, Owner] = dict(zip(steps.inputs, inputs, strict=True))
        self.levels: dict[int, int] = dict.fromkeys(self._inputs, _BEFORE)
        for step in steps.steps:
            self._place(step)
        self.gives: dict[Group, dict[int, None]] = defaultdict(dict)
        self.tells: dict[Group, dict[int, None]] = defaultdict(dict)
        self.reads = self._cut()

    def is_given(self, operand: int, owner: Owner) -> bool:
        """Returns whether an output is an input on the requested stage."""
        return operand in self._inputs and self.owners[operand] == owner

    def _place(self, step: Step) -> None:
        owner = self._owner(step)
        level = max(
            (self._rounds_until_known(n, owner) for n in step.sources), default=_BEFORE
        )
        if owner is not None:
            level = max(level, 0)
        for number in step.writes:
            self.owners[number], self.levels[number] = owner, level

    def _rounds_until_known(self, number: int, owner: Owner) -> int:
        """Returns the number of broadcasts until a stage (or all: None) has a value."""
        return self.levels[number] + (self.owners[number] not in (None, owner))

    def _owner(self, step: Step) -> Owner:
        laid = self._mesh_owner(step)
        if laid is not None:
            return laid
        arrays = {self.owners[n] for n in step.sources if self._steps.avals[n].shape}
        arrays.discard(None)
        if len(arrays) > 1:
            raise _joins(step.equation.primitive.name)
        if arrays:
            return arrays.pop()
        if self._few_rounds and any(
            self.owners[n] is None and self.levels[n] > _BEFORE for n in step.sources
        ):
            return None
        numbers = {self.owners[n] for n in step.sources} - {None}
        return numbers.pop() if len(numbers) == 1 else None

    def _mesh_owner(self, step: Step) -> Owner:
        mesh = getattr(step.equation.params.get("sharding"), "mesh", None)
        return self._meshes.index(mesh) if mesh in self._meshes else None

    def _cut(self) -> dict[Group, list[int]]:
        stages = range(self._stages)
        for operand, owner in self._outputs:
            if isinstance(operand, FixedValue) or self.is_given(operand, owner):
                continue
            for stage in stages if owner is None else (owner,):
                level = max(0, self._rounds_until_known(operand, stage))
                self.gives[level, stage][operand] = None
        reads: dict[Group, list[int]] = {}
        top = max((level for level, _ in self.gives), default=_BEFORE)
        for level in range(top, _BEFORE - 1, -1):
            for stage in stages:
                self._cut_part((level, stage), reads)
        return reads

    def _cut_part(self, group: Group, reads: dict[Group, list[int]]) -> None:
        level, stage = group
        wanted = [*self.gives.get(group, ()), *self.tells.get(group, ())]
        if not wanted:
            return
        others = {
            n
            for n, owner in self.owners.items()
            if owner is not None and (self.levels[n], owner) != group
        }
        _, reads[group] = self._steps.needed(wanted, {*self._inputs, *others})
        for number in reads[group]:
            owner = self.owners[number]
            if owner is None:
                continue
            home = self.levels[number], owner
            if owner != stage:
                if self._steps.avals[number].shape:
                    raise _joins("a result that all stages hold")
                self.tells[home][number] = None
            elif number not in self._inputs:
                self.gives[home][number] = None


def check_update(
    plan: Plan,
    adapter: Adapter,
    optimizer: optax.GradientTransformation,
    steady: BatchIndependentState,
) -> None:
    """Refuses an update that stage programs cannot run.

    Args:
        plan: Plan; nothing is refused if it cannot run or has no stage programs.
        adapter: Adapter of the model.
        optimizer: Optimizer that updates the model.
        steady: Non-trainable state that changes once a step.

    Raises:
        PlanError: An operation takes arrays of several stages.
    """
    if plan.stages is None or not plan.stage_plans or not plan.runnable:
        return
    stages = len(plan.stages.plans)
    homes = {
        leaf.path: number
        for number, own in reversed([*enumerate(plan.stages.plans)])
        for leaf in own.leaves
    }
    owners = [homes.get(path, 0) for path in adapter.param_paths]
    _check_steady(steady, adapter, owners, stages)
    params = jax.tree.map(lambda x: _compat.abstract(x.shape, x.dtype), adapter.params)
    extended = optax.with_extra_args_support(optimizer)
    state = jax.eval_shape(extended.init, params)
    flat, leaves = jax.tree.leaves(params), jax.tree.leaves(state)
    related = kin_of(state, adapter.param_paths)
    held = [None if n is None else owners[n] for n in related]
    step = stepping(
        extended, jax.tree.structure(params), jax.tree.structure(state), skips=False
    )
    scalars = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((), bool)
    traced = jax.make_jaxpr(lambda *values: step(values))
    last = stages - 1
    UpdatePartition(
        Steps.of(traced(*flat, *flat, *leaves, *scalars)),
        [*owners, *owners, *held, last, None],
        [*owners, *held],
        stages=stages,
    )


def _check_steady(
    steady: BatchIndependentState, adapter: Adapter, owners: Sequence[int], stages: int
) -> None:
    if steady.advance is None:
        return
    homes = steady.homes(owners)
    rest = [homes.get(i) for i in range(len(adapter.rest_paths))]
    avals = [_compat.abstract(a.shape, a.dtype) for a in steady.avals]
    others = [None] * (len(avals) - len(owners) - len(rest))
    try:
        UpdatePartition(
            Steps.of(jax.make_jaxpr(steady.advance)(*avals)),
            [*owners, *rest, *others],
            [rest[i] for i in steady.leaves],
            stages=stages,
        )
    except PlanError as error:
        paths = ", ".join(adapter.rest_paths[i] for i in homes)
        raise PlanError(
            f"a step changes {paths} depending on parameters, with an operation on "
            "arrays of several stages. Make each such array from parameters of one "
            "stage (numbers, such as norms, may be of all), or leave the axis stage out"
        ) from error


def _joins(what: str) -> PlanError:
    return PlanError(
        "this optimizer combines parameters, gradients or state of several stages in "
        f"one operation ({what}). Wrappers that choose between updates or flatten "
        "the tree do this. Use an optimizer that updates leaf by leaf (norms over all "
        "leaves are allowed), or leave the axis stage out"
    )
