"""One stage of a lockstep pipeline: its layers, and the parts around them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from whalejax import _compat
from whalejax.capture.layer_scan import Stack
from whalejax.jaxpr import rebuild
from whalejax.lowering.metrics import wide
from whalejax.lowering.pipeline_spmd.dynamic_layers import DynamicLoop, run_dynamic_loop
from whalejax.lowering.pipeline_spmd.ticks import chosen
from whalejax.lowering.spmd.spmd_executor import Program, Sums, sums_of
from whalejax.planner.pipeline.layer_stack import STAGE, of_stage


Carry = tuple[Any, ...]


class _StageLayersDone(Exception):  # noqa: N818
    """Ends the trace after the layers of a stage, whose other parts are not needed."""


@dataclass(slots=True)
class StageLayers:
    """The layers of one stage, in place of all; implements ``ScanReplacement``.

    Attributes:
        stack: Scan over all layers.
        counts: Number of layers of each stage.
        masked: Whether all stages run equal numbers of iterations, because they share
            collectives.
        stage: Number of this stage.
        last: Whether this stage is the last one.
        given: Outputs of the previous stage, or of the layers if ``made``.
        ends: Whether the trace ends after the layers.
        made: Whether ``given`` has the outputs of the layers, which ran before.
        results: Outputs of the layers.
    """

    stack: Stack
    counts: Sequence[int]
    masked: bool
    stage: Any
    last: Any
    given: Carry
    ends: bool
    made: bool = False
    results: Carry = field(default=())

    @property
    def position(self) -> tuple[int, ...]:
        return self.stack.position

    def through(
        self, equation: Any, values: Sequence[Any], body: rebuild.Body
    ) -> list[Any]:
        parts = _compat.scan_parts(equation)
        self.results = (
            self.given if self.made else self._run_layers(equation, values, body)
        )
        if self.ends:
            raise _StageLayersDone
        stacked = equation.outvars[parts.num_carries :]
        unread = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in stacked]
        return [*map(self.after_scan, self.results), *unread]

    def _run_layers(
        self, equation: Any, values: Sequence[Any], body: rebuild.Body
    ) -> Carry:
        parts, most = _compat.scan_parts(equation), max(self.counts)
        first, end = parts.num_consts, parts.num_consts + parts.num_carries
        entering = [
            jnp.where(self.stage == 0, own, handed)
            for own, handed in zip(values[first:end], self.given, strict=True)
        ]
        stacks = [self._stage_slices(x) for x in values[end:]]
        values = [*values[:first], *entering, *stacks]
        if min(self.counts) == most:
            results = rebuild.scan(equation, values, body, most)
            return tuple(results[: parts.num_carries])
        turns = DynamicLoop(
            body=body,
            num_consts=parts.num_consts,
            num_carries=parts.num_carries,
            most=most,
            masked=self.masked,
        )
        return run_dynamic_loop(turns, self._of_stage(self.counts), tuple(values))

    def _stage_slices(self, stack: Any) -> Any:
        """Returns the slices of this stage; an unsharded stack is cut here."""
        most = max(self.counts)
        if stack.shape[0] == most:
            return stack
        if min(self.counts) < most:  # The last slices may be beyond the end.
            stack = jnp.concatenate([stack, stack[:most]])
        start = self._of_stage(np.cumsum([0, *self.counts[:-1]]))
        return jax.lax.dynamic_slice_in_dim(stack, start, most, axis=0)

    def _of_stage(self, numbers: Any) -> Any:
        return jnp.asarray(numbers, jnp.int32)[self.stage]

    def after_scan(self, value: Any) -> Any:
        """Returns a value after the layers, with a gradient on the last stage alone."""
        dtype = getattr(value, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
            return value
        return _only_where(self.last, value)


@jax.custom_vjp
def _only_where(here: Any, value: Any) -> Any:
    """Returns the value; where ``here`` is False its cotangent becomes 0, even inf."""
    del here
    return value


_only_where.defvjp(
    lambda here, value: (value, here),
    lambda here, cotangent: (None, jnp.where(here, cotangent, 0)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OneStage:
    """The part of the program of one stage, inside ``shard_map`` over the stages.

    Attributes:
        program: Loss, optimizer and plan to run.
        stack: Scan over layers.
        params: Parameters of this stage.
        stage: Number of this stage.
        micro: Function from the number of a micro-batch to its non-trainable state,
            flat batch and key.
        scale: Scale of the loss before differentiation, or None.
    """

    program: Program
    stack: Stack
    params: list[Any]
    stage: Any
    micro: Callable[[Any], tuple[Any, Sequence[Any], Any]]
    scale: Any

    @property
    def last(self) -> Any:
        """Whether this is the last stage."""
        return self.stage == self.program.plan.axis_sizes[STAGE] - 1

    @property
    def branches(self) -> bool:
        """Whether stages may run different branches, as nothing inside is sharded."""
        sizes = self.program.plan.axis_sizes
        return math.prod(sizes.values()) == sizes[STAGE]

    def others(self, number: Any) -> list[Any]:
        """Returns ``inputs`` of a micro-batch without the parameters of the layers."""
        inputs = enumerate(self.inputs(number))
        return [x for i, x in inputs if i not in self.stack.params]

    def chosen(self, numbers: Any, work: Callable[[], Any], idle: Any) -> Any:
        """Returns ``work()`` if this stage has a micro-batch, else ``idle``."""
        return chosen(numbers, self.stage, work, idle, branches=self.branches)

    def layers(self, given: Carry, *, ends: bool, made: bool = False) -> StageLayers:
        """Returns this stage's layers, from their inputs or their outputs."""
        return StageLayers(
            made=made,
            stack=self.stack,
            counts=layer_counts(self.program),
            masked=not self.branches,
            stage=self.stage,
            last=self.last,
            given=given,
            ends=ends,
        )

    def nothing(self) -> Carry:
        """Returns zeros of the layers' outputs."""
        jaxpr, _ = _compat.open_jaxpr(self.program.captured.jaxpr)
        equation = jaxpr.eqns[self.stack.position[0]]
        carried = equation.outvars[: _compat.scan_parts(equation).num_carries]
        zeros = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in carried]
        return self.constrain_carry(zeros)

    def constrain_carry(self, carry: Sequence[Any]) -> Carry:
        """Constrains the layers' outputs to their sharding."""
        program = self.program
        return tuple(program.constrain(carry, program.constraints.carried))

    def inputs(self, number: Any) -> list[Any]:
        """Returns what a micro-batch is differentiated by.

        The list has the parameters, and the leaves that the adapter's
        ``batch_gradients`` names.
        """
        _, batch, _ = self.micro(number)
        return [*self.params, *(batch[place] for place in self._read_leaves)]

    @property
    def _read_leaves(self) -> tuple[int, ...]:
        return self.program.adapter.batch_gradients

    def _micro_batch(
        self, inputs: Sequence[Any], number: Any
    ) -> tuple[list[Any], Any, list[Any], Any]:
        """Returns parameters, non-trainable state, flat batch and key.

        ``inputs`` has the parameters, perhaps followed by leaves of the micro-batch.
        """
        rest, batch, key = self.micro(number)
        count = len(self.params)
        read = dict(zip(self._read_leaves, inputs[count:], strict=False))
        leaves = [read.get(place, leaf) for place, leaf in enumerate(batch)]
        return list(inputs[:count]), rest, leaves, key

    def forward(self, inputs: Sequence[Any], given: Carry, number: Any) -> Carry:
        """Returns the outputs of the stage for a micro-batch.

        Args:
            inputs: Result of the method ``inputs``, or parameters alone.
            given: Outputs of the previous stage.
            number: Number of the micro-batch.
        """
        layers = self.layers(given, ends=True)
        params, rest, batch, key = self._micro_batch(inputs, number)
        with contextlib.suppress(_StageLayersDone):
            self.program.loss(params, rest, batch, key, part=layers)
        return layers.results

    def loss(
        self, inputs: Sequence[Any], given: Carry, number: Any, *, made: bool = False
    ) -> tuple[tuple[Carry, Any], Sums]:
        """Returns the outputs, the scaled total and the sums of a micro-batch.

        Total and sums are valid on the last stage alone.

        Args:
            inputs: Result of the method ``inputs``, or parameters alone.
            given: Outputs of the previous stage, or of the layers if ``made``.
            number: Number of the micro-batch.
            made: Whether ``given`` has the outputs of the layers; default False.
        """
        layers = self.layers(given, ends=False, made=made)
        params, rest, batch, key = self._micro_batch(inputs, number)
        total, (weight, metrics, _) = self.program.loss(
            params, rest, batch, key, part=layers
        )
        sums = sums_of(self.program, total, weight, metrics, (), number)
        scaled = total if self.scale is None else total * self.scale
        return (layers.results, scaled), sums

    def head(self, results: Carry, number: Any) -> tuple[Sums, list[Any], Carry]:
        """Runs the part after the layers forward and backward on a micro-batch.

        Args:
            results: Outputs of the layers.
            number: Number of the micro-batch.

        Returns:
            Sums, gradients of ``others``, and cotangents of the results.
        """

        def total(others: Sequence[Any], results: Carry) -> tuple[Any, Sums]:
            given = iter(others)
            params = [
                p if i in self.stack.params else next(given)
                for i, p in enumerate(self.params)
            ]
            inputs = [*params, *given]
            (_, scaled), sums = self.loss(inputs, results, number, made=True)
            return scaled, sums

        others = self.others(number)
        scaled, vjp, sums = jax.vjp(total, others, results, has_aux=True)
        gradients, cotangents = vjp(jnp.ones_like(scaled))
        return sums, gradients, cotangents

    def no_sums(self) -> Sums:
        """Returns zero sums, without gradients."""
        given = self.nothing()
        _, sums = jax.eval_shape(lambda: self.loss(self.params, given, 0))
        zeros: Sums = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), sums)
        return zeros

    def no_gradients(self) -> tuple[Any, ...]:
        """Returns zero gradients."""
        zeros = [jnp.zeros(p.shape, wide(p).dtype) for p in self.params]
        return tuple(self._as_accumulated(zeros))

    def no_batch_gradients(self) -> list[Any]:
        """Returns zero gradients of the leaves of a micro-batch."""
        leaves = self.inputs(0)[len(self.params) :]
        kept = leaves if self.scale is None else map(wide, leaves)
        return self._as_in_batch([jnp.zeros(x.shape, x.dtype) for x in kept])

    def with_gradients(self, sums: Sums, gradients: Sequence[Any]) -> Sums:
        """Returns a micro-batch's sums with its gradients.

        Args:
            sums: Sums without gradients.
            gradients: Gradients by the result of the method ``inputs``.
        """
        if self.scale is not None:
            gradients = [wide(g) / self.scale for g in gradients]
        count = len(self.params)
        by_param = tuple(wide(g) for g in self._as_accumulated(gradients[:count]))
        by_leaf = tuple(self._as_in_batch(gradients[count:]))
        return replace(sums, gradients=by_param, batch_gradients=by_leaf)

    def _as_in_batch(self, leaves: Sequence[Any]) -> list[Any]:
        batch = self.program.plan.batch
        return self.program.constrain(
            leaves, [batch[n].spec for n in self._read_leaves]
        )

    def _as_accumulated(self, gradients: Sequence[Any]) -> list[Any]:
        leaves, program = self.program.plan.trained, self.program
        stored = [of_stage(leaf.param_spec) for leaf in leaves]
        kept = [of_stage(leaf.gradient_spec) for leaf in leaves]
        return program.constrain(program.constrain(gradients, stored), kept)


def layer_counts(program: Program) -> tuple[int, ...]:
    """Returns the number of layers of each stage."""
    assert program.plan.stages is not None
    return program.plan.stages.layers
