"""Saves activations or residuals of micro-batches in flight in a lockstep pipeline.

A stage saves its inputs and recomputes its layers, or it saves the residuals of its
layers. Residuals that do not depend on the stage's inputs are recomputed instead:
parameters, their casts and gathered shards, masks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp

from whalejax import _compat
from whalejax.lowering.pipeline_spmd.stage_body import Carry, OneStage
from whalejax.lowering.pipeline_spmd.ticks import put, where
from whalejax.lowering.spmd.spmd_executor import Sums


Function = Callable[[list[Any], Carry, Any], Carry]
"""Function of a stage. Its arguments are the parameters with differentiated leaves of
the batch, the inputs of the stage, and the number of the micro-batch. It returns the
outputs of the stage."""


class Derivative:
    """The forward pass of a stage's layers, and their backward pass from residuals.

    kept: Abstract values that are saved for each micro-batch: the outputs of the
        stage, then the other residuals.
    """

    def __init__(
        self, function: Function, inputs: Callable[[Any], list[Any]], given: Carry
    ) -> None:
        """Finds the residuals that the derivative reads.

        Args:
            function: The layers of the stage.
            inputs: Function from the number of a micro-batch to the first argument of
                ``function``.
            given: Inputs of the stage, with their shapes and dtypes.
        """
        self._function = function
        self._inputs = inputs
        self._structure: Any = None
        self._given = given
        self._outputs = len(given)
        first_inputs = inputs(0)
        traced = jax.make_jaxpr(self._run)(first_inputs, given, jnp.int32(0))
        jaxpr, _ = _compat.open_jaxpr(traced)
        start = len(jaxpr.invars) - 1 - len(given)
        flags = [start <= i < start + len(given) for i in range(len(jaxpr.invars))]
        moves = _compat.depending(traced, flags)
        first: dict[Any, int] = {}
        self._leaves: list[int | None] = []
        places: list[int] = []
        for i, var in enumerate(jaxpr.outvars):
            if not moves[i] and i >= self._outputs:
                self._leaves.append(None)
                continue
            if i < self._outputs or var not in first:
                first.setdefault(var, len(places))
                places.append(i)
            self._leaves.append(first[var])
        self._places = places
        still = [i for i, place in enumerate(self._leaves) if place is None]
        self._still = _compat.needed(traced, still)
        self.kept = [jaxpr.outvars[i].aval for i in places]

    def _run(self, params: list[Any], given: Any, number: Any) -> list[Any]:
        handed, derivative = jax.vjp(
            lambda params, given: self._function(params, given, number), params, given
        )
        leaves, self._structure = jax.tree.flatten(derivative)
        return [*handed, *leaves]

    def forward(self, given: Carry, number: Any) -> list[Any]:
        """Returns the outputs of the stage, followed by a micro-batch's residuals."""
        forward = self._run(self._inputs(number), given, number)
        return [forward[i] for i in self._places]

    def stage_outputs(self, kept: Sequence[Any]) -> Carry:
        """Returns the outputs of the stage, which its residuals contain."""
        return tuple(kept[: self._outputs])

    def backward(
        self, kept: Sequence[Any], number: Any, cotangents: Carry
    ) -> tuple[list[Any], Carry]:
        """Returns the gradients, and the cotangents of the stage's inputs.

        Args:
            kept: Residuals of the micro-batch.
            number: Number of the micro-batch.
            cotangents: Cotangents of the stage's outputs.
        """
        given = self._inputs(number), self._given, number
        made = iter(self._still(*jax.tree.leaves(given)))
        leaves = [
            next(made) if place is None else kept[place]
            for place in self._leaves[self._outputs :]
        ]
        backward: tuple[list[Any], Carry] = self._structure.unflatten(leaves)(
            cotangents
        )
        return backward


