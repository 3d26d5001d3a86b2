"""The programs of one stage: stateless, compiled for one device, from the staged job.

The forward program maps parameters and inputs to exports. The backward program takes
cotangents too. It recomputes the forward pass, so it may run on a peer that did not run
that pass. The update runs in rounds. Between them stages broadcast numbers, such as
their parts of a norm over all gradients.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from whalejax.jaxpr.steps import FixedValue, Operand
from whalejax.lowering.global_arrays import raw_array
from whalejax.swarm_runtime.staged_job import StagedJob


@dataclass(frozen=True, slots=True, kw_only=True)
class StageState:
    """State of a stage's peers at the beginning of a step.

    Attributes:
        step: Number of completed steps.
        leaves: Arrays on the device, in the order of ``StagedJob.leaf_numbers``.
        late: With delayed updates, the parameters before the last completed step's
            update, with which the next step is computed. Empty without delayed updates.
    """

    step: int
    leaves: tuple[Any, ...]
    late: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardResult:
    """Results of a micro-batch's backward pass.

    Attributes:
        sums: Flat total, weight and metrics of the loss; empty before the last stage.
        returns: Cotangents of the imports.
        gradients: Gradients of the stage's own parameters, in order.
    """

    sums: tuple[np.ndarray, ...]
    returns: tuple[np.ndarray, ...]
    gradients: tuple[np.ndarray, ...]


class StagePrograms:
    """Programs of one stage.

    Attributes:
        number: Number of the stage.
        last: Whether the stage computes the loss.
        place: Traced part of the stage.
        numbers: Numbers of the flat state leaves of the stage.
        params: Numbers of the stage's own parameters.
    """

    def __init__(self, cut: StagedJob, number: int) -> None:
        """Traces the stage; compiles nothing yet."""
        self.cut, self.number = cut, number
        self.last = number == cut.stages - 1
        self.place = cut.place(number)
        self.numbers = cut.leaf_numbers(number)
        self._at = {n: i for i, n in enumerate(self.numbers)}
        self.params = [n for n in range(cut.params) if cut.owner(n) == number]

    # State.

    def init_state(self) -> StageState:
        """Returns the initial state of a run."""
        leaves = tuple(self._init_leaves(jax.random.key(self.cut.seed)))
        return StageState(step=0, leaves=leaves, late=self.late_of(leaves))

    def late_of(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the parameters that the next state stores as previous ones."""
        if not self.cut.delayed_updates:
            return ()
        return tuple(leaves[self._at[n]] for n in self.params)

    def at(self, state: StageState, step: int) -> StageState:
        """Returns the state for the computation of a step.

        Args:
            state: State of the peer.
            step: Step of the state, or with delayed updates also the next step. With
                them, each step computes without the update of the step before it.
        """
        leaves = list(state.leaves)
        if step == state.step:
            for number, leaf in zip(self.params, state.late, strict=False):
                leaves[self._at[number]] = leaf
        return StageState(step=step, leaves=tuple(leaves))

    @functools.cached_property
    def _init_leaves(self) -> Any:
        return jax.jit(self.cut.init_function(self.number))

    def raw(self, state: StageState) -> list[np.ndarray]:
        """Returns a state as NumPy arrays; random keys become their data."""
        return [np.asarray(raw_array(x)) for x in (*state.leaves, *state.late)]

    def typed(self, arrays: Sequence[np.ndarray], step: int) -> StageState:
        """Returns a state from NumPy arrays."""
        leaves = self.cut.typed(self.number, arrays)
        late = [jnp.array(x, copy=True) for x in arrays[len(self.numbers) :]]
        return StageState(step=step, leaves=tuple(leaves), late=tuple(late))

    # Micro-batches.

    @functools.cached_property
    def imports(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the imports."""
        avals = [self.cut.avals[v] for v in self.place.part.imports]
        return [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]

    @functools.cached_property
    def gradients(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the gradients."""
        steps, names = self.place.steps, self.place.names
        made = dict(zip(self.place.params, names.gradients, strict=True))
        avals = jax.tree.leaves(self.cut.abstract.params)
        return [
            steps.aval_of(made[n])
            if n in made
            else jax.ShapeDtypeStruct(avals[n].shape, jnp.float32)
            for n in self.params
        ]

    def forward(
        self,
        state: StageState,
        number: int,
        batch: Sequence[np.ndarray],
        imports: Sequence[np.ndarray],
    ) -> list[np.ndarray]:
        """Returns the exported values of a micro-batch."""
        values = self._values(state, number, batch, imports)
        reads, program = self._forward
        return [np.asarray(x) for x in program([values[n] for n in reads])]

    def backward(
        self,
        state: StageState,
        number: int,
        batch: Sequence[np.ndarray],
        imports: Sequence[np.ndarray],
        cotangents: Sequence[np.ndarray],
    ) -> BackwardResult:
        """Recomputes the forward pass, and returns gradients and cotangents.

        Args:
            state, number, batch, imports: Arguments of ``forward``, unchanged.
            cotangents: Cotangents of the differentiable exports.
        """
        values = self._values(state, number, batch, imports)
        names = self.place.names
        result: list[Any] = [*cotangents]
        if self.last:
            result.append(
                np.ones((), self.place.steps.avals[names.cotangents[-1]].dtype)
            )
        values.update(zip(names.cotangents, result, strict=True))
        reads, program = self._backward
        results = [np.asarray(x) for x in program([values[n] for n in reads])]
        first, second = len(names.sums), len(names.sums) + len(names.returns)
        made = dict(zip(self.place.params, results[second:], strict=True))
        return BackwardResult(
            sums=tuple(results[:first]),
            returns=tuple(results[first:second]),
            gradients=tuple(
                made[n] if n in made else np.zeros(aval.shape, aval.dtype)
                for n, aval in zip(self.params, self.gradients, strict=True)
            ),
        )

    def _values(
        self,
        state: StageState,
        number: int,
        batch: Sequence[np.ndarray],
        imports: Sequence[np.ndarray],
    ) -> dict[int, Any]:
        place, names, cut = self.place, self.place.names, self.cut
        # The inputs of the loss are the first leaves of the state.
        values: dict[int, Any] = {
            at: state.leaves[self._at[n]]
            for n, at in zip(
                (*place.params, *place.rest),
                (*names.params, *names.rest),
                strict=True,
            )
        }
        others = cut.params + cut.rest
        values.update(
            (at, batch[n - others])
            for n, at in zip(place.batch, names.batch, strict=True)
        )
        values.update(zip(names.imports, imports, strict=True))
        values[names.step] = np.int32(state.step)
        values[names.number] = values[names.counted] = np.int32(number)
        if names.rng is not None:
            values[names.rng] = state.leaves[self._at[self._rng]]
        return values

    @functools.cached_property
    def _rng(self) -> int:
        """Number of the run's random key among the leaves of the state."""
        tree: Any = jax.tree.structure(self.cut.abstract)
        number: int = tree.unflatten(range(tree.num_leaves)).rng
        return number

    @functools.cached_property
    def _forward(self) -> tuple[tuple[int, ...], Any]:
        return self._program("forward", self.place.names.exports, ())

    @functools.cached_property
    def _backward(self) -> tuple[tuple[int, ...], Any]:
        names = self.place.names
        gives = [*names.sums, *names.returns, *names.gradients]
        return self._program("backward", gives, names.cotangents)

    def _program(
        self, name: str, gives: Sequence[Operand], more: Sequence[int]
    ) -> tuple[tuple[int, ...], Any]:
        steps = self.place.steps
        _, reads = steps.needed(gives, {*steps.inputs, *more})

        def part(values: Sequence[Any]) -> list[Any]:
            return steps.run(gives, dict(zip(reads, values, strict=True)))

        part.__name__ = f"{name}_{self.number}"
        return tuple(reads), jax.jit(part)

    # The end of a step.

    def update(
        self,
        state: StageState,
        sums: Sequence[np.ndarray],
        gradients: Sequence[np.ndarray],
    ) -> StageUpdate:
        """Starts the update at the end of a step.

        Args:
            state: State at the beginning of the step.
            sums: Flat total, weight and metrics of all micro-batches.
            gradients: Gradients summed over all micro-batches.
        """
        return StageUpdate(self, state, sums, gradients)

    @functools.cache  # noqa: B019 A stage lives as long as its holder.
    def round(self, level: int) -> tuple[tuple[int, ...], tuple[int, ...], Any]:
        """Returns the numbers of a round's inputs and outputs, and its program."""
        update, group = self.cut.update, (level, self.number)
        parting = update.parting
        reads = tuple(parting.reads.get(group, ()))
        gives = tuple(
            dict.fromkeys((*parting.gives.get(group, ()), *self.tells(level)))
        )

        def part(values: Sequence[Any]) -> list[Any]:
            return update.steps.run(gives, dict(zip(reads, values, strict=True)))

        part.__name__ = f"update_{self.number}_{level}"
        return reads, gives, jax.jit(part)

    def tells(self, level: int) -> tuple[int, ...]:
        """Returns the numbers of the values that the stage broadcasts after a round."""
        return self.cut.broadcast_values(level, self.number)


class StageUpdate:
    """The update of one stage at the end of a step, in rounds."""

    def __init__(
        self,
        stage: StagePrograms,
        state: StageState,
        sums: Sequence[np.ndarray],
        gradients: Sequence[np.ndarray],
    ) -> None:
        """Prepares the update of ``StagePrograms.update``; runs nothing yet."""
        self._stage, self._state = stage, state
        inputs = stage.cut.update.steps.inputs
        owned = dict(zip(stage.params, gradients, strict=True))
        first = len(jax.tree.leaves(stage.cut.abstract))
        self._values: dict[int, Any] = {
            inputs[n]: leaf for n, leaf in zip(stage.numbers, state.leaves, strict=True)
        }
        second = first + len(sums)
        self._values.update(zip(inputs[first:second], sums, strict=True))
        self._values.update((inputs[second + n], x) for n, x in owned.items())

    def run(self, level: int, heard: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
        """Runs one round; returns the values that the stage broadcasts.

        Args:
            level: Number of the round, from 0.
            heard: Values that other stages sent after earlier rounds.
        """
        self._values.update(heard)
        reads, gives, program = self._stage.round(level)
        result = program([self._values[n] for n in reads]) if gives else []
        self._values.update(zip(gives, result, strict=True))
        return {n: np.asarray(self._values[n]) for n in self._stage.tells(level)}

    def finished(self) -> StageState:
        """Returns the state after the step, when all rounds have run."""
        stage, update = self._stage, self._stage.cut.update
        made = dict(zip(update.outputs, update.steps.outputs, strict=True))
        leaves = []
        for number, before in zip(stage.numbers, self._state.leaves, strict=True):
            operand = made.get(number)
            if operand is None:
                leaves.append(self._advance_counter(number, before))
            elif isinstance(operand, FixedValue):
                leaves.append(jnp.asarray(operand.value))
            else:
                leaves.append(self._values[operand])
        return StageState(
            step=self._state.step + 1,
            leaves=tuple(leaves),
            late=stage.late_of(self._state.leaves),
        )

    def _advance_counter(self, number: int, leaf: Any) -> Any:
        """Advances counters in the non-trainable state after a step."""
        cut = self._stage.cut
        each = cut.division.units.counters.get(number)
        if each is None:
            return leaf
        return leaf + jnp.asarray(each * cut.count, leaf.dtype)


_READYING = threading.Lock()


def ready_stage(cut: StagedJob, number: int) -> StagePrograms:
    """Returns a compiled stage, which all peers of this process share."""
    with _READYING:
        known: dict[int, StagePrograms] = cut.ready
        if number not in known:
            stage = StagePrograms(cut, number)
            warm_up(stage)
            known[number] = stage
        return known[number]


def warm_up(stage: StagePrograms) -> None:
    """Compiles the programs of a step by running them on zeros."""
    cut = stage.cut
    nothing = [np.zeros(x.shape, x.dtype) for x in cut.raw_avals(stage.number)]
    state = stage.typed(nothing, 0)
    first = cut.params + cut.rest
    batch: list[Any] = [None] * len(cut.program.batch_axes)
    for n in stage.place.batch:
        aval = cut.avals[(), n]
        batch[n - first] = np.zeros(aval.shape, aval.dtype)
    imports = [np.zeros(a.shape, a.dtype) for a in stage.imports]
    cotangents = [
        np.zeros(cut.avals[v].shape, cut.avals[v].dtype) for v in stage.place.sent
    ]
    if not stage.last:
        stage.forward(state, 0, batch, imports)
    stage.backward(state, 0, batch, imports, cotangents)
    sums = [np.ones(a.shape, a.dtype) for a in cut.flat_sums]
    gradients = [np.zeros(a.shape, a.dtype) for a in stage.gradients]
    update, steps = stage.update(state, sums, gradients), cut.update.steps
    heard: dict[int, np.ndarray] = {}
    for level in range(cut.update.rounds):
        update.run(level, heard)
        told = [
            n for other in range(cut.stages) for n in cut.broadcast_values(level, other)
        ]
        avals = [steps.avals[n] for n in told]
        ones = [np.ones(a.shape, a.dtype) for a in avals]
        heard = dict(zip(told, ones, strict=True))
    update.finished()
