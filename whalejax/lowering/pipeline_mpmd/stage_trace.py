"""Traces one virtual stage of a pipeline: its part of the loss, forward and backward.

Forward and backward pass are traced together. Their program is then divided into two
programs, or three if the schedule splits the backward pass. The first program saves
residuals for the others. Another program for evaluation has the forward pass alone, and
saves nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from whalejax import _compat
from whalejax.adapters.leaves import fold_key
from whalejax.jaxpr.steps import Operand, Step, Steps
from whalejax.lowering.metrics import wide
from whalejax.lowering.micro_batch_rows import MicroBatchRows
from whalejax.lowering.spmd.evaluate import evaluate, named_sharding
from whalejax.lowering.spmd.spmd_executor import Program, sums_of
from whalejax.planner.pipeline.program_cut import PlacePart, Position, Units, Value
from whalejax.planner.sharding.layout import Spec


class _Absent:
    def __repr__(self) -> str:
        return "a value of another stage"


ABSENT = _Absent()


@dataclass(slots=True)
class _StageEquations:
    """Equations of one virtual stage; implements ``evaluate.PartialProgram``."""

    positions: frozenset[Position]
    imports: Mapping[Value, Any]
    wanted: frozenset[Value]
    found: dict[Value, Any] = field(default_factory=dict)

    def runs(self, position: Position) -> bool:
        return position in self.positions

    def imported_value(self, position: Position, slot: int) -> Any:
        return self.imports.get((position, slot), ABSENT)

    def record_result(self, position: Position, slot: int, value: Any) -> None:
        if (position, slot) in self.wanted:
            self.found[position, slot] = value


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualStageSignature:
    """Numbers of a virtual stage's inputs and outputs in its program.

    Attributes:
        params: Numbers of the inputs ``TracedVirtualStage.params``, in order.
        rest: Numbers of the inputs ``TracedVirtualStage.rest``, in order.
        batch: Numbers of the inputs ``TracedVirtualStage.batch``, in order.
        imports: Numbers of the imported values, in the order of the part's imports.
        rng: Number of the run's random key; None without one.
        step: Number of the step.
        number: Number of the micro-batch's index.
        scale: Number of the loss scale; None without one.
        counted: Number of the input that counts earlier micro-batches, for counters.
        cotangents: Numbers of the cotangents of differentiable exports. In the last
            virtual stage, the cotangent of the loss follows.
        exports: Numbers of the exported values, in the order of the part's exports.
        fresh: Numbers of the non-trainable state after the micro-batch, in the order of
            the part's ``fresh``.
        sums: Numbers of total, weight and metrics, flat; empty except in the last
            virtual stage.
        returns: Numbers of the cotangents of differentiable imports.
        gradients: Numbers of the parameters' gradients.
    """

    params: list[int]
    rest: list[int]
    batch: list[int]
    imports: list[int]
    rng: int | None
    step: int
    number: int
    counted: int
    scale: int | None
    cotangents: list[int]
    exports: list[Operand]
    fresh: list[Operand]
    sums: list[Operand]
    returns: list[Operand]
    gradients: list[Operand]


@dataclass(frozen=True, kw_only=True)
class TracedVirtualStage:
    """A traced virtual stage of a pipeline.

    Attributes:
        part: Part of the program that the virtual stage runs.
        params: Numbers of the parameters that it reads, and of batch leaves whose
            gradients a step returns.
        rest: Numbers of the non-trainable leaves that it reads.
        batch: Numbers of the batch leaves that it reads.
        sent: Differentiable exported values.
        received: Differentiable imported values.
        steps: Program of the forward and backward pass.
        names: Numbers of the program's inputs and outputs.
        sums_tree: Structure of ``(total, weight, metrics)``.
    """

    part: PlacePart
    params: tuple[int, ...]
    rest: tuple[int, ...]
    batch: tuple[int, ...]
    sent: tuple[Value, ...]
    received: tuple[Value, ...]
    steps: Steps
    names: VirtualStageSignature
    sums_tree: Any

    @functools.cached_property
    def late(self) -> frozenset[int]:
        """Numbers of the values that the backward pass alone computes or receives."""
        return frozenset(self.steps.depending(self.names.cotangents))

    @functools.cached_property
    def acting(self) -> tuple[Step, ...]:
        """Steps with effects, such as prints, that are not in the backward pass."""
        return tuple(
            step
            for step in self.steps.steps
            if step.equation.effects and self.late.isdisjoint(step.sources)
        )

    @property
    def behind(self) -> list[Operand]:
        return [*self.names.returns, *self.names.gradients]

    @functools.cached_property
    def residuals(self) -> list[int]:
        """Numbers of the residuals that are no inputs of the virtual stage."""
        return self.steps.residual_numbers(self.behind, self.late)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineFacts:
    """Facts that all virtual stages of a pipeline share.

    Attributes:
        units: Units of the loss.
        avals: Abstract values of the loss.
        flows: Differentiable values.
        scales: Whether a loss scale multiplies the cotangent of the loss.
        batch_paths: Paths of the batch's leaves.
    """

    units: Units
    avals: Mapping[Value, Any]
    flows: frozenset[Value]
    scales: bool
    batch_paths: tuple[str, ...] = ()


def place_of(
    program: Program,
    facts: PipelineFacts,
    part: PlacePart,
    layouts: Mapping[Value, Spec],
    *,
    last: bool,
    cuts_batch: bool = True,
) -> TracedVirtualStage:
    """Traces a virtual stage.

    Args:
        program: Program of the stage on which it runs.
        facts: Facts of the pipeline.
        part: Part of the program that the virtual stage runs.
        layouts: Sharding of each imported and exported value.
        last: Whether the virtual stage computes the loss.
        cuts_batch: Whether the virtual stage takes the global batch and slices its
            micro-batch, which is the default. Otherwise it receives the micro-batch.
    """
    return _Tracer(program, facts, part, layouts, last, cuts_batch).place()


class _Tracer:
    def __init__(
        self,
        program: Program,
        facts: PipelineFacts,
        part: PlacePart,
        layouts: Mapping[Value, Spec],
        last: bool,
        cuts_batch: bool,
    ) -> None:
        self.cuts_batch = cuts_batch
        self.program = program
        self.facts = facts
        self.part = part
        self.last = last
        self.layouts = layouts
        adapter = program.adapter
        first = len(adapter.param_paths)
        second = first + len(jax.tree.leaves(adapter.rest))
        self.first_batch, third = second, second + len(program.batch_axes)
        read = {second + n for n in adapter.batch_gradients}
        self.params = [n for n in part.inputs if n < first or n in read]
        self.rest = [n for n in part.inputs if first <= n < second]
        batch = [n for n in part.inputs if second <= n < third]
        self.batch = [n for n in batch if n not in read]
        self.key = third if third in part.inputs else None
        self.stored, self.summed = self._gradient_specs()
        self.received = [v for v in part.imports if v in facts.flows]
        self.sent = [v for v in part.exports if v in facts.flows]
        self.sums_tree: Any = None

    def _gradient_specs(self) -> tuple[list[Spec], list[Spec]]:
        plan, paths = self.program.plan, self.program.adapter.param_paths
        leaves = {leaf.path: leaf for leaf in plan.leaves}
        batch = {leaf.path: leaf.spec for leaf in plan.batch}
        stored: list[Spec] = []
        summed: list[Spec] = []
        for n in self.params:
            if n < len(paths):
                stored.append(leaves[paths[n]].param_spec)
                summed.append(leaves[paths[n]].gradient_spec)
            else:
                spec = batch[self.facts.batch_paths[n - self.first_batch]]
                stored.append(spec)
                summed.append(spec)
        return stored, summed

    def place(self) -> TracedVirtualStage:
        tree: Any
        flat, tree = jax.tree.flatten(self._inputs())
        shape: Any = None

        def joint(*leaves: Any) -> list[Any]:
            nonlocal shape
            results, shape = jax.tree.flatten(self._joint(tree.unflatten(leaves)))
            return list(results)

        steps = Steps.of(_compat.trace(joint, flat))
        into = tree.unflatten(steps.inputs)
        out = shape.unflatten(steps.outputs)
        return TracedVirtualStage(
            part=self.part,
            params=tuple(self.params),
            rest=tuple(self.rest),
            batch=tuple(self.batch),
            sent=tuple(self.sent),
            received=tuple(self.received),
            steps=steps,
            names=VirtualStageSignature(**into, **out),
            sums_tree=self.sums_tree,
        )

    def _aval(self, number: int) -> Any:
        """Returns an abstract input; for a batch leaf to slice, the full leaf."""
        aval, place = self.facts.avals[(), number], number - self.first_batch
        shape = list(aval.shape)
        if self.cuts_batch and 0 <= place < len(self.program.batch_axes):
            axis = self.program.batch_axes[place]
            if axis is not None:
                shape[axis] *= self.program.plan.num_micro_batches
        return _compat.abstract(shape, aval.dtype)

    def _inputs(self) -> dict[str, Any]:
        scalar = _compat.abstract((), jnp.int32)
        cotangents = [self._value(v) for v in self.sent]
        if self.last:
            total = self.facts.units.results[0]
            assert total is not None
            aval = self._value(total)
            cotangents.append(aval)
        return {
            "params": [self._aval(n) for n in self.params],
            "rest": [self._aval(n) for n in self.rest],
            "batch": [self._aval(n) for n in self.batch],
            "imports": [self._value(v) for v in self.part.imports],
            "rng": None if self.key is None else self._aval(self.key),
            "step": scalar,
            "number": scalar,
            "counted": scalar,
            "scale": _compat.abstract((), jnp.float32) if self.facts.scales else None,
            "cotangents": cotangents,
        }

    def _value(self, value: Value) -> Any:
        aval = self.facts.avals[value]
        return _compat.abstract(aval.shape, aval.dtype)

    def _joint(self, given: dict[str, Any]) -> dict[str, Any]:
        scale, imports = (
            given["scale"],
            dict(zip(self.part.imports, given["imports"], strict=True)),
        )

        def ahead(params: list[Any], received: list[Any]) -> tuple[list[Any], Any]:
            handed = {**imports, **dict(zip(self.received, received, strict=True))}
            exports, fresh, sums, total = self._ahead(params, handed, given)
            flowing = [exports[v] for v in self.sent]
            if self.last:
                flowing.append(total)
            return flowing, ([exports[v] for v in self.part.exports], fresh, sums)

        flowing, vjp, (exports, fresh, sums) = jax.vjp(
            ahead,
            given["params"],
            [imports[v] for v in self.received],
            has_aux=True,
        )
        cotangents = list(given["cotangents"])
        if scale is not None and self.last:
            cotangents[-1] = cotangents[-1] * scale.astype(cotangents[-1].dtype)
        gradients, returns = vjp(cotangents)
        if scale is not None:
            gradients = [wide(g) / scale for g in gradients]
        constrain = self.program.constrain
        gradients = constrain(constrain(gradients, self.stored), self.summed)
        return {
            "exports": exports,
            "fresh": fresh,
            "sums": sums,
            "returns": self._constrain_exports(self.received, returns),
            "gradients": [wide(g) for g in gradients],
        }

    def _ahead(
        self, params: list[Any], handed: Mapping[Value, Any], given: dict[str, Any]
    ) -> tuple[dict[Value, Any], list[Any], list[Any], Any]:
        program, units = self.program, self.facts.units
        step, number = given["step"], given["number"]
        values: dict[int, Any] = {
            n: leaf if n < self.first_batch else self._micro_batch(n, leaf, number)
            for n, leaf in zip(self.params, params, strict=True)
        }
        for n, leaf in zip(self.rest, given["rest"], strict=True):
            added = units.counters.get(n)
            if added:
                leaf = leaf + (given["counted"] * added).astype(leaf.dtype)
            values[n] = fold_key(fold_key(leaf, step), number)
        for n, leaf in zip(self.batch, given["batch"], strict=True):
            values[n] = self._micro_batch(n, leaf, number)
        if self.key is not None:
            values[self.key] = fold_key(fold_key(given["rng"], step), number)
        body, _ = _compat.open_jaxpr(program.captured.jaxpr)
        ends = [v for v in units.results if v is not None] if self.last else []
        here = _StageEquations(
            positions=frozenset(units.units[i].position for i in self.part.units),
            imports=handed,
            wanted=frozenset((*self.part.exports, *ends, *self._new_state_values())),
        )
        outputs = evaluate(
            program.captured.jaxpr,
            [values.get(n, ABSENT) for n in range(len(body.invars))],
            program.constraints,
            program.mesh,
            here=here,
        )
        exports = dict(
            zip(
                self.part.exports,
                self._constrain_exports(
                    self.part.exports, [here.found[v] for v in self.part.exports]
                ),
                strict=True,
            )
        )
        fresh = [
            values[v[1]] if v[0] == () else here.found[v]
            for v in self._new_state_values()
        ]
        whole = named_sharding((), program.mesh)  # State is stored so.
        fresh = [jax.lax.with_sharding_constraint(x, whole) for x in fresh]
        if not self.last:
            return exports, fresh, [], None
        total, weight, metrics, _ = program.captured.out_tree.unflatten(outputs)
        sums = sums_of(program, total, weight, metrics, (), number)
        flat, self.sums_tree = jax.tree.flatten((sums.total, sums.weight, sums.metrics))
        return exports, fresh, flat, total

    def _new_state_values(self) -> list[Value]:
        return [self.facts.units.fresh[n] for n in self.part.fresh]

    def _constrain_exports(
        self, values: Sequence[Value], found: Sequence[Any]
    ) -> list[Any]:
        return [
            jax.lax.with_sharding_constraint(
                x, named_sharding(self.layouts[v], self.program.mesh)
            )
            if v in self.layouts
            else x
            for v, x in zip(values, found, strict=True)
        ]

    def _micro_batch(self, number: int, leaf: Any, index: Any) -> Any:
        axis = self.program.batch_axes[number - self.first_batch]
        if axis is None or not self.cuts_batch:
            return leaf
        return MicroBatchRows.of(self.program.plan).take(leaf, axis, index)