class Inputs:
    """Stash of stage inputs; the backward pass recomputes the layers.

    Attributes:
        empty: Zeros of the stash's shapes for one micro-batch.
    """

    def __init__(self, local: OneStage) -> None:
        """Prepares the stash of one stage."""
        self._local = local
        self.empty = local.nothing()

    def ahead(
        self, kept: Sequence[Any], given: Carry, numbers: Any
    ) -> tuple[Sequence[Any], Carry]:
        """Runs the forward pass of one turn.

        Args:
            kept: Ring buffers of saved values.
            given: Outputs of the previous stage.
            numbers: Micro-batch of each stage, or -1.

        Returns:
            The ring buffers, and the outputs of the stage.
        """
        local = self._local
        mine = numbers[local.stage]
        kept = [put(ring, x, mine) for ring, x in zip(kept, given, strict=True)]
        if local.branches:  # Nothing reads the output of the last stage.
            numbers = numbers.at[-1].set(-1)

        def work() -> Carry:
            return local.constrain_carry(
                local.forward(local.params, given, jnp.maximum(mine, 0))
            )

        return kept, local.chosen(numbers, work, self.empty)

    def behind(
        self, given: Sequence[Any], handed: Carry, number: Any
    ) -> tuple[Sums, Carry]:
        """Returns sums with gradients of a micro-batch, and cotangents of its inputs.

        Args:
            given: Inputs of the stage.
            handed: Cotangents from the next stage.
            number: Number of the micro-batch.
        """
        local, given = self._local, tuple(given)
        if local.branches:
            behind: tuple[Sums, Carry] = jax.lax.cond(
                local.last,
                lambda: self._at_the_end(given, number),
                lambda: self._midway(given, handed, number),
            )
            return behind
        (_, scaled), vjp, sums = jax.vjp(
            lambda inputs, given: local.loss(inputs, given, number),
            local.inputs(number),
            given,
            has_aux=True,
        )
        cotangents = tuple(jnp.where(local.last, 0, x) for x in handed)
        gradients, before = vjp((cotangents, local.last.astype(scaled.dtype)))
        sums = where(local.last, sums)
        return local.with_gradients(sums, gradients), before

    def _at_the_end(self, given: Carry, number: Any) -> tuple[Sums, Carry]:
        local = self._local

        def total(inputs: Sequence[Any], given: Carry) -> tuple[Any, Sums]:
            (_, scaled), sums = local.loss(inputs, given, number)
            return scaled, sums

        inputs = local.inputs(number)
        scaled, vjp, sums = jax.vjp(total, inputs, given, has_aux=True)
        gradients, before = vjp(jnp.ones_like(scaled))
        return local.with_gradients(sums, gradients), before

    def _midway(self, given: Carry, handed: Carry, number: Any) -> tuple[Sums, Carry]:
        local = self._local
        _, vjp = jax.vjp(
            lambda inputs, given: local.forward(inputs, given, number),
            local.inputs(number),
            given,
        )
        gradients, before = vjp(handed)
        return local.with_gradients(local.no_sums(), gradients), before


class Residuals:
    """Stash of a stage's outputs, and of the residuals that depend on its inputs.

    Attributes:
        empty: Zeros of the stash's shapes for one micro-batch.
    """

    def __init__(self, local: OneStage) -> None:
        """Prepares the stash of one stage."""
        self._local = local
        self._derivative = Derivative(local.forward, local.inputs, local.nothing())
        self.empty = [jnp.zeros(x.shape, x.dtype) for x in self._derivative.kept]

    def ahead(
        self, kept: Sequence[Any], given: Carry, numbers: Any
    ) -> tuple[Sequence[Any], Carry]:
        """Runs the forward pass of one turn; see ``Inputs.ahead``."""
        local, derivative = self._local, self._derivative
        mine = numbers[local.stage]

        def work() -> list[Any]:
            return derivative.forward(given, jnp.maximum(mine, 0))

        ahead = local.chosen(numbers, work, self.empty)
        kept = [put(ring, x, mine) for ring, x in zip(kept, ahead, strict=True)]
        return kept, local.constrain_carry(derivative.stage_outputs(ahead))

    def behind(
        self, kept: Sequence[Any], handed: Carry, number: Any
    ) -> tuple[Sums, Carry]:
        """Returns sums with gradients of a micro-batch, and cotangents of its inputs.

        Args:
            kept: Residuals of the micro-batch.
            handed: Cotangents from the next stage.
            number: Number of the micro-batch.
        """
        local, derivative = self._local, self._derivative
        results = derivative.stage_outputs(kept)

        def end() -> tuple[Sums, list[Any], Carry]:
            return local.head(results, number)

        def nothing() -> tuple[Sums, list[Any], Carry]:
            zeros = list(map(jnp.zeros_like, local.others(number)))
            return local.no_sums(), zeros, handed

        if local.branches:
            sums, more, cotangents = jax.lax.cond(local.last, end, nothing)
        else:
            sums, more, cotangents = where(local.last, end(), nothing())
        gradients, before = derivative.backward(kept, number, cotangents)
        others = iter(more)
        gradients = [
            g if i in local.stack.params else g + next(others)
            for i, g in enumerate(gradients)
        ]
        return local.with_gradients(sums, gradients), before


STASHES: Final[Mapping[str, type[Inputs | Residuals]]] = {
    "inputs": Inputs,
    "residuals": Residuals,
}
"""Stash of micro-batches in flight, by its name in plans."""
