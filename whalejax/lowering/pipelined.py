"""The ``pipeline_spmd`` executor: stages alike in one program, turn by turn.

Every stage holds some layers of a scan over stacked parameters, and all stages run one
loop: in each turn a stage takes one micro-batch forward through its layers and another
one backward, as the rows of the schedule say, and hands results on to its neighbours.
What stands before and behind the layers is computed by all stages and counts on the
first and the last. Of a micro-batch in flight only what a stage was given is kept; its
backward pass computes the layers again. Other mesh axes stay automatic inside. Where
stages have unequal numbers of layers, each takes as many turns of a loop of its own.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from whalejax import _compat, rebuild
from whalejax.capture.stack import Stack
from whalejax.lowering.counted import Turns, counted
from whalejax.lowering.dealt import collected, dealt
from whalejax.lowering.spmd import Program, Sums, micro_batches, sums_of, wide
from whalejax.planner.schedules import Schedule, schedule
from whalejax.planner.shared import STAGE, of_stage


Carry = tuple[Any, ...]


class _Reached(Exception):  # noqa: N818
    """The layers of a stage were run; what stands behind them is not wanted."""


@dataclass(slots=True)
class _Layers:
    """The layers of this stage, in place of all; see ``evaluate.Part``.

    Attributes:
        stack: the scan over all layers.
        counts: how many of them each stage has.
        masked: all stages take equally many turns, because they share collectives.
        stage, last: number of this stage, and whether it is the last.
        given: what the stage before it handed on.
        ends: nothing behind the layers is wanted.
        results: what the layers hand on.
    """

    stack: Stack
    counts: Sequence[int]
    masked: bool
    stage: Any
    last: Any
    given: Carry
    ends: bool
    results: Carry = field(default=())

    @property
    def position(self) -> tuple[int, ...]:
        return self.stack.position

    def through(
        self, equation: Any, values: Sequence[Any], body: rebuild.Body
    ) -> list[Any]:
        parts = _compat.scan_parts(equation)
        first, end = parts.num_consts, parts.num_consts + parts.num_carries
        entering = [
            jnp.where(self.stage == 0, own, handed)
            for own, handed in zip(values[first:end], self.given, strict=True)
        ]
        stacks = [self._own(x) for x in values[end:]]
        self.results = self._run(equation, [*values[:first], *entering, *stacks], body)
        if self.ends:
            raise _Reached
        stacked = equation.outvars[parts.num_carries :]
        unread = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in stacked]
        return [*map(self.beyond, self.results), *unread]

    def _run(self, equation: Any, values: list[Any], body: rebuild.Body) -> Carry:
        """What this stage's layers give."""
        parts, most = _compat.scan_parts(equation), max(self.counts)
        if min(self.counts) == most:
            results = rebuild.scan(equation, values, body, most)
            return tuple(results[: parts.num_carries])
        turns = Turns(
            body=body,
            num_consts=parts.num_consts,
            num_carries=parts.num_carries,
            most=most,
            masked=self.masked,
        )
        return counted(turns, self._of_stage(self.counts), tuple(values))

    def _own(self, stack: Any) -> Any:
        """This stage's slices: of what is no parameter every stage has all."""
        most = max(self.counts)
        if stack.shape[0] == most:
            return stack
        if min(self.counts) < most:  # slices of the last stages end beyond the last
            stack = jnp.concatenate([stack, stack[:most]])
        start = self._of_stage(np.cumsum([0, *self.counts[:-1]]))
        return jax.lax.dynamic_slice_in_dim(stack, start, most, axis=0)

    def _of_stage(self, numbers: Any) -> Any:
        return jnp.asarray(numbers, jnp.int32)[self.stage]

    def beyond(self, value: Any) -> Any:
        """Nothing flows back from behind the layers but on the last stage."""
        dtype = getattr(value, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
            return value
        return _only_where(self.last, value)


@jax.custom_vjp
def _only_where(here: Any, value: Any) -> Any:
    """The value, whose cotangent is zero elsewhere, were it infinite."""
    del here
    return value


_only_where.defvjp(
    lambda here, value: (value, here),
    lambda here, cotangent: (None, jnp.where(here, cotangent, 0)),
)


def turns_of(table: Schedule) -> np.ndarray:
    """A schedule in lockstep: which micro-batch each stage takes in each turn.

    Args:
        table: each stage takes at most one forward and one backward in a turn, and
            what it takes was handed on in the turn before.

    Returns:
        ``int32[turns, stages, 2]``: forward and backward; -1 for none.
    """
    count = 1 + max(map(table.turn, table.rows))
    found = np.full((count, table.num_stages, 2), -1, np.int32)
    for row in table.rows:
        slot = ("forward", "backward").index(row.action)
        found[table.turn(row), row.stage, slot] = row.micro_batch
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Local:
    """One stage's part of the program, inside ``shard_map`` over the stages.

    Attributes:
        program, stack: what runs.
        params: those of this stage.
        stage: number of this stage.
        micro: gives the rest, the flat batch and the key of a micro-batch.
        scale: what the loss is multiplied by before it is differentiated, or None.
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
        """Nothing inside is sharded, so that stages may do different things."""
        sizes = self.program.plan.axis_sizes
        return math.prod(sizes.values()) == sizes[STAGE]

    def layers(self, given: Carry, *, ends: bool) -> _Layers:
        """Those of this stage, from what it was given."""
        return _Layers(
            stack=self.stack,
            counts=_counts(self.program),
            masked=not self.branches,
            stage=self.stage,
            last=self.last,
            given=given,
            ends=ends,
        )

    def nothing(self) -> Carry:
        """What layers hand on, all zero."""
        jaxpr, _ = _compat.open_jaxpr(self.program.captured.jaxpr)
        equation = jaxpr.eqns[self.stack.position[0]]
        carried = equation.outvars[: _compat.scan_parts(equation).num_carries]
        zeros = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in carried]
        return self.laid(zeros)

    def laid(self, carry: Sequence[Any]) -> Carry:
        """What layers hand on, in its layout."""
        program = self.program
        return tuple(program.constrain(carry, program.constraints.carried))

    def forward(self, params: Sequence[Any], given: Carry, number: Any) -> Carry:
        """What the stage hands on of a micro-batch."""
        layers = self.layers(given, ends=True)
        rest, batch, key = self.micro(number)
        with contextlib.suppress(_Reached):
            self.program.loss(params, rest, batch, key, part=layers)
        return layers.results

    def loss(
        self, params: Sequence[Any], given: Carry, number: Any
    ) -> tuple[tuple[Carry, Any], Sums]:
        """What it hands on and the scaled total, and the sums, of a micro-batch.

        Total and sums are those of the last stage.
        """
        layers = self.layers(given, ends=False)
        rest, batch, key = self.micro(number)
        total, (weight, metrics, _) = self.program.loss(
            params, rest, batch, key, part=layers
        )
        sums = sums_of(self.program, total, weight, metrics, ())
        scaled = total if self.scale is None else total * self.scale
        return (layers.results, scaled), sums

    def no_sums(self) -> Sums:
        """Sums of nothing, without gradients."""
        given = self.nothing()
        _, sums = jax.eval_shape(lambda: self.loss(self.params, given, 0))
        zeros: Sums = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), sums)
        return zeros

    def no_gradients(self) -> tuple[Any, ...]:
        """Gradients of nothing."""
        zeros = [jnp.zeros(p.shape, wide(p).dtype) for p in self.params]
        return tuple(self._as_accumulated(zeros))

    def backward(self, given: Carry, handed: Carry, number: Any) -> tuple[Sums, Carry]:
        """Gradients and sums of a micro-batch, and what goes back to the stage before.

        Args:
            given: what the stage was given.
            handed: what came back from the stage behind.
            number: of the micro-batch.
        """
        (_, scaled), vjp, sums = jax.vjp(
            lambda params, given: self.loss(params, given, number),
            self.params,
            given,
            has_aux=True,
        )
        cotangents = tuple(jnp.where(self.last, 0, x) for x in handed)
        gradients, before = vjp((cotangents, self.last.astype(scaled.dtype)))
        sums = _where(self.last, sums)
        return replace(sums, gradients=self._found(gradients)), before

    def backward_branching(
        self, given: Carry, handed: Carry, number: Any
    ) -> tuple[Sums, Carry]:
        """The same; only the last stage computes what stands behind the layers."""

        def end() -> tuple[Sums, Carry]:
            scaled, vjp, sums = jax.vjp(
                self._total(number), self.params, given, has_aux=True
            )
            gradients, before = vjp(jnp.ones_like(scaled))
            return replace(sums, gradients=self._found(gradients)), before

        def middle() -> tuple[Sums, Carry]:
            _, vjp = jax.vjp(
                lambda params, given: self.forward(params, given, number),
                self.params,
                given,
            )
            gradients, before = vjp(handed)
            return replace(self.no_sums(), gradients=self._found(gradients)), before

        found: tuple[Sums, Carry] = jax.lax.cond(self.last, end, middle)
        return found

    def _total(self, number: Any) -> Callable[..., tuple[Any, Sums]]:
        def total(params: Sequence[Any], given: Carry) -> tuple[Any, Sums]:
            (_, scaled), sums = self.loss(params, given, number)
            return scaled, sums

        return total

    def _found(self, gradients: Sequence[Any]) -> tuple[Any, ...]:
        if self.scale is not None:
            gradients = [wide(g) / self.scale for g in gradients]
        return tuple(wide(g) for g in self._as_accumulated(gradients))

    def _as_accumulated(self, gradients: Sequence[Any]) -> list[Any]:
        """Gradients reduced as parameters are stored, then cut as they are kept."""
        leaves, program = self.program.plan.leaves, self.program
        stored = [of_stage(leaf.param_spec) for leaf in leaves]
        kept = [of_stage(leaf.gradient_spec) for leaf in leaves]
        return program.constrain(program.constrain(gradients, stored), kept)


def _where(here: Any, tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.where(here, x, jnp.zeros_like(x)), tree)


def _chosen(numbers: Any, local: _Local, work: Callable[[], Any], idle: Any) -> Any:
    """What some work gives where a stage has a micro-batch for it, else a stand-in.

    Stages part ways only where nothing inside is sharded: where something is, all of
    them do what one of them has to, because they run the same collectives.

    Args:
        numbers: of each stage, its micro-batch, or -1.
        local: this stage.
        work: what it does.
        idle: what stands for it.
    """
    here = numbers[local.stage] >= 0
    if local.branches:
        return jax.lax.cond(here, work, lambda: idle)

    def masked() -> Any:
        return jax.tree.map(lambda x, y: jnp.where(here, x, y), work(), idle)

    return jax.lax.cond(jnp.any(numbers >= 0), masked, lambda: idle)


def pipelined_gradients(
    program: Program,
    stack: Stack,
    params: Sequence[Any],
    rest: Any,
    batch: Sequence[Any],
    rng: Any,
    step: Any,
    scale: Any = None,
) -> tuple[Sums, Any]:
    """Loss and gradients of the global batch, and the rest; see ``gradients_of``.

    Args:
        program: what to run.
        stack: the scan over layers.
        params, rest, batch, rng, step, scale: as there.
    """
    table = _table(program)
    depth = max(table.in_flight)

    def trained(local: _Local) -> Sums:
        branches, stages = local.branches, table.num_stages
        backward = local.backward_branching if branches else local.backward

        def turn(carry: Any, now: Any) -> tuple[Any, None]:
            handed, returned, kept, sums = carry
            ahead, back = now[:, 0], now[:, 1]
            kept = [
                _put(ring, x, ahead[local.stage], depth)
                for ring, x in zip(kept, handed, strict=True)
            ]
            number = jnp.maximum(ahead[local.stage], 0)
            if branches:  # What the last stage hands on nobody takes.
                ahead = ahead.at[stages - 1].set(-1)
            none = local.nothing()
            out = _chosen(
                ahead,
                local,
                lambda: local.laid(local.forward(local.params, handed, number)),
                none,
            )
            first = jnp.maximum(back[local.stage], 0)
            given = tuple(
                jax.lax.dynamic_index_in_dim(ring, first % depth, keepdims=False)
                for ring in kept
            )

            def behind() -> tuple[Sums, Carry]:
                found, before = backward(given, returned, first)
                return jax.tree.map(jnp.add, sums, found), local.laid(before)

            sums, before = _chosen(back, local, behind, (sums, none))
            handed, returned = _handed_on(out, stages), _handed_back(before, stages)
            return (handed, returned, kept, sums), None

        none = local.nothing()
        kept = [jnp.broadcast_to(x, (depth, *x.shape)) for x in none]
        sums = replace(local.no_sums(), gradients=local.no_gradients())
        carry: Any = (none, none, kept, sums)
        (*_, sums), _ = jax.lax.scan(turn, carry, turns_of(table))
        return _summed(sums, stack)

    layers = tuple(_specs_of(len(params), stack))
    outputs = Sums(total=_WHOLE, weight=_WHOLE, metrics=_WHOLE, gradients=layers)
    run = _on_stages(program, stack, trained, outputs)
    sums = run(params, rest, batch, rng, step, scale)
    return sums, _counted(rest, stack, program.plan.num_micro_batches)


_WHOLE = PartitionSpec()


def _handed_on(carry: Carry, stages: int) -> Carry:
    """To the next stage; the first is given zeros."""
    pairs = [(i, i + 1) for i in range(stages - 1)]
    return tuple(jax.lax.ppermute(x, STAGE, pairs) for x in carry)


def _handed_back(carry: Carry, stages: int) -> Carry:
    """To the stage before; the last is given zeros."""
    pairs = [(i + 1, i) for i in range(stages - 1)]
    return tuple(jax.lax.ppermute(x, STAGE, pairs) for x in carry)


def _put(ring: Any, value: Any, number: Any, depth: int) -> Any:
    """Keep what was given of a micro-batch, if it is one."""
    place = jnp.maximum(number, 0) % depth
    before = jax.lax.dynamic_index_in_dim(ring, place, keepdims=False)
    value = jnp.where(number >= 0, value, before)
    return jax.lax.dynamic_update_index_in_dim(ring, value, place, axis=0)


def _summed(sums: Sums, stack: Stack) -> Sums:
    """Sums over the stages: of the loss, and of what all stages have."""
    whole = jax.tree.map(
        lambda x: jax.lax.psum(x, STAGE), (sums.total, sums.weight, sums.metrics)
    )
    gradients = [
        g if i in stack.params else jax.lax.psum(g, STAGE)
        for i, g in enumerate(sums.gradients)
    ]
    total, weight, metrics = whole
    return Sums(total=total, weight=weight, metrics=metrics, gradients=tuple(gradients))


def _specs_of(count: int, stack: Stack) -> list[PartitionSpec]:
    return [PartitionSpec(STAGE) if i in stack.params else _WHOLE for i in range(count)]


def _on_stages(
    program: Program,
    stack: Stack,
    function: Callable[[_Local], Sums],
    outputs: Any,
) -> Callable[..., Sums]:
    """A function of one stage, run by all, from global arrays.

    A micro-batch finds counters as those before it leave them.
    """
    adapter, cut = program.adapter, program.batch_axes

    def run(
        params: Sequence[Any],
        rest: Any,
        batch: Sequence[Any],
        rng: Any,
        step: Any,
        scale: Any,
    ) -> Any:
        at_step = adapter.fold_rest(rest, step)
        rng = None if rng is None else jax.random.fold_in(rng, step)
        parts, whole = micro_batches(program, batch)
        others = [
            x if axis is None else None for x, axis in zip(batch, cut, strict=True)
        ]

        def local(params: list[Any], given: tuple[Any, ...]) -> Sums:
            here: Any = jax.sharding.get_abstract_mesh()  # where stages are manual
            at_step, parts, others, rng, scale = given

            def micro(number: Any) -> tuple[Any, Sequence[Any], Any]:
                key = None if rng is None else jax.random.fold_in(rng, number)
                taken = [
                    jax.lax.dynamic_index_in_dim(x, number, keepdims=False)
                    for x in parts
                ]
                counted = _counted(at_step, stack, number)
                return adapter.fold_rest(counted, number), whole(taken, others), key

            return function(
                _Local(
                    program=replace(program, mesh=here),
                    stack=stack,
                    params=params,
                    stage=jax.lax.axis_index(STAGE),
                    micro=micro,
                    scale=scale,
                )
            )

        mapped = jax.shard_map(
            local,
            mesh=program.mesh,
            in_specs=(_specs_of(len(params), stack), _WHOLE),
            out_specs=outputs,
            axis_names={STAGE},
            check_vma=False,
        )
        given = at_step, parts, others, rng, scale
        return _dealt_out(program, stack, lambda own: mapped(own, given), params)

    return run


def _counted(rest: Any, stack: Stack, number: Any) -> Any:
    """What is not trained, with its counters as so many micro-batches leave them."""
    if not any(stack.advances):
        return rest
    leaves = [
        x + jnp.asarray(number * more, x.dtype) if more else x
        for x, more in zip(jax.tree.leaves(rest), stack.advances, strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(rest), leaves)


def _dealt_out(
    program: Program,
    stack: Stack,
    run: Callable[[list[Any]], Sums],
    params: Sequence[Any],
) -> Sums:
    """What stages make of their parameters, from these as they are stored."""
    counts = _counts(program)
    if min(counts) == max(counts):
        return run(list(params))
    sums = run(dealt(program, stack, params, counts))
    if not sums.gradients:
        return sums
    gradients = collected(program, stack, sums.gradients, counts)
    return replace(sums, gradients=gradients)


def pipelined_losses(
    program: Program,
    stack: Stack,
    params: Sequence[Any],
    rest: Any,
    batch: Sequence[Any],
    rng: Any,
    step: Any,
) -> Sums:
    """The summed losses of the global batch, without gradients; see ``losses_of``.

    Args:
        program: what to run.
        stack: the scan over layers.
        params, rest, batch, rng, step: as there.
    """
    table = _table(program)
    turns = turns_of(table)[: table.num_micro_batches + table.num_stages - 1, :, 0]

    def evaluated(local: _Local) -> Sums:
        def turn(carry: Any, now: Any) -> tuple[Any, None]:
            handed, sums = carry
            ahead = now[local.stage]
            (out, _), found = local.loss(local.params, handed, jnp.maximum(ahead, 0))
            found = _where((ahead >= 0) & local.last, found)
            handed = _handed_on(local.laid(out), table.num_stages)
            return (handed, jax.tree.map(jnp.add, sums, found)), None

        carry = local.nothing(), local.no_sums()
        (_, sums), _ = jax.lax.scan(turn, carry, turns)
        return _summed(sums, stack)

    outputs = Sums(total=_WHOLE, weight=_WHOLE, metrics=_WHOLE, gradients=())
    still = replace(stack, advances=())  # nothing is counted where nothing is trained
    found: Sums = _on_stages(program, still, evaluated, outputs)(
        params, rest, batch, rng, step, None
    )
    return found


def _counts(program: Program) -> tuple[int, ...]:
    """How many layers each stage has."""
    assert program.plan.stages is not None
    return program.plan.stages.layers


def _table(program: Program) -> Schedule:
    plan = program.plan
    assert plan.stages is not None
    return schedule(
        plan.stages.schedule, plan.axis_sizes[STAGE], plan.num_micro_batches
    )
