"""One replica of a model: the programs that run its micro-batches and its update.

Each replica has the full model and runs full micro-batches, as many as its speed
allows. Programs do not depend on their number, so changed shares compile nothing.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from whalejax.capture.program_units import units_of
from whalejax.lowering.runner import evaluation_of, finished, rest_layouts
from whalejax.lowering.spmd.evaluate import named_sharding
from whalejax.lowering.spmd.spmd_executor import (
    Program,
    Sums,
    differentiator,
    evaluator,
)
from whalejax.lowering.step_runner import Evaluation, Metrics
from whalejax.lowering.train_state import TrainState
from whalejax.lowering.uneven.flat_all_reduce import Buffers
from whalejax.lowering.uneven.moving_statistics import StatisticsReduction
from whalejax.lowering.uneven.replica_timing import told_size


class Replica:
    """The programs of a replica.

    Attributes:
        program: Program with the plan on the replica's devices.
        begin: Function that returns zero sums for ``add``.
        begin_eval: Function that returns zero sums for ``evaluate``.
        add: Function from sums, non-trainable state, ``inputs_of`` the state, a
            micro-batch and its number to sums and non-trainable state.
        pack: Function that returns buffers for the exchange, and a scalar that is ready
            when all buffers are. Its arguments are the sums, the non-trainable state
            before and after, the number of micro-batches that ran here, the number that
            other replicas run later, and ``replica_timing.told_pace``.
        finish: Function from the state and the exchanged buffers to the next state,
            metrics and the paces of all replicas.
        evaluate: Function from sums, ``inputs_of`` the state, a micro-batch and its
            number to sums, without gradients.
        pack_sums: Function from the sums of ``evaluate`` to buffers.
        report: Function from the exchanged buffers of ``pack_sums`` to metrics and
            their weight.
    """

    def __init__(
        self,
        program: Program,
        state: TrainState,
        batch: Sequence[Any],
        *,
        replicas: int,
        slopes: Mapping[int, np.ndarray],
        options: Any,
    ) -> None:
        """Traces the replica for its shapes, and compiles nothing.

        Args:
            program: Loss, optimizer and plan on the replica's mesh.
            state: Abstract state.
            batch: Flat abstract leaves of a micro-batch.
            replicas: Number of replicas.
            slopes: Slopes of moving averages; see ``moving_statistics``.
            options: XLA options of the compiler.
        """
        self.program = program
        first = len(jax.tree.leaves(state.params))
        # Counters of random streams count the micro-batches of all replicas.
        self._counters = {
            number - first: added
            for number, added in units_of(program.captured).counters.items()
        }
        self._untrained = StatisticsReduction(
            slopes=slopes,
            counters=self._counters,
            frozen=program.captured.frozen,
            count=program.plan.num_micro_batches,
            steady=program.captured.steady.leaves,
        )
        self._whole = NamedSharding(program.mesh, PartitionSpec())
        self._jit = functools.partial(jax.jit, compiler_options=options)
        given = (*inputs_of(program, state), batch, jnp.int32(0))
        self._train(given, replicas)
        self._eval(given)

    def _train(self, given: Sequence[Any], replicas: int) -> None:
        mesh, whole = self.program.mesh, self._whole
        shapes, rest = jax.eval_shape(self._one, given[1], *given)
        places = jax.tree.map(lambda _: whole, shapes)
        specs = [leaf.gradient_spec for leaf in self.program.plan.trained]
        gradients = tuple(named_sharding(spec, mesh) for spec in specs)
        places = dataclasses.replace(places, gradients=gradients)
        paces = jax.ShapeDtypeStruct((told_size(replicas),), jnp.float32)
        none = jnp.float32(0.0)
        told = jax.eval_shape(self._contributions, rest, rest, none, none)
        sent = shapes, told, paces
        self._sent: Any = jax.tree.structure(sent)
        others = jax.tree.map(lambda _: whole, (told, paces))
        self._buffers = Buffers(
            mesh, jax.tree.leaves(sent), jax.tree.leaves((places, others))
        )
        self.begin: Callable[[], Sums] = self._jit(
            functools.partial(_zeros, shapes), out_shardings=places
        )
        self.add: Callable[..., tuple[Sums, Any]] = self._jit(
            self._add,
            donate_argnums=0,
            out_shardings=(places, self._rest_places(rest)),
        )
        self.pack: Callable[..., tuple[list[Any], Any]] = self._jit(self._pack)
        self.finish: Callable[..., tuple[TrainState, Metrics, Any]] = self._jit(
            self._finish, donate_argnums=0
        )

    def _rest_places(self, rest: Any) -> Any:
        place = rest_layouts(self.program, self.program.mesh)
        tree: Any = jax.tree.structure(rest)
        return tree.unflatten([place(i) for i in range(tree.num_leaves)])

    def _eval(self, given: Sequence[Any]) -> None:
        shapes = jax.eval_shape(self._loss, *given)
        self._reported: Any = jax.tree.structure(shapes)
        leaves = jax.tree.leaves(shapes)
        self._told_buffers = Buffers(
            self.program.mesh, leaves, [self._whole] * len(leaves)
        )
        self.begin_eval: Callable[[], Sums] = self._jit(
            functools.partial(_zeros, shapes), out_shardings=self._whole
        )
        self.evaluate: Callable[..., Sums] = self._jit(
            self._evaluate, donate_argnums=0, out_shardings=self._whole
        )
        self.pack_sums: Callable[..., list[Any]] = self._jit(
            lambda sums: self._told_buffers.pack(jax.tree.leaves(sums))
        )
        self.report: Callable[..., Evaluation] = self._jit(
            self._report, out_shardings=self._whole
        )

    @property
    def avals(self) -> tuple[list[Any], list[Any]]:
        """The abstract buffers of ``pack``, and of ``pack_sums``."""
        return self._buffers.avals, self._told_buffers.avals

    # Micro-batches.

    def _one(
        self,
        rest: Any,
        params: Any,
        before: Any,
        rng: Any,
        step: Any,
        scale: Any,
        batch: Sequence[Any],
        number: Any,
    ) -> tuple[Sums, Any]:
        flat = jax.tree.leaves(params)
        run = differentiator(self.program, flat, before, rng, step, scale)
        return run(self._advance_counters(before, rest, number), batch, number)

    def _add(self, sums: Sums, rest: Any, *given: Any) -> tuple[Sums, Any]:
        added, rest = self._one(rest, *given)
        return jax.tree.map(jnp.add, sums, added), rest

    def _advance_counters(self, before: Any, rest: Any, number: Any) -> Any:
        structure: Any = jax.tree.structure(rest)
        leaves = jax.tree.leaves(rest)
        for i, old in enumerate(jax.tree.leaves(before)):
            if i in self._counters:
                leaves[i] = old + jnp.asarray(number * self._counters[i], old.dtype)
        return structure.unflatten(leaves)

    def _loss(
        self,
        params: Any,
        rest: Any,
        rng: Any,
        step: Any,
        scale: Any,
        batch: Sequence[Any],
        number: Any,
    ) -> Sums:
        del scale
        run = evaluator(self.program, jax.tree.leaves(params), rest, rng, step)
        return run(number, batch)

    def _evaluate(self, sums: Sums, *given: Any) -> Sums:
        added: Sums = jax.tree.map(jnp.add, sums, self._loss(*given))
        return added

    # Reduction over replicas, and the update.

    def _pack(
        self, sums: Sums, before: Any, rest: Any, ran: Any, later: Any, paces: Any
    ) -> tuple[list[Any], Any]:
        sent = sums, self._contributions(before, rest, ran, later), paces.max(0)
        return self._buffers.pack(jax.tree.leaves(sent)), sums.weight

    def unpack(self, buffers: Sequence[Any]) -> Sums:
        """Returns the sums in the buffers of ``pack``."""
        sums: Sums = self._sent.unflatten(self._buffers.unpack(buffers))[0]
        return sums

    def _finish(
        self, state: TrainState, buffers: Sequence[Any]
    ) -> tuple[TrainState, Metrics, Any]:
        sums, told, paces = self._sent.unflatten(self._buffers.unpack(buffers))
        rest = self._after(state.rest, told)
        return *finished(self.program, state, sums, rest), paces

    def _contributions(self, before: Any, rest: Any, ran: Any, later: Any) -> list[Any]:
        pairs = zip(jax.tree.leaves(before), jax.tree.leaves(rest), strict=True)
        return [
            self._untrained.contribution(i, old, new, ran, later)
            for i, (old, new) in enumerate(pairs)
            if not self._untrained.is_own(i, old)
        ]

    def _after(self, before: Any, told: Sequence[Any]) -> Any:
        structure: Any = jax.tree.structure(before)
        sums, result = iter(told), []
        for i, old in enumerate(jax.tree.leaves(before)):
            total = None if self._untrained.is_own(i, old) else next(sums)
            result.append(self._untrained.after(i, old, total))
        return structure.unflatten(result)

    def _report(self, buffers: Sequence[Any]) -> Evaluation:
        sums = self._reported.unflatten(self._told_buffers.unpack(buffers))
        return evaluation_of(self.program, sums)


def inputs_of(program: Program, state: TrainState) -> tuple[Any, ...]:
    """Returns the parts of a state that a micro-batch reads.

    They are parameters, non-trainable state, key, step and loss scale.

    Args:
        program: Loss, optimizer and plan to run.
        state: State, real or abstract.
    """
    rng = state.rng if program.adapter.takes_rng else None
    scale = None if state.loss_scale is None else state.loss_scale.scale
    return state.params, state.rest, rng, state.step, scale


def _zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
